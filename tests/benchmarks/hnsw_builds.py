"""HNSW indexes built in one shot by faiss and cell by cell, every stage in a new process.

Every process has one thread, because a shard's bytes are reproducible only with one, and because the CPU seconds of
threads that wait for each other would favour the build with fewer threads. Reading the vectors and writing the file
count on both sides.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
from isolated_run import WorkCost, run_alone
from recall_curves import compare_curves, interpolate_recall

from rag_model.index.build import iter_slices
from rag_model.index.exact_search import ExactIndex
from rag_model.index.files import engine
from rag_model.index.files.engine import Metric, Vectors, faiss
from rag_model.index.files.pieces import path_opener
from rag_model.index.kind import get_kind
from rag_model.index.plan import IndexStats
from rag_model.index.quality.results import OperatingPoint, Recalls, compute_recall
from rag_model.index.quality.sweep import VectorQuerySet
from rag_model.index.recipe import VectorPlan
from rag_model.index.search import FaissFileIndex, open_index

STEPS = (32, 45, 64, 90, 128, 181, 256, 362, 512)  # efSearch
MERGE_ROOM_MB = 128  # memory that a merge may hold beside the graph
Report = dict[str, Any]
Work = tuple[VectorPlan, Sequence[Path]]  # the plan of the index, and the vectors
Run = Callable[..., WorkCost]


@dataclass(frozen=True, slots=True)
class Build:
    """A finished index file and the costs of its stages."""

    path: Path
    stages: dict[str, list[WorkCost]]  # in order; the tasks of one stage can run in parallel

    @property
    def cpu_seconds(self) -> float:
        """Return the CPU seconds of all stages."""
        return sum(cost.cpu_seconds for stage in self.stages.values() for cost in stage)

    @property
    def critical_seconds(self) -> float:
        """Return the CPU seconds of the critical path, with a worker for every part and every cell."""
        return sum(max(cost.cpu_seconds for cost in stage) for stage in self.stages.values())

    def report(self) -> Report:
        """Return the figures as JSON values."""
        return {
            "cpu_s": round(self.cpu_seconds, 2),
            "critical_s": round(self.critical_seconds, 2),
            "index_mb": _megabytes(self.path),
            "stages": {name: _stage_report(stage) for name, stage in self.stages.items()},
        }


def _stage_report(stage: Sequence[WorkCost]) -> Report:
    return {
        "runs": len(stage),
        "cpu_s": round(sum(cost.cpu_seconds for cost in stage), 2),
        "largest_cpu_s": round(max(cost.cpu_seconds for cost in stage), 2),
        "seconds": round(sum(cost.seconds for cost in stage), 2),
        "anonymous_mb": round(max(cost.anonymous_mb for cost in stage)),
        "started_mb": round(max(cost.started_mb for cost in stage)),
    }


def one_shot(plan: VectorPlan, parts: Sequence[Path], out: Path) -> Build:
    """Build a plan's factory with bare faiss: every vector added to one index."""
    arguments = (plan.factory, plan.metric, plan.ef_construction, parts, out)
    return Build(out, {"build": [run_alone(_one_shot, *arguments)]})


def _one_shot(factory: str, metric: Metric, ef_construction: int, parts: Sequence[Path], out: Path) -> None:
    vectors = np.concatenate([np.load(part) for part in parts])
    index = faiss.index_factory(vectors.shape[1], factory, engine.to_faiss_metric(metric))
    index.hnsw.efConstruction = ef_construction
    if not index.is_trained:
        index.train(vectors[np.random.default_rng(0).permutation(len(vectors))[:65_536]])
    index.add(vectors)
    faiss.write_index(index, str(out))


def by_cells(plan: VectorPlan, parts: Sequence[Path], folder: Path, run: Run = run_alone) -> Build:
    """Build a plan stage by stage, as the jobs do; `run` runs a task in a new process."""
    folder.mkdir(parents=True, exist_ok=True)
    structure, trained, out = get_kind(plan.kind), folder / "trained", folder / "index.faiss"
    scattered = [folder / f"scattered-{number:05d}" for number in range(len(parts))]
    shards = [folder / f"shard-{number:05d}" for number in range(plan.shards)]
    pieces = [path_opener(path) for path in scattered]
    stages = {"train": [run(structure.train, plan, parts, trained)]}
    stages["scatter"] = [
        run(structure.scatter, plan, trained, part, number, scattered[number]) for number, part in enumerate(parts)
    ]
    stages["shard"] = [run(shard, plan, trained, scattered, number, path) for number, path in enumerate(shards)]
    merge = run(structure.merge, plan, trained, parts, pieces, [path_opener(path) for path in shards], out)
    return Build(out, stages | {"merge": [merge]})


def shard(plan: VectorPlan, trained: Path, scattered: Sequence[Path], number: int, out: Path) -> IndexStats:
    """Build a shard from its slices of all pieces."""
    return get_kind(plan.kind).shard(plan, trained, iter_slices(scattered, plan.shards, number), number, out)


def both(works: dict[str, Work], folder: Path, jobs: int) -> dict[str, Build]:
    """Build the first work in one shot and every work by cells, `jobs` at a time; return the builds by name."""
    with ThreadPoolExecutor(jobs) as pool:
        single = pool.submit(one_shot, *next(iter(works.values())), folder / "one_shot.faiss")
        ours = {name: pool.submit(by_cells, plan, parts, folder / name) for name, (plan, parts) in works.items()}
        return {"one_shot": single.result()} | {name: build.result() for name, build in ours.items()}


def trial_of(parts: Sequence[Path], metric: Metric, questions: Vectors, k: int) -> VectorQuerySet:
    """Return questions with their true neighbours, in a form that can be pickled."""
    return replace(VectorQuerySet.from_exact_search(ExactIndex(parts, metric), questions, k), compute_score=None)


@dataclass(frozen=True, slots=True)
class Quality:
    """The recall of an index, and properties of its graph."""

    curve: list[OperatingPoint]
    # The same points, with the mean of the worst twentieth of the questions in place of the 5th percentile.
    worst: list[OperatingPoint]
    unreachable: int  # nodes without a path from the entry point on the bottom level
    degree: float  # mean, on the bottom level

    def report(self) -> Report:
        """Return the figures as JSON; a point is [efSearch, distances, recall: mean, 5th percentile, worst 5 %]."""
        points = [
            [e.setting, round(e.distances), *(round(x, 4) for x in (e.recall_mean, e.recall_p5, w.recall_p5))]
            for e, w in zip(self.curve, self.worst, strict=True)
        ]
        return {"unreachable": self.unreachable, "degree": round(self.degree, 2), "curve": points}


def quality(path: Path, trial: VectorQuerySet) -> Quality:
    """Measure an index file; if it has more dimensions than the questions, they are padded with zeros."""
    index = open_index(path)
    wider = np.pad(trial.vectors, ((0, 0), (0, index.dim - trial.vectors.shape[1])))
    trial = replace(trial, vectors=wider)
    measurements = [_effort(index, trial, step) for step in STEPS]
    return Quality(
        [effort for effort, _ in measurements], [replace(e, recall_p5=worst) for e, worst in measurements], *_walk(path)
    )


def _effort(index: FaissFileIndex, trial: VectorQuerySet, ef_search: int) -> tuple[OperatingPoint, float]:
    """Return one point, and the mean recall of the worst twentieth of the questions."""
    faiss.cvar.hnsw_stats.reset()
    start = perf_counter()
    hit_rows = index.search(trial.vectors, trial.k, efSearch=ef_search)[1]
    seconds, distances = perf_counter() - start, faiss.cvar.hnsw_stats.ndis
    recalls = np.sort(compute_recall(hit_rows, trial.rows, trial.scores, trial.k))
    n_questions = len(recalls)
    effort = OperatingPoint(
        setting=f"efSearch={ef_search}",
        recall_mean=float(recalls.mean()),
        recall_p5=_percentile5(recalls, trial.k),
        milliseconds=1000 * seconds / n_questions,
        distances=distances / n_questions,
    )
    return effort, float(recalls[: max(1, n_questions // 20)].mean())


def _percentile5(recalls: Recalls, k: int) -> float:
    """Return the 5th percentile of grouped data: a recall of j/k represents [(j - 1/2)/k, (j + 1/2)/k].

    Recall@20 comes in steps of .05. A plain percentile moves by a whole step or not at all, so two equally good builds
    can differ by .05.
    """
    values, counts = np.unique(recalls, return_counts=True)
    ends, rank = np.cumsum(counts), 0.05 * len(recalls)
    position = int(np.searchsorted(ends, rank))
    within = (rank - (ends[position] - counts[position])) / counts[position]
    return min(1.0, float(values[position] + (within - 0.5) / k))


def _walk(path: Path) -> tuple[int, float]:
    """Return the number of unreachable nodes and the mean degree, by faiss and numpy alone, without our own code."""
    index = faiss.read_index(str(path), faiss.IO_FLAG_MMAP_IFC)
    width = index.hnsw.nb_neighbors(0)
    starts = faiss.rev_swig_ptr(index.hnsw.offsets.data(), index.ntotal).astype(np.int64)
    neighbors = faiss.rev_swig_ptr(index.hnsw.neighbors.data(), index.hnsw.neighbors.size())
    links = neighbors[starts[:, None] + np.arange(width)]
    is_reached = np.zeros(index.ntotal, bool)
    front = np.array([index.hnsw.entry_point])
    while len(front):
        is_reached[front] = True
        next_nodes = np.unique(links[front])
        front = next_nodes[(next_nodes >= 0) & ~is_reached[next_nodes]]
    return int((~is_reached).sum()), float((links >= 0).sum(axis=1).mean())


def qualities(builds: dict[str, Build], trial: VectorQuerySet, threads: int) -> dict[str, Quality]:
    """Measure every build in a new process."""
    return {name: run_alone(quality, build.path, trial, threads=threads).value for name, build in builds.items()}


def against(name: str, builds: dict[str, Build], quality_by_name: dict[str, Quality], plan: VectorPlan) -> Report:
    """Return the ratios and shortfalls of one of our builds against the one-shot build; 1 and 0 mean equally good."""
    ours, single = builds[name], builds["one_shot"]
    merge = ours.stages["merge"][0]
    graph = _megabytes(ours.path) - plan.n * _code_bytes(plan) / 1e6
    our_quality, single_quality = quality_by_name[name], quality_by_name["one_shot"]
    return {
        "cpu_ratio": round(ours.cpu_seconds / single.cpu_seconds, 3),
        "critical_ratio": round(ours.critical_seconds / single.cpu_seconds, 3),
        "shortfall_mean": round(compare_curves(our_quality.curve, single_quality.curve), 4),
        "shortfall_p5": round(compare_curves(our_quality.curve, single_quality.curve, "recall_p5"), 4),
        "shortfall_worst": round(compare_curves(our_quality.worst, single_quality.worst, "recall_p5"), 4),
        "unreachable": our_quality.unreachable,
        "merge_anonymous_mb": round(merge.anonymous_mb),
        "graph_mb": round(graph),
        "merge_within": merge.anonymous_mb <= graph + MERGE_ROOM_MB,
        "shards": plan.shards,
        "largest_shard": max(facts.get("rows", 0) for facts in (s.value for s in ours.stages["shard"])) / plan.n,
    }


def at_equal_distances(
    quality_by_name: dict[str, Quality], distance_counts: Sequence[int] = (1_000, 2_000, 4_000)
) -> Report:
    """Return each build's mean recall at numbers of distance computations; None where its curve does not reach."""
    return {
        name: {str(x): _recall(build_quality.curve, x) for x in distance_counts}
        for name, build_quality in quality_by_name.items()
    }


def _recall(curve: Sequence[OperatingPoint], distances: int) -> float | None:
    within = min(e.distances for e in curve) <= distances <= max(e.distances for e in curve)
    return round(interpolate_recall(curve, distances), 4) if within else None


def _code_bytes(plan: VectorPlan) -> int:
    index = faiss.index_factory(plan.d, plan.factory, engine.to_faiss_metric(plan.metric))
    return int(index.storage.sa_code_size())


def _megabytes(path: Path) -> float:
    return path.stat().st_size / 1e6
