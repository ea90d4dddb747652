"""The settings for launching a run's jobs."""

import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any, Self

from beam_jobs.workers import here, named, one_a_gpu, side_by_side, start_seconds, worker_memory
from rag_model.cores import cores

Report = dict[str, Any]  # what a task tells, as JSON values
OnProgress = Callable[[int, int], None]  # (elements done, elements in all)

_MOST = 1 << 30  # bytes of a task that the launcher does in place of workers on other machines: its own may be small


@dataclass(frozen=True, slots=True)
class Launch:
    """The settings for launching a run's jobs."""

    store_url: str
    run: str  # unique name of the run, and folder of its reports
    flags: tuple[str, ...] = ()  # Beam's and the runner's own
    poll_seconds: float = 1.0  # seconds between two reads of the reports
    memory: int | None = None  # bytes for all local workers; None: the free memory
    task_bytes: int = 0  # memory of one task, if it is known

    @classmethod
    def new(cls, store_url: str, flags: Sequence[str] = (), memory: int | None = None) -> Self:
        """Return a launch with a new, unique run name, which sorts by time.

        Raises:
            UsageError: Beam cannot read its flags, or as `start_seconds`, `cores` and `worker_memory`.
        """
        start_seconds(flags), cores(), worker_memory(())  # a wrong variable is refused before any work
        run = f"{datetime.now(UTC):%Y%m%dT%H%M%S}-{secrets.token_hex(4)}"
        return cls(store_url, run, _checked(flags) if flags else (), memory=memory)

    def for_tasks(self, task_bytes: int) -> Self:
        """Return this launch with at most as many local workers as fit in memory, for tasks of `task_bytes`."""
        return replace(self.holding(task_bytes), flags=side_by_side(self.flags, task_bytes, self.memory))

    def holding(self, task_bytes: int) -> Self:
        """Return this launch for tasks of `task_bytes`, with the same workers."""
        return replace(self, task_bytes=task_bytes)

    def for_gpus(self, count: int) -> Self:
        """Return this launch with one local worker for each GPU; the same one where there are none."""
        return replace(self, flags=one_a_gpu(self.flags, count))

    def too_small(self, seconds: float) -> bool:
        """Return whether a job of so many seconds of a core is not worth workers, so that the launcher does it.

        It is if they take longer to start. Workers of this machine always start if their number is set; those on other
        machines if a task needs more than a gigabyte, or than is free here (`worker_memory`).

        Raises:
            UsageError: as `new`.
        """
        wanted = named(self.flags) if here(self.flags) else self.task_bytes > min(_MOST, worker_memory(()) or 0)
        return not wanted and seconds < start_seconds(self.flags)


def _checked(flags: Sequence[str]) -> tuple[str, ...]:
    from beam_jobs.options import checked  # noqa: PLC0415 - as above

    return checked(flags)
