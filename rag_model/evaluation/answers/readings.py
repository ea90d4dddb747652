"""A model's answer to each question, with its passages: the record for all measures. A reading is kept as one JSON
object, so that answers can be measured, compared and shown again without the model.
"""

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol, Self

from rag_model.errors import UsageError
from rag_model.evaluation.questions.files import Question
from rag_model.reading.answer import Answer, Usage
from rag_model.reading.citations import Statement
from rag_model.reading.confidence import with_closed_book
from rag_model.retrieve.retriever import Hit


class Reads(Protocol):
    """Answers questions from given passages, such as `rag_model.reading.reader.Reader`."""

    def answer_from(self, questions: Sequence[str], hits: Sequence[Sequence[Hit]]) -> Sequence[Answer]:
        """Return one answer per question, in order, from the given passages; closed book if there are none."""
        ...


@dataclass(frozen=True, slots=True)
class Shown:
    """One passage of an answer."""

    id: str
    page_id: str
    title: str
    text: str
    score: float  # the retriever's
    weight: float | None  # p(z|x); None where passages are not marginalised
    posterior: float | None  # p(z|x,y); as the weight


@dataclass(frozen=True, slots=True)
class ReadExcerpt:
    """One numbered entry of the context that an answer was written from."""

    title: str
    text: str  # as the writer read it
    places: tuple[int, ...]  # of its passages, in the order of their rank


@dataclass(frozen=True, slots=True)
class Reading:
    """One question's answer and its passages, in the order of their rank."""

    question: str  # its id
    answer: str  # without its citations
    log_likelihood: float | None  # log p(y|x), nats; None: not known, or a probability of 0
    passages: tuple[Shown, ...]
    ended: bool = True  # False: cut at the most tokens of decoding
    context: tuple[ReadExcerpt, ...] = ()  # by number, from 1; empty: passages were not numbered
    statements: tuple[Statement, ...] = ()  # of the answer, with what each cites; where there is a context
    usage: Usage | None = None  # tokens; None: not counted
    closed_book: float | None = None  # log p(answer|question alone), nats; None: not known
    seconds: float | None = field(default=None, compare=False)  # to answer, a share of its batch's; None: not measured
    stages: Mapping[str, float] = field(default_factory=dict, compare=False)  # seconds of each stage of answering

    @property
    def pages(self) -> tuple[str, ...]:
        """The pages of the passages, in the order of their rank, with repetitions."""
        return tuple(passage.page_id for passage in self.passages)

    def excerpt(self, number: int) -> ReadExcerpt:
        """Return what a citation of that number names."""
        return self.context[number - 1]

    def to_json(self) -> dict[str, Any]:
        """Return the reading as JSON values."""
        return asdict(self)

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Self:
        """Read back the result of `to_json`."""
        return cls(
            value["question"],
            value["answer"],
            value["log_likelihood"],
            tuple(Shown(**passage) for passage in value["passages"]),
            value["ended"],
            tuple(ReadExcerpt(one["title"], one["text"], tuple(one["places"])) for one in value["context"]),
            tuple(Statement(one["text"], tuple(one["cited"]), tuple(one["unknown"])) for one in value["statements"]),
            None if value["usage"] is None else Usage(**value["usage"]),
            value["closed_book"],
            value["seconds"],
            value.get("stages", {}),  # answers that were kept before stages were timed have none
        )


def read(reader: Reads, questions: Sequence[Question], hits: Sequence[Sequence[Hit]]) -> list[Reading]:
    """Let the reader answer each question from its hits; return the answers, in order.

    An answer's seconds are the sum of its stages, where the reader times them.
    """
    began = time.perf_counter()
    answers = reader.answer_from([question.text for question in questions], hits)
    seconds = (time.perf_counter() - began) / max(1, len(questions))
    answers = _with_memory(reader, answers)
    return [_reading(question.id, answer, seconds) for question, answer in zip(questions, answers, strict=True)]


def _reading(identity: str, answer: Answer, seconds: float) -> Reading:
    shown = (
        Shown(
            one.hit.passage.id,
            one.hit.passage.page_id,
            one.hit.passage.title,
            one.hit.passage.text,
            one.hit.score,
            one.weight,
            one.posterior,
        )
        for one in answer.support
    )
    return Reading(
        identity,
        answer.plain,
        _finite(answer.log_likelihood),
        tuple(shown),
        answer.ended,
        tuple(ReadExcerpt(one.title, one.text, one.places) for one in answer.context),
        answer.statements if answer.context else (),
        answer.usage,
        _finite(answer.closed_book),
        sum(answer.seconds.values()) if answer.seconds else seconds,
        dict(answer.seconds),
    )


def _with_memory(reader: Reads, answers: Sequence[Answer]) -> Sequence[Answer]:
    """Return the answers with their likelihood from the question alone, where the reader tells likelihoods."""
    scores: Any = reader
    if not hasattr(reader, "log_likelihood"):
        return answers
    try:
        return with_closed_book(scores, answers)
    except UsageError:
        return answers  # an endpoint, say


def _finite(likelihood: float | None) -> float | None:
    return likelihood if likelihood is not None and math.isfinite(likelihood) else None
