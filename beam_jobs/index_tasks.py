"""What the index jobs hand on: an index while it is built, the tasks of its stages, and what decides a piece."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from beam_jobs.launch import Report
from rag_model.extras import versions
from rag_model.index.plan import Facts, IndexPlan
from rag_model.index.quality.fit import TrainingFit
from rag_model.index.registry import kind_named
from rag_model.snapshots.heritage import EarlierRows, Heirloom
from rag_model.store.objects.blobs import BlobRef
from rag_model.store.store import Store


@dataclass(frozen=True, slots=True)
class StageOutput:
    """What a task of an index's stage reports."""

    out: BlobRef | None  # the stage's file; None: the inherited one stays
    facts: Facts  # what the kind says of its work
    made: bool = False  # by this run, and not by an earlier one
    note: str = ""  # of the plan: why it was trained; empty: nothing to say

    def to_json(self) -> Report:
        """Return the record as JSON values."""
        out = self.out.to_json() if self.out else None
        return {"out": out, "facts": self.facts, "made": self.made, "note": self.note}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Self:
        """Read back what `to_json` wrote."""
        out = BlobRef.from_json(value["out"]) if value["out"] else None
        return cls(out, value["facts"], value["made"], value["note"])


@dataclass(frozen=True, slots=True)
class IndexBuild:
    """One index while it is built: each job adds one more file. Lists of blobs are blobs, so the record stays small."""

    name: str
    plan: IndexPlan
    rows: BlobRef  # JSON list of the row files of its representation, one per part, in row order
    inherited: Heirloom | None = None  # used instead of training, if it fits
    earlier: BlobRef | None = None  # the parent's index, of which it may be made (`snapshots.earlier_index`), as JSON
    derived: StageOutput | None = None  # the index, made of that one: no other job has work
    trained: BlobRef | None = None  # the trained file, which all workers read
    before: BlobRef | None = None  # if it is the parent's: what the parent has of each part (`Heirloom.before`)
    fitted: TrainingFit | None = None  # how well it fitted its training vectors
    scattered: BlobRef | None = None  # JSON list of the parts' pieces, in row order
    places: BlobRef | None = None  # of each shard's slice in each piece: `slices.PLACES`, (shards, parts)
    cells: BlobRef | None = None  # JSON list: for each shard its rows, and digests of its slices and of their places
    shards: BlobRef | None = None  # JSON list of the shards, in order; may be empty


@dataclass(frozen=True, slots=True)
class ScatterTask:
    """One part's rows, to be scattered."""

    build: IndexBuild
    number: int
    rows: BlobRef
    earlier: tuple[EarlierRows, ...] = ()  # the parent's of its pages, whose pieces hold most of its vectors


@dataclass(frozen=True, slots=True)
class ShardTask:
    """One worker's share of an index."""

    build: IndexBuild
    number: int
    rows: int  # members of its cell
    slices: str  # digest of the slices that it is built from
    places: str  # digest of their places
    beside: int = 1  # shards to be built, this one included: of fewer than there are cores, each is given several


def deciding(plan: IndexPlan) -> dict[str, Any]:
    """Return the inputs that decide a trained file or an index, without its files."""
    return sharing(plan) | {"plan": plan.built()}


def sharing(plan: IndexPlan) -> dict[str, Any]:
    """Return the inputs that decide a piece or a shard, without its files: none depends on the size of the corpus."""
    kind = kind_named(plan.kind)
    return {"plan": plan.shared(), "code": kind.VERSION, "libraries": versions(*kind.libraries)}


def required(blob: BlobRef | None) -> BlobRef:
    """Return what an earlier job made.

    Raises:
        ValueError: that job did not run.
    """
    if blob is None:
        raise ValueError("the jobs of an index run in order: train, scatter, build_shards, merge")
    return blob


def blobs_in(store: Store, blob: BlobRef) -> list[BlobRef]:
    """Return the blobs that a list of blobs names."""
    return [BlobRef.from_json(value) for value in json.loads(store.blobs.read(blob))]
