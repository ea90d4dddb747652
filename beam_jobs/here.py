"""Tasks that need no workers: those that are recorded already, and jobs that are smaller than a start of workers.

A worker takes seconds to start, and may import modules that its task does not need. So the launcher first looks up
every task, many at a time, since on an object store a look-up is mostly waiting. A small job it then does itself.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any, TypeVar

from rag_model.store.objects.memo import NotRecordedError
from rag_model.store.store import Store

Task = TypeVar("Task")
Work = Callable[[Task, Store], dict[str, Any]]

START = 4.0  # seconds of a core: below that, starting workers costs more than they save
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
