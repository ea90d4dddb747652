"""What the index jobs hand on: an index while it is built, the tasks of its stages, and what
decides a piece.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Self

from beam_jobs.launch import Report
from rag_model.extras import get_versions
from rag_model.index.kind import get_kind
from rag_model.index.plan import IndexPlan, IndexStats
from rag_model.index.quality.results import TrainingStats
from rag_model.snapshots.reused_training import ParentRows, ReusedTraining
from rag_model.store.objects.blobs import BlobRef
from rag_model.store.store import Store


@dataclass(frozen=True, slots=True)
class IndexStageResult:
    """The result of one task of an index job."""

    blob: BlobRef | None  # the file that the stage wrote; None: the reused file stays
    stats: IndexStats  # statistics that the index kind reports
    is_new: bool = False  # whether this run wrote the file, and not an earlier one
    note: str = ""  # a note for the plan, such as why the index was trained again
    keeps_shards: bool = False  # whether the parent's shards can be updated with a new trained file

    def to_json(self) -> Report:
        """Return the record as JSON values."""
        blob = self.blob.to_json() if self.blob else None
        values = {"out": blob, "facts": self.stats, "made": self.is_new, "note": self.note}
        return values | {"keeps_shards": self.keeps_shards}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Self:
        """Read back what `to_json` wrote."""
        blob = BlobRef.from_json(value["out"]) if value["out"] else None
        return cls(blob, value["facts"], value["made"], value["note"], value["keeps_shards"])


@dataclass(frozen=True, slots=True)
class IndexInProgress:
    """An index while it is built; each job adds one more file.

    Lists of blobs are stored as blobs themselves, so that the record stays small.
    """

    name: str
    plan: IndexPlan
    rows: BlobRef  # JSON list of the row files of its representation, one per part, in row order
    reused: ReusedTraining | None = None  # the parent's trained file, used if it fits
    parent_index: BlobRef | None = None  # JSON of a `ParentIndex`, from which this may be derived
    derived: IndexStageResult | None = None  # the derived index; the other jobs then skip it
    trained: BlobRef | None = None  # the trained file, which all workers read
    # With a reused trained file: the parent's rows of each part (`ReusedTraining.parent_rows`).
    parent_rows: BlobRef | None = None
    # With a reused trained file: the parent's `BuiltShard`s (`ReusedTraining.shards`).
    parent_shards: BlobRef | None = None
    training_fit: TrainingStats | None = None  # how well the trained file fits its training vectors
    pieces: BlobRef | None = None  # JSON list of the parts' pieces, in row order
    # Array of `SLICE_LOCATION_DTYPE`, (shards, parts): where each shard's slice of each piece is.
    slice_locations: BlobRef | None = None
    # JSON list: for each shard its rows, and digests of its slices and of their locations.
    cells: BlobRef | None = None
    shards: BlobRef | None = None  # JSON list of the `BuiltShard`s, in order; may be empty
    shard_metrics: Mapping[str, Any] = field(default_factory=dict)  # if the parent's shards are known


@dataclass(frozen=True, slots=True)
class ScatterTask:
    """The rows of one part, to be sorted by shard."""

    build: IndexInProgress
    number: int
    rows: BlobRef
    # Parts of the parent with the same pages, whose pieces have most of the vectors.
    parent_parts: tuple[ParentRows, ...] = ()


@dataclass(frozen=True, slots=True)
class ShardTask:
    """One shard of an index, to be built from its slices of all pieces."""

    build: IndexInProgress
    number: int
    rows: int  # number of vectors in its cell
    slices: str  # digest of the slices
    places: str  # digest of the locations of the slices
    # Number of shards to build, this one included. If there are more cores, each shard gets several.
    concurrent_shards: int = 1
    parent: BlobRef | None = None  # the parent's shard, which is updated


def index_inputs(plan: IndexPlan) -> dict[str, Any]:
    """Return the inputs that decide a trained file or an index, without its files."""
    return piece_inputs(plan) | {"plan": plan.index_inputs()}


def piece_inputs(plan: IndexPlan) -> dict[str, Any]:
    """Return the inputs that decide a piece or a shard, without its files.

    None of them depends on the size of the corpus.
    """
    kind = get_kind(plan.kind)
    return {"plan": plan.piece_inputs(), "code": kind.VERSION, "libraries": get_versions(*kind.libraries)}


def require_blob(blob: BlobRef | None) -> BlobRef:
    """Return the blob that an earlier job wrote.

    Raises:
        ValueError: that job did not run.
    """
    if blob is None:
        raise ValueError("the jobs of an index run in order: train, scatter, build_shards, merge")
    return blob


def read_blob_list(store: Store, blob: BlobRef) -> list[BlobRef]:
    """Return the blobs that a list of blobs names."""
    return [BlobRef(value["id"], value["size"]) for value in json.loads(store.blobs.read(blob))]
