"""What to build where memory is short: more cells, smaller vectors, then ever shorter codes.

A recipe that names its structure keeps it, and is refused where it cannot fit, with one that would. A recipe that
leaves it open gets the best that fits: a graph over the vectors, over halves or quarters of them, then lists of codes.
"""

from collections.abc import Iterator
from dataclasses import replace

from rag_model.errors import ResourceError
from rag_model.index.factory import Graph, Lists, parse, structure_of
from rag_model.index.recipe import PQ_SAMPLE, IndexRecipe, VectorPlan, resolve
from rag_model.index.sizing.amounts import gigabytes
from rag_model.index.sizing.estimate import Estimate, estimate

LADDER = ("HNSW32", "HNSW32_SQfp16", "HNSW32_SQ8", "IVF,PQ")  # then codes of d/8, d/16 bytes, and RaBitQ
_SHORTER = (8, 16)  # dimensions a byte
_MOST_CELLS = 8  # times the default number: of a tenth the size a cell costs recall and wins no memory
_LEAST_POINTS = 10  # that train a centroid: with fewer some lists are chance


def choose(recipe: IndexRecipe, n: int, d: int, memory_bytes: int, part_rows: int | None = None) -> VectorPlan:
    """Return the plan of the best structure whose build and search both fit; the recipe's own factory is not read.

    Raises:
        ResourceError: none fits; the sentence names the smallest and what it needs.
    """
    plans = [_adjusted(other, n, d, memory_bytes, part_rows) for other in _ladder(recipe, d)]
    for plan in plans:
        if _fits(estimate(plan, part_rows), memory_bytes, serving=True):
            return plan
    least = min((estimate(plan, part_rows) for plan in plans), key=_needed)
    raise ResourceError(
        f"no index of {n:,} vectors of {d} dimensions fits {gigabytes(memory_bytes)} of memory: "
        f"the smallest needs {gigabytes(_needed(least))}"
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
    plan = _adjusted(recipe, n, d, memory_bytes, part_rows)
    cost = estimate(plan, part_rows)
    if _fits(cost, memory_bytes, serving=serving):
        return plan
    what = "search" if cost.build_bytes <= memory_bytes else "build"
    needed = cost.search_bytes if what == "search" else cost.build_bytes
    raise ResourceError(
        f"{plan.factory} over {n:,} vectors of {d} dimensions needs {gigabytes(needed)} of memory to {what}, "
        f"and {gigabytes(memory_bytes)} are free: {_advice(recipe, n, d, memory_bytes, part_rows, serving=serving)}"
    )


def _adjusted(recipe: IndexRecipe, n: int, d: int, memory_bytes: int, part_rows: int | None) -> VectorPlan:
    """Resolve a recipe; where memory is short, cut into more cells or train on less, unless it names these numbers."""
    plan = resolve(recipe, n, d)
    held = estimate(plan, part_rows).stages
    if plan.kind == "hnsw" and recipe.cells is None and held["shard"] > memory_bytes:
        return _finer(recipe, plan, memory_bytes)
    if plan.kind == "ivf" and recipe.train_sample is None and held["train"] > memory_bytes:
        return _trained_on_less(plan, memory_bytes)
    return plan


def _finer(recipe: IndexRecipe, plan: VectorPlan, memory_bytes: int) -> VectorPlan:
    for times in (2, 4, _MOST_CELLS):
        finer = resolve(replace(recipe, cells=times * plan.cells), plan.n, plan.d)
        if estimate(finer).stages["shard"] <= memory_bytes:
            return replace(finer, notes=(*finer.notes, f"{finer.cells} cells, so that one's graph fits in memory"))
    return plan


def _trained_on_less(plan: VectorPlan, memory_bytes: int) -> VectorPlan:
    factory = parse(plan.factory)
    lists = factory.lists or 1 if isinstance(factory, Lists) else 1
    least = max(PQ_SAMPLE, _LEAST_POINTS * lists)
    less = plan
    for sample in (plan.train_sample // share for share in (2, 3, 4)):
        if sample >= least and estimate(less).stages["train"] > memory_bytes:
            note = f"trained on {sample:,} vectors, so that they fit in memory"
            less = replace(plan, train_sample=sample, notes=(*plan.notes, note))
    return less


def _advice(recipe: IndexRecipe, n: int, d: int, memory_bytes: int, part_rows: int | None, *, serving: bool) -> str:
    for other in _ladder(recipe, d):
        plan = _adjusted(other, n, d, memory_bytes, part_rows)
        if other.factory != recipe.factory and _fits(estimate(plan, part_rows), memory_bytes, serving=serving):
            return f"use {plan.factory}"
    return "no index of so many vectors would fit: use a larger machine"


def _ladder(recipe: IndexRecipe, d: int) -> Iterator[IndexRecipe]:
    """Yield the recipe with one factory after another, the best first; a graph's links and cells stay."""
    asked = parse(recipe.factory)
    links = asked.links if isinstance(asked, Graph) else None
    codes = [f"OPQ{d // share}_{d // share * 4},IVF,PQ{d // share}np" for share in _SHORTER if d // share]
    for factory in (*LADDER, *codes, "IVF,RaBitQ"):
        graph = parse(factory)
        if isinstance(graph, Graph) and links:
            factory = str(replace(graph, links=links))  # noqa: PLW2901 - the same rung with the links asked for
        cells = recipe.cells if structure_of(factory) == "hnsw" else None
        yield replace(recipe, factory=factory, cells=cells, train_sample=None, search={})


def _fits(cost: Estimate, memory_bytes: int, *, serving: bool) -> bool:
    return (_needed(cost) if serving else cost.build_bytes) <= memory_bytes


def _needed(cost: Estimate) -> int:
    return max(cost.build_bytes, cost.search_bytes)
