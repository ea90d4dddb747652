"""Records of measurements of an index: recall, sweeps, health, fit, tuning and resources."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from rag_model.errors import UsageError
from rag_model.index.factory import Structure
from rag_model.index.files.engine import Rows, Vectors

# Takes (m,) query numbers and (m, k) rows for these queries; returns (m, k) exact scores, -inf for
# row -1.
ExactScore = Callable[[Rows, Rows], Vectors]
Recalls = npt.NDArray[np.float64]  # (q,): the recall of each query, in [0, 1]

# Relative tolerance at the k-th score, because float32 sums depend on the order of summation.
_TIE_TOLERANCE = 1e-5
_MIN_NEW_VECTORS = 32  # with fewer new vectors, their mean loss and recall are too uncertain
# Tolerated increase of a loss besides `drift`: codes have so much less error on the vectors that
# they were trained on.
_LOSS_SLACK = 0.02
# accepted difference between the recall of old and new vectors: three times the random error
_MAX_RECALL_LOSS = 0.1
# A lower imbalance is always accepted, because a build splits only cells that are larger than this
# multiple of the mean.
_MAX_EVEN_IMBALANCE = 1.5
# Memory of a worker process without data; 225 MB were measured after the imports of the Beam jobs.
PROCESS_BYTES = 240 << 20


@dataclass(frozen=True, slots=True)
class RecallFloor:
    """The lowest accepted recall of an index over the sampled queries."""

    mean: float
    p5: float  # fifth percentile over the queries: a good mean can hide queries without any hit

    def __post_init__(self) -> None:
        if not (0 <= self.mean <= 1 and 0 <= self.p5 <= 1):
            raise UsageError(
                f"the minimum recall is {self.mean} (mean) and {self.p5} (fifth percentile): give shares from 0 to 1"
            )


# Measured on 5,227 passages of Wikipedia (MiniLM, 384 dimensions; 256 queries, each a sentence of
# one passage): HNSW32 at efSearch 128 has a recall of .99 (p5 .95), also over a million passages.
# Below .95 a graph is damaged.
DEFAULT_FLOOR = RecallFloor(mean=0.95, p5=0.80)


def compute_recall(
    retrieved_rows: Rows, exact_rows: Rows, scores: Vectors, k: int, compute_score: ExactScore | None = None
) -> Recalls:
    """Return the share of the true top k in each query's `retrieved_rows`, in [0, 1].

    recall@k = |retrieved_k ∩ true_k| / k. Rows whose score equals the k-th score are all correct:
    which of several equal vectors an index returns does not affect its quality.

    Args:
        retrieved_rows: (q, >= k) rows in the index's order, padded with -1.
        exact_rows: (q, >= k) rows of exact search, best first; wider than `k` to detect ties at
            rank k.
        scores: the scores of `exact_rows`, larger = better.
        k: depth of recall; cut to the width of `exact_rows` if the corpus is smaller.
        compute_score: computes exact scores, where ties continue beyond `exact_rows`, as in a
            corpus of equal passages.
    """
    k = min(k, exact_rows.shape[1])
    kth_score = scores[:, k - 1 : k]  # (q, w) -> (q, 1)
    min_score = kth_score - np.abs(kth_score) * _TIE_TOLERANCE
    is_correct = scores >= min_score  # (q, w) bool
    row_offsets = np.arange(len(retrieved_rows), dtype=np.int64)[:, None] * (
        max(retrieved_rows.max(initial=0), exact_rows.max(initial=0)) + 2
    )
    # The offsets make the rows of each query distinct, so that one call serves all queries: (q, k)
    # -> (q,).
    is_hit = np.isin(retrieved_rows[:, :k] + row_offsets, (exact_rows + row_offsets)[is_correct])
    n_hits = is_hit.sum(axis=1)
    recalls: Recalls = np.minimum(n_hits / k, 1.0)
    # (q, w) -> (q',): queries with ties at the end
    tied_queries = np.flatnonzero(is_correct.all(axis=1))
    if compute_score is not None and len(tied_queries):
        exact_scores = compute_score(tied_queries, retrieved_rows[tied_queries, :k])  # (q', k)
        recalls[tied_queries] = (exact_scores >= min_score[tied_queries]).sum(axis=1) / k
    return recalls


def compute_p5(recalls: Recalls) -> float:
    """Return the fifth percentile, interpolated as `numpy.percentile` does."""
    return float(np.percentile(recalls, 5))


@dataclass(frozen=True, slots=True)
class GraphStats:
    """Statistics of a graph's bottom level, which holds every node."""

    degrees: tuple[int, ...]  # number of nodes with 0, 1, … 2M links
    unlinked: int  # number of nodes that no other node links to
    # number of nodes that no path from the entry point reaches, so that no query finds them
    unreachable: int

    @property
    def degree(self) -> float:
        """The mean number of links per node."""
        n_nodes = sum(self.degrees)
        return sum(links * n for links, n in enumerate(self.degrees)) / n_nodes if n_nodes else 0.0


@dataclass(frozen=True, slots=True)
class ListStats:
    """Statistics that tell how evenly the vectors are distributed over the inverted lists."""

    lists: int  # number of lists
    # number of lists of size 0, 1, 2-3, 4-7, …: item i > 0 counts sizes in [2^(i-1), 2^i)
    sizes: tuple[int, ...]
    largest: int  # number of vectors in the largest list
    # lists * sum(size^2) / n^2: the vectors that a search reads, relative to lists of equal size
    imbalance: float


@dataclass(frozen=True, slots=True)
class OperatingPoint:
    """A search setting of an index with its recall, time and work."""

    setting: str  # name of the setting, such as efSearch=128, nprobe=32 or exact
    recall_mean: float
    recall_p5: float  # fifth percentile over the queries: the recall of the worst 5 %
    milliseconds: float  # milliseconds per query when all queries are searched as one batch
    # Mean number of distance computations per query, which is the same on every machine. For lists
    # it counts the compared codes and the vectors of a refinement, but not the centroids.
    distances: float


@dataclass(frozen=True, slots=True)
class IndexHealth:
    """Statistics of a finished index file."""

    kind: Structure
    n: int
    graph: GraphStats | None = None
    lists: ListStats | None = None
    quantization_error: float | None = None  # None if not measured or undefined for the codec

    def metrics(self) -> dict[str, float | int]:
        """Return the metrics that apply, by their names in a manifest."""
        optional_metrics: dict[str, float | int | None] = {
            "degree": round(self.graph.degree, 2) if self.graph else None,
            "unlinked": self.graph.unlinked if self.graph else None,
            "unreachable": self.graph.unreachable if self.graph else None,
            "imbalance": round(self.lists.imbalance, 3) if self.lists else None,
            "largest_list": self.lists.largest if self.lists else None,
            "quantization_error": None if self.quantization_error is None else float(f"{self.quantization_error:.3g}"),
        }
        return {name: value for name, value in optional_metrics.items() if value is not None}


@dataclass(frozen=True, slots=True)
class TuningResult:
    """A search setting for a recall target."""

    # values of efSearch, or of nprobe and refine; empty for an index without parameters
    search: Mapping[str, int]
    recall: float  # mean recall with this setting
    note: str = ""  # a sentence on why the target cannot be reached; empty if it is


@dataclass(frozen=True, slots=True)
class TrainingStats:
    """How well a trained file fits its training vectors."""

    # mean |x - y|^2 / |x|^2 of vectors x and their approximations y, by name: `cells` or `lists`,
    # and `codes`
    losses: Mapping[str, float]
    # size of the largest cell divided by the mean size, in the first build; 0 without cells
    imbalance: float = 0.0
    imbalance_now: float = 0.0  # the same ratio in the last build

    def with_imbalance(self, imbalance: float) -> Self:
        """Return the record after a build whose largest cell is `imbalance` times the mean."""
        return type(self)(self.losses, self.imbalance or imbalance, imbalance)

    def explain_misfit(self, drift: float) -> str | None:
        """Return the reason why the file cannot fit new vectors; None if it may fit."""
        if self.imbalance_now <= drift * max(self.imbalance, _MAX_EVEN_IMBALANCE):
            return None
        return f"the largest cell has grown to {self.imbalance_now:.2f} times the mean"

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Self:
        """Read the record from the result of `asdict`, which may contain further fields."""
        return cls(dict(values["losses"]), values["imbalance"], values["imbalance_now"])


@dataclass(frozen=True, slots=True)
class FitResult:
    """How well a reused trained file fits the new vectors."""

    rows: int  # number of new vectors measured
    # name -> (loss of the changed parts, loss of the training vectors)
    losses: Mapping[str, tuple[float, float]]
    # recall of new and of old vectors in lists; None if not measured
    recall: tuple[float, float] | None = None

    def explain_misfit(self, drift: float) -> str | None:
        """Return the reason why the file does not fit; None if it fits."""
        if self.rows < _MIN_NEW_VECTORS:
            return None
        for name, (changed_loss, training_loss) in self.losses.items():
            if changed_loss > drift * training_loss + _LOSS_SLACK:
                return (
                    f"the loss of {name} is {changed_loss:.3f} with {self.rows:,} new vectors, "
                    f"and {training_loss:.3f} for the training vectors"
                )
        return None

    def explain_missed_neighbors(self) -> str | None:
        """Return the recall of new and old vectors in a sentence; None if they are similar."""
        new_recall, old_recall = self.recall or (1.0, 1.0)
        if self.rows < _MIN_NEW_VECTORS or new_recall >= old_recall - _MAX_RECALL_LOSS:
            return None
        return f"recall is {new_recall:.2f} for {self.rows:,} new vectors and {old_recall:.2f} for old ones"


@dataclass(frozen=True, slots=True)
class ResourceEstimate:
    """Memory and disk of an index, in bytes."""

    stages: Mapping[str, int]  # memory of one task of each stage: train, scatter, shard, merge
    search_bytes: int  # memory of a search when the whole index is loaded
    disk_bytes: int  # size of the index file
    work_bytes: int  # disk space of a build besides the vectors: pieces, and twice the index file

    def peak_bytes(self, *, serving: bool = False) -> int:
        """Return the memory to run one task at a time, and with `serving` to search as well."""
        return max(*self.stages.values(), self.search_bytes if serving else 0)
