"""How much of exact search an index finds."""

import numpy as np
import numpy.typing as npt

from rag_model.index.files.engine import Rows, Vectors

Recalls = npt.NDArray[np.float64]  # (q,): each query's, in [0, 1]

# Share of the k-th score within which another passage is as good: sums of float32 differ by their order.
_TIE = 1e-5


def recall_at(found: Rows, exact: Rows, scores: Vectors, k: int) -> Recalls:
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


def percentile5(recalls: Recalls) -> float:
    """Return the fifth percentile, interpolated as `numpy.percentile` does."""
    return float(np.percentile(recalls, 5))
