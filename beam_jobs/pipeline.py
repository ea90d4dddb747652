"""Run a job as the Beam pipeline `Create | Reshuffle | ParDo`, in a thread that can be cancelled.

Importing Beam takes a second, so this module is imported only for a job that needs workers.
"""

import logging
import re
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from traceback import walk_tb
from typing import Any, Generic, Self

import apache_beam as beam
from apache_beam.metrics.metric import Metrics
from apache_beam.options.pipeline_options import GoogleCloudOptions, PipelineOptions

from beam_jobs.flink import cancel_job, set_job_server
from beam_jobs.job_settings import JobSettings, OnProgress, Report
from beam_jobs.local_worker import WORKER_DIED
from beam_jobs.options import build_pipeline_options, count_worker_threads, create_local_runner, is_local
from beam_jobs.tasks import Task, TaskFunction, limit_threads, run_task
from beam_jobs.workers import exit_with_launcher, hold_launcher_lock
from rag_model import errors
from rag_model.store.store import Store

FAILED_SUFFIX = "failed"  # suffix of the stage name under which a worker reports an error
# For each failure of an engine: the pattern of its message, the class of the error to raise, and
# the error's text after "the STAGE job".
_ENGINE_FAILURES = (
    (
        re.compile(r"StatusRuntimeException: (CANCELLED|UNAVAILABLE)"),
        errors.ResourceError,
        "lost workers more often than the engine retries, perhaps because they ran out of memory: "
        "finished work is recorded; give each worker more memory, or run fewer on a machine, and "
        "run again",
    ),
    (
        re.compile(r"TimeoutException: Timeout has occurred: \d+ ms"),
        errors.ResourceError,
        "timed out waiting for as many slots as --parallelism requests; perhaps a machine was "
        "lost: finished work is recorded; add TaskManagers or request fewer slots, and run again",
    ),
    (
        re.compile(r"JobCancellationException|in state CANCELLED"),
        errors.BookwheelError,
        "was cancelled on its engine: finished work is recorded; run it again to continue",
    ),
)
_RAISED_ERROR = re.compile(
    r"^rag_model\.errors\.(\w+): (.*?)(?: \[while running .*\])?$", re.MULTILINE
)  # an error of bookwheel in a stack trace


_JAVA_FRAME = re.compile(r"(at )?[\w.$/<>]+\([\w .]+(:\d+)?\)|\.\.\. \d+ more")
# seconds that an interrupted launcher waits until a job is submitted and can be cancelled
_SUBMIT_TIMEOUT = 120.0
_JOB_PAGE = re.compile(r"https://console\.cloud\.google\.com/\S+")


def explain_failure(store: Store, run: str, stage: str, failure: BaseException, log: Path) -> errors.BookwheelError:
    """Return the error to show to the user.

    Args:
        store: the store with the workers' reports.
        run: the name of the job's run.
        stage: the job's stage.
        failure: the exception that the runner raised.
        log: the log file of local workers.
    """
    reports = store.runs.read_reports(run, stage + FAILED_SUFFIX)
    # A chain of exceptions ends with the error to show.
    raised_errors = _RAISED_ERROR.findall(str(failure))
    if reports:
        return errors.error_from_dict(**reports[0])
    if raised_errors:
        return errors.error_from_dict(*raised_errors[-1])
    if f"{WORKER_DIED} {-signal.SIGKILL}" in str(failure):
        return errors.ResourceError(
            f"a worker process of the {stage} job was killed, perhaps because memory ran out (log: "
            f"{log}): finished work is recorded; run again, with one worker (-- "
            "--direct_num_workers=1) if it happens again"
        )
    if WORKER_DIED in str(failure):
        return errors.BookwheelError(
            f"a worker process of the {stage} job ended (exit code "
            f"{str(failure).rpartition(' ')[2]}); its log {log} says why: finished work is "
            "recorded; correct the cause and run again"
        )
    for pattern, error_class, explanation in _ENGINE_FAILURES:
        if pattern.search(str(failure)):
            return error_class(f"the {stage} job {explanation}")
    return errors.BookwheelError(
        f"the {stage} job failed on its runner ({type(failure).__name__}: "
        f"{_find_last_message(failure)}): "
        "finished work is recorded; run it again with --debug for the trace"
    )


def _find_last_message(failure: BaseException) -> str:
    """Return the last line of an error message that is neither a frame of a Java trace nor a
    heading.
    """
    lines = [line.strip() for line in str(failure).splitlines() if line.strip()]
    messages = [line for line in lines if not line.endswith(":") and not _JAVA_FRAME.fullmatch(line)]
    return (messages or lines or ["no message"])[-1]


class Worker(beam.DoFn, Generic[Task]):
    """Run tasks with the store, and write their reports."""

    def __init__(
        self,
        stage: str,
        function: TaskFunction[Task],
        job_settings: JobSettings,
        launcher_lock: Path | None,
        n_threads: int,
    ) -> None:
        self.stage, self.function, self.job_settings = stage, function, job_settings
        self.launcher_lock, self.n_threads = launcher_lock, n_threads
        self.version = version("bookwheel")

    def setup(self) -> None:
        """Limit the threads of this worker, and let this process end when the launcher ends."""
        if self.launcher_lock is not None:
            exit_with_launcher(self.launcher_lock)
        if self.n_threads:
            limit_threads(self.n_threads)
        # The store is opened later, because an engine may report errors of `setup` only after
        # minutes.
        self.store: Store | None = None

    def process(self, element: tuple[int, Task]) -> list[int]:
        """Run one numbered task, and write its report or its error.

        Raises:
            BookwheelError: the error that the task raised.
        """
        task_number, task = element
        store = self.store = self.store or self._open_store()
        runs, run = store.runs, self.job_settings.run
        if self.launcher_lock is not None and runs.count_reports(run, self.stage + FAILED_SUFFIX):
            # The local runner does not retry, so after one failure the job fails and further tasks
            # are useless.
            return []
        # If the engine retries this task, a record that the first try wrote still counts as new.
        store.memo = replace(store.memo, owner=f"{run}/{task_number}")
        start_time = time.monotonic()
        try:
            self._check_version()
            runs.write_report(run, self.stage, task_number, run_task(self.function, task, store))
            # The runner's UI shows these metrics under the stage's name.
            Metrics.counter(self.stage, "tasks_done").inc()  # type: ignore[no-untyped-call]
            milliseconds = round(1000 * (time.monotonic() - start_time))
            Metrics.distribution(self.stage, "task_milliseconds").update(milliseconds)  # type: ignore[no-untyped-call]
        except errors.BookwheelError as error:
            Metrics.counter(self.stage, "tasks_failed").inc()  # type: ignore[no-untyped-call]
            # If the error cannot be written to the store, it is still raised.
            with suppress(errors.BookwheelError):
                runs.write_report(run, self.stage + FAILED_SUFFIX, task_number, errors.error_to_dict(error))
            raise
        return [task_number]

    def _open_store(self) -> Store:
        try:
            return Store.open(self.job_settings.store_url)
        except errors.StoreError as error:
            raise errors.StoreError(
                f"a worker cannot reach the store ({error}): use a store that all machines reach, "
                "and give its endpoint and credentials to the workers as well"
            ) from error

    def _check_version(self) -> None:
        if version("bookwheel") != self.version:
            raise errors.UsageError(
                f"a worker runs bookwheel {version('bookwheel')} and the launcher runs "
                f"{self.version}: install the same version on both"
            )


def run_on_workers(
    stage: str,
    function: TaskFunction[Task],
    tasks: Sequence[Task],
    job_settings: JobSettings,
    report_progress: OnProgress,
    estimate_seconds: Callable[[Task], float] | None,
) -> list[Report]:
    """Run at least one task on Beam's workers; return the reports in order, as `run_job` does.

    Raises:
        BookwheelError: for the same reasons as `run_job`.
    """
    store = Store.open(job_settings.store_url)
    # delete reports of an earlier job of the same stage
    store.runs.delete_reports(job_settings.run, stage, stage + FAILED_SUFFIX)
    options = build_pipeline_options(job_settings.flags, len(tasks), uses_gpu=job_settings.uses_gpu)
    # the name that the engine's UI shows
    options.view_as(GoogleCloudOptions).job_name = f"bookwheel-{stage}-{job_settings.run}".lower()
    set_job_server(options, job_settings.flags)
    log = Path(tempfile.gettempdir()) / f"bookwheel-{job_settings.run}-{stage}.log"
    with hold_launcher_lock() as lock:
        worker = Worker(
            stage, function, job_settings, lock if is_local(options) else None, count_worker_threads(options)
        )
        numbered_tasks = sorted(
            enumerate(tasks), key=lambda task: -estimate_seconds(task[1]) if estimate_seconds else 0
        )
        with _PipelineThread(_create_pipeline(stage, worker, numbered_tasks, options, log), options) as pipeline_thread:
            while not pipeline_thread.finished.wait(job_settings.poll_seconds):
                report_progress(store.runs.count_reports(job_settings.run, stage), len(tasks))
    if pipeline_thread.failure is not None:
        raise explain_failure(store, job_settings.run, stage, pipeline_thread.failure, log) from pipeline_thread.failure
    log.unlink(missing_ok=True)
    report_progress(len(tasks), len(tasks))
    return _read_reports(store, job_settings.run, stage, len(tasks))


def _create_pipeline(
    stage: str, worker: Worker[Task], tasks: Sequence[tuple[int, Task]], options: PipelineOptions, log: Path
) -> beam.Pipeline:
    pipeline = beam.Pipeline(create_local_runner(log) if is_local(options) else None, options=options)
    _ = (
        pipeline
        | "Tasks" >> beam.Create(list(tasks), reshuffle=False)  # type: ignore[no-untyped-call]
        | "Spread" >> beam.Reshuffle()  # type: ignore[no-untyped-call]
        | stage.capitalize() >> beam.ParDo(worker)  # type: ignore[no-untyped-call]
    )
    return pipeline


class _BeamLog(logging.Handler):
    """Hides Beam's log while a job runs, except the address of the job's page.

    Errors are hidden too, because the launcher reports them in one sentence.
    """

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self._logger = logging.getLogger("apache_beam")

    def start(self) -> None:
        """Handle the log records of Beam in place of the root logger."""
        self._settings = self._logger.level, self._logger.propagate
        self._logger.addHandler(self)
        self._logger.propagate = False
        self._logger.setLevel(logging.INFO)

    def stop(self) -> None:
        """Restore the settings of Beam's logger."""
        self._logger.removeHandler(self)
        level, self._logger.propagate = self._settings
        self._logger.setLevel(level)

    def emit(self, record: logging.LogRecord) -> None:
        """Print the address of the job's page, if the record contains it."""
        if record.levelno < logging.ERROR and (address := _JOB_PAGE.search(record.getMessage())):
            sys.stderr.write(f"the job's page: {address[0]}\n")


class _PipelineThread:
    """Runs a pipeline in a thread, so that the launcher can watch it and be interrupted."""

    def __init__(self, pipeline: beam.Pipeline, options: PipelineOptions) -> None:
        self.finished = threading.Event()
        self.failure: BaseException | None = None
        self._pipeline, self._options = pipeline, options
        self._submitted = threading.Event()
        self._result: Any = None
        self._log, self._previous_hook = _BeamLog(), threading.excepthook

    def __enter__(self) -> Self:
        self._log.start()
        self._previous_hook, threading.excepthook = threading.excepthook, self._on_thread_exception
        threading.Thread(target=self._run_pipeline, daemon=True, name="beam").start()
        return self

    def __exit__(self, *exception_info: object) -> None:
        try:
            if not self.finished.is_set():
                self._cancel()
        finally:
            # After a local job that failed or was interrupted, Beam's threads end later, with
            # exceptions. So the hook, which hides them, stays installed; it passes on the
            # exceptions of other threads.
            if (self.finished.is_set() and self.failure is None) or not is_local(self._options):
                threading.excepthook = self._previous_hook
                self._log.stop()

    def _cancel(self) -> None:
        if is_local(self._options):
            return  # local workers exit when the launcher's lock is released
        # a job that is being submitted cannot be cancelled yet
        self._submitted.wait(_SUBMIT_TIMEOUT)
        if self._result is not None:
            with suppress(Exception):  # the job may be gone already
                self._result.cancel()
            cancel_job(self._options, self._options.view_as(GoogleCloudOptions).job_name)

    def _run_pipeline(self) -> None:
        try:
            self._result = self._pipeline.run()
            self._submitted.set()
            self._result.wait_until_finish()
        except BaseException as failure:
            self.failure = failure
        finally:
            self._submitted.set()
            self.finished.set()

    def _on_thread_exception(self, hook_args: threading.ExceptHookArgs) -> None:
        # Beam's local runner would wait forever for a worker that was killed; the exception of the
        # thread that watches the worker ends the wait.
        if WORKER_DIED in str(hook_args.exc_value):
            self.failure = self.failure or hook_args.exc_value
            self.finished.set()
        elif not _is_raised_by_beam(hook_args):
            self._previous_hook(hook_args)


def _is_raised_by_beam(hook_args: threading.ExceptHookArgs) -> bool:
    """Return whether code of Beam or gRPC raised a thread's exception or passed it on."""
    modules = [frame.f_globals.get("__name__", "") for frame, _ in walk_tb(hook_args.exc_traceback)]
    return any(module.startswith(("grpc", "apache_beam")) for module in [hook_args.exc_type.__module__, *modules])


def _read_reports(store: Store, run: str, stage: str, n_expected: int) -> list[Report]:
    reports: list[Report] = store.runs.read_reports(run, stage)
    if len(reports) != n_expected:
        raise errors.StoreError(
            f"{n_expected - len(reports)} of {n_expected} reports of the {stage} job are missing "
            f"under runs/{run}/{stage} in {store.url}: run the same command again"
        )
    return reports
