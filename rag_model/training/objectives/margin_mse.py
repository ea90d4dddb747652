"""MarginMSE: train a bi-encoder on score margins of a cross-encoder (Hofstätter et al. 2020)."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

import torch
from torch import Tensor

from rag_model.encoders.architecture import Architecture
from rag_model.resources import estimate_weight_bytes
from rag_model.training.data.batches import (
    IncompletePolicy,
    ListBatch,
    add_teacher_scores,
    build_list_batch,
)
from rag_model.training.data.negatives import NegativesRecipe, sample_passages
from rag_model.training.loop.loop_settings import LoopSettings, check_bounds
from rag_model.training.loop.task import Measures
from rag_model.training.objectives.losses import margin_mse_loss, mean_over_processes, pad_lists
from rag_model.training.objectives.objective import (
    Examples,
    Job,
    ModelDescription,
    TrainingCosts,
)
from rag_model.training.objectives.task_bases import (
    BiEncoder,
    ListTask,
    MiningObjective,
    PairRecipe,
    count_teacher_operations,
    estimate_pair_costs,
    load_teacher,
)
from rag_model.training.origins import TEACHER

GoalName = Literal["average_rank", "loss", "Success@20"]
LOOP = LoopSettings(epochs=25, learning_rate=7e-6, schedule="constant", warmup_share=0.0)
"""The gradient norm at which gradients are clipped is the default of `LoopSettings`."""


@dataclass(frozen=True, slots=True)
class MarginMseRecipe(PairRecipe):
    """Settings of MarginMSE. "Code" is matchmaker, "paper" is Hofstätter et al. 2020."""

    # number of questions per batch and process; code: batch_size_train 32
    batch_size: int = 32
    # number of negatives per question, drawn in each epoch from the `scored` negatives; 1 drawn
    # negative instead of the fixed triples of a file, because negatives are mined
    negatives: int = 1
    scored: int = 8  # number of the hardest negatives per question that the teacher scores
    # what to do with examples without a positive or a negative passage: drop them, or refuse the
    # file
    missing: IncompletePolicy = "drop"
    # dev measure that selects the best weights; the benchmark's measure is not a choice, because
    # every evaluation would have to encode the whole corpus
    goal: GoalName = "average_rank"

    def __post_init__(self) -> None:
        check_bounds(self, "[margin_mse]", {"batch_size": 1, "negatives": 1, "scored": 1}, ["temperature"])


@dataclass(frozen=True, slots=True)
class MarginMseTraining:
    """Settings of a MarginMSE training."""

    # code: github.com/sebastian-hofstaetter/matchmaker, config/train/defaults.yaml;
    # schedule = "constant" instead of a rate that is lowered when the dev measure stagnates,
    # because a run can resume exactly only if the rate depends only on the step
    loop: LoopSettings = LOOP
    margin_mse: MarginMseRecipe = field(default_factory=MarginMseRecipe)
    negatives: NegativesRecipe = field(default_factory=NegativesRecipe)


class MarginMseTask(ListTask[BiEncoder, MarginMseRecipe]):
    """Train a `BiEncoder` on examples with scores by a teacher."""

    kind = "margin-mse"

    def loss(self, batch: ListBatch) -> tuple[Tensor, Mapping[str, Tensor | float]]:
        """Return the mean loss over all pairs of a positive and a negative."""
        question_vectors = self.module.embed_questions([example.question for example in batch.examples])  # (b, d)
        passage_vectors = self.module.embed_passages(batch.list_pairs()[1])  # (n, d), list by list
        loss = self._compute_loss(batch, question_vectors, passage_vectors)
        n_pairs = sum(batch.lengths) - len(batch.lists)  # pairs of a positive and a negative
        return mean_over_processes(loss * n_pairs, n_pairs), {}

    def evaluate(self) -> Measures:
        """Return the `loss` on the dev set, and the measures of `RankingEvaluator`."""
        ranking = self._ranking_evaluator
        question_vectors = self.module.encode_questions(ranking.questions)  # (n, d)
        passage_vectors = self.module.encode_passages(ranking.pool)  # (m, d)
        batch = build_list_batch(self.keep_complete(self._dev), self._recipe.scored, None)
        dev_positions = [
            position for position, example in enumerate(ranking.examples) if example.positives and example.negatives
        ]
        pool_rows = [ranking.row_by_hash[passage.hash] for passage in batch.list_pairs()[1]]
        loss = self._compute_loss(
            batch, torch.from_numpy(question_vectors[dev_positions]), torch.from_numpy(passage_vectors[pool_rows])
        )
        return {"loss": loss.item(), **ranking.evaluate(question_vectors, passage_vectors)}

    def _compute_loss(self, batch: ListBatch, question_vectors: Tensor, passage_vectors: Tensor) -> Tensor:
        with torch.autocast(passage_vectors.device.type, enabled=False):
            lengths = torch.tensor(batch.lengths, device=passage_vectors.device)
            questions = question_vectors.float().repeat_interleave(lengths, 0)  # (b, d) -> (n, d)
            # (n, d) -> (n,)
            scores = (questions * passage_vectors.float()).sum(1) / self._recipe.temperature
            return margin_mse_loss(pad_lists(scores, batch.lengths), batch.teacher_scores(scores.device))


class MarginMse(MiningObjective[MarginMseTraining]):
    """The objective `margin-mse`: a bi-encoder that learns from a cross-encoder."""

    name = "margin-mse"
    summary = "a question and a passage encoder, distilled from a cross-encoder"
    options = frozenset({"encoder", "teacher"})
    settings = MarginMseTraining
    tempered = "margin_mse"
    result = ModelDescription(
        summary="A pair of encoders, for questions and for passages, trained to differ in their scores as a "
        "cross-encoder does (MarginMSE, Hofstätter et al. 2020).",
        usage="bookwheel reindex --encoder model:NAME --dump DUMP --store STORE",
        parts=frozenset({"question", "passage"}),
    )

    def prepare(self, job: Job[MarginMseTraining]) -> Examples:
        """Return the examples with mined negatives and positives and with scores by the teacher."""
        teacher = load_teacher(job)  # An invalid teacher fails before the slow mining.
        mined_examples = super().prepare(job)
        return {
            name: add_teacher_scores(examples, teacher, job.settings.margin_mse.scored)
            for name, examples in mined_examples.items()
        }

    def task(self, job: Job[MarginMseTraining]) -> MarginMseTask:
        """Build the task, whose evaluation also ranks passages of the snapshot."""
        model_names, settings = job.origins.names, job.settings
        recipe, corpus = settings.margin_mse, sample_passages(job.snapshot, settings.negatives.ranked, job.runner)
        encoders = recipe.load_encoders(model_names["question"], model_names["passage"])
        return MarginMseTask(encoders, job.examples["train"], job.examples["dev"], recipe, corpus, job.digests)

    def costs(self, job: Job[MarginMseTraining], models: Mapping[str, Architecture]) -> TrainingCosts:
        """Return the costs to encode a batch, to mine passages, and to compute teacher scores."""
        recipe = job.settings.margin_mse
        costs = estimate_pair_costs(job, job.settings.negatives, recipe, recipe.negatives, models)
        teacher_operations = count_teacher_operations(
            sum(map(len, job.examples.values())), 1 + recipe.scored, models[TEACHER]
        )
        return replace(
            costs,
            stage_bytes={**costs.stage_bytes, "teach": 2 * estimate_weight_bytes(models[TEACHER])},
            preparation_operations=teacher_operations,
        )


MARGIN_MSE = MarginMse()
