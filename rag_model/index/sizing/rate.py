"""Estimate the time of a build: two small builds are timed on this machine, and each stage is extrapolated.

The small builds are real, with the plan's factory and dimensions, over synthetic vectors. The extrapolation is an
estimate: real vectors are harder or easier, and other machines slower or faster.

* An insertion into a larger graph costs more: a power of the nodes, measured between the two builds.
* Training and assignment to centroids are products of matrices, whose rate is measured separately.
* Codes of a product quantizer are trained piece by piece: one piece is, on as many vectors as in the build.
* Everything else grows linearly with the vectors.
"""

import math
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from time import process_time

import numpy as np

from rag_model.index.factory import Lists, parse
from rag_model.index.files.engine import Vectors, faiss
from rag_model.index.files.pieces import opener
from rag_model.index.graphs.cells import sample_size
from rag_model.index.recipe import PQ_SAMPLE, IndexRecipe, VectorPlan, lists_in, resolve
from rag_model.index.registry import kind_named

_SIZES = (2_000, 8_000)  # vectors of the small builds
_SAMPLE = 2_000  # of them, to train codes
_CELLS, _LISTS = 4, 64  # of a small build
_POWERS = (0.2, 0.55)  # bounds of the measured power: up to 64,000 nodes it was .31 at 96 dimensions, .55 at 768
_LOOKED_UP = 0.3  # the cost of the graph over the centroids grows with this power of their number
_POINTS = 256  # training points of a quantizer per centroid, at most
_OPQ = 4.8  # factor on a quantizer's training: 4.7 to 5.0 at 96 and 384 dimensions
_ROUNDS = 10  # of k-means
_INTRINSIC = 24  # dimensions that synthetic vectors mostly lie in, like those of sentences


@dataclass(frozen=True, slots=True)
class Rate:
    """The measured speed of this machine."""

    plan: VectorPlan  # of the larger small build
    seconds: Mapping[str, float]  # of one core, by stage
    products: float  # multiplications and additions per second, of one core
    power: float  # an insertion's cost grows with this power of the nodes
    piece: float = 0.0  # seconds of one core to train one piece of the plan's product quantizer; 0: it has none


def measure_rate(plan: VectorPlan) -> Rate:
    """Time small builds like `plan` here, on one thread; takes a few seconds."""
    threads = faiss.omp_get_max_threads()
    faiss.omp_set_num_threads(1)
    try:
        few, more = (_small(plan, min(size, plan.n)) for size in _SIZES)
        before, after = _timed(few), _timed(more)
        dearer = after.get("shard", 0.0) / more.n / max(before.get("shard", 0.0) / few.n, 1e-9)
        power = math.log(max(dearer, 1e-9)) / math.log(_SIZES[1] / _SIZES[0])
        return Rate(more, after, _products(), min(max(power, _POWERS[0]), _POWERS[1]), _piece(plan))
    finally:
        faiss.omp_set_num_threads(threads)


def cpu_seconds(plan: VectorPlan, rate: Rate) -> dict[str, float]:
    """Estimate the seconds of one core by stage of a plan."""
    small, factory, graph = rate.plan, parse(plan.factory), plan.kind == "hnsw"
    centroids, few = (one.cells if graph else lists_in(one) for one in (plan, small))
    sample = sample_size(plan) if graph else plan.train_sample
    times, larger = plan.n / small.n, (plan.n / plan.cells) / (small.n / small.cells)
    by_graph = isinstance(factory, Lists) and factory.coarse is not None  # the nearest centroid is found by a graph
    compared = 2.0 * plan.d * centroids / rate.products if centroids > 1 else 0.0  # seconds per vector
    factors = {
        "train": 1.0 if graph else min(sample, PQ_SAMPLE) / small.train_sample,
        "scatter": times * ((centroids / few) ** _LOOKED_UP if by_graph else 1.0),
        "shard": times * larger**rate.power,
        "merge": times * (times ** (rate.power / 2) if graph else 1.0),  # linking the upper levels is about half of it
    }
    products = {"train": _ROUNDS * sample * compared, "scatter": 0.0 if by_graph else plan.n * compared}
    seconds = {stage: spent * factors[stage] for stage, spent in rate.seconds.items()}
    if isinstance(factory, Lists) and factory.codes.pieces:
        seconds["train"] = factory.codes.pieces * rate.piece * (_OPQ if "OPQ" in plan.factory else 1.0)
    return {stage: spent + products.get(stage, 0.0) for stage, spent in seconds.items()}


def synthetic(n: int, d: int, seed: int = 1) -> Vectors:
    """Return (n, d) float32 unit vectors that mostly lie in a few dimensions, like those of texts."""
    plane = np.random.default_rng(0).standard_normal((_INTRINSIC, d), np.float32)
    draw = np.random.default_rng(seed).standard_normal
    vectors = draw((n, _INTRINSIC), np.float32) @ plane + 0.3 * draw((n, d), np.float32)  # (n, i) @ (i, d) -> (n, d)
    unit: Vectors = (vectors / np.linalg.norm(vectors, axis=1, keepdims=True)).astype(np.float32)
    return unit


def _small(plan: VectorPlan, n: int) -> VectorPlan:
    """Return a plan of `n` vectors with the structure of `plan`, in few cells or lists, and without rotation."""
    factory = parse(plan.factory)
    if isinstance(factory, Lists):
        factory = replace(factory, rotation=None, lists=min(_LISTS, factory.lists or 1))
    recipe = IndexRecipe(str(factory), plan.metric, plan.ef_construction, _CELLS if plan.cells > 1 else 1)
    return resolve(replace(recipe, border=plan.border, linked=plan.linked, train_sample=_SAMPLE), n, plan.d)


def _timed(plan: VectorPlan) -> dict[str, float]:
    """Build `plan` over synthetic vectors; return the processor time of each stage."""
    builder, seconds = kind_named(plan.kind), dict[str, float]()
    with tempfile.TemporaryDirectory(prefix="bookwheel-rate-") as name:
        vectors, trained, piece, out = (Path(name) / file for file in ("vectors.npy", "trained", "scattered", "index"))
        shards = [Path(name) / f"shard-{number}" for number in range(plan.shards)]
        np.save(vectors, synthetic(plan.n, plan.d), allow_pickle=False)
        stages: dict[str, Callable[[], object]] = {
            "train": lambda: builder.train(plan, [vectors], trained),
            "scatter": lambda: builder.scatter(plan, trained, vectors, 0, piece),
            "shard": lambda: [builder.shard(plan, trained, [opener(piece)], *one) for one in enumerate(shards)],
            "merge": lambda: builder.merge(plan, trained, [vectors], [opener(piece)], [*map(opener, shards)], out),
        }
        for stage, run in stages.items():
            started = process_time()
            run()
            seconds[stage] = process_time() - started
    return {stage: spent for stage, spent in seconds.items() if shards or stage != "shard"}


def _piece(plan: VectorPlan) -> float:
    """Return the seconds of one core to train one piece of the plan's product quantizer; 0 if it has none.

    On as many vectors as in the build: faiss 1.15 takes 12 times as long a vector for fewer than 128,000 numbers.
    """
    factory = parse(plan.factory)
    if not isinstance(factory, Lists) or not factory.codes.pieces:
        return 0.0
    codes, width = factory.codes, factory.code_dim(plan.d) // factory.codes.pieces
    quantizer = faiss.ProductQuantizer(width, 1, codes.bits)
    quantizer.cp.min_points_per_centroid = 1  # faiss would print a warning
    vectors = synthetic(min(plan.train_sample, _POINTS << codes.bits), width)
    started = process_time()
    quantizer.train(vectors)
    return process_time() - started


def _products(size: int = 1024) -> float:
    """Return the multiplications and additions per second of one core, in faiss's matrix products."""
    vectors = synthetic(size, size)
    started, repeats = process_time(), 0
    while process_time() - started < 0.2:  # seconds
        faiss.knn(vectors, vectors, 1)
        repeats += 1
    return 2.0 * size**3 * repeats / (process_time() - started)
