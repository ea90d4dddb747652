"""Estimate the time of a build: each kind says how long its stages take, and this machine's speed is measured.

The result is an estimate: real vectors are harder or easier, and other machines slower or faster.
"""

from time import process_time

import numpy as np

from rag_model.index.files.engine import Vectors, faiss
from rag_model.index.plan import IndexPlan
from rag_model.index.recipe import IndexRecipe, VectorPlan, resolve
from rag_model.index.registry import kind_named

_SMALL = IndexRecipe("HNSW32"), 8_000  # the graph whose build is timed, and its vectors
_INTRINSIC = 24  # dimensions that synthetic vectors mostly lie in, like those of sentences


def stage_seconds(plan: IndexPlan, row_bytes: int) -> dict[str, float]:
    """Return the seconds of one core by stage, as the plan's kind says, for rows of `row_bytes` bytes in a file."""
    tasks = {"train": 1, "scatter": 1, "shard": plan.shards, "merge": 1}
    seconds = kind_named(plan.kind).seconds
    return {stage: n * seconds(plan, stage, plan.n // n, plan.n * row_bytes) for stage, n in tasks.items() if n}


def measured_seconds(plan: VectorPlan) -> tuple[VectorPlan, dict[str, float]]:
    """Return the plan of a small graph that was built here, on one thread, and the seconds of `plan` at its speed."""
    small, threads = resolve(*_SMALL, plan.d), faiss.omp_get_max_threads()
    graph, vectors = faiss.index_factory(plan.d, small.factory), synthetic(small.n, plan.d)
    graph.hnsw.efConstruction = small.ef_construction
    faiss.omp_set_num_threads(1)
    began = process_time()
    graph.add(vectors)
    slower = (process_time() - began) / stage_seconds(small, 0)["shard"]
    faiss.omp_set_num_threads(threads)
    return small, {stage: slower * said for stage, said in stage_seconds(plan, 2 * plan.d).items()}


def synthetic(n: int, d: int, seed: int = 1) -> Vectors:
    """Return (n, d) float32 unit vectors that mostly lie in a few dimensions, like those of texts."""
    plane = np.random.default_rng(0).standard_normal((_INTRINSIC, d), np.float32)
    draw = np.random.default_rng(seed).standard_normal
    vectors = draw((n, _INTRINSIC), np.float32) @ plane + 0.3 * draw((n, d), np.float32)  # (n, i) @ (i, d) -> (n, d)
    unit: Vectors = (vectors / np.linalg.norm(vectors, axis=1, keepdims=True)).astype(np.float32)
    return unit
