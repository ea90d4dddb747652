"""The settings for launching a run's jobs, and how one task is done on every runner."""

import secrets
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any, Self

from beam_jobs.here import Task, Work
from beam_jobs.workers import side_by_side
from rag_model import errors
from rag_model.store.store import Store

Report = dict[str, Any]  # what a task tells, as JSON values
OnProgress = Callable[[int, int], None]  # (elements done, elements in all)


@dataclass(frozen=True, slots=True)
class Launch:
    """The settings for launching a run's jobs."""

    store_url: str
    run: str  # unique name of the run, and folder of its reports
    flags: tuple[str, ...] = ()  # Beam's and the runner's own
    poll_seconds: float = 1.0  # seconds between two reads of the reports
    memory: int | None = None  # bytes for all local workers; None: the free memory

    @classmethod
    def new(cls, store_url: str, flags: Sequence[str] = (), memory: int | None = None) -> Self:
        """Return a launch with a new, unique run name, which sorts by time.

        Raises:
            UsageError: Beam cannot read its flags.
        """
        run = f"{datetime.now(UTC):%Y%m%dT%H%M%S}-{secrets.token_hex(4)}"
        return cls(store_url, run, _checked(flags) if flags else (), memory=memory)

    def for_tasks(self, task_bytes: int) -> Self:
        """Return this launch with at most as many local workers as fit in memory, for tasks of `task_bytes`."""
        return replace(self, flags=side_by_side(self.flags, task_bytes, self.memory))


def done(work: Work[Task], task: Task, store: Store) -> Report:
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


def _checked(flags: Sequence[str]) -> tuple[str, ...]:
    from beam_jobs.options import checked  # noqa: PLC0415 - as above

    return checked(flags)
