"""Percentile bootstrap intervals over the questions (Efron & Tibshirani 1993, chapter 13).

The questions are drawn again with replacement, the figure is computed for each draw, and the interval holds the middle
95 % of them. The draws come from a seed, so that a report is reproducible. Two models on the same questions are
compared pair by pair: the interval of the mean difference is narrower than two separate intervals.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from rag_model.errors import UsageError

Numbers = npt.NDArray[np.float64]
_BLOCK = 1 << 22  # numbers drawn at once: 32 MB


@dataclass(frozen=True, slots=True)
class Resampling:
    """Settings of an interval."""

    draws: int = 2000  # gives the ends of a 95 % interval to a few percent of its width
    level: float = 0.95
    seed: int = 0

    def __post_init__(self) -> None:
        if self.draws < 1 or not 0 < self.level < 1 or self.seed < 0:
            raise UsageError(f"an interval has {self}: need draws >= 1, 0 < level < 1 and seed >= 0")


RESAMPLING = Resampling()


@dataclass(frozen=True, slots=True)
class Estimate:
    """A figure with its interval."""

    value: float
    low: float
    high: float
    n: int  # number of questions

    def __str__(self) -> str:
        """Return the figure as text: `0.412 [0.388, 0.436]`."""
        return f"{self.value:.3f} [{self.low:.3f}, {self.high:.3f}]"


def mean_interval(values: Sequence[float] | Numbers, resampling: Resampling = RESAMPLING) -> Estimate:
    """Return the mean of one value per question, with its percentile interval.

    Raises:
        UsageError: there is no value, or one is not a finite number.
    """
    numbers = _finite(values)
    low, high = _ends(_means(numbers, resampling), resampling.level)
    return Estimate(float(numbers.mean()), low, high, len(numbers))


def mean_intervals(columns: Mapping[str, Sequence[float]], resampling: Resampling = RESAMPLING) -> dict[str, Estimate]:
    """Return the mean of each named column of one value per question, with its interval; all over the same draws.

    Equal to `mean_interval` of each, at the cost of one.

    Raises:
        UsageError: there is no value, or one is not a finite number.
    """
    if not columns:
        return {}
    numbers = np.stack([_finite(column) for column in columns.values()], axis=1)  # (n, m)
    n = len(numbers)
    drawn = []
    for block in _draws(n, resampling):  # (r, n): how often each question is drawn, times its values
        rows = np.arange(len(block))[:, None] * n
        times = np.bincount((block + rows).ravel(), minlength=block.size).reshape(block.shape)
        drawn.append(times @ numbers / n)  # (r, n) @ (n, m) -> (r, m)
    means = np.concatenate(drawn)
    ends = [_ends(means[:, column], resampling.level) for column in range(numbers.shape[1])]
    values = numbers.mean(axis=0)
    return {name: Estimate(float(values[i]), *ends[i], n) for i, name in enumerate(columns)}


def difference_interval(
    after: Sequence[float], before: Sequence[float], resampling: Resampling = RESAMPLING
) -> Estimate:
    """Return the mean of `after` minus `before`, question by question in the same order, with its interval.

    If the interval does not contain 0, the difference is larger than the choice of questions explains.

    Raises:
        UsageError: they differ in length, are empty, or hold a number that is not finite.
    """
    if len(after) != len(before):
        raise UsageError(f"a paired difference needs the same questions twice, not {len(after)} and {len(before)}")
    return mean_interval(_finite(after) - _finite(before), resampling)


def interval_of_sums(
    counts: Numbers, figure: Callable[[Numbers], float], resampling: Resampling = RESAMPLING
) -> Estimate:
    """Return a figure of counts summed over the questions, such as corpus BLEU, with its percentile interval.

    Args:
        counts: (n, c), one row per question.
        figure: a function of (c,) sums; called once per draw.
        resampling: how the interval is drawn.

    Raises:
        UsageError: there is no row, or a count is not a finite number.
    """
    numbers = _finite(counts)
    # (r, n) -> (r, n, c) -> (r, c)
    sums = [numbers[block].sum(axis=1) for block in _draws(len(numbers), resampling, numbers.shape[1])]
    low, high = _ends(np.array([figure(one) for one in np.concatenate(sums)]), resampling.level)
    return Estimate(figure(numbers.sum(axis=0)), low, high, len(numbers))


def _finite(values: Sequence[float] | Numbers) -> Numbers:
    numbers = np.asarray(values, np.float64)
    if not numbers.size:
        raise UsageError("an interval needs at least one question")
    if not np.isfinite(numbers).all():
        raise UsageError("an interval needs finite numbers: look for NaN in the figures")
    return numbers


def _means(numbers: Numbers, resampling: Resampling) -> Numbers:
    return np.concatenate([numbers[block].mean(axis=1) for block in _draws(len(numbers), resampling)])  # (r, n) -> (r,)


def _draws(n: int, resampling: Resampling, columns: int = 1) -> Iterator[npt.NDArray[np.int64]]:
    """Yield blocks of draws, (r, n): each row has n places, drawn with replacement; equal for equal n and seed."""
    random = np.random.default_rng(resampling.seed)
    rows = max(1, _BLOCK // (n * columns))
    for start in range(0, resampling.draws, rows):
        yield random.integers(0, n, (min(rows, resampling.draws - start), n))


def _ends(drawn: Numbers, level: float) -> tuple[float, float]:
    low, high = np.quantile(drawn, [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)
