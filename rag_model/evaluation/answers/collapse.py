"""Measure retrieval collapse, and refuse collapsed models.

Trained end to end, a retriever may learn to return the same passages for all questions, and the generator to ignore
them; the loss looks normal and the system is closed-book (Lewis et al. 2020, appendix H). Three figures show it: how
many distinct passages a set of questions gets, how evenly they are spread (entropy), and how many answers do not change
with another question's passages.
"""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from rag_model.errors import RefusedError, UsageError
from rag_model.evaluation.answers.measures import normalise


class CollapsedError(RefusedError):
    """The retriever returns the same passages for all questions, or the generator ignores them."""


@dataclass(frozen=True, slots=True)
class Limits:
    """When a set of questions counts as collapsed; the loosest limit (0.0, 1.0) disables its check."""

    questions: int = 20  # fewer are not judged: a few questions may look alike by chance
    # Measured with MiniLM at k 5, 300 questions: .88 on questions about 1,581 passages, .65 on questions about other
    # topics; .50 and .18 with the questions' vectors moved 90 % and 95 % of the way to their mean.
    least_spread: float = 0.3
    # With a model that uses its passages most answers change; otherwise none. Half of labels (yes, no) stay the same by
    # chance.
    most_unchanged: float = 0.9

    def __post_init__(self) -> None:
        if self.questions < 1 or not (0 <= self.least_spread <= 1 and 0 <= self.most_unchanged <= 1):
            raise UsageError(f"limits of collapse are {self}: give a count of at least 1 and shares from 0 to 1")


LIMITS = Limits()


@dataclass(frozen=True, slots=True)
class Collapse:
    """The passages that a set of questions got, and whether they were used."""

    questions: int
    k: float  # mean passages per question
    distinct: int  # distinct passages over all questions
    spread: float  # entropy of the passages' distribution: 0 = all questions have the same, 1 = evenly spread
    unchanged: float | None = None  # share of answers that do not change with shuffled passages; None = not measured

    def metrics(self) -> dict[str, float]:
        """Return the figures by name, for journals and reports."""
        return {name: value for name, value in asdict(self).items() if value is not None}

    def reason(self, limits: Limits = LIMITS) -> str:
        """Return one sentence that says what has collapsed and what to do; empty if nothing has."""
        if self.questions < limits.questions:
            return ""
        if self.k and self.spread < limits.least_spread:
            return (
                f"retrieval has collapsed: {self.questions:,} questions got {self.distinct:,} distinct passages"
                f" (spread {self.spread:.2f}, wanted {limits.least_spread:g}): use an earlier checkpoint, or"
                " lower the question encoder's learning rate"
            )
        if self.unchanged is not None and self.unchanged > limits.most_unchanged:
            return (
                f"the model ignores its passages: {self.unchanged:.0%} of {self.questions:,} answers do not change when"
                f" the passages are another question's (at most {limits.most_unchanged:.0%} wanted): train on"
                " questions that it cannot answer without passages"
            )
        return ""

    def check(self, limits: Limits = LIMITS) -> None:
        """Check that nothing has collapsed.

        Raises:
            CollapsedError: retrieval has collapsed, or passages are ignored.
        """
        if reason := self.reason(limits):
            raise CollapsedError(reason)


def measure(passages: Sequence[Sequence[str]], corpus: int, unchanged: float | None = None) -> Collapse:
    """Measure the passages that questions got.

    Args:
        passages: the ids of each question's passages, without repeats inside one question.
        corpus: number of passages in the corpus.
        unchanged: the result of `unchanged_share`, if measured.

    The spread is (H - log k) / (log min(n k, corpus) - log k), H = -Σ_d p_d log p_d with p_d the share of d among
    the n k passages: the minimum of H for n questions with k passages each is log k, the maximum is log min(n k,
    corpus). 1.0 if there is no choice (one question, or k the whole corpus).
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
    """Return the share of answers that equal, normalised, those with another question's passages.

    >>> unchanged_share(["Paris", "the Nile", "1789", "Bach"], ["paris.", "Rome", "1789", ""])
    0.5
    """
    pairs = list(zip(answers, shuffled, strict=True))
    return sum(normalise(one) == normalise(other) for one, other in pairs) / len(pairs) if pairs else 0.0
