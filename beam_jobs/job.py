"""One shape for every job: `Create | Reshuffle | ParDo` over descriptors of what is not recorded yet.

An element is a task of a few hundred bytes. `Work` does it against the store and returns a few facts as JSON, which the
worker reports to `runs/<run>/<stage>/`: so results come home, and progress is seen, on any runner alike.
"""

from collections.abc import Callable, Sequence

from beam_jobs.here import START, Task, Work, recorded
from beam_jobs.launch import Launch, OnProgress, Report, done
from beam_jobs.threads import own_threads
from beam_jobs.workers import here, named
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
) -> list[Report]:
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
    if small or not todo:
        made = _by_itself(work, todo, store, on)
    else:
        from beam_jobs.pipeline import by_workers  # noqa: PLC0415 - Beam: a second that a small job need not wait

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
