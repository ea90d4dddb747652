r"""Answer each question from one of two sources: the weights of the model, or passages.

The reader `auto` first answers from the weights alone. Let y be the answer without passages, y_z
the answer from passages, and |y| the number of tokens, including the end token. The weights answer
if

    s = log p(y|x) / |y|                                        >= t    (signal `weights`)
    s = log p(y|x) / |y| - log p(y_z|x, z_1..k) / |y_z|         >= t    (signal `difference`)

in nats per token. The mean over tokens makes short and long answers comparable (Malinin & Gales
2021, section 4). With `weights`, no passages are retrieved for a question whose answer is likely
enough, as in adaptive retrieval (Mallen et al. 2023, section 6), which routes by the popularity of
an entity, and in FLARE (Jiang et al. 2023, section 3.2), which retrieves for unlikely tokens. With
`difference`, both answers are generated; with t = 0 the more likely answer is returned.

The threshold t is chosen on questions with known answers (`evaluation.answers.routing`), as Mallen
et al. choose their threshold on a dev set. A threshold is only valid for the model and the reader
for which it was chosen.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal, Protocol, Self, get_args

from rag_model.atomic_write import write_user_file
from rag_model.digest import digest_folder, digest_json
from rag_model.errors import InputError, UsageError
from rag_model.reading.answer import Answer, RouteScore, TokenUsage, sum_usage
from rag_model.reading.reader import (
    NO_CALLBACKS,
    SEARCH,
    WEIGHTS,
    AnswerCallbacks,
    AnswerTimer,
    Reader,
    RetrievingReader,
    add_stage_seconds,
    check_hit_lists,
    retrieve_hits,
)
from rag_model.retrieve.hits import Hit
from rag_model.untrusted_text import parse_json

RouteSignal = Literal["weights", "difference"]
ROUTE_SIGNALS: tuple[RouteSignal, ...] = get_args(RouteSignal)
EVALUATION_PREFIX = "evaluation:"  # prefix of the id of an evaluation that contains the route
NO_LIKELIHOOD = (
    "this model does not give the likelihood of its answers, which the reader auto needs: give "
    "another --reader, or an endpoint that returns log probabilities"
)
CHOOSE_ROUTE = "choose a route on questions with answers: `bookwheel evaluate --reader auto --choose-route FILE`"


class GeneratedAnswer(Protocol):
    """The attributes of a generated answer that a route compares."""

    @property
    def log_likelihood(self) -> float | None:
        """Log p(y|x) in nats, with the end token; None: unknown."""
        ...

    @property
    def usage(self) -> TokenUsage | None:
        """The number of tokens; None: unknown."""
        ...


@dataclass(frozen=True, slots=True)
class Route:
    """The rule that decides whether a question is answered from the weights or from passages."""

    signal: RouteSignal = "difference"
    # Threshold in nats per token: the weights answer if the score is at least this; None: never.
    least: float | None = 0.0
    # model for which the threshold was chosen, as `identify_model` returns it; empty: any model
    model: str = ""
    reader: str = ""  # reader for which the threshold was chosen; empty: any reader

    def __post_init__(self) -> None:
        if self.signal not in ROUTE_SIGNALS or not (self.least is None or math.isfinite(self.least)):
            raise UsageError(
                f"the threshold {self.least} of the route {self.signal} is invalid: give a finite number for one "
                f"of {', '.join(ROUTE_SIGNALS)}"
            )

    @classmethod
    def from_json(cls, value: Any, source: str) -> Self:
        """Parse a route from a JSON object; `source` names the object in errors.

        Raises:
            InputError: the value is not a route.
        """
        if not isinstance(value, dict):
            value = {}
        try:
            min_score = None if value["least"] is None else float(value["least"])
            return cls(value["signal"], min_score, str(value["model"]), str(value["reader"]))
        except (KeyError, TypeError, ValueError, OverflowError, UsageError) as error:
            reason = f"{error} is missing" if isinstance(error, KeyError) else error
            raise InputError(
                f"{source} contains no route ({reason}): give the file of `bookwheel evaluate "
                f"--choose-route`, or {EVALUATION_PREFIX}ID of that evaluation"
            ) from error

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read a route from a file that `write` wrote.

        Raises:
            InputError: the file cannot be read, or has no route.
        """
        try:
            route_json = parse_json(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise InputError(f"{path} cannot be read ({error.strerror}): give another file") from error
        except ValueError:
            route_json = None
        return cls.from_json(route_json, str(path))

    def write(self, path: Path, **selection: Any) -> None:
        """Write the route to a file, with `selection`, the record of how it was chosen.

        Raises:
            InputError: the file cannot be written.
        """
        route_text = json.dumps({**asdict(self), **selection}, ensure_ascii=False, indent=1)
        write_user_file(path, [route_text, "\n"])

    def explain_mismatch(self, model: str, reader: str) -> str:
        """Explain in one sentence why the route is not valid for a model and a reader.

        The sentence is empty if the route is valid.
        """
        if self.model and self.model != identify_model(model):
            return f"the route was chosen for a model other than {model} ({self.model[:19]}): {CHOOSE_ROUTE}"
        if self.reader and self.reader != reader:
            return f"the route was chosen for the reader {self.reader}, and {model} is read by {reader}: {CHOOSE_ROUTE}"
        return ""

    def score(self, closed_book: GeneratedAnswer, open_book: GeneratedAnswer | None = None) -> float | None:
        """Return the score of a question, from its two answers; None if a likelihood is unknown.

        `open_book` is not needed for the signal `weights`.
        """
        score = mean_log_likelihood(closed_book)
        if self.signal == "weights" or score is None:
            return score
        open_book_score = None if open_book is None else mean_log_likelihood(open_book)
        if open_book_score is None:
            return None
        return math.inf if open_book_score == -math.inf else score - open_book_score

    def chooses_weights(self, score: float | None) -> bool:
        """Return whether a question with this score is answered from the weights."""
        return self.least is not None and score is not None and score >= self.least


def identify_model(model: str) -> str:
    """Return a string that identifies a model: its id in the store, its name at an endpoint, or the
    digest of its folder's files.
    """
    folder = Path(model)
    return digest_json(digest_folder(folder)) if folder.is_dir() else model


def mean_log_likelihood(answer: GeneratedAnswer) -> float | None:
    """Return the mean log-likelihood of an answer's tokens in nats; None if it is unknown."""
    if answer.log_likelihood is None or answer.usage is None:
        return None
    return answer.log_likelihood / max(1, answer.usage.new_tokens)


class AutoReader(RetrievingReader):
    """A `Reader` that answers questions from the weights or from passages, as a route decides."""

    def __init__(self, reader: Reader, route: Route) -> None:
        """Wrap `reader`, which answers with and without passages."""
        self._reader, self.route = reader, route
        self.retriever, self.k = reader.retriever, reader.k

    @property
    def decides(self) -> dict[str, Any]:
        """The settings of the wrapped reader and the route, for memo keys."""
        return {**self._reader.decides, "route": asdict(self.route)}

    def answer(
        self, questions: Sequence[str], k: int | None = None, callbacks: AnswerCallbacks = NO_CALLBACKS
    ) -> list[Answer]:
        """Return the answer to each question; see `Reader.answer`.

        With the signal `weights`, passages are retrieved only for the questions that need them.
        """
        closed_book_answers = self._answer_closed_book(questions, callbacks)
        passage_positions = self._list_open_book_positions(closed_book_answers)
        timer = AnswerTimer()
        k = self.k if k is None else k
        hits = retrieve_hits(self.retriever, [questions[i] for i in passage_positions], k) if passage_positions else []
        timer.end_stage(SEARCH)
        hits_by_position = dict(zip(passage_positions, hits, strict=True))
        if callbacks.on_hits is not None:
            callbacks.on_hits([hits_by_position.get(i, []) for i in range(len(questions))])
        return self._answer_open_book(closed_book_answers, hits_by_position, timer, callbacks)

    def answer_from(
        self, questions: Sequence[str], hits: Sequence[Sequence[Hit]], callbacks: AnswerCallbacks = NO_CALLBACKS
    ) -> list[Answer]:
        """Return the answer of each question; see `Reader.answer_from`.

        With the signal `weights`, only the hits of the questions that need passages are read.
        """
        check_hit_lists(questions, hits)
        closed_book = self._answer_closed_book(questions, callbacks)
        hits_by_position = {i: hits[i] for i in self._list_open_book_positions(closed_book)}
        return self._answer_open_book(closed_book, hits_by_position, AnswerTimer(), callbacks)

    def log_likelihood(
        self, questions: Sequence[str], hits: Sequence[Sequence[Hit]], texts: Sequence[str]
    ) -> list[float]:
        """Return log p(text|question, passages) of each text in nats, from the wrapped reader.

        Raises:
            UsageError: the model does not give likelihoods.
        """
        reader: Any = self._reader
        log_likelihoods: list[float] = reader.log_likelihood(questions, hits, texts)
        return log_likelihoods

    def _answer_closed_book(self, questions: Sequence[str], callbacks: AnswerCallbacks) -> list[Answer]:
        """Answer from the weights alone, and measure the time as one stage."""
        timer = AnswerTimer()
        silent_callbacks = replace(callbacks, on_text=None)
        answers = self._reader.answer_from(questions, [()] * len(questions), silent_callbacks)
        for answer in answers:
            if answer.text and mean_log_likelihood(answer) is None:
                raise UsageError(NO_LIKELIHOOD)
        timer.end_stage(WEIGHTS)
        # The model has read an empty passage; remove it, because it does not support the answer.
        bare_answers = [replace(answer, support=(), tokens=(), seconds={}) for answer in answers]
        return add_stage_seconds(bare_answers, timer)

    def _list_open_book_positions(self, closed_book: Sequence[Answer]) -> list[int]:
        """Return the positions of questions that also need an answer from passages."""
        needs_both = self.route.signal != "weights"
        return [
            i
            for i, answer in enumerate(closed_book)
            if needs_both or not answer.text or not self.route.chooses_weights(self.route.score(answer))
        ]

    def _answer_open_book(
        self,
        closed_book: Sequence[Answer],
        hits_by_position: Mapping[int, Sequence[Hit]],
        timer: AnswerTimer,
        callbacks: AnswerCallbacks,
    ) -> list[Answer]:
        """Answer the questions that have hits from passages; choose each answer by the route.

        Args:
            closed_book: the answers from the weights.
            hits_by_position: hits of the questions that passages may answer.
            timer: the timer that has measured the retrieval of these hits.
            callbacks: the callbacks; `on_text` receives fragments of an answer only if it is
                certain that this answer will be chosen.
        """
        callbacks.send_texts((i, answer) for i, answer in enumerate(closed_book) if i not in hits_by_position)
        positions, on_text = list(hits_by_position), callbacks.on_text
        is_streaming = on_text is not None and self.route.signal == "weights"
        send_text = (lambda row, text: on_text(positions[row], text)) if on_text is not None and is_streaming else None
        open_book_answers: list[Answer] = []
        if positions:
            questions = [closed_book[i].question for i in positions]
            hits = list(hits_by_position.values())
            passage_answers = self._reader.answer_from(questions, hits, replace(callbacks, on_text=send_text))
            open_book_answers = add_stage_seconds(passage_answers, timer)
        answers_by_position = dict(zip(positions, open_book_answers, strict=True))
        answers = [self._choose_answer(answer, answers_by_position.get(i)) for i, answer in enumerate(closed_book)]
        if not is_streaming:
            callbacks.send_texts((i, answers[i]) for i in positions)
        return answers

    def _choose_answer(self, closed_book: Answer, open_book: Answer | None) -> Answer:
        """Return the answer that the route chooses, with the usage and seconds of both answers."""
        score = self.route.score(closed_book, open_book)
        if open_book is not None and open_book.text and score is None and closed_book.text:
            raise UsageError(NO_LIKELIHOOD)
        is_from_weights = open_book is None or (bool(closed_book.text) and self.route.chooses_weights(score))
        answer = closed_book if open_book is None or is_from_weights else open_book
        return replace(
            answer,
            route=RouteScore(self.route.signal, score, self.route.least),
            usage=sum_usage([closed_book.usage, None if open_book is None else open_book.usage]),
            seconds={**closed_book.seconds, **({} if open_book is None else open_book.seconds)},
        )
