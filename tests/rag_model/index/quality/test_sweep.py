"""Indexes are compared at equal work, and the comparison knows what it does not know."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rag_model.errors import UsageError
from rag_model.index.quality.results import OperatingPoint
from rag_model.index.quality.sweep import compare_curves, interpolate_recall


def effort(distances: float, recall: float, p5: float = 0.5) -> OperatingPoint:
    return OperatingPoint("efSearch=1", recall, p5, 1.0, distances)


# One shot at a million x 96: what a sweep of efSearch 32, 64, 128, 256 found.
ONE_SHOT = [effort(899, 0.873), effort(1525, 0.957), effort(2689, 0.990), effort(4786, 0.998)]


def test_curve_points_may_be_in_any_order() -> None:
    for point in ONE_SHOT:
        assert interpolate_recall(ONE_SHOT[::-1], point.distances) == point.recall_mean


def test_missed_share_is_interpolated_as_a_power_law() -> None:
    power = [effort(x, 1 - 500 / x**1.5) for x in (100, 200, 400, 1600)]
    for x in (101, 150, 283, 900, 1599):
        assert interpolate_recall(power, x) == pytest.approx(1 - 500 / x**1.5, abs=1e-9)


def test_curve_that_reaches_recall_one_is_interpolated() -> None:
    whole = [effort(10, 0.9), effort(20, 1.0), effort(40, 1.0)]
    assert interpolate_recall(whole, 20) == 1.0
    assert 0.9 < interpolate_recall(whole, 15) < 1.0
    assert interpolate_recall(whole, 30) == pytest.approx(1.0, abs=2e-4)


def test_no_extrapolation_outside_the_curve() -> None:
    for distances in (898, 4787):
        with pytest.raises(UsageError, match=r"899 to 4,786, so sweep further"):
            interpolate_recall(ONE_SHOT, distances)
    with pytest.raises(UsageError, match="sweep the index"):
        interpolate_recall([], 1)


def test_compare_returns_the_largest_shortfall() -> None:
    assert compare_curves(ONE_SHOT, ONE_SHOT) == 0.0
    cheaper = [effort(point.distances / 2, point.recall_mean) for point in ONE_SHOT]
    assert compare_curves(cheaper, ONE_SHOT) < -0.005  # the same recall for half the work is better everywhere
    assert compare_curves(ONE_SHOT, cheaper) > 0.05
    dent = [effort(p.distances, p.recall_mean - (0.01 if p.distances == 1525 else -0.001)) for p in ONE_SHOT]
    assert compare_curves(dent, ONE_SHOT) == pytest.approx(0.01)


def test_compare_uses_distances_not_settings() -> None:
    dense = [effort(p.distances * 1.3, p.recall_mean + 0.002) for p in ONE_SHOT]
    assert compare_curves(dense, ONE_SHOT) > 0.01


def test_compare_the_fifth_percentile() -> None:
    ours = [effort(10, 0.9, 0.4), effort(20, 0.99, 0.7)]
    theirs = [effort(10, 0.9, 0.6), effort(20, 0.99, 0.7)]
    assert compare_curves(ours, theirs) == 0.0
    assert compare_curves(ours, theirs, "recall_p5") == pytest.approx(0.2)


def test_best_of_settings_at_equal_cost_counts() -> None:
    twice = [effort(10, 0.8), effort(10, 0.9), effort(20, 0.95)]  # efSearch below k is raised to k
    assert interpolate_recall(twice, 10) == 0.9
    assert compare_curves(twice, [effort(10, 0.9), effort(20, 0.95)]) == 0.0


def test_disjoint_curves_cannot_be_compared() -> None:
    with pytest.raises(UsageError, match="have no common range"):
        compare_curves([effort(10, 0.5), effort(20, 0.6)], [effort(21, 0.5), effort(40, 0.6)])


CURVES = st.lists(st.builds(effort, st.floats(1, 1e6), st.floats(0, 1)), min_size=1, max_size=8)


@given(CURVES, st.floats(0, 1))
def test_interpolated_recall_lies_between_its_neighbors(curve: list[OperatingPoint], share: float) -> None:
    low, high = min(e.distances for e in curve), max(e.distances for e in curve)
    recall = interpolate_recall(curve, min(high, low + share * (high - low)))
    assert min(e.recall_mean for e in curve) - 1e-3 <= recall <= max(e.recall_mean for e in curve) + 1e-9
