"""How much of exact search an index finds."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from rag_model.errors import UsageError
from rag_model.index.files.engine import Rows, Vectors

Recalls = npt.NDArray[np.float64]  # (q,): each query's, in [0, 1]

# Share of the k-th score within which another passage is as good: sums of float32 differ by their order.
_TIE = 1e-5


@dataclass(frozen=True, slots=True)
class Floor:
    """The least recall that an index may show over the sampled queries."""

    mean: float
    p5: float  # fifth percentile: a good mean can hide questions for which the index is blind

    def __post_init__(self) -> None:
        if not (0 <= self.mean <= 1 and 0 <= self.p5 <= 1):
            raise UsageError(f"a floor of recall is from 0 to 1, not {self.mean} and {self.p5}")


# Measured on 5,227 passages of real Wikipedia (MiniLM, 384 dimensions; a sentence of each of 256 of them as
# the queries): HNSW32 at efSearch 128 finds .99 (p5 .95), and as much of a million. Below .95 a graph is
# damaged.
FLOOR = Floor(mean=0.95, p5=0.80)


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
