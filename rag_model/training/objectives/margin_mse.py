"""MarginMSE: a bi-encoder learns the differences between a cross-encoder's scores (Hofstätter et al. 2020)."""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from rag_model.encoders.architecture import Architecture
from rag_model.errors import UsageError
from rag_model.needs.reading import weights
from rag_model.store.store import Store
from rag_model.store.versions.snapshot import Snapshot
from rag_model.training.data.examples import Example
from rag_model.training.data.lists import ListBatch, Missing, list_batch, with_lists, with_scores
from rag_model.training.data.negatives import NegativesRecipe, ranked_passages, with_negatives
from rag_model.training.loop.loop_settings import LoopSettings
from rag_model.training.loop.task import Measures
from rag_model.training.objectives.biencoder import BiEncoder
from rag_model.training.objectives.group_task import GroupRecipe, GroupTask
from rag_model.training.objectives.listwise import as_lists, margin_mse
from rag_model.training.objectives.objective import (
    Costs,
    Examples,
    Job,
    Objective,
    Result,
)
from rag_model.training.objectives.pair_training import PairRecipe, pair_costs
from rag_model.training.objectives.teacher import teacher_of, teaching
from rag_model.training.origins import TEACHER, Named, Origins, pair_of, taught

GoalName = Literal["average_rank", "loss", "Success@20"]
LOOP = LoopSettings(epochs=25, learning_rate=7e-6, schedule="constant", warmup_share=0.0)
"""The settings of the authors' code, github.com/sebastian-hofstaetter/matchmaker: config/train/defaults.yaml. It lowers
the rate where the dev set's measure stays; gradient clipping is that of `LoopSettings`."""


@dataclass(frozen=True, slots=True)
class MarginMseRecipe(PairRecipe):
    """Settings of MarginMSE. "Code" is matchmaker's config/train/defaults.yaml, "paper" Hofstätter et al. 2020."""

    batch_size: int = 32  # questions per batch and process; code: batch_size_train 32
    negatives: int = 1  # per question, drawn in each epoch from those that the teacher scored; paper: triples
    scored: int = 8  # negatives of a question that the teacher scores, the hardest
    missing: Missing = "drop"  # an example without a positive or a negative passage
    goal: GoalName = "average_rank"  # selects the best weights, on the dev set

    def __post_init__(self) -> None:
        for name in ("batch_size", "negatives", "scored"):
            if getattr(self, name) < 1:
                raise UsageError(f"{name} of a MarginMSE recipe is {getattr(self, name)}: use 1 or more")
        if not self.temperature > 0:
            raise UsageError(f"temperature of a MarginMSE recipe is {self.temperature}: use more than 0")
        GroupRecipe.__post_init__(self)


@dataclass(frozen=True, slots=True)
class MarginMseTraining:
    """Settings of a MarginMSE training."""

    loop: LoopSettings = LOOP  # github.com/sebastian-hofstaetter/matchmaker: config/train/defaults.yaml
    margin_mse: MarginMseRecipe = field(default_factory=MarginMseRecipe)
    negatives: NegativesRecipe = field(default_factory=NegativesRecipe)


class MarginMseTask(GroupTask[ListBatch, BiEncoder, MarginMseRecipe]):
    """Train a `BiEncoder` on examples with a teacher's scores."""

    kind = "margin-mse"

    def complete(self, examples: Sequence[Example]) -> list[Example]:
        """Return the examples that have a positive and a negative."""
        return with_lists(examples, self._recipe.missing)

    def batch(self, examples: Sequence[Example], dice: random.Random) -> ListBatch:
        """Return the examples' lists, with as many negatives as the recipe says."""
        return list_batch(examples, self._recipe.negatives, dice)

    def loss(self, batch: ListBatch) -> tuple[Tensor, Mapping[str, Tensor | float]]:
        """Return the loss over the batch's lists."""
        asked = self.module.ask([example.question for example in batch.examples])  # (b, d)
        read = self.module.read(batch.pairs()[1])  # (n, d), list by list
        return self._loss(batch, asked, read), {}

    def evaluate(self) -> Measures:
        """Return the dev set's `loss`, `average_rank` and `Success@k`; see `Ranking`."""
        asked = self.module.encode_questions([one.question for one in self._ranking.examples])  # (n, d)
        read = self.module.encode_passages(self._ranking.pool)  # (m, d)
        batch = list_batch(self.complete(self._dev), self._recipe.scored, None)
        places = [place for place, one in enumerate(self._ranking.examples) if one.positives and one.negatives]
        rows = [self._ranking.rows[passage.hash] for passage in batch.pairs()[1]]
        loss = self._loss(batch, torch.from_numpy(asked[places]), torch.from_numpy(read[rows]))
        return {"loss": loss.item(), **self._ranking.measure(asked, read)}

    def save(self, folder: Path) -> None:
        """Write `question/` and `passage/`, folders of encoders."""
        self.module.save(folder)

    def _loss(self, batch: ListBatch, asked: Tensor, read: Tensor) -> Tensor:
        with torch.autocast(read.device.type, enabled=False):
            lengths = torch.tensor(batch.lengths, device=read.device)
            questions = asked.float().repeat_interleave(lengths, 0)  # (b, d) -> (n, d)
            scores = (questions * read.float()).sum(1) / self._recipe.temperature  # (n, d) -> (n,)
            told = torch.tensor([score for some in batch.scores for score in some], device=read.device)
            return margin_mse(as_lists(scores, batch.lengths), as_lists(told, batch.lengths))


class MarginMse(Objective[MarginMseTraining]):
    """A question and a passage encoder that learn from a cross-encoder."""

    name = "margin-mse"
    summary = "a question and a passage encoder, taught by a cross-encoder"
    options = frozenset({"encoder", "teacher"})
    settings = MarginMseTraining
    tempered = "margin_mse"
    result = Result(
        says="A pair of encoders, for questions and for passages, trained to differ in their scores as a cross-encoder "
        "does (MarginMSE, Hofstätter et al. 2020).",
        uses="bookwheel reindex --encoder model:NAME --dump DUMP --store STORE",
        role="sentence-similarity",
        parts=frozenset({"question", "passage"}),
    )

    def origins(self, store: Store, snapshot: Snapshot, named: Named) -> Origins:
        """Return the encoders, as for DPR, and the teacher."""
        return taught(store, pair_of(store, snapshot, named.encoder), named.teacher)

    def prepare(self, job: Job[MarginMseTraining]) -> Examples:
        """Return the examples with missing negatives and positives added, and with the teacher's scores."""
        teacher = teacher_of(job)  # first: a wrong one is refused
        mined = with_negatives(job.examples, job.snapshot, job.settings.negatives, job.tell)
        return {name: with_scores(some, teacher, job.settings.margin_mse.scored) for name, some in mined.items()}

    def task(self, job: Job[MarginMseTraining]) -> MarginMseTask:
        """Load the encoders; dev questions also rank passages of the snapshot."""
        names, settings = job.origins.names, job.settings
        recipe, corpus = settings.margin_mse, ranked_passages(job.snapshot, settings.negatives.ranked)
        encoder = BiEncoder.load(
            names["question"], names.get("passage"), shared=recipe.shared, frozen=recipe.freeze_passages
        )
        return MarginMseTask(encoder, job.examples["train"], job.examples["dev"], recipe, corpus, job.digests)

    def costs(self, job: Job[MarginMseTraining], models: Mapping[str, Architecture]) -> Costs:
        """Return the costs of encoding a batch, of mining, and of teaching."""
        recipe = job.settings.margin_mse
        costs = pair_costs(job, job.settings.negatives, recipe, recipe.negatives, models)
        once = teaching(sum(map(len, job.examples.values())), 1 + recipe.scored, models[TEACHER])
        return replace(costs, stages={**costs.stages, "teach": 2 * weights(models[TEACHER])}, once=once)


MARGIN_MSE = MarginMse()
