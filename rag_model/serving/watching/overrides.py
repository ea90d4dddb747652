"""Check a sample of the live answers for overrides, beside the service (`grounding`).

Every n-th answer that was read from passages is taken, so the sampled share of overrides is that of all answers. One
that a passage supports is none, and costs nothing more. Of any other a model in memory reads its text twice, with the
passages and without: no token is generated. An endpoint is asked the question once more, without passages. All that is
done one answer after another, when each has left, in a thread of the lowest priority on one core. Only an endpoint that
takes one request at a time keeps the next answer waiting meanwhile. Where 32 answers wait, none is taken, whatever it
says; and one whose check fails, or takes too long, is dropped.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable

from rag_model.errors import BookwheelError, StoppedError
from rag_model.reading.answer import Answer
from rag_model.serving.threads import WatchedThread, limit_threads, lowest_priority
from rag_model.serving.watching.memory import Checked, Memory

_LOG = logging.getLogger(__name__)
_WAITING = 32  # answers, with the texts of their passages
_SUPPORTED = Checked(override=False)


class Overrides:
    """Says of sampled answers whether they override their passages. Safe among threads; `saw` takes microseconds."""

    def __init__(self, every: int, checked: Callable[[Checked | None], None], seconds: float = 30.0) -> None:
        """Check one answer in `every`, none where that is 0.

        `checked` is told what was found; None: the check failed, or an endpoint took longer than `seconds`.
        """
        self._every, self._checked, self._seconds = every, checked, seconds
        self._changed = threading.Condition()
        self._seen = 0  # answers that were read from passages
        self._waiting: deque[tuple[Memory, Answer, bool]] = deque()
        self._closed = False
        self._failing = False  # the last check failed, and the log says so
        self.thread = WatchedThread("overrides", self._work)
        self._started = False

    def saw(self, memory: Callable[[], Memory], answer: Answer, *, unsupported: bool) -> None:
        """Take an answer that was read from passages, and what checks it; `memory` is called if it counts.

        The thread starts with the first one, so that a service without such a model has none.
        """
        with self._changed:
            self._seen += 1
            if not self._every or self._seen % self._every or self._closed or len(self._waiting) >= _WAITING:
                return
            self._waiting.append((memory(), answer, unsupported))
            if not self._started:
                self._started = True
                self.thread.start()
            self._changed.notify()

    def forget(self) -> None:
        """Drop the answers that wait: another edition serves, or their pages were taken down."""
        with self._changed:
            self._waiting.clear()

    def close(self) -> None:
        """Stop; the thread ends after the answer that it reads, and gives up what it asks an endpoint."""
        with self._changed:
            self._closed = True
            self._waiting.clear()
            self._changed.notify()
        self.thread.join()

    def _work(self) -> None:
        limit_threads(1)
        lowest_priority()
        while (taken := self._awaited()) is not None:
            memory, answer, unsupported = taken
            found = self._found(memory, answer) if unsupported else _SUPPORTED
            if not self._closed:
                self._checked(found)
            del taken, memory, answer  # hold no old model while waiting

    def _found(self, memory: Memory, answer: Answer) -> Checked | None:
        """Return what a check finds; None: it failed, which is logged once for all that fail one after another."""
        until = time.monotonic() + self._seconds
        try:
            found = memory.check(answer, lambda: self._closed or time.monotonic() > until)
        except BookwheelError as failed:
            if not self._closed and not self._failing:
                why = f"it took longer than {self._seconds:g} s" if isinstance(failed, StoppedError) else failed
                _LOG.warning(
                    "an answer was not checked for an override; until a check succeeds no more is said: %s", why
                )
            self._failing = True
            return None
        except BaseException:  # a panic too: a figure less is better than a dead thread
            _LOG.exception("an answer was not checked for an override")
            return None
        self._failing = False
        return found

    def _awaited(self) -> tuple[Memory, Answer, bool] | None:
        """Wait for an answer; None once closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._waiting)
            return None if self._closed else self._waiting.popleft()
