"""RAG fine-tuning: train question encoder and generator on answers alone; passages and index do not change.

The loss is -log p(y|x) with the passages marginalised (Lewis et al. 2020, sections 2.1 and 2.4), over the k passages
that the current question encoder finds. The choice of passages has no gradient; their weights have one, through the
inner products of the question's vector with the vectors in the snapshot.
"""

import random
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from rag_model.encoders.encoder import Vectors
from rag_model.encoders.space import Space
from rag_model.encoders.trainable import TrainableEncoder
from rag_model.errors import InputError, UsageError
from rag_model.evaluation.answers.collapse import LIMITS, Collapse, Limits, measure
from rag_model.evaluation.questions.match import Answers
from rag_model.generate.folder import save_rag
from rag_model.generate.generator import Contexts, Targets
from rag_model.generate.rag import Rag, RagSettings, Variant, WeighedBy
from rag_model.retrieve.expression import one_of
from rag_model.store.versions.snapshot import Snapshot
from rag_model.training.data.examples import Example, digest_examples
from rag_model.training.data.memory import Memory, Ranked, Recalled
from rag_model.training.loop.task import Goal, Measures
from rag_model.training.objectives.answering import Answering

Retrieval = Literal["batch", "once"]
Answered = Literal["each", "first"]
Missing = Literal["drop", "refuse"]
GoalName = Literal["nll", "EM", "F1"]
Frozen = Literal["none", "question", "generator"]

_AT_ONCE = 256  # questions


@dataclass(frozen=True, slots=True)
class RagRecipe:
    """Settings of RAG. "Code" is finetune_rag.sh, "paper" Lewis et al. 2020."""

    k: int = 5  # passages per question; paper, section 3: 5 or 10 in training
    temperature: float = 1.0  # of p(z|x); paper: 1. With vectors of unit length use 0.05: cosines differ little
    label_smoothing: float = 0.1  # code: 0.1
    exclude_bos: bool = False  # code: false
    batch_size: int = 8  # questions per batch and process; code: train_batch_size 8
    retriever: str | None = None  # an expression; not set: the snapshot's default. Paper, section 3: FAISS's HNSW
    index: str | None = None  # of the snapshot: the short form of `retriever`
    retrieve: Retrieval = "batch"  # paper, section 2.4: with the current encoder; once: with the initial one
    weighed_by: WeighedBy = "products"  # logits of p(z|x); paper, section 4.5: BM25's scores, with BM25 as retriever
    frozen: Frozen = "none"  # what does not learn; paper, section 4.5: the question encoder, as an ablation
    targets: Answered = "each"  # of several answers; paper, appendix D: each answer makes a separate pair
    without_answer: Missing = "drop"  # an example without an answer cannot be trained on
    goal: GoalName = "nll"  # selects the best weights, on the dev set; code: EM, which needs decoding
    answered: int = 100  # dev questions to answer at each evaluation, for EM and F1; 0: none
    max_new_tokens: int = 25  # per answer; code: val_max_target_length 25
    refuse_collapse: bool = True  # if all questions get the same passages, or answers do not depend on passages
    limits: Limits = LIMITS  # the limits of that check
    seed: int = 12345  # of the order

    def __post_init__(self) -> None:
        if self.batch_size < 1 or self.answered < 0 or self.max_new_tokens < 1:
            raise UsageError(
                f"batch_size {self.batch_size}, answered {self.answered} and max_new_tokens {self.max_new_tokens} "
                "of a RAG recipe: need batch_size >= 1, answered >= 0 and max_new_tokens >= 1"
            )
        one_of(self.index, self.retriever)
        choices = {"retrieve": Retrieval, "targets": Answered, "without_answer": Missing, "goal": GoalName}
        choices |= {"frozen": Frozen, "weighed_by": WeighedBy}
        for name, known in choices.items():
            if getattr(self, name) not in get_args(known):
                raise UsageError(f"{name} {getattr(self, name)!r} is unknown: use one of {', '.join(get_args(known))}")
        if self.goal != "nll" and not self.answered:
            raise UsageError(f"goal {self.goal} needs answers: set answered above 0")
        if self.weighed_by == "scores" and self.frozen == "generator":
            raise UsageError('with weighed_by = "scores" only the generator learns: set frozen = "none"')

    @property
    def expression(self) -> str | None:
        """The retriever that finds passages, in one spelling; None: the snapshot's default."""
        return one_of(self.index, self.retriever)

    def settings(self, kind: Variant) -> RagSettings:
        """Return the settings of the model to train."""
        return RagSettings(
            kind, self.k, self.temperature, self.label_smoothing, self.exclude_bos, weighed_by=self.weighed_by
        )


@dataclass(frozen=True, slots=True)
class Pair:
    """A question and one of its answers."""

    example: Example
    answer: str


RagBatch = tuple[Pair, ...]


class RagTask:
    """Train a `Rag` on questions and answers over a snapshot."""

    def __init__(
        self,
        rag: Rag,
        snapshot: Snapshot,
        train: Sequence[Example],
        dev: Sequence[Example],
        recipe: RagRecipe,
        began: Mapping[str, str] | None = None,
    ) -> None:
        """Set the data; `began`: digests of the initial question encoder and generator, for the record.

        Raises:
            InputError: no training example has an answer; or one has none, and the recipe refuses that.
            RefusedError: the question encoder's space is not the snapshot's.
            UsageError: no dev example has an answer, or the snapshot has no such index.
        """
        question = rag.question
        if not isinstance(question, TrainableEncoder):
            raise UsageError(f"question encoder {type(question).__name__} cannot be trained: use TrainableEncoder")
        self.module, self._question, self._recipe = rag, question, recipe
        _freeze(rag, recipe)
        self.goal = Goal(recipe.goal, larger=recipe.goal != "nll")
        self._train = _pairs(train, recipe)
        self._dev = [Pair(one, one.answers[0]) for one in dev if one.answers]
        if not self._dev:
            raise UsageError("no dev example has an answer to select the best weights: give a dev file with answers")
        self._memory = Memory(snapshot, question, recipe.expression)
        self._snapshot = snapshot
        self._began = {"snapshot": snapshot.id, "models": dict(began or {})}
        answered = [pair.example for pair in self._dev[: recipe.answered]]
        self._answering = Answering(rag, answered, recipe.max_new_tokens, recipe.batch_size, recipe.seed)
        self._first = self._first_recall() if recipe.retrieve == "once" else {}

    def recipe(self) -> Mapping[str, Any]:
        """Return the recipe, and the digests of data and models."""
        return {
            "kind": f"rag-{self.module.settings.kind}",
            "settings": asdict(self._recipe),
            "train": digest_examples(dict.fromkeys(pair.example for pair in self._train)),
            "dev": digest_examples(pair.example for pair in self._dev),
            **self._began,
        }

    @property
    def asked(self) -> str:
        """The id of the snapshot that is currently searched."""
        return self._snapshot.id

    def move(self, step: int) -> Measures:
        """Keep the snapshot; a training with a rebuilt index overrides this and calls `turn_to`."""
        return {}

    def ask(self, snapshot: str) -> None:
        """Search the snapshot with this id, of the same store; see `turn_to`."""
        if snapshot != self.asked:
            self.turn_to(Snapshot.open(str(self._snapshot.where), snapshot))

    def turn_to(self, snapshot: Snapshot) -> None:
        """Search this snapshot from now on; on an error keep the one before. If a passage encoder is trained, the
        snapshot's vectors are assumed to come from an earlier step of it.

        Raises:
            RefusedError: no passage encoder is trained, and the snapshot has another space.
            UsageError: the recipe retrieves once, or the snapshot has no such index.
        """
        if self._recipe.retrieve == "once":
            raise UsageError('a recipe that retrieves once cannot move to another snapshot: set retrieve = "batch"')
        fixed = self._question if self.module.passage is None else None
        self._memory, self._snapshot = Memory(snapshot, fixed, self._recipe.expression), snapshot

    def batches(self, epoch: int) -> Sequence[RagBatch]:
        """Return an epoch's batches, shuffled by seed and epoch; the last one may be smaller."""
        order = random.Random(f"{self._recipe.seed} {epoch}").sample(self._train, len(self._train))
        size = self._recipe.batch_size
        return [tuple(order[start : start + size]) for start in range(0, len(order), size)]

    def ids(self, batch: RagBatch) -> Sequence[str]:
        """Return the ids of the batch's examples."""
        return [pair.example.id for pair in batch]

    def loss(self, batch: RagBatch) -> tuple[Tensor, Mapping[str, Tensor | float]]:
        """Return the mean loss of the questions, and the mean entropy of p(z|x) in nats: log k if it is uniform."""
        questions = [pair.example.question for pair in batch]
        asked = self.module.ask(questions)  # (b, d)
        recalled = self._recall(batch, asked)
        scores = self._scores(asked, recalled)  # (b, k)
        losses = self.module.loss(scores, *self._read(batch, recalled))  # (b,)
        prior = self.module.prior(scores.detach())
        return losses.mean(), {"prior_entropy": -(prior.exp() * prior).sum(1).mean()}  # (b, k) -> (b,) -> scalar

    def evaluate(self) -> Measures:
        """Return `nll` (nats per question, first answer), `Success@k`, `EM` and `F1` of some, and signs of collapse.
        These are `distinct` and `spread` of the passages, and `unchanged`: the share of those answers that do not
        change with another question's passages.

        Raises:
            CollapsedError: all questions get the same passages, and the recipe refuses that.
        """
        recalled = self._ask([pair.example.question for pair in self._dev])
        collapse = measure([[hit.passage.id for hit in some] for some in recalled.hits], self._snapshot.n)
        if self._recipe.refuse_collapse:
            collapse.check(self._recipe.limits)
        found = [
            any(Answers(pair.example.answers).are_in(hit.passage.text) for hit in some)
            for pair, some in zip(self._dev, recalled.hits, strict=True)
        ]
        k = len(recalled.hits[0])
        return {
            "nll": self._nll(recalled),
            f"Success@{k}": sum(found) / len(found),
            **self._answering.measure(recalled.hits),
            "distinct": float(collapse.distinct),
            "spread": collapse.spread,
        }

    def save(self, folder: Path) -> None:
        """Write the model as a folder that `load_rag` opens; its questions belong to the snapshot's space."""
        save_rag(self.module, folder, Space.from_json(self._snapshot.space or {}))

    def check(self, trained: Measures) -> None:
        """Check that the trained model's answers depend on its passages.

        Raises:
            CollapsedError: they do not, and the recipe refuses that.
        """
        asked = min(self._recipe.answered, len(self._dev))
        if self._recipe.refuse_collapse and "unchanged" in trained:
            Collapse(asked, 0.0, 0, 1.0, trained["unchanged"]).check(self._recipe.limits)

    def _first_recall(self) -> dict[str, list[Ranked]]:
        """Return each question's passages, found with the current encoder."""
        questions = list(dict.fromkeys(pair.example.question for pair in self._train))
        ranked: dict[str, list[Ranked]] = {}
        for start in range(0, len(questions), _AT_ONCE):
            for question, hits in zip(some := questions[start : start + _AT_ONCE], self._ask(some).hits, strict=True):
                ranked[question] = [(hit.row, hit.score) for hit in hits]
        return ranked

    def _recall(self, batch: RagBatch, asked: Tensor) -> Recalled:
        if self._recipe.retrieve == "batch":
            questions = [pair.example.question for pair in batch]
            return self._memory.recall(questions, array_of(asked), self._recipe.k)
        return self._memory.recalled([self._first[pair.example.question] for pair in batch])

    def _ask(self, questions: Sequence[str]) -> Recalled:
        return self._memory.recall(questions, self._question.encode_questions(questions), self._recipe.k)

    def _scores(self, asked: Tensor, recalled: Recalled) -> Tensor:
        """Return the (b, k) logits of p(z|x) in float32: inner products, with gradient to the questions, or scores.

        Autocast would compute a matrix product in bf16, which is too coarse to distinguish near passages.
        """
        if self._recipe.weighed_by == "scores":
            return torch.tensor([[hit.score for hit in some] for some in recalled.hits]).to(asked)
        vectors = self._vectors(recalled).to(asked)  # summed as `rag_model.retrieve.products.inner_products`
        return (vectors * asked[:, None]).sum(-1, dtype=torch.float64).to(asked)  # (b, k, d) * (b, 1, d) -> (b, k)

    def _vectors(self, recalled: Recalled) -> Tensor:
        """Return (b, k, d) vectors of the snapshot; if a passage encoder is trained, its own vectors, with gradient."""
        if self.module.passage is None:
            return torch.from_numpy(recalled.vectors)
        every = {passage.hash: passage for some in recalled.passages for passage in some}
        places = {key: place for place, key in enumerate(every)}
        rows = torch.tensor([[places[passage.hash] for passage in some] for some in recalled.passages])
        return self.module.passage.read(list(every.values()))[rows]  # (m, d) -> (b, k, d)

    def _read(self, batch: Sequence[Pair], recalled: Recalled) -> tuple[Contexts, Targets]:
        generator = self.module.generator
        contexts = generator.contexts([pair.example.question for pair in batch], recalled.passages)
        return contexts, generator.targets([pair.answer for pair in batch])

    def _nll(self, recalled: Recalled) -> float:
        """Return the mean -log p(y|x) of the dev set's first answers, without label smoothing."""
        size, total = self._recipe.batch_size, 0.0
        for start in range(0, len(self._dev), size):
            here = slice(start, start + size)
            batch, part = self._dev[here], Recalled(recalled.hits[here], recalled.vectors[here])
            asked = self.module.ask([pair.example.question for pair in batch])
            given = self._scores(asked, part), *self._read(batch, part)
            total -= float(self.module.log_likelihood(*given).log_p.sum().detach())
        return total / len(self._dev)


def _freeze(rag: Rag, recipe: RagRecipe) -> None:
    """Take the gradient from what does not learn; scores of a retriever have none for the question encoder."""
    if recipe.frozen == "question" or recipe.weighed_by == "scores":
        rag.question.requires_grad_(False)
    if recipe.frozen == "generator":
        rag.body.requires_grad_(False)


def _pairs(examples: Sequence[Example], recipe: RagRecipe) -> list[Pair]:
    if recipe.without_answer == "refuse" and (bare := next((one for one in examples if not one.answers), None)):
        raise InputError(f"example {bare.id} has no answer: give it one, or drop it")
    most = None if recipe.targets == "each" else 1
    pairs = [Pair(one, answer) for one in examples for answer in one.answers[:most]]
    if not pairs:
        raise InputError("no training example has an answer: give a file of questions with answers")
    return pairs


def array_of(vectors: Tensor) -> Vectors:
    """Return vectors as a float32 array, without gradient."""
    found: Vectors = vectors.detach().float().cpu().numpy()
    return found
