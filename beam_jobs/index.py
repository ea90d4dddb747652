"""The index jobs: train once, build shards side by side, merge. All indexes of a snapshot share the three jobs.

Each task uses one thread, so that equal vectors give equal bytes; work is spread by shards and by indexes.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import Any

from beam_jobs.job import Facts, Launch, OnProgress, limit_threads, run_job
from beam_jobs.libraries import versions
from rag_model.build.content import BuiltIndex
from rag_model.index.recipe import IndexPlan
from rag_model.index.structure import structure_of
from rag_model.store.blobs import BlobRef
from rag_model.store.memo import Produced, Record
from rag_model.store.store import Store


@dataclass(frozen=True, slots=True)
class IndexBuild:
    """One index on its way: each job fills in one more file. Lists of blobs are blobs, so that it stays small."""

    name: str
    plan: IndexPlan
    parts: int
    vectors: BlobRef  # JSON list of the parts' embeddings, in row order
    trained: BlobRef | None = None  # what the shards share
    shards: BlobRef | None = None  # JSON list of the shards, in order


@dataclass(frozen=True, slots=True)
class Shard:
    """One worker's share of an index."""

    build: IndexBuild
    number: int
    reads: tuple[int, ...]  # the parts whose vectors it needs


def start(store: Store, name: str, plan: IndexPlan, vectors: Sequence[BlobRef]) -> IndexBuild:
    """Return an index of which nothing is built yet."""
    return IndexBuild(name, plan, len(vectors), _put_list(store, vectors))


def train(builds: Sequence[IndexBuild], launch: Launch, on_progress: OnProgress | None = None) -> list[IndexBuild]:
    """Train all indexes."""
    reports = run_job("train", train_one, builds, launch, on_progress)
    return [replace(build, trained=_out(report)) for build, report in zip(builds, reports, strict=True)]


def build_shards(
    builds: Sequence[IndexBuild], launch: Launch, on_progress: OnProgress | None = None
) -> list[IndexBuild]:
    """Build all shards of all indexes."""
    shards = [
        Shard(build, number, reads)
        for build in builds
        for number, reads in enumerate(structure_of(build.plan).reads(build.plan, build.parts))
    ]
    reports = run_job("shard", build_shard, shards, launch, on_progress)
    store = Store.open(launch.store_url)
    files = groupby(zip(shards, reports, strict=True), key=lambda made: made[0].build)
    return [replace(build, shards=_put_list(store, [_out(report) for _, report in made])) for build, made in files]


def merge(builds: Sequence[IndexBuild], launch: Launch, on_progress: OnProgress | None = None) -> list[BuiltIndex]:
    """Merge all indexes."""
    reports = run_job("merge", merge_one, builds, launch, on_progress)
    return [BuiltIndex(build.name, build.plan, _out(report)) for build, report in zip(builds, reports, strict=True)]


def train_one(build: IndexBuild, store: Store) -> Facts:
    """Learn what the shards of one index share, once."""

    def produce(workdir: Path) -> Produced:
        limit_threads(1)
        out = workdir / "trained"
        facts = structure_of(build.plan).train(build.plan, _local(store, _listed(store, build.vectors)), out)
        return Produced({"out": out}, facts)

    inputs = _inputs(build.plan, vectors=build.vectors.id)
    return _report(*store.memo.once("train", inputs, produce))


def build_shard(shard: Shard, store: Store) -> Facts:
    """Build one shard, once."""
    build, trained = shard.build, _made(shard.build.trained)
    listed = _listed(store, build.vectors)
    vectors = [listed[part] for part in shard.reads]

    def produce(workdir: Path) -> Produced:
        limit_threads(1)
        out, local = workdir / "shard", _local(store, vectors)
        facts = structure_of(build.plan).shard(build.plan, store.blobs.local(trained), local, shard.number, out)
        return Produced({"out": out}, facts)

    inputs = _inputs(build.plan, vectors=[ref.id for ref in vectors], trained=trained.id, number=shard.number)
    return _report(*store.memo.once("shard", inputs, produce))


def merge_one(build: IndexBuild, store: Store) -> Facts:
    """Join one index's shards, once."""
    trained, shards = _made(build.trained), _made(build.shards)

    def produce(workdir: Path) -> Produced:
        limit_threads(1)
        out, vectors = workdir / "index", _local(store, _listed(store, build.vectors))
        pieces = _local(store, _listed(store, shards))
        facts = structure_of(build.plan).merge(build.plan, store.blobs.local(trained), vectors, pieces, out)
        return Produced({"out": out}, facts)

    inputs = _inputs(build.plan, vectors=build.vectors.id, trained=trained.id, shards=shards.id)
    return _report(*store.memo.once("merge", inputs, produce))


def _inputs(plan: IndexPlan, **what: Any) -> dict[str, Any]:
    built = {key: value for key, value in plan.to_json().items() if key not in ("search", "notes")}
    return {"plan": built, "code": structure_of(plan).VERSION, "libraries": versions("faiss-cpu"), **what}


def _made(blob: BlobRef | None) -> BlobRef:
    if blob is None:
        raise ValueError("the jobs of an index run in order: train, build_shards, merge")
    return blob


def _put_list(store: Store, refs: Sequence[BlobRef]) -> BlobRef:
    return store.blobs.put_bytes(json.dumps([ref.to_json() for ref in refs]).encode())


def _listed(store: Store, blob: BlobRef) -> list[BlobRef]:
    return [BlobRef.from_json(value) for value in json.loads(store.blobs.read(blob))]


def _local(store: Store, refs: Sequence[BlobRef]) -> list[Path]:
    return [store.blobs.local(ref) for ref in refs]


def _report(record: Record, made: bool) -> Facts:
    return {"facts": dict(record.facts), "out": asdict(record.outputs["out"]), "made": made}


def _out(report: Facts) -> BlobRef:
    return BlobRef.from_json(report["out"])
