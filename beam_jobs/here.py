"""Do a task; and tasks that need no workers: recorded ones, and jobs that are smaller than a start of workers.

A worker takes seconds to start, and may import modules that its task does not need. So the launcher first looks up
every task, many at a time, since on an object store a look-up is mostly waiting. A small job it then does itself.
"""

import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any, TypeVar

from rag_model import errors
from rag_model.store.objects.memo import NotRecordedError
from rag_model.store.store import Store

Task = TypeVar("Task")
Work = Callable[[Task, Store], dict[str, Any]]

_LOOKS = 32  # look-ups at a time


def recorded(work: Work[Task], tasks: Sequence[Task], store: Store) -> list[dict[str, Any] | None]:
    """Return the facts of recorded tasks, and None for those that have to be done.

    Args:
        work: a function that looks up the memo of its store before any expensive work.
        tasks: any number of tasks.
        store: the store of their records.

    Raises:
        BookwheelError: the store, or the inputs of a task, cannot be read.
    """
    found = Store(store.files)
    found.memo = replace(store.memo, makes=False)

    def look(task: Task) -> dict[str, Any] | None:
        try:
            return work(task, found)
        except NotRecordedError:
            return None

    with ThreadPoolExecutor(_LOOKS) as threads:
        return list(threads.map(look, tasks))


def done(work: Work[Task], task: Task, store: Store) -> dict[str, Any]:
    """Do one task.

    Raises:
        BookwheelError: the error that the work raised; a `ResourceError` if a file cannot be read or written, or if
        memory ran out.
    """
    try:
        return work(task, store)
    except MemoryError as full:
        raise errors.ResourceError(
            f"a worker ran out of memory ({str(full) or 'no more was to be had'}): give each worker more, run fewer "
            "side by side, or make parts smaller (part_bytes of the recipe), and run the same command again"
        ) from full
    except OSError as refused:
        where = refused.filename or tempfile.gettempdir()
        raise errors.ResourceError(
            f"a worker could not read or write {where} ({refused.strerror or refused}): free space or give access "
            "there, and run the same command again"
        ) from refused
