"""Percentile bootstrap confidence intervals of metrics over questions.

The method is described by Efron & Tibshirani 1993, chapter 13: resample the questions with
replacement, compute the statistic for each resample, and take the middle 95 % of the values as the
interval. The resamples depend only on a seed, so that a report is reproducible. To compare two
models, the difference is computed for each question, because the interval of the mean difference is
narrower than the intervals of the two means.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from rag_model.errors import UsageError

Numbers = npt.NDArray[np.float64]
_BLOCK_SIZE = 1 << 22  # maximum number of row numbers that are drawn at once, 32 MB


@dataclass(frozen=True, slots=True)
class Resampling:
    """Settings of a confidence interval."""

    # Number of resamples. With 2,000, the bounds of a 95 % interval are exact to a few percent of
    # its width.
    draws: int = 2000
    level: float = 0.95  # confidence level
    seed: int = 0  # random seed of the resamples

    def __post_init__(self) -> None:
        if self.draws < 1 or not 0 < self.level < 1 or self.seed < 0:
            raise UsageError(f"the interval settings {self} are invalid: give draws >= 1, 0 < level < 1 and seed >= 0")


DEFAULT_RESAMPLING = Resampling()


@dataclass(frozen=True, slots=True)
class Estimate:
    """A metric with its confidence interval."""

    value: float  # value of the metric
    low: float  # lower bound of the interval
    high: float  # upper bound of the interval
    n: int  # number of questions

    def __str__(self) -> str:
        """Return the metric as text: `0.412 [0.388, 0.436]`."""
        return f"{self.value:.3f} [{self.low:.3f}, {self.high:.3f}]"


def estimate_mean(values: Sequence[float] | Numbers, resampling: Resampling = DEFAULT_RESAMPLING) -> Estimate:
    """Return the mean of one value per question, with its percentile interval.

    Raises:
        UsageError: there are no values, or a value is not finite.
    """
    samples = _to_finite_array(values)
    low, high = _compute_bounds(_compute_resampled_means(samples, resampling), resampling.level)
    return Estimate(float(samples.mean()), low, high, len(samples))


def estimate_means(
    columns: Mapping[str, Sequence[float]], resampling: Resampling = DEFAULT_RESAMPLING
) -> dict[str, Estimate]:
    """Return the mean of each named column with its interval; a column has one value per question.

    All columns use the same resamples, which are drawn once. The results equal those of
    `estimate_mean` for each column.

    Raises:
        UsageError: there are no values, or a value is not finite.
    """
    if not columns:
        return {}
    samples = np.stack([_to_finite_array(column) for column in columns.values()], axis=1)  # (n, m)
    n = len(samples)
    mean_blocks = []
    for block in _iter_resamples(n, resampling):  # (r, n) positions of questions
        row_offsets = np.arange(len(block))[:, None] * n
        multiplicities = np.bincount((block + row_offsets).ravel(), minlength=block.size).reshape(block.shape)
        mean_blocks.append(multiplicities @ samples / n)  # (r, n) @ (n, m) -> (r, m)
    resampled_means = np.concatenate(mean_blocks)
    bounds = [_compute_bounds(resampled_means[:, column], resampling.level) for column in range(samples.shape[1])]
    column_means = samples.mean(axis=0)
    return {name: Estimate(float(column_means[i]), *bounds[i], n) for i, name in enumerate(columns)}


def estimate_difference(
    after: Sequence[float], before: Sequence[float], resampling: Resampling = DEFAULT_RESAMPLING
) -> Estimate:
    """Return the mean of `after` minus `before` with its interval, paired question by question.

    Equal positions of `before` and `after` are the same question. If the interval does not contain
    0, the difference is not just due to the choice of questions.

    Raises:
        UsageError: the lengths differ, there is no value, or a value is not finite.
    """
    if len(after) != len(before):
        raise UsageError(f"{len(after)} and {len(before)} values cannot be paired: give one value per question in both")
    return estimate_mean(_to_finite_array(after) - _to_finite_array(before), resampling)


def estimate_from_sums(
    counts: Numbers, statistic: Callable[[Numbers], float], resampling: Resampling = DEFAULT_RESAMPLING
) -> Estimate:
    """Return a statistic of summed counts, such as corpus BLEU, with its percentile interval.

    Args:
        counts: (n, c) counts, one row per question.
        statistic: function of the (c,) column sums; it is called once per resample.
        resampling: settings of the interval.

    Raises:
        UsageError: there are no rows, or a count is not finite.
    """
    samples = _to_finite_array(counts)
    # (r, n) -> (r, n, c) -> (r, c)
    sums = [samples[block].sum(axis=1) for block in _iter_resamples(len(samples), resampling, samples.shape[1])]
    low, high = _compute_bounds(
        np.array([statistic(sums_of_draw) for sums_of_draw in np.concatenate(sums)]), resampling.level
    )
    return Estimate(statistic(samples.sum(axis=0)), low, high, len(samples))


def _to_finite_array(values: Sequence[float] | Numbers) -> Numbers:
    samples = np.asarray(values, np.float64)
    if not samples.size:
        raise UsageError("a confidence interval needs at least one question")
    if not np.isfinite(samples).all():
        raise UsageError("a confidence interval needs finite numbers: look for NaN among the values")
    return samples


def _compute_resampled_means(samples: Numbers, resampling: Resampling) -> Numbers:
    # (r, n) -> (r,).
    return np.concatenate([samples[block].mean(axis=1) for block in _iter_resamples(len(samples), resampling)])


def _iter_resamples(n: int, resampling: Resampling, n_columns: int = 1) -> Iterator[npt.NDArray[np.int64]]:
    """Yield (r, n) blocks of resamples; a row has the positions of n questions, which may repeat.

    Equal `n` and seed give equal blocks.
    """
    rng = np.random.default_rng(resampling.seed)
    draws_per_block = max(1, _BLOCK_SIZE // (n * n_columns))
    for first_draw in range(0, resampling.draws, draws_per_block):
        yield rng.integers(0, n, (min(draws_per_block, resampling.draws - first_draw), n))


def _compute_bounds(resampled_values: Numbers, level: float) -> tuple[float, float]:
    low, high = np.quantile(resampled_values, [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)
