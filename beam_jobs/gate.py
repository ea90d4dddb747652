"""The jobs of the gate: workers search exact neighbours of sampled queries, and measure indexes.

One task searches one part for the exact neighbours, and one task measures one index. The launcher
samples and encodes the queries and merges the parts' neighbours, so it reads neither an index nor a
part's vectors. The job `tune` sets search parameters in the same way.
"""

import io
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from beam_jobs.job import run_job
from beam_jobs.launch import Launch, OnProgress, Report
from beam_jobs.tasks import look_up_reports
from rag_model.evaluation.gate import GateRecipe
from rag_model.index.exact_search import ExactIndex, compute_exact_scores, select_top_k
from rag_model.index.files.engine import Metric, Rows, Vectors
from rag_model.index.files.vectors import BLOCK_BYTES
from rag_model.index.kind import IndexMeasurement
from rag_model.index.quality.results import (
    PROCESS_BYTES,
    GraphStats,
    IndexHealth,
    ListStats,
    OperatingPoint,
)
from rag_model.index.quality.sweep import VectorQuerySet
from rag_model.resources import CORE_FLOPS
from rag_model.retrieve.indexes import index_metric, open_vector_rows
from rag_model.snapshots.measure import (
    AnyTrial,
    TuneTask,
    cache_query_sets,
    encode_vector_queries,
    measure_index,
    tune_index,
)
from rag_model.store.objects.blobs import BlobRef
from rag_model.store.objects.memo import StageResult
from rag_model.store.store import Store
from rag_model.store.versions.manifest import Content, Manifest
from rag_model.store.versions.snapshot import Snapshot

_MEASURED_BYTES_PER_SECOND = 5e7  # bytes of an index, which is searched with several settings
_NEIGHBORS_CODE = 1  # increase it when the same vectors and queries would give other neighbours


@dataclass(frozen=True, slots=True)
class NeighborTask:
    """A part to search for the exact neighbours of queries."""

    rows: BlobRef  # the part's vectors
    row_count: int
    queries: BlobRef  # .npy of (q, d) float32
    metric: Metric
    depth: int  # neighbours per query


def find_neighbors(task: NeighborTask, store: Store) -> Report:
    """Find the best rows of one part for each query, unless recorded; row 0 is the part's first."""

    def produce(workdir: Path) -> StageResult:
        index, queries = ExactIndex([store.blobs.get_local_path(task.rows)], task.metric), _read_array(store, task)
        scores, rows = index.search(queries, min(task.depth, index.n))
        with (workdir / "neighbors").open("wb") as file:
            np.savez(file, scores=scores, rows=rows)
        return StageResult({"neighbors": workdir / "neighbors"}, {})

    inputs = {
        "vectors": task.rows.id,
        "queries": task.queries.id,
        "metric": task.metric,
        "depth": task.depth,
        "code": _NEIGHBORS_CODE,
    }
    return store.memo.get_or_create("neighbors", inputs, produce)[0].outputs["neighbors"].to_json()


def _read_array(store: Store, task: NeighborTask) -> Vectors:
    queries: Vectors = np.load(io.BytesIO(store.blobs.read(task.queries)), allow_pickle=False)
    return queries


def _estimate_scan_seconds(task: NeighborTask) -> float:
    # An inner product takes two operations for each of a query's values, which have 4 bytes each.
    return task.queries.size / 2 * task.row_count / CORE_FLOPS


@dataclass(frozen=True, slots=True)
class MeasureTask:
    """An index to measure, or to tune, with sampled queries."""

    content: BlobRef  # JSON of the snapshot's content, whose manifest may not exist yet
    index: str
    k: int
    queries: int
    seed: int
    file_bytes: int  # size of the index
    # The queries with their exact neighbours. None if the representation is not vectors: the worker
    # samples the queries itself, with a sample of passages as reference.
    neighbors: BlobRef | None = None
    target: float | None = None  # recall to tune for; None: only measure

    @property
    def recipe(self) -> GateRecipe:
        """The sample of queries, as the samplers take it."""
        return GateRecipe(k=self.k, queries=self.queries, seed=self.seed)


def measure_one(task: MeasureTask, store: Store) -> Report:
    """Measure one index at several settings, and examine its file."""
    with _open_snapshot(store, task.content) as snapshot:
        representation = snapshot.manifest.content.representation_of(task.index)
        query_set = _open_query_set(store, snapshot, task, representation)
        return measurement_to_json(measure_index(snapshot, task.index, query_set))


def tune_one(task: MeasureTask, store: Store) -> Report:
    """Find the search parameters of one index for its recall target, unless recorded."""
    with _open_snapshot(store, task.content) as snapshot:
        content = snapshot.manifest.content
        blob, target = content.files[content.index_file(task.index)], float(task.target or 0)
        inputs = TuneTask(task.index, blob, target, task.k, task.queries, task.seed)
        return tune_index(store, snapshot, inputs, partial(_open_query_set, store, snapshot, task))


def _open_snapshot(store: Store, content: BlobRef) -> Snapshot:
    return Snapshot.from_manifest(store, Manifest(Content.from_json(json.loads(store.blobs.read(content)))))


def _open_query_set(store: Store, snapshot: Snapshot, task: MeasureTask, representation: str) -> AnyTrial:
    if task.neighbors is None:
        return cache_query_sets(snapshot, task.recipe)(representation)
    with np.load(io.BytesIO(store.blobs.read(task.neighbors)), allow_pickle=False) as arrays:
        vectors, scores, rows = arrays["vectors"], arrays["scores"], arrays["rows"]

    def score(queries: Rows, candidate_rows: Rows) -> Vectors:
        # Called if more rows than the neighbours have equal scores, as in a corpus of equal
        # passages.
        metric = index_metric(snapshot.manifest.content.indexes, representation)
        stored_vectors = open_vector_rows(snapshot, representation)
        return compute_exact_scores(stored_vectors, metric, vectors[queries], candidate_rows)

    return VectorQuerySet(vectors, min(task.k, snapshot.n), scores, rows, score)


def measure_indexes(
    store: Store, launch: Launch, on_progress: OnProgress | None, snapshot: Snapshot, recipe: GateRecipe
) -> dict[str, IndexMeasurement]:
    """Measure all indexes of a snapshot on workers; return the measurements by index.

    Raises:
        BookwheelError: as for `run_job`.
    """
    names = [*snapshot.manifest.content.indexes]
    tasks = _create_tasks(store, snapshot, recipe, dict.fromkeys(names))
    progress = _Progress(on_progress, len(tasks))
    tasks = _with_neighbors(store, snapshot, tasks, launch, progress)
    reports = run_job("gate", measure_one, tasks, _size_launch(launch, tasks), progress, _estimate_measure_seconds)
    return {task.index: measurement_from_json(report) for task, report in zip(tasks, reports, strict=True)}


def tune_indexes(
    store: Store, launch: Launch, on_progress: OnProgress | None, snapshot: Snapshot, targets: Sequence[TuneTask]
) -> list[Report]:
    """Tune indexes on workers; return `tune_index`'s results in order.

    Queries are sampled only for indexes whose parameters are not recorded.

    Raises:
        BookwheelError: as for `run_job`.
    """
    tasks = _create_tasks(store, snapshot, targets[0].recipe, {target.index: target.target for target in targets})
    reports = look_up_reports(tune_one, tasks, store)
    unrecorded = [task for task, report in zip(tasks, reports, strict=True) if report is None]
    progress = _Progress(on_progress, len(tasks))
    complete_tasks = {task.index: task for task in _with_neighbors(store, snapshot, unrecorded, launch, progress)}
    tasks = [complete_tasks.get(task.index, task) for task in tasks]
    sized_launch = _size_launch(launch, tasks)
    return run_job(
        "tune", tune_one, tasks, sized_launch, progress, _estimate_measure_seconds, memoised=True, recorded=reports
    )


def _create_tasks(
    store: Store, snapshot: Snapshot, recipe: GateRecipe, targets: Mapping[str, float | None]
) -> list[MeasureTask]:
    content = snapshot.manifest.content
    blob = store.blobs.put_bytes(json.dumps(content.to_json()).encode())
    return [
        MeasureTask(
            blob,
            name,
            recipe.k,
            recipe.queries,
            recipe.seed,
            content.files[content.index_file(name)].size,
            target=target,
        )
        for name, target in targets.items()
    ]


class _Progress:
    """Shows the progress of two jobs, over parts and then over indexes, as one sequence."""

    def __init__(self, on_progress: OnProgress | None, indexes: int) -> None:
        self.parts, self._indexes, self._on_progress = 0, indexes, on_progress

    def show_parts(self, done: int, _: int) -> None:
        """Report that `done` parts were searched."""
        if self._on_progress:
            self._on_progress(done, self.parts + self._indexes)

    def __call__(self, done: int, _: int) -> None:
        """Report that all parts were searched, and `done` indexes were measured."""
        if self._on_progress:
            self._on_progress(self.parts + done, self.parts + self._indexes)


def _with_neighbors(
    store: Store, snapshot: Snapshot, tasks: Sequence[MeasureTask], launch: Launch, progress: _Progress
) -> list[MeasureTask]:
    """Return the tasks; those of vector indexes with their queries and exact neighbours."""
    content, queries = snapshot.manifest.content, dict[str, Vectors]()
    representations = [content.representation_of(task.index) for task in tasks]
    for task, representation in zip(tasks, representations, strict=True):
        if representation not in queries and content.kind_of(representation) == "vectors":
            queries[representation] = encode_vector_queries(snapshot, task.recipe, representation)
    jobs = {
        name: _create_neighbor_tasks(store, snapshot, name, vectors, tasks[0].k) for name, vectors in queries.items()
    }
    all_tasks = [task for part_tasks in jobs.values() for task in part_tasks]
    progress.parts = len(all_tasks)
    sized_launch = launch.for_tasks(PROCESS_BYTES + 4 * BLOCK_BYTES)
    reports = iter(
        run_job(
            "neighbors",
            find_neighbors,
            all_tasks,
            sized_launch,
            progress.show_parts,
            _estimate_scan_seconds,
            memoised=True,
        )
    )
    blobs = {
        name: _merge_neighbors(store, snapshot, vectors, [next(reports) for _ in jobs[name]], tasks[0].k)
        for name, vectors in queries.items()
    }
    return [
        replace(task, neighbors=blobs.get(representation))
        for task, representation in zip(tasks, representations, strict=True)
    ]


def _compute_neighbor_depth(snapshot: Snapshot, k: int) -> int:
    """Return the number of neighbours per query: twice k, to detect ties at rank k."""
    return min(2 * min(k, snapshot.n), snapshot.n)


def _create_neighbor_tasks(
    store: Store, snapshot: Snapshot, representation: str, queries: Vectors, k: int
) -> list[NeighborTask]:
    """Return a task for each part that has rows."""
    content, file = snapshot.manifest.content, io.BytesIO()
    np.save(file, queries)
    blob, metric = store.blobs.put_bytes(file.getvalue()), index_metric(content.indexes, representation)
    return [
        NeighborTask(
            content.files[content.rows_path(representation, part.name)],
            part.rows,
            blob,
            metric,
            min(_compute_neighbor_depth(snapshot, k), part.rows),
        )
        for part in snapshot.parts
        if part.rows
    ]


def _merge_neighbors(store: Store, snapshot: Snapshot, queries: Vectors, reports: Iterable[Report], k: int) -> BlobRef:
    """Store the queries with their neighbours in all parts; read the neighbours of a part at a
    time.
    """
    scores, rows = np.empty((len(queries), 0), np.float32), np.empty((len(queries), 0), np.int64)
    first_row = 0
    for part, report in zip((part for part in snapshot.parts if part.rows), reports, strict=True):
        with np.load(io.BytesIO(store.blobs.read(BlobRef.from_json(report))), allow_pickle=False) as arrays:
            all_scores = np.hstack([scores, arrays["scores"]])  # (q, j + m)
            all_rows = np.hstack([rows, arrays["rows"] + first_row])
        scores, rows = select_top_k(all_scores, all_rows, _compute_neighbor_depth(snapshot, k))
        first_row += part.rows
    file = io.BytesIO()
    np.savez(file, vectors=queries, scores=scores, rows=rows)
    return store.blobs.put_bytes(file.getvalue())


def _size_launch(launch: Launch, tasks: Sequence[MeasureTask]) -> Launch:
    """Return the launch with memory for the largest index, since a search may read all of its
    pages.
    """
    return launch.for_tasks(PROCESS_BYTES + max((task.file_bytes for task in tasks), default=0))


def _estimate_measure_seconds(task: MeasureTask) -> float:
    return task.file_bytes / _MEASURED_BYTES_PER_SECOND


def measurement_to_json(measurement: IndexMeasurement) -> Report:
    """Return a measurement as JSON values."""
    return {
        **asdict(measurement),
        "recalls": measurement.recalls.tolist(),
        "metrics": {
            name: value if isinstance(value, int) else float(value) for name, value in measurement.metrics.items()
        },
    }


def measurement_from_json(report: Mapping[str, Any]) -> IndexMeasurement:
    """Return the measurement that `measurement_to_json` converted."""
    setting, health = report["setting"], report["health"]
    return IndexMeasurement(
        np.array(report["recalls"], np.float64),
        [OperatingPoint(**point) for point in report["curve"]],
        OperatingPoint(**setting) if setting else None,
        _health_from_json(health) if health else None,
        report["metrics"],
    )


def _health_from_json(values: Mapping[str, Any]) -> IndexHealth:
    graph, lists = values["graph"], values["lists"]
    return IndexHealth(
        values["kind"],
        values["n"],
        GraphStats(**{**graph, "degrees": tuple(graph["degrees"])}) if graph else None,
        ListStats(**{**lists, "sizes": tuple(lists["sizes"])}) if lists else None,
        values["quantization_error"],
    )
