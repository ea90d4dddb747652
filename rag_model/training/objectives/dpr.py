"""DPR: train a bi-encoder to rank each question's passage above all others of its batch (Karpukhin et al. 2020)."""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Self

import torch
from torch import Tensor

from rag_model.corpus.records import Passage
from rag_model.encoders.architecture import Architecture
from rag_model.encoders.encoder import Vectors
from rag_model.errors import UsageError
from rag_model.store.store import Store
from rag_model.store.versions.snapshot import Snapshot
from rag_model.training.data.batches import DprBatch, dpr_batch, other_positives, passage_keys
from rag_model.training.data.examples import Example
from rag_model.training.data.lists import Missing, with_lists
from rag_model.training.data.negatives import NegativesRecipe, ranked_passages, with_negatives
from rag_model.training.loop.loop_settings import LoopSettings
from rag_model.training.loop.task import Measures
from rag_model.training.objectives.biencoder import BiEncoder
from rag_model.training.objectives.contrastive import in_batch_loss, of_all_processes
from rag_model.training.objectives.group_task import GroupRecipe, GroupTask
from rag_model.training.objectives.objective import (
    Costs,
    Examples,
    Job,
    Objective,
    Result,
)
from rag_model.training.objectives.pair_training import PairRecipe, pair_costs
from rag_model.training.origins import Named, Origins, pair_of

GoalName = Literal["average_rank", "loss", "Success@20"]


@dataclass(frozen=True, slots=True)
class DprRecipe(PairRecipe):
    """Settings of DPR; those of the optimisation are in `LoopSettings`, whose defaults are DPR's."""

    batch_size: int = 128  # questions per batch and process; DPR, section 5: 128 over all of its 8 GPUs
    hard_negatives: int = 1  # per question; DPR, section 5: one of BM25
    without_positive: Missing = "drop"  # an example without a positive passage; DPR, section 4.2: discarded
    goal: GoalName = "average_rank"  # selects the best weights; DPR code: average rank on the dev set

    def __post_init__(self) -> None:
        if self.batch_size < 1 or self.hard_negatives < 0 or self.temperature <= 0:
            raise UsageError(
                f"batch_size {self.batch_size}, hard_negatives {self.hard_negatives}, temperature {self.temperature} "
                "of a DPR recipe: need batch_size >= 1, hard_negatives >= 0 and temperature > 0"
            )
        GroupRecipe.__post_init__(self)


@dataclass(frozen=True, slots=True)
class DprTraining:
    """Settings of a DPR training."""

    loop: LoopSettings = field(default_factory=LoopSettings)
    dpr: DprRecipe = field(default_factory=DprRecipe)
    negatives: NegativesRecipe = field(default_factory=NegativesRecipe)


class DprTask(GroupTask[DprBatch, BiEncoder, DprRecipe]):
    """Train a `BiEncoder` on examples with positives."""

    kind = "dpr"

    def __init__(
        self,
        encoder: BiEncoder,
        train: Sequence[Example],
        dev: Sequence[Example],
        recipe: DprRecipe,
        corpus: Sequence[Passage] = (),
    ) -> None:
        """Set the data; dev questions rank the passages of `corpus` and of the dev examples.

        Raises:
            InputError: no training example has a positive passage; or one has none, and the recipe refuses that.
            UsageError: there is no dev example.
        """
        if not dev:
            raise UsageError("there is no dev example to select the best weights: give a dev file")
        super().__init__(encoder, train, dev, recipe, corpus)
        self.dropped = len(train) - len(self.train)
        if recipe.goal != "Success@20" and not self._ranking.with_positives:
            raise UsageError(f"goal {recipe.goal} needs dev examples with passages: use Success@20, or mine them")

    @classmethod
    def load(
        cls,
        question: str | Path,
        passage: str | Path | None,
        train: Sequence[Example],
        dev: Sequence[Example],
        recipe: DprRecipe,
        corpus: Sequence[Passage] = (),
    ) -> Self:
        """Load the encoders by the recipe; without `passage` both begin from `question`.

        Raises:
            InputError: an encoder cannot be loaded, or as the class.
            UsageError: the encoders do not fit each other or the recipe, or as the class.
        """
        encoder = BiEncoder.load(question, passage, shared=recipe.shared, frozen=recipe.freeze_passages)
        return cls(encoder, train, dev, recipe, corpus)

    def recipe(self) -> Mapping[str, Any]:
        """Return the recipe, the digests of data and encoders, and how texts are read."""
        read = {"question": self.module.question.spec.to_json(), "passage": self.module.passage.spec.to_json()}
        return {**super().recipe(), "encoders": self.module.digests(), "specs": read}

    def complete(self, examples: Sequence[Example]) -> list[Example]:
        """Return the examples that have a positive."""
        return with_lists(examples, self._recipe.without_positive, negatives=False)

    def batch(self, examples: Sequence[Example], dice: random.Random) -> DprBatch:
        """Return the examples, with as many negatives as the recipe says."""
        return dpr_batch(examples, self._recipe.hard_negatives, dice)

    def loss(self, batch: DprBatch) -> tuple[Tensor, Mapping[str, Tensor | float]]:
        """Return the loss over the passages of all processes, and the share of questions whose positive is best."""
        passages, start = of_all_processes(self.module.read(batch.passages))  # (m, d) -> (m of all, d)
        keys, _ = of_all_processes(passage_keys(batch.passages).to(passages.device))
        gold = torch.tensor(batch.gold, device=passages.device) + start  # (b,) rows of all passages
        questions = self.module.ask([example.question for example in batch.examples])
        ignored = other_positives(batch.examples, keys, gold)
        loss, accuracy = in_batch_loss(questions, passages, gold, ignored, self._recipe.temperature)
        return loss, {"accuracy": accuracy}

    def evaluate(self) -> Measures:
        """Return the dev set's `loss`, `average_rank` and `Success@k`; see `Ranking`."""
        asked = self.module.encode_questions([example.question for example in self._ranking.examples])  # (n, d)
        read = self.module.encode_passages(self._ranking.pool)  # (m, d)
        measures = self._ranking.measure(asked, read)
        losses = [
            in_batch_loss(*self._dev_batch(part, asked, read), temperature=self._recipe.temperature)[0].item()
            for part in _parts(self._ranking.with_positives, self._recipe.batch_size)
        ]
        return {**({"loss": sum(losses) / len(losses)} if losses else {}), **measures}

    def save(self, folder: Path) -> None:
        """Write `question/` and `passage/`, folders of encoders."""
        self.module.save(folder)

    def _dev_batch(self, places: Sequence[int], asked: Vectors, read: Vectors) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        examples = [self._ranking.examples[place] for place in places]
        batch = dpr_batch(examples, self._recipe.hard_negatives, None)
        gold = torch.tensor(batch.gold)
        rows = [self._ranking.rows[passage.hash] for passage in batch.passages]
        ignored = other_positives(examples, passage_keys(batch.passages), gold)
        # (b, d), (m, d), (b,), (b, m)
        return torch.from_numpy(asked[list(places)]), torch.from_numpy(read[rows]), gold, ignored


def _parts(places: Sequence[int], size: int) -> list[Sequence[int]]:
    return [places[start : start + size] for start in range(0, len(places), size)]


class Dpr(Objective[DprTraining]):
    """A question and a passage encoder in one space."""

    name = "dpr"
    summary = "a question and a passage encoder"
    options = frozenset({"encoder"})
    settings = DprTraining
    tempered = "dpr"
    result = Result(
        says="A pair of encoders, for questions and for passages, trained to tell each question's passage from others "
        "(DPR, Karpukhin et al. 2020).",
        uses="bookwheel reindex --encoder model:NAME --dump DUMP --store STORE",
        role="sentence-similarity",
        parts=frozenset({"question", "passage"}),
    )

    def origins(self, store: Store, snapshot: Snapshot, named: Named) -> Origins:
        """Return the named encoders, else the one that the snapshot carries; see `pair_of`."""
        return pair_of(store, snapshot, named.encoder)

    def prepare(self, job: Job[DprTraining]) -> Examples:
        """Return the examples with missing negatives and positives added; see `with_negatives`."""
        return with_negatives(job.examples, job.snapshot, job.settings.negatives, job.tell)

    def task(self, job: Job[DprTraining]) -> DprTask:
        """Load the encoders; dev questions also rank passages of the snapshot."""
        names, settings = job.origins.names, job.settings
        corpus = ranked_passages(job.snapshot, settings.negatives.ranked)
        examples = job.examples["train"], job.examples["dev"]
        return DprTask.load(names["question"], names.get("passage"), *examples, settings.dpr, corpus)

    def costs(self, job: Job[DprTraining], models: Mapping[str, Architecture]) -> Costs:
        """Return the costs of encoding the questions and passages of a batch, and of mining."""
        recipe = job.settings.dpr
        return pair_costs(job, job.settings.negatives, recipe, recipe.hard_negatives, models)


DPR = Dpr()
