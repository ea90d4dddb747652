"""The interface of readers, and a timer for the stages of an answer.

Each stage starts when the previous one ends, so the times of the stages add up to the whole time.
"""

import time
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol

from rag_model.errors import UsageError
from rag_model.reading.answer import Answer
from rag_model.retrieve.hits import Hit, Retriever

ReaderName = Literal["marginal", "concat", "extractive", "auto"]
Order = Literal["rank", "document", "ends"]  # order of the passages in a prompt; see `PromptSettings`
StopCheck = Callable[[], bool]  # called between tokens; returns True to stop the reader
# Arguments: position of a question in its batch, new text of its answer.
TextCallback = Callable[[int, str], None]
# argument: the hits of all questions, before they are read
HitsCallback = Callable[[list[list[Hit]]], None]

# The stages of an answer.
WEIGHTS = "weights"  # generate an answer without passages, for the reader `auto`
SEARCH = "search"  # encode the question, search, and read the passages
ASSEMBLY = "assembly"  # build the inputs of the model: a prompt, or the tokens of each passage
GENERATION = "generation"  # generate the answer, or choose a label
EXTRACTION = "extraction"  # find a span; replaces assembly and generation
CONFIDENCE = "confidence"  # compute the likelihoods that a threshold needs
STAGES = (WEIGHTS, SEARCH, ASSEMBLY, GENERATION, EXTRACTION, CONFIDENCE)


@dataclass(frozen=True, slots=True)
class AnswerCallbacks:
    """Functions that a reader calls while it answers a batch of questions."""

    should_stop: StopCheck | None = None  # called between tokens; True stops the reader
    # Receives the text of each answer: in fragments if the reader generates it token by token, or
    # else as a whole at its end.
    on_text: TextCallback | None = None
    on_hits: HitsCallback | None = None  # receives the hits; called by `Reader.answer` only

    def send_texts(self, answers: Iterable[tuple[int, Answer]]) -> None:
        """Send the text of each finished answer to `on_text`, with its position; skip empty
        answers.
        """
        for position, answer in answers:
            if self.on_text is not None and answer.text:
                self.on_text(position, answer.text)


NO_CALLBACKS = AnswerCallbacks()


class Reader(Protocol):
    """Interface of readers, which answer questions; `rag_model.reading.model.open_reader` opens
    one.
    """

    @property
    def retriever(self) -> Retriever | None:
        """The retriever of passages; None: the reader answers only from given hits."""
        ...

    @property
    def k(self) -> int:
        """The default number of passages per question."""
        ...

    @property
    def decides(self) -> dict[str, Any]:
        """The settings that determine an answer in addition to the weights, for memo keys."""
        ...

    def answer(
        self, questions: Sequence[str], k: int | None = None, callbacks: AnswerCallbacks = NO_CALLBACKS
    ) -> list[Answer]:
        """Return the answer to each question, in order, from its best `k` passages.

        Raises:
            UsageError: a question is empty, `k` is below 1 or above the number of passages, or
                there is no retriever.
            StoppedError: `callbacks.should_stop` returned True.
        """
        ...

    def answer_from(
        self, questions: Sequence[str], hits: Sequence[Sequence[Hit]], callbacks: AnswerCallbacks = NO_CALLBACKS
    ) -> list[Answer]:
        """Return the answer to each question, in order, from the given hits, or without passages if
        there are none.

        Raises:
            UsageError: the number of hit lists differs from the number of questions.
            StoppedError: `callbacks.should_stop` returned True.
        """
        ...


def retrieve_hits(retriever: Retriever | None, questions: Sequence[str], k: int) -> list[list[Hit]]:
    """Return the best `k` hits of each question; raise `UsageError` if there is no retriever."""
    if retriever is None:
        raise UsageError("this reader has no retriever: open it with a retriever, or call `answer_from` with hits")
    return retriever.search(questions, k)


class RetrievingReader(ABC):
    """Base class of readers that retrieve the best passages and answer from them."""

    retriever: Retriever | None
    k: int

    def answer(
        self, questions: Sequence[str], k: int | None = None, callbacks: AnswerCallbacks = NO_CALLBACKS
    ) -> list[Answer]:
        """Return the answer of each question; see `Reader.answer`."""
        timer = AnswerTimer()
        hit_lists = retrieve_hits(self.retriever, questions, self.k if k is None else k)
        if callbacks.on_hits is not None:
            callbacks.on_hits(hit_lists)
        timer.end_stage(SEARCH)
        return add_stage_seconds(self.answer_from(questions, hit_lists, callbacks), timer)

    @abstractmethod
    def answer_from(
        self, questions: Sequence[str], hits: Sequence[Sequence[Hit]], callbacks: AnswerCallbacks = NO_CALLBACKS
    ) -> list[Answer]:
        """Return the answer of each question from the given hits; see `Reader.answer_from`."""


def check_hit_lists(questions: Sequence[str], hits: Sequence[Sequence[Hit]]) -> None:
    """Raise `UsageError` if the numbers of questions and hit lists differ."""
    if len(questions) != len(hits):
        raise UsageError(f"{len(questions)} questions have {len(hits)} lists of passages: give one list per question")


class AnswerTimer:
    """Measures consecutive stages; if a stage is repeated, its times are added.

    >>> times = iter([0.0, 1.0, 1.5, 4.5])
    >>> timer = AnswerTimer(lambda: next(times))
    >>> for stage in (SEARCH, ASSEMBLY, GENERATION):
    ...     timer.end_stage(stage)
    >>> timer.seconds
    {'search': 1.0, 'assembly': 0.5, 'generation': 3.0}
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        """Create a timer and start the first stage; `clock` returns seconds."""
        self._clock, self._stage_start = clock, clock()
        self.seconds: dict[str, float] = {}  # by stage, in the order of their first ends

    def end_stage(self, stage: str) -> None:
        """End the current stage under this name, and start the next one."""
        current_seconds = self._clock()
        self.seconds[stage] = self.seconds.get(stage, 0.0) + current_seconds - self._stage_start
        self._stage_start = current_seconds


def add_stage_seconds(answers: Sequence[Answer], timer: AnswerTimer) -> list[Answer]:
    """Divide a batch's seconds equally among its answers; return answers with these seconds."""
    timed_answers = []
    for answer in answers:
        stage_shares = {stage: seconds / len(answers) for stage, seconds in timer.seconds.items()}
        seconds_by_stage = {**answer.seconds, **stage_shares}
        ordered_seconds = {stage: seconds_by_stage[stage] for stage in STAGES if stage in seconds_by_stage}
        timed_answers.append(replace(answer, seconds=ordered_seconds))
    return timed_answers


def batch_by_key(keys: Sequence[Hashable], batch_size: int) -> Iterator[list[int]]:
    """Yield batches of positions with equal keys, of at most `batch_size` positions."""
    positions_by_key: defaultdict[Hashable, list[int]] = defaultdict(list)
    for position, key in enumerate(keys):
        positions_by_key[key].append(position)
    for key_positions in positions_by_key.values():
        for batch_start in range(0, len(key_positions), batch_size):
            yield key_positions[batch_start : batch_start + batch_size]
