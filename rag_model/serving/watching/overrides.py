"""Check a sample of the live answers for overrides, beside the service (`grounding`).

Every n-th answer that was read from passages is taken, so the sampled share of overrides is that of all answers. One
that a passage supports is none, and costs nothing more. Of any other the model reads its text twice, with the passages
and without: no token is generated. That is done one answer after another, in a thread of the lowest priority on one
core, and never delays the answer itself. Where 32 answers wait, none is taken, whatever it says.
"""

import logging
import threading
from collections import deque
from collections.abc import Callable

from rag_model.reading.answer import Answer
from rag_model.reading.confidence import Scores
from rag_model.serving.threads import WatchedThread, limit_threads, lowest_priority
from rag_model.serving.watching.grounding import is_remembered

_LOG = logging.getLogger(__name__)
_WAITING = 32  # answers, with the texts of their passages


class Overrides:
    """Says of sampled answers whether they override their passages. Safe among threads; `saw` takes microseconds."""

    def __init__(self, every: int, checked: Callable[[bool], None]) -> None:
        """Check one answer in `every`, none where that is 0; `checked` is told whether it is an override."""
        self._every, self._checked = every, checked
        self._changed = threading.Condition()
        self._seen = 0  # answers that were read from passages
        self._waiting: deque[tuple[Scores, Answer, bool]] = deque()
        self._closed = False
        self.thread = WatchedThread("overrides", self._work)
        self._started = False

    def saw(self, reader: Callable[[], Scores], answer: Answer, *, unsupported: bool) -> None:
        """Take an answer that was read from passages, and what tells its likelihood; `reader` is called if it counts.

        The thread starts with the first one, so that a service without such a model has none.
        """
        with self._changed:
            self._seen += 1
            if not self._every or self._seen % self._every or self._closed or len(self._waiting) >= _WAITING:
                return
            self._waiting.append((reader(), answer, unsupported))
            if not self._started:
                self._started = True
                self.thread.start()
            self._changed.notify()

    def forget(self) -> None:
        """Drop the answers that wait: another edition serves, or their pages were taken down."""
        with self._changed:
            self._waiting.clear()

    def close(self) -> None:
        """Stop; the thread ends after the answer that it reads."""
        with self._changed:
            self._closed = True
            self._waiting.clear()
            self._changed.notify()
        self.thread.join()

    def _work(self) -> None:
        limit_threads(1)
        lowest_priority()
        while (taken := self._awaited()) is not None:
            reader, answer, unsupported = taken
            try:
                found = unsupported and is_remembered(reader, answer)
            except BaseException:  # a panic too: a figure less is better than a dead thread
                _LOG.exception("an answer was not checked for an override")
            else:
                self._checked(found)
            del taken, reader, answer  # hold no old model while waiting

    def _awaited(self) -> tuple[Scores, Answer, bool] | None:
        """Wait for an answer; None once closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._waiting)
            return None if self._closed else self._waiting.popleft()
