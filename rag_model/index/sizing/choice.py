"""Choose an index for limited memory: more cells, smaller vectors, then shorter codes.

A recipe that names its structure keeps it; if it cannot fit, it is refused with a structure that would. A recipe that
leaves it open gets the best that fits: a graph over float32, float16 or 8-bit vectors, then lists of codes.
"""

from collections.abc import Iterator
from dataclasses import replace

from rag_model.errors import ResourceError
from rag_model.index.factory import Graph, parse
from rag_model.index.recipe import LINKS, PQ_SAMPLE, IndexRecipe, VectorPlan, lists_in, resolve
from rag_model.index.sizing.amounts import gigabytes
from rag_model.index.sizing.estimate import Estimate, estimate

_STORAGES = ("", "_SQfp16", "_SQ8")  # of a graph; then codes of d/4, d/8, d/16 bytes, and RaBitQ
_SHORTER = (8, 16)  # dimensions per byte
_FINER = (2, 4, 8)  # times the default number of cells: smaller cells lose recall and save no memory
_LESS = (2, 3, 4)  # divisors of the training sample
_LEAST_POINTS = 10  # training points per centroid: with fewer, some lists are random


def choose(recipe: IndexRecipe, n: int, d: int, memory_bytes: int, part_rows: int | None = None) -> VectorPlan:
    """Return the plan of the best structure whose build and search both fit; the recipe's own factory is not read.

    Raises:
        ResourceError: none fits; the message names the memory that the smallest needs.
    """
    plans = [_adjusted(other, n, d, memory_bytes, part_rows) for other in _ladder(recipe, d)]
    for plan, cost in plans:
        if cost.needed_bytes(serving=True) <= memory_bytes:
            return plan
    raise ResourceError(
        f"no index of {n:,} vectors of {d} dimensions fits {gigabytes(memory_bytes)} of memory: "
        f"the smallest needs {gigabytes(min(cost.needed_bytes(serving=True) for _, cost in plans))}"
    )


def fitted(
    recipe: IndexRecipe, n: int, d: int, memory_bytes: int, part_rows: int | None = None, *, serving: bool = False
) -> VectorPlan:
    """Return the recipe's plan, with more cells if a cell's graph would not fit.

    Args:
        recipe: what to build.
        n: vectors.
        d: dimensions.
        memory_bytes: memory of one machine for the largest stage of the build.
        part_rows: rows of the largest part; None: the default size of a part.
        serving: whether the finished index must fit as well; not needed if it is searched elsewhere.

    Raises:
        ResourceError: it does not fit; the message gives the memory needed and a factory string that would fit.
    """
    plan, cost = _adjusted(recipe, n, d, memory_bytes, part_rows)
    if cost.needed_bytes(serving=serving) <= memory_bytes:
        return plan
    unlike = (other for other in _ladder(recipe, d) if other.factory != recipe.factory)
    others = (_adjusted(other, n, d, memory_bytes, part_rows) for other in unlike)
    fitting = (f"use {other.factory}" for other, less in others if less.needed_bytes(serving=serving) <= memory_bytes)
    what, needed = ("build", cost.build_bytes) if cost.build_bytes > memory_bytes else ("search", cost.search_bytes)
    raise ResourceError(
        f"{plan.factory} over {n:,} vectors of {d} dimensions needs {gigabytes(needed)} of memory to {what}, and "
        f"{gigabytes(memory_bytes)} are free: "
        + next(fitting, "no index of this many vectors would fit: use a larger machine")
    )


def _adjusted(
    recipe: IndexRecipe, n: int, d: int, memory_bytes: int, part_rows: int | None
) -> tuple[VectorPlan, Estimate]:
    """Return the first plan of a recipe whose build fits, and its cost; if none fits, the smallest."""
    tried = [(plan, estimate(plan, part_rows)) for plan in _plans(recipe, resolve(recipe, n, d))]
    return min(tried, key=lambda one: max(memory_bytes, one[1].build_bytes))


def _plans(recipe: IndexRecipe, plan: VectorPlan) -> Iterator[VectorPlan]:
    """Yield the plan, then variants with more cells or a smaller sample, unless the recipe sets these numbers."""
    yield plan
    for times in _FINER if plan.kind == "hnsw" and recipe.cells is None else ():
        finer = resolve(replace(recipe, cells=times * plan.cells), plan.n, plan.d)
        yield _noted(finer, f"{finer.cells} cells, so that one cell's graph fits in memory")
    for share in _LESS if plan.kind == "ivf" and recipe.train_sample is None else ():
        sample = plan.train_sample // share
        if sample >= max(PQ_SAMPLE, _LEAST_POINTS * lists_in(plan)):
            less = replace(plan, train_sample=sample)
            yield _noted(less, f"trained on {sample:,} vectors, so that they fit in memory")


def _noted(plan: VectorPlan, note: str) -> VectorPlan:
    return replace(plan, notes=(*plan.notes, note))


def _ladder(recipe: IndexRecipe, d: int) -> Iterator[IndexRecipe]:
    """Yield the recipe with each factory in turn, the best first; a graph keeps its links and cells."""
    asked = parse(recipe.factory)
    links = asked.links if isinstance(asked, Graph) and asked.links else LINKS
    for storage in _STORAGES:
        yield replace(recipe, factory=f"HNSW{links}{storage}", train_sample=None, search={})
    codes = [f"OPQ{d // share}_{d // share * 4},IVF,PQ{d // share}np" for share in _SHORTER if d // share]
    for factory in ("IVF,PQ", *codes, "IVF,RaBitQ"):
        yield replace(recipe, factory=factory, cells=None, train_sample=None, search={})
