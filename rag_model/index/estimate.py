"""Estimate memory and disk of an index from its plan alone, and fit a recipe into memory.

A build that will not fit is refused at once, with a factory string that would fit, instead of being
killed after hours. A recipe that names a structure keeps it, but may get more cells or a smaller
training sample. For a recipe that names no structure, the first structure that fits is chosen: a
graph over float32, float16 or 8-bit vectors, or else lists of codes.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from rag_model.errors import ResourceError, UsageError
from rag_model.index.factory import FlatSpec, HnswSpec, IvfSpec, parse_factory, with_refinement
from rag_model.index.files.engine import FaissIndex, faiss, to_faiss_metric
from rag_model.index.files.intake import PART_BYTES
from rag_model.index.files.vectors import BLOCK_BYTES
from rag_model.index.graphs.cells import count_cell_sample
from rag_model.index.lists.list_file import BLOCK_BYTES as LIST_BLOCK_BYTES
from rag_model.index.lists.training import get_inverted_lists
from rag_model.index.quality.results import PROCESS_BYTES, ResourceEstimate
from rag_model.index.recipe import (
    DEFAULT_LINKS,
    MERGE_THREADS,
    PQ_SAMPLE,
    IndexRecipe,
    VectorPlan,
    count_lists,
    count_needed_lists,
    resolve,
)
from rag_model.process import format_bytes

_LINK_BYTES = 8  # bytes of a link with its similarity in a shard
_MAX_CELL_RATIO = 2.0  # assumed size of the largest cell divided by the mean; splits keep it lower
_MIN_POINTS_PER_CENTROID = 10  # with fewer training points, some centroids are arbitrary

# The largest recall@20 with each codec: measured over 60,000 passages by searching every list, or
# with 512 candidates of a graph. A search of more lists or candidates does not recover what the
# codes lose. For longer vectors and larger corpora these values are estimates.
_MAX_RECALL_BY_CODES = {
    **{"HNSW Flat": 0.999, "HNSW SQfp16": 0.999, "HNSW SQ8": 0.992, "HNSW SQ6": 0.958, "HNSW SQ4": 0.84},
    "HNSW Refine(vectors)": 0.998,
    **{"SQ8": 0.993, "SQfp16": 0.999, "Flat": 1.0, "RaBitQ4": 0.939},
    **{"PQ by 4": 0.87, "PQ by 8": 0.81, "PQ by 16": 0.60, "RaBitQ": 0.65},
    "Refine(vectors)": 0.99,
}
# (a, b): with 1 bit per dimension, 200 candidates miss about a * n**b of the 20 nearest among n
# passages. Measured: .0027 among 60,000, .006 among 250,000, and .008 among 946,599.
_LOSS_OF_ONE_BIT = (3.7e-5, 0.396)

# Bytes of the index, bytes of the pieces on disk, and bytes of memory by stage.
SizeEstimate = tuple[int, float, dict[str, float]]


def estimate_resources(plan: VectorPlan, part_rows: int | None = None) -> ResourceEstimate:
    """Estimate the resources of a plan: disk space to within two percent, and an upper bound of
    memory.

    `part_rows` is the number of rows of the largest part; None assumes the default size of a part.
    """
    n_rows = min(plan.n, part_rows or max(1, PART_BYTES // (4 * plan.d)))
    empty_index = faiss.index_factory(plan.d, plan.factory, to_faiss_metric(plan.metric))
    estimate_size = _estimate_graph_size if plan.kind == "hnsw" else _estimate_ivf_size
    size, piece_bytes, stage_bytes = estimate_size(plan, empty_index, n_rows)
    stage_memory = {stage: round(n_bytes) + PROCESS_BYTES for stage, n_bytes in stage_bytes.items()}
    return ResourceEstimate(stage_memory, size + PROCESS_BYTES, size, round(piece_bytes) + 2 * size)


def _estimate_graph_size(plan: VectorPlan, index: FaissIndex, part_rows: int) -> SizeEstimate:
    vector_bytes, n_links = 4 * plan.d, int(index.hnsw.nb_neighbors(1))
    n_copies = 1 + plan.border + plan.linked  # mean number of copies of a vector in all cells
    # bytes per vector in a shard
    shard_bytes = 2 * vector_bytes + _count_graph_node_bytes(n_links) + 2 * n_links * _LINK_BYTES
    bytes_by_stage = {
        "train": 3 * vector_bytes * max(count_cell_sample(plan), 0 if index.storage.is_trained else plan.train_sample),
        # Memory holds four copies of each vector (mapped, read, compared, stored) and those in the
        # slices.
        "scatter": part_rows * vector_bytes * (4 + n_copies),
        "shard": n_copies * shard_bytes * min(plan.n, _MAX_CELL_RATIO * plan.n / plan.cells),
        # For each row, memory holds its level, its parent, its place in the queue of the walk, its
        # position in each cell, and one byte per thread that says whether the row was visited.
        "merge": plan.n * (12 + 8 * n_copies + MERGE_THREADS) + plan.n / n_links * shard_bytes + 2 * BLOCK_BYTES,
    }
    size = round(plan.n * (int(index.storage.sa_code_size()) + _count_graph_node_bytes(n_links)))
    return size, plan.n * n_copies * (vector_bytes + 4 + 2 * n_links * _LINK_BYTES), bytes_by_stage


def _estimate_ivf_size(plan: VectorPlan, index: FaissIndex, part_rows: int) -> SizeEstimate:
    spec, vector_bytes = parse_factory(plan.factory), 4 * plan.d
    trained_bytes, code_bytes, row_bytes = 0.0, 0, vector_bytes
    if isinstance(spec, IvfSpec):
        ivf_index: FaissIndex = get_inverted_lists(index)
        # Each code is stored with an id of 8 bytes.
        centroid_bytes, code_bytes = 4 * int(ivf_index.d), int(ivf_index.code_size) + 8
        row_bytes = code_bytes + (int(index.refine_index.sa_code_size()) if isinstance(index, faiss.IndexRefine) else 0)
        link_bytes = _count_graph_node_bytes(spec.quantizer_links) if spec.quantizer_links else 0
        trained_bytes += int(ivf_index.nlist) * (centroid_bytes + 8 + link_bytes)
        trained_bytes += (centroid_bytes << spec.codes.bits) * (
            spec.codes.name == "PQ"
        ) + centroid_bytes * plan.d * bool(spec.rotation)
    bytes_by_stage = {
        # memory holds the sample, the rotated sample and its residuals
        "train": 3 * vector_bytes * plan.train_sample + trained_bytes,
        "scatter": trained_bytes + 3 * BLOCK_BYTES + 3 * part_rows * code_bytes,
        "merge": 2 * trained_bytes + 3 * LIST_BLOCK_BYTES + BLOCK_BYTES,
    }
    return round(trained_bytes) + plan.n * row_bytes, plan.n * (code_bytes + 4) + trained_bytes, bytes_by_stage


def _count_graph_node_bytes(n_links: int) -> float:
    """Return the mean bytes of a graph node: its links, its level and its offset.

    A node has 2M links at the bottom level, and M on each further level, of which a node has
    1/(M-1) on average.
    """
    return 4 * (2 * n_links + n_links / (n_links - 1)) + 4 + 8


def estimate_recall(plan: VectorPlan) -> float | None:
    """Estimate the recall@20 of inverted lists with reranked candidates; None for other plans.

    A search of `count_needed_lists` lists misses .02 of the nearest passages, and a search of twice
    as many lists misses .005.
    """
    if plan.kind != "ivf" or plan.refine is None:
        return None
    max_recall = estimate_max_recall(with_refinement(plan.factory, plan.refine), plan.d, plan.n) or 1.0
    n_lists = count_lists(plan)
    loss = 0.02 * (count_needed_lists(n_lists) / plan.search["nprobe"]) ** 2 if plan.search["nprobe"] < n_lists else 0.0
    return max(0.0, min(max_recall, 1 - loss - _estimate_code_loss(plan.factory, plan.n)))


def estimate_max_recall(factory: str, d: int, n: int) -> float | None:
    """Return the largest recall@20 that a factory can reach; None if it was not measured."""
    spec = parse_factory(factory)
    if isinstance(spec, FlatSpec):
        return _MAX_RECALL_BY_CODES["Flat"]
    if isinstance(spec, HnswSpec):
        return _MAX_RECALL_BY_CODES["HNSW Refine(vectors)" if spec.refine else f"HNSW {spec.storage}"]
    if spec.refine == "vectors":
        return min(_MAX_RECALL_BY_CODES["Refine(vectors)"], 1 - _estimate_code_loss(factory, n))
    if spec.codes.name != "PQ":
        return _MAX_RECALL_BY_CODES.get(str(spec.codes))
    return _MAX_RECALL_BY_CODES.get(f"PQ by {round(d / (spec.codes.pieces or max(1, d // 4)))}")


def _estimate_code_loss(factory: str, n: int) -> float:
    """Return the loss of recall@20 if codes select the candidates and vectors rerank them."""
    spec, (loss_factor, loss_exponent) = parse_factory(factory), _LOSS_OF_ONE_BIT
    loss: float = loss_factor * n**loss_exponent
    return loss if isinstance(spec, IvfSpec) and str(spec.codes) == "RaBitQ" else 0.0


def choose_by_recall(recipes: Sequence[IndexRecipe], n: int, d: int) -> list[IndexRecipe]:
    """Return the recipes that can reach their recall target with n vectors of d dimensions.

    Raises:
        UsageError: no recipe can reach it.
    """
    target = recipes[0].recall_target or 0.0
    recall_by_factory = {recipe.factory: estimate_max_recall(recipe.factory, d, n) or 0.0 for recipe in recipes}
    suitable_recipes = [recipe for recipe in recipes if recall_by_factory[recipe.factory] >= target]
    if not suitable_recipes:
        closest_recipe = max(recipes, key=lambda recipe: recall_by_factory[recipe.factory])
        raise UsageError(
            f"no index reaches recall@20 {target:g}; {closest_recipe.factory} reaches about "
            f"{recall_by_factory[closest_recipe.factory]:g}: lower the target, or use Flat, which is exact"
        )
    return suitable_recipes


def fit_into_memory(
    recipes: Sequence[IndexRecipe],
    n: int,
    d: int,
    memory: int,
    part_rows: int | None = None,
    *,
    serving: bool = False,
    disk: int | None = None,
) -> VectorPlan:
    """Return the plan of the first recipe that fits, with more cells or a smaller sample if needed.

    Args:
        recipes: one recipe, or the result of `list_alternatives` for it.
        n: number of vectors.
        d: dimensions.
        memory: bytes of memory that one machine has for the largest stage of the build.
        part_rows: rows of the largest part; None assumes the default size of a part.
        serving: whether the finished index must fit as well, because the same machine searches it.
        disk: maximum bytes on disk of the index and of the vectors that rerank its candidates;
            None sets no limit.

    Raises:
        ResourceError: no recipe fits. The message gives the memory needed, and for a single recipe
            a factory string that would fit, if there is one.
    """
    plans = [plan for recipe in recipes for plan in _iter_smaller_plans(recipe, resolve(recipe, n, d))]
    if disk is not None:
        plans = _choose_by_disk(plans, disk)
    plan_sizes = [(plan, estimate_resources(plan, part_rows).peak_bytes(serving=serving)) for plan in plans]
    plan, needed_bytes = min(plan_sizes, key=lambda plan_size: max(memory, plan_size[1]))
    if needed_bytes <= memory:
        return plan
    purpose = "build and search" if serving else "build"
    advice = "add memory, since no index is smaller"
    if recipes[0].recall_target is not None:
        advice = "add memory, or lower the recall target"
    if len(recipes) == 1:
        alternative_recipes = [*recipes, *list_alternatives(recipes[0], d)]
        advice = f"use {fit_into_memory(alternative_recipes, n, d, memory, part_rows, serving=serving).factory}"
    raise ResourceError(
        f"{plan.factory} over {n:,} vectors of {d} dimensions needs {format_bytes(needed_bytes)} "
        f"of memory to {purpose}, and {format_bytes(memory)} are available: {advice}"
    )


def count_disk_bytes(plan: VectorPlan) -> int:
    """Return the bytes of an index and of the float16 vectors that rerank its candidates."""
    return estimate_resources(plan).disk_bytes + (2 * plan.n * plan.d if plan.refine else 0)


def _choose_by_disk(plans: Sequence[VectorPlan], disk: int) -> list[VectorPlan]:
    plan_sizes = [(plan, count_disk_bytes(plan)) for plan in plans]
    suitable_plans = [plan for plan, n_bytes in plan_sizes if n_bytes <= disk]
    if not suitable_plans:
        smallest_plan, n_bytes = min(plan_sizes, key=lambda plan_size: plan_size[1])
        raise ResourceError(
            f"{smallest_plan.factory} over {smallest_plan.n:,} vectors of {smallest_plan.d} "
            f"dimensions needs {format_bytes(n_bytes)} of "
            f"disk, and --disk allows {format_bytes(disk)}: allow more"
        )
    return suitable_plans


def list_alternatives(recipe: IndexRecipe, d: int, *, with_vectors: bool = False) -> list[IndexRecipe]:
    """Return copies of the recipe with other factories for d dimensions, the best first.

    The graphs among them have the recipe's numbers of links and cells. With `with_vectors`, the
    alternatives include a graph and inverted lists whose candidates are reranked by the snapshot's
    vectors.
    """
    n_links = getattr(parse_factory(recipe.factory), "links", None) or DEFAULT_LINKS
    graph_factories = [f"HNSW{n_links}{storage}" for storage in ("", "_SQfp16", "_SQ8")]
    pq_factories = [f"OPQ{d // dims}_{d // dims * 4},IVF,PQ{d // dims}np" for dims in (8, 16) if d // dims]
    # Bytes per vector of these structures, in order: d/2 plus the links, d/4, d/8 (2 bits for each
    # of d/2 principal components), and d/8.
    reranked_structures = (
        (f"HNSW{n_links}_SQ4", "IVF,PQ", f"PCAR{max(1, d // 2)},IVF,RaBitQ2", "IVF,RaBitQ") if with_vectors else ()
    )
    reranking_factories = [f"{factory},Refine(vectors)" for factory in reranked_structures]
    factories = [*graph_factories, *reranking_factories, "IVF,PQ", *pq_factories, "IVF,RaBitQ"]
    return [replace(recipe, factory=factory, train_sample=None, search={}) for factory in factories]


def _iter_smaller_plans(recipe: IndexRecipe, plan: VectorPlan) -> Iterator[VectorPlan]:
    """Yield the plan, then smaller ones if the recipe does not fix the cells or the sample size."""
    yield plan
    min_size = min(plan.train_sample, max(PQ_SAMPLE, _MIN_POINTS_PER_CENTROID * count_lists(plan)))
    for factor in (2, 4, 8):  # more cells or fewer training vectors save memory but lose recall
        n_samples = recipe.train_sample or max(min_size, plan.train_sample // factor)
        smaller_plan = resolve(
            replace(recipe, cells=recipe.cells or factor * plan.cells, train_sample=n_samples), plan.n, plan.d
        )
        change_note = (
            f"{smaller_plan.cells:,} cells"
            if smaller_plan.shards
            else f"trained on {smaller_plan.train_sample:,} vectors"
        )
        yield replace(smaller_plan, notes=(*smaller_plan.notes, f"{change_note}, so that the build fits in memory"))
