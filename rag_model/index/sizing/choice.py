"""What to build where memory is short: more cells, smaller vectors, then ever shorter codes.

A recipe that names its structure keeps it, and is refused where it cannot fit, with one that would. A recipe that
leaves it open gets the best that fits: a graph over the vectors, over halves or quarters of them, then lists of codes.
"""

from collections.abc import Iterator
from dataclasses import replace

from rag_model.errors import ResourceError
from rag_model.index.factory import Graph, parse
from rag_model.index.recipe import PQ_SAMPLE, IndexRecipe, VectorPlan, lists_in, resolve
from rag_model.index.sizing.amounts import gigabytes
from rag_model.index.sizing.estimate import Estimate, estimate

LADDER = ("HNSW32", "HNSW32_SQfp16", "HNSW32_SQ8", "IVF,PQ")  # then codes of d/8, d/16 bytes, and RaBitQ
_SHORTER = (8, 16)  # dimensions a byte
_FINER = (2, 4, 8)  # times the default number of cells: of a tenth the size a cell costs recall and wins no memory
_LESS = (2, 3, 4)  # parts that a training sample is cut into
_LEAST_POINTS = 10  # that train a centroid: with fewer some lists are chance


def choose(recipe: IndexRecipe, n: int, d: int, memory_bytes: int, part_rows: int | None = None) -> VectorPlan:
    """Return the plan of the best structure whose build and search both fit; the recipe's own factory is not read.

    Raises:
        ResourceError: none fits; the sentence names the smallest and what it needs.
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
    recipe: IndexRecipe,
    n: int,
    d: int,
    memory_bytes: int,
    part_rows: int | None = None,
    *,
    serving: bool = False,
) -> VectorPlan:
    """Return the recipe's plan, cut into more cells where a cell's graph would not fit.

    Args:
        recipe: what to build.
        n: vectors.
        d: dimensions.
        memory_bytes: what one machine has for the largest stage of the build.
        part_rows: of the largest part; None: of one as the tool cuts it.
        serving: whether the finished index must fit as well; where it is searched elsewhere, it need not.

    Raises:
        ResourceError: it does not fit; the sentence holds the memory needed and a factory string that would fit.
    """
    plan, cost = _adjusted(recipe, n, d, memory_bytes, part_rows)
    if cost.needed_bytes(serving=serving) <= memory_bytes:
        return plan
    others = (
        _adjusted(one, n, d, memory_bytes, part_rows) for one in _ladder(recipe, d) if one.factory != recipe.factory
    )
    fitting = (f"use {other.factory}" for other, less in others if less.needed_bytes(serving=serving) <= memory_bytes)
    what, needed = ("build", cost.build_bytes) if cost.build_bytes > memory_bytes else ("search", cost.search_bytes)
    raise ResourceError(
        f"{plan.factory} over {n:,} vectors of {d} dimensions needs {gigabytes(needed)} of memory to {what}, and "
        f"{gigabytes(memory_bytes)} are free: "
        + next(fitting, "no index of so many vectors would fit: use a larger machine")
    )


def _adjusted(
    recipe: IndexRecipe, n: int, d: int, memory_bytes: int, part_rows: int | None
) -> tuple[VectorPlan, Estimate]:
    """Return the first plan of a recipe whose build fits, and what it costs; where none fits, the smallest."""
    plans = _plans(recipe, resolve(recipe, n, d))
    tried = [(plan, estimate(plan, part_rows)) for plan in plans]
    fitting = (one for one in tried if one[1].build_bytes <= memory_bytes)
    return next(fitting, min(tried, key=lambda one: one[1].build_bytes))


def _plans(recipe: IndexRecipe, plan: VectorPlan) -> Iterator[VectorPlan]:
    """Yield the plan, then with more cells or trained on less, unless the recipe names these numbers."""
    yield plan
    if plan.kind == "hnsw" and recipe.cells is None:
        for times in _FINER:
            finer = resolve(replace(recipe, cells=times * plan.cells), plan.n, plan.d)
            yield replace(finer, notes=(*finer.notes, f"{finer.cells} cells, so that one's graph fits in memory"))
    if plan.kind == "ivf" and recipe.train_sample is None:
        least = max(PQ_SAMPLE, _LEAST_POINTS * lists_in(plan))
        for sample in (plan.train_sample // share for share in _LESS):
            if sample >= least:
                note = f"trained on {sample:,} vectors, so that they fit in memory"
                yield replace(plan, train_sample=sample, notes=(*plan.notes, note))


def _ladder(recipe: IndexRecipe, d: int) -> Iterator[IndexRecipe]:
    """Yield the recipe with one factory after another, the best first; a graph's links and cells stay."""
    asked = parse(recipe.factory)
    codes = [f"OPQ{d // share}_{d // share * 4},IVF,PQ{d // share}np" for share in _SHORTER if d // share]
    for factory in map(parse, (*LADDER, *codes, "IVF,RaBitQ")):
        if isinstance(factory, Graph):
            links = asked.links if isinstance(asked, Graph) and asked.links else factory.links
            yield replace(recipe, factory=str(replace(factory, links=links)), train_sample=None, search={})
        else:
            yield replace(recipe, factory=str(factory), cells=None, train_sample=None, search={})
