"""The index jobs: train once, scatter part by part, build shards side by side, merge.

All indexes of a snapshot share the four jobs. Each task uses one thread, so that equal vectors give equal bytes; work
is spread by parts, shards and indexes. What one job hands to the next are blobs of the store, of which a reader asks
for ranges: no worker but the merging one ever reads what it does not need.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from beam_jobs.job import Facts, Launch, OnProgress, limit_threads, run_job
from beam_jobs.libraries import versions
from rag_model.build.content import BuiltIndex
from rag_model.index.estimate import check_disk, estimate
from rag_model.index.pieces import Opener, opener
from rag_model.index.recipe import IndexPlan
from rag_model.index.structure import structure_of
from rag_model.store.blobs import BlobRef
from rag_model.store.memo import Produced
from rag_model.store.store import Store


@dataclass(frozen=True, slots=True)
class IndexBuild:
    """One index on its way: each job fills in one more file. Lists of blobs are blobs, so that it stays small."""

    name: str
    plan: IndexPlan
    vectors: BlobRef  # JSON list of the parts' embeddings, in row order
    trained: BlobRef | None = None  # what the workers share
    scattered: BlobRef | None = None  # JSON list of the parts' pieces, in row order
    rows: BlobRef | None = None  # JSON list of the rows of each shard
    shards: BlobRef | None = None  # JSON list of the shards, in order; empty where there are none


@dataclass(frozen=True, slots=True)
class Part:
    """One part's vectors, to be scattered."""

    build: IndexBuild
    number: int
    vectors: BlobRef


@dataclass(frozen=True, slots=True)
class Shard:
    """One worker's share of an index."""

    build: IndexBuild
    number: int
    rows: int  # members of its cell


def start(store: Store, name: str, plan: IndexPlan, vectors: Sequence[BlobRef]) -> IndexBuild:
    """Return an index of which nothing is built yet."""
    return IndexBuild(name, plan, _put_list(store, vectors))


def train(builds: Sequence[IndexBuild], launch: Launch, on_progress: OnProgress | None = None) -> list[IndexBuild]:
    """Train all indexes."""
    reports = run_job("train", train_one, builds, launch, on_progress)
    return [replace(build, trained=_out(report)) for build, report in zip(builds, reports, strict=True)]


def scatter(builds: Sequence[IndexBuild], launch: Launch, on_progress: OnProgress | None = None) -> list[IndexBuild]:
    """Sort every part's vectors by the shard that they go to, for all indexes."""
    store = Store.open(launch.store_url)
    parts = [[Part(build, number, ref) for number, ref in enumerate(_listed(store, build.vectors))] for build in builds]
    roomy = _with_room(builds, "scatter", launch)
    done = _grouped("scatter", scatter_one, parts, roomy, on_progress, lambda part: part.vectors.size)
    return [
        replace(build, scattered=_put_list(store, map(_out, reports)), rows=_put_rows(store, build.plan, reports))
        for build, reports in zip(builds, done, strict=True)
    ]


def build_shards(
    builds: Sequence[IndexBuild], launch: Launch, on_progress: OnProgress | None = None
) -> list[IndexBuild]:
    """Build all shards of all indexes."""
    store = Store.open(launch.store_url)
    shards = [
        [Shard(build, number, rows) for number, rows in enumerate(json.loads(store.blobs.read(_made(build.rows))))]
        for build in builds
    ]
    roomy = _with_room(builds, "shard", launch)
    done = _grouped("shard", build_shard, shards, roomy, on_progress, lambda shard: shard.rows)
    return [
        replace(build, shards=_put_list(store, map(_out, reports))) for build, reports in zip(builds, done, strict=True)
    ]


def merge(builds: Sequence[IndexBuild], launch: Launch, on_progress: OnProgress | None = None) -> list[BuiltIndex]:
    """Merge all indexes."""
    reports = run_job("merge", merge_one, builds, launch, on_progress)
    return [
        BuiltIndex(build.name, build.plan, _out(report), report["facts"])
        for build, report in zip(builds, reports, strict=True)
    ]


def train_one(build: IndexBuild, store: Store) -> Facts:
    """Learn what the workers of one index share, once."""
    plan = build.plan

    def make(out: Path) -> Facts:
        return structure_of(plan).train(plan, _local(store, build.vectors), out)

    return _once(store, "train", plan, make, vectors=build.vectors.id)


def scatter_one(part: Part, store: Store) -> Facts:
    """Sort one part's vectors, once."""
    plan, trained = part.build.plan, _made(part.build.trained)

    def make(out: Path) -> Facts:
        files = store.blobs.local(trained), store.blobs.local(part.vectors)
        return structure_of(plan).scatter(plan, *files, part.number, out)

    return _once(store, "scatter", plan, make, vectors=part.vectors.id, trained=trained.id, number=part.number)


def build_shard(shard: Shard, store: Store) -> Facts:
    """Build one shard from its slices of all parts, once."""
    plan, trained, scattered = shard.build.plan, _made(shard.build.trained), _made(shard.build.scattered)

    def make(out: Path) -> Facts:
        slices = _openers(store, scattered)
        return structure_of(plan).shard(plan, store.blobs.local(trained), slices, shard.number, out)

    return _once(store, "shard", plan, make, scattered=scattered.id, trained=trained.id, number=shard.number)


def merge_one(build: IndexBuild, store: Store) -> Facts:
    """Join what was scattered and built for one index, once."""
    plan, trained = build.plan, _made(build.trained)
    scattered, shards = _made(build.scattered), _made(build.shards)

    def make(out: Path) -> Facts:
        check_disk(plan, out.parent)
        whole = [opener(path) for path in _local(store, shards)]  # read from end to end, a little of each at a time
        pieces = _openers(store, scattered) if whole else [opener(path) for path in _local(store, scattered)]
        vectors = _local(store, build.vectors)
        return structure_of(plan).merge(plan, store.blobs.local(trained), vectors, pieces, whole, out)

    made_of = {"vectors": build.vectors.id, "scattered": scattered.id, "shards": shards.id}
    return _once(store, "merge", plan, make, trained=trained.id, **made_of)


def _grouped(
    stage: str,
    work: Callable[[Any, Store], Facts],
    tasks: Sequence[Sequence[Any]],
    launch: Launch,
    on_progress: OnProgress | None,
    weight: Callable[[Any], int],
) -> Iterator[list[Facts]]:
    """Run the tasks of all indexes as one job; yield the reports index by index."""
    reports = iter(run_job(stage, work, [task for own in tasks for task in own], launch, on_progress, weight))
    for own in tasks:
        yield [next(reports) for _ in own]


def deciding(plan: IndexPlan) -> dict[str, Any]:
    """Return what decides the output of every stage of an index, beside its files."""
    return {"plan": plan.built(), "code": structure_of(plan).VERSION, "libraries": versions("faiss-cpu")}


def _with_room(builds: Sequence[IndexBuild], stage: str, launch: Launch) -> Launch:
    return launch.for_tasks(max((estimate(build.plan).stages.get(stage, 1) for build in builds), default=1))


def _once(store: Store, stage: str, plan: IndexPlan, make: Callable[[Path], Facts], **inputs: Any) -> Facts:
    def produce(workdir: Path) -> Produced:
        limit_threads(1)
        out = workdir / stage
        facts = make(out)
        return Produced({"out": out}, facts)

    record, made = store.memo.once(stage, deciding(plan) | inputs, produce)
    return {"facts": dict(record.facts), "out": asdict(record.outputs["out"]), "made": made}


def _made(blob: BlobRef | None) -> BlobRef:
    if blob is None:
        raise ValueError("the jobs of an index run in order: train, scatter, build_shards, merge")
    return blob


def _put_list(store: Store, refs: Iterable[BlobRef]) -> BlobRef:
    return store.blobs.put_bytes(json.dumps([ref.to_json() for ref in refs]).encode())


def _put_rows(store: Store, plan: IndexPlan, reports: Sequence[Facts]) -> BlobRef:
    """Store how many rows of all parts went to each shard."""
    rows = [sum(report["facts"]["cells"][number] for report in reports) for number in range(plan.shards)]
    return store.blobs.put_bytes(json.dumps(rows).encode())


def _listed(store: Store, blob: BlobRef) -> list[BlobRef]:
    return [BlobRef.from_json(value) for value in json.loads(store.blobs.read(blob))]


def _local(store: Store, listed: BlobRef) -> list[Path]:
    return [store.blobs.local(ref) for ref in _listed(store, listed)]


def _openers(store: Store, listed: BlobRef) -> list[Opener]:
    return [partial(store.blobs.open, ref) for ref in _listed(store, listed)]


def _out(report: Facts) -> BlobRef:
    return BlobRef.from_json(report["out"])
