"""Where and how a run's jobs are launched, and what every task does alike wherever it runs."""

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
    """Where and how a run's jobs are launched."""

    store_url: str
    run: str  # name of the run, unique; reports lie under it
    flags: tuple[str, ...] = ()  # Beam's and the runner's own
    poll_seconds: float = 1.0  # between two looks at the reports
    memory: int | None = None  # bytes for all local workers; None: what is free

    @classmethod
    def new(cls, store_url: str, flags: Sequence[str] = (), memory: int | None = None) -> Self:
        """Return a launch under a run name of its own, which sorts by time.

        Raises:
            UsageError: Beam cannot read its flags.
        """
        run = f"{datetime.now(UTC):%Y%m%dT%H%M%S}-{secrets.token_hex(4)}"
        return cls(store_url, run, _checked(flags) if flags else (), memory=memory)

    def for_tasks(self, task_bytes: int) -> Self:
        """Return this launch with no more local workers than have room for tasks of so many bytes."""
        return replace(self, flags=side_by_side(self.flags, task_bytes, self.memory))


def done(work: Work[Task], task: Task, store: Store) -> Report:
    """Do one task.

    Raises:
        BookwheelError: what the work raised; a `ResourceError` for a file that cannot be read or written, or for want
        of memory.
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
