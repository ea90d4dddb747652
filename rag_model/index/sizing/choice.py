"""Choose an index for limited memory: more cells, smaller vectors, then shorter codes.

A recipe that names its structure keeps it; if it cannot fit, it is refused with a structure that would. A recipe that
leaves it open gets the best that fits: a graph over float32, float16 or 8-bit vectors, then lists of codes.
"""

from collections.abc import Iterable, Iterator
from dataclasses import replace

from rag_model.errors import ResourceError
from rag_model.index.factory import Graph, parse
from rag_model.index.recipe import LINKS, PQ_SAMPLE, IndexRecipe, VectorPlan, lists_in, resolve
from rag_model.index.sizing.amounts import gigabytes
from rag_model.index.sizing.estimate import estimate

_LESS = (2, 4, 8)  # times as many cells, or as few vectors to train on: both lose recall
_LEAST_POINTS = 10  # training points per centroid: with fewer, some lists are random


def choose(
    recipe: IndexRecipe, n: int, d: int, memory_bytes: int, part_rows: int | None = None, *, serving: bool = True
) -> VectorPlan:
    """Return the plan of the best structure that fits; the recipe's own factory is not read. Arguments as of `fitted`.

    Raises:
        ResourceError: none fits; the message names the memory that the smallest needs.
    """
    plan, needed = _best(_ladder(recipe, d), n, d, memory_bytes, part_rows, serving=serving)
    if needed <= memory_bytes:
        return plan
    raise ResourceError(
        f"no index of {n:,} vectors of {d} dimensions fits {gigabytes(memory_bytes)} of memory: "
        f"the smallest needs {gigabytes(needed)}"
    )


def fitted(
    recipe: IndexRecipe, n: int, d: int, memory_bytes: int, part_rows: int | None = None, *, serving: bool = False
) -> VectorPlan:
    """Return the recipe's plan; if it would not fit, with more cells, or trained on fewer vectors.

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
    plan, needed = _best([recipe], n, d, memory_bytes, part_rows, serving=serving)
    if needed <= memory_bytes:
        return plan
    other = choose(recipe, n, d, memory_bytes, part_rows, serving=serving)
    raise ResourceError(
        f"{plan.factory} over {n:,} vectors of {d} dimensions needs {gigabytes(needed)} of memory to build"
        f"{' and search' if serving else ''}, and {gigabytes(memory_bytes)} are free: use {other.factory}"
    )


def _best(
    recipes: Iterable[IndexRecipe], n: int, d: int, memory_bytes: int, part_rows: int | None, *, serving: bool
) -> tuple[VectorPlan, int]:
    """Return the first plan of the recipes that fits, or the smallest, and the memory that it needs."""
    plans = (plan for recipe in recipes for plan in _plans(recipe, resolve(recipe, n, d)))
    tried = ((plan, estimate(plan, part_rows).needed_bytes(serving=serving)) for plan in plans)
    return min(tried, key=lambda one: max(memory_bytes, one[1]))


def _plans(recipe: IndexRecipe, plan: VectorPlan) -> Iterator[VectorPlan]:
    """Yield the plan, then smaller ones, as far as the recipe leaves the number of cells and the sample open."""
    yield plan
    least = min(plan.train_sample, max(PQ_SAMPLE, _LEAST_POINTS * lists_in(plan)))
    for times in _LESS:
        sample = recipe.train_sample or max(least, plan.train_sample // times)
        less = resolve(replace(recipe, cells=recipe.cells or times * plan.cells, train_sample=sample), plan.n, plan.d)
        changed = f"{less.cells:,} cells" if less.shards else f"trained on {less.train_sample:,} vectors"
        yield replace(less, notes=(*less.notes, f"{changed}, so that the build fits in memory"))


def _ladder(recipe: IndexRecipe, d: int) -> Iterator[IndexRecipe]:
    """Yield the recipe with each factory in turn, the best first; a graph keeps its links and cells."""
    asked = parse(recipe.factory)
    links = asked.links if isinstance(asked, Graph) and asked.links else LINKS
    for storage in ("", "_SQfp16", "_SQ8"):
        yield replace(recipe, factory=f"HNSW{links}{storage}", train_sample=None, search={})
    codes = [f"OPQ{d // share}_{d // share * 4},IVF,PQ{d // share}np" for share in (8, 16) if d // share]
    for factory in ("IVF,PQ", *codes, "IVF,RaBitQ"):  # of d/4, d/8, d/16 bytes, and of a bit per dimension
        yield replace(recipe, factory=factory, cells=None, train_sample=None, search={})
