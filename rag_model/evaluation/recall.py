"""How much of exact search an index finds: the measure, and the records of it that others fill."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Rows = npt.NDArray[np.int64]
Vectors = npt.NDArray[np.float32]

# Share of the k-th score within which another passage is as good: sums of float32 differ by their order.
_TIE = 1e-5


@dataclass(frozen=True, slots=True)
class Effort:
    """One point of an index's trade-off: how hard it searched, what it found, how long it took."""

    setting: str  # efSearch=128, nprobe=32
    recall_mean: float
    recall_p5: float  # the fifth percentile over the queries: what an unlucky question gets
    milliseconds: float  # a query, all queries searched as one batch


@dataclass(frozen=True, slots=True)
class Findings:
    """What one index showed on the sampled queries."""

    factory: str  # HNSW32
    recalls: npt.NDArray[np.float64]  # of each query, as the index is searched by default


def recall_at(found: Rows, exact: Rows, scores: Vectors, k: int) -> npt.NDArray[np.float64]:
    """Return each query's share of the true top k that `found` holds, in [0, 1].

    recall@k = |found_k ∩ true_k| / k. Passages that tie with the k-th are all true: which of several equal
    vectors an index returns says nothing of its quality.

    Args:
        found: (q, >= k) rows as the index ranks them, -1 where it found fewer.
        exact: (q, >= k) rows of exact search, best first; wider than `k` lets ties at the border be seen.
        scores: the scores of `exact`, larger = better.
        k: how many count; cut to the width of `exact` where the corpus is smaller.
    """
    k = min(k, exact.shape[1])
    border = scores[:, k - 1 : k]
    true = scores >= border - np.abs(border) * _TIE
    hits = [np.isin(row[:k], wanted[good]).sum() for row, wanted, good in zip(found, exact, true, strict=True)]
    return np.minimum(np.array(hits, dtype=np.float64) / k, 1.0)


def percentile5(recalls: npt.NDArray[np.float64]) -> float:
    """Return the fifth percentile, interpolated as `numpy.percentile` does."""
    return float(np.percentile(recalls, 5))
