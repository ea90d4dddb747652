"""Estimate the cost of an index before any work starts, and fit it into memory: memory of each stage, bytes on disk.

The figures come from the plan alone. A build that will not fit is refused at once, with a factory string that would
fit, instead of being killed after hours. A recipe that names its structure keeps it, with more cells or a smaller
training sample. A recipe that leaves it open gets the best that fits: a graph over float32, float16 or 8-bit vectors,
then lists of codes.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from rag_model.errors import ResourceError
from rag_model.index.factory import Lists, parse
from rag_model.index.files.engine import FaissIndex, faiss, metric_code
from rag_model.index.files.intake import PART_BYTES
from rag_model.index.files.vectors import BLOCK_BYTES
from rag_model.index.graphs.cells import sample_size
from rag_model.index.lists.ivf import BLOCK_BYTES as LIST_BLOCK
from rag_model.index.lists.training import lists_of
from rag_model.index.recipe import LINKS, MERGE_THREADS, PQ_SAMPLE, IndexRecipe, VectorPlan, lists_in, resolve
from rag_model.index.sizing.amounts import gigabytes

PROCESS = 192 << 20  # Python, numpy and faiss, for any n
_LINK = 8  # bytes of a link with its similarity, in a shard
_UNEVEN = 2.0  # assumed size of the largest cell, as a multiple of the mean: splitting keeps it below
_LEAST_POINTS = 10  # training points per centroid: with fewer, some lists are random

Sums = tuple[int, float, dict[str, float]]  # bytes of the index, of the pieces on disk, and memory by stage


@dataclass(frozen=True, slots=True)
class Estimate:
    """The cost of an index, in bytes."""

    stages: Mapping[str, int]  # memory of one task of each stage: train, scatter, shard, merge
    search_bytes: int  # memory when every page of the index has been read
    disk_bytes: int  # the finished index file
    work_bytes: int  # disk during the build, without the vectors: pieces, and twice the file

    def needed_bytes(self, *, serving: bool = False) -> int:
        """Return the memory of a machine that builds the index, a task at a time, and with `serving` searches it."""
        return max(*self.stages.values(), self.search_bytes if serving else 0)


def estimate(plan: VectorPlan, part_rows: int | None = None) -> Estimate:
    """Estimate the cost of a plan. Disk is exact to one or two percent; memory is an upper bound.

    `part_rows` are the rows of the largest part; None: the default size of a part.
    """
    rows = min(plan.n, part_rows or max(1, PART_BYTES // (4 * plan.d)))
    empty = faiss.index_factory(plan.d, plan.factory, metric_code(plan.metric))
    size, pieces, stages = (_graph if plan.kind == "hnsw" else _lists)(plan, empty, rows)
    held = {stage: round(amount) + PROCESS for stage, amount in stages.items()}
    return Estimate(held, size + PROCESS, size, round(pieces) + 2 * size)


def _graph(plan: VectorPlan, empty: FaissIndex, part_rows: int) -> Sums:
    vector, links = 4 * plan.d, int(empty.hnsw.nb_neighbors(1))
    copies = 1 + plan.border + plan.linked  # of a vector, in all cells
    built = 2 * vector + _node_bytes(links) + 2 * links * _LINK  # of a vector in a shard
    stages = {
        "train": 3 * vector * max(sample_size(plan), 0 if empty.storage.is_trained else plan.train_sample),
        "scatter": part_rows * vector * (4 + copies),  # mapped, read, compared, in the file's dtype; as slices
        "shard": copies * built * min(plan.n, _UNEVEN * plan.n / plan.cells),
        # of a row in the merge: its level, the walk's parent and front; its place in each cell; each thread's mark
        "merge": plan.n * (12 + 8 * copies + MERGE_THREADS) + plan.n / links * built + 2 * BLOCK_BYTES,
    }
    size = round(plan.n * (int(empty.storage.sa_code_size()) + _node_bytes(links)))
    return size, plan.n * copies * (vector + 4 + 2 * links * _LINK), stages


def _lists(plan: VectorPlan, empty: FaissIndex, part_rows: int) -> Sums:
    asked, vector = parse(plan.factory), 4 * plan.d
    trained, code, row = 0.0, 0, vector
    if isinstance(asked, Lists):
        lists: FaissIndex = lists_of(empty)
        width, code = 4 * int(lists.d), int(lists.code_size) + 8  # and its id
        row = code + (int(empty.refine_index.sa_code_size()) if isinstance(empty, faiss.IndexRefine) else 0)
        trained += int(lists.nlist) * (width + 8 + (_node_bytes(asked.coarse) if asked.coarse else 0))
        trained += (width << asked.codes.bits) * (asked.codes.name == "PQ") + width * plan.d * bool(asked.rotation)
    stages = {
        "train": 3 * vector * plan.train_sample + trained,  # the sample, rotated, and its residuals
        "scatter": trained + 3 * BLOCK_BYTES + 3 * part_rows * code,
        "merge": 2 * trained + 3 * LIST_BLOCK + BLOCK_BYTES,
    }
    return round(trained) + plan.n * row, plan.n * (code + 4) + trained, stages


def _node_bytes(links: int) -> float:
    """Return a graph node's bytes: 2M links at the bottom, M on 1/(M-1) further levels, its level, its offset."""
    return 4 * (2 * links + links / (links - 1)) + 4 + 8


def fitted(
    recipes: Sequence[IndexRecipe], n: int, d: int, memory: int, part_rows: int | None = None, *, serving: bool = False
) -> VectorPlan:
    """Return the plan of the first recipe that fits, if necessary with more cells, or trained on fewer vectors.

    Args:
        recipes: one, or the `ladder` of one.
        n: vectors.
        d: dimensions.
        memory: bytes of one machine, for the largest stage of the build.
        part_rows: rows of the largest part; None: the default size of a part.
        serving: whether the finished index must fit as well; not needed if it is searched elsewhere.

    Raises:
        ResourceError: none fits; the message gives the memory needed, and of one recipe a factory string that would fit
            unless there is none.
    """
    plans = [plan for recipe in recipes for plan in _plans(recipe, resolve(recipe, n, d))]
    tried = [(plan, estimate(plan, part_rows).needed_bytes(serving=serving)) for plan in plans]
    plan, needed = min(tried, key=lambda one: max(memory, one[1]))  # the first that fits, or the smallest
    if needed <= memory:
        return plan
    work = "build and search" if serving else "build"
    advice = "add memory, since no index is smaller"
    if len(recipes) == 1:
        advice = f"use {fitted([*recipes, *ladder(recipes[0], d)], n, d, memory, part_rows, serving=serving).factory}"
    raise ResourceError(
        f"{plan.factory} over {n:,} vectors of {d} dimensions needs {gigabytes(needed)} of memory to {work}, and "
        f"{gigabytes(memory)} are free: {advice}"
    )


def ladder(recipe: IndexRecipe, d: int) -> list[IndexRecipe]:
    """Return the recipe with other factories for d dimensions, the best first; a graph keeps its links and cells."""
    links = getattr(parse(recipe.factory), "links", None) or LINKS
    graphs = [f"HNSW{links}{storage}" for storage in ("", "_SQfp16", "_SQ8")]
    codes = [f"OPQ{d // share}_{d // share * 4},IVF,PQ{d // share}np" for share in (8, 16) if d // share]
    factories = [*graphs, "IVF,PQ", *codes, "IVF,RaBitQ"]  # codes of d/4, d/8, d/16 bytes, and of a bit per dimension
    return [replace(recipe, factory=factory, train_sample=None, search={}) for factory in factories]


def _plans(recipe: IndexRecipe, plan: VectorPlan) -> Iterator[VectorPlan]:
    """Yield the plan, then smaller ones, as far as the recipe leaves the number of cells and the sample open."""
    yield plan
    least = min(plan.train_sample, max(PQ_SAMPLE, _LEAST_POINTS * lists_in(plan)))
    for times in (2, 4, 8):  # as many cells, or as few vectors to train on: both lose recall
        sample = recipe.train_sample or max(least, plan.train_sample // times)
        less = resolve(replace(recipe, cells=recipe.cells or times * plan.cells, train_sample=sample), plan.n, plan.d)
        changed = f"{less.cells:,} cells" if less.shards else f"trained on {less.train_sample:,} vectors"
        yield replace(less, notes=(*less.notes, f"{changed}, so that the build fits in memory"))
