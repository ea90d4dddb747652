"""Run one stage of a build in a fresh process, and measure its time and memory.

CPU seconds exclude the start of the interpreter and its imports, on every side of a comparison.
Memory is anonymous memory (`RssAnon`), since the kernel can drop the pages of a mapped file. It
keeps no peak of anonymous memory, so another process reads the value a hundred times a second.
"""

import os
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from rag_model.index.files.engine import faiss

_INTERVAL = 0.01  # seconds between two readings of the memory


@dataclass(frozen=True, slots=True)
class WorkCost:
    """Time and memory of a stage."""

    seconds: float
    cpu_seconds: float
    anonymous_mb: float  # peak, with the interpreter and the libraries
    started_mb: float  # the same before the work began
    value: Any  # what the work returned


def run_alone(work: Callable[..., Any], *arguments: Any, threads: int = 1) -> WorkCost:
    """Call `work`, a module's function, in a fresh process where faiss and BLAS use `threads` threads."""
    os.environ["OMP_NUM_THREADS"] = os.environ["OPENBLAS_NUM_THREADS"] = str(threads)
    context = get_context("spawn")
    ours, theirs = context.Pipe()
    child = context.Process(target=_serve, args=(theirs, threads, work, arguments))
    child.start()
    theirs.close()
    status, started_mb, peak = Path("/proc", str(child.pid), "status"), 0.0, 0.0
    with suppress(EOFError):
        started_mb = ours.recv()
        while not ours.poll(_INTERVAL):
            peak = max(peak, _anonymous_mb(status))
        seconds, cpu_seconds, last, value = ours.recv()
        child.join()
        return WorkCost(seconds, cpu_seconds, max(started_mb, peak, last), started_mb, value)
    child.join()
    raise SystemExit(f"{work.__name__} ended with exit status {child.exitcode}")


def _serve(pipe: Connection, threads: int, work: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    faiss.omp_set_num_threads(threads)
    status = Path("/proc/self/status")
    pipe.send(_anonymous_mb(status))
    start, cpu_start = time.perf_counter(), time.process_time()
    value = work(*arguments)
    pipe.send((time.perf_counter() - start, time.process_time() - cpu_start, _anonymous_mb(status), value))


def _anonymous_mb(status: Path) -> float:
    with suppress(OSError, IndexError):  # the process has just ended, so the file or the line is gone
        return int(status.read_text().partition("RssAnon:")[2].split()[0]) * 1024 / 1e6
    return 0.0
