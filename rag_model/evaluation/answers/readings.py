"""A model's answer to each question, with its passages: the record for all measures. A reading is kept as one JSON
object, so that answers can be measured, compared and shown again without the model.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Protocol, Self

from rag_model.evaluation.questions.files import Question
from rag_model.retrieve.retriever import Hit

if TYPE_CHECKING:
    from rag_model.reading.answer import Answer


class Reads(Protocol):
    """Answers questions from given passages, such as `rag_model.reading.reader.Reader`."""

    def answer_from(self, questions: Sequence[str], hits: Sequence[Sequence[Hit]]) -> "Sequence[Answer]":
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
class Reading:
    """One question's answer and its passages, in the order of their rank."""

    question: str  # its id
    answer: str
    log_likelihood: float | None  # log p(y|x), nats; None: not known, or a probability of 0
    passages: tuple[Shown, ...]
    ended: bool = True  # False: cut at the most tokens of decoding

    @property
    def pages(self) -> tuple[str, ...]:
        """The pages of the passages, in the order of their rank, with repetitions."""
        return tuple(passage.page_id for passage in self.passages)

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
        )


def read(reader: Reads, questions: Sequence[Question], hits: Sequence[Sequence[Hit]]) -> list[Reading]:
    """Let the reader answer each question from its hits; return the answers, in order."""
    answers = reader.answer_from([question.text for question in questions], hits)
    return [_reading(question.id, answer) for question, answer in zip(questions, answers, strict=True)]


def _reading(identity: str, answer: "Answer") -> Reading:
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
    likelihood = answer.log_likelihood
    known = likelihood if likelihood is not None and math.isfinite(likelihood) else None
    return Reading(identity, answer.text, known, tuple(shown), answer.ended)
