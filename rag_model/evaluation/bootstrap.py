"""Percentile bootstrap confidence intervals over the questions.

The method is that of Efron & Tibshirani 1993, chapter 13: resample the questions with replacement,
compute the statistic for each resample, and take the middle 95 % of the values as the interval.
The resamples come from a seed, so that a report is reproducible. Two models on the same questions
are compared question by question, because the interval of the mean difference is narrower than two
separate intervals.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from rag_model.errors import UsageError

Numbers = npt.NDArray[np.float64]
_BLOCK = 1 << 22  # random numbers per block: 32 MB


@dataclass(frozen=True, slots=True)
class Resampling:
    """Settings of a confidence interval."""

    # resamples; places the bounds of a 95 % interval to a few percent of its width.
    draws: int = 2000
    level: float = 0.95
    seed: int = 0

    def __post_init__(self) -> None:
        if self.draws < 1 or not 0 < self.level < 1 or self.seed < 0:
            raise UsageError(f"invalid interval settings {self}: give draws >= 1, 0 < level < 1 and seed >= 0")


DEFAULT_RESAMPLING = Resampling()


@dataclass(frozen=True, slots=True)
class Estimate:
    """A metric with its confidence interval."""

    value: float
    low: float
    high: float
    n: int  # number of questions

    def __str__(self) -> str:
        """Return the metric as text: `0.412 [0.388, 0.436]`."""
        return f"{self.value:.3f} [{self.low:.3f}, {self.high:.3f}]"


def estimate_mean(values: Sequence[float] | Numbers, resampling: Resampling = DEFAULT_RESAMPLING) -> Estimate:
    """Return the mean of one value per question, with its percentile interval.

    Raises:
        UsageError: there is no value, or a value is not finite.
    """
    numbers = _finite(values)
    low, high = _ends(_means(numbers, resampling), resampling.level)
    return Estimate(float(numbers.mean()), low, high, len(numbers))


def estimate_means(
    columns: Mapping[str, Sequence[float]], resampling: Resampling = DEFAULT_RESAMPLING
) -> dict[str, Estimate]:
    """Return the mean of each named column with its interval; a column has one value per question.

    All columns share the resamples. The results equal those of `estimate_mean` for each column, at
    the cost of one call.

    Raises:
        UsageError: there is no value, or a value is not finite.
    """
    if not columns:
        return {}
    numbers = np.stack([_finite(column) for column in columns.values()], axis=1)  # (n, m)
    n = len(numbers)
    mean_blocks = []
    for block in _draws(n, resampling):  # (r, n) question numbers
        rows = np.arange(len(block))[:, None] * n
        multiplicities = np.bincount((block + rows).ravel(), minlength=block.size).reshape(block.shape)
        mean_blocks.append(multiplicities @ numbers / n)  # (r, n) @ (n, m) -> (r, m)
    means = np.concatenate(mean_blocks)
    ends = [_ends(means[:, column], resampling.level) for column in range(numbers.shape[1])]
    values = numbers.mean(axis=0)
    return {name: Estimate(float(values[i]), *ends[i], n) for i, name in enumerate(columns)}


def estimate_difference(
    after: Sequence[float], before: Sequence[float], resampling: Resampling = DEFAULT_RESAMPLING
) -> Estimate:
    """Return the mean of `after` minus `before` with its interval, paired question by question.

    Both list the questions in the same order. If the interval does not contain 0, the choice of
    questions does not explain the difference.

    Raises:
        UsageError: the lengths differ, there is no value, or a value is not finite.
    """
    if len(after) != len(before):
        raise UsageError(f"{len(after)} and {len(before)} values cannot be paired: give one value per question to both")
    return estimate_mean(_finite(after) - _finite(before), resampling)


def estimate_from_sums(
    counts: Numbers, statistic: Callable[[Numbers], float], resampling: Resampling = DEFAULT_RESAMPLING
) -> Estimate:
    """Return a statistic of summed counts, such as corpus BLEU, with its percentile interval.

    Args:
        counts: (n, c), one row per question.
        statistic: a function of (c,) sums; called once per resample.
        resampling: how the interval is drawn.

    Raises:
        UsageError: there is no row, or a count is not finite.
    """
    numbers = _finite(counts)
    # (r, n) -> (r, n, c) -> (r, c)
    sums = [numbers[block].sum(axis=1) for block in _draws(len(numbers), resampling, numbers.shape[1])]
    low, high = _ends(np.array([statistic(sums_of_draw) for sums_of_draw in np.concatenate(sums)]), resampling.level)
    return Estimate(statistic(numbers.sum(axis=0)), low, high, len(numbers))


def _finite(values: Sequence[float] | Numbers) -> Numbers:
    numbers = np.asarray(values, np.float64)
    if not numbers.size:
        raise UsageError("a confidence interval needs at least one question")
    if not np.isfinite(numbers).all():
        raise UsageError("a confidence interval needs finite numbers: look for NaN among the values")
    return numbers


def _means(numbers: Numbers, resampling: Resampling) -> Numbers:
    # (r, n) -> (r,).
    return np.concatenate([numbers[block].mean(axis=1) for block in _draws(len(numbers), resampling)])


def _draws(n: int, resampling: Resampling, columns: int = 1) -> Iterator[npt.NDArray[np.int64]]:
    """Yield blocks of resamples, (r, n): each row has n question numbers, drawn with replacement.

    Equal `n` and seed give equal blocks.
    """
    random = np.random.default_rng(resampling.seed)
    rows = max(1, _BLOCK // (n * columns))
    for start in range(0, resampling.draws, rows):
        yield random.integers(0, n, (min(rows, resampling.draws - start), n))


def _ends(draws: Numbers, level: float) -> tuple[float, float]:
    low, high = np.quantile(draws, [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)
