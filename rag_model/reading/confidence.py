r"""Confidence of answers, and a reader that withholds answers below a threshold.

| signal | score of an answer, larger is more confident |
| --- | --- |
| `likelihood` | log p(y\|x), in nats |
| `retrieval` | the retriever's score of the best passage |
| `passages` | log p(y\|x) - log p(y\|question), in nats: the gain from the passages |

`evaluation.answers.abstaining` chooses the signal and the threshold on questions with known
answers.
"""

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal, Protocol, Self, get_args

from rag_model.atomic_write import write_user_file
from rag_model.errors import InputError, UsageError
from rag_model.reading.answer import Answer, Confidence
from rag_model.reading.reader import (
    CONFIDENCE,
    NO_CALLBACKS,
    AnswerCallbacks,
    AnswerTimer,
    Reader,
    RetrievingReader,
    add_stage_seconds,
)
from rag_model.retrieve.hits import Hit
from rag_model.untrusted_text import parse_json

Signal = Literal["likelihood", "retrieval", "passages"]
SIGNALS: tuple[Signal, ...] = get_args(Signal)


class LikelihoodReader(Protocol):
    """A reader that computes the likelihood of given texts."""

    def log_likelihood(
        self, questions: Sequence[str], hits: Sequence[Sequence[Hit]], texts: Sequence[str]
    ) -> list[float]:
        """Return log p(text|question, passages) of each text in nats; log p(text|question) without
        hits.

        Raises:
            UsageError: the model does not compute likelihoods.
        """
        ...


@dataclass(frozen=True, slots=True)
class Threshold:
    """The minimum score of answers, by a signal; answers with a lower score are withheld."""

    signal: Signal
    least: float

    def __post_init__(self) -> None:
        if self.signal not in SIGNALS or not math.isfinite(self.least):
            raise UsageError(
                f"the threshold {self.least} of {self.signal} is invalid: give a finite number for "
                f"one of {', '.join(SIGNALS)}"
            )

    @classmethod
    def parse(cls, source: str) -> Self:
        """Parse a threshold: a number for the signal `likelihood`, or a file that `write` wrote.

        Raises:
            InputError: the file cannot be read, or has no threshold.
            UsageError: the number is not finite.
        """
        try:
            return cls("likelihood", float(source))
        except ValueError:
            pass
        try:
            threshold_fields = parse_json(Path(source).read_text(encoding="utf-8"))
            return cls(threshold_fields["signal"], float(threshold_fields["least"]))
        except (OSError, ValueError, KeyError, TypeError, UsageError) as error:
            raise InputError(
                f"{source} contains no threshold ({error}): give a number, or the file of "
                "`bookwheel evaluate --abstain`"
            ) from error

    def write(self, path: Path, **selection: Any) -> None:
        """Write the threshold to a file, with `selection`, the record of how it was chosen.

        Raises:
            InputError: the file cannot be written.
        """
        threshold_json = json.dumps({**asdict(self), **selection}, ensure_ascii=False, indent=1)
        write_user_file(path, [threshold_json, "\n"])

    def apply(self, answer: Answer) -> Answer:
        """Return an answer with its confidence, and without text if the score is below the
        threshold.

        Raises:
            UsageError: the score is unknown.
        """
        score = get_score(answer, self.signal)
        if score is None and not answer.text:
            score = -math.inf  # an empty answer has no likelihood
        if score is None:
            raise UsageError(
                f"this model does not give the {self.signal} of an answer: choose a threshold for `retrieval`"
            )
        scored_answer = replace(answer, confidence=Confidence(self.signal, score, self.least))
        return scored_answer if score >= self.least else replace(scored_answer, text="", tokens=(), abstained=True)


def get_score(answer: Answer, signal: Signal) -> float | None:
    """Return an answer's score by a signal, or None if it is unknown.

    Without passages, the score of the signal `retrieval` is -inf.
    """
    if signal == "retrieval":
        return max((support.hit.score for support in answer.support if support.hit.row >= 0), default=-math.inf)
    if signal == "likelihood":
        return answer.log_likelihood
    if answer.log_likelihood is None or answer.closed_book is None:
        return None
    return answer.log_likelihood - answer.closed_book


def add_closed_book(reader: LikelihoodReader, answers: Sequence[Answer]) -> list[Answer]:
    """Return the answers with their likelihood without passages (closed book).

    For an answer without passages, this is the likelihood that the answer already has.

    Raises:
        UsageError: the model does not compute likelihoods.
    """
    supported_positions = [
        position for position, answer in enumerate(answers) if any(support.hit.row >= 0 for support in answer.support)
    ]
    supported_answers = [answers[position] for position in supported_positions]
    log_likelihoods = reader.log_likelihood(
        [answer.question for answer in supported_answers],
        [()] * len(supported_answers),
        [answer.text for answer in supported_answers],
    )
    log_probs_by_position = dict(zip(supported_positions, log_likelihoods, strict=True)) if supported_answers else {}
    return [
        replace(answer, closed_book=log_probs_by_position.get(position, answer.log_likelihood))
        for position, answer in enumerate(answers)
    ]


class AbstainingReader(RetrievingReader):
    """A `Reader` that withholds answers of another reader if their score is below a threshold."""

    def __init__(self, reader: Reader, threshold: Threshold) -> None:
        """Wrap `reader`.

        Raises:
            UsageError: the threshold needs likelihoods, which the reader does not compute.
        """
        self._reader, self.threshold = reader, threshold
        self.retriever, self.k = reader.retriever, reader.k
        if threshold.signal == "passages" and not hasattr(reader, "log_likelihood"):
            raise UsageError("this model gives no likelihoods: choose a threshold for `retrieval`")

    @property
    def decides(self) -> dict[str, Any]:
        """The settings of the wrapped reader and the threshold, for memo keys."""
        return {**self._reader.decides, "abstain_below": asdict(self.threshold)}

    def answer(
        self, questions: Sequence[str], k: int | None = None, callbacks: AnswerCallbacks = NO_CALLBACKS
    ) -> list[Answer]:
        """Return the answers; `on_text` receives only whole answers that are not withheld."""
        return self._withhold_unsure_answers(
            self._reader.answer(questions, k, replace(callbacks, on_text=None)), callbacks
        )

    def answer_from(
        self, questions: Sequence[str], hits: Sequence[Sequence[Hit]], callbacks: AnswerCallbacks = NO_CALLBACKS
    ) -> list[Answer]:
        """Return the answers from the given hits; `on_text` receives the same texts as in
        `answer`.
        """
        return self._withhold_unsure_answers(
            self._reader.answer_from(questions, hits, replace(callbacks, on_text=None)), callbacks
        )

    def _withhold_unsure_answers(self, answers: list[Answer], callbacks: AnswerCallbacks) -> list[Answer]:
        """Return the answers; answers with a score below the threshold have no text."""
        timer = AnswerTimer()
        if self.threshold.signal == "passages":
            likelihood_reader: Any = self._reader
            answers = add_closed_book(likelihood_reader, answers)
        checked_answers = [self.threshold.apply(answer) for answer in answers]
        callbacks.send_texts(enumerate(checked_answers))
        timer.end_stage(CONFIDENCE)
        return add_stage_seconds(checked_answers, timer)
