"""The threads of a service: one that dies is logged, counted and started again, and `/readyz` says so meanwhile.

Native libraries raise what is no `Exception`: a panic of Rust is a `BaseException`. So everything is caught here.
"""

import logging
import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress

import torch

from rag_model.index.files.engine import faiss

THREADS = ("search", "answer", "follower", "quality", "overrides")  # their names
_LIMITING = threading.Lock()
_NICE = 10  # at a lower priority it would be left waiting while it holds Python's global lock
_LOG = logging.getLogger(__name__)
_PAUSE = 0.1  # seconds before the first restart; doubled at each death that follows soon
_MOST_PAUSE = 30.0  # seconds
_HEALTHY = 60.0  # seconds after which a thread that dies is not one that keeps dying


class WatchedThread:
    """A thread that runs again when it dies, until it returns or is joined."""

    def __init__(self, name: str, run: Callable[[], None], died: Callable[[str], None] = lambda name: None) -> None:
        """Prepare; `died` is called with the name at each death, and may be set later."""
        self.name, self.died, self._run = name, died, run
        self._ending = threading.Event()
        self._problem = ""
        self._thread = threading.Thread(target=self._watched, name=name, daemon=True)

    @property
    def problem(self) -> str:
        """Why the thread does not work now, as one sentence; empty where it works, or has not begun."""
        if self._problem or self._thread.ident is None or self._thread.is_alive():
            return self._problem
        return f"the thread {self.name} has ended"

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def join(self) -> None:
        """Wait until it returns; it is not started again."""
        self._ending.set()
        if self._thread.ident is not None:
            self._thread.join()

    def _watched(self) -> None:
        pause = _PAUSE
        while True:
            began = time.monotonic()
            try:
                self._run()
            except BaseException as failure:
                _LOG.exception("the thread %s died and is started again", self.name)
                self._problem = f"the thread {self.name} died of {type(failure).__name__} and is started again"
                self.died(self.name)
            else:
                return
            if time.monotonic() - began > _HEALTHY:
                pause = _PAUSE
            if self._ending.wait(pause):
                return
            self._problem, pause = "", min(2 * pause, _MOST_PAUSE)


def limit_threads(threads: int) -> None:
    """Say how many threads faiss and torch take for what the calling thread computes."""
    faiss.omp_set_num_threads(threads)
    with _LIMITING:
        torch.set_num_threads(threads)  # of this thread, and of those that have not looked yet
        torch.get_num_threads()  # it has looked: what others set does not change it any more


def lowest_priority() -> None:
    """Give the calling thread, and the threads that it starts, the lowest priority; faiss uses one thread."""
    faiss.omp_set_num_threads(1)  # of this thread alone
    with suppress(OSError, AttributeError):  # not every system has a priority per thread
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)
