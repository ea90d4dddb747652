"""DPR: train a bi-encoder with in-batch negatives and hard negatives (Karpukhin et al. 2020)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from rag_model.encoders.architecture import Architecture
from rag_model.encoders.encoder import Vectors
from rag_model.training.data.batches import (
    DprBatch,
    IncompletePolicy,
    build_dpr_batch,
    hash_passages,
    mask_other_positives,
    split_batches,
)
from rag_model.training.data.negatives import NegativesRecipe, sample_passages
from rag_model.training.loop.loop_settings import LoopSettings, check_bounds
from rag_model.training.loop.task import Measures
from rag_model.training.objectives.losses import gather_all_processes, in_batch_loss, locate_positives
from rag_model.training.objectives.objective import Job, ModelDescription, TrainingCosts
from rag_model.training.objectives.task_bases import (
    BiEncoder,
    ContrastTask,
    MiningObjective,
    PairRecipe,
    estimate_pair_costs,
)

GoalName = Literal["average_rank", "loss", "Success@20"]


@dataclass(frozen=True, slots=True)
class DprRecipe(PairRecipe):
    """Settings of DPR; settings of the optimizer are in `LoopSettings`, with the values of DPR."""

    # number of questions per batch and process; 128 in each process instead of 128 over 8 GPUs
    # (section 5), because one process must be able to train with the published batch size
    batch_size: int = 128
    # number of hard negatives per question; DPR, section 5: one from BM25
    hard_negatives: int = 1
    # what to do with examples without a positive passage: drop them, or refuse the file; DPR,
    # section 4.2, drops them
    without_positive: IncompletePolicy = "drop"
    # dev measure that selects the best weights; DPR code: average rank
    goal: GoalName = "average_rank"

    def __post_init__(self) -> None:
        check_bounds(self, "[dpr]", {"batch_size": 1, "hard_negatives": 0}, ["temperature"])


@dataclass(frozen=True, slots=True)
class DprTraining:
    """Settings of a DPR training."""

    # learning_rate = 2e-5 instead of 1e-5 in the paper, because the published checkpoints were
    # trained with the code, which has 2e-5
    loop: LoopSettings = field(default_factory=LoopSettings)
    dpr: DprRecipe = field(default_factory=DprRecipe)
    negatives: NegativesRecipe = field(default_factory=NegativesRecipe)


class DprTask(ContrastTask[BiEncoder, DprRecipe]):
    """Train a `BiEncoder` on examples with positives."""

    kind = "dpr"

    def recipe(self) -> Mapping[str, Any]:
        """Return the recipe, the digests of data and encoders, and the specs of the encoders."""
        specs = {"question": self.module.question.spec.to_json(), "passage": self.module.passage.spec.to_json()}
        return {**super().recipe(), "encoders": self.module.digests(), "specs": specs}

    def loss(self, batch: DprBatch) -> tuple[Tensor, Mapping[str, Tensor | float]]:
        """Return the loss over the passages of all processes, and the in-batch `accuracy`."""
        # (m, d) -> (m of all, d)
        passages, _ = gather_all_processes(self.module.embed_passages(batch.passages))
        gold, ignored = locate_positives(batch.examples, batch.passages, batch.gold, passages.device)
        questions = self.module.embed_questions([example.question for example in batch.examples])
        loss, accuracy = in_batch_loss(questions, passages, gold, ignored, self._recipe.temperature)
        return loss, {"accuracy": accuracy}

    def evaluate(self) -> Measures:
        """Return the `loss` on the dev set, and the measures of `RankingEvaluator`."""
        ranking = self._ranking_evaluator
        question_vectors = self.module.encode_questions(ranking.questions)  # (n, d)
        passage_vectors = self.module.encode_passages(ranking.pool)  # (m, d)
        measures = ranking.evaluate(question_vectors, passage_vectors)
        dev_losses = [
            in_batch_loss(
                *self._build_dev_batch(positions, question_vectors, passage_vectors),
                temperature=self._recipe.temperature,
            )[0].item()
            for positions in split_batches(ranking.positions_with_positives, self._recipe.batch_size)
        ]
        return {**({"loss": sum(dev_losses) / len(dev_losses)} if dev_losses else {}), **measures}

    def _build_dev_batch(
        self, positions: Sequence[int], question_vectors: Vectors, passage_vectors: Vectors
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        ranking = self._ranking_evaluator
        examples = [ranking.examples[position] for position in positions]
        batch = build_dpr_batch(examples, self._recipe.hard_negatives, None)
        gold = torch.tensor(batch.gold)
        pool_rows = [ranking.row_by_hash[passage.hash] for passage in batch.passages]
        ignored = mask_other_positives(examples, hash_passages(batch.passages), gold)
        # (b, d), (m, d), (b,), (b, m)
        return (
            torch.from_numpy(question_vectors[list(positions)]),
            torch.from_numpy(passage_vectors[pool_rows]),
            gold,
            ignored,
        )


class Dpr(MiningObjective[DprTraining]):
    """The objective `dpr`: a question and a passage encoder in one space."""

    name = "dpr"
    summary = "a question and a passage encoder"
    options = frozenset({"encoder"})
    settings = DprTraining
    tempered = "dpr"
    result = ModelDescription(
        summary="A pair of encoders, for questions and for passages, trained to tell each question's passage from "
        "others (DPR, Karpukhin et al. 2020).",
        usage="bookwheel reindex --encoder model:NAME --dump DUMP --store STORE",
        parts=frozenset({"question", "passage"}),
    )

    def task(self, job: Job[DprTraining]) -> DprTask:
        """Build the task, whose evaluation also ranks passages of the snapshot."""
        model_names, recipe = job.origins.names, job.settings.dpr
        encoders = recipe.load_encoders(model_names["question"], model_names["passage"])
        corpus = sample_passages(job.snapshot, job.settings.negatives.ranked, job.runner)
        return DprTask(encoders, job.examples["train"], job.examples["dev"], recipe, corpus)

    def costs(self, job: Job[DprTraining], models: Mapping[str, Architecture]) -> TrainingCosts:
        """Return the costs to encode questions and passages of a batch, and to mine passages."""
        recipe = job.settings.dpr
        return estimate_pair_costs(job, job.settings.negatives, recipe, recipe.hard_negatives, models)


DPR = Dpr()
