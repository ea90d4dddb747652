"""What an index will cost, known before any work starts: memory to build, memory to search, bytes on disk.

The figures come from the plan alone. A build that will not fit is refused at once, with a factory string that
would fit, rather than after hours by the kernel.
"""

from dataclasses import dataclass, replace

from rag_model.errors import ResourceError
from rag_model.index.engine import faiss, metric_code
from rag_model.index.factory import Graph, Lists, parse
from rag_model.index.recipe import IndexPlan, IndexRecipe, resolve
from rag_model.index.vectors import BLOCK_BYTES

PROCESS = 192 << 20  # Python, numpy, faiss and a stage's blocks: there at any n
_HEADER = 512  # of a file: what does not grow with anything
_ID = 8  # bytes of an id in a list
_ROW = 40  # a row's place in cells, walk and visited tables while graphs are merged


@dataclass(frozen=True, slots=True)
class Estimate:
    """Bytes, each for one process."""

    build_bytes: int  # memory of the largest stage: training, the largest shard or the merge
    search_bytes: int  # memory once every page of the index has been touched
    disk_bytes: int  # the finished index file


def estimate(plan: IndexPlan) -> Estimate:
    """Estimate what a plan costs. Disk is exact to a percent or two; memory is a bound to plan by."""
    size = _index_bytes(plan)
    stages = (_train_bytes(plan), _shard_bytes(plan, size), _merge_bytes(plan, size))
    return Estimate(build_bytes=max(stages) + PROCESS, search_bytes=size + PROCESS, disk_bytes=size)


def check_fits(plan: IndexPlan, memory_bytes: int) -> Estimate:
    """Return a plan's estimate if its build fits `memory_bytes` of memory.

    Raises:
        ResourceError: it does not; the sentence holds the memory needed and a factory string that would fit.
    """
    needed = estimate(plan)
    if needed.build_bytes <= memory_bytes:
        return needed
    fitting = _that_fits(plan, memory_bytes)
    advice = f"use {fitting}" if fitting else "no index of so many vectors would fit: use a larger machine"
    subject = f"{plan.factory} over {plan.n:,} vectors of {plan.d} dimensions"
    raise ResourceError(
        f"{subject} needs {_gigabytes(needed.build_bytes)} of memory to build, "
        f"and {_gigabytes(memory_bytes)} are free: {advice}"
    )


def _that_fits(plan: IndexPlan, memory_bytes: int) -> str | None:
    """Return the factory string of the best index that fits: graphs first, then ever shorter codes."""
    for factory in _smaller(plan):
        other = resolve(IndexRecipe(factory, plan.metric, seed=plan.seed), plan.n, plan.d)
        if estimate(other).build_bytes <= memory_bytes:
            return other.factory
    return None


def _smaller(plan: IndexPlan) -> list[str]:
    graph = parse(plan.factory)
    graphs = []
    if isinstance(graph, Graph):
        graphs = [str(replace(graph, storage=storage)) for storage in ("SQfp16", "SQ8")]
    pieces = [plan.d // share for share in (4, 8, 16) if plan.d // share]
    return [*graphs, "IVF,PQ", *(f"OPQ{m}_{4 * m},IVF,PQ{m}np" for m in pieces), "IVF,RaBitQ"]


def _index_bytes(plan: IndexPlan) -> int:
    factory = parse(plan.factory)
    index = faiss.index_factory(plan.d, plan.factory, metric_code(plan.metric))
    if isinstance(factory, Graph):
        code = int(index.storage.sa_code_size())
        return _HEADER + round(plan.n * (code + _graph_bytes(factory.links or 0)))
    if isinstance(factory, Lists):
        return _lists_bytes(plan, factory, index)
    return _HEADER + plan.n * int(index.sa_code_size())


def _graph_bytes(links: int) -> float:
    """Return a node's bytes: 2M links at the bottom, M on 1/(M-1) further levels, its level, its offset."""
    return 4 * (2 * links + links / (links - 1)) + 4 + 8


def _lists_bytes(plan: IndexPlan, factory: Lists, index: object) -> int:
    lists = faiss.downcast_index(faiss.extract_index_ivf(index))
    width, count = int(lists.d), int(lists.nlist)
    centroid = 4 * width + (_graph_bytes(factory.coarse) if factory.coarse else 0)
    pieces = 4 * width << factory.codes.bits if factory.codes.name == "PQ" else 0
    rotation = 4 * width * plan.d if factory.rotation is not None else 0
    centroids = round(count * (centroid + 8))
    return _HEADER + plan.n * (int(lists.code_size) + _ID) + centroids + pieces + rotation


def _train_bytes(plan: IndexPlan) -> int:
    sample = 4 * plan.d * plan.train_sample
    if plan.kind == "ivf":
        return 3 * sample  # the sample, its rotation, and the residuals that the codes are trained on
    return 2_000 * plan.cells * 4 * plan.d if plan.cells > 1 else 0


def _shard_bytes(plan: IndexPlan, size: int) -> int:
    if plan.kind != "hnsw":
        return 2 * BLOCK_BYTES + size  # a single part may be the whole corpus
    if plan.cells == 1:
        return size + plan.n * 4 * plan.d + plan.n * _ROW  # faiss copies the vectors that it is given
    largest = min(plan.n, 3 * -(-plan.n // plan.cells))  # cells are uneven, and borders come twice
    graph = parse(plan.factory)
    links = graph.links or 0 if isinstance(graph, Graph) else 0
    return largest * (2 * 4 * plan.d + 3 * round(_graph_bytes(links)))


def _merge_bytes(plan: IndexPlan, size: int) -> int:
    if plan.kind != "hnsw":
        return 2 * size  # lists double their room as they grow, or one shard holds nearly all of it
    return size + plan.n * _ROW if plan.cells > 1 else size


def _gigabytes(count: int) -> str:
    return f"{count / 1e9:,.1f} GB"
