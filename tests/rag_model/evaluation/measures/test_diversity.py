"""Distinct n-grams against a restatement that counts them one by one, and a jackknife that leaves out one text each."""

import statistics

import pytest

from rag_model.evaluation.measures.answers import distinct_ngram_ratio

TEXTS = [
    "this city is the capital of France",
    "This city is the largest of Peru",
    "a king",
    "",
    "it is a river of Peru",
]


def ratio(texts: list[str], order: int) -> float:
    grams = [
        tuple(words[start : start + order])
        for words in (text.lower().split() for text in texts)
        for start in range(len(words) - order + 1)
    ]
    return len(set(grams)) / len(grams)


@pytest.mark.parametrize("order", [1, 2, 3])
def test_the_ratio_and_its_interval(order: int) -> None:
    found = distinct_ngram_ratio(TEXTS, order)
    assert found is not None
    assert found.value == pytest.approx(ratio(TEXTS, order))
    without = [ratio([*TEXTS[:n], *TEXTS[n + 1 :]], order) for n in range(len(TEXTS))]
    width = 1.959964 * ((len(TEXTS) - 1) * statistics.pvariance(without)) ** 0.5
    assert (found.low, found.high) == pytest.approx((max(0, found.value - width), min(1, found.value + width)))
    assert found.n == len(TEXTS)


def test_texts_without_a_trigram_have_no_ratio() -> None:
    assert distinct_ngram_ratio(["a king", ""]) is None
    alone = distinct_ngram_ratio(["one two three four"])
    assert alone is not None
    assert (alone.low, alone.value, alone.high) == (1, 1, 1)
