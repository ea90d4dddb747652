"""The jobs of the gate: workers search exact neighbours of sampled queries, and measure indexes.

There are three kinds of tasks: rank the passages of one part to draw the sample, search one part
for exact neighbours, and measure one index. The launcher encodes the queries and merges the parts'
neighbours, so it reads neither an index nor a part's vectors. The job `tune` uses the same
tasks to choose search parameters.

A new sample keeps queries whose passages are unchanged, so these passages are not read again. The
neighbours in a changed part are derived from those of the parent snapshot: only new rows and new
queries are compared.
"""

import io
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from beam_jobs.job import run_job
from beam_jobs.job_settings import JobSettings, OnProgress, Report
from beam_jobs.tasks import look_up_reports
from rag_model.evaluation.gate import GateRecipe
from rag_model.index.exact_search import (
    ExactIndex,
    NeighborLists,
    compute_exact_scores,
    select_top_k,
    update_neighbors,
)
from rag_model.index.files.engine import Metric, Rows, Vectors
from rag_model.index.files.vectors import BLOCK_BYTES, find_equal_rows, open_vectors
from rag_model.index.kind import IndexMeasurement
from rag_model.index.postings.base_kind import SMALL_CACHE_POSTINGS, PostingsKind, estimate_decoded_bytes
from rag_model.index.quality.results import PROCESS_BYTES
from rag_model.index.quality.sweep import VectorQuerySet
from rag_model.resources import CORE_FLOPS
from rag_model.retrieve.indexes import get_index_metric, list_row_files
from rag_model.snapshots.content import BuiltIndex
from rag_model.snapshots.measure import (
    AnyQuerySet,
    QuerySample,
    choose_sample_rows,
    count_candidates,
    create_query_set,
    encode_queries,
    measure_index,
    rank_passages,
    read_sample,
    tune_index,
    with_tuning,
)
from rag_model.store.objects.blobs import BlobRef
from rag_model.store.objects.memo import TARGET_KEY, Record, StageResult
from rag_model.store.pulling.overlap import PageRanges
from rag_model.store.store import Store
from rag_model.store.versions.manifest import Content, Manifest, passages_path, question_encoder_path
from rag_model.store.versions.snapshot import Snapshot
from rag_model.toml import from_table

NEIGHBORS, QUERIES = "neighbors", "queries"  # memo stages of the gate's jobs
_SAMPLE = "sample"  # name of the output of the stage `QUERIES` with the `QuerySample` as JSON
# bytes of an index that are measured per second, with several search settings
_MEASURED_BYTES_PER_SECOND = 5e7
_RANKED_PER_SECOND = 1e6  # passages whose hashes are read and ranked per second
_UPDATED_SHARE = 0.2  # time to update the parent's neighbours, divided by the time of a full search
_SAMPLE_CODE = 1  # increase it when other passages would be sampled
_NEIGHBORS_CODE = 3  # increase it when the same vectors and queries would give other neighbours


@dataclass(frozen=True, slots=True)
class SampleTask:
    """Task to draw candidates for the query sample from one part."""

    passages: BlobRef
    row_count: int
    n_candidates: int
    seed: int


def rank_part(task: SampleTask, store: Store) -> Report:
    """Return the rows of one part that may belong to the sample, with the keys that order them."""

    def produce(_: Path) -> StageResult:
        sort_keys, first_rows = rank_passages(store.blobs.get_local_path(task.passages), task.n_candidates, task.seed)
        return StageResult({}, {"keys": sort_keys.tolist(), "rows": first_rows.tolist()})

    rank_inputs = {"passages": task.passages.id, "count": task.n_candidates, "seed": task.seed, "code": _SAMPLE_CODE}
    return dict(store.memo.get_or_create("sample", rank_inputs, produce)[0].stats)


@dataclass(frozen=True, slots=True)
class NeighborTask:
    """Task to search one part for the exact neighbours of queries."""

    rows: BlobRef  # the part's vectors
    row_count: int
    queries: BlobRef  # .npy of (q, d) float32
    metric: Metric
    depth: int  # neighbours per query
    # The vectors of the parent's parts with the same pages, and the queries of its gate. They make
    # the search faster, and do not change its result.
    parent_rows: tuple[BlobRef, ...] = ()
    parent_queries: BlobRef | None = None

    def inputs(self) -> dict[str, Any]:
        """Return the inputs that determine the neighbours."""
        return {
            "vectors": self.rows.id,
            "queries": self.queries.id,
            "metric": self.metric,
            "depth": self.depth,
            "code": _NEIGHBORS_CODE,
        }


def find_neighbors(task: NeighborTask, store: Store) -> Report:
    """Find the rows of one part that score highest for each query, unless the memo has them."""

    def produce(workdir: Path) -> StageResult:
        rows_path = store.blobs.get_local_path(task.rows)
        index, queries = ExactIndex([rows_path], task.metric), _read_queries(store, task.queries)
        parent_neighbors = list(_iter_parent_neighbors(store, task, rows_path, queries))
        neighbors = update_neighbors(index, queries, parent_neighbors, task.depth, 2 * task.depth)
        with (workdir / "neighbors").open("wb") as file:
            np.savez(
                file,
                scores=neighbors.scores,
                rows=neighbors.rows.astype(np.int32),
                floor=neighbors.floor,
            )
        return StageResult({"neighbors": workdir / "neighbors"}, {TARGET_KEY: [task.rows.id]})

    return store.memo.get_or_create(NEIGHBORS, task.inputs(), produce)[0].outputs["neighbors"].to_json()


def _iter_parent_neighbors(
    store: Store, task: NeighborTask, rows_path: Path, queries: Vectors
) -> Iterator[tuple[NeighborLists, Rows]]:
    """Yield, for each part of the parent, its neighbours, and an array that maps its row numbers to
    those of equal rows in this part (-1: no row is equal).
    """
    if task.parent_queries is None or not store.blobs.exists(task.parent_queries):
        return
    position_by_query = {query.tobytes(): i for i, query in enumerate(_read_queries(store, task.parent_queries))}
    parent_positions = np.array([position_by_query.get(query.tobytes(), -1) for query in queries], np.int64)
    for parent_rows in task.parent_rows:
        parent_task = replace(task, rows=parent_rows, queries=task.parent_queries)
        record = store.memo.find(NEIGHBORS, store.memo.compute_key(parent_task.inputs()))
        if record is None or not store.blobs.exists(parent_rows):
            continue
        neighbors = _read_neighbors(store, record.outputs["neighbors"]).select(parent_positions)
        if parent_rows == task.rows:
            yield neighbors, np.arange(task.row_count)
        else:
            yield neighbors, find_equal_rows(store.blobs.get_local_path(parent_rows), rows_path)


def _read_queries(store: Store, queries_ref: BlobRef) -> Vectors:
    queries: Vectors = np.load(io.BytesIO(store.blobs.read(queries_ref)), allow_pickle=False)
    return queries


def _read_neighbors(store: Store, lists_ref: BlobRef) -> NeighborLists:
    with np.load(io.BytesIO(store.blobs.read(lists_ref)), allow_pickle=False) as stored_arrays:
        return NeighborLists(stored_arrays["scores"], stored_arrays["rows"].astype(np.int64), stored_arrays["floor"])


def _estimate_scan_seconds(task: NeighborTask) -> float:
    # An inner product takes two operations for each 4-byte value of a query.
    scan_seconds = task.queries.size / 2 * task.row_count / CORE_FLOPS
    return scan_seconds * (_UPDATED_SHARE if task.parent_queries and task.parent_rows else 1)


@dataclass(frozen=True, slots=True)
class MeasureTask:
    """Task to measure or to tune one index with sampled queries."""

    content: BlobRef  # JSON of the snapshot's content, whose manifest may not exist yet
    index: str  # name of the index
    recipe: GateRecipe  # the depth of recall, and the number and seed of the sampled queries
    file_bytes: int  # size of the index
    sample: BlobRef | None = None  # JSON of the `QuerySample`
    # The queries with their exact neighbours; None if the representation is not vectors.
    neighbors: BlobRef | None = None
    target_recall: float | None = None  # recall to tune for; None: only measure
    initial_parameters: tuple[tuple[str, int], ...] = ()  # those of the parent's index


def measure_one(task: MeasureTask, store: Store) -> Report:
    """Measure one index with several search settings, and examine its file."""
    with _open_snapshot(store, task.content) as snapshot:
        representation = snapshot.manifest.content.representation_of(task.index)
        query_set = _open_query_set(store, snapshot, task, representation)
        measurement = measure_index(snapshot, task.index, query_set)
    report = {**asdict(measurement), "recalls": measurement.recalls.tolist()}
    # Index kinds of other packages may report numpy scalars, which JSON does not have.
    plain_report: Report = json.loads(json.dumps(report, default=lambda number: number.item()))
    return plain_report


def read_measurement(report: Report) -> IndexMeasurement:
    """Return the measurement that `measure_one` reported."""
    measurement = from_table(IndexMeasurement, {**report, "recalls": ()}, "a report of the gate job")
    return replace(measurement, recalls=np.array(report["recalls"], np.float64))


def tune_one(task: MeasureTask, store: Store) -> Report:
    """Find search parameters for the recall target of one index, unless the memo has them."""
    with _open_snapshot(store, task.content) as snapshot:
        get_query_set = partial(_open_query_set, store, snapshot, task)
        parameters, target_recall = dict(task.initial_parameters), float(task.target_recall or 0)
        return tune_index(store, snapshot, task.index, target_recall, task.recipe, parameters, get_query_set)


def _open_snapshot(store: Store, content: BlobRef) -> Snapshot:
    return Snapshot.from_manifest(store, Manifest(Content.from_json(json.loads(store.blobs.read(content)))))


def _open_query_set(store: Store, snapshot: Snapshot, task: MeasureTask, representation: str) -> AnyQuerySet:
    if task.neighbors is None:
        if task.sample is None:
            raise ValueError(f"index {task.index} has no sample of queries: draw one first")
        sample = QuerySample(**json.loads(store.blobs.read(task.sample)))
        return create_query_set(snapshot, task.recipe, representation, sample)
    with np.load(io.BytesIO(store.blobs.read(task.neighbors)), allow_pickle=False) as arrays:
        vectors, scores, exact_rows = arrays["vectors"], arrays["scores"], arrays["rows"]

    def score_rows(queries: Rows, candidate_rows: Rows) -> Vectors:
        # This is called if more rows have the same score than neighbours are stored, for example in
        # a corpus of equal passages.
        metric = get_index_metric(snapshot.manifest.content.indexes, representation)
        stored_vectors = open_vectors(list_row_files(snapshot, representation))
        return compute_exact_scores(stored_vectors, metric, vectors[queries], candidate_rows)

    return VectorQuerySet(vectors, min(task.recipe.k, snapshot.n), scores, exact_rows, score_rows)


def measure_indexes(
    store: Store,
    job_settings: JobSettings,
    on_progress: OnProgress | None,
    snapshot: Snapshot,
    recipe: GateRecipe,
    *,
    parent: Content | None = None,
) -> dict[str, IndexMeasurement]:
    """Measure all indexes of a snapshot on workers; return the measurements by index name.

    If `parent` was measured with the same settings, its exact neighbours are updated.

    Raises:
        BookwheelError: as for `run_job`.
    """
    if not snapshot.n:
        return {}
    tasks = _create_tasks(store, snapshot, recipe, dict.fromkeys(snapshot.manifest.content.indexes))
    gate_progress = _GateProgress(on_progress, len(tasks))
    tasks = _add_queries(store, snapshot, tasks, job_settings, gate_progress, parent)
    task_settings = _set_worker_count(job_settings, tasks, snapshot.manifest.content)
    reports = run_job("gate", measure_one, tasks, task_settings, gate_progress, _estimate_seconds)
    return {task.index: read_measurement(report) for task, report in zip(tasks, reports, strict=True)}


def tune_indexes(
    store: Store,
    job_settings: JobSettings,
    on_progress: OnProgress | None,
    draft: Content,
    built_indexes: Sequence[BuiltIndex],
    recipe: GateRecipe,
    *,
    parent: Content | None = None,
) -> list[BuiltIndex]:
    """Tune the search parameters of indexes to reach their recall targets; return the indexes.

    An index without a target is unchanged. Queries are sampled as for the gate but with another
    seed, so that the gate judges the parameters on other queries. They are sampled only if
    parameters of an index are not recorded. If a target cannot be reached, a note of the index says
    so.

    Args:
        store: the store with the files of the draft.
        job_settings: where the tasks run.
        on_progress: called with the finished and the total number of tasks.
        draft: the content before tuning.
        built_indexes: the indexes of the draft.
        recipe: the gate's depth k, number of queries and seed.
        parent: content of the parent snapshot; tuning starts from the search parameters of its
            indexes.

    Raises:
        BookwheelError: as for `run_job`.
    """
    recipe = replace(recipe, seed=recipe.seed + 1)
    targets = {index.name: index.plan.recall_target for index in built_indexes if index.plan.recall_target is not None}
    if not targets or not draft.n:
        return [*built_indexes]
    with Snapshot.from_manifest(store, Manifest(draft)) as snapshot:
        tasks = _create_tasks(store, snapshot, recipe, targets, parent)
        recorded_reports = look_up_reports(tune_one, tasks, store)
        unrecorded_tasks = [task for task, report in zip(tasks, recorded_reports, strict=True) if report is None]
        progress = _GateProgress(on_progress, len(tasks))
        tasks_with_queries = _add_queries(store, snapshot, unrecorded_tasks, job_settings, progress, parent)
        task_by_index = {task.index: task for task in tasks_with_queries}
        tasks = [task_by_index.get(task.index, task) for task in tasks]
        task_settings = _set_worker_count(job_settings, tasks, draft)
        reports = run_job(
            "tune", tune_one, tasks, task_settings, progress, _estimate_seconds, recorded_reports=recorded_reports
        )
    results = {task.index: report for task, report in zip(tasks, reports, strict=True)}
    return [with_tuning(index, results[index.name]) if index.name in results else index for index in built_indexes]


def _create_tasks(
    store: Store,
    snapshot: Snapshot,
    recipe: GateRecipe,
    targets: Mapping[str, float | None],
    parent: Content | None = None,
) -> list[MeasureTask]:
    content = snapshot.manifest.content
    content_ref = store.blobs.put_bytes(json.dumps(content.to_json()).encode())
    return [
        MeasureTask(
            content_ref,
            name,
            recipe,
            content.files[content.index_file(name)].size,
            target_recall=target_recall,
            initial_parameters=_get_search_parameters(parent, name),
        )
        for name, target_recall in targets.items()
    ]


def _get_search_parameters(parent: Content | None, index_name: str) -> tuple[tuple[str, int], ...]:
    """Return the search parameters of the parent's index, or () if the parent has no such index."""
    search_parameters = parent.indexes.get(index_name, {}).get("search") if parent else None
    return tuple((name, value) for name, value in (search_parameters or {}).items() if type(value) is int and value > 0)


class _GateProgress:
    """Shows the progress of two jobs, over parts and then over indexes, as one sequence."""

    def __init__(self, on_progress: OnProgress | None, n_indexes: int) -> None:
        self.n_parts, self._n_indexes, self._on_progress = 0, n_indexes, on_progress

    def show_parts(self, done: int, _: int) -> None:
        """Report that `done` parts were searched."""
        if self._on_progress:
            self._on_progress(done, self.n_parts + self._n_indexes)

    def __call__(self, done: int, _: int) -> None:
        """Report that all parts were searched, and `done` indexes were measured."""
        if self._on_progress:
            self._on_progress(self.n_parts + done, self.n_parts + self._n_indexes)


def _add_queries(
    store: Store,
    snapshot: Snapshot,
    tasks: Sequence[MeasureTask],
    job_settings: JobSettings,
    progress: _GateProgress,
    parent: Content | None,
) -> list[MeasureTask]:
    """Return the tasks with a sample of queries, and with exact neighbours if the index is over
    vectors.
    """
    content = snapshot.manifest.content
    representations = [content.representation_of(task.index) for task in tasks]
    if not tasks or not snapshot.n:
        return list(tasks)
    recipe, task_settings = tasks[0].recipe, job_settings.for_tasks(PROCESS_BYTES + 4 * BLOCK_BYTES)
    previous_sample = _find_previous_sample(store, parent, recipe)
    sample = _sample_queries(snapshot, recipe, task_settings, previous_sample)
    sample_blob = store.blobs.put_bytes(json.dumps(asdict(sample)).encode())
    queries_by_representation = {
        representation: _store_queries(store, snapshot, recipe, representation, sample)
        for representation in dict.fromkeys(representations)
        if content.kind_of(representation) == "vectors"
    }
    tasks_by_representation = {
        representation: _create_neighbor_tasks(store, snapshot, recipe, representation, queries_ref, parent)
        for representation, queries_ref in queries_by_representation.items()
    }
    all_tasks = [task for part_tasks in tasks_by_representation.values() for task in part_tasks]
    progress.n_parts = len(all_tasks)
    job_arguments = all_tasks, task_settings, progress.show_parts, _estimate_scan_seconds
    reports = iter(run_job(NEIGHBORS, find_neighbors, *job_arguments, memoised=True))
    neighbors_by_representation = {
        representation: _merge_neighbors(
            store, snapshot, queries_by_representation[representation], [next(reports) for _ in part_tasks], recipe.k
        )
        for representation, part_tasks in tasks_by_representation.items()
    }
    return [
        replace(task, sample=sample_blob, neighbors=neighbors_by_representation.get(representation))
        for task, representation in zip(tasks, representations, strict=True)
    ]


def _find_previous_sample(store: Store, parent: Content | None, recipe: GateRecipe) -> QuerySample | None:
    """Return the sample of queries that the parent's gate used; None if that gate had another
    recipe, or if the sample is not recorded.
    """
    representations = dict.fromkeys(map(parent.representation_of, parent.indexes)) if parent else {}
    for representation in representations:
        record = _find_query_record(store, parent, recipe, representation)
        if record and (sample_ref := record.outputs.get(_SAMPLE)):
            return QuerySample(**json.loads(store.blobs.read(sample_ref)))
    return None


def _sample_queries(
    snapshot: Snapshot, recipe: GateRecipe, job_settings: JobSettings, previous_sample: QuerySample | None
) -> QuerySample:
    """Sample sentences of a snapshot as queries; workers rank the passages to choose from."""
    files = snapshot.manifest.content.files
    tasks = [
        SampleTask(
            files[passages_path(part.name)],
            part.rows,
            count_candidates(recipe.queries, part.rows, snapshot.n),
            recipe.seed,
        )
        for part in snapshot.parts
    ]
    reports = run_job(
        "sample", rank_part, tasks, job_settings, None, lambda task: task.row_count / _RANKED_PER_SECOND, memoised=True
    )
    candidates = [(np.array(report["keys"], np.uint64), np.array(report["rows"], np.int64)) for report in reports]
    return read_sample(snapshot, choose_sample_rows(snapshot, recipe.queries, candidates), recipe.seed, previous_sample)


def _store_queries(
    store: Store, snapshot: Snapshot, recipe: GateRecipe, representation: str, sample: QuerySample
) -> BlobRef:
    """Encode the queries, unless the memo has their vectors, and return the file of vectors.

    `gc` keeps this file and that of the sample only while a snapshot has all passages and vectors
    of the corpus that the queries come from. So no old sentence remains of a page that was taken
    down, or that was edited so little that its vectors did not change.
    """
    inputs = _list_query_inputs(snapshot.manifest.content, recipe, representation)

    def produce(workdir: Path) -> StageResult:
        np.save(workdir / "queries.npy", encode_queries(snapshot, sample.sentences, representation))
        (workdir / "sample.json").write_text(json.dumps(asdict(sample)), encoding="utf-8")
        output_paths = {"queries": workdir / "queries.npy", _SAMPLE: workdir / "sample.json"}
        return StageResult(output_paths, {TARGET_KEY: inputs["files"]})

    return store.memo.get_or_create(QUERIES, inputs, produce)[0].outputs["queries"]


def _find_query_record(store: Store, content: Content | None, recipe: GateRecipe, representation: str) -> Record | None:
    """Return the record of `_store_queries` for a snapshot, if there is one."""
    if content is None:
        return None
    return store.memo.find(QUERIES, store.memo.compute_key(_list_query_inputs(content, recipe, representation)))


def _list_query_inputs(content: Content, recipe: GateRecipe, representation: str) -> dict[str, Any]:
    """Return the inputs that determine the queries of a snapshot over one representation."""
    encoder_path = question_encoder_path(representation)
    input_paths = [passages_path(part.name) for part in content.parts]
    input_paths += [content.rows_path(representation, part.name) for part in content.parts]
    input_paths += sorted(path for path in content.files if path.startswith(f"{encoder_path}/"))
    return {
        "files": [content.files[path].id for path in input_paths if path in content.files],
        "questions": [recipe.queries, recipe.seed],
        "code": _SAMPLE_CODE,
    }


def _create_neighbor_tasks(
    store: Store,
    snapshot: Snapshot,
    recipe: GateRecipe,
    representation: str,
    queries: BlobRef,
    parent: Content | None,
) -> list[NeighborTask]:
    """Return a task for each part that has rows."""
    content, page_ranges = snapshot.manifest.content, PageRanges(parent.parts if parent else ())
    record = _find_query_record(store, parent, recipe, representation)
    parent_queries = record.outputs["queries"] if record else None
    metric = get_index_metric(content.indexes, representation)
    tasks = []
    for part in snapshot.parts:
        if part.rows:
            rows_ref = content.files[content.rows_path(representation, part.name)]
            parent_rows = tuple(
                parent.files[path]
                for _, parent_part in page_ranges.find_overlapping(part.first_page, part.last_page)
                if parent is not None and (path := parent.rows_path(representation, parent_part.name)) in parent.files
            )
            tasks.append(NeighborTask(rows_ref, part.rows, queries, metric, 2 * recipe.k, parent_rows, parent_queries))
    return tasks


def _merge_neighbors(store: Store, snapshot: Snapshot, queries: BlobRef, reports: Sequence[Report], k: int) -> BlobRef:
    """Merge the neighbours of all parts, one part at a time, and store them with the queries.

    There are 2 * k neighbours per query, to detect ties at rank k.
    """
    vectors, depth = _read_queries(store, queries), min(2 * k, snapshot.n)
    scores, best_rows = np.empty((len(vectors), 0), np.float32), np.empty((len(vectors), 0), np.int64)
    first_row = 0
    for part, report in zip((part for part in snapshot.parts if part.rows), reports, strict=True):
        neighbors = _read_neighbors(store, BlobRef.from_json(report))
        all_scores = np.hstack([scores, neighbors.scores])  # (queries, neighbours so far)
        all_rows = np.hstack([best_rows, np.where(neighbors.rows < 0, -1, neighbors.rows + first_row)])
        scores, best_rows = select_top_k(all_scores, all_rows, depth)
        first_row += part.rows
    file = io.BytesIO()
    np.savez(file, vectors=vectors, scores=scores, rows=best_rows)
    return store.blobs.put_bytes(file.getvalue())


def _set_worker_count(job_settings: JobSettings, tasks: Sequence[MeasureTask], content: Content) -> JobSettings:
    """Return the settings with as many local workers as fit in memory.

    A task needs memory for the largest index, because a search may read the whole file, and for
    the posting lists that a search decodes.
    """
    postings_suffix = f".{PostingsKind.suffix}"
    index_bytes = [
        task.file_bytes
        + content.index_file(task.index).endswith(postings_suffix)
        * estimate_decoded_bytes(content.n, task.file_bytes, SMALL_CACHE_POSTINGS)
        for task in tasks
    ]
    return job_settings.for_tasks(PROCESS_BYTES + max(index_bytes, default=0))


def _estimate_seconds(task: MeasureTask) -> float:
    return task.file_bytes / _MEASURED_BYTES_PER_SECOND
