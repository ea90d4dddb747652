"""Build one index over vectors of any origin, with the same jobs that build a snapshot's indexes.

The jobs use a temporary store next to the index file, so that an interrupted run can continue where
it stopped. The finished index is moved to its path atomically; then the temporary store is deleted.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from beam_jobs import index
from beam_jobs.job_settings import JobSettings, OnProgress
from beam_jobs.workers import get_worker_memory
from flows.machine.workplace import open_work_store
from flows.stage import StageClock
from rag_model.errors import UsageError
from rag_model.index.build import check_self_contained, install_index
from rag_model.index.estimate import choose_by_recall, estimate_resources, fit_into_memory, list_alternatives
from rag_model.index.files.engine import Rows
from rag_model.index.files.intake import Block, InvalidRowPolicy, VectorInput, inspect_vectors, split_into_parts
from rag_model.index.quality.tune import IndexEvaluation, evaluate_index, read_queries
from rag_model.index.recipe import IndexRecipe, VectorPlan, resolve
from rag_model.process import temporary_folder
from rag_model.snapshots.content import BuiltIndex
from rag_model.store.objects.blobs import BlobRef
from rag_model.store.store import Store

_SPLIT_CODE = 1  # increase it when the same files would be split differently


@dataclass(frozen=True, slots=True)
class IndexRequest:
    """The index to build, its vectors, and its path."""

    vectors: tuple[Path, ...]
    out: Path
    recipe: IndexRecipe
    fit_structure: bool = False  # ignore the recipe's structure and choose one that fits in memory
    # maximum bytes of memory for building and for searching; None: the free memory, which limits
    # only building unless `fit_structure`
    memory: int | None = None
    column: str | None = None  # name of the vector column in Parquet files
    invalid: InvalidRowPolicy = "refuse"  # what to do with rows that have a NaN or an infinity
    questions: Path | None = None  # file of query vectors; None: some of the indexed vectors
    disk: int | None = None  # maximum bytes of the index; None: no limit
    # whether candidates may be reranked by the full vectors of a snapshot, as in a recipe
    can_rerank: bool = False
    work: Path | None = None  # folder for the temporary store; None: the folder of `out`
    beam_options: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class IndexOutcome:
    """The index file that was built, and its measurements."""

    out: Path
    plan: VectorPlan
    size: int  # bytes of the index file
    dropped: int  # number of rows that were left out because of a NaN or an infinity
    evaluation: IndexEvaluation
    seconds: Mapping[str, float]  # by stage


def index_vectors(request: IndexRequest) -> IndexOutcome:
    """Build an index file from vector files, and measure it.

    Raises:
        InputError: the vectors cannot be indexed; the message names file and row.
        UsageError: the request contradicts itself.
        ResourceError: memory or disk is not sufficient (raised before the work starts), or ran out
            during the work.
    """
    clock, vector_input = StageClock(), inspect_vectors(request.vectors, request.column)
    _check_output_path(request.out, vector_input)
    plan = plan_index(request, vector_input.n, vector_input.d)
    check_self_contained(plan)
    questions = read_queries(request.questions, vector_input.d) if request.questions else None
    estimate, vectors_bytes = estimate_resources(plan), vector_input.n * vector_input.d * vector_input.dtype.itemsize
    with open_work_store(request.out, request.work, estimate.work_bytes + vectors_bytes, estimate.disk_bytes) as store:
        job_settings = JobSettings.new(store.url, request.beam_options, request.memory)
        with clock("cut") as on_progress:
            part_blobs, kept_rows = _split_vectors(store, vector_input, request.invalid, on_progress)
        if kept_rows is not None:
            plan = plan_index(request, len(kept_rows), vector_input.d)
        built_index = _build_index(store, plan, part_blobs, job_settings, clock)
        index_path = store.blobs.get_local_path(built_index.blob)
        part_paths = [store.blobs.get_local_path(part_blob) for part_blob in part_blobs]
        with clock("measure"):
            evaluation = evaluate_index(index_path, plan, part_paths, questions)
        install_index(index_path, request.out, evaluation.search, kept_rows)
    n_dropped = 0 if kept_rows is None else vector_input.n - len(kept_rows)
    return IndexOutcome(request.out, plan, built_index.blob.size, n_dropped, evaluation, clock.seconds)


def plan_index(request: IndexRequest, n: int, d: int) -> VectorPlan:
    """Plan the index of a request for n vectors of d dimensions, within the request's memory limit.

    Raises:
        UsageError: the recipe does not fit the vectors.
        ResourceError: the index needs more memory; the message names an index that would fit.
    """
    memory = request.memory or get_worker_memory(request.beam_options)
    if memory is None and not (request.fit_structure and (request.disk or request.recipe.recall_target)):
        return resolve(request.recipe, n, d)
    recipes = [request.recipe]
    if request.fit_structure:
        recipes = choose_by_recall(list_alternatives(request.recipe, d, with_vectors=request.can_rerank), n, d)
    for_search = request.fit_structure or request.memory is not None
    return fit_into_memory(recipes, n, d, memory or 1 << 62, serving=for_search, disk=request.disk)


def _check_output_path(out: Path, vector_input: VectorInput) -> None:
    if out.is_dir():
        raise UsageError(f"{out} is a folder: name the index file to write")
    if not out.parent.is_dir():
        raise UsageError(f"there is no folder {out.parent} to write {out.name} in: make it first")
    if any(out.exists() and out.samefile(file.path) for file in vector_input.files):
        raise UsageError(f"{out} is one of the vector files: name another file for the index, after the vector files")


def _split_vectors(
    store: Store, vector_input: VectorInput, invalid: InvalidRowPolicy, on_progress: OnProgress
) -> tuple[list[BlobRef], Rows | None]:
    """Store the vectors as parts, if they are not stored yet.

    Return the parts, and the row numbers of the vectors in them (None: all rows).
    """
    key_inputs = {
        "files": [*vector_input.identify_files().values()],
        "invalid": invalid,
        "part_rows": vector_input.count_part_rows(),
        "code": _SPLIT_CODE,
    }
    memo_key = store.memo.compute_key(key_inputs)
    memo_record = store.memo.find("cut", memo_key)
    if memo_record is None:
        parts: dict[str, BlobRef] = {}
        n_parts = -(-vector_input.n // vector_input.count_part_rows())

        def store_block(block: Block) -> None:
            parts[f"{len(parts):05d}"] = _store_array(store, block)
            on_progress(len(parts), n_parts)

        kept_rows = split_into_parts(vector_input, store_block, invalid)
        outputs = parts if kept_rows is None else {**parts, "kept": _store_array(store, kept_rows)}
        memo_record = store.memo.write_record("cut", memo_key, outputs, {}, key_inputs)
    part_refs = dict(memo_record.outputs)
    kept_rows_blob = part_refs.pop("kept", None)
    return [part_refs[name] for name in sorted(part_refs)], None if kept_rows_blob is None else np.load(
        store.blobs.get_local_path(kept_rows_blob), allow_pickle=False
    )


def _store_array(store: Store, array: Block) -> BlobRef:
    with temporary_folder("cut") as folder:
        np.save(path := folder / "array.npy", array, allow_pickle=False)
        return store.blobs.put_file(path)


def _build_index(
    store: Store, plan: VectorPlan, parts: list[BlobRef], job_settings: JobSettings, clock: StageClock
) -> BuiltIndex:
    index_builds = [index.start_index(store, "index", plan, parts)]
    with clock("train") as on_progress:
        index_builds = index.train(index_builds, job_settings, on_progress)
    with clock("scatter") as on_progress:
        index_builds = index.scatter(index_builds, job_settings, on_progress)
    if plan.shards:
        with clock("shard") as on_progress:
            index_builds = index.build_shards(index_builds, job_settings, on_progress)
    else:
        index_builds = index.build_shards(index_builds, job_settings)
    with clock("merge") as on_progress:
        (built_index,) = index.merge(index_builds, job_settings, on_progress)
    return built_index
