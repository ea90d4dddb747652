"""The common form of all jobs: `Create | Reshuffle | ParDo` over descriptors of tasks that are not recorded yet.

An element is a task of a few hundred bytes. `Work` does it with the store and returns a few facts as JSON, which the
worker writes to `runs/<run>/<stage>/`: this gives results and progress on any runner.
"""

import secrets
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any, Self

from beam_jobs.here import START, Task, Work, recorded
from beam_jobs.threads import own_threads
from beam_jobs.workers import here, named, side_by_side
from rag_model import errors
from rag_model.store.store import Store

Facts = dict[str, Any]
OnProgress = Callable[[int, int], None]  # (elements done, elements in total)


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


def run_job(
    stage: str,
    work: Work[Task],
    tasks: Sequence[Task],
    launch: Launch,
    on_progress: OnProgress | None = None,
    seconds: Callable[[Task], float] | None = None,
    *,
    memoised: bool = False,
) -> list[Facts]:
    """Do every task; return their facts in the order of `tasks`.

    Tasks go to Beam's workers, with two exceptions: recorded tasks of `memoised` work are not run, and a job on this
    machine that is smaller than a start of workers is done by the launcher, unless the number of workers is set.

    Args:
        stage: names the job.
        work: a function of an installed module (workers import it by name), idempotent: an engine may run a task twice.
        tasks: any number of small descriptors.
        launch: the settings of the run.
        on_progress: called about every `launch.poll_seconds`.
        seconds: returns the estimated seconds of one core for a task, if known. Longer tasks start first: local workers
            get tasks in turn, and so about the same amount of work.
        memoised: `work` begins by looking up the store's memo, before anything expensive.

    Raises:
        BookwheelError: the error that a worker raised, of the same class; or a worker died.
    """
    store, tell = Store.open(launch.store_url), on_progress or (lambda done, total: None)
    facts = recorded(work, tasks, store) if memoised else [None] * len(tasks)
    left = [number for number, known in enumerate(facts) if known is None]
    todo = [tasks[number] for number in left]
    found = len(tasks) - len(left)

    def on(done: int, total: int) -> None:
        tell(found + done, found + total)

    small = seconds is not None and sum(map(seconds, todo)) < START and here(launch.flags) and not named(launch.flags)
    if small or not todo:
        made = _by_itself(work, todo, store, on)
    else:
        from beam_jobs.pipeline import by_workers  # noqa: PLC0415 - importing Beam takes a second

        made = by_workers(stage, work, todo, launch, on, seconds)
    done_now = dict(zip(left, made, strict=True))
    return [done_now[number] if known is None else known for number, known in enumerate(facts)]


def done(work: Work[Task], task: Task, store: Store) -> Facts:
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


def _by_itself(work: Work[Task], tasks: Sequence[Task], store: Store, tell: OnProgress) -> list[Facts]:
    """Do a small job in this process, one task after another."""
    facts: list[Facts] = []
    with own_threads():
        for task in tasks:
            facts.append(done(work, task, store))
            tell(len(facts), len(tasks))
    return facts


def _checked(flags: Sequence[str]) -> tuple[str, ...]:
    from beam_jobs.options import checked  # noqa: PLC0415 - as above

    return checked(flags)
