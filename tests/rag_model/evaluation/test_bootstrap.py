"""Confidence intervals agree with scipy's bootstrap and with the normal distribution, and repeat."""

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
MANY_DRAWS = Resampling(draws=20_000)


def test_the_interval_of_a_mean_is_that_of_scipy() -> None:
    estimate = estimate_mean(VALUES, MANY_DRAWS)
    reference = bootstrap((VALUES,), np.mean, method="percentile", n_resamples=20_000, rng=np.random.default_rng(1))
    assert estimate.value == pytest.approx(np.mean(VALUES))
    assert estimate.n == 200
    assert (estimate.low, estimate.high) == pytest.approx(tuple(reference.confidence_interval), abs=1e-3)


def test_the_interval_of_a_large_sample_is_the_normal_one() -> None:
    estimate = estimate_mean(VALUES, MANY_DRAWS)
    half = 1.959964 * np.std(VALUES) / np.sqrt(len(VALUES))
    assert (estimate.low, estimate.high) == pytest.approx((estimate.value - half, estimate.value + half), abs=2e-3)


def test_the_interval_of_a_paired_difference_is_that_of_scipy() -> None:
    better_values = [
        value + noise for value, noise in zip(VALUES, np.random.default_rng(3).normal(0.05, 0.1, 200), strict=True)
    ]
    estimate = estimate_difference(better_values, VALUES, MANY_DRAWS)
    reference = bootstrap(
        (better_values, VALUES),
        lambda a, b, axis: np.mean(a - b, axis=axis),
        paired=True,
        vectorized=True,
        method="percentile",
        n_resamples=20_000,
        rng=np.random.default_rng(1),
    )
    assert (estimate.low, estimate.high) == pytest.approx(tuple(reference.confidence_interval), abs=1e-3)
    assert estimate.low > 0
    assert estimate.high - estimate.low < estimate_mean(VALUES).high - estimate_mean(VALUES).low


def test_a_ratio_of_sums_has_the_interval_of_the_mean() -> None:
    columns = np.stack([VALUES, np.ones(len(VALUES))], axis=1)
    estimate = estimate_from_sums(columns, lambda sums: float(sums[0] / sums[1]))
    assert astuple(estimate) == pytest.approx(astuple(estimate_mean(VALUES)))


@given(st.lists(st.floats(0, 1), min_size=1, max_size=30), st.integers(0, 9))
def test_intervals_repeat_and_lie_within_the_values(values: list[float], seed: int) -> None:
    resampling = Resampling(draws=50, seed=seed)
    estimate = estimate_mean(values, resampling)
    assert estimate == estimate_mean(values, resampling)
    assert min(values) - 1e-12 <= estimate.low <= estimate.high <= max(values) + 1e-12


def test_draws_do_not_depend_on_the_block_size(monkeypatch: pytest.MonkeyPatch) -> None:
    estimate = estimate_mean(VALUES)
    monkeypatch.setattr("rag_model.evaluation.bootstrap._BLOCK_SIZE", 1000)
    assert estimate_mean(VALUES) == estimate


def test_an_estimate_is_formatted_with_its_interval() -> None:
    assert str(estimate_mean([0.5, 0.5])) == "0.500 [0.500, 0.500]"


@pytest.mark.parametrize("values", [[], [0.1, float("nan")], [float("inf")]])
def test_no_values_and_nan_are_refused(values: list[float]) -> None:
    with pytest.raises(UsageError, match="a confidence interval"):
        estimate_mean(values)


def test_differences_need_the_same_questions() -> None:
    with pytest.raises(UsageError, match="2 and 1"):
        estimate_difference([1, 2], [1])
    with pytest.raises(UsageError, match="at least one"):
        estimate_from_sums(np.empty((0, 2)), len)


@pytest.mark.parametrize("settings", [{"draws": 0}, {"level": 1.0}, {"seed": -1}])
def test_invalid_settings_are_refused(settings: dict[str, float]) -> None:
    with pytest.raises(UsageError, match=r"the interval settings .* are invalid: give draws >= 1"):
        Resampling(**settings)


def test_columns_have_the_same_intervals_together_and_alone() -> None:
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
