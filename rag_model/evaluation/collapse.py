"""Does the model read? Retrieval collapse, measured and refused.

Trained end to end, a retriever may learn to fetch the same passages whatever is asked, and the generator to ignore
them; the loss looks healthy and the system is closed-book (Lewis et al. 2020, appendix H). Three figures show it: how
many distinct passages a set of questions is given, how evenly (entropy), and how many answers stay as they are when
each question is shown another question's passages.
"""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from rag_model.errors import RefusedError, UsageError
from rag_model.evaluation.answers import normalise


class CollapsedError(RefusedError):
    """The retriever gives all questions the same passages, or the generator does not read them."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Where a set of questions counts as collapsed; a limit at its loosest (0.0, 1.0) switches its check off."""

    questions: int = 20  # of fewer nothing is said: chance alone makes a handful look alike
    # Measured with MiniLM at k 5, 300 questions: .88 on those about 1,581 passages, .65 on questions about other
    # things; .50 and .18 with the questions' vectors pulled 90 % and 95 % of the way to their mean.
    least_spread: float = 0.3
    # Of a model that reads most answers change; one that does not read changes none. Of labels (yes, no) half
    # stay by chance.
    most_unchanged: float = 0.9

    def __post_init__(self) -> None:
        if self.questions < 1 or not (0 <= self.least_spread <= 1 and 0 <= self.most_unchanged <= 1):
            raise UsageError(f"limits of collapse are a count from 1 and shares from 0 to 1, not {self}")


LIMITS = Limits()


@dataclass(frozen=True, slots=True)
class Collapse:
    """What a set of questions was given to read, and whether it was read."""

    questions: int
    k: float  # passages a question, mean
    distinct: int  # passages given to any question
    spread: float  # entropy of the passages' distribution: 0 = all questions share theirs, 1 = as even as can be
    unchanged: float | None = None  # share of answers as they were under shuffled passages; None = not measured

    def metrics(self) -> dict[str, float]:
        """Return the figures by name, as journals and reports keep them."""
        return {name: value for name, value in asdict(self).items() if value is not None}

    def reason(self, limits: Limits = LIMITS) -> str:
        """Return one sentence that says what has collapsed and what to do; empty if nothing has."""
        if self.questions < limits.questions:
            return ""
        if self.k and self.spread < limits.least_spread:
            return (
                f"retrieval has collapsed: {self.questions:,} questions were given {self.distinct:,} distinct passages"
                f" (spread {self.spread:.2f}, wanted {limits.least_spread:g}): go back to a checkpoint before, or"
                " lower the question encoder's learning rate"
            )
        if self.unchanged is not None and self.unchanged > limits.most_unchanged:
            return (
                f"the model does not read: {self.unchanged:.0%} of {self.questions:,} answers stay as they are when"
                f" the passages are another question's (at most {limits.most_unchanged:.0%} wanted): train on"
                " questions that it cannot answer without passages"
            )
        return ""

    def check(self, limits: Limits = LIMITS) -> None:
        """Do nothing if all is well.

        Raises:
            CollapsedError: retrieval has collapsed, or passages are not read.
        """
        if reason := self.reason(limits):
            raise CollapsedError(reason)


def measure(passages: Sequence[Sequence[str]], corpus: int, unchanged: float | None = None) -> Collapse:
    """Measure what each question was given.

    Args:
        passages: the ids of each question's passages, without repeats inside one question.
        corpus: how many passages there are to give.
        unchanged: the share that `unchanged_share` returns, where it was measured.

    The spread is (H - log k) / (log min(n k, corpus) - log k), H = -Σ_d p_d log p_d with p_d the share of d among
    the n k passages given: the least that n questions with k passages each can have is log k, the most is the log
    of all that could be given. 1.0 where there is no choice (one question, or k the whole corpus).
    """
    counts = Counter(passage for given in passages for passage in given)
    given = counts.total()
    k = given / len(passages) if passages else 0.0
    return Collapse(len(passages), k, len(counts), _spread(counts, k, min(given, corpus)), unchanged)


def _spread(counts: Counter[str], k: float, most: int) -> float:
    given = counts.total()
    if not given or most <= k:
        return 1.0
    entropy = -math.fsum(n / given * math.log(n / given) for n in counts.values())
    return min(1.0, max(0.0, (entropy - math.log(k)) / (math.log(most) - math.log(k))))


def unchanged_share(answers: Sequence[str], shuffled: Sequence[str]) -> float:
    """Return the share of answers that equal, normalised, those given under another question's passages.

    >>> unchanged_share(["Paris", "the Nile", "1789", "Bach"], ["paris.", "Rome", "1789", ""])
    0.5
    """
    pairs = list(zip(answers, shuffled, strict=True))
    return sum(normalise(one) == normalise(other) for one, other in pairs) / len(pairs) if pairs else 0.0
