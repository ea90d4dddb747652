"""The quality of an index: recall against exact search, its cost in time and distance computations, and the causes.

Two graphs are compared at equal distance computations, never at equal `efSearch`: a denser graph does more work in each
step (`curve.compare`). The causes are in the finished file (`examine`): links, list sizes, quantisation error.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Self

from rag_model.index.exact.scan import ExactIndex
from rag_model.index.factory import Structure
from rag_model.index.files.anatomy import GraphAnatomy, ListAnatomy, graph_anatomy, list_anatomy, quantization_error
from rag_model.index.files.engine import Rows, Vectors, faiss
from rag_model.index.files.vectors import VectorFiles
from rag_model.index.quality.recall import ExactScore, Recalls, percentile5, recall_at
from rag_model.index.search import IndexFile, open_index

_REPEATS = 3  # minimum runs; the fastest counts, because other processes only slow a run down
_SECONDS = 0.02  # minimum total seconds: a batch of a few milliseconds is easily disturbed as a whole


@dataclass(frozen=True, slots=True)
class Effort:
    """One point of an index's trade-off: search setting, recall, time and work."""

    setting: str  # efSearch=128, nprobe=32, exact
    recall_mean: float
    recall_p5: float  # the fifth percentile over the queries: the recall of the worst 5 %
    milliseconds: float  # per query, all queries searched as one batch
    distances: float  # computed per query, mean: equal on every machine; for lists the compared codes, and
    # the vectors of a refinement, without the centroids


@dataclass(frozen=True, slots=True)
class Trial:
    """Queries whose true neighbours are known."""

    vectors: Vectors  # (q, d) float32
    k: int  # depth of recall
    scores: Vectors  # (q, >= k) of exact search, best first; wider than k lets ties at the k-th place count
    rows: Rows  # (q, >= k)
    score: ExactScore | None = None  # exact scores, for ties that go on beyond `rows`

    @classmethod
    def of(cls, exact: ExactIndex, vectors: Vectors, k: int) -> Self:
        """Find the true neighbours of `vectors` by exact search.

        Raises:
            UsageError: the vectors or `k` do not fit the index.
        """
        scores, rows = exact.search(vectors, max(k, min(2 * k, exact.n)))
        return cls(vectors, k, scores, rows, lambda queries, found: exact.score(vectors[queries], found))

    def recalls(self, found: Rows) -> Recalls:
        """Return the recall@k of each query, whose rows an index found: (q, >= k), -1 where there are fewer."""
        return recall_at(found, self.rows, self.scores, self.k, self.score)


@dataclass(frozen=True, slots=True)
class Health:
    """Statistics of a finished index file."""

    kind: Structure
    n: int
    graph: GraphAnatomy | None = None
    lists: ListAnatomy | None = None
    quantization_error: float | None = None  # None: unknown, or not meaningful

    def metrics(self) -> dict[str, float | int]:
        """Return the figures by their names in a manifest; figures that do not apply are left out."""
        found: dict[str, float | int | None] = {
            "degree": round(self.graph.degree, 2) if self.graph else None,
            "unlinked": self.graph.unlinked if self.graph else None,
            "unreachable": self.graph.unreachable if self.graph else None,
            "imbalance": round(self.lists.imbalance, 3) if self.lists else None,
            "largest_list": self.lists.largest if self.lists else None,
            "quantization_error": None if self.quantization_error is None else float(f"{self.quantization_error:.3g}"),
        }
        return {name: value for name, value in found.items() if value is not None}


def examine(path: Path, vectors: Sequence[Path] = ()) -> Health:
    """Examine any faiss file of a graph, of inverted lists or of plain vectors; the file is mapped, not loaded.

    Args:
        path: the index file.
        vectors: the `.npy` files that it was built from, in row order; without them there is no quantization error.

    Raises:
        InputError: the file is damaged or of another type, or the vectors are not those that it was built from.
    """
    file = open_index(path)
    kind, n = file.kind, file.n
    error = quantization_error(file.opened, VectorFiles.of(vectors, n, file.dim)) if vectors else None
    lists = list_anatomy(file.opened) if kind == "ivf" else None
    del file  # an open graph holds 12 bytes a node, and its anatomy reads the file
    return Health(kind, n, graph_anatomy(path) if kind == "hnsw" else None, lists, error)


def sweep(index: IndexFile, trial: Trial, values: Sequence[int] | None = None) -> list[Effort]:
    """Search with a range of settings; return one effort each, cheapest first.

    `values` are those of `efSearch` or `nprobe`; by default they double, up to 512 or to all lists (1,024 at most).
    Other parameters have the index's defaults. faiss counts distances for the whole process: another search in it at
    the same time makes that figure wrong, but no other.

    Raises:
        UsageError: the queries or their depth do not fit the index.
    """
    parameter = {"hnsw": "efSearch", "ivf": "nprobe", "exact": ""}[index.kind]
    if not parameter:
        return [effort(index, trial, {})]
    chosen = _steps(index) if values is None else sorted(values)
    return [effort(index, trial, index.defaults | {parameter: value}) for value in chosen]


def _steps(index: IndexFile) -> list[int]:
    most = 512 if index.kind == "hnsw" else min(index.lists, 1024)
    least = 16 if index.kind == "hnsw" else 1
    return [*(1 << step for step in range(least.bit_length() - 1, (most - 1).bit_length())), most]


def effort(index: IndexFile, trial: Trial, parameters: Mapping[str, int]) -> Effort:
    """Search with one setting, several times; return its recall and cost.

    Raises:
        UsageError: the queries, their depth or a parameter do not fit the index.
    """
    queries = len(trial.vectors)
    _reset_counters()
    found = index.search(trial.vectors, trial.k, **parameters)[1]  # also warms the caches
    distances = _counted(index, queries) / queries + parameters.get("refine", 0) * trial.k
    runs: list[float] = []
    while len(runs) < _REPEATS or sum(runs) < _SECONDS:
        runs.append(_seconds(index, trial, parameters))
    recalls = trial.recalls(found)
    return Effort(
        setting=setting_name(parameters),
        recall_mean=float(recalls.mean()),
        recall_p5=percentile5(recalls),
        milliseconds=1000 * min(runs) / queries,
        distances=distances,
    )


def setting_name(parameters: Mapping[str, int]) -> str:
    """Return the name of a setting in an `Effort`: `efSearch=128`, or `exact` if there is no parameter."""
    return ", ".join(f"{name}={value}" for name, value in parameters.items()) or "exact"


def _seconds(index: IndexFile, trial: Trial, parameters: Mapping[str, int]) -> float:
    start = perf_counter()
    index.search(trial.vectors, trial.k, **parameters)
    return perf_counter() - start


def _reset_counters() -> None:
    faiss.cvar.hnsw_stats.reset()
    faiss.cvar.indexIVF_stats.reset()


def _counted(index: IndexFile, queries: int) -> float:
    if index.kind == "hnsw":
        return float(faiss.cvar.hnsw_stats.ndis)
    if index.kind == "ivf":
        return float(faiss.cvar.indexIVF_stats.ndis)
    return float(index.n * queries)
