"""The settings of a run's Beam jobs: where they run, and with how many workers and memory."""

import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any, Self

from beam_jobs.workers import (
    get_start_seconds,
    get_worker_memory,
    import_beam,
    is_local,
    limit_to_gpus,
    limit_workers,
    sets_worker_count,
)
from rag_model.process import count_cores

Report = dict[str, Any]  # the result of a task, as JSON values
OnProgress = Callable[[int, int], None]  # arguments: finished tasks, all tasks

# Maximum bytes of memory of a task that the launcher runs instead of workers on other machines,
# because the launcher's machine may be small.
_LAUNCHER_TASK_BYTES = 1 << 30


@dataclass(frozen=True, slots=True)
class JobSettings:
    """The store, the options of Beam and the memory with which the jobs of a run are executed."""

    store_url: str
    run: str  # unique name of the run, and folder of its reports
    flags: tuple[str, ...] = ()  # options of Beam and of its runner
    poll_seconds: float = 1.0  # seconds between two reads of the reports
    memory: int | None = None  # bytes of memory for all local workers; None: the free memory
    task_bytes: int = 0  # bytes of memory that one task needs; 0: unknown
    uses_gpu: bool = False  # whether tasks use a GPU if there is one

    @classmethod
    def new(cls, store_url: str, flags: Sequence[str] = (), memory: int | None = None) -> Self:
        """Return the settings of a new run; its unique name begins with the time.

        Raises:
            UsageError: Beam cannot read its flags, or `get_start_seconds`, `count_cores` or
                `get_worker_memory` reads an invalid environment variable.
        """
        # refuse an invalid environment variable before any work
        get_start_seconds(flags), count_cores(), get_worker_memory(())
        run_name = f"{datetime.now(UTC):%Y%m%dT%H%M%S}-{secrets.token_hex(4)}"
        return cls(store_url, run_name, _check_flags(flags) if flags else (), memory=memory)

    def for_tasks(self, task_bytes: int) -> Self:
        """Return these settings with at most as many local workers as fit in memory if each task
        needs `task_bytes`.
        """
        return replace(self.with_task_bytes(task_bytes), flags=limit_workers(self.flags, task_bytes, self.memory))

    def with_task_bytes(self, task_bytes: int) -> Self:
        """Return these settings for tasks that need `task_bytes` of memory each, with the same
        number of workers.

        The jobs `train`, `merge` and `embed` use this, because memory rarely limits their workers:
        the first two have one task for each index, and a worker of `embed` needs little more than
        its encoder.
        """
        return replace(self, task_bytes=task_bytes)

    def for_gpus(self, n_gpus: int) -> Self:
        """Return these settings for tasks that use a GPU.

        It has one local worker for each of `n_gpus` GPUs. On other runners, workers keep the
        accelerators that the flags request.
        """
        return replace(self, flags=limit_to_gpus(self.flags, n_gpus), uses_gpu=True)

    def is_too_small(self, seconds: float) -> bool:
        """Return whether the launcher should run a job itself that takes one core `seconds`.

        A job is too small for workers if starting them would take longer than the job. But workers
        on this machine always start if their number is set. Workers on other machines always start
        if a task needs more than a gigabyte, or more memory than is free here
        (`get_worker_memory`).

        Raises:
            UsageError: for the same reasons as `new`.
        """
        needs_workers = (
            sets_worker_count(self.flags)
            if is_local(self.flags)
            else self.task_bytes > min(_LAUNCHER_TASK_BYTES, get_worker_memory(()) or 0)
        )
        return not needs_workers and seconds < get_start_seconds(self.flags)


def _check_flags(flags: Sequence[str]) -> tuple[str, ...]:
    import_beam(flags)
    from beam_jobs.options import check_flags  # noqa: PLC0415 - imports Beam, slowly

    return check_flags(flags)
