"""Sweep search settings: recall against time and distance computations."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from time import perf_counter
from typing import Self

from rag_model.index.exact_search import ExactIndex
from rag_model.index.files.engine import Rows, Vectors, faiss
from rag_model.index.quality.results import (
    ExactScore,
    OperatingPoint,
    Recalls,
    compute_p5,
    compute_recall,
)
from rag_model.index.search import FaissFileIndex

_MIN_RUNS = 3  # only the fastest run counts, because other processes slow a run down
# minimum total time of all runs, because other processes could slow down the whole of a short run
_MIN_SECONDS = 0.02


@dataclass(frozen=True, slots=True)
class VectorQuerySet:
    """Query vectors with their true neighbours."""

    vectors: Vectors  # (q, d) float32
    k: int  # depth of recall
    # (q, >= k) scores of exact search, best first; more than k to detect ties at rank k
    scores: Vectors
    rows: Rows  # (q, >= k) rows of exact search, best first
    compute_score: ExactScore | None = None  # for ties that continue beyond `rows`

    @classmethod
    def from_exact_search(cls, exact_index: ExactIndex, vectors: Vectors, k: int) -> Self:
        """Find the true neighbours of `vectors` by exact search.

        Raises:
            UsageError: the vectors or `k` do not fit the index.
        """
        scores, exact_rows = exact_index.search(vectors, max(k, min(2 * k, exact_index.n)))
        return cls(vectors, k, scores, exact_rows, lambda queries, rows: exact_index.score(vectors[queries], rows))

    def take_first(self, n: int) -> Self:
        """Return the first `n` queries."""
        return replace(self, vectors=self.vectors[:n], scores=self.scores[:n], rows=self.rows[:n])

    def compute_recalls(self, retrieved_rows: Rows) -> Recalls:
        """Return the recall@k of each query for `retrieved_rows`, (q, >= k), padded with -1."""
        return compute_recall(retrieved_rows, self.rows, self.scores, self.k, self.compute_score)


def sweep_settings(
    index: FaissFileIndex, query_set: VectorQuerySet, values: Sequence[int] | None = None
) -> list[OperatingPoint]:
    """Search with a range of settings; return their operating points, cheapest first.

    `values` are values of `efSearch` or `nprobe`. By default each is twice the one before:
    `efSearch` from 16, or the depth of the queries if that is more, to 512; `nprobe` from 1 to the
    number of lists (at most 1,024). Other parameters have the index's defaults. faiss counts
    distances for the whole process, so a concurrent search falsifies the number of distances.

    Raises:
        UsageError: the queries or their depth do not fit the index.
    """
    parameter = {"hnsw": "efSearch", "ivf": "nprobe", "exact": ""}[index.structure]
    if not parameter:
        return [measure_point(index, query_set, {})]
    swept_values = _list_default_values(index, query_set.k) if values is None else sorted(values)
    return [measure_point(index, query_set, index.defaults | {parameter: setting}) for setting in swept_values]


def list_near_settings(index: FaissFileIndex, k: int) -> list[dict[str, int]]:
    """Return settings with `efSearch` or `nprobe` from an eighth to twice the index's own value.

    Unlike the largest values of `nprobe`, these settings cost no more in an index with more lists.
    """
    if index.structure == "exact":
        return [index.defaults]
    values, parameter = _list_default_values(index, k), "efSearch" if index.structure == "hnsw" else "nprobe"
    own_value = index.defaults[parameter]
    near_values = {own_value, *(own_value * factor // 8 for factor in (1, 2, 4, 16))}
    limited_values = sorted({min(max(setting, values[0]), max(own_value, values[-1])) for setting in near_values})
    return [index.defaults | {parameter: setting} for setting in limited_values]


def _list_default_values(index: FaissFileIndex, k: int) -> list[int]:
    minimum, maximum = (max(16, k), max(512, k)) if index.structure == "hnsw" else (1, min(index.n_lists, 1024))
    powers = (1 << exponent for exponent in range(minimum.bit_length(), (maximum - 1).bit_length()))
    return list(dict.fromkeys([minimum, *powers, maximum]))


def measure_point(index: FaissFileIndex, query_set: VectorQuerySet, parameters: Mapping[str, int]) -> OperatingPoint:
    """Search several times with one setting; return its recall and cost.

    Raises:
        UsageError: the queries, their depth or a parameter do not fit the index.
    """
    return measure_recalls(index, query_set, parameters, _MIN_RUNS)[0]


def measure_recalls(
    index: FaissFileIndex, query_set: VectorQuerySet, parameters: Mapping[str, int], min_runs: int = 1
) -> tuple[OperatingPoint, Recalls]:
    """Search with one setting; return its operating point and the recall of each query.

    Raises:
        UsageError: for the same reasons as `measure_point`.
    """
    n_queries = len(query_set.vectors)
    faiss.cvar.hnsw_stats.reset()
    faiss.cvar.indexIVF_stats.reset()
    start_time = perf_counter()
    retrieved_rows = index.search(query_set.vectors, query_set.k, **parameters)[1]
    search_seconds = [perf_counter() - start_time]
    distances = _count_distances(index, n_queries) / n_queries + parameters.get("refine", 0) * query_set.k
    while len(search_seconds) < min_runs or sum(search_seconds) < _MIN_SECONDS:
        search_seconds.append(_time_search(index, query_set, parameters))
    recalls = query_set.compute_recalls(retrieved_rows)
    point = OperatingPoint(
        setting=format_setting(parameters),
        recall_mean=float(recalls.mean()),
        recall_p5=compute_p5(recalls),
        milliseconds=1000 * min(search_seconds) / n_queries,
        distances=distances,
    )
    return point, recalls


def format_setting(parameters: Mapping[str, int]) -> str:
    """Return a setting's name in an `OperatingPoint`: `efSearch=128`, or `exact`."""
    return ", ".join(f"{name}={setting}" for name, setting in parameters.items()) or "exact"


def _time_search(index: FaissFileIndex, query_set: VectorQuerySet, parameters: Mapping[str, int]) -> float:
    start_time = perf_counter()
    index.search(query_set.vectors, query_set.k, **parameters)
    return perf_counter() - start_time


def _count_distances(index: FaissFileIndex, n_queries: int) -> float:
    if index.structure == "hnsw":
        return float(faiss.cvar.hnsw_stats.ndis)
    if index.structure == "ivf":
        return float(faiss.cvar.indexIVF_stats.ndis)
    return float(index.n * n_queries)
