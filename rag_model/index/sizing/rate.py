"""How long a build will take here: a small one is timed on this machine, and each of its stages extrapolated.

The small build is real, of the plan's own factory and dimensions, over synthetic vectors. What it says of a large one
is an estimate: real vectors are harder or easier, and other machines slower or faster.

* A graph's insertion costs more in a larger graph. One is grown for a few seconds, and what its last doubling added to
  the cost of an insertion, a power of the nodes, is taken to go on.
* Training and assignment to centroids are products of matrices, whose rate is measured apart.
* All else grows with the vectors.
"""

import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from time import process_time

import numpy as np

from rag_model.index.factory import Graph, Lists, parse
from rag_model.index.files.engine import Vectors, faiss
from rag_model.index.files.pieces import opener
from rag_model.index.graphs.cells import sample_size
from rag_model.index.graphs.graph import new_graph
from rag_model.index.recipe import PQ_SAMPLE, IndexRecipe, VectorPlan, lists_in, resolve
from rag_model.index.registry import kind_named

_SMALL = 4_000  # vectors of the small build
_CELLS = 4
_LISTS = 64
_GROWN = 64_000  # nodes of the largest graph that is grown
_SECONDS = 2.0  # processor time after which it has grown enough
_POWERS = (0.2, 0.5)  # within which the cost's power of the nodes is believed: the first where memory is slow anyway
_OPQ = 1.6  # times a quantizer's training: ten rounds of four iterations, where the quantizer has 25
_LOOKED_UP = 0.3  # power of the centroids with which finding the nearest by their graph grows
_ROUNDS = 10  # of k-means
_INTRINSIC = 24  # dimensions that synthetic vectors mostly lie in, as sentences' do


@dataclass(frozen=True, slots=True)
class Insertion:
    """What it costs to add a node to a graph."""

    nodes: int  # of the graph
    seconds: float  # of one core, for a node then
    power: float  # of the nodes, with which it grows

    def mean(self, nodes: float) -> float:
        """Return the seconds a node, mean over a graph that grows from nothing to so many."""
        return self.seconds * float((nodes / self.nodes) ** self.power) / (1 + self.power)


@dataclass(frozen=True, slots=True)
class Rate:
    """What this machine did."""

    plan: VectorPlan  # of the small build
    seconds: Mapping[str, float]  # of one core, by stage
    products: float  # multiplications and additions a second, of one core
    insertion: Insertion | None  # into a graph, if the plan has one


def measure_rate(plan: VectorPlan) -> Rate:
    """Time a small build like `plan` here, on one thread; takes a few seconds."""
    with _one_thread():
        small = _small(plan)
        return Rate(small, _timed(small), _products(), _grown(plan) if plan.kind == "hnsw" else None)


def cpu_seconds(plan: VectorPlan, rate: Rate) -> dict[str, float]:
    """Return the seconds of one core that each stage of a plan is likely to take, by stage."""
    if rate.insertion is not None:
        return _graph_seconds(plan, rate, rate.insertion)
    small, spent, lists = rate.plan, rate.seconds, lists_in(plan)
    times = plan.n / small.n
    codes = min(plan.train_sample, PQ_SAMPLE) / small.train_sample
    if "OPQ" in plan.factory:
        codes *= 1 + _OPQ
    looked_up = (lists / lists_in(small)) ** _LOOKED_UP if _coarse(plan) else 1.0
    compared = 0.0 if _coarse(plan) or lists == 1 else 2.0 * plan.n * lists * plan.d
    return {
        "train": spent["train"] * codes + _kmeans(plan, plan.train_sample, lists) / rate.products,
        "scatter": spent["scatter"] * times * looked_up + compared / rate.products,
        "merge": spent["merge"] * times,
    }


def _graph_seconds(plan: VectorPlan, rate: Rate, insertion: Insertion) -> dict[str, float]:
    small, spent = rate.plan, rate.seconds
    times = plan.n / small.n
    nodes, grown = (_members(one) / one.cells for one in (plan, small))
    beside = spent["shard"] / (_members(small) * insertion.mean(grown))  # with crossings and export
    return {
        "train": spent["train"] + _kmeans(plan, sample_size(plan), plan.cells) / rate.products,
        "scatter": spent["scatter"] * times + 2.0 * plan.n * plan.cells * plan.d / rate.products,
        "shard": _members(plan) * insertion.mean(nodes) * max(1.0, beside),
        "merge": spent["merge"] * times ** (1 + insertion.power / 2),  # about half of it links the upper levels
    }


def _members(plan: VectorPlan) -> float:
    return plan.n * (1 + plan.border)


def synthetic(n: int, d: int, seed: int = 1) -> Vectors:
    """Return (n, d) float32 unit vectors that mostly lie in a few dimensions, as those of texts do."""
    plane = np.random.default_rng(0).standard_normal((_INTRINSIC, d), np.float32)
    draw = np.random.default_rng(seed).standard_normal
    vectors = draw((n, _INTRINSIC), np.float32) @ plane + 0.3 * draw((n, d), np.float32)
    unit: Vectors = (vectors / np.linalg.norm(vectors, axis=1, keepdims=True)).astype(np.float32)
    return unit


def _small(plan: VectorPlan) -> VectorPlan:
    factory = parse(plan.factory)
    if isinstance(factory, Lists):
        factory = replace(factory, rotation=None, lists=min(_LISTS, factory.lists or 1))
    recipe = IndexRecipe(str(factory), plan.metric, plan.ef_construction, _CELLS if plan.cells > 1 else 1)
    recipe = replace(recipe, border=plan.border, linked=plan.linked, train_sample=_SMALL // 2)
    return resolve(recipe, min(_SMALL, plan.n), plan.d)


def _grown(plan: VectorPlan) -> Insertion:
    """Grow a graph by doublings; return what an insertion cost in the last one."""
    factory, most = parse(plan.factory), int(min(_GROWN, _members(plan) / plan.cells))
    links = (factory.links or 0) if isinstance(factory, Graph) else 0
    graph = new_graph(plan.d, links, plan.metric, plan.ef_construction)
    costs, nodes, started = [0.0], 0, process_time()
    for size in (min(most, _GROWN >> halved) for halved in range(6, -1, -1)):
        block, before = synthetic(size - nodes, plan.d, seed=size), process_time()
        if not len(block):
            break
        graph.add(block)
        costs.append((process_time() - before) / len(block))
        nodes = size
        if process_time() - started > _SECONDS:
            break
    least, largest = _POWERS
    power = float(np.log2(costs[-1] / costs[-2])) if costs[-2] > 0 else largest
    return Insertion(nodes, costs[-1], min(largest, max(least, power)))


def _timed(plan: VectorPlan) -> dict[str, float]:
    """Build `plan` over synthetic vectors; return the processor time of each stage."""
    builder, seconds = kind_named(plan.kind), dict[str, float]()

    @contextmanager
    def timed(stage: str) -> Iterator[None]:
        started = process_time()
        yield
        seconds[stage] = process_time() - started

    with tempfile.TemporaryDirectory(prefix="bookwheel-rate-") as folder:
        vectors, trained, piece = (Path(folder) / name for name in ("vectors.npy", "trained", "scattered"))
        np.save(vectors, synthetic(plan.n, plan.d), allow_pickle=False)
        with timed("train"):
            builder.train(plan, [vectors], trained)
        with timed("scatter"):
            builder.scatter(plan, trained, vectors, 0, piece)
        shards = [Path(folder) / f"shard-{number}" for number in range(plan.shards)]
        with timed("shard"):
            for number, shard in enumerate(shards):
                builder.shard(plan, trained, [opener(piece)], number, shard)
        with timed("merge"):
            pieces = [opener(piece)], [opener(shard) for shard in shards]
            builder.merge(plan, trained, [vectors], *pieces, Path(folder) / "index")
    return seconds


def _products(size: int = 1024) -> float:
    """Return the multiplications and additions a second of one core, in products of matrices as faiss takes them."""
    vectors = synthetic(size, size)
    started, repeats = process_time(), 0
    while process_time() - started < 0.2:  # seconds
        faiss.knn(vectors, vectors, 1)
        repeats += 1
    return 2.0 * size**3 * repeats / (process_time() - started)


def _kmeans(plan: VectorPlan, sample: int, centroids: int) -> float:
    """Return the multiplications and additions of a k-means."""
    return 2.0 * _ROUNDS * sample * centroids * plan.d if centroids > 1 else 0.0


def _coarse(plan: VectorPlan) -> bool:
    """Whether the nearest centroids are found by a graph."""
    factory = parse(plan.factory)
    return isinstance(factory, Lists) and factory.coarse is not None


@contextmanager
def _one_thread() -> Iterator[None]:
    threads = faiss.omp_get_max_threads()
    faiss.omp_set_num_threads(1)
    try:
        yield
    finally:
        faiss.omp_set_num_threads(threads)
