"""Distinct n-grams: how varied the texts are that a model writes.

Lewis et al. 2020 (table 5) report the ratio of distinct to total trigrams over all generated texts, beside that of the
gold texts: of Jeopardy questions .324 for BART, .468 for RAG-Token, .538 for RAG-Sequence, and .900 for people's.
"""

import math
from collections import Counter
from collections.abc import Sequence
from statistics import NormalDist

from rag_model.evaluation.bootstrap import RESAMPLING, Estimate, Resampling
from rag_model.evaluation.questions.match import tokens

ORDER = 3  # trigrams, as in the paper


def distinct_ngrams(texts: Sequence[str], order: int = ORDER, resampling: Resampling = RESAMPLING) -> Estimate | None:
    """Return the number of distinct n-grams over the number of all, with its interval; None without an n-gram.

    Tokens are DPR's, in lower case. The interval is value ± z s of the jackknife over the texts (Efron & Tibshirani
    1993, chapter 11): a bootstrap would draw a text twice, and its n-grams with it, and be too low. `n` counts texts.

    >>> distinct_ngrams(["this state has a coast", "this state has a king"]).value  # 4 of 6 trigrams
    0.6666666666666666
    """
    grams = [_ngrams(tokens(text), order) for text in texts]
    total = sum(map(Counter.total, grams))
    if not total:
        return None
    holders = Counter(gram for one in grams for gram in one)  # in how many texts each is
    without = [
        (len(holders) - sum(holders[gram] == 1 for gram in one)) / (total - one.total())
        for one in grams
        if one.total() < total
    ]
    value = len(holders) / total
    width = NormalDist().inv_cdf((1 + resampling.level) / 2) * _jackknife(without)
    return Estimate(value, max(0.0, value - width), min(1.0, value + width), len(texts))


def _ngrams(words: Sequence[str], order: int) -> Counter[tuple[str, ...]]:
    return Counter(zip(*(words[start:] for start in range(order)), strict=False))


def _jackknife(without: Sequence[float]) -> float:
    """Return the standard error from the figures without one text each: s² = (n - 1) / n Σ (θ_i - mean)²."""
    n = len(without)
    if n < 2:
        return 0.0
    mean = math.fsum(without) / n
    return math.sqrt((n - 1) / n * math.fsum((one - mean) ** 2 for one in without))
