"""The functions that workers run for the tasks of the index jobs. Each result is computed once,
because its memo key consists of all inputs that determine its bytes.

A task uses one thread, because with one thread equal vectors give equal bytes; cores are used by
running the tasks of several parts, shards and indexes. Only a shard of a `threaded` index kind,
such as a graph, uses several threads if there are more cores than shards. The jobs pass references
to blobs, and the task of a shard reads byte ranges of the pieces.

The classes at the beginning are passed between the index jobs: an index while it is built, and the
tasks of its stages.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Self

import numpy as np

from beam_jobs.job_settings import Report
from beam_jobs.tasks import limit_threads
from rag_model.digest import digest_bytes
from rag_model.errors import InputError, StoreError
from rag_model.extras import get_versions
from rag_model.index.files import engine
from rag_model.index.files.engine import Vectors
from rag_model.index.files.pieces import SLICE_LOCATION_DTYPE, Opener, SliceLocation, path_opener
from rag_model.index.files.vectors import RemoteRowFiles, VectorFiles
from rag_model.index.kind import PieceReusingKind, PreviousPiece, ShardUpdatingKind, get_kind
from rag_model.index.plan import IndexPlan, IndexStats
from rag_model.index.quality.health import FIT_VERSION, find_common_rows
from rag_model.index.quality.results import FitResult, TrainingStats
from rag_model.process import check_disk, count_cores
from rag_model.snapshots.parent_index import ParentIndex
from rag_model.snapshots.reused_training import ParentRows, RedactedRows, ReusedTraining
from rag_model.store.objects.blobs import BlobRef
from rag_model.store.objects.memo import StageResult
from rag_model.store.store import Store
from rag_model.toml import from_table


@dataclass(frozen=True, slots=True)
class IndexStageResult:
    """The result of one task of an index job."""

    blob: BlobRef | None  # the file that the stage wrote; None: the reused file is kept
    stats: IndexStats  # statistics that the index kind reports
    is_new: bool = False  # whether this run, not an earlier run, wrote the file
    note: str = ""  # a note for the plan, such as why the index was trained again
    keeps_shards: bool = False  # whether shards of the parent can be updated to a new trained file

    @classmethod
    def from_report(cls, report: Report) -> Self:
        """Create the result from the report of a task, which has its fields."""
        return from_table(cls, report, "a report of an index job")


@dataclass(frozen=True, slots=True)
class IndexInProgress:
    """An index while it is built; each job adds one more file.

    Lists of blobs are stored as blobs themselves, so that the record stays small.
    """

    name: str
    plan: IndexPlan
    rows: BlobRef  # JSON list of the index's row files, one per part, in row order
    reused_training: ReusedTraining | None = None  # the parent's trained file, used if it fits
    parent_index: BlobRef | None = None  # JSON of a `ParentIndex` to derive the index from
    derived_result: IndexStageResult | None = None  # the derived index; the other jobs then skip it
    trained_file: BlobRef | None = None  # all workers read it
    # For a reused trained file, `ReusedTraining.parent_rows`: by part, the parent's row files.
    parent_rows: BlobRef | None = None
    # For a reused trained file, `ReusedTraining.shards`: the list of the parent's shards.
    parent_shards: BlobRef | None = None
    # The number of each shard in the parent; () if all shards keep their numbers.
    parent_shard_numbers: tuple[int, ...] = ()
    training_fit: TrainingStats | None = None  # how well the trained file fits its training vectors
    pieces: BlobRef | None = None  # JSON list of the pieces of all parts, in row order
    # Array of `SLICE_LOCATION_DTYPE`, shape (shards, parts): where each shard's slice is in each
    # piece.
    slice_locations: BlobRef | None = None
    # JSON list with each shard's number of rows, and the digests of its slices and of their
    # locations.
    cells: BlobRef | None = None
    shards: BlobRef | None = None  # JSON list of the `BuiltShard`s, in order; may be empty
    # numbers of reused, updated and new shards; empty without a parent
    shard_metrics: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ScatterTask:
    """Task to sort the vectors of one part by shard."""

    build: IndexInProgress
    number: int  # part number
    rows: BlobRef  # row file of the part
    # Parts of the parent with the same pages; their pieces contain most of the vectors.
    parent_parts: tuple[ParentRows, ...] = ()


@dataclass(frozen=True, slots=True)
class ShardTask:
    """Task to build one shard of an index from its slices of all pieces."""

    build: IndexInProgress
    number: int  # shard number
    rows: int  # number of vectors in the shard
    slices: str  # digest of the slices
    places: str  # digest of the locations of the slices
    # Number of shards that are built at the same time. If there are more cores, each shard gets
    # several.
    concurrent_shards: int = 1
    parent: BlobRef | None = None  # the parent's shard, which is updated


def get_index_inputs(plan: IndexPlan) -> dict[str, Any]:
    """Return the inputs that determine a trained file or an index, except its input files."""
    return get_piece_inputs(plan) | {"plan": plan.index_inputs()}


def get_piece_inputs(plan: IndexPlan) -> dict[str, Any]:
    """Return the inputs that determine a piece or a shard, except its input files.

    The inputs do not depend on the size of the corpus.
    """
    kind = get_kind(plan.kind)
    return {"plan": plan.piece_inputs(), "code": kind.VERSION, "libraries": get_versions(*kind.libraries)}


def require_blob(blob: BlobRef | None) -> BlobRef:
    """Return the blob that an earlier job wrote.

    Raises:
        ValueError: the job did not run.
    """
    if blob is None:
        raise ValueError("the jobs of an index run in order: train, scatter, build_shards, merge")
    return blob


def read_blob_list(store: Store, blob: BlobRef) -> list[BlobRef]:
    """Return the references to blobs in a stored list."""
    return [BlobRef(value["id"], value["size"]) for value in json.loads(store.blobs.read(blob))]


def derive_one(build: IndexInProgress, store: Store) -> Report:
    """Derive one index from the parent's, unless the memo has it; report no blob on failure."""

    def derive_from_parent(out: Path) -> IndexStats:
        index_fields = json.loads(store.blobs.read(require_blob(build.parent_index)))
        parent_index = from_table(ParentIndex, index_fields, "the parent's index")
        # If a file of the parent is damaged, the index is built from scratch without it.
        with suppress(InputError, StoreError):
            if (stats := parent_index.derive(store, build.plan, out)) is not None:
                return stats
        raise _NotDerivedError

    try:
        inputs = get_index_inputs(build.plan)
        return asdict(_memoize(store, "derive", inputs, derive_from_parent, vectors=build.rows.id))
    except _NotDerivedError:
        return asdict(IndexStageResult(None, {}))


class _NotDerivedError(Exception):
    """An index cannot be derived and must be built from scratch."""


def train_one(build: IndexInProgress, store: Store) -> Report:
    """Train one index, unless the memo has it; if a reused trained file fits, only report that."""
    plan, reused = build.plan, build.reused_training
    if reused and reused.redacted_parts:
        return asdict(_redact_training(build, reused, reused.redacted_parts, store))
    imbalance = reused and reused.stats.explain_misfit(plan.drift)
    # Graphs are not trained again because of an imbalance: their cells are split or merged.
    retrain_reason = None if isinstance(get_kind(plan.kind), ShardUpdatingKind) else imbalance
    if reused and not retrain_reason:
        fit = _measure_fit(build, reused, store) if reused.changed_parts else FitResult(0, {})
        retrain_reason = fit.explain_misfit(plan.drift)
        adapt_reason = reused.growth or fit.explain_missed_neighbors() or imbalance
        if not retrain_reason:
            if not adapt_reason:
                return asdict(IndexStageResult(None, {}))
            return asdict(_adapt_training(build, reused, adapt_reason, store))

    def write_file(out: Path) -> IndexStats:
        return get_kind(plan.kind).train(plan, _open_listed_row_files(store, build.rows), out)

    result = _memoize(store, "train", get_index_inputs(plan), write_file, vectors=build.rows.id)
    return asdict(replace(result, note=f"trained again: {retrain_reason}" if retrain_reason else ""))


def _redact_training(
    build: IndexInProgress, reused_training: ReusedTraining, redacted_parts: BlobRef, store: Store
) -> IndexStageResult:
    """Remove the traces of removed vectors from a trained file, unless the memo has the result."""
    plan, kind = build.plan, get_kind(build.plan.kind)
    redacted_rows = json.loads(store.blobs.read(redacted_parts))
    parts = [from_table(RedactedRows, value, "the rows of a takedown") for value in redacted_rows]

    def iter_removed() -> Iterator[Vectors]:
        for part in parts:
            old_path = store.blobs.get_local_path(part.old)
            remaining_files = [store.blobs.get_local_path(part.remaining)] if part.remaining else []
            yield VectorFiles([old_path]).read_rows(np.flatnonzero(~find_common_rows(old_path, remaining_files)))

    def write_file(out: Path) -> IndexStats:
        row_files = _open_listed_row_files(store, build.rows)
        if isinstance(kind, ShardUpdatingKind):
            # A damaged trained file is replaced by a new one.
            with suppress(InputError, StoreError):
                trained_path = store.blobs.get_local_path(reused_training.blob)
                return kind.redact(plan, trained_path, row_files, iter_removed(), out)
        return kind.train(plan, row_files, out) | {"reason": "the earlier trained file is damaged"}

    # The ids are recorded without their prefixes, so that `gc` does not take them for references
    # and keep the removed vectors.
    old_ids = [ref.hex_digest for ref in (reused_training.blob, *(part.old for part in parts))]
    inputs = {"vectors": build.rows.id, "redacted": old_ids}
    result = _memoize(store, "redact_training", get_index_inputs(plan), write_file, **inputs)
    reason = result.stats.get("reason")
    note = f"trained again: {reason}" if reason else "trained as before, without removed vectors"
    return replace(result, note=note, keeps_shards=not reason)


def _adapt_training(build: IndexInProgress, reused: ReusedTraining, reason: str, store: Store) -> IndexStageResult:
    """Adapt a reused trained file (lists or cells) to new vectors, unless the memo has it."""
    plan, keeps_shards = build.plan, isinstance(get_kind(build.plan.kind), ShardUpdatingKind)

    def write_file(out: Path) -> IndexStats:
        return get_kind(plan.kind).follow(
            plan, store.blobs.get_local_path(reused.blob), _open_listed_row_files(store, build.rows), out
        )

    inputs = {"vectors": build.rows.id, "trained": reused.blob.id}
    result = _memoize(store, "follow", get_index_inputs(plan), write_file, **inputs)
    graph_change = "cells merged" if "previous_shards" in result.stats else "cells split"
    change = graph_change if keeps_shards else "lists moved"
    note = f"trained as in snapshot {reused.snapshot[:12]}, {change}: {reason}"
    return replace(result, note=note, keeps_shards=keeps_shards)


def _measure_fit(build: IndexInProgress, reused: ReusedTraining, store: Store) -> FitResult:
    """Measure how well a reused trained file fits new vectors, unless the memo has the result."""
    plan = build.plan

    def measure(_: Path) -> StageResult:
        changed_parts = [
            (store.blobs.get_local_path(new), [*map(store.blobs.get_local_path, old)])
            for new, old in reused.changed_parts
        ]
        unchanged_files = _open_row_files(store, reused.unchanged_parts)
        trained_path = store.blobs.get_local_path(reused.blob)
        training_fit = get_kind(plan.kind).fit(plan, trained_path, reused.stats.losses, changed_parts, unchanged_files)
        return StageResult({}, asdict(training_fit))

    changed_parts = [[new.id, [ref.id for ref in old]] for new, old in reused.changed_parts]
    unchanged_ids = [ref.id for ref in reused.unchanged_parts]
    inputs = get_piece_inputs(plan) | {
        "fit": FIT_VERSION,
        "trained": reused.blob.id,
        "changed": changed_parts,
        "same": unchanged_ids,
    }
    fit_record, _ = store.memo.get_or_create("fit", inputs, measure)
    return from_table(FitResult, fit_record.stats, "the record of a fit")


def scatter_one(task: ScatterTask, store: Store) -> Report:
    """Sort the vectors of one part by shard, unless the memo has the result."""
    plan, trained_blob = task.build.plan, require_blob(task.build.trained_file)

    def write_file(out: Path) -> IndexStats:
        trained_path, rows_path = map(store.blobs.get_local_path, (trained_blob, task.rows))
        kind = get_kind(plan.kind)
        # If pieces of the parent cannot be used, all vectors of the part are encoded again.
        with suppress(InputError, StoreError):
            if (
                isinstance(kind, PieceReusingKind)
                and kind.carries(plan)
                and (parent_pieces := _find_parent_pieces(task, store))
            ):
                return kind.carry(plan, trained_path, rows_path, task.number, parent_pieces, out)
        return kind.scatter(plan, trained_path, rows_path, task.number, out)

    inputs = _get_scatter_inputs(task.rows, trained_blob, task.number)
    return asdict(_memoize(store, "scatter", get_piece_inputs(plan), write_file, **inputs))


def _get_scatter_inputs(rows_ref: BlobRef, trained_blob: BlobRef, number: int) -> dict[str, Any]:
    """Return the inputs that determine the piece of a part, without the inputs from the plan."""
    return {"vectors": rows_ref.id, "trained": trained_blob.id, "number": number}


def _find_parent_pieces(task: ScatterTask, store: Store) -> list[PreviousPiece]:
    """Return recorded pieces of the parent with pages of this part and the same trained file."""
    trained, pieces = require_blob(task.build.trained_file), list[PreviousPiece]()
    for parent_part in task.parent_parts:
        inputs = get_piece_inputs(task.build.plan) | _get_scatter_inputs(parent_part.rows, trained, parent_part.number)
        record = store.memo.find("scatter", store.memo.compute_key(inputs))
        if record is not None and store.blobs.exists(parent_part.rows):
            # The piece is verified, because its contents are published again.
            piece = path_opener(store.blobs.get_local_path(record.outputs["out"]))
            pieces.append(PreviousPiece(store.blobs.get_local_path(parent_part.rows), piece, parent_part.number))
    return pieces


def build_shard(task: ShardTask, store: Store) -> Report:
    """Build one shard from its slices, or update the parent's shard, unless the memo has it."""
    plan, trained_blob, kind = task.build.plan, require_blob(task.build.trained_file), get_kind(task.build.plan.kind)

    def write_file(out: Path) -> IndexStats:
        trained_path = store.blobs.get_local_path(trained_blob)
        with engine.use_threads(max(1, count_cores() // task.concurrent_shards) if kind.threaded else 1):
            if task.parent is None or not isinstance(kind, ShardUpdatingKind):
                return kind.shard(plan, trained_path, _iter_slices(task, store), task.number, out)
            with suppress(InputError, StoreError):  # A damaged shard of the parent is built again.
                parent = path_opener(store.blobs.get_local_path(task.parent))
                return kind.update(plan, trained_path, _iter_slices(task, store), task.number, parent, out)
            stats = kind.shard(plan, trained_path, _iter_slices(task, store), task.number, out)
            return stats | {"reason": "the parent's graph is damaged"}

    inputs = {"slices": task.slices, "trained": trained_blob.id, "number": task.number}
    if task.parent is not None:
        # The id is recorded without its prefix, so that `gc` does not take it for a reference: the
        # shards of earlier builds contain traces of removed vectors.
        inputs["parent"] = task.parent.hex_digest
    return asdict(_memoize(store, "shard", get_piece_inputs(plan), write_file, **inputs))


def _iter_slices(task: ShardTask, store: Store) -> Iterator[bytes]:
    """Yield the verified slices of a shard in the order of the pieces, read concurrently."""
    pieces = read_blob_list(store, require_blob(task.build.pieces))
    locations_blob, row_bytes = require_blob(task.build.slice_locations), len(pieces) * SLICE_LOCATION_DTYPE.itemsize
    location_bytes = store.blobs.read_range(locations_blob, task.number * row_bytes, (task.number + 1) * row_bytes)
    if digest_bytes(location_bytes) != task.places:
        raise store.blobs.create_damaged_error(locations_blob)

    def read_slice(number_and_location: tuple[int, SliceLocation]) -> bytes:
        part_number, location = number_and_location
        slice_bytes = store.blobs.read_range(pieces[part_number], location.start, location.end)
        if not location.matches(slice_bytes):
            raise store.blobs.create_damaged_error(pieces[part_number])
        return slice_bytes

    numbered_locations = enumerate(SliceLocation.from_table(np.frombuffer(location_bytes, SLICE_LOCATION_DTYPE)))
    return store.files.map_concurrently(
        read_slice, [(number, location) for number, location in numbered_locations if location.size]
    )


def merge_one(build: IndexInProgress, store: Store) -> Report:
    """Merge the pieces and shards of one index, unless the memo has the result."""
    plan, trained = build.plan, require_blob(build.trained_file)
    piece_list, shard_list = require_blob(build.pieces), require_blob(build.shards)

    def write_file(out: Path) -> IndexStats:
        needed_bytes = get_kind(plan.kind).estimate(plan).disk_bytes
        disk_advice = "set TMPDIR to a folder on a disk with room"
        check_disk(out.parent, needed_bytes, f"merging {plan.factory}", disk_advice)
        # With shards, each piece is read once, from start to end, so it needs no local copy.
        shard_openers = [path_opener(path) for path in _fetch_listed_files(store, shard_list)]
        if shard_openers:
            pieces: list[Opener] = [partial(store.blobs.open, ref) for ref in read_blob_list(store, piece_list)]
        else:
            pieces = [path_opener(path) for path in _fetch_listed_files(store, piece_list)]
        rows = _open_listed_row_files(store, build.rows)
        return get_kind(plan.kind).merge(plan, store.blobs.get_local_path(trained), rows, pieces, shard_openers, out)

    inputs = {"vectors": build.rows.id, "scattered": piece_list.id, "shards": shard_list.id}
    return asdict(_memoize(store, "merge", get_index_inputs(plan), write_file, trained=trained.id, **inputs))


def _memoize(
    store: Store, stage: str, common_inputs: Mapping[str, Any], write_file: Callable[[Path], IndexStats], **inputs: Any
) -> IndexStageResult:
    def produce(workdir: Path) -> StageResult:
        limit_threads(1)
        out_path = workdir / stage
        stats = write_file(out_path)
        return StageResult({"out": out_path}, stats)

    record, is_new = store.memo.get_or_create(stage, {**common_inputs, **inputs}, produce)
    return IndexStageResult(record.outputs["out"], dict(record.stats), is_new)


def _open_listed_row_files(store: Store, blob_list: BlobRef) -> Sequence[Path]:
    """Return the row files of all parts; a file in an object store is fetched when it is used."""
    return _open_row_files(store, read_blob_list(store, blob_list))


def _open_row_files(store: Store, refs: Sequence[BlobRef]) -> Sequence[Path]:
    blob_store = store.blobs
    if store.files.is_local:
        return [*map(blob_store.get_local_path, refs)]

    def read_range(ref: BlobRef, start: int, end: int) -> bytes:
        return blob_store.read_range(ref, start, min(end, ref.size))

    return RemoteRowFiles(refs, blob_store.get_local_path, read_range, blob_store.open)


def _fetch_listed_files(store: Store, blob_list: BlobRef) -> list[Path]:
    return [store.blobs.get_local_path(ref) for ref in read_blob_list(store, blob_list)]
