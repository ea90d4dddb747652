"""Recall: the share of exact search results that an index finds."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from rag_model.errors import UsageError
from rag_model.index.files.engine import Rows, Vectors

# Exact scores, (m, k), of rows, (m, k) or -1, for the queries with these numbers, (m,); of row -1 it is -inf.
ExactScore = Callable[[Rows, Rows], Vectors]
Recalls = npt.NDArray[np.float64]  # (q,): the recall of each query, in [0, 1]

# Relative tolerance at the k-th score: float32 sums depend on the order of summation.
_TIE = 1e-5


@dataclass(frozen=True, slots=True)
class Floor:
    """The least recall allowed for an index over the sampled queries."""

    mean: float
    p5: float  # fifth percentile: a good mean can hide queries for which the index finds nothing

    def __post_init__(self) -> None:
        if not (0 <= self.mean <= 1 and 0 <= self.p5 <= 1):
            raise UsageError(f"the floor of recall is {self.mean} and {self.p5}: give shares from 0 to 1")


# Measured on 5,227 passages of Wikipedia (MiniLM, 384 dimensions; 256 queries, each a sentence of one passage): HNSW32
# at efSearch 128 has a recall of .99 (p5 .95), and the same over a million. Below .95 a graph is damaged.
FLOOR = Floor(mean=0.95, p5=0.80)


def recall_at(found: Rows, exact: Rows, scores: Vectors, k: int, score: ExactScore | None = None) -> Recalls:
    """Return each query's share of the true top k that `found` holds, in [0, 1].

    recall@k = |found_k ∩ true_k| / k. Passages whose score equals the k-th are all correct: which of several equal
    vectors an index returns does not affect its quality.

    Args:
        found: (q, >= k) rows in the index's order, -1 if it found fewer.
        exact: (q, >= k) rows of exact search, best first; wider than `k` to detect ties at the k-th place.
        scores: the scores of `exact`, larger = better.
        k: depth of recall; cut to the width of `exact` if the corpus is smaller.
        score: computes exact scores; asked where ties go on to the end of `exact`, so that more rows may be correct
            than it holds, as in a corpus of equal passages.
    """
    k = min(k, exact.shape[1])
    border = scores[:, k - 1 : k]  # (q, w) -> (q, 1)
    true = scores >= border - np.abs(border) * _TIE  # (q, w) bool
    first = np.arange(len(found), dtype=np.int64)[:, None] * (max(found.max(initial=0), exact.max(initial=0)) + 2)
    hits = np.isin(found[:, :k] + first, (exact + first)[true]).sum(axis=1)  # (q, k) -> (q,): no key is shared
    recalls: Recalls = np.minimum(hits / k, 1.0)
    tied = np.flatnonzero(true.all(axis=1))  # (q, w) -> (q',): queries whose ties may go on
    if score is not None and len(tied):
        true = score(tied, found[tied, :k]) >= (border - np.abs(border) * _TIE)[tied]  # (q', k) bool
        recalls[tied] = true.sum(axis=1) / k
    return recalls


def percentile5(recalls: Recalls) -> float:
    """Return the fifth percentile, interpolated as `numpy.percentile` does."""
    return float(np.percentile(recalls, 5))
