"""Build one index over vectors of any origin, with the same jobs that build a snapshot's indexes.

The jobs use a temporary store in the folder of the index, so that a run that died continues where it stopped. The index
is moved to its place atomically, and then the store is deleted.
"""

import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from beam_jobs import index
from beam_jobs.launch import Launch, OnProgress
from beam_jobs.workers import worker_memory
from flows.machine.workplace import workplace
from flows.progress import StageClock
from rag_model.errors import UsageError
from rag_model.index.build import check_alone, place
from rag_model.index.files.arrays import Block
from rag_model.index.files.engine import Rows
from rag_model.index.files.intake import Intake, Invalid, cut, look
from rag_model.index.quality.appraisal import Appraisal, appraise, read_questions
from rag_model.index.recipe import IndexRecipe, VectorPlan, resolve
from rag_model.index.sizing.estimate import estimate, fitted, ladder
from rag_model.snapshots.content import BuiltIndex
from rag_model.store.objects.blobs import BlobRef
from rag_model.store.store import Store

CODE = 1  # raise it when the same files would be split in another way


@dataclass(frozen=True, slots=True)
class Order:
    """The index to build, its vectors, and its place."""

    vectors: tuple[Path, ...]
    out: Path
    recipe: IndexRecipe
    chosen: bool = False  # the structure is chosen for the memory, whatever the recipe names
    memory: int | None = None  # bytes, for building and for searching; None: what is free, for building
    column: str | None = None  # of Parquet files
    invalid: Invalid = "refuse"
    questions: Path | None = None
    work: Path | None = None  # folder in which the work is done; None: beside `out`
    beam_options: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Indexed:
    """The index that was built."""

    out: Path
    plan: VectorPlan
    size: int  # bytes
    dropped: int  # rows with a NaN or an infinity
    appraisal: Appraisal
    seconds: Mapping[str, float]  # by stage


def index_vectors(order: Order) -> Indexed:
    """Build an index file from vector files, and measure it.

    Raises:
        InputError: the vectors cannot be indexed; the message names file and row.
        UsageError: the order contradicts itself.
        ResourceError: memory or disk will not be enough, raised before the work starts; or it ran out later.
    """
    clock, intake = StageClock(), look(order.vectors, order.column)
    _check_out(order.out, intake)
    plan = planned(order, intake.n, intake.d)
    check_alone(plan)
    questions = read_questions(order.questions, intake.d) if order.questions else None
    cost, vectors_bytes = estimate(plan), intake.n * intake.d * intake.dtype.itemsize
    with workplace(order.out, order.work, cost.work_bytes + vectors_bytes, cost.disk_bytes) as store:
        launch = Launch.new(store.url, order.beam_options, order.memory)
        with clock("cut") as tell:
            parts, kept = _cut(store, intake, order.invalid, tell)
        if kept is not None:
            plan = planned(order, len(kept), intake.d)
        built = _built(store, plan, parts, launch, clock)
        file, vectors = store.blobs.local(built.blob), [store.blobs.local(part) for part in parts]
        with clock("measure"):
            appraisal = appraise(file, plan, vectors, questions)
        place(file, order.out, appraisal.search, kept)
    dropped = 0 if kept is None else intake.n - len(kept)
    return Indexed(order.out, plan, built.blob.size, dropped, appraisal, clock.seconds)


def planned(order: Order, n: int, d: int) -> VectorPlan:
    """Return the plan of an order for n vectors of d dimensions, within its memory.

    Raises:
        UsageError: the recipe does not fit the vectors.
        ResourceError: it needs more memory; the message names an index that would fit.
    """
    memory = order.memory or worker_memory(order.beam_options)
    if memory is None:
        return resolve(order.recipe, n, d)
    recipes = ladder(order.recipe, d) if order.chosen else [order.recipe]
    return fitted(recipes, n, d, memory, serving=order.chosen or order.memory is not None)


def _check_out(out: Path, intake: Intake) -> None:
    if out.is_dir():
        raise UsageError(f"{out} is a folder: name the index file to write")
    if not out.parent.is_dir():
        raise UsageError(f"there is no folder {out.parent} to write {out.name} in: make it first")
    if any(out.exists() and out.samefile(file.path) for file in intake.files):
        raise UsageError(f"{out} is one of the vector files: name another file for the index, after them")


def _cut(store: Store, intake: Intake, invalid: Invalid, tell: OnProgress) -> tuple[list[BlobRef], Rows | None]:
    """Put the vectors into the store as parts, once."""
    inputs = {"files": intake.identity(), "invalid": invalid, "part_rows": intake.part_rows(), "code": CODE}
    key = store.memo.key(inputs)
    known = store.memo.get("cut", key)
    if known is None:
        parts: dict[str, BlobRef] = {}
        total = -(-intake.n // intake.part_rows())

        def put(block: Block) -> None:
            parts[f"{len(parts):05d}"] = _put(store, block)
            tell(len(parts), total)

        kept = cut(intake, put, invalid)
        outputs = parts if kept is None else {**parts, "kept": _put(store, kept)}
        known = store.memo.record("cut", key, outputs, {}, inputs)
    refs = dict(known.outputs)
    rows = refs.pop("kept", None)
    return [refs[name] for name in sorted(refs)], None if rows is None else np.load(
        store.blobs.local(rows), allow_pickle=False
    )


def _put(store: Store, array: Block) -> BlobRef:
    with tempfile.TemporaryDirectory(prefix="bookwheel-cut-") as folder:
        np.save(path := Path(folder) / "array.npy", array, allow_pickle=False)
        return store.blobs.put_file(path)


def _built(store: Store, plan: VectorPlan, parts: list[BlobRef], launch: Launch, clock: StageClock) -> BuiltIndex:
    builds = [index.start(store, "index", plan, parts)]
    with clock("train") as tell:
        builds = index.train(builds, launch, tell)
    with clock("scatter") as tell:
        builds = index.scatter(builds, launch, tell)
    if plan.shards:
        with clock("shard") as tell:
            builds = index.build_shards(builds, launch, tell)
    else:
        builds = index.build_shards(builds, launch)
    with clock("merge") as tell:
        (built,) = index.merge(builds, launch, tell)
    return built
