"""Compare two curves of recall against distance computations, as a sweep of an index measures them.

Two indexes are compared at equal distance computations, never at equal `efSearch`: a denser graph
finds more at the same `efSearch` because each of its steps costs more, and time depends on the
machine.

Between two points of a sweep the missed share falls about as a power of the work, so its logarithm
is interpolated against the logarithm of the distances. Linear interpolation of the recalls
themselves would be one point of recall too low in the middle of a doubling.
"""

from collections.abc import Sequence
from typing import Literal

import numpy as np
import numpy.typing as npt

from rag_model.errors import UsageError
from rag_model.index.quality.results import OperatingPoint

RecallStatistic = Literal["recall_mean", "recall_p5"]

_MIN_MISSED = 1e-4  # missed share assumed at recall 1: no sweep has enough queries to measure less


def interpolate_recall(
    curve: Sequence[OperatingPoint], distances: float, statistic: RecallStatistic = "recall_mean"
) -> float:
    """Return the recall of an index at a mean number of distance computations per query, in [0, 1].

    It is exact at the points of the curve, and log-log between them: log(1 - recall) is linear in
    log(distances), where a missed share below 1e-4 counts as 1e-4.

    Args:
        curve: operating points of one index, in any order; of several at the same cost the best
            counts.
        distances: mean per query, within the range of the curve.
        statistic: the mean over the queries, or their fifth percentile.

    Raises:
        UsageError: the curve has no points, or `distances` is outside its range.
    """
    costs, recalls = _best_points(curve, statistic)
    if not costs[0] <= distances <= costs[-1]:
        raise UsageError(
            f"recall at {distances:,.0f} distance computations is unknown: "
            f"the curve runs from {costs[0]:,.0f} to {costs[-1]:,.0f}, so sweep further"
        )
    exact = np.flatnonzero(costs == distances)
    if len(exact):
        return float(recalls[exact[0]])
    missed = np.log(np.maximum(1 - recalls, _MIN_MISSED))
    return float(1 - np.exp(np.interp(np.log(distances), np.log(costs), missed)))


def compare_curves(
    curve: Sequence[OperatingPoint], reference: Sequence[OperatingPoint], statistic: RecallStatistic = "recall_mean"
) -> float:
    """Return the largest shortfall of `curve` against `reference` at equal distance computations.

    This is the maximum of reference(x) - curve(x) over the points x of both curves in their common
    range. .002 means that the recall of `curve` is at most .002 lower; a negative value, that it is
    always higher.

    Raises:
        UsageError: a curve has no points, or their ranges of distances do not overlap.
    """
    curve_costs, reference_costs = _best_points(curve, statistic)[0], _best_points(reference, statistic)[0]
    low, high = max(curve_costs[0], reference_costs[0]), min(curve_costs[-1], reference_costs[-1])
    if low > high:
        raise UsageError(
            "the curves have no common range of distance computations "
            f"({curve_costs[0]:,.0f} to {curve_costs[-1]:,.0f}, "
            f"{reference_costs[0]:,.0f} to {reference_costs[-1]:,.0f}): sweep both further"
        )
    common_costs = [float(x) for x in np.union1d(curve_costs, reference_costs) if low <= x <= high]
    return max(
        interpolate_recall(reference, x, statistic) - interpolate_recall(curve, x, statistic) for x in common_costs
    )


def _best_points(
    curve: Sequence[OperatingPoint], statistic: RecallStatistic
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """Return the distances, ascending and distinct, and the best recall at each."""
    best: dict[float, float] = {}
    for point in curve:
        best[point.distances] = max(getattr(point, statistic), best.get(point.distances, 0.0))
    if not best or min(best) <= 0:
        raise UsageError("a curve needs points with at least one distance computation: sweep the index")
    costs = sorted(best)
    return np.array(costs), np.array([best[cost] for cost in costs])
