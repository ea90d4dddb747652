"""Two threads for a request that has the service to itself, as long as two are faster than one.

Threads of a team wait for one another after every layer. Where something else keeps a core busy, two take several times
as long as one. A thread that had to wait tells that, and so computes without the other for a while.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager

from rag_model.serving.threads import limit_threads

_LEAST_BUSY = 0.75  # of the time of a request, what its thread computed: .95 where the cores are free
_ALONE = 100  # requests before the team is tried again


class Team:
    """The threads of requests that one thread of a service works on while it has nothing else to do."""

    def __init__(self, usual: int, together: int) -> None:
        """Compute a request by `together` threads; `usual` are set outside, and where the cores are not free."""
        self._usual, self._together = usual, together
        self._rest = 0  # requests that are computed by `usual` threads before the next try

    @contextmanager
    def computing(self) -> Iterator[None]:
        """Set the threads for the block, which computes one request in the calling thread."""
        if self._rest or self._together == self._usual:
            self._rest = max(0, self._rest - 1)
            yield
            return
        limit_threads(self._together)
        began, spent = time.perf_counter(), time.thread_time()
        try:
            yield
        finally:
            self.note(time.thread_time() - spent, time.perf_counter() - began)
            limit_threads(self._usual)

    def note(self, cpu_seconds: float, seconds: float) -> None:
        """Take note of how long a request's own thread computed, and how long the request took."""
        if cpu_seconds < _LEAST_BUSY * seconds:
            self._rest = _ALONE
