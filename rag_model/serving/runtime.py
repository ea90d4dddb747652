"""Set up the process of a service: logging, supervised threads, and number of compute threads."""

import gc
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import torch

from rag_model.encoders.files import ENDPOINT_PREFIX
from rag_model.index.files.engine import faiss
from rag_model.process import count_cores, keep_freed_memory
from rag_model.secrets import mask_secrets
from rag_model.serving.settings import ServiceSettings
from rag_model.untrusted_text import escape_controls

_MAX_SEARCH_WORKERS = 4
_LONE_THREADS = 2  # a single question has too few tokens for more threads
_ENDPOINT_WORKERS = 8  # concurrent batches that wait for a remote model
THREAD_NAMES = ("search", "retrieve", "answer", "follower", "quality", "overrides", "probes", "worker")
_TORCH_THREADS_LOCK = threading.Lock()
# At a higher niceness, a thread could be preempted for a long time while it holds the GIL.
_LOWEST_NICENESS = 10
_LOG = logging.getLogger(__name__)
_RESTART_PAUSE = 0.1  # seconds before the first restart; doubled after each further death
_MAX_RESTART_PAUSE = 30.0  # seconds
_HEALTHY_SECONDS = 60.0  # run time after which the restart pause is reset
# Seconds between thread switches. With Python's default of 5 ms, requests would wait too long for
# another thread.
_SWITCH_INTERVAL = 0.001
_COLLECTION_THRESHOLDS = 700, 10, 10  # defaults of Python 3.11 and 3.12, see `gc.set_threshold`
_MIN_CPU_SHARE = 0.75  # minimum CPU time per wall time of the calling thread; 0.95 on idle cores
# Number of requests with the usual threads before more threads are tried again: the first number,
# which is doubled after each failed try, and the maximum.
_FIRST_BACKOFF, _MAX_BACKOFF = 4, 128


class SupervisedThread:
    """A thread that is restarted whenever it dies of an exception, until it returns or is joined.

    Every death is logged and counted, and `/readyz` reports it until the restart. All exceptions
    are caught, including those that are not an `Exception`, such as a Rust panic of a native
    library, which is a `BaseException`.
    """

    def __init__(
        self,
        name: str,
        run: Callable[[], None],
        on_death: Callable[[str], None] = lambda name: None,
    ) -> None:
        """Prepare the thread; `on_death` gets the name of the thread at each death."""
        self.name, self.on_thread_death, self._run = name, on_death, run
        self._is_ending = threading.Event()
        self._problem = ""
        self._thread = threading.Thread(target=self._run_supervised, name=name, daemon=True)

    @property
    def problem(self) -> str:
        """Why the thread does not run, in one sentence; empty if it runs or was not started yet."""
        if self._problem or self._thread.ident is None or self._thread.is_alive():
            return self._problem
        return f"the thread {self.name} has ended"

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def join(self) -> None:
        """Wait until the thread ends; it is not restarted any more."""
        self._is_ending.set()
        if self._thread.ident is not None:
            self._thread.join()

    def _run_supervised(self) -> None:
        pause_seconds = _RESTART_PAUSE
        while True:
            start_time = time.monotonic()
            try:
                self._run()
            except BaseException as failure:
                _LOG.exception("the thread %s died and is started again", self.name)
                self._problem = f"the thread {self.name} died of {type(failure).__name__} and is started again"
                self.on_thread_death(self.name)
            else:
                return
            if time.monotonic() - start_time > _HEALTHY_SECONDS:
                pause_seconds = _RESTART_PAUSE
            if self._is_ending.wait(pause_seconds):
                return
            self._problem, pause_seconds = "", min(2 * pause_seconds, _MAX_RESTART_PAUSE)


def limit_compute_threads(threads: int) -> None:
    """Set the number of threads that faiss and torch use for the calling thread's computations."""
    faiss.omp_set_num_threads(threads)
    with _TORCH_THREADS_LOCK:
        # torch applies the number also to other threads that have not read it yet
        torch.set_num_threads(threads)
        torch.get_num_threads()  # reading the number fixes it for the calling thread


def set_lowest_priority() -> None:
    """Give the calling thread and its child threads the lowest priority, and one faiss thread."""
    faiss.omp_set_num_threads(1)  # affects the calling thread only
    with suppress(OSError, AttributeError):  # not every system has priorities for single threads
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _LOWEST_NICENESS)


class _SafeFormatter(logging.Formatter):
    """Masks secrets, and escapes the control characters that names from a store may contain.

    Without this filter, a line break in a name could forge a record of the log.
    """

    def format(self, record: logging.LogRecord) -> str:
        return escape_controls(mask_secrets(super().format(record)))

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - the base class's name
        return super().formatMessage(record).replace("\r", "\\r").replace("\n", "\\n")


def prepare_process(log_prefix: str = "") -> None:
    """Set up the log on standard error, shorten thread switches, and keep freed memory.

    `keep_freed_memory` lets each batch reuse the memory of the previous one.
    """
    keep_freed_memory()
    handler = logging.StreamHandler()
    handler.setFormatter(_SafeFormatter(f"%(asctime)s %(levelname)s {log_prefix}%(message)s"))
    logging.basicConfig(level=logging.WARNING, handlers=[handler])
    logging.getLogger("rag_model.serving").setLevel(logging.INFO)
    sys.setswitchinterval(_SWITCH_INTERVAL)


def freeze_loaded_objects() -> None:
    """Exclude all objects of this process from later garbage collections, and collect as often as
    Python does by default.

    A full collection would visit every object of torch and transformers, which would pause all
    requests for a fifth of a second. The command line collects rarely, which would let a service
    keep tens of megabytes of garbage after many swaps.
    """
    gc.collect()
    gc.freeze()
    # A full collection is due when the new objects are a quarter of the old ones, which are counted
    # by full collections only.
    gc.collect()
    gc.set_threshold(*_COLLECTION_THRESHOLDS)


class LoneRequestThreads:
    """Uses more compute threads for a request that runs alone, as long as that is faster.

    Compute threads synchronise after every layer. If another program keeps a core busy, two threads
    take several times as long as one. The calling thread notices a busy core by its own low CPU
    share. It then uses the usual number of threads for the next 4 requests. If the next try is slow
    too, it does so for twice as many requests, up to 128.
    """

    def __init__(self, usual_threads: int, lone_threads: int) -> None:
        """Use `lone_threads` inside `apply`, but `usual_threads` outside and during a backoff."""
        self._usual_threads, self._lone_threads = usual_threads, lone_threads
        self._backoff = 0  # remaining requests with the usual threads
        self._next_backoff = _FIRST_BACKOFF

    @contextmanager
    def apply(self) -> Iterator[None]:
        """Set the number of threads for the block, which computes one request."""
        if self._backoff or self._lone_threads == self._usual_threads:
            self._backoff = max(0, self._backoff - 1)
            yield
            return
        limit_compute_threads(self._lone_threads)
        wall_start, cpu_start = time.perf_counter(), time.thread_time()
        try:
            yield
        finally:
            self.record_times(time.thread_time() - cpu_start, time.perf_counter() - wall_start)
            limit_compute_threads(self._usual_threads)

    def record_times(self, cpu_seconds: float, seconds: float) -> None:
        """Start a backoff if a request got the CPU for too small a share of its wall time."""
        is_slow = cpu_seconds < _MIN_CPU_SHARE * seconds
        self._backoff = self._next_backoff if is_slow else 0
        self._next_backoff = min(2 * self._next_backoff, _MAX_BACKOFF) if is_slow else _FIRST_BACKOFF


def count_search_workers(settings: ServiceSettings) -> int:
    """Return the number of search batches that run at the same time."""
    return settings.workers or min(count_cores(), _MAX_SEARCH_WORKERS)


def count_answer_workers(settings: ServiceSettings, model: str | None) -> int:
    """Return the number of answer batches that run at the same time.

    A model in memory uses all cores for one batch; a remote model can take several.
    """
    return settings.answer_workers or (
        _ENDPOINT_WORKERS if model is not None and model.startswith(ENDPOINT_PREFIX) else 1
    )


def count_answer_threads(settings: ServiceSettings, model: str | None) -> int:
    """Return the number of compute threads of an answer batch.

    By default all cores are used, because no token is generated before the whole prompt is read.
    """
    return settings.threads or max(1, count_cores() // count_answer_workers(settings, model))


def count_search_threads(settings: ServiceSettings) -> int:
    """Return the number of threads that encode and search a batch."""
    return settings.threads or max(1, count_cores() // count_search_workers(settings))


def count_lone_threads(settings: ServiceSettings) -> int:
    """Return the number of threads for a search request that runs alone."""
    return settings.threads or max(count_search_threads(settings), min(count_cores(), _LONE_THREADS))
