"""Recall as a function of work: two indexes compared at equal distance computations.

A denser graph finds more at the same `efSearch` because each of its steps costs more, and time depends on the machine.
The number of distance computations is a cost that can be compared between both indexes.

Between two points of a sweep the missed share falls about as a power of the work, so its logarithm is
interpolated against the logarithm of the distances. Linear interpolation of the recalls themselves would be a point too
low in the middle of a doubling.
"""

from collections.abc import Sequence
from typing import Literal

import numpy as np
import numpy.typing as npt

from rag_model.errors import UsageError
from rag_model.index.quality.health import Effort

Figure = Literal["recall_mean", "recall_p5"]

_LEAST_MISSED = 1e-4  # assumed missed share at a recall of 1: no sweep has enough queries to measure less


def recall_at_distances(curve: Sequence[Effort], distances: float, figure: Figure = "recall_mean") -> float:
    """Return the recall of an index at a mean number of distance computations per query, in [0, 1].

    Exact at the points of the curve, log-log between them:
    log(1 - recall) is linear in log(distances), a share missed below 1e-4 counts as 1e-4.

    Args:
        curve: efforts of one index, in any order; of several with the same cost the best counts.
        distances: mean per query; within the range of the curve.
        figure: the mean over the queries, or their fifth percentile.

    Raises:
        UsageError: the curve has no points, or `distances` is outside its range: there is no extrapolation.
    """
    costs, recalls = _points(curve, figure)
    if not costs[0] <= distances <= costs[-1]:
        raise UsageError(
            f"recall at {distances:,.0f} distance computations is unknown: "
            f"the curve runs from {costs[0]:,.0f} to {costs[-1]:,.0f}, so sweep further"
        )
    exact = np.flatnonzero(costs == distances)
    if len(exact):
        return float(recalls[exact[0]])
    missed = np.log(np.maximum(1 - recalls, _LEAST_MISSED))
    return float(1 - np.exp(np.interp(np.log(distances), np.log(costs), missed)))


def compare(curve: Sequence[Effort], reference: Sequence[Effort], figure: Figure = "recall_mean") -> float:
    """Return the largest shortfall of `curve` against `reference` at equal distance computations.

    max of reference(x) - curve(x) over the points x of both curves that lie within both: .002 means that the recall of
    `curve` is at most .002 lower anywhere; a negative value means that it is higher everywhere.

    Raises:
        UsageError: a curve has no points, or their ranges of distances do not overlap.
    """
    ours, theirs = _points(curve, figure)[0], _points(reference, figure)[0]
    low, high = max(ours[0], theirs[0]), min(ours[-1], theirs[-1])
    if low > high:
        raise UsageError(
            f"the curves have no common range of distance computations ({ours[0]:,.0f} to {ours[-1]:,.0f}, "
            f"{theirs[0]:,.0f} to {theirs[-1]:,.0f}): sweep both further"
        )
    places = [float(x) for x in np.union1d(ours, theirs) if low <= x <= high]
    return max(recall_at_distances(reference, x, figure) - recall_at_distances(curve, x, figure) for x in places)


def _points(curve: Sequence[Effort], figure: Figure) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """Return the distances, ascending and distinct, and the best recall at each."""
    best: dict[float, float] = {}
    for effort in curve:
        best[effort.distances] = max(getattr(effort, figure), best.get(effort.distances, 0.0))
    if not best or min(best) <= 0:
        raise UsageError("a curve needs points with at least one distance computation: sweep the index")
    costs = sorted(best)
    return np.array(costs), np.array([best[cost] for cost in costs])
