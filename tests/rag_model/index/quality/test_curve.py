"""Indexes are compared at equal work, and the comparison knows what it does not know."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rag_model.errors import UsageError
from rag_model.index.quality.curve import compare, recall_at_distances
from rag_model.index.quality.health import Effort


def effort(distances: float, recall: float, p5: float = 0.5) -> Effort:
    return Effort("efSearch=1", recall, p5, 1.0, distances)


# One shot at a million x 96: what a sweep of efSearch 32, 64, 128, 256 found.
ONE_SHOT = [effort(899, 0.873), effort(1525, 0.957), effort(2689, 0.990), effort(4786, 0.998)]


def test_the_points_of_a_curve_are_kept_in_any_order() -> None:
    for point in ONE_SHOT:
        assert recall_at_distances(ONE_SHOT[::-1], point.distances) == point.recall_mean


def test_between_points_the_missed_share_falls_as_a_power_of_the_work() -> None:
    power = [effort(x, 1 - 500 / x**1.5) for x in (100, 200, 400, 1600)]
    for x in (101, 150, 283, 900, 1599):
        assert recall_at_distances(power, x) == pytest.approx(1 - 500 / x**1.5, abs=1e-9)


def test_a_curve_that_reaches_everything_is_followed_to_its_end() -> None:
    whole = [effort(10, 0.9), effort(20, 1.0), effort(40, 1.0)]
    assert recall_at_distances(whole, 20) == 1.0
    assert 0.9 < recall_at_distances(whole, 15) < 1.0
    assert recall_at_distances(whole, 30) == pytest.approx(1.0, abs=2e-4)


def test_outside_the_curve_nothing_is_claimed() -> None:
    for distances in (898, 4787):
        with pytest.raises(UsageError, match=r"899 to 4,786, so sweep further"):
            recall_at_distances(ONE_SHOT, distances)
    with pytest.raises(UsageError, match="sweep the index"):
        recall_at_distances([], 1)


def test_the_shortfall_is_the_largest_where_both_were_measured() -> None:
    assert compare(ONE_SHOT, ONE_SHOT) == 0.0
    cheaper = [effort(point.distances / 2, point.recall_mean) for point in ONE_SHOT]
    assert compare(cheaper, ONE_SHOT) < -0.005  # the same recall for half the work is better everywhere
    assert compare(ONE_SHOT, cheaper) > 0.05
    dent = [effort(p.distances, p.recall_mean - (0.01 if p.distances == 1525 else -0.001)) for p in ONE_SHOT]
    assert compare(dent, ONE_SHOT) == pytest.approx(0.01)


def test_a_denser_graph_that_looks_better_at_equal_settings_is_seen_through() -> None:
    dense = [effort(p.distances * 1.3, p.recall_mean + 0.002) for p in ONE_SHOT]
    assert compare(dense, ONE_SHOT) > 0.01


def test_the_unlucky_are_compared_as_well() -> None:
    ours = [effort(10, 0.9, 0.4), effort(20, 0.99, 0.7)]
    theirs = [effort(10, 0.9, 0.6), effort(20, 0.99, 0.7)]
    assert compare(ours, theirs) == 0.0
    assert compare(ours, theirs, "recall_p5") == pytest.approx(0.2)


def test_settings_that_cost_the_same_count_once_by_the_best() -> None:
    twice = [effort(10, 0.8), effort(10, 0.9), effort(20, 0.95)]  # efSearch below k is raised to k
    assert recall_at_distances(twice, 10) == 0.9
    assert compare(twice, [effort(10, 0.9), effort(20, 0.95)]) == 0.0


def test_curves_apart_cannot_be_compared() -> None:
    with pytest.raises(UsageError, match="have no common range"):
        compare([effort(10, 0.5), effort(20, 0.6)], [effort(21, 0.5), effort(40, 0.6)])


CURVES = st.lists(st.builds(effort, st.floats(1, 1e6), st.floats(0, 1)), min_size=1, max_size=8)


@given(CURVES, st.floats(0, 1))
def test_what_is_read_off_lies_between_the_measured(curve: list[Effort], share: float) -> None:
    low, high = min(e.distances for e in curve), max(e.distances for e in curve)
    recall = recall_at_distances(curve, min(high, low + share * (high - low)))
    assert min(e.recall_mean for e in curve) - 1e-3 <= recall <= max(e.recall_mean for e in curve) + 1e-9
