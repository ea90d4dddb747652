"""How much of exact search an approximate index finds, and at what price in time."""

from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter

import numpy as np
import numpy.typing as npt

Rows = npt.NDArray[np.int64]
Vectors = npt.NDArray[np.float32]

_TIE = (
    1e-5  # share of the k-th score within which another passage is as good: fp32 sums differ by their order
)


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
    curve: tuple[Effort, ...] = ()  # its trade-off


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
    hits = [
        np.isin(row[:k], wanted[good]).sum() for row, wanted, good in zip(found, exact, true, strict=True)
    ]
    return np.minimum(np.array(hits, dtype=np.float64) / k, 1.0)


def percentile5(recalls: npt.NDArray[np.float64]) -> float:
    """Return the fifth percentile, interpolated as `numpy.percentile` does."""
    return float(np.percentile(recalls, 5))


def measure_effort(
    setting: str, search: Callable[[], Rows], exact: Rows, scores: Vectors, *, k: int, repeats: int = 3
) -> Effort:
    """Search `repeats` times with one setting; keep the recall and the fastest run's time a query."""
    found = search()  # also warms the caches, so that the first setting is not charged for it
    seconds = min(_seconds(search) for _ in range(repeats))
    recalls = recall_at(found, exact, scores, k)
    return Effort(setting, float(recalls.mean()), percentile5(recalls), 1000 * seconds / len(found))


def _seconds(search: Callable[[], Rows]) -> float:
    start = perf_counter()
    search()
    return perf_counter() - start
