"""The index jobs: train, scatter (sort vectors by shard, part by part), build shards, merge.

All indexes of a snapshot share the four jobs. The trained file of the parent is reused while it
fits: the training job then only tests it with some new vectors, or moves lists that fit these
vectors badly. Apart from the trained file, a piece (the vectors of one part, sorted by shard)
depends only on its part, and a shard only on its slices of the pieces. So pieces and shards are
reused from the memo if their part or slices are unchanged. An inverted index is derived from that
of the parent where possible (`derive`).

`index_work` contains the functions that workers run.
"""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial, wraps
from typing import Any

import numpy as np

from beam_jobs.index_work import (
    IndexInProgress,
    IndexStageResult,
    ScatterTask,
    ShardTask,
    build_shard,
    derive_one,
    merge_one,
    read_blob_list,
    require_blob,
    scatter_one,
    train_one,
)
from beam_jobs.job import run_job
from beam_jobs.job_settings import JobSettings, OnProgress, Report
from beam_jobs.tasks import look_up_reports
from beam_jobs.workers import is_local
from rag_model.digest import digest_bytes
from rag_model.errors import InputError
from rag_model.index.files import engine
from rag_model.index.files.pieces import SLICE_LOCATION_DTYPE, SliceTable, digest_slices, read_slice_table
from rag_model.index.kind import DerivingKind, ShardUpdatingKind, get_kind
from rag_model.index.plan import IndexPlan
from rag_model.index.quality.results import TrainingStats
from rag_model.snapshots.content import BuiltIndex
from rag_model.snapshots.parent_index import ParentIndex
from rag_model.snapshots.reused_training import ParentRows, ReusedTraining, build_shards_entry, read_shards
from rag_model.snapshots.stage_results import BuiltShard
from rag_model.store.objects.blobs import BlobRef
from rag_model.store.store import Store
from rag_model.toml import from_table

Job = Callable[..., list[IndexInProgress]]
_NAMED_CELLS = 5  # maximum number of cells that a note names
_GPU_KINDS = ("hnsw", "ivf")


def start_index(
    store: Store,
    name: str,
    plan: IndexPlan,
    row_files: Sequence[BlobRef],
    reused_training: ReusedTraining | None = None,
    parent_index: ParentIndex | None = None,
) -> IndexInProgress:
    """Return the initial record of an index; if possible it will be derived from `parent_index`."""
    parent_blob = store.blobs.put_bytes(json.dumps(asdict(parent_index)).encode()) if parent_index else None
    return IndexInProgress(name, plan, _store_blob_list(store, row_files), reused_training, parent_blob)


def derive(
    builds: Sequence[IndexInProgress], job_settings: JobSettings, on_progress: OnProgress | None = None
) -> list[IndexInProgress]:
    """Derive indexes from those of the parent where possible; later jobs skip derived indexes."""
    derivable_builds = [build for build in builds if build.parent_index]
    task_settings = _set_derive_worker_count(derivable_builds, job_settings)
    job_arguments = derivable_builds, task_settings, on_progress, _estimate_merge_seconds
    reports = iter(run_job("derive", derive_one, *job_arguments, memoised=True))
    results = [IndexStageResult.from_report(next(reports)) if build.parent_index else None for build in builds]
    return [
        replace(build, derived_result=result if result and result.blob else None)
        for build, result in zip(builds, results, strict=True)
    ]


def _set_derive_worker_count(builds: Sequence[IndexInProgress], job_settings: JobSettings) -> JobSettings:
    """Return the settings with as many local workers as can derive these indexes in memory."""
    kinds_and_sizes = [(get_kind(build.plan.kind), build.plan.n) for build in builds]
    return job_settings.for_tasks(
        max((kind.derive_memory_bytes(n) for kind, n in kinds_and_sizes if isinstance(kind, DerivingKind)), default=1)
    )


def _store_blob_list(store: Store, refs: Iterable[BlobRef]) -> BlobRef:
    return store.blobs.put_bytes(json.dumps([ref.to_json() for ref in refs]).encode())


def _skip_derived(job: Job) -> Job:
    """Wrap a job so that it skips indexes that have been derived."""

    @wraps(job)
    def run(
        builds: Sequence[IndexInProgress], job_settings: JobSettings, on_progress: OnProgress | None = None
    ) -> list[IndexInProgress]:
        results = iter(job([build for build in builds if not build.derived_result], job_settings, on_progress))
        return [build if build.derived_result else next(results) for build in builds]

    return run


@_skip_derived
def train(
    builds: Sequence[IndexInProgress], job_settings: JobSettings, on_progress: OnProgress | None = None
) -> list[IndexInProgress]:
    """Train all indexes whose reused trained file does not fit; the notes of each plan say what was
    done and why.

    If no vector is new, the trained file of the parent is reused without a test, and no job runs.
    """
    tasks = [[] if _is_reused_untested(build) else [build] for build in builds]
    untrained_builds = [build for index_tasks in tasks for build in index_tasks]
    task_settings = job_settings.with_task_bytes(_estimate_largest_task_bytes(untrained_builds, "train"))
    results = _run_by_index("train", train_one, tasks, task_settings, on_progress, _estimate_train_seconds)
    return [
        _with_train_result(build, *index_results) if index_results else _with_reused_training(build)
        for build, index_results in zip(builds, results, strict=True)
    ]


def _is_reused_untested(build: IndexInProgress) -> bool:
    reused = build.reused_training
    return reused is not None and reused.fits_untested(build.plan.drift)


def _with_train_result(build: IndexInProgress, result: IndexStageResult) -> IndexInProgress:
    if result.blob is None:
        return _with_reused_training(build)
    annotated_build = _with_note(build, result.note) if result.note else build
    training_fit = TrainingStats(result.stats["losses"]) if get_kind(build.plan.kind).learns else None
    trained_build = _with_training(annotated_build, result.blob, training_fit)
    if not result.keeps_shards or not build.reused_training:
        return trained_build
    parent_numbers = tuple(result.stats.get("previous_shards", ()))
    return replace(trained_build, parent_shards=build.reused_training.shards, parent_shard_numbers=parent_numbers)


def _with_reused_training(build: IndexInProgress) -> IndexInProgress:
    reused = build.reused_training
    if reused is None:
        raise ValueError(f"index {build.name} has no training to reuse: train it")
    annotated_build = _with_note(build, f"trained as in snapshot {reused.snapshot[:12]}")
    trained_build = _with_training(annotated_build, reused.blob, reused.stats)
    return replace(trained_build, parent_rows=reused.parent_rows, parent_shards=reused.shards)


def _with_training(
    build: IndexInProgress, trained_file: BlobRef, training_fit: TrainingStats | None
) -> IndexInProgress:
    """Return the record for the jobs after training.

    The record has to be small, because each task of these jobs contains it. So
    `reused_training`, which names the files of all parts, is left out.
    """
    return replace(build, trained_file=trained_file, training_fit=training_fit, reused_training=None)


def _with_note(build: IndexInProgress, note: str) -> IndexInProgress:
    return replace(build, plan=replace(build.plan, notes=(*build.plan.notes, note)))


@_skip_derived
def scatter(
    builds: Sequence[IndexInProgress], job_settings: JobSettings, on_progress: OnProgress | None = None
) -> list[IndexInProgress]:
    """Sort the vectors of every part by shard, for all indexes."""
    store = Store.open(job_settings.store_url)
    tasks = [_create_scatter_tasks(store, build) for build in builds]
    task_settings = _set_worker_count(builds, "scatter", job_settings)
    results = _run_by_index("scatter", scatter_one, tasks, task_settings, on_progress, _estimate_scatter_seconds)
    return [_with_pieces(store, build, index_results) for build, index_results in zip(builds, results, strict=True)]


def _with_pieces(store: Store, build: IndexInProgress, results: Sequence[IndexStageResult]) -> IndexInProgress:
    """Return the record with all pieces, and with the location of each shard's slice in them."""
    pieces = [require_blob(result.blob) for result in results]
    n_shards, put_bytes = build.plan.shards, store.blobs.put_bytes
    build = replace(build, pieces=_store_blob_list(store, pieces))
    if not n_shards:
        return build
    locations = np.empty((n_shards, len(pieces)), SLICE_LOCATION_DTYPE)
    for part_number, part_locations in enumerate(
        store.files.map_concurrently(partial(_read_slice_locations, store, n_shards), pieces)
    ):
        locations[:, part_number] = part_locations
    cells = [
        {"rows": int(row["rows"].sum()), "slices": digest_slices(row), "places": digest_bytes(row.tobytes())}
        for row in locations
    ]
    return replace(build, slice_locations=put_bytes(locations.tobytes()), cells=put_bytes(json.dumps(cells).encode()))


def _read_slice_locations(store: Store, n_shards: int, piece: BlobRef) -> SliceTable:
    """Return where in a piece the slice of each shard is, as an array of shape (shards,)."""
    try:
        return read_slice_table(partial(store.blobs.read_range, piece), piece.size, n_shards, piece.id)[:-1]
    except InputError as error:
        raise store.blobs.create_damaged_error(piece) from error


def _create_scatter_tasks(store: Store, build: IndexInProgress) -> list[ScatterTask]:
    """Return a task for each part, with the parent's parts that contain pages of that part."""
    row_refs = read_blob_list(store, build.rows)
    parent_rows = json.loads(store.blobs.read(build.parent_rows)) if build.parent_rows else [()] * len(row_refs)
    # `build.parent_rows` names the files of all parts; a task gets only those of its part.
    build = replace(build, parent_rows=None)
    return [
        ScatterTask(
            build, i, part_rows, tuple(from_table(ParentRows, part, "a parent's rows") for part in parent_parts)
        )
        for i, (part_rows, parent_parts) in enumerate(zip(row_refs, parent_rows, strict=True))
    ]


@_skip_derived
def build_shards(
    builds: Sequence[IndexInProgress], job_settings: JobSettings, on_progress: OnProgress | None = None
) -> list[IndexInProgress]:
    """Build the shards of all indexes; update the parent's shards if the index kind can.

    A shard of the parent whose slices are unchanged is reused as it is.
    """
    store = Store.open(job_settings.store_url)
    parent_shards = [_find_parent_shards(store, build) for build in builds]
    tasks = [
        [
            ShardTask(build, cell_number, **cell, parent=shard.blob if shard else None)
            for cell_number, (cell, shard) in enumerate(zip(_read_cells(store, build), shards, strict=True))
            if shard is None or shard.slices != cell["slices"]
        ]
        for build, shards in zip(builds, parent_shards, strict=True)
    ]
    reports = look_up_reports(build_shard, [task for index_tasks in tasks for task in index_tasks], store)
    tasks = [
        [replace(task, concurrent_shards=max(1, reports.count(None))) for task in index_tasks] for index_tasks in tasks
    ]
    task_settings = _set_worker_count(builds, "shard", job_settings)
    results = _run_by_index("shard", build_shard, tasks, task_settings, on_progress, _estimate_shard_seconds, reports)
    return [
        _with_shards(store, build, shards, [*zip(index_tasks, index_results, strict=True)])
        for build, shards, index_tasks, index_results in zip(builds, parent_shards, tasks, results, strict=True)
    ]


def _find_parent_shards(store: Store, build: IndexInProgress) -> list[BuiltShard | None]:
    """Return the parent's version of each shard, or None if the store does not have it.

    For a shard that had another number, the digest of slices is left empty, so that the shard is
    written again with the new number.
    """
    n_shards = len(_read_cells(store, build))
    if build.parent_shards is None or not isinstance(get_kind(build.plan.kind), ShardUpdatingKind):
        return [None] * n_shards
    shards = read_shards(store, build.parent_shards)
    if shard_numbers := build.parent_shard_numbers:
        if max(shard_numbers) >= len(shards):
            return [None] * n_shards
        renumbered_shards = [shards[shard_number] for shard_number in shard_numbers]
        shards = [
            shard if shard_number == old_number else replace(shard, slices="")
            for shard_number, (old_number, shard) in enumerate(zip(shard_numbers, renumbered_shards, strict=True))
        ]
    if len(shards) > n_shards:
        return [None] * n_shards
    exist_flags = store.files.map_concurrently(store.blobs.exists, [shard.blob for shard in shards])
    existing_shards = [shard if exists else None for shard, exists in zip(shards, exist_flags, strict=True)]
    return [*existing_shards, *[None] * (n_shards - len(existing_shards))]


def _with_shards(
    store: Store,
    build: IndexInProgress,
    parent_shards: Sequence[BuiltShard | None],
    results: Sequence[tuple[ShardTask, IndexStageResult]],
) -> IndexInProgress:
    """Return the record with all shards, and with counts of the reused and of the new shards."""
    shard_by_number = {i: shard for i, shard in enumerate(parent_shards) if shard}
    shard_by_number |= {
        task.number: BuiltShard.create(require_blob(result.blob), task.slices, result.stats) for task, result in results
    }
    ordered_shards = [shard_by_number[shard_number] for shard_number in range(len(parent_shards))]
    shard_list = store.blobs.put_bytes(json.dumps([shard.to_json() for shard in ordered_shards]).encode())
    build = replace(build, shards=shard_list)
    if build.parent_shards is None or not ordered_shards:
        return build
    reason_by_number = {
        task.number: result.stats.get("reason") if task.parent else "the parent has none in the store"
        for task, result in results
    }
    rebuild_reason_by_number = {number: str(reason) for number, reason in reason_by_number.items() if reason}
    metrics = {
        "built_cells": len(rebuild_reason_by_number),
        "updated_cells": len(results) - len(rebuild_reason_by_number),
        "reused_cells": len(ordered_shards) - len(results),
        "generation": max(shard.generation for shard in ordered_shards),
        "replaced": max(shard.replaced for shard in ordered_shards),
    }
    build = replace(build, shard_metrics=metrics)
    return _with_note(build, _describe_rebuilt(rebuild_reason_by_number)) if rebuild_reason_by_number else build


def _describe_rebuilt(reasons: Mapping[int, str]) -> str:
    """Return a note that lists some of the cells that were built again, with the reasons."""
    named_cells = [f"{number} ({reason})" for number, reason in [*reasons.items()][:_NAMED_CELLS]]
    n_more = len(reasons) - len(named_cells)
    return f"graphs of cells built again: {', '.join(named_cells)}{f' and {n_more:,} more' if n_more else ''}"


def merge(
    builds: Sequence[IndexInProgress], job_settings: JobSettings, on_progress: OnProgress | None = None
) -> list[BuiltIndex]:
    """Merge the pieces and shards of all indexes; return the finished indexes."""
    store = Store.open(job_settings.store_url)
    unmerged_builds = [build for build in builds if not build.derived_result]
    task_settings = job_settings.with_task_bytes(_estimate_largest_task_bytes(unmerged_builds, "merge"))
    job_arguments = unmerged_builds, task_settings, on_progress, _estimate_merge_seconds
    results = map(IndexStageResult.from_report, run_job("merge", merge_one, *job_arguments, memoised=True))
    merged_results = [(build, build.derived_result or next(results)) for build in builds]
    return [
        BuiltIndex(
            build.name,
            build.plan,
            require_blob(result.blob),
            {**result.stats, **build.shard_metrics},
            _find_reusable_training(store, build),
            build_shards_entry(store, build.shards) if build.shards and build.plan.shards else None,
        )
        for build, result in merged_results
    ]


def _find_reusable_training(store: Store, build: IndexInProgress) -> tuple[BlobRef, TrainingStats] | None:
    """Return the trained file that later builds may reuse, and its statistics; None if the index
    has no such file.
    """
    if build.derived_result:
        return None
    sizes = [cell["rows"] for cell in _read_cells(store, build)]
    imbalance = round(max(sizes) * len(sizes) / max(1, sum(sizes)), 4) if sizes else 0.0
    return (
        (require_blob(build.trained_file), build.training_fit.with_imbalance(imbalance)) if build.training_fit else None
    )


def _run_by_index(
    stage: str,
    function: Callable[[Any, Store], Report],
    tasks_by_index: Sequence[Sequence[Any]],
    job_settings: JobSettings,
    on_progress: OnProgress | None,
    estimate_seconds: Callable[[Any], float],
    recorded_reports: Sequence[Report | None] | None = None,
) -> list[list[IndexStageResult]]:
    """Run the tasks of all indexes; return their results index by index.

    The tasks of vector indexes run first, with a local worker for each GPU that faiss sees, because
    two workers on one GPU would both reserve GPU memory and would wait for each other. Tasks of
    other indexes, such as an inverted index, then run with a worker for each core. Without a GPU,
    all tasks run in one job.
    """
    tasks = [task for index_tasks in tasks_by_index for task in index_tasks]
    reports = recorded_reports or look_up_reports(function, tasks, Store.open(job_settings.store_url))
    can_use_gpu = [_get_plan(task).kind in _GPU_KINDS for task in tasks]
    if (n_gpus := engine.count_gpus()) and is_local(job_settings.flags):
        gpu_numbers = [i for i, is_gpu_task in enumerate(can_use_gpu) if is_gpu_task]
        other_numbers = [i for i, is_gpu_task in enumerate(can_use_gpu) if not is_gpu_task]
        gpu_seconds = sum(estimate_seconds(tasks[i]) for i in gpu_numbers if reports[i] is None)
        gpu_settings = job_settings if job_settings.is_too_small(gpu_seconds) else job_settings.for_gpus(n_gpus)
        jobs = [(gpu_numbers, gpu_settings), (other_numbers, job_settings)]
    else:
        # The stage `shard` is left out: it uses a GPU only with cuVS, and works mostly on the CPU.
        uses_gpu = stage in {"train", "scatter"} and any(can_use_gpu)
        jobs = [([*range(len(tasks))], job_settings.for_gpus(0) if uses_gpu else job_settings)]
    results: dict[int, IndexStageResult] = {}
    for numbers, settings in jobs:
        report_progress = partial(_report_job_progress, on_progress, len(results), len(tasks))
        job_arguments = [tasks[i] for i in numbers], settings, report_progress, estimate_seconds
        new_reports = run_job(stage, function, *job_arguments, recorded_reports=[reports[i] for i in numbers])
        results |= zip(numbers, map(IndexStageResult.from_report, new_reports), strict=True)
    ordered_results = iter(results[i] for i in range(len(tasks)))
    return [[next(ordered_results) for _ in index_tasks] for index_tasks in tasks_by_index]


def _get_plan(task: IndexInProgress | ScatterTask | ShardTask) -> IndexPlan:
    return task.plan if isinstance(task, IndexInProgress) else task.build.plan


def _report_job_progress(on_progress: OnProgress | None, n_before: int, total: int, done: int, _: int) -> None:
    if on_progress:
        on_progress(n_before + done, total)


def _estimate_train_seconds(build: IndexInProgress) -> float:
    """Estimate the core seconds of training; a reused trained file is only tested on some rows."""
    return get_kind(build.plan.kind).seconds(
        build.plan, "train", build.plan.n, 0, inherited=bool(build.reused_training)
    )


def _estimate_scatter_seconds(task: ScatterTask) -> float:
    plan = task.build.plan
    return get_kind(plan.kind).seconds(plan, "scatter", 0, task.rows.size, inherited=bool(task.parent_parts))


def _estimate_shard_seconds(task: ShardTask) -> float:
    plan = task.build.plan
    return get_kind(plan.kind).seconds(plan, "shard", task.rows, 0, inherited=bool(task.parent))


def _estimate_merge_seconds(build: IndexInProgress) -> float:
    return get_kind(build.plan.kind).seconds(build.plan, "merge", build.plan.n, 0)


def _set_worker_count(builds: Sequence[IndexInProgress], stage: str, job_settings: JobSettings) -> JobSettings:
    return job_settings.for_tasks(_estimate_largest_task_bytes(builds, stage))


def _estimate_largest_task_bytes(builds: Sequence[IndexInProgress], stage: str) -> int:
    """Return the bytes of memory that the largest task of a stage needs."""
    estimates = (get_kind(build.plan.kind).estimate(build.plan) for build in builds)
    return max((estimate.stages.get(stage, 1) for estimate in estimates), default=1)


def _read_cells(store: Store, build: IndexInProgress) -> list[dict[str, Any]]:
    """Return for each shard its number of rows, and the digests of its slices and of their
    locations.
    """
    cells: list[dict[str, Any]] = json.loads(store.blobs.read(build.cells)) if build.cells else []
    return cells
