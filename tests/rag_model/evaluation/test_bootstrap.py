"""Intervals against scipy's bootstrap, against the normal distribution where it holds, and against themselves."""

from dataclasses import astuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import bootstrap

from rag_model.errors import UsageError
from rag_model.evaluation.bootstrap import (
    Resampling,
    estimate_difference,
    estimate_from_sums,
    estimate_mean,
    estimate_means,
)

VALUES = np.random.default_rng(7).normal(0.4, 0.2, 200).tolist()
MANY = Resampling(draws=20_000)


def test_the_interval_of_a_mean_is_scipys() -> None:
    seen = estimate_mean(VALUES, MANY)
    peer = bootstrap((VALUES,), np.mean, method="percentile", n_resamples=20_000, rng=np.random.default_rng(1))
    assert seen.value == pytest.approx(np.mean(VALUES))
    assert seen.n == 200
    assert (seen.low, seen.high) == pytest.approx(tuple(peer.confidence_interval), abs=1e-3)


def test_the_interval_of_a_mean_is_the_normal_one_for_many() -> None:
    seen = estimate_mean(VALUES, MANY)
    half = 1.959964 * np.std(VALUES) / np.sqrt(len(VALUES))
    assert (seen.low, seen.high) == pytest.approx((seen.value - half, seen.value + half), abs=2e-3)


def test_a_paired_difference_is_scipys() -> None:
    better = [
        value + noise for value, noise in zip(VALUES, np.random.default_rng(3).normal(0.05, 0.1, 200), strict=True)
    ]
    seen = estimate_difference(better, VALUES, MANY)
    peer = bootstrap(
        (better, VALUES),
        lambda a, b, axis: np.mean(a - b, axis=axis),
        paired=True,
        vectorized=True,
        method="percentile",
        n_resamples=20_000,
        rng=np.random.default_rng(1),
    )
    assert (seen.low, seen.high) == pytest.approx(tuple(peer.confidence_interval), abs=1e-3)
    assert seen.low > 0
    assert seen.high - seen.low < estimate_mean(VALUES).high - estimate_mean(VALUES).low


def test_any_figure_has_an_interval_by_the_same_draws() -> None:
    columns = np.stack([VALUES, np.ones(len(VALUES))], axis=1)
    seen = estimate_from_sums(columns, lambda sums: float(sums[0] / sums[1]))
    assert astuple(seen) == pytest.approx(astuple(estimate_mean(VALUES)))


@given(st.lists(st.floats(0, 1), min_size=1, max_size=30), st.integers(0, 9))
def test_intervals_repeat_and_lie_within_the_values(values: list[float], seed: int) -> None:
    few = Resampling(draws=50, seed=seed)
    seen = estimate_mean(values, few)
    assert seen == estimate_mean(values, few)
    assert min(values) - 1e-12 <= seen.low <= seen.high <= max(values) + 1e-12


def test_blocks_draw_what_one_draw_would(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = estimate_mean(VALUES)
    monkeypatch.setattr("rag_model.evaluation.bootstrap._BLOCK_SIZE", 1000)
    assert estimate_mean(VALUES) == whole


def test_an_estimate_reads_as_people_write_it() -> None:
    assert str(estimate_mean([0.5, 0.5])) == "0.500 [0.500, 0.500]"


@pytest.mark.parametrize("values", [[], [0.1, float("nan")], [float("inf")]])
def test_nothing_and_nan_have_no_interval(values: list[float]) -> None:
    with pytest.raises(UsageError, match="a confidence interval"):
        estimate_mean(values)


def test_differences_need_the_same_questions() -> None:
    with pytest.raises(UsageError, match="2 and 1"):
        estimate_difference([1, 2], [1])
    with pytest.raises(UsageError, match="at least one"):
        estimate_from_sums(np.empty((0, 2)), len)


@pytest.mark.parametrize("wrong", [{"draws": 0}, {"level": 1.0}, {"seed": -1}])
def test_settings_that_make_no_sense(wrong: dict[str, float]) -> None:
    with pytest.raises(UsageError, match=r"the interval settings .* are invalid: give draws >= 1"):
        Resampling(**wrong)


def test_many_columns_are_resampled_as_each_alone() -> None:
    random = np.random.default_rng(3)
    columns = {name: list(random.random(57)) for name in "abc"} | {"shares": [float(n % 3 == 0) for n in range(57)]}
    together = estimate_means(columns)
    for name, values in columns.items():
        alone = estimate_mean(values)
        assert (together[name].value, together[name].n) == (pytest.approx(alone.value), 57)
        assert (together[name].low, together[name].high) == pytest.approx((alone.low, alone.high))
    assert estimate_means({}) == {}
    with pytest.raises(UsageError, match="NaN"):
        estimate_means({"a": [1.0], "b": [float("nan")]})
