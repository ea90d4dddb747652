"""Run a job: a pipeline `Create | Reshuffle | ParDo` over the tasks that are not recorded yet.

The elements of the pipeline are descriptions of tasks, of a few hundred bytes each. A
`TaskFunction` runs one task with the store and returns a small report as JSON, which the worker
writes to `runs/<run>/<stage>/`. So the launcher can read results and progress on any runner.
"""

from collections.abc import Callable, Sequence

from beam_jobs.job_settings import JobSettings, OnProgress, Report
from beam_jobs.tasks import Task, TaskFunction, look_up_reports, restore_threads, run_task
from beam_jobs.workers import import_beam, prevent_pandas_import
from rag_model.store.store import Store


def run_job(
    stage: str,
    function: TaskFunction[Task],
    tasks: Sequence[Task],
    job_settings: JobSettings,
    on_progress: OnProgress | None = None,
    estimate_seconds: Callable[[Task], float] | None = None,
    *,
    memoised: bool = False,
    recorded_reports: Sequence[Report | None] | None = None,
) -> list[Report]:
    """Run every task; return their reports in the order of `tasks`.

    Tasks run on Beam's workers, with two exceptions. If the function is `memoised`, recorded tasks
    are not run again. A job that is too small to start workers for it runs in the launcher
    (`JobSettings.is_too_small`).

    Args:
        stage: the name of the job.
        function: a function of an installed module, which workers import by name. It must be
            idempotent, because an engine may run a task twice.
        tasks: any number of small descriptions of tasks.
        job_settings: where the tasks run.
        on_progress: called about every `job_settings.poll_seconds`.
        estimate_seconds: returns the estimated core seconds of a task; None if unknown. Longer
            tasks start first, so that local workers, to which tasks are dealt in turn, get similar
            amounts of work.
        memoised: whether `function` looks up the result in the store's memo before any expensive
            work.
        recorded_reports: the result of `look_up_reports` for the tasks, if they were looked up
            before.

    Raises:
        BookwheelError: an error of the class that a worker raised, or `ResourceError` if a worker
            died.
    """
    store, report_progress = Store.open(job_settings.store_url), on_progress or (lambda done, total: None)
    reports: list[Report | None] = [None] * len(tasks)
    if recorded_reports is not None:
        reports = [*recorded_reports]
    elif memoised:
        reports = look_up_reports(function, tasks, store)
    remaining_numbers = [i for i, report in enumerate(reports) if report is None]
    remaining_tasks = [tasks[i] for i in remaining_numbers]
    n_recorded = len(tasks) - len(remaining_numbers)

    def report_total_progress(done: int, total: int) -> None:
        report_progress(n_recorded + done, n_recorded + total)

    if not remaining_tasks or (
        estimate_seconds is not None and job_settings.is_too_small(sum(map(estimate_seconds, remaining_tasks)))
    ):
        new_reports = _run_in_process(function, remaining_tasks, store, report_total_progress)
    else:
        import_beam(job_settings.flags)
        from beam_jobs.pipeline import run_on_workers  # noqa: PLC0415 - imports Beam, slowly

        new_reports = run_on_workers(
            stage, function, remaining_tasks, job_settings, report_total_progress, estimate_seconds
        )
    reports_by_number = dict(zip(remaining_numbers, new_reports, strict=True))
    return [reports_by_number[i] if report is None else report for i, report in enumerate(reports)]


def _run_in_process(
    function: TaskFunction[Task], tasks: Sequence[Task], store: Store, report_progress: OnProgress
) -> list[Report]:
    """Run the tasks in this process, one after another."""
    reports: list[Report] = []
    prevent_pandas_import()
    with restore_threads():
        for task in tasks:
            reports.append(run_task(function, task, store))
            report_progress(len(reports), len(tasks))
    return reports
