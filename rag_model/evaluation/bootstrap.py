"""How sure a figure is: percentile bootstrap intervals over the questions (Efron & Tibshirani 1993, chapter 13).

The questions are drawn anew with replacement, the figure is taken of each draw, and the interval holds the middle
95 % of them. The draws come from a seed, so that a report repeats. Two models on the same questions are compared
pair by pair: the interval of the mean difference is narrower than the two intervals apart.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from rag_model.errors import UsageError

Numbers = npt.NDArray[np.float64]
_BLOCK = 1 << 22  # numbers drawn at once: 32 MB


@dataclass(frozen=True, slots=True)
class Resampling:
    """How an interval is drawn."""

    draws: int = 2000  # the ends of a 95 % interval are then steady to a few percent of its width
    level: float = 0.95
    seed: int = 0

    def __post_init__(self) -> None:
        if self.draws < 1 or not 0 < self.level < 1 or self.seed < 0:
            raise UsageError(f"an interval needs draws of at least 1, a level between 0 and 1 and a seed, not {self}")


RESAMPLING = Resampling()


@dataclass(frozen=True, slots=True)
class Estimate:
    """A figure with its interval."""

    value: float
    low: float
    high: float
    n: int  # questions it is of

    def __str__(self) -> str:
        """Return the figure as people read it: `0.412 [0.388, 0.436]`."""
        return f"{self.value:.3f} [{self.low:.3f}, {self.high:.3f}]"


def mean_interval(values: Sequence[float] | Numbers, resampling: Resampling = RESAMPLING) -> Estimate:
    """Return the mean of one value a question, with its percentile interval.

    Raises:
        UsageError: there is no value, or one is not a finite number.
    """
    numbers = _finite(values)
    low, high = _ends(_means(numbers, resampling), resampling.level)
    return Estimate(float(numbers.mean()), low, high, len(numbers))


def difference_interval(
    after: Sequence[float], before: Sequence[float], resampling: Resampling = RESAMPLING
) -> Estimate:
    """Return the mean of `after` minus `before`, question by question in the same order, with its interval.

    An interval that leaves out 0 says that the two differ by more than the choice of questions explains.

    Raises:
        UsageError: the two are not of the same questions, are empty, or hold what is no finite number.
    """
    if len(after) != len(before):
        raise UsageError(f"a paired difference needs the same questions twice, not {len(after)} and {len(before)}")
    return mean_interval(_finite(after) - _finite(before), resampling)


def interval_of_sums(
    counts: Numbers, figure: Callable[[Numbers], float], resampling: Resampling = RESAMPLING
) -> Estimate:
    """Return a figure of counts added up over the questions, such as corpus BLEU, with its percentile interval.

    Args:
        counts: (n, c), one row a question.
        figure: of (c,) sums; called once a draw.
        resampling: how the interval is drawn.

    Raises:
        UsageError: there is no row, or a count is not a finite number.
    """
    numbers = _finite(counts)
    sums = [numbers[block].sum(axis=1) for block in _draws(len(numbers), resampling, numbers.shape[1])]
    low, high = _ends(np.array([figure(one) for one in np.concatenate(sums)]), resampling.level)
    return Estimate(figure(numbers.sum(axis=0)), low, high, len(numbers))


def _finite(values: Sequence[float] | Numbers) -> Numbers:
    numbers = np.asarray(values, np.float64)
    if not numbers.size:
        raise UsageError("an interval needs at least one question")
    if not np.isfinite(numbers).all():
        raise UsageError("an interval of figures that are not finite numbers says nothing: look for NaN among them")
    return numbers


def _means(numbers: Numbers, resampling: Resampling) -> Numbers:
    return np.concatenate([numbers[block].mean(axis=1) for block in _draws(len(numbers), resampling)])


def _draws(n: int, resampling: Resampling, columns: int = 1) -> Iterator[npt.NDArray[np.int64]]:
    """Yield blocks of draws, each row n places with replacement; the same for the same n and seed."""
    random = np.random.default_rng(resampling.seed)
    rows = max(1, _BLOCK // (n * columns))
    for start in range(0, resampling.draws, rows):
        yield random.integers(0, n, (min(rows, resampling.draws - start), n))


def _ends(drawn: Numbers, level: float) -> tuple[float, float]:
    low, high = np.quantile(drawn, [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)
