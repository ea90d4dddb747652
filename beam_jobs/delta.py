"""The delta job: what spares who has pulled the snapshot before the most of the files that changed."""

from beam_jobs.job import run_job
from beam_jobs.launch import Launch, OnProgress, Report
from rag_model.store.pulling.deltas import Step, made, steps
from rag_model.store.store import Store
from rag_model.store.versions.manifest import Content

_PACKED = 100e6  # bytes of a graph per second of one core
_COMPARED = 4e6  # bytes of a passage file per second of one core: read, written again, and digested


def delta(step: Step, store: Store) -> Report:
    """Make the delta of one file, once."""
    return {"bytes": sum(ref.size for ref in made(store, step).outputs.values())}


def run(before: Content, after: Content, launch: Launch, on_progress: OnProgress | None = None) -> int:
    """Make all deltas from one snapshot's files to another's; return their bytes."""
    reports = run_job("delta", delta, [*steps(before, after)], launch, on_progress, _seconds, memoised=True)
    return sum(report["bytes"] for report in reports)


def _seconds(step: Step) -> float:
    return step.head / _PACKED if step.before is None else (step.before.size + step.after.size) / _COMPARED
