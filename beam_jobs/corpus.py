"""Jobs over the passages of snapshots that are not stages of an index.

`run` runs the tasks of `rag_model.store.recorded_tasks` on workers: each task reads one part of the
corpus, or scores one block of texts with a model. `build_index` builds an index that a training
searches and no snapshot has. `write_deltas` compares the files of two snapshots, so that a service
that has the first one pulls only the changes. `redact_parts` rewrites parts without the pages of a
takedown.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np

from beam_jobs import embed, index
from beam_jobs.embed import EmbedTask
from beam_jobs.job import run_job
from beam_jobs.job_settings import JobSettings, OnProgress, Report
from beam_jobs.workers import count_gpus
from rag_model.arrays import Rows
from rag_model.corpus.chunk import ChunkStats
from rag_model.corpus.ragged_file import SparseVectors
from rag_model.corpus.redact import PartFiles, redact_part
from rag_model.index.files.layout import find_row_lists
from rag_model.index.files.tensors import find_common_ranges
from rag_model.index.plan import IndexPlan
from rag_model.process import temporary_folder
from rag_model.snapshots.encoding import store_bag_tokenizer
from rag_model.snapshots.parent_index import (
    PartWithParents,
    concatenate_parent_rows,
    list_parts,
    match_parts,
    match_weighted_terms,
)
from rag_model.snapshots.stage_results import ChunkResult
from rag_model.snapshots.takedown import ARTICLES, SPANS, RedactResult
from rag_model.store.objects.blobs import BlobRef
from rag_model.store.pulling.deltas import DeltaStep, build_delta, list_delta_steps
from rag_model.store.recorded_tasks import RecordedTask, compute_once
from rag_model.store.store import Store
from rag_model.store.versions.manifest import TEXT, Content, passages_path
from rag_model.store.versions.snapshot import Snapshot
from rag_model.toml import from_table

# bytes that one core compares per second, counting both versions of a file
_COMPARED_BYTES_PER_SECOND = 1e8
# bytes of passages that one core redacts per second; includes the time for their vectors
_REWRITTEN_BYTES_PER_SECOND = 1.6e6


def run(
    tasks: Sequence[RecordedTask], on_progress: OnProgress | None = None, *, job_settings: JobSettings
) -> list[Report]:
    """Run all tasks of one stage; return the reports in the order of the tasks.

    Raises:
        BookwheelError: as for `run_job`.
    """
    if not tasks:
        return []
    task_settings = set_worker_count(tasks, job_settings, count_gpus())
    job_arguments = tasks, task_settings, on_progress, lambda task: task.estimate_seconds()
    return run_job(tasks[0].stage, compute_once, *job_arguments, memoised=True)


def set_worker_count(tasks: Sequence[RecordedTask], job_settings: JobSettings, n_gpus: int) -> JobSettings:
    """Return the settings with as many local workers as fit in memory, or one for each GPU if tasks
    use GPUs.
    """
    task_settings = job_settings.for_tasks(max(task.memory_bytes for task in tasks))
    return task_settings.for_gpus(n_gpus) if any(task.uses_gpu for task in tasks) else task_settings


def build_index(plan: IndexPlan, tokenizer: Path | None, *, snapshot: Snapshot, job_settings: JobSettings) -> BlobRef:
    """Build an index over the passages of a snapshot, and return its file in the store.

    The index is recorded in the memo like an index of a build, so it is reused by a second
    training, or by a build that adds the same index.

    Args:
        plan: the plan of the index.
        tokenizer: folder of a tokenizer; the index is then built over bags of its tokens. None
            builds the index over the texts.
        snapshot: the snapshot whose passages are indexed.
        job_settings: where the tasks run.

    Raises:
        BookwheelError: as for `run_job`.
    """
    store = Store.open(job_settings.store_url)
    files, parts = snapshot.manifest.content.files, [part for part in snapshot.parts if part.rows]
    row_files = [files[passages_path(part.name)] for part in parts]
    if tokenizer is not None:
        row_files = _encode_bags(store, tokenizer, row_files, [part.rows for part in parts], job_settings)
    builds = [index.start_index(store, plan.kind, plan, row_files)]
    for job in (index.train, index.scatter, index.build_shards):
        builds = job(builds, job_settings)
    return index.merge(builds, job_settings)[0].blob


def _encode_bags(
    store: Store, tokenizer: Path, passages: Sequence[BlobRef], row_counts: Sequence[int], job_settings: JobSettings
) -> list[BlobRef]:
    """Turn the passages of each part into bags of tokens; return the parts' files."""
    encoder = store_bag_tokenizer(store, tokenizer)
    embed_tasks = [
        EmbedTask.create(ChunkResult(passages_ref, ChunkStats(n_rows)), encoder, "float16")
        for passages_ref, n_rows in zip(passages, row_counts, strict=True)
    ]
    return [result.vectors for result in embed.run(embed_tasks, job_settings)]


def create_delta(step: DeltaStep, store: Store) -> Report:
    """Create the delta of one file, unless the memo has it."""

    def read_parts() -> list[PartWithParents]:
        parts = json.loads(store.blobs.read(step.parts)) if step.parts else []
        return [from_table(PartWithParents, part, "a part of a delta") for part in parts]

    def find_base_rows() -> Rows:
        return concatenate_parent_rows(match_parts(store, read_parts(), by_text=True))

    def find_new_terms() -> tuple[Rows, SparseVectors]:
        from rag_model.index.postings.derive import find_longest_rising_subsequence  # noqa: PLC0415

        base_rows, read_rows = match_weighted_terms(store, read_parts())
        base_rows = np.where(find_longest_rising_subsequence(base_rows), base_rows, -1)
        new_rows = np.flatnonzero(base_rows < 0)
        return base_rows, SparseVectors.concatenate([SparseVectors.empty(), *read_rows(new_rows)])

    delta_record = build_delta(store, step, find_base_rows, find_row_lists, find_common_ranges, find_new_terms)
    return {"bytes": sum(ref.size for ref in delta_record.outputs.values())}


def write_deltas(
    before: Content, after: Content, job_settings: JobSettings, on_progress: OnProgress | None = None
) -> int:
    """Create all deltas from one snapshot's files to another's; return their total bytes."""
    steps = [step for steps in list_delta_steps(before, after).values() for step in steps]
    compared_representations = {step.representation for step in steps if step.base and not step.is_passages}
    put_bytes = Store.open(job_settings.store_url).blobs.put_bytes
    parts = {
        representation: put_bytes(
            json.dumps([asdict(part) for part in list_parts(before, after, representation)]).encode()
        )
        for representation in compared_representations
    }
    steps = [
        replace(step, parts=parts[step.representation]) if step.base and not step.is_passages else step
        for step in steps
    ]
    reports = run_job("delta", create_delta, steps, job_settings, on_progress, _estimate_comparison, memoised=True)
    return sum(report["bytes"] for report in reports)


def _estimate_comparison(step: DeltaStep) -> float:
    base_bytes = (step.base_head_bytes or step.base.size) if step.base else 0
    return (base_bytes + (step.head_bytes or step.target.size)) / _COMPARED_BYTES_PER_SECOND


@dataclass(frozen=True, slots=True)
class RedactTask:
    """Task to rewrite the files of one part without some pages."""

    pages: tuple[str, ...]  # ids of the pages to remove
    # files by name: `text`, `articles`, `spans`, and the vectors under their representation's name
    files: tuple[tuple[str, BlobRef], ...]

    @property
    def passages(self) -> BlobRef:
        """The part's passages."""
        return dict(self.files)[TEXT]


def redact(task: RedactTask, store: Store) -> Report:
    """Rewrite one part's files without the pages to remove."""
    paths_by_name = {name: store.blobs.get_local_path(ref) for name, ref in task.files}
    passages, articles = paths_by_name.pop(TEXT), paths_by_name.pop(ARTICLES, None)
    spans = paths_by_name.pop(SPANS, None)
    with temporary_folder("redact") as folder:
        new_files, n_rows = redact_part(PartFiles(passages, paths_by_name, articles, spans), {*task.pages}, folder)
        paths = {TEXT: new_files.passages, ARTICLES: new_files.articles, SPANS: new_files.spans, **new_files.vectors}
        files = {name: store.blobs.put_file(path) for name, path in paths.items() if path}
    return asdict(RedactResult(n_rows, files))


def redact_parts(
    tasks: Sequence[RedactTask], job_settings: JobSettings, on_progress: OnProgress | None = None
) -> list[RedactResult]:
    """Redact all parts; return their results in order.

    The job writes no memo record, because a record would name the files that contain the pages and
    so keep `gc` from deleting them. The job is cheap, and running it again gives the same files.
    """
    return [
        from_table(RedactResult, report, "a report of the redact job")
        for report in run_job("redact", redact, tasks, job_settings, on_progress, _estimate_redaction)
    ]


def _estimate_redaction(task: RedactTask) -> float:
    return task.passages.size / _REWRITTEN_BYTES_PER_SECOND
