"""The delta job: write deltas, so that a service that has the previous snapshot pulls only the
changes.
"""

from beam_jobs.job import run_job
from beam_jobs.launch import Launch, OnProgress, Report
from rag_model.store.pulling.deltas import DeltaStep, build_delta, iter_delta_steps
from rag_model.store.store import Store
from rag_model.store.versions.manifest import Content

_PACKED_BYTES_PER_SECOND = 100e6  # bytes of a graph per second of one core
_COMPARED_BYTES_PER_SECOND = 4e6  # a file of passages or lists: compared, rewritten and digested


def delta(step: DeltaStep, store: Store) -> Report:
    """Create the delta of one file, unless it is recorded."""
    return {"bytes": sum(ref.size for ref in build_delta(store, step).outputs.values())}


def run(before: Content, after: Content, launch: Launch, on_progress: OnProgress | None = None) -> int:
    """Create all deltas from one snapshot's files to another's; return their total bytes."""
    reports = run_job("delta", delta, [*iter_delta_steps(before, after)], launch, on_progress, _seconds, memoised=True)
    return sum(report["bytes"] for report in reports)


def _seconds(step: DeltaStep) -> float:
    return (
        step.head_bytes / _PACKED_BYTES_PER_SECOND
        if step.base is None
        else (step.base.size + step.target.size) / _COMPARED_BYTES_PER_SECOND
    )
