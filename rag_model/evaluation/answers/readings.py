"""Readings: a model's answer to a question, with its passages, from which measures are computed.

A reading is stored as one JSON object, so that answers can be measured, compared and shown again
without the model.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rag_model.errors import UsageError
from rag_model.evaluation.questions import Question
from rag_model.reading.answer import Answer, AnswerProblem, Memory, Statement, TokenUsage, name_memory, replace_infinite
from rag_model.reading.confidence import add_closed_book
from rag_model.reading.reader import Reader
from rag_model.retrieve.hits import Hit


@dataclass(frozen=True, slots=True)
class AnswerPassage:
    """One passage from which a question was answered."""

    id: str
    page_id: str
    title: str
    text: str
    score: float  # the retriever's score
    weight: float | None  # p(z|x); None if the reader does not marginalize over passages
    posterior: float | None  # p(z|x,y); None if the weight is None


@dataclass(frozen=True, slots=True)
class ReadContextEntry:
    """One numbered entry of the context in a prompt; answers cite its number."""

    title: str
    text: str  # text of the entry in the prompt
    # ascending positions in `Reading.passages` of the passages that have this text
    places: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Reading:
    """The answer to one question, with the passages that were read, best first."""

    question: str  # id of the question
    answer: str  # text of the answer without citations
    # log p(y|x) in nats; None if it is unknown or the probability is 0
    log_likelihood: float | None
    passages: tuple[AnswerPassage, ...]
    ended: bool = True  # False if the answer was truncated at the maximum number of tokens
    # numbered context entries, in order; empty if the prompt did not number its passages
    context: tuple[ReadContextEntry, ...] = ()
    statements: tuple[Statement, ...] = ()  # sentences with citations; empty without a context
    usage: TokenUsage | None = None  # None if tokens were not counted
    closed_book: float | None = None  # log p(y|question) in nats; None if it is unknown
    # seconds to answer, or an equal share of the seconds of its batch; None if unknown
    seconds: float | None = field(default=None, compare=False)
    stages: Mapping[str, float] = field(default_factory=dict, compare=False)  # seconds by stage
    problem: AnswerProblem | None = None  # the reason why the answer is empty or doubtful

    @property
    def page_ids(self) -> tuple[str, ...]:
        """The page ids of the passages, best first, with duplicates."""
        return tuple(passage.page_id for passage in self.passages)

    @property
    def memory(self) -> Memory | None:
        """Whether the answer comes from the weights or the passages; None if it is empty."""
        read_texts = [entry.text for entry in self.context] or [passage.text for passage in self.passages if passage.id]
        return name_memory(self.answer, read_texts)

    @property
    def is_final(self) -> bool:
        """Whether the next run may reuse the answer instead of generating it again.

        An answer with a problem is provisional, because the endpoint may be set up differently in
        the next run. But reasoning that used up all tokens would use them up again, because their
        number is a setting of the evaluation.
        """
        return self.problem is None or (self.problem.kind == "reasoning" and not self.ended)

    def get_entry(self, number: int) -> ReadContextEntry:
        """Return the entry to which a citation with this number refers."""
        return self.context[number - 1]


def produce_readings(reader: Reader, questions: Sequence[Question], hits: Sequence[Sequence[Hit]]) -> list[Reading]:
    """Answer each question from its hits and return the readings, in order.

    The seconds of an answer are the sum over its stages if the reader times stages. Otherwise they
    are an equal share of the time for all questions.
    """
    start_time = time.perf_counter()
    answers = reader.answer_from([question.text for question in questions], hits)
    mean_seconds = (time.perf_counter() - start_time) / max(1, len(questions))
    answers = _add_closed_book(reader, answers)
    return [
        _build_reading(question.id, answer, mean_seconds) for question, answer in zip(questions, answers, strict=True)
    ]


def describe_problems(readings: Sequence[Reading]) -> list[str]:
    """Return one sentence per kind of problem. It names the number of affected answers and the
    first message.
    """
    messages_by_kind: dict[str, list[str]] = {}
    for reading in readings:
        if reading.problem is not None:
            messages_by_kind.setdefault(reading.problem.kind, []).append(reading.problem.message)
    return [
        f"{len(messages):,} of {len(readings):,} answers have the problem `{kind}`; the first: {messages[0]}"
        for kind, messages in messages_by_kind.items()
    ]


def _build_reading(question_id: str, answer: Answer, seconds: float) -> Reading:
    answer_passages = (
        AnswerPassage(
            support.hit.passage.id,
            support.hit.passage.page_id,
            support.hit.passage.title,
            support.hit.passage.text,
            support.hit.score,
            support.weight,
            support.posterior,
        )
        for support in answer.support
    )
    return Reading(
        question_id,
        answer.plain,
        replace_infinite(answer.log_likelihood),
        tuple(answer_passages),
        answer.ended,
        tuple(ReadContextEntry(entry.title, entry.text, entry.places) for entry in answer.context),
        answer.statements if answer.context else (),
        answer.usage,
        replace_infinite(answer.closed_book),
        sum(answer.seconds.values()) if answer.seconds else seconds,
        dict(answer.seconds),
        answer.problem,
    )


def _add_closed_book(reader: Reader, answers: list[Answer]) -> list[Answer]:
    """Return the answers with their closed-book likelihood, if the reader computes likelihoods."""
    likelihood_reader: Any = reader
    if not hasattr(reader, "log_likelihood"):
        return answers
    try:
        return add_closed_book(likelihood_reader, answers)
    except UsageError:
        return answers  # The reader cannot compute likelihoods: many endpoints return none.
