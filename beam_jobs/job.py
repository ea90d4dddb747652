"""One shape for every job: `Create | Reshuffle | ParDo` over descriptors of what is not recorded yet.

An element is a task of a few hundred bytes. `Work` does it against the store and returns a few facts as JSON, which the
worker reports to `runs/<run>/<stage>/`: so results come home, and progress is seen, on any runner alike.
"""

import logging
import secrets
import tempfile
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any, Generic, Self

import apache_beam as beam
from apache_beam.options.pipeline_options import GoogleCloudOptions, PipelineOptions

from beam_jobs.failure import FAILED, WORKER_DIED, told
from beam_jobs.flink import cancel, reach
from beam_jobs.here import START, Task, Work, recorded
from beam_jobs.lease import held_lease, leave_with
from beam_jobs.options import (
    checked,
    is_local,
    local_runner,
    pipeline_options,
    worker_threads,
)
from beam_jobs.threads import limit_threads, own_threads
from beam_jobs.workers import here, named, side_by_side
from rag_model import errors
from rag_model.store.store import Store

Facts = dict[str, Any]
OnProgress = Callable[[int, int], None]  # (elements done, elements in all)

_SUBMITTING = 120.0  # seconds that an interrupted launcher waits for a job to be there, to cancel it


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
        return cls(
            store_url, f"{datetime.now(UTC):%Y%m%dT%H%M%S}-{secrets.token_hex(4)}", checked(flags), memory=memory
        )

    def for_tasks(self, task_bytes: int) -> Self:
        """Return this launch with no more local workers than have room for tasks of so many bytes."""
        return replace(self, flags=side_by_side(self.flags, task_bytes, self.memory))


class _Worker(beam.DoFn, Generic[Task]):
    def __init__(self, stage: str, work: Work[Task], launch: Launch, lease: Path | None, threads: int) -> None:
        self.stage, self.work, self.launch, self.lease, self.threads = stage, work, launch, lease, threads
        self.version = version("bookwheel")

    def setup(self) -> None:
        if self.lease is not None:
            leave_with(self.lease)
        if self.threads:
            limit_threads(self.threads)
        self.store: Store | None = None  # what is raised here, an engine may take minutes to hear of

    def process(self, element: tuple[int, Task]) -> list[int]:
        number, task = element
        store = self.store = self.store or self._reached()
        runs, run = store.runs, self.launch.run
        if self.lease is not None and runs.count(run, self.stage + FAILED):
            return []  # the local runner retries nothing: after one failure the rest would be work for nothing
        store.memo = replace(store.memo, by=f"{run}/{number}")  # an engine may let this be done again
        try:
            self._check_version()
            runs.write(run, self.stage, number, done(self.work, task, store))
        except errors.BookwheelError as error:
            with suppress(errors.BookwheelError):  # where the store itself failed, the raised error must do
                runs.write(run, self.stage + FAILED, number, {"error": type(error).__name__, "message": str(error)})
            raise
        return [number]

    def _reached(self) -> Store:
        try:
            return Store.open(self.launch.store_url)
        except errors.StoreError as lost:
            raise errors.StoreError(
                f"a worker does not reach the store ({lost}): name one that all machines reach, and give its endpoint "
                "and credentials to the workers as well"
            ) from lost

    def _check_version(self) -> None:
        if version("bookwheel") != self.version:
            raise errors.UsageError(
                f"a worker runs bookwheel {version('bookwheel')} and the launcher {self.version}: give both the same"
            )


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

    Tasks go to Beam's workers, but for those of `memoised` work that are recorded, and for the rest of a job that is
    smaller than a start of workers: on this machine, unless their number is named, the launcher does that by itself.

    Args:
        stage: names the job.
        work: a function of an installed module (workers import it by name), idempotent: an engine may run a task twice.
        tasks: any number of small descriptors.
        launch: where and how.
        on_progress: told about every `launch.poll_seconds`.
        seconds: of a core that a task takes, about, if that is known. The longest start first: local workers are dealt
            tasks in turn, and so are dealt about the same work.
        memoised: `work` begins by asking the store's memo, and does nothing of weight before.

    Raises:
        BookwheelError: what a worker raised, as the class it raised; or a worker that died, and how.
    """
    store, tell = Store.open(launch.store_url), on_progress or (lambda done, total: None)
    facts = recorded(work, tasks, store) if memoised else [None] * len(tasks)
    left = [number for number, known in enumerate(facts) if known is None]
    todo = [tasks[number] for number in left]
    found = len(tasks) - len(left)

    def on(done: int, total: int) -> None:
        tell(found + done, found + total)

    small = seconds is not None and sum(map(seconds, todo)) < START and here(launch.flags) and not named(launch.flags)
    made = _by_itself(work, todo, store, on) if small else _by_workers(stage, work, todo, launch, on, seconds)
    done_now = dict(zip(left, made, strict=True))
    return [done_now[number] if known is None else known for number, known in enumerate(facts)]


def done(work: Work[Task], task: Task, store: Store) -> Facts:
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


def _by_itself(work: Work[Task], tasks: Sequence[Task], store: Store, tell: OnProgress) -> list[Facts]:
    """Do a small job in this process, one task after another."""
    facts: list[Facts] = []
    with own_threads():
        for task in tasks:
            facts.append(done(work, task, store))
            tell(len(facts), len(tasks))
    return facts


def _by_workers(
    stage: str,
    work: Work[Task],
    tasks: Sequence[Task],
    launch: Launch,
    tell: OnProgress,
    seconds: Callable[[Task], float] | None,
) -> list[Facts]:
    if not tasks:
        return []
    store = Store.open(launch.store_url)
    options = pipeline_options(launch.flags, len(tasks))
    options.view_as(
        GoogleCloudOptions
    ).job_name = f"bookwheel-{stage}-{launch.run}".lower()  # as an engine's UI shows it
    reach(options, launch.flags)
    log = Path(tempfile.gettempdir()) / f"bookwheel-{launch.run}-{stage}.log"
    with held_lease() as lease:
        worker = _Worker(stage, work, launch, lease if is_local(options) else None, worker_threads(options))
        numbered = sorted(enumerate(tasks), key=lambda task: -seconds(task[1]) if seconds else 0)
        with _Running(_pipeline(stage, worker, numbered, options, log), options) as running:
            while not running.finished.wait(launch.poll_seconds):
                tell(store.runs.count(launch.run, stage), len(tasks))
    if running.failure is not None:
        raise told(store, launch.run, stage, running.failure, log) from running.failure
    log.unlink(missing_ok=True)
    tell(len(tasks), len(tasks))
    return _collect(store, launch.run, stage, len(tasks))


def _pipeline(
    stage: str, worker: _Worker[Task], tasks: Sequence[tuple[int, Task]], options: PipelineOptions, log: Path
) -> beam.Pipeline:
    pipeline = beam.Pipeline(local_runner(log) if is_local(options) else None, options=options)
    _ = (
        pipeline
        | "Tasks" >> beam.Create(list(tasks), reshuffle=False)  # type: ignore[no-untyped-call]
        | "Spread" >> beam.Reshuffle()  # type: ignore[no-untyped-call]
        | stage.capitalize() >> beam.ParDo(worker)  # type: ignore[no-untyped-call]
    )
    return pipeline


class _Running:
    """A pipeline in a thread of its own, so that the launcher can watch it and be interrupted."""

    def __init__(self, pipeline: beam.Pipeline, options: PipelineOptions) -> None:
        self.finished = threading.Event()
        self.failure: BaseException | None = None
        self._pipeline, self._options = pipeline, options
        self._submitted = threading.Event()
        self._result: Any = None

    def __enter__(self) -> Self:
        logging.getLogger("apache_beam").setLevel(logging.CRITICAL)  # what matters is told in one sentence
        threading.excepthook = self._thread_died
        threading.Thread(target=self._run, daemon=True, name="beam").start()
        return self

    def __exit__(self, *interrupted: object) -> None:
        if not self.finished.is_set():
            self._cancel()
        elif self.failure is None:  # else Beam's threads go on dying, at length, while the launcher leaves
            threading.excepthook = threading.__excepthook__

    def _cancel(self) -> None:
        if is_local(self._options):
            return  # those workers need no telling: their lease ends with the launcher's
        self._submitted.wait(_SUBMITTING)  # a job on its way cannot be cancelled yet
        if self._result is not None:
            with suppress(Exception):  # it may be gone by now
                self._result.cancel()
            cancel(self._options, self._options.view_as(GoogleCloudOptions).job_name)

    def _run(self) -> None:
        try:
            self._result = self._pipeline.run()
            self._submitted.set()
            self._result.wait_until_finish()
        except BaseException as failure:
            self.failure = failure
        finally:
            self._submitted.set()
            self.finished.set()

    def _thread_died(self, died: threading.ExceptHookArgs) -> None:
        # The local runner waits for ever for a worker that was killed; the thread that watched its process tells.
        if WORKER_DIED in str(died.exc_value):
            self.failure = self.failure or died.exc_value
            self.finished.set()


def _collect(store: Store, run: str, stage: str, expected: int) -> list[Facts]:
    reports: list[Facts] = store.runs.read_all(run, stage)
    if len(reports) != expected:
        raise errors.StoreError(
            f"{expected - len(reports)} of {expected} reports of the {stage} job are missing under runs/{run}/{stage} "
            f"in {store.url}: run the same command again"
        )
    return reports
