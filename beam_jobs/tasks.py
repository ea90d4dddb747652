"""Look up and run tasks in this process.

A worker takes seconds to start, and may import modules that its task does not need. So the launcher
first looks up every task in the memo, many at a time, because look-ups on an object store are
mostly waiting. The launcher then runs small jobs itself.
"""

import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, TypeVar

from rag_model import errors
from rag_model.store.objects.memo import ResultNotRecordedError
from rag_model.store.store import Store

Task = TypeVar("Task")
TaskFunction = Callable[[Task, Store], dict[str, Any]]

_CONCURRENT_LOOKUPS = 32
_TOKENIZER_VARIABLE = "TOKENIZERS_PARALLELISM"
# environment variables that limit the threads of libraries
_THREAD_VARIABLES = (
    *("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "RAYON_NUM_THREADS"),
    _TOKENIZER_VARIABLE,
)


def look_up_reports(function: TaskFunction[Task], tasks: Sequence[Task], store: Store) -> list[dict[str, Any] | None]:
    """Return for each task its report if it is recorded, or None if the task has to run.

    Args:
        function: looks up the result in the store's memo before any expensive work.
        tasks: any number of tasks.
        store: the store with the records.

    Raises:
        BookwheelError: the store, or the inputs of a task, cannot be read.
    """
    lookup_store = Store(store.files)  # its memo raises an error instead of computing a result
    lookup_store.memo = replace(store.memo, can_produce=False)

    def look_up(task: Task) -> dict[str, Any] | None:
        try:
            return function(task, lookup_store)
        except ResultNotRecordedError:
            return None

    with ThreadPoolExecutor(_CONCURRENT_LOOKUPS) as executor:
        return list(executor.map(look_up, tasks))


def run_task(function: TaskFunction[Task], task: Task, store: Store) -> dict[str, Any]:
    """Run one task.

    Raises:
        BookwheelError: the error that the function raised; a `ResourceError` if a file cannot be
            read or written, or if memory ran out.
    """
    try:
        return function(task, store)
    except MemoryError as error:
        raise errors.ResourceError(
            f"a worker ran out of memory ({str(error) or 'no details'}): give each worker more "
            "memory, run fewer workers, or make parts smaller (part_bytes of the recipe), and run "
            "the same command again"
        ) from error
    except OSError as error:
        path = error.filename or tempfile.gettempdir()
        raise errors.ResourceError(
            f"a worker could not read or write {path} ({error.strerror or error}): free space or "
            "give access there, and run the same command again"
        ) from error


def limit_threads(n_threads: int) -> None:
    """Limit each numeric library of this process to `n_threads` threads, also libraries that are
    loaded later.
    """
    # With a GPU there is one worker, whose tokenizer would be slower than the GPU with one thread.
    os.environ |= dict.fromkeys(_THREAD_VARIABLES, str(n_threads))
    os.environ[_TOKENIZER_VARIABLE] = "false" if n_threads == 1 else "true"
    import faiss  # noqa: PLC0415 - after the environment is set

    faiss.omp_set_num_threads(n_threads)


@contextmanager
def restore_threads() -> Iterator[None]:
    """Undo the effect of `limit_threads` at the end of the block."""
    import faiss  # noqa: PLC0415 - workers of other jobs do not need it

    environment, n_threads = {name: os.environ.get(name) for name in _THREAD_VARIABLES}, faiss.omp_get_max_threads()
    try:
        yield
    finally:
        faiss.omp_set_num_threads(n_threads)
        for name, previous_value in environment.items():
            os.environ.pop(name, None)
            os.environ |= {} if previous_value is None else {name: previous_value}
