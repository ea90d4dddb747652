r"""Check live answers for overrides: answers from the model's weights that contradict the passages.

Two measures of an answer y to a question x with the passages z_1..k:

    unsupported(x, y) = no z_i supports y                       (`supports_statement`)
    override(x, y)    = unsupported(x, y) and log p(y|x) >= log p(y|x, z_1..k)

An evaluation counts an override if a passage contains a gold answer and the model gives another
answer. Live answers have no gold answer, so likelihoods decide. The probabilities of all answers to
a question sum to 1, so if the passages make y less likely, they make other answers more likely. In
that case the passages support another answer, and the model's weights have overridden them. An
unsupported answer that the passages make more likely was derived from the passages: it is wrong or
paraphrased, but it is not an override.

`override` needs a model that can compute the likelihood of a given text. A remote model cannot do
so. It answers the question once more, without passages (closed book), and the two answers are
compared:

    override(x, y) = unsupported(x, y) and same(y, closed book(x))

Two answers are the same if, in SQuAD's normal form (as in EM), the words of one are a contiguous
part of the other. Paraphrases are not recognized, so this rate is lower than the rate by
likelihoods.

Every n-th answer with passages is checked, so the rate in this sample estimates the rate of all
answers. If an answer is supported, nothing further is computed. For any other answer, a local model
reads its text twice, with and without the passages, and generates no token; a remote model is
called once. The checks run one after another, after the replies, in a thread of the lowest priority
on one core. So they delay the next answer only if a remote model takes one request at a time. While
32 answers wait, new answers are not checked, whether supported or not; an answer whose check fails
or takes too long is dropped.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from rag_model.errors import BookwheelError, StoppedError
from rag_model.evaluation.matching import supports_statement
from rag_model.evaluation.measures.answers import normalise
from rag_model.reading.answer import Answer, TokenUsage
from rag_model.reading.confidence import LikelihoodReader
from rag_model.reading.reader import AnswerCallbacks, Reader, StopCheck
from rag_model.serving.answering.loaded_snapshot import ServedModel
from rag_model.serving.runtime import SupervisedThread, limit_compute_threads, set_lowest_priority

_LOG = logging.getLogger(__name__)
_QUEUE_LIMIT = 32  # maximum number of waiting answers, with the texts of their passages
GIVEN, EMPTY, ABSTAINED = OUTCOMES = ("given", "empty", "abstained")


def classify_outcome(answer: Answer) -> str:
    """Return the outcome of an answer, one of `OUTCOMES`."""
    if answer.abstained:
        return ABSTAINED
    return GIVEN if answer.plain.strip() else EMPTY


def list_texts_read(answer: Answer) -> list[str]:
    """Return the texts that the model read for an answer; [] for a closed-book answer."""
    return [context_entry.text for context_entry in answer.context] or [
        source.hit.passage.text for source in answer.support if source.hit.row >= 0
    ]


def is_unsupported(answer: Answer) -> bool:
    """Return whether none of the passages supports the answer; takes about a millisecond."""
    texts = list_texts_read(answer)
    return bool(texts) and not any(supports_statement([text], answer.plain, answer.question) for text in texts)


def is_repeated(answer: Answer, closed_book_answer: Answer) -> bool:
    """Return whether one answer's words contain the other's as a sequence; False if one is empty.

    >>> closed_book = Answer("?", "Eiffel tower", None, ())
    >>> is_repeated(Answer("?", "It is the Eiffel Tower.", None, ()), closed_book)
    True
    """
    answer_text, closed_book_text = normalise(answer.plain), normalise(closed_book_answer.plain)
    return bool(answer_text and closed_book_text) and (
        f" {answer_text} " in f" {closed_book_text} " or f" {closed_book_text} " in f" {answer_text} "
    )


def is_remembered(reader: LikelihoodReader, answer: Answer) -> bool:
    """Return whether the answer is as likely without its passages: log p(y|x) >= log p(y|x, z).

    y is the text without citations, since a closed-book prompt has nothing to cite; `reader` must
    not ask for citations either.

    Raises:
        UsageError: The model cannot compute likelihoods.
    """
    hits = [support.hit for support in answer.support if support.hit.row >= 0]
    log_p_without, log_p_with = reader.log_likelihood([answer.question] * 2, [(), hits], [answer.plain] * 2)
    return log_p_without >= log_p_with


@dataclass(frozen=True, slots=True)
class OverrideCheck:
    """The result of checking one answer."""

    override: bool
    usage: TokenUsage | None = None  # tokens of the call to a remote model; None without a call


class OverrideChecker(Protocol):
    """Checks unsupported answers."""

    def check(self, answer: Answer, should_stop: StopCheck) -> OverrideCheck:
        """Check whether `answer` is an override, as defined at the top of this module.

        Raises:
            StoppedError: `should_stop` returned True.
            BookwheelError: The model could not be called.
        """
        ...


@dataclass(frozen=True, slots=True)
class LikelihoodChecker:
    """Compares the likelihood of an answer with and without passages; ignores `should_stop`."""

    reader: LikelihoodReader

    def check(self, answer: Answer, should_stop: StopCheck) -> OverrideCheck:
        """Check the answer with `is_remembered`."""
        return OverrideCheck(is_remembered(self.reader, answer))


@dataclass(frozen=True, slots=True)
class ClosedBookChecker:
    """Lets a remote model answer the question again without passages; compares both answers."""

    reader: Reader

    def check(self, answer: Answer, should_stop: StopCheck) -> OverrideCheck:
        """Check the answer with `is_repeated`, and return the tokens of the closed-book answer."""
        (closed_book,) = self.reader.answer_from([answer.question], [()], AnswerCallbacks(should_stop))
        return OverrideCheck(is_repeated(answer, closed_book), closed_book.usage)


def can_check_overrides(model: ServedModel | None) -> bool:
    """Return whether a model is remote or can compute likelihoods."""
    return model is not None and (model.has_likelihoods or not model.is_local)


def create_override_checker(model: ServedModel) -> OverrideChecker:
    """Create the checker of a model's answers.

    Raises:
        UsageError: `can_check_overrides` is false for the model.
    """
    if model.is_local:
        return LikelihoodChecker(model.create_likelihood_reader())
    return ClosedBookChecker(model.create_uncited_reader())


class OverrideMonitor:
    """Checks sampled answers for overrides. Thread-safe; `record_answer` takes microseconds."""

    def __init__(self, every: int, on_check: Callable[[OverrideCheck | None], None], seconds: float = 30.0) -> None:
        """Check every `every`-th answer, or none if `every` is 0.

        `on_check` receives the result, or None if the check failed or took longer than `seconds`.
        """
        self._sample_every, self._on_check, self._seconds = every, on_check, seconds
        self._condition = threading.Condition()
        self._n_answers = 0  # number of answers with passages so far
        self._queue: deque[tuple[OverrideChecker, Answer, bool]] = deque()
        self._is_closed = False
        self._is_failing = False  # whether the last check failed
        self.thread = SupervisedThread("overrides", self._run_monitor)
        self._is_started = False

    def record_answer(
        self, create_checker: Callable[[], OverrideChecker], answer: Answer, *, unsupported: bool
    ) -> None:
        """Queue every n-th answer with passages; only for these answers `create_checker` is called.

        The thread starts with the first queued answer, so a service without checks has no thread.
        """
        with self._condition:
            self._n_answers += 1
            is_sampled = self._sample_every and self._n_answers % self._sample_every == 0
            if not is_sampled or self._is_closed or len(self._queue) >= _QUEUE_LIMIT:
                return
            self._queue.append((create_checker(), answer, unsupported))
            if not self._is_started:
                self._is_started = True
                self.thread.start()
            self._condition.notify()

    def clear(self) -> None:
        """Drop the queued answers, because another snapshot or none is served now."""
        with self._condition:
            self._queue.clear()

    def close(self) -> None:
        """Stop the thread after its current answer; do not wait for a remote model."""
        with self._condition:
            self._is_closed = True
            self._queue.clear()
            self._condition.notify()
        self.thread.join()

    def _run_monitor(self) -> None:
        limit_compute_threads(1)
        set_lowest_priority()
        while (queued_check := self._wait_for_answer()) is not None:
            checker, answer, unsupported = queued_check
            check = self._run_check(checker, answer) if unsupported else OverrideCheck(override=False)
            if not self._is_closed:
                self._on_check(check)
            del queued_check, checker, answer  # free an old model while waiting

    def _run_check(self, checker: OverrideChecker, answer: Answer) -> OverrideCheck | None:
        """Check an answer; return None if the check fails. Consecutive failures are logged once."""
        deadline = time.monotonic() + self._seconds
        try:
            check = checker.check(answer, lambda: self._is_closed or time.monotonic() > deadline)
        except BookwheelError as error:
            if not self._is_closed and not self._is_failing:
                error_reason = f"it took longer than {self._seconds:g} s" if isinstance(error, StoppedError) else error
                _LOG.warning(
                    "an answer was not checked for an override; later failures are only logged after a success: %s",
                    error_reason,
                )
            self._is_failing = True
            return None
        except BaseException:
            # A Rust panic of a native library must not end the thread either.
            _LOG.exception("an answer was not checked for an override")
            return None
        self._is_failing = False
        return check

    def _wait_for_answer(self) -> tuple[OverrideChecker, Answer, bool] | None:
        """Wait for an answer; return None when the monitor is closed."""
        with self._condition:
            self._condition.wait_for(lambda: self._is_closed or self._queue)
            return None if self._is_closed else self._queue.popleft()
