"""Base classes of tasks and recipes, the bi-encoder and the teacher.

* `BiEncoder`: one encoder for questions and one for passages, or a single shared encoder
* `GroupRecipe`, `GroupTask`: tasks whose batches are groups of examples (OpenRAG)
* `ContrastTask`: group tasks with in-batch negatives (DPR, SiDR)
* `ListTask`: group tasks with a list of a positive and negatives per example (ColBERT,
  cross-encoder, MarginMSE)
* `MiningObjective`: objectives that add mined passages to the examples (ColBERT, DPR,
  cross-encoder, MarginMSE, SiDR)
* `PairRecipe`, `estimate_pair_costs`: settings and costs of a bi-encoder (DPR, MarginMSE)
* `TextTask`: tasks whose batches are passages of the snapshot (ICT, REALM)
* `load_teacher`: load the cross-encoder whose scores are distilled (ColBERT, MarginMSE)
"""

import random
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Generic, Self, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from rag_model.corpus.records import Passage
from rag_model.digest import digest_json
from rag_model.encoders.architecture import Architecture
from rag_model.encoders.cross_encoder import CrossEncoder, runs_on_onnx
from rag_model.encoders.encoder import Vectors
from rag_model.encoders.onnx_cross_encoder import may_have_external_data
from rag_model.encoders.space import Space
from rag_model.encoders.trainable import TrainableEncoder
from rag_model.encoders.weights import digest_weights
from rag_model.errors import UsageError
from rag_model.evaluation.matching import AnswerMatcher
from rag_model.resources import PASSAGE_TOKENS, QUESTION_TOKENS, estimate_weight_bytes
from rag_model.retrieve.models import PairScorer
from rag_model.store.versions.snapshot import Snapshot
from rag_model.training.data.batches import (
    DprBatch,
    ListBatch,
    build_dpr_batch,
    build_list_batch,
    group_examples,
    keep_complete_examples,
)
from rag_model.training.data.examples import Example, deduplicate_passages, digest_examples
from rag_model.training.data.negatives import NegativesRecipe, add_mined_passages, estimate_mining_bytes
from rag_model.training.data.pair_scores import CachedPairScorer, WorkerPairScorer
from rag_model.training.data.texts import EpochBatches, Rows, TextBatch, TextSplit
from rag_model.training.loop.loop import choose_frozen_dtype
from rag_model.training.loop.task import Goal, Measures
from rag_model.training.objectives.objective import (
    TRAINED_COPIES,
    TRAINING_PASSES,
    Examples,
    Job,
    Objective,
    S,
    TrainingCosts,
)
from rag_model.training.origins import TEACHER

CUTOFFS = (1, 5, 20)  # values of k for `Success@k`
_SCORE_BATCH = 256  # number of questions that are scored together
B = TypeVar("B", DprBatch, ListBatch)
M = TypeVar("M", bound=nn.Module)


class RankingEvaluator:
    """Ranks a pool of passages for dev questions; the pool is from the corpus and the examples."""

    def __init__(self, examples: Sequence[Example], corpus: Sequence[Passage] = ()) -> None:
        """Build the pool, in which equal passages occur only once.

        Raises:
            UsageError: there is no example, or no passage.
        """
        example_passages = [passages for example in examples for passages in (example.positives, example.negatives)]
        self.examples = tuple(examples)
        self.questions = [example.question for example in examples]
        self.pool, self.row_by_hash = deduplicate_passages([corpus, *example_passages])
        self._own_rows, self._named_rows = self._find_document_rows()
        self.positions_with_positives = [position for position, example in enumerate(examples) if example.positives]
        if not self.examples or not self.pool:
            raise UsageError("the dev set has no example or no passage to rank: give a dev file with passages")

    def evaluate(self, question_vectors: Vectors, passage_vectors: Vectors) -> Measures:
        """Return `average_rank` and `Success@k` from (n, d) question and (m, d) pool vectors.

        `average_rank` is the mean rank, from 1, of an example's first positive in the whole pool, not
        counting other passages of pages that the example names; examples without a positive are
        left out. `Success@k` is the share of examples with a correct passage among the first k. A
        passage is correct if it contains the tokens of an answer. If the example has no answers,
        the correct passages are its positives and those of the named pages.
        """
        # (b, d) @ (d, m) -> (b, m)
        return self.evaluate_scores(
            question_vectors[i : i + _SCORE_BATCH] @ passage_vectors.T
            for i in range(0, len(question_vectors), _SCORE_BATCH)
        )

    def evaluate_scores(self, blocks: Iterable[Vectors]) -> Measures:
        """Return the measures of `evaluate` from blocks of (b, m) scores, one row per example."""
        answer_ranks, positive_ranks = list[int | None](), list[int]()
        score_rows = (pool_scores for block in blocks for pool_scores in block)
        for i, (example, all_scores) in enumerate(zip(self.examples, score_rows, strict=True)):
            pool_scores = self._exclude_own_document(i, all_scores)
            answer_ranks.append(self._rank_first_answer(example, pool_scores))
            if example.positives:
                positive_score = pool_scores[self.row_by_hash[example.positives[0].hash]]
                n_named_above = int((pool_scores[self._named_rows.get(i, [])] > positive_score).sum())
                positive_ranks.append(int((pool_scores > positive_score).sum()) - n_named_above + 1)
        average_rank = {"average_rank": sum(positive_ranks) / len(positive_ranks)} if positive_ranks else {}
        return {**average_rank, **measure_success(answer_ranks)}

    def compute_successes(self, question_vectors: Vectors, passage_vectors: Vectors, k: int) -> npt.NDArray[np.bool_]:
        """Return (n,) bool: whether an example has a correct passage among the first `k` <= 20."""
        answer_ranks = [
            self._rank_first_answer(example, self._exclude_own_document(i, question_vector @ passage_vectors.T))
            for i, (example, question_vector) in enumerate(zip(self.examples, question_vectors, strict=True))
        ]
        return np.array([answer_rank is not None and answer_rank <= k for answer_rank in answer_ranks])

    def _find_document_rows(self) -> tuple[dict[int, list[int]], dict[int, list[int]]]:
        """Return two mappings from the position of an example to rows of the pool: those of the
        document that is its question, and those of the pages that it names.
        """
        rows_by_page: dict[str, list[int]] = {}
        for row, passage in enumerate(self.pool):
            rows_by_page.setdefault(passage.page_id, []).append(row)
        rows = self.row_by_hash
        own_rows = {
            i: [*rows_by_page.get(doc.id, ()), *([rows[doc.hash]] if doc.hash in rows else [])]
            for i, example in enumerate(self.examples)
            if (doc := example.own_document)
        }
        named_rows = {
            i: [row for page in example.pages for row in rows_by_page.get(page, ())]
            for i, example in enumerate(self.examples)
        }
        return own_rows, named_rows

    def _exclude_own_document(self, example_position: int, scores: Vectors) -> Vectors:
        """Return the scores of an example, with -inf for the document that is its question."""
        if not self._own_rows.get(example_position):
            return scores
        masked_scores = scores.copy()
        masked_scores[self._own_rows[example_position]] = -np.inf
        return masked_scores

    def _rank_first_answer(self, example: Example, scores: Vectors) -> int | None:
        """Return the rank, from 1, of the first correct passage; None if the rank is above 20."""
        depth = min(CUTOFFS[-1], len(scores))
        top_rows = np.argpartition(-scores, depth - 1)[:depth]  # (m,) -> (depth,)
        ranked_passages = [self.pool[row] for row in top_rows[np.argsort(-scores[top_rows], kind="stable")]]
        return find_first_answer_rank(example, ranked_passages)


def measure_success(answer_ranks: Sequence[int | None], depth: int = CUTOFFS[-1]) -> dict[str, float]:
    """Return `Success@k` for each cutoff k up to `depth`; a rank is None if nothing is correct."""
    return {
        f"Success@{k}": sum(rank is not None and rank <= k for rank in answer_ranks) / len(answer_ranks)
        for k in CUTOFFS
        if k <= depth
    }


def find_first_answer_rank(example: Example, ranked_passages: Sequence[Passage]) -> int | None:
    """Return the rank, from 1, of the first passage that answers the question, or else None."""
    answer_matcher, positive_hashes = AnswerMatcher(example.answers), {passage.hash for passage in example.positives}
    for rank, passage in enumerate(ranked_passages, start=1):
        is_relevant = passage.hash in positive_hashes or passage.page_id in example.pages
        if answer_matcher.match(passage.text) if example.answers else is_relevant:
            return rank
    return None


@dataclass(frozen=True, slots=True)
class GroupRecipe:
    """Settings of all tasks on groups of examples; subclasses may change the defaults."""

    batch_size: int = 32  # number of questions per batch and process
    goal: str = "average_rank"  # dev measure that selects the best weights
    seed: int = 12345  # random seed of the example order and of the negatives


R = TypeVar("R", bound=GroupRecipe)


class GroupTask(ABC, Generic[B, M, R]):
    """Base class of tasks whose batches are groups of examples."""

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
        """Store the data; the evaluation ranks `corpus` and the passages of dev examples.

        `digests` are the digests of the files of the initial models and the teacher.

        Raises:
            InputError: no example of `train` is complete; or an example is incomplete, and the
                recipe refuses incomplete examples.
        """
        self.module, self._recipe = module, recipe
        self.train = self.keep_complete(train)
        self.goal = Goal.for_measure(recipe.goal)
        self._dev, self._corpus, self._digests = dev, tuple(corpus), dict(digests or {})
        self.check_data()

    def check_data(self) -> None:
        """Check that the examples suit the task; `train` has only complete examples."""

    def check_goal(self) -> None:
        """Check that the dev examples have what the goal measures.

        Raises:
            UsageError: no dev example has a positive, which the goal needs; or there is no dev
                example.
        """
        if not self.goal.larger and not self._ranking_evaluator.positions_with_positives:
            goal = self._recipe.goal
            raise UsageError(f"goal {goal} needs dev examples with passages: use Success@20, or mine them")

    @cached_property
    def _ranking_evaluator(self) -> RankingEvaluator:
        """The evaluator of the dev set; raises UsageError if this has no example or no passage."""
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
        """Return the shuffled batches of an epoch; an incomplete last batch is dropped."""
        rng = random.Random(f"{self._recipe.seed} {epoch}")
        return [self.build_batch(group, rng) for group in group_examples(self.train, self._recipe.batch_size, rng)]

    def ids(self, batch: B) -> Sequence[str]:
        """Return the ids of the examples in a batch."""
        return [example.id for example in batch.examples]

    def save(self, folder: Path) -> None:
        """Write a folder for each encoder of the module, such as `question/` and `passage/`."""
        module: Any = self.module
        module.save(folder)

    @abstractmethod
    def keep_complete(self, examples: Sequence[Example]) -> list[Example]:
        """Return the examples that have all passages that a batch needs; raise an error for any
        other example if the recipe refuses incomplete examples.
        """

    @abstractmethod
    def build_batch(self, examples: Sequence[Example], rng: random.Random) -> B:
        """Build a batch of examples; negatives are drawn with `rng`."""


class ContrastTask(GroupTask[DprBatch, M, R]):
    """Base class of tasks with in-batch negatives; they rank passages for dev questions.

    The recipe has the settings `without_positive` and `hard_negatives`.
    """

    def check_data(self) -> None:
        """Check that the best weights can be selected with the dev examples.

        Raises:
            UsageError: there are no dev examples, or no dev example has a positive, which the goal
                needs.
        """
        if not self._dev:
            raise UsageError("there is no dev example to select the best weights with: give a dev file")
        self.check_goal()

    def keep_complete(self, examples: Sequence[Example]) -> list[Example]:
        """Return the examples that have a positive."""
        recipe: Any = self._recipe
        return keep_complete_examples(examples, recipe.without_positive, needs_negatives=False)

    def build_batch(self, examples: Sequence[Example], rng: random.Random) -> DprBatch:
        """Build a batch of the examples with as many hard negatives as the recipe says."""
        recipe: Any = self._recipe
        return build_dpr_batch(examples, recipe.hard_negatives, rng)


class ListTask(GroupTask[ListBatch, M, R]):
    """Base class of tasks whose batches are lists of a positive and several negatives.

    The recipe has the settings `missing` and `negatives`.
    """

    def keep_complete(self, examples: Sequence[Example]) -> list[Example]:
        """Return the examples that have a positive and a negative."""
        recipe: Any = self._recipe
        return keep_complete_examples(examples, recipe.missing)

    def build_batch(self, examples: Sequence[Example], rng: random.Random) -> ListBatch:
        """Build a list for each example, with as many negatives as the recipe says."""
        recipe: Any = self._recipe
        return build_list_batch(examples, recipe.negatives, rng)


@dataclass(frozen=True, slots=True)
class PairRecipe(GroupRecipe):
    """Settings of a bi-encoder's training."""

    # whether questions and passages share one encoder; DPR has two encoders, the MarginMSE paper
    # has one
    shared: bool = False
    # whether only the question encoder is trained, so that an index stays valid; the papers on DPR
    # and MarginMSE train all encoders
    freeze_passages: bool = False
    # divisor of the scores in the softmax; 0.05 for vectors of unit length instead of 1, because
    # a softmax over cosines, which lie in [-1, 1], is almost uniform
    temperature: float = 1.0

    def load_encoders(self, question: str | Path, passage: str | Path | None = None) -> "BiEncoder":
        """Load the encoders with these settings; see `BiEncoder.load`."""
        return BiEncoder.load(question, passage, shared=self.shared, frozen=self.freeze_passages)


def estimate_pair_costs(
    job: Job[Any], mining: NegativesRecipe, recipe: PairRecipe, n_negatives: int, models: Mapping[str, Architecture]
) -> TrainingCosts:
    """Return the costs to encode a batch in which each question has one positive and `n_negatives`
    negatives.
    """
    question = models["question"]
    passage = models.get("passage", question)
    trained_models = [question] if recipe.shared or recipe.freeze_passages else [question, passage]
    n_passages = recipe.batch_size * (1 + n_negatives)
    activation_bytes = question.estimate_activation_bytes(recipe.batch_size, QUESTION_TOKENS)
    activation_bytes += 0 if recipe.freeze_passages else passage.estimate_activation_bytes(n_passages, PASSAGE_TOKENS)
    stage_bytes = {
        "train": estimate_weight_bytes(question, passage)
        + (TRAINED_COPIES - 1) * estimate_weight_bytes(*trained_models)
        + activation_bytes,
        "mine": estimate_mining_bytes(job.snapshot, mining),
    }
    forward_operations = (
        recipe.batch_size * QUESTION_TOKENS * question.operations_per_token
        + n_passages * PASSAGE_TOKENS * passage.operations_per_token
    )
    n_ranked = min(mining.ranked, job.snapshot.n) + len(job.examples["dev"])
    n_batches = max(1, len(job.examples["train"]) // recipe.batch_size)
    return TrainingCosts(
        stage_bytes,
        n_batches,
        TRAINING_PASSES * forward_operations,
        n_ranked * PASSAGE_TOKENS * passage.operations_per_token,
    )


class TextTask:
    """Base class of tasks whose batches are passages of a snapshot."""

    kind: str  # the objective's name
    module: Any  # the module that is trained; it has a method `save`

    def __init__(self, snapshot: Snapshot, rows: Rows, recipe: Any, digests: Mapping[str, str] | None = None) -> None:
        """Split `rows` into training and held-out texts.

        `recipe` is a record with `batch_size`, `seed` and `dev_texts`; `digests` are the digests of
        the files of the initial models.
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
        """Return the shuffled batches of an epoch."""
        return EpochBatches(self._split.train, self._recipe.batch_size, self._recipe.seed, epoch)

    def ids(self, batch: TextBatch) -> Sequence[str]:
        """Return the ids of the passages in a batch."""
        return [passage.id for passage in self._snapshot.passages(batch.rows)]

    def save(self, folder: Path) -> None:
        """Write a folder for each model of the module, such as `question/` and `passage/`."""
        self.module.save(folder)


class MiningObjective(Objective[S]):
    """Base class of objectives that mine negatives and positives before the training.

    The settings have a `NegativesRecipe` in the table `negatives`.
    """

    version = 1  # Since version 1, an example keeps its negatives if its positive is mined.

    def prepare(self, job: Job[S]) -> Examples:
        """Return the examples with mined negatives and positives; see `add_mined_passages`."""
        settings: Any = job.settings
        return add_mined_passages(
            job.examples, job.snapshot, settings.negatives, job.on_progress, job.indexer, job.runner
        )


def load_teacher(job: Job[Any]) -> PairScorer:
    """Load the teacher of a training. Its scores are kept, so that a resumed run uses them again.

    If there are workers, they compute the scores and the store records them. Otherwise this process
    computes the scores and caches them in the training's folder. This process also computes them if
    the teacher is an ONNX graph with external weight files, because the model files of a worker are
    links, which onnxruntime does not follow.

    Raises:
        InputError: a file is missing or corrupt, or the model is not a cross-encoder.
    """
    folder, identity, cpu = Path(job.origins.names[TEACHER]), job.digests.get(TEACHER, ""), job.settings.loop.cpu
    onnx = runs_on_onnx(folder)
    dtype = "float32" if onnx else choose_frozen_dtype(job.settings.loop)
    # The teacher is always loaded here, so that an invalid teacher fails before any work.
    teacher = CrossEncoder.load(folder, device="cpu" if cpu else None, dtype=dtype)
    if job.runner is not None and identity and not (onnx and may_have_external_data(folder)):
        return WorkerPairScorer(job.store, folder, identity, job.runner, job.on_progress, cpu, onnx=onnx, dtype=dtype)
    # Scores of different dtypes must not be mixed.
    identity += "" if dtype == "float32" else f" {dtype}"
    return CachedPairScorer(teacher, identity, job.work, job.on_progress) if job.work else teacher


def count_teacher_operations(n_examples: int, n_passages: int, teacher: Architecture) -> float:
    """Return the floating-point operations to score `n_passages` passages for each of `n_examples`
    questions.
    """
    return n_examples * n_passages * (QUESTION_TOKENS + PASSAGE_TOKENS) * teacher.operations_per_token


class BiEncoder(nn.Module):
    """A question and a passage encoder with one vector space; create it with `load`."""

    def __init__(self, question: TrainableEncoder, passage: TrainableEncoder, *, frozen: bool = False) -> None:
        """Combine two encoders, which may be the same; `frozen` freezes the passage encoder.

        Raises:
            UsageError: the dimensions differ, or a shared encoder is to be frozen.
        """
        super().__init__()
        if question.dim != passage.dim:
            raise UsageError(
                f"question encoder {question.folder} has {question.dim} dimensions and passage "
                f"encoder {passage.folder} has {passage.dim}: use encoders of equal dimension"
            )
        if frozen and question is passage:
            raise UsageError("a shared encoder cannot be frozen for passages and trained for questions: use two")
        self.question, self.passage, self.frozen = question, passage, frozen
        # passage vectors of a frozen encoder, by passage hash
        self._cached_vectors: dict[str, Tensor] = {}
        if frozen:
            passage.requires_grad_(False)

    @classmethod
    def load(
        cls,
        question: str | Path,
        passage: str | Path | None = None,
        *,
        shared: bool = False,
        frozen: bool = False,
        device: str | None = None,
    ) -> Self:
        """Load the encoders named `question` and `passage`, which are folders or hub names.

        If `passage` is None, both encoders are loaded from `question`. With `shared`, a single
        encoder encodes questions and passages.

        Raises:
            InputError: an encoder cannot be loaded.
            UsageError: see `__init__`; or the encoder is shared, but two folders are given.
        """
        question_encoder = TrainableEncoder.load(question, "question", device=device)
        is_shared = shared and passage in {None, question}
        if shared and not is_shared:
            raise UsageError(f"encoders {question} and {passage} cannot be shared: name one of them, or train two")
        passage_encoder = (
            question_encoder if is_shared else TrainableEncoder.load(passage or question, "passage", device=device)
        )
        return cls(question_encoder, passage_encoder, frozen=frozen)

    def embed_questions(self, questions: Sequence[str]) -> Tensor:
        """Return (b, d) float32 vectors of questions, with a gradient."""
        vectors: Tensor = self.question(questions, "question")
        return vectors

    def embed_passages(self, passages: Sequence[Passage]) -> Tensor:
        """Return (m, d) float32 vectors of passages, with a gradient.

        Vectors of a frozen encoder have no gradient and are computed only once.
        """
        if not self.frozen:
            return self.passage.embed_passages(passages)
        if new_passages := list(
            {passage.hash: passage for passage in passages if passage.hash not in self._cached_vectors}.values()
        ):
            vectors = torch.from_numpy(self.encode_passages(new_passages)).to(self.passage.device)
            self._cached_vectors.update(zip([passage.hash for passage in new_passages], vectors, strict=True))
        # m times (d,) -> (m, d)
        return torch.stack([self._cached_vectors[passage.hash] for passage in passages])

    def encode_questions(self, questions: Sequence[str]) -> Vectors:
        """Return (n, d) float32 vectors of questions, without a gradient."""
        return self.question.encode(questions, "question")

    def encode_passages(self, passages: Sequence[Passage]) -> Vectors:
        """Return (n, d) float32 vectors of passages, without a gradient."""
        return self.passage.encode([(passage.title, passage.text) for passage in passages], "passage")

    def digests(self) -> dict[str, str]:
        """Return the digests of the weights before training."""
        return {
            name: digest_weights(encoder.folder)
            for name, encoder in (("question", self.question), ("passage", self.passage))
        }

    def save(self, folder: Path) -> Space:
        """Write the encoders to `passage/` and `question/`; return the space of the passages."""
        space = self.passage.save_passage_encoder(folder / "passage")
        self.question.save(folder / "question", target_space=space)
        return space
