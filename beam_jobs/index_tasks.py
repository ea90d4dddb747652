"""What the index jobs hand on: an index while it is built, the tasks of its stages, and what
decides a piece.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
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
    """What a task of an index's stage reports."""

    blob: BlobRef | None  # the stage's file; None: the inherited one stays
    stats: IndexStats  # what the kind says of its work
    is_new: bool = False  # by this run, and not by an earlier one
    note: str = ""  # of the plan: why it was trained; empty: nothing to say

    def to_json(self) -> Report:
        """Return the record as JSON values."""
        blob = self.blob.to_json() if self.blob else None
        return {"out": blob, "facts": self.stats, "made": self.is_new, "note": self.note}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Self:
        """Read back what `to_json` wrote."""
        blob = BlobRef.from_json(value["out"]) if value["out"] else None
        return cls(blob, value["facts"], value["made"], value["note"])


@dataclass(frozen=True, slots=True)
class IndexInProgress:
    """One index while it is built: each job adds one more file. Lists of blobs are blobs, so the
    record stays small.
    """

    name: str
    plan: IndexPlan
    rows: BlobRef  # JSON list of the row files of its representation, one per part, in row order
    reused: ReusedTraining | None = None  # used instead of training, if it fits
    parent_index: BlobRef | None = (
        None  # the parent's index, of which it may be made (`snapshots.earlier_index`), as JSON
    )
    derived: IndexStageResult | None = None  # the index, made of that one: no other job has work
    trained: BlobRef | None = None  # the trained file, which all workers read
    # if it is the parent's: what the parent has of each part (`Heirloom.before`)
    parent_rows: BlobRef | None = None
    training_fit: TrainingStats | None = None  # how well it fitted its training vectors
    pieces: BlobRef | None = None  # JSON list of the parts' pieces, in row order
    # of each shard's slice in each piece: `slices.PLACES`, (shards, parts)
    slice_locations: BlobRef | None = None
    # JSON list: for each shard its rows, and digests of its slices and of their places
    cells: BlobRef | None = None
    shards: BlobRef | None = None  # JSON list of the shards, in order; may be empty


@dataclass(frozen=True, slots=True)
class ScatterTask:
    """One part's rows, to be scattered."""

    build: IndexInProgress
    number: int
    rows: BlobRef
    # the parent's of its pages, whose pieces hold most of its vectors
    parent_parts: tuple[ParentRows, ...] = ()


@dataclass(frozen=True, slots=True)
class ShardTask:
    """One worker's share of an index."""

    build: IndexInProgress
    number: int
    rows: int  # members of its cell
    slices: str  # digest of the slices that it is built from
    places: str  # digest of their places
    concurrent_shards: int = (
        # shards to be built, this one included: of fewer than there are cores, each is given
        # several
        1
    )


def index_inputs(plan: IndexPlan) -> dict[str, Any]:
    """Return the inputs that decide a trained file or an index, without its files."""
    return piece_inputs(plan) | {"plan": plan.index_inputs()}


def piece_inputs(plan: IndexPlan) -> dict[str, Any]:
    """Return the inputs that decide a piece or a shard, without its files: none depends on the size
    of the corpus.
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
    return [BlobRef.from_json(value) for value in json.loads(store.blobs.read(blob))]
