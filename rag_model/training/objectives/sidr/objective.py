"""SiDR: weighted terms that may ask an index of weights or one of bags, which training leaves as it is.

Zhou et al., "Semi-Parametric Retrieval via Binary Bag-of-Tokens Index" (arXiv 2405.01924).
"""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from rag_model.corpus.records import Passage
from rag_model.encoders.architecture import Architecture
from rag_model.encoders.resolve import resolve_folder
from rag_model.errors import UsageError
from rag_model.needs.reading import NUMBER, PASSAGE, QUESTION, weights
from rag_model.store.store import Store
from rag_model.store.versions.snapshot import Snapshot
from rag_model.training.data.batches import DprBatch, dpr_batch, other_positives, passage_keys
from rag_model.training.data.examples import Example
from rag_model.training.data.lists import Missing, with_lists
from rag_model.training.data.negatives import NegativesRecipe, mining_bytes, ranked_passages, with_negatives
from rag_model.training.loop.loop_settings import LoopSettings
from rag_model.training.loop.task import Goal, Measures
from rag_model.training.objectives.contrastive import of_all_processes
from rag_model.training.objectives.group_task import GroupRecipe, GroupTask
from rag_model.training.objectives.objective import BACKWARD, LEARNED, Costs, Examples, Job, Objective, Result
from rag_model.training.objectives.sidr.pair import SidrPair, TermSettings
from rag_model.training.objectives.sidr.semiparametric import semi_parametric_loss
from rag_model.training.origins import Named, Origins, pair_of

GoalName = Literal["average_rank", "bag_average_rank", "Success@20", "bag_Success@20"]
BAG = "bag_"  # before the names of measures by bags
LOOP = LoopSettings(epochs=80, warmup_share=0.0125)
"""The authors' code, github.com/jzhoubu/vsearch, conf/train/svdr_nq.yaml: 80 epochs, the first to warm up; its rate,
decay and clipping are the defaults of `LoopSettings`."""
_ROWS = 6  # numbers kept for a text and term: weights, heaviest, bag, and their gradients


@dataclass(frozen=True, slots=True)
class SidrRecipe(GroupRecipe):
    """Settings of a SiDR. "Code" is github.com/jzhoubu/vsearch: conf/train/svdr_nq.yaml and conf/biencoder/vdr.yaml."""

    batch_size: int = 32  # questions per batch and process; code: batch_size 32
    hard_negatives: int = 1  # per question; code: hard_negatives 1
    shared: bool = False  # one encoder for questions and passages; code: shared_encoder False
    terms: int = 768  # heaviest terms that a text keeps beside its own, of a new one; code: topk 768
    question_length: int = 128  # tokens, of a new one; code: max_len 128
    passage_length: int = 256  # tokens, of a new one; code: max_len 256
    scale: int = 8  # units of a stored weight of 1, of a new one: weights up to 31.9, as a byte keeps them
    temperature: float = 1.0  # of the scores; code: 1
    both_ways: bool = True  # questions are told apart for a passage too; code: sym_loss True
    without_positive: Missing = "drop"  # an example without a positive passage
    goal: GoalName = "average_rank"  # selects the best weights, on the dev set; bag_…: asked by bags

    def __post_init__(self) -> None:
        least = {
            "batch_size": 1,
            "hard_negatives": 0,
            "terms": 1,
            "question_length": 3,
            "passage_length": 3,
            "scale": 1,
        }
        for name, bound in least.items():
            if getattr(self, name) < bound:
                raise UsageError(f"{name} of a SiDR's recipe is {getattr(self, name)}: use {bound} or more")
        if not self.temperature > 0:
            raise UsageError(f"temperature of a SiDR's recipe is {self.temperature}: use more than 0")
        GroupRecipe.__post_init__(self)

    @property
    def settings(self) -> TermSettings:
        """What a new encoder begins with."""
        return TermSettings(self.terms, self.question_length, self.passage_length, self.scale)


@dataclass(frozen=True, slots=True)
class SidrTraining:
    """Settings of a SiDR's training."""

    loop: LoopSettings = LOOP
    sidr: SidrRecipe = field(default_factory=SidrRecipe)
    negatives: NegativesRecipe = field(default_factory=NegativesRecipe)


class SidrTask(GroupTask[DprBatch, SidrPair, SidrRecipe]):
    """Train a `SidrPair` on examples with positives."""

    kind = "sidr"

    def __init__(
        self,
        pair: SidrPair,
        train: Sequence[Example],
        dev: Sequence[Example],
        recipe: SidrRecipe,
        corpus: Sequence[Passage] = (),
        digests: Mapping[str, str] | None = None,
    ) -> None:
        """Set the data; dev questions rank the passages of `corpus` and of the dev examples.

        Raises:
            InputError: no training example has a positive passage; or one has none, and the recipe refuses that.
            UsageError: there is no dev example, or none with a passage where the goal needs one.
        """
        super().__init__(pair, train, dev, recipe, corpus, digests)
        self.goal = Goal(recipe.goal, larger="Success" in recipe.goal)
        if not self.goal.larger and not self._ranking.with_positives:
            raise UsageError(f"goal {recipe.goal} needs dev examples with passages: use Success@20, or mine them")

    def recipe(self) -> Mapping[str, Any]:
        """Return the recipe, the digests of data and encoders, and how texts are read."""
        pair = {"question": self.module.question, "passage": self.module.passage}
        return {**super().recipe(), "specs": {name: one.spec.to_json() for name, one in pair.items()}}

    def complete(self, examples: Sequence[Example]) -> list[Example]:
        """Return the examples that have a positive."""
        return with_lists(examples, self._recipe.without_positive, negatives=False)

    def batch(self, examples: Sequence[Example], dice: random.Random) -> DprBatch:
        """Return the examples, with as many negatives as the recipe says."""
        return dpr_batch(examples, self._recipe.hard_negatives, dice)

    def loss(self, batch: DprBatch) -> tuple[Tensor, Mapping[str, Tensor | float]]:
        """Return the loss over the passages of all processes, and the shares of questions whose positive is best."""
        recipe = self._recipe
        return sidr_loss(self.module, batch, recipe.terms, recipe.temperature, both_ways=recipe.both_ways)

    def evaluate(self) -> Measures:
        """Return the dev set's `average_rank` and `Success@k`, by weights, and `bag_…`, by bags; see `Ranking`."""
        ranking = self._ranking
        scores = self.module.scores(self.module.asked([one.question for one in ranking.examples]), ranking.pool)
        by_weights, by_bags = (ranking.measure_scores([one.cpu().numpy()]) for one in scores)
        return {**by_weights, **{f"{BAG}{name}": value for name, value in by_bags.items()}}

    def save(self, folder: Path) -> None:
        """Write `question/` and `passage/`, folders of sparse encoders."""
        self.module.save(folder)


def sidr_loss(
    pair: SidrPair, batch: DprBatch, terms: int, temperature: float, *, both_ways: bool
) -> tuple[Tensor, Mapping[str, Tensor | float]]:
    """Return the loss of a batch over the passages of all processes, and what to write down.

    `heaviest` is the largest weight of a passage: one above 255 / scale is cut when it is stored.
    """
    own, bag = pair.read(batch.passages)
    (weights, start), (bags, _) = of_all_processes(own), of_all_processes(bag.byte())  # (m, V) -> (m of all, V)
    keys, _ = of_all_processes(passage_keys(batch.passages).to(weights.device))
    gold = torch.tensor(batch.gold, device=weights.device) + start  # (b,)
    ignored = other_positives(batch.examples, keys, gold)
    asked = pair.ask([example.question for example in batch.examples])
    loss, found = semi_parametric_loss(
        asked, (weights, bags.bool()), gold, ignored, terms, temperature, both_ways=both_ways
    )
    return loss, {**found, "heaviest": weights.detach().max()}


class Sidr(Objective[SidrTraining]):
    """A question and a passage encoder of weighted terms."""

    name = "sidr"
    summary = "two encoders of weighted terms, which ask an index of weights or of bags"
    options = frozenset({"encoder"})
    settings = SidrTraining
    result = Result(
        says="A pair of encoders of weighted terms, for questions and for passages, trained to tell each question's "
        "passage from others by its weights, and by its bag of tokens alone (SiDR, Zhou et al. 2024). The index of "
        "bags stays valid whatever is trained.",
        uses="bookwheel reindex --dump DUMP --store STORE --recipe FILE, where the recipe has "
        '[represent.bag] kind = "bag", encoder = "model:NAME" and [index.bag] factory = "Impact1", over = "bag"; or '
        '[represent.sparse] encoder = "model:NAME" and [index.sidr] factory = "Impact"',
        role="sentence-similarity",
        parts=frozenset({"question", "passage"}),
    )

    def origins(self, store: Store, snapshot: Snapshot, named: Named) -> Origins:
        """Return the named encoders, else the one that the snapshot carries; see `pair_of`."""
        return pair_of(store, snapshot, named.encoder)

    def prepare(self, job: Job[SidrTraining]) -> Examples:
        """Return the examples with missing negatives and positives added; see `with_negatives`."""
        return with_negatives(job.examples, job.snapshot, job.settings.negatives, job.tell)

    def task(self, job: Job[SidrTraining]) -> SidrTask:
        """Load the encoders; dev questions also rank passages of the snapshot."""
        settings = job.settings
        corpus = ranked_passages(job.snapshot, settings.negatives.ranked)
        pair = begun(job.origins, settings.sidr)
        return SidrTask(pair, job.examples["train"], job.examples["dev"], settings.sidr, corpus, job.digests)

    def costs(self, job: Job[SidrTraining], models: Mapping[str, Architecture]) -> Costs:
        """Return the costs of weighing all terms of a batch, and of mining."""
        costs = sidr_costs(job, job.settings.sidr, job.settings.negatives.ranked, models)
        return Costs(
            {**costs.stages, "mine": mining_bytes(job.snapshot, job.settings.negatives)},
            costs.batches,
            costs.step,
            costs.look,
        )


def begun(origins: Origins, recipe: SidrRecipe) -> SidrPair:
    """Load the encoders that a training begins with.

    Raises:
        InputError: one cannot be loaded.
        UsageError: they do not fit each other or the recipe.
    """
    question, passage = (resolve_folder(origins.names[part]) for part in ("question", "passage"))
    return SidrPair.load(question, passage, recipe.settings, shared=recipe.shared)


def sidr_costs(job: Job[Any], recipe: SidrRecipe, ranked: int, models: Mapping[str, Architecture]) -> Costs:
    """Return the costs of weighing all terms of a batch: products of every token with every word."""
    question, passage = models["question"], models["passage"]
    read = recipe.batch_size * (1 + recipe.hard_negatives)
    learned = [passage] if recipe.shared else [question, passage]
    kept = question.activations(recipe.batch_size, QUESTION) + passage.activations(read, PASSAGE)
    kept += NUMBER * passage.vocabulary * (_ROWS * (read + recipe.batch_size) + PASSAGE + 2 * passage.hidden)
    forward = recipe.batch_size * QUESTION * weighing(question) + read * PASSAGE * weighing(passage)
    pool = min(ranked, job.snapshot.n) + len(job.examples["dev"])
    batches = max(1, len(job.examples["train"]) // recipe.batch_size)
    return Costs(
        {"train": LEARNED * weights(*learned) + kept}, batches, BACKWARD * forward, pool * PASSAGE * weighing(passage)
    )


def weighing(model: Architecture) -> float:
    """Return the operations of a token: those of the transformer, and its products with all words."""
    return model.operations + 2.0 * model.hidden * model.vocabulary


SIDR = Sidr()
