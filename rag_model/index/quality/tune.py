"""Tune the search settings of an index for a recall target, and evaluate a new index.

`tune_search` finds the smallest `efSearch` or `nprobe` that reaches the target. The first setting
to try is the index's own, which a later build takes from its parent. In most builds it is still the
smallest setting, and two measurements confirm that. Otherwise the setting is doubled or halved
until the target lies between two settings, and then bisected; this works because recall rises with
the setting. Only recall decides, not time, so the same file and queries give the same setting on
every machine.

`evaluate_index` measures recall against latency over a range of settings. The queries are given, or
are vectors of the index; the true neighbours come from exact search of the files that the index was
built from. Vectors of the index are easier queries: each is its own nearest neighbour.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from math import ceil
from pathlib import Path

import numpy as np

from rag_model.errors import UsageError
from rag_model.index.exact_search import ExactIndex
from rag_model.index.files.engine import Vectors
from rag_model.index.files.intake import inspect_vectors, iter_finite_rows
from rag_model.index.files.vectors import VectorFiles, sample_vectors
from rag_model.index.quality.health import inspect_index
from rag_model.index.quality.results import OperatingPoint, TuningResult
from rag_model.index.quality.sweep import VectorQuerySet, format_setting, sweep_settings
from rag_model.index.recipe import VectorPlan
from rag_model.index.search import FaissFileIndex, open_index

# largest efSearch: a graph that misses its target with this value is damaged
MAX_EF_SEARCH = 2_048
MAX_NPROBE = 4_096  # largest nprobe: finding so many lists costs as much as reading them
REFINE_FACTORS = (1, 2, 4, 8, 16, 32)  # values of refine: this many times k candidates are reranked
# If the target cannot be reached, a setting within this distance of the best recall is chosen.
CEILING_TOLERANCE = 0.005
_CODES_PER_CANDIDATE = 16  # codes that a graph search compares per candidate (efSearch)
_CODES_PER_VECTOR = 8  # codes that are read in the time of one vector of the refinement

RecallFunction = Callable[[int], float]  # value of efSearch or nprobe -> mean recall
QUERY_DEPTH = 20  # number of neighbours searched per query
_MAX_QUERIES = 1_000  # enough to distinguish recalls that differ by .005
_MIN_QUERIES = 100  # minimum number of queries, even if they exceed `_MAX_PRODUCTS`
_MAX_PRODUCTS = 4e11  # maximum multiplications of exact search: half a minute on two cores


@dataclass(frozen=True, slots=True)
class _SearchGrid:
    """The settings to try: refinement factors, and values of a parameter.

    An index without a refinement has the factor 0.
    """

    name: str  # efSearch or nprobe
    limits: Mapping[int, tuple[int, int]]  # minimum and maximum value by refinement factor

    def build_search(self, refine_factor: int, value: int) -> dict[str, int]:
        return {self.name: value} | ({"refine": refine_factor} if refine_factor else {})


def tune_search(index: FaissFileIndex, query_set: VectorQuerySet, target: float) -> TuningResult:
    """Return the smallest setting whose mean recall@k is at least `target`.

    If no setting reaches `target`, return the smallest one within .005 of the best recall. A graph
    searched for k neighbours keeps at least k candidates, so its settings begin at k. With a
    refinement, they begin at the number of candidates that are reranked; several refinement factors
    are tried, and the cheapest setting is returned.

    Args:
        index: the index; its default setting is tried first.
        query_set: queries with their true neighbours; a few hundred queries distinguish recalls
            that differ by .01.
        target: 0 < target < 1.

    Raises:
        UsageError: the target is out of range, or the queries do not fit the index.
    """
    if not 0 < target < 1:
        raise UsageError(f"the recall target is {target}: give one between 0 and 1, such as 0.95")

    def measure(search: Mapping[str, int]) -> float:
        hit_rows = index.search(query_set.vectors, query_set.k, **search)[1]
        return float(query_set.compute_recalls(hit_rows).mean())

    if index.structure == "exact":
        return TuningResult({}, measure({}))
    grid = _build_grid(index, query_set.k)
    measure_recall = cache(lambda factor, value: measure(grid.build_search(factor, value)))
    estimate_cost = partial(_estimate_cost, index, query_set.k)
    first_setting = index.defaults.get("refine", 0), index.defaults.get(grid.name, 1)
    best_setting = _find_cheapest(measure_recall, grid, target, estimate_cost, first_setting)
    if best_setting is not None:
        return TuningResult(grid.build_search(*best_setting), measure_recall(*best_setting))
    best_recall = max(
        measure_recall(factor, value)
        for factor, (minimum, maximum) in grid.limits.items()
        for value in _double_up_to(minimum, maximum)
    )
    lower_target = best_recall - CEILING_TOLERANCE
    best_setting = _find_cheapest(measure_recall, grid, lower_target, estimate_cost, first_setting)
    if best_setting is None:
        raise AssertionError("no setting reaches the best recall, which was measured")
    best_search, recall = grid.build_search(*best_setting), measure_recall(*best_setting)
    note = _explain_missed_target(index, query_set.k, target, best_search, recall, best_recall)
    return TuningResult(best_search, recall, note)


def _build_grid(index: FaissFileIndex, k: int) -> _SearchGrid:
    factors = (
        tuple(factor for factor in REFINE_FACTORS if factor == 1 or factor * k < 2 * index.n)
        if "refine" in index.defaults
        else (0,)
    )
    if index.structure != "hnsw":
        return _SearchGrid("nprobe", dict.fromkeys(factors, (1, min(MAX_NPROBE, index.n_lists))))
    # In a search for k rows, the index raises a smaller efSearch to this number. For fewer rows it
    # raises it less, and would not reach the measured recall.
    candidate_counts = {factor: min(k * max(1, factor), index.n) for factor in factors}
    maximum = min(MAX_EF_SEARCH, index.n)
    return _SearchGrid("efSearch", {factor: (n, max(n, maximum)) for factor, n in candidate_counts.items()})


def _find_cheapest(
    measure_recall: Callable[[int, int], float],
    grid: _SearchGrid,
    target: float,
    estimate_cost: Callable[[tuple[int, int]], float],
    first_setting: tuple[int, int],
) -> tuple[int, int] | None:
    """Return the cheapest refinement factor and value that reach `target`; None if there are none.

    The factor of `first_setting` is tried first. For every other factor, the first value to try is
    the largest one that makes the setting cheaper than the best setting so far. If this value
    misses the target, all smaller values miss it too.
    """
    best_setting: tuple[int, int] | None = None
    for factor in sorted(grid.limits, key=lambda factor: factor != first_setting[0]):
        minimum, max_value = grid.limits[factor]
        if best_setting is not None:
            factor_cost = estimate_cost((factor, 0))
            cost_per_value = estimate_cost((factor, 1)) - factor_cost
            max_value = min(max_value, ceil((estimate_cost(best_setting) - factor_cost) / cost_per_value) - 1)
            if max_value < minimum or measure_recall(factor, max_value) < target:
                continue
        smallest_value = _find_smallest(partial(measure_recall, factor), minimum, max_value, target, first_setting[1])
        best_setting = best_setting if smallest_value is None else (factor, smallest_value)
    return best_setting


def _estimate_cost(index: FaissFileIndex, k: int, setting: tuple[int, int]) -> float:
    """Return about how many codes a query reads; a vector of the refinement counts as 8 codes."""
    refine_factor, value = setting
    codes_per_value = _CODES_PER_CANDIDATE if index.structure == "hnsw" else index.n / max(1, index.n_lists)
    return value * codes_per_value + _CODES_PER_VECTOR * refine_factor * k


def _double_up_to(minimum: int, maximum: int) -> list[int]:
    doubled_values = [minimum]
    while doubled_values[-1] < maximum:
        doubled_values.append(min(2 * doubled_values[-1], maximum))
    return doubled_values


def _find_smallest(
    measure_recall: RecallFunction, minimum: int, maximum: int, target: float, start: int = 1
) -> int | None:
    """Return the smallest value whose recall reaches `target`; None if there is none.

    The search begins at `start`, and tries smaller values first if that one reaches the target.
    """
    start = min(max(start, minimum), maximum)
    low, high = minimum - 1, maximum + 1  # `low` misses the target, `high` reaches it
    if measure_recall(start) >= target:
        high, tried_value = start, start - 1
        while high > minimum:
            if measure_recall(tried_value) < target:
                low = tried_value
                break
            high, tried_value = tried_value, max(minimum, tried_value // 2)
    else:
        low = start
        while low < maximum:
            tried_value = min(2 * low, maximum)
            if measure_recall(tried_value) >= target:
                high = tried_value
                break
            low = tried_value
    if high > maximum:
        return None
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if measure_recall(middle) >= target else (middle, high)
    return high


def _explain_missed_target(
    index: FaissFileIndex, k: int, target: float, search: Mapping[str, int], recall: float, best_recall: float
) -> str:
    advice = "more links" if index.structure == "hnsw" else "longer codes"
    advice += "" if index.structure == "hnsw" or "refine" in index.defaults else " or a refinement, Refine(SQfp16),"
    return (
        f"recall@{k} of {target:g} cannot be reached, the best is {best_recall:.3f}, so "
        f"{format_setting(search)} is set, which finds {recall:.3f}: {advice} would find more"
    )


@dataclass(frozen=True, slots=True)
class IndexEvaluation:
    """The measurements of a new index."""

    query_count: int
    uses_own_vectors: bool  # whether the queries are vectors of the index
    k: int  # depth of recall
    points: tuple[OperatingPoint, ...]  # measurements over a range of settings, cheapest first
    health: Mapping[str, float | int]  # statistics of the index by their names in a manifest
    # search setting to write into the file: the tuned one, or else the default
    search: Mapping[str, int]
    note: str = ""  # a sentence on why the recall target cannot be reached; empty if it is


def evaluate_index(
    path: Path, plan: VectorPlan, vectors: Sequence[Path], queries: Vectors | None = None
) -> IndexEvaluation:
    """Measure an index file, and tune it if its plan has a recall target.

    Args:
        path: the index file.
        plan: the plan of the build.
        vectors: the `.npy` files that it was built from, in order.
        queries: (q, d) float32; the default is up to 1,000 vectors of the index, drawn by the
            plan's seed.

    Raises:
        InputError: the index or a vector file is damaged.
        UsageError: the queries do not fit the index.
    """
    query_vectors = queries
    if query_vectors is None:
        query_vectors = sample_vectors(vectors, plan.n, plan.d, _count_affordable_queries(plan), plan.seed + 1)
    index, k = open_index(path), min(QUERY_DEPTH, plan.n)
    query_set = VectorQuerySet.from_exact_search(ExactIndex(vectors, plan.metric), query_vectors, k)
    search_parameters, note = dict(plan.search), ""
    if plan.recall_target is not None:
        tuning = tune_search(index, query_set, plan.recall_target)
        search_parameters, note = search_parameters | dict(tuning.search), tuning.note
    points = tuple(sweep_settings(index, query_set))
    return IndexEvaluation(
        len(query_vectors),
        queries is None,
        k,
        points,
        inspect_index(path, VectorFiles(vectors)).metrics(),
        search_parameters,
        note,
    )


def read_queries(path: Path, d: int, limit: int = _MAX_QUERIES) -> Vectors:
    """Read encoded queries from a `.npy` or Parquet file: the first `limit`, (q, d) float32.

    Raises:
        InputError: the file is damaged or holds no vectors.
        UsageError: the queries are of another dimension.
    """
    query_files = inspect_vectors([path])
    if query_files.d != d:
        raise UsageError(
            f"the questions in {path} have {query_files.d} dimensions and the vectors {d}: use one encoder"
        )
    n_queries = min(limit, query_files.n)
    blocks = [block for _, block in iter_finite_rows(query_files, "refuse", 0, n_queries, "correct the file")]
    return np.concatenate(blocks).astype(np.float32)


def _count_affordable_queries(plan: VectorPlan) -> int:
    return min(plan.n, max(_MIN_QUERIES, min(_MAX_QUERIES, int(_MAX_PRODUCTS / (plan.n * plan.d)))))
