"""DPR: train a bi-encoder to rank each question's passage above all others of its batch (Karpukhin et al. 2020)."""

import random
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, Self, get_args

import torch
from torch import Tensor

from rag_model.corpus.records import Passage
from rag_model.digest import digest_json
from rag_model.encoders.architecture import Architecture
from rag_model.encoders.encoder import Vectors
from rag_model.errors import InputError, UsageError
from rag_model.needs.reading import PASSAGE, QUESTION, weights
from rag_model.store.store import Store
from rag_model.store.versions.snapshot import Snapshot
from rag_model.training.data.batches import DprBatch, dpr_batch, groups, other_positives, passage_keys
from rag_model.training.data.examples import Example, digest_examples
from rag_model.training.data.negatives import NegativesRecipe, mining_bytes, ranked_passages, with_negatives
from rag_model.training.loop.loop_settings import LoopSettings
from rag_model.training.loop.task import Goal, Measures
from rag_model.training.objectives.biencoder import BiEncoder
from rag_model.training.objectives.contrastive import in_batch_loss, of_all_processes
from rag_model.training.objectives.objective import (
    BACKWARD,
    LEARNED,
    UNIT_TEMPERATURE,
    Costs,
    Examples,
    Job,
    Objective,
    Result,
)
from rag_model.training.objectives.ranking import Ranking
from rag_model.training.origins import Named, Origins, pair_of

GoalName = Literal["average_rank", "loss", "Success@20"]
Missing = Literal["drop", "refuse"]


@dataclass(frozen=True, slots=True)
class DprRecipe:
    """Settings of DPR; those of the optimisation are in `LoopSettings`, whose defaults are DPR's."""

    batch_size: int = 128  # questions per batch and process; DPR, section 5: 128 over all of its 8 GPUs
    hard_negatives: int = 1  # per question; DPR, section 5: one of BM25
    shared: bool = False  # one encoder for questions and passages; DPR: two
    freeze_passages: bool = False  # train only the question encoder: an index stays valid; DPR: both
    temperature: float = 1.0  # of the scores; DPR: 1. With vectors of unit length use 0.05
    without_positive: Missing = "drop"  # an example without a positive passage; DPR, section 4.2: discarded
    goal: GoalName = "average_rank"  # selects the best weights; DPR code: average rank on the dev set
    seed: int = 12345  # of the order and of the negatives; DPR code: 12345

    def __post_init__(self) -> None:
        if self.batch_size < 1 or self.hard_negatives < 0 or self.temperature <= 0:
            raise UsageError(
                f"batch_size {self.batch_size}, hard_negatives {self.hard_negatives}, temperature {self.temperature} "
                "of a DPR recipe: need batch_size >= 1, hard_negatives >= 0 and temperature > 0"
            )
        for name, choices in (("goal", get_args(GoalName)), ("without_positive", get_args(Missing))):
            if getattr(self, name) not in choices:
                raise UsageError(f"{name} {getattr(self, name)!r} is unknown: use one of {', '.join(choices)}")


@dataclass(frozen=True, slots=True)
class DprTraining:
    """Settings of a DPR training."""

    loop: LoopSettings = field(default_factory=LoopSettings)
    dpr: DprRecipe = field(default_factory=DprRecipe)
    negatives: NegativesRecipe = field(default_factory=NegativesRecipe)


class DprTask:
    """Train a `BiEncoder` on examples with positives."""

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
        self.module = encoder
        self.goal = Goal(recipe.goal, larger=recipe.goal.startswith("Success"))
        self.train = _with_positives(train, recipe.without_positive)
        self.dropped = len(train) - len(self.train)
        self._recipe, self._dev, self._corpus = recipe, Ranking(dev, corpus), tuple(corpus)
        if recipe.goal != "Success@20" and not self._dev.with_positives:
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
        """Return the recipe, and the digests of data and encoders."""
        return {
            "kind": "dpr",
            "settings": asdict(self._recipe),
            "train": digest_examples(self.train),
            "dev": digest_examples(self._dev.examples),
            "corpus": digest_json([passage.hash for passage in self._corpus]),
            "encoders": self.module.digests(),
            "specs": {"question": self.module.question.spec.to_json(), "passage": self.module.passage.spec.to_json()},
        }

    def batches(self, epoch: int) -> Sequence[DprBatch]:
        """Return an epoch's batches, shuffled by seed and epoch; an incomplete last batch is left out."""
        dice = random.Random(f"{self._recipe.seed} {epoch}")
        found = groups(self.train, self._recipe.batch_size, dice)
        return [dpr_batch(group, self._recipe.hard_negatives, dice) for group in found]

    def ids(self, batch: DprBatch) -> Sequence[str]:
        """Return the ids of the batch's examples."""
        return [example.id for example in batch.examples]

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
        asked = self.module.encode_questions([example.question for example in self._dev.examples])  # (n, d)
        read = self.module.encode_passages(self._dev.pool)  # (m, d)
        measures = self._dev.measure(asked, read)
        losses = [
            in_batch_loss(*self._dev_batch(part, asked, read), temperature=self._recipe.temperature)[0].item()
            for part in _parts(self._dev.with_positives, self._recipe.batch_size)
        ]
        return {**({"loss": sum(losses) / len(losses)} if losses else {}), **measures}

    def save(self, folder: Path) -> None:
        """Write `question/` and `passage/`, folders of encoders."""
        self.module.save(folder)

    def _dev_batch(self, places: Sequence[int], asked: Vectors, read: Vectors) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        examples = [self._dev.examples[place] for place in places]
        batch = dpr_batch(examples, self._recipe.hard_negatives, None)
        gold = torch.tensor(batch.gold)
        rows = [self._dev.rows[passage.hash] for passage in batch.passages]
        ignored = other_positives(examples, passage_keys(batch.passages), gold)
        # (b, d), (m, d), (b,), (b, m)
        return torch.from_numpy(asked[list(places)]), torch.from_numpy(read[rows]), gold, ignored


def _with_positives(examples: Sequence[Example], missing: Missing) -> list[Example]:
    found = [example for example in examples if example.positives]
    if missing == "refuse" and len(found) < len(examples):
        first = next(example for example in examples if not example.positives)
        raise InputError(f"example {first.id} has no positive passage: find one by mining, or drop it")
    if not found:
        raise InputError("no example has a positive passage: find passages by mining, or give another file")
    return found


def _parts(places: Sequence[int], size: int) -> list[Sequence[int]]:
    return [places[start : start + size] for start in range(0, len(places), size)]


class Dpr(Objective[DprTraining]):
    """A question and a passage encoder in one space."""

    name = "dpr"
    summary = "a question and a passage encoder"
    options = frozenset({"encoder"})
    settings = DprTraining
    result = Result(
        says="A pair of encoders, for questions and for passages, trained to tell each question's passage from others "
        "(DPR, Karpukhin et al. 2020).",
        uses="bookwheel reindex --encoder model:NAME --dump DUMP --store STORE",
        role="sentence-similarity",
        parts=frozenset({"question", "passage"}),
    )

    def defaults(self, *, unit_vectors: bool) -> Mapping[str, Mapping[str, Any]]:
        """Return a temperature for vectors of unit length."""
        return {"dpr": {"temperature": UNIT_TEMPERATURE}} if unit_vectors else {}

    def origins(self, store: Store, snapshot: Snapshot, named: Named) -> Origins:
        """Return the named encoders, else the one that the snapshot carries; see `pair_of`."""
        return pair_of(store, snapshot, named.encoder)

    def prepare(self, job: Job[DprTraining]) -> Examples:
        """Return the examples with missing negatives and positives added; see `with_negatives`."""
        return {name: with_negatives(some, job.snapshot, job.settings.negatives) for name, some in job.examples.items()}

    def task(self, job: Job[DprTraining]) -> DprTask:
        """Load the encoders; dev questions also rank passages of the snapshot."""
        names, settings = job.origins.names, job.settings
        corpus = ranked_passages(job.snapshot, settings.negatives.ranked)
        examples = job.examples["train"], job.examples["dev"]
        return DprTask.load(names["question"], names.get("passage"), *examples, settings.dpr, corpus)

    def costs(self, job: Job[DprTraining], models: Mapping[str, Architecture]) -> Costs:
        """Return the costs of encoding the questions and passages of a batch, and of mining."""
        recipe, question = job.settings.dpr, models["question"]
        passage = models.get("passage", question)
        learned = [question] if recipe.shared or recipe.freeze_passages else [question, passage]
        read = recipe.batch_size * (1 + recipe.hard_negatives)
        kept = question.activations(recipe.batch_size, QUESTION)
        kept += 0 if recipe.freeze_passages else passage.activations(read, PASSAGE)
        ranked = min(job.settings.negatives.ranked, job.snapshot.n) + len(job.examples["dev"])
        forward = recipe.batch_size * QUESTION * question.operations + read * PASSAGE * passage.operations
        stages = {
            "train": weights(question, passage) + (LEARNED - 1) * weights(*learned) + kept,
            "mine": mining_bytes(job.snapshot, job.settings.negatives),
        }
        batches = max(1, len(job.examples["train"]) // recipe.batch_size)
        return Costs(stages, batches, BACKWARD * forward, ranked * PASSAGE * passage.operations)


DPR = Dpr()
