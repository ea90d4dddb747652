"""The common form of all jobs: `Create | Reshuffle | ParDo` over descriptors of tasks that are not recorded yet.

An element is a task of a few hundred bytes. `Work` does it with the store and returns a few facts as JSON, which the
worker writes to `runs/<run>/<stage>/`: this gives results and progress on any runner.
"""

from collections.abc import Callable, Sequence

from beam_jobs.here import Task, Work, done, recorded
from beam_jobs.launch import Launch, OnProgress, Report
from beam_jobs.threads import own_threads
from rag_model.store.store import Store


def run_job(
    stage: str,
    work: Work[Task],
    tasks: Sequence[Task],
    launch: Launch,
    on_progress: OnProgress | None = None,
    seconds: Callable[[Task], float] | None = None,
    *,
    memoised: bool = False,
    known: Sequence[Report | None] | None = None,
) -> list[Report]:
    """Do every task; return their facts in the order of `tasks`.

    Tasks go to Beam's workers, with two exceptions: recorded tasks of `memoised` work are not run, and a job that is
    smaller than a start of workers is done by the launcher (`Launch.too_small`).

    Args:
        stage: names the job.
        work: a function of an installed module (workers import it by name), idempotent: an engine may run a task twice.
        tasks: any number of small descriptors.
        launch: the settings of the run.
        on_progress: called about every `launch.poll_seconds`.
        seconds: returns the estimated seconds of one core for a task, if known. Longer tasks start first: local workers
            get tasks in turn, and so about the same amount of work.
        memoised: `work` begins by looking up the store's memo, before anything expensive.
        known: what `recorded` returned for the tasks, if they were looked up before.

    Raises:
        BookwheelError: the error that a worker raised, of the same class; or a worker died.
    """
    store, tell = Store.open(launch.store_url), on_progress or (lambda done, total: None)
    facts = [*known] if known is not None else recorded(work, tasks, store) if memoised else [None] * len(tasks)
    left = [number for number, known in enumerate(facts) if known is None]
    todo = [tasks[number] for number in left]
    found = len(tasks) - len(left)

    def on(done: int, total: int) -> None:
        tell(found + done, found + total)

    if not todo or (seconds is not None and launch.too_small(sum(map(seconds, todo)))):
        made = _by_itself(work, todo, store, on)
    else:
        from beam_jobs.pipeline import by_workers  # noqa: PLC0415 - importing Beam takes a second

        made = by_workers(stage, work, todo, launch, on, seconds)
    done_now = dict(zip(left, made, strict=True))
    return [done_now[number] if known is None else known for number, known in enumerate(facts)]


def _by_itself(work: Work[Task], tasks: Sequence[Task], store: Store, tell: OnProgress) -> list[Report]:
    """Do a small job in this process, one task after another."""
    facts: list[Report] = []
    with own_threads():
        for task in tasks:
            facts.append(done(work, task, store))
            tell(len(facts), len(tasks))
    return facts
