"""The index jobs: train once, scatter part by part, build shards in parallel, merge.

All indexes of a snapshot share the four jobs. The parent's trained file is inherited while it fits; training then only
tests it with some new vectors, or moves the lists that miss them. A piece or a shard does not depend on the size of the
corpus or on the rest of it: the piece of an unchanged part, and the shard of a cell with unchanged slices, are reused
by their memo records. An index of words is made of the parent's if it can be (`derive`).

What a worker does for a task is in `index_work`.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial, wraps
from typing import Any

import numpy as np

from beam_jobs.here import recorded
from beam_jobs.index_tasks import IndexBuild, ScatterTask, ShardTask, StageOutput, blobs_in, required
from beam_jobs.index_work import build_shard, derive_one, merge_one, scatter_one, train_one
from beam_jobs.job import run_job
from beam_jobs.launch import Launch, OnProgress, Report
from rag_model.digest import digest_bytes
from rag_model.errors import InputError
from rag_model.index.deriving import DerivingKind
from rag_model.index.files.slices import PLACES, Table, identity, read_table
from rag_model.index.plan import IndexPlan
from rag_model.index.quality.fit import TrainingFit
from rag_model.index.registry import kind_named
from rag_model.snapshots.content import BuiltIndex
from rag_model.snapshots.earlier_index import EarlierIndex
from rag_model.snapshots.heritage import EarlierRows, Heirloom
from rag_model.store.objects.blobs import BlobRef
from rag_model.store.store import Store

Job = Callable[..., list[IndexBuild]]


def start(
    store: Store,
    name: str,
    plan: IndexPlan,
    rows: Sequence[BlobRef],
    inherited: Heirloom | None = None,
    earlier: EarlierIndex | None = None,
) -> IndexBuild:
    """Return the record of an index before its jobs; `earlier` is the parent's, of which it may be made."""
    known = store.blobs.put_bytes(json.dumps(earlier.to_json()).encode()) if earlier else None
    return IndexBuild(name, plan, _put_list(store, rows), inherited, known)


def derive(builds: Sequence[IndexBuild], launch: Launch, on_progress: OnProgress | None = None) -> list[IndexBuild]:
    """Make indexes of the parent's where that is possible: they pass through the other jobs as they are."""
    asked = [build for build in builds if build.earlier]
    told = iter(run_job("derive", derive_one, asked, _to_derive(asked, launch), on_progress, _to_merge, memoised=True))
    outputs = [StageOutput.from_json(next(told)) if build.earlier else None for build in builds]
    return [
        replace(build, derived=made if made and made.out else None) for build, made in zip(builds, outputs, strict=True)
    ]


def _to_derive(builds: Sequence[IndexBuild], launch: Launch) -> Launch:
    """Return the launch with room for the indexes that are made of earlier ones."""
    kinds = [(kind_named(build.plan.kind), build.plan.n) for build in builds]
    return launch.for_tasks(max((kind.to_derive(n) for kind, n in kinds if isinstance(kind, DerivingKind)), default=1))


def _put_list(store: Store, refs: Iterable[BlobRef]) -> BlobRef:
    return store.blobs.put_bytes(json.dumps([ref.to_json() for ref in refs]).encode())


def _unless_derived(job: Job) -> Job:
    """Return a job that leaves out indexes that are derived."""

    @wraps(job)
    def run(builds: Sequence[IndexBuild], launch: Launch, on_progress: OnProgress | None = None) -> list[IndexBuild]:
        left = iter(job([build for build in builds if not build.derived], launch, on_progress))
        return [build if build.derived else next(left) for build in builds]

    return run


@_unless_derived
def train(builds: Sequence[IndexBuild], launch: Launch, on_progress: OnProgress | None = None) -> list[IndexBuild]:
    """Train all indexes except those whose inherited file fits; the plan's notes say which was done, and why.

    If no vector is new, the inherited file is used without a test, and no job is run.
    """
    asked = [build for build in builds if not _settled(build)]
    roomy = launch.holding(_needed(asked, "train"))
    told = iter(run_job("train", train_one, asked, roomy, on_progress, _to_train, memoised=True))
    return [_kept(one) if _settled(one) else _trained(one, StageOutput.from_json(next(told))) for one in builds]


def _settled(build: IndexBuild) -> bool:
    return build.inherited is not None and build.inherited.settled(build.plan.drift)


def _trained(build: IndexBuild, made: StageOutput) -> IndexBuild:
    if made.out is None:
        return _kept(build)
    noted = _noted(build, made.note) if made.note else build
    fitted = TrainingFit(made.facts["losses"]) if kind_named(build.plan.kind).learns else None
    return _with_trained(noted, made.out, fitted)


def _kept(build: IndexBuild) -> IndexBuild:
    heirloom = build.inherited
    if heirloom is None:
        raise ValueError(f"index {build.name} inherits nothing: train it")
    noted = _noted(build, f"trained as in snapshot {heirloom.snapshot[:12]}")
    return replace(_with_trained(noted, heirloom.blob, heirloom.trained), before=heirloom.before)


def _with_trained(build: IndexBuild, trained: BlobRef, fitted: TrainingFit | None) -> IndexBuild:
    """Return the record for the jobs after training: without what was inherited, which names the files of all parts.

    Each task of these jobs carries the record, and there are as many tasks as parts.
    """
    return replace(build, trained=trained, fitted=fitted, inherited=None)


def _noted(build: IndexBuild, said: str) -> IndexBuild:
    return replace(build, plan=replace(build.plan, notes=(*build.plan.notes, said)))


@_unless_derived
def scatter(builds: Sequence[IndexBuild], launch: Launch, on_progress: OnProgress | None = None) -> list[IndexBuild]:
    """Sort every part's vectors by shard, for all indexes."""
    store = Store.open(launch.store_url)
    parts = [_scatter_tasks(store, build) for build in builds]
    roomy = _with_room(builds, "scatter", launch)
    done = _grouped("scatter", scatter_one, parts, roomy, on_progress, _to_scatter)
    return [_with_pieces(store, build, made) for build, made in zip(builds, done, strict=True)]


def _with_pieces(store: Store, build: IndexBuild, made: Sequence[StageOutput]) -> IndexBuild:
    """Return the record with the parts' pieces, and with what each shard reads of them."""
    build = replace(build, scattered=_put_outputs(store, made))
    if not build.plan.shards:
        return build
    pieces, shards, put = [required(one.out) for one in made], build.plan.shards, store.blobs.put_bytes
    places = np.empty((shards, len(pieces)), PLACES)
    for number, column in enumerate(store.files.ask(partial(_places_in, store, shards), pieces)):
        places[:, number] = column
    cells = [
        {"rows": int(row["rows"].sum()), "slices": identity(row), "places": digest_bytes(row.tobytes())}
        for row in places
    ]
    return replace(build, places=put(places.tobytes()), cells=put(json.dumps(cells).encode()))


def _places_in(store: Store, shards: int, piece: BlobRef) -> Table:
    """Return the places of all shards' slices in a piece, (shards,)."""
    try:
        return read_table(partial(store.blobs.read_range, piece), piece.size, shards, piece.id)[:-1]
    except InputError as broken:
        raise store.blobs.damaged(piece) from broken


def _scatter_tasks(store: Store, build: IndexBuild) -> list[ScatterTask]:
    """Return a task a part, each with the parent's parts that have its pages."""
    rows = blobs_in(store, build.rows)
    before = json.loads(store.blobs.read(build.before)) if build.before else [()] * len(rows)
    build = replace(build, before=None)  # which names the files of all parts
    return [
        ScatterTask(build, number, own, tuple(map(EarlierRows.from_json, known)))
        for number, (own, known) in enumerate(zip(rows, before, strict=True))
    ]


@_unless_derived
def build_shards(
    builds: Sequence[IndexBuild], launch: Launch, on_progress: OnProgress | None = None
) -> list[IndexBuild]:
    """Build all shards of all indexes."""
    store = Store.open(launch.store_url)
    shards = [
        [ShardTask(build, number, **cell) for number, cell in enumerate(_cells(store, build))] for build in builds
    ]
    known = recorded(build_shard, [task for own in shards for task in own], store)
    shards = [[replace(task, beside=max(1, known.count(None))) for task in own] for own in shards]
    roomy = _with_room(builds, "shard", launch)
    done = _grouped("shard", build_shard, shards, roomy, on_progress, _to_link, known)
    return [replace(build, shards=_put_outputs(store, made)) for build, made in zip(builds, done, strict=True)]


def merge(builds: Sequence[IndexBuild], launch: Launch, on_progress: OnProgress | None = None) -> list[BuiltIndex]:
    """Merge all indexes."""
    store = Store.open(launch.store_url)
    left = [build for build in builds if not build.derived]
    roomy = launch.holding(_needed(left, "merge"))
    told = map(StageOutput.from_json, run_job("merge", merge_one, left, roomy, on_progress, _to_merge, memoised=True))
    outputs = [(build, build.derived or next(told)) for build in builds]
    return [
        BuiltIndex(build.name, build.plan, required(made.out), made.facts, _passed_on(store, build))
        for build, made in outputs
    ]


def _passed_on(store: Store, build: IndexBuild) -> tuple[BlobRef, TrainingFit] | None:
    """Return the trained file that later builds inherit, and how evenly it now fills its cells."""
    if build.derived:
        return None
    rows = [cell["rows"] for cell in _cells(store, build)]
    imbalance = round(max(rows) * len(rows) / max(1, sum(rows)), 4) if rows else 0.0
    return (required(build.trained), build.fitted.used(imbalance)) if build.fitted else None


def _grouped(
    stage: str,
    work: Callable[[Any, Store], Report],
    tasks: Sequence[Sequence[Any]],
    launch: Launch,
    on_progress: OnProgress | None,
    seconds: Callable[[Any], float],
    known: Sequence[Report | None] | None = None,
) -> Iterator[list[StageOutput]]:
    """Run the tasks of all indexes as one job; yield what they made index by index."""
    flat = [task for own in tasks for task in own]
    told = iter(run_job(stage, work, flat, launch, on_progress, seconds, memoised=True, known=known))
    for own in tasks:
        yield [StageOutput.from_json(next(told)) for _ in own]


def _to_train(build: IndexBuild) -> float:
    """Return the estimated seconds of one core for training; an inherited file only takes a test of some rows."""
    return kind_named(build.plan.kind).seconds(build.plan, "train", build.plan.n, 0, inherited=bool(build.inherited))


def _to_scatter(part: ScatterTask) -> float:
    plan = part.build.plan
    return kind_named(plan.kind).seconds(plan, "scatter", 0, part.rows.size, inherited=bool(part.earlier))


def _to_link(shard: ShardTask) -> float:
    plan = shard.build.plan
    return kind_named(plan.kind).seconds(plan, "shard", shard.rows, 0)


def _to_merge(build: IndexBuild) -> float:
    return kind_named(build.plan.kind).seconds(build.plan, "merge", build.plan.n, 0)


def _with_room(builds: Sequence[IndexBuild], stage: str, launch: Launch) -> Launch:
    return launch.for_tasks(_needed(builds, stage))


def _needed(builds: Sequence[IndexBuild], stage: str) -> int:
    """Return the bytes of memory that the largest task of a stage needs."""
    return max((_stages(build.plan).get(stage, 1) for build in builds), default=1)


def _stages(plan: IndexPlan) -> Mapping[str, int]:
    """Return the bytes of memory that a task of each stage needs."""
    return kind_named(plan.kind).estimate(plan).stages


def _put_outputs(store: Store, made: Iterable[StageOutput]) -> BlobRef:
    return _put_list(store, (required(one.out) for one in made))


def _cells(store: Store, build: IndexBuild) -> list[dict[str, Any]]:
    """Return for each shard its rows over all parts, and digests of its slices and of their places."""
    cells: list[dict[str, Any]] = json.loads(store.blobs.read(build.cells)) if build.cells else []
    return cells
