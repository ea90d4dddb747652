"""Measure retrieval collapse, and refuse collapsed models.

Trained end to end, a retriever may learn to return the same passages for all questions, and the
generator to ignore them. The loss then looks normal, but the system answers without passages (Lewis
et al. 2020, appendix H). Three metrics reveal it: the number of distinct passages over a set of
questions, how evenly they are spread (entropy), and the share of answers that do not change when
the passages are replaced by those of another question.
"""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from rag_model.errors import RefusedError, UsageError
from rag_model.evaluation.measures.answers import normalise


class CollapsedError(RefusedError):
    """The retriever returns the same passages for all questions, or the generator ignores them."""


@dataclass(frozen=True, slots=True)
class CollapseLimits:
    """Limits beyond which retrieval counts as collapsed.

    `least_spread = 0.0` and `most_unchanged = 1.0` disable them.
    """

    # minimum number of questions for the limits to apply; fewer may be similar by chance
    questions: int = 20
    # Minimum spread of the retrieved passages, from 0 (the same passages for all questions) to 1.
    # For MiniLM, 300 questions about 1,581 passages and k = 5 it is 0.88; for questions about other
    # topics 0.65; and if all question vectors are moved by 95 % towards their mean 0.18.
    least_spread: float = 0.3
    # Maximum share of answers that stay the same if a question gets the passages of another. The
    # share is 1 if a model ignores its passages; with two labels (yes, no), about 0.5 by chance.
    most_unchanged: float = 0.9

    def __post_init__(self) -> None:
        if self.questions < 1 or not (0 <= self.least_spread <= 1 and 0 <= self.most_unchanged <= 1):
            raise UsageError(
                f"the collapse limits {self} are invalid: give a count of at least 1 and shares from 0 to 1"
            )


COLLAPSE_LIMITS = CollapseLimits()


@dataclass(frozen=True, slots=True)
class CollapseStats:
    """Statistics on how diverse the retrieved passages are, and whether answers depend on them."""

    questions: int  # number of questions
    k: float  # mean number of passages per question
    distinct: int  # number of distinct passages over all questions
    # Normalized entropy, from 0 (the same passages for all questions) to 1 (evenly spread
    # passages).
    spread: float
    # share of answers that stay the same with another question's passages; None if not measured
    unchanged: float | None = None

    def metrics(self) -> dict[str, float]:
        """Return the metrics by name, for journals and reports."""
        return {name: value for name, value in asdict(self).items() if value is not None}

    def describe_collapse(self, limits: CollapseLimits = COLLAPSE_LIMITS) -> str:
        """Return a sentence about the collapse and its remedy; empty if nothing has collapsed."""
        if self.questions < limits.questions:
            return ""
        if self.k and self.spread < limits.least_spread:
            return (
                f"retrieval has collapsed: {self.questions:,} questions got {self.distinct:,} "
                f"distinct passages (spread {self.spread:.2f}, minimum {limits.least_spread:g}): "
                "use an earlier checkpoint, or lower the question encoder's learning rate"
            )
        if self.unchanged is not None and self.unchanged > limits.most_unchanged:
            return (
                f"the model ignores its passages: {self.unchanged:.0%} of {self.questions:,} "
                "answers do not change when the passages are another question's (at most "
                f"{limits.most_unchanged:.0%} are allowed): train on questions that it cannot "
                "answer without passages"
            )
        return ""

    def check_limits(self, limits: CollapseLimits = COLLAPSE_LIMITS) -> None:
        """Check that retrieval has not collapsed.

        Raises:
            CollapsedError: retrieval has collapsed, or the model ignores its passages.
        """
        if reason := self.describe_collapse(limits):
            raise CollapsedError(reason)


def measure_collapse(
    passage_ids: Sequence[Sequence[str]], corpus_size: int, unchanged: float | None = None
) -> CollapseStats:
    """Measure how diverse the passages are that were retrieved for a set of questions.

    Args:
        passage_ids: the ids of the passages of each question; those of one question are distinct.
        corpus_size: number of passages in the corpus.
        unchanged: the result of `measure_unchanged`, if measured.

    The spread is (H - log k) / (log min(n k, corpus_size) - log k). H is the entropy
    -Σ_d p_d log p_d, where p_d is the share of passage d among the n k passages. For n questions
    with k passages each, the minimum of H is log k and its maximum is log min(n k, corpus_size).
    The spread is 1.0 if only one value is possible (a single question, or k is the size of the
    corpus).
    """
    hit_counts = Counter(passage_id for ids in passage_ids for passage_id in ids)
    n_hits = hit_counts.total()
    k = n_hits / len(passage_ids) if passage_ids else 0.0
    return CollapseStats(
        len(passage_ids), k, len(hit_counts), _compute_spread(hit_counts, k, min(n_hits, corpus_size)), unchanged
    )


def _compute_spread(hit_counts: Counter[str], k: float, max_distinct: int) -> float:
    n_hits = hit_counts.total()
    if not n_hits or max_distinct <= k:
        return 1.0
    entropy = -math.fsum(n / n_hits * math.log(n / n_hits) for n in hit_counts.values())
    return min(1.0, max(0.0, (entropy - math.log(k)) / (math.log(max_distinct) - math.log(k))))


def measure_unchanged(answers: Sequence[str], shuffled_answers: Sequence[str]) -> float:
    """Return the share of answers whose normalized text stays the same in `shuffled_answers`, the
    answers to the same questions from the passages of another question.

    >>> measure_unchanged(["Paris", "the Nile", "1789", "Bach"], ["paris.", "Rome", "1789", ""])
    0.5
    """
    pairs = list(zip(answers, shuffled_answers, strict=True))
    return sum(normalise(answer) == normalise(shuffled) for answer, shuffled in pairs) / len(pairs) if pairs else 0.0
