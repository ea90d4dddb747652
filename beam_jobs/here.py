"""What a job needs no workers for: tasks that are recorded already, and work smaller than a start.

A worker takes seconds to start, importing what its task may turn out not to need. So the launcher looks every task up
first, many at a time since on an object store a look is mostly waiting; and what is left of a small job it does itself.
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
_LOOKS = 32  # at a time


def recorded(work: Work[Task], tasks: Sequence[Task], store: Store) -> list[dict[str, Any] | None]:
    """Return the facts of the tasks that are recorded, and None for those that have to be done.

    Args:
        work: does nothing of weight before it asks the memo of the store that it is given.
        tasks: any number.
        store: where they are recorded.

    Raises:
        BookwheelError: the store cannot be read, or what a task's inputs are.
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
