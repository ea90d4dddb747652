r"""How sure an answer is, and a reader that gives no answer where it is not sure enough.

| signal | score of an answer, larger is surer |
| --- | --- |
| `likelihood` | log p(y\|x), in nats |
| `retrieval` | the retriever's score of the best passage |
| `passages` | log p(y\|x) - log p(y\|question alone), in nats: what the passages add to the memory of the weights |

Which signal, and from which score on, is chosen on questions with known answers (`evaluation.answers.abstaining`).
"""

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal, Protocol, Self, get_args

from rag_model.errors import InputError, UsageError
from rag_model.json_text import parse_json
from rag_model.landing import landing
from rag_model.reading.answer import Answer, Confidence
from rag_model.reading.reader import Reader, Stop, Tell, found_by
from rag_model.reading.stages import CONFIDENCE, Marks, timed
from rag_model.retrieve.retriever import Hit, Retriever

Signal = Literal["likelihood", "retrieval", "passages"]
SIGNALS: tuple[Signal, ...] = get_args(Signal)


class Scores(Protocol):
    """A reader that tells how likely given answers are."""

    def log_likelihood(
        self, questions: Sequence[str], hits: Sequence[Sequence[Hit]], texts: Sequence[str]
    ) -> list[float]:
        """Return log p(text|question, passages) of each in nats; without passages of the question alone.

        Raises:
            UsageError: the model does not tell likelihoods.
        """
        ...


@dataclass(frozen=True, slots=True)
class Threshold:
    """Answers whose score is below it are withheld."""

    signal: Signal
    least: float

    def __post_init__(self) -> None:
        if self.signal not in SIGNALS or not math.isfinite(self.least):
            raise UsageError(
                f"a threshold is {self.signal} {self.least}: give a finite number of one of {', '.join(SIGNALS)}"
            )

    @classmethod
    def read(cls, given: str) -> Self:
        """Return the threshold that a number names, of the likelihood, or a file that `write` wrote.

        Raises:
            InputError: the file cannot be read, or holds none.
            UsageError: the number is not finite.
        """
        try:
            return cls("likelihood", float(given))
        except ValueError:
            pass
        try:
            value = parse_json(Path(given).read_text(encoding="utf-8"))
            return cls(value["signal"], float(value["least"]))
        except (OSError, ValueError, KeyError, TypeError, UsageError) as broken:
            raise InputError(
                f"{given} holds no threshold ({broken}): give a number, or the file of `bookwheel evaluate --abstain`"
            ) from broken

    def write(self, path: Path, **chosen: Any) -> None:
        """Write it to a file, beside how it was chosen.

        Raises:
            InputError: the file cannot be written.
        """
        text = json.dumps({"signal": self.signal, "least": self.least, **chosen}, ensure_ascii=False, indent=1)
        try:
            with landing(path) as temporary:
                temporary.write_text(text + "\n", encoding="utf-8")
        except OSError as broken:
            raise InputError(f"{path} cannot be written ({broken.strerror}): choose another path") from broken

    def applied(self, answer: Answer) -> Answer:
        """Return an answer with its confidence, and without its text if the score is below the threshold.

        Raises:
            UsageError: the score is not known.
        """
        score = score_of(answer, self.signal)
        if score is None:
            raise UsageError(
                f"this model does not tell the {self.signal} of an answer: choose a threshold of `retrieval`"
            )
        sure = replace(answer, confidence=Confidence(self.signal, score, self.least))
        return sure if score >= self.least else replace(sure, text="", tokens=(), abstained=True)


def score_of(answer: Answer, signal: Signal) -> float | None:
    """Return an answer's score by a signal; None: it is not known. Without passages retrieval scores -inf."""
    if signal == "retrieval":
        return max((one.hit.score for one in answer.support if one.hit.row >= 0), default=-math.inf)
    if signal == "likelihood":
        return answer.log_likelihood
    if answer.log_likelihood is None or answer.closed_book is None:
        return None
    return answer.log_likelihood - answer.closed_book


def with_closed_book(reader: Scores, answers: Sequence[Answer]) -> list[Answer]:
    """Return the answers, each with its likelihood from the question alone; one without passages has it already.

    Raises:
        UsageError: the model does not tell likelihoods.
    """
    places = [place for place, one in enumerate(answers) if any(support.hit.row >= 0 for support in one.support)]
    asked = [answers[place] for place in places]
    found = reader.log_likelihood([one.question for one in asked], [()] * len(asked), [one.text for one in asked])
    known = dict(zip(places, found, strict=True)) if asked else {}
    return [replace(one, closed_book=known.get(place, one.log_likelihood)) for place, one in enumerate(answers)]


class AbstainingReader:
    """A `Reader` that withholds the answers of another one whose score is below a threshold."""

    def __init__(self, reader: Reader, threshold: Threshold) -> None:
        """Answer as `reader` does.

        Raises:
            UsageError: the threshold needs likelihoods, and the reader does not tell any.
        """
        self._reader, self.threshold = reader, threshold
        if threshold.signal == "passages" and not hasattr(reader, "log_likelihood"):
            raise UsageError("this model does not tell likelihoods: choose a threshold of `retrieval`")

    @property
    def retriever(self) -> Retriever | None:
        """The other's."""
        return self._reader.retriever

    @property
    def k(self) -> int:
        """The other's."""
        return self._reader.k

    @property
    def decides(self) -> dict[str, Any]:
        """The other's settings, and the threshold."""
        return {**self._reader.decides, "abstain_below": asdict(self.threshold)}

    def answer(
        self, questions: Sequence[str], k: int | None = None, stop: Stop | None = None, tell: Tell | None = None
    ) -> list[Answer]:
        """Return the answer of each question as `Reader.answer`; `tell` is given whole answers, once they are sure."""
        return self.answer_from(
            questions, found_by(self._reader.retriever, questions, self.k if k is None else k), stop, tell
        )

    def answer_from(
        self,
        questions: Sequence[str],
        hits: Sequence[Sequence[Hit]],
        stop: Stop | None = None,
        tell: Tell | None = None,
    ) -> list[Answer]:
        """Return the answer of each question as `Reader.answer_from`; `tell` as above."""
        answers = self._reader.answer_from(questions, hits, stop)
        marks = Marks()
        if self.threshold.signal == "passages":
            scores: Any = self._reader
            answers = with_closed_book(scores, answers)
        sure = [self.threshold.applied(one) for one in answers]
        for place, one in enumerate(sure):
            if tell is not None and one.text:
                tell(place, one.text)
        marks.end(CONFIDENCE)
        return timed(sure, marks)


def abstaining(reader: Reader, threshold: Threshold | None) -> Reader:
    """Return a reader that withholds answers below a threshold; without one, the reader itself.

    Raises:
        UsageError: as `AbstainingReader`.
    """
    return reader if threshold is None else AbstainingReader(reader, threshold)
