"""Base classes of tasks and recipes, and the teacher.

* `GroupRecipe`, `GroupTask`: batches are groups of examples (DPR, ColBERT, cross-encoder,
  MarginMSE, SiDR, OpenRAG)
* `PairRecipe`, `pair_costs`: settings and costs of a bi-encoder (DPR, MarginMSE)
* `TextTask`: batches are passages of the snapshot (ICT, REALM)
* `load_teacher`: the cross-encoder whose scores are distilled (ColBERT, MarginMSE)
"""

import random
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Generic, TypeVar

from torch import nn

from rag_model.corpus.records import Passage
from rag_model.digest import digest_json
from rag_model.encoders.architecture import Architecture
from rag_model.encoders.cross_encoder import CrossEncoder, runs_on_onnx
from rag_model.encoders.onnx_cross_encoder import may_have_external_data
from rag_model.resources import PASSAGE_TOKENS, QUESTION_TOKENS, estimate_weight_bytes
from rag_model.retrieve.models import PairScorer
from rag_model.store.versions.snapshot import Snapshot
from rag_model.training.data.batches import DprBatch, ListBatch, group_examples
from rag_model.training.data.examples import Example, digest_examples
from rag_model.training.data.negatives import NegativesRecipe, estimate_mining_bytes
from rag_model.training.data.pair_scores import CachedPairScorer, WorkerPairScorer
from rag_model.training.data.texts import EpochBatches, Rows, TextBatch, TextSplit
from rag_model.training.loop.loop import choose_frozen_dtype
from rag_model.training.loop.loop_settings import check_choices
from rag_model.training.loop.task import Goal
from rag_model.training.objectives.objective import TRAINED_COPIES, TRAINING_PASSES, Job, TrainingCosts
from rag_model.training.objectives.ranking import RankingEvaluator
from rag_model.training.origins import TEACHER

_LOWER_IS_BETTER = frozenset({"average_rank", "loss"})  # goals


@dataclass(frozen=True, slots=True)
class GroupRecipe:
    """Settings of all tasks on groups of examples; a recipe sets its own defaults."""

    batch_size: int = 32  # questions per batch and process
    goal: str = "average_rank"  # selects the best weights, on the dev set
    seed: int = 12345  # of the order and of the negatives

    def __post_init__(self) -> None:
        """Check that settings with choices have one of them."""
        check_choices(self)


B = TypeVar("B", DprBatch, ListBatch)
M = TypeVar("M", bound=nn.Module)
R = TypeVar("R", bound=GroupRecipe)


class GroupTask(ABC, Generic[B, M, R]):
    """Base of tasks whose batches are groups of examples."""

    kind: str  # the objective's name

    def __init__(
        self,
        module: M,
        train: Sequence[Example],
        dev: Sequence[Example],
        recipe: R,
        corpus: Sequence[Passage] = (),
        digests: Mapping[str, str] | None = None,
    ) -> None:
        """Set the data; dev questions rank the passages of `corpus` and of the dev examples.

        `digests` are those of the initial models' and the teacher's files.

        Raises:
            InputError: no example of `train` is complete; or one is incomplete, and the recipe
                refuses that.
        """
        self.module, self._recipe = module, recipe
        self.train = self.keep_complete(train)
        self.goal = Goal(recipe.goal, larger=recipe.goal not in _LOWER_IS_BETTER)
        self._dev, self._corpus, self._digests = dev, tuple(corpus), dict(digests or {})

    @cached_property
    def _ranking(self) -> RankingEvaluator:
        """The evaluator of the dev set; raises UsageError without a dev example or a passage."""
        return RankingEvaluator(self._dev, self._corpus)

    def recipe(self) -> Mapping[str, Any]:
        """Return the recipe, and the digests of data and models."""
        corpus_digest = digest_json([passage.hash for passage in self._corpus])
        return {
            "kind": self.kind,
            "settings": asdict(self._recipe),
            "train": digest_examples(self.train),
            "dev": digest_examples(self._dev),
            "models": self._digests,
            **({"corpus": corpus_digest} if self._corpus else {}),
        }

    def batches(self, epoch: int) -> Sequence[B]:
        """Return an epoch's batches, shuffled by seed and epoch; drop an incomplete last batch."""
        rng = random.Random(f"{self._recipe.seed} {epoch}")
        return [self.build_batch(group, rng) for group in group_examples(self.train, self._recipe.batch_size, rng)]

    def ids(self, batch: B) -> Sequence[str]:
        """Return the ids of the batch's examples."""
        return [example.id for example in batch.examples]

    @abstractmethod
    def keep_complete(self, examples: Sequence[Example]) -> list[Example]:
        """Return the examples that have the passages a batch needs; raise if the recipe says so."""

    @abstractmethod
    def build_batch(self, examples: Sequence[Example], rng: random.Random) -> B:
        """Build a batch of examples; negatives are drawn with `rng`."""


@dataclass(frozen=True, slots=True)
class PairRecipe(GroupRecipe):
    """Settings of a bi-encoder's training."""

    shared: bool = False  # one encoder for questions and passages; DPR: two; MarginMSE's paper: one
    # train only the question encoder, so that an index stays valid; papers: both
    freeze_passages: bool = False
    # of the scores; 0.05 for vectors of unit length instead of 1, because cosines differ too little
    temperature: float = 1.0


def pair_costs(
    job: Job[Any], mining: NegativesRecipe, recipe: PairRecipe, negatives: int, models: Mapping[str, Architecture]
) -> TrainingCosts:
    """Return the costs of encoding a batch; each question has a positive and `negatives`."""
    question = models["question"]
    passage = models.get("passage", question)
    trained = [question] if recipe.shared or recipe.freeze_passages else [question, passage]
    passages = recipe.batch_size * (1 + negatives)
    activations = question.estimate_activation_bytes(recipe.batch_size, QUESTION_TOKENS)
    activations += 0 if recipe.freeze_passages else passage.estimate_activation_bytes(passages, PASSAGE_TOKENS)
    stages = {
        "train": estimate_weight_bytes(question, passage)
        + (TRAINED_COPIES - 1) * estimate_weight_bytes(*trained)
        + activations,
        "mine": estimate_mining_bytes(job.snapshot, mining),
    }
    forward = (
        recipe.batch_size * QUESTION_TOKENS * question.operations_per_token
        + passages * PASSAGE_TOKENS * passage.operations_per_token
    )
    ranked_count = min(mining.ranked, job.snapshot.n) + len(job.examples["dev"])
    batches = max(1, len(job.examples["train"]) // recipe.batch_size)
    return TrainingCosts(
        stages, batches, TRAINING_PASSES * forward, ranked_count * PASSAGE_TOKENS * passage.operations_per_token
    )


class TextTask:
    """Base of tasks whose batches are passages of a snapshot."""

    kind: str  # the objective's name

    def __init__(self, snapshot: Snapshot, rows: Rows, recipe: Any, digests: Mapping[str, str] | None = None) -> None:
        """Split `rows` into training and held-out texts.

        `recipe` is a record with `batch_size`, `seed` and `dev_texts`; `digests` are those of the
        initial models' files.
        """
        self._snapshot, self._recipe, self._digests = snapshot, recipe, dict(digests or {})
        self._split = TextSplit.hold_out(rows, recipe.dev_texts)

    def recipe(self) -> Mapping[str, Any]:
        """Return the recipe, the snapshot of the texts, and the digests of the models."""
        return {
            "kind": self.kind,
            "settings": asdict(self._recipe),
            "snapshot": self._snapshot.id,
            "models": self._digests,
        }

    def batches(self, epoch: int) -> Sequence[TextBatch]:
        """Return an epoch's batches, shuffled by seed and epoch."""
        return EpochBatches(self._split.train, self._recipe.batch_size, self._recipe.seed, epoch)

    def ids(self, batch: TextBatch) -> Sequence[str]:
        """Return the ids of the batch's passages."""
        return [passage.id for passage in self._snapshot.passages(batch.rows)]


def load_teacher(job: Job[Any]) -> PairScorer:
    """Load the teacher of a training; a run that resumes reuses its scores.

    With workers, the teacher scores on them, and the store records the scores. Otherwise this
    process scores, and the training's folder caches the scores. The latter also applies to an ONNX
    graph with external weight files, because onnxruntime does not follow the links to a worker's
    model files.

    Raises:
        InputError: a file is missing or corrupt, or the model is not a cross-encoder.
    """
    folder, identity, cpu = Path(job.origins.names[TEACHER]), job.digests.get(TEACHER, ""), job.settings.loop.cpu
    onnx = runs_on_onnx(folder)
    dtype = "float32" if onnx else choose_frozen_dtype(job.settings.loop)
    # a wrong teacher fails before any work
    teacher = CrossEncoder.load(folder, device="cpu" if cpu else None, dtype=dtype)
    if job.runner is not None and identity and not (onnx and may_have_external_data(folder)):
        return WorkerPairScorer(job.store, folder, identity, job.runner, job.on_progress, cpu, onnx=onnx, dtype=dtype)
    identity += "" if dtype == "float32" else f" {dtype}"  # scores of different dtypes must not be mixed
    return CachedPairScorer(teacher, identity, job.work, job.on_progress) if job.work else teacher


def count_teacher_operations(examples: int, passages: int, teacher: Architecture) -> float:
    """Return the floating-point operations to score `passages` passages for each of `examples`."""
    return examples * passages * (QUESTION_TOKENS + PASSAGE_TOKENS) * teacher.operations_per_token
