"""Answer measures agree with their formulas, sacrebleu and rouge-score."""

import re
import statistics
import string
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rag_model.evaluation.answers.readings import Reading
from rag_model.evaluation.answers.scores import estimate_measures, score_answer
from rag_model.evaluation.measures.answers import (
    FEVER_2WAY,
    FEVER_3WAY,
    bleu,
    bleu_counts,
    distinct_ngram_ratio,
    exact_match,
    label_match,
    normalise,
    q_bleu,
    rouge_l,
    token_f1,
)
from rag_model.evaluation.questions import Question

# Words that collide after normalisation, punctuation, articles, and any other text.
TEXTS = st.one_of(
    st.lists(st.sampled_from(["The", "a", "An", "cat", "Cat,", "dog", "dog's", "-", "é", "thé"]), max_size=6).map(
        " ".join
    ),
    st.text(max_size=20),
)
GOLDS = st.lists(TEXTS, min_size=1, max_size=3)


# The steps of SQuAD's evaluate-v2.0.py.
def squad_normalise(text: str) -> str:
    lowered = text.lower()
    bare = "".join(char for char in lowered if char not in set(string.punctuation))
    without_articles = re.sub(re.compile(r"\b(a|an|the)\b", re.UNICODE), " ", bare)
    return " ".join(without_articles.split())


def squad_f1(gold: str, prediction: str) -> float:
    gold_tokens, predicted_tokens = squad_normalise(gold).split(), squad_normalise(prediction).split()
    common = Counter(gold_tokens) & Counter(predicted_tokens)
    n_common = sum(common.values())
    if len(gold_tokens) == 0 or len(predicted_tokens) == 0:
        return float(gold_tokens == predicted_tokens)
    if n_common == 0:
        return 0.0
    precision, recall = n_common / len(predicted_tokens), n_common / len(gold_tokens)
    return 2 * precision * recall / (precision + recall)


@given(TEXTS, GOLDS)
def test_exact_match_and_f1_are_those_of_squad(prediction: str, golds: list[str]) -> None:
    assert normalise(prediction) == squad_normalise(prediction)
    assert exact_match(prediction, golds) == max(
        float(squad_normalise(prediction) == squad_normalise(gold)) for gold in golds
    )
    assert token_f1(prediction, golds) == pytest.approx(max(squad_f1(gold, prediction) for gold in golds))
    assert exact_match(prediction, golds) <= token_f1(prediction, golds) <= 1


def test_repeated_words_count_each_time() -> None:
    assert token_f1("cat cat cat", ["cat dog"]) == pytest.approx(2 * (1 / 3) * (1 / 2) / (1 / 3 + 1 / 2))


def test_measures_without_gold_answers_are_0() -> None:
    assert (exact_match("x", []), token_f1("x", []), rouge_l("x", [])) == (0, 0, 0)
    assert bleu(bleu_counts("x", [])) == 0


def test_label_match_is_none_for_a_gold_label_outside_of_the_set() -> None:
    assert label_match("supports.", ["SUPPORTS"], FEVER_3WAY) == 1
    assert label_match("not enough info", ["NOT ENOUGH INFO"], FEVER_3WAY) == 1
    assert label_match("maybe", ["REFUTES"], FEVER_3WAY) == 0
    assert label_match("SUPPORTS", ["NOT ENOUGH INFO"], FEVER_2WAY) is None  # the two-way set has no such claim
    assert label_match("NOT ENOUGH INFO", ["SUPPORTS"], FEVER_2WAY) == 0


@given(TEXTS, GOLDS)
def test_rouge_l_is_that_of_rouge_score(prediction: str, golds: list[str]) -> None:
    from rouge_score.rouge_scorer import RougeScorer  # noqa: PLC0415 - takes half a second

    expected = RougeScorer(["rougeL"]).score_multi(golds, prediction)["rougeL"].fmeasure
    assert rouge_l(prediction, golds) == pytest.approx(expected)


WORDS = ["the", "cat", "sat", "on", "a", "mat", ",", "and", "slept", ".", "The", "dog"]
PHRASES = st.lists(st.sampled_from(WORDS), max_size=9).map(" ".join)


@pytest.mark.parametrize("order", [1, 4])
@given(pairs=st.lists(st.tuples(PHRASES, st.lists(PHRASES, min_size=1, max_size=3)), min_size=1, max_size=4))
def test_bleu_of_a_set_is_that_of_sacrebleu(order: int, pairs: list[tuple[str, list[str]]]) -> None:
    from sacrebleu.metrics import BLEU  # noqa: PLC0415 - takes a fourth of a second

    widest = max(len(golds) for _, golds in pairs)
    streams = [[golds[n] if n < len(golds) else None for _, golds in pairs] for n in range(widest)]
    expected = BLEU(max_ngram_order=order).corpus_score([prediction for prediction, _ in pairs], streams).score / 100
    counts = np.sum([bleu_counts(prediction, golds, order) for prediction, golds in pairs], axis=0)
    assert bleu(counts) == pytest.approx(expected)


GOLD = "Which city is the capital of France and lies on the Seine?"


def compute_harmonic_mean(precision: float, recall: float) -> float:
    return 2 * precision * recall / (precision + recall) if precision + recall else 0.0


def test_q_bleu_is_its_equation() -> None:
    """Kinds are sorted by hand: entities, question words, content, function words."""
    prediction = "Which river is in the capital of Peru?"
    entities = compute_harmonic_mean(0 / 1, 0 / 2)  # peru; france, seine
    question = compute_harmonic_mean(1 / 2, 1 / 2)  # which river; which city
    content = compute_harmonic_mean(1 / 1, 1 / 2)  # capital; capital, lies
    function = compute_harmonic_mean(3 / 4, 3 / 6)  # is in the of; is the of and on the
    bleu = 5 / 8 * 2.718281828459045 ** (1 - 12 / 8)  # which is the capital of
    expected = 0.7 * (0.6 * entities + 0.2 * question + 0.1 * content + 0.1 * function) + 0.3 * bleu
    assert q_bleu(prediction, [GOLD]) == pytest.approx(expected)


def test_q_bleu_of_a_lost_name_is_less_than_of_a_lost_function_word() -> None:
    without_name = q_bleu("Which city is the capital of and lies on the?", [GOLD])
    without_function_words = q_bleu("Which city is capital France lies on Seine?", [GOLD])
    assert without_function_words > without_name
    assert q_bleu(GOLD, ["x", GOLD]) == pytest.approx(1)
    assert q_bleu("", [GOLD]) == q_bleu(GOLD, []) == 0


def test_clues_are_measured_by_q_bleu() -> None:
    question = Question("h", "Hemingway", ("The Sun Also Rises is a novel by this author of A Farewell to Arms",))
    reading = Reading("h", "This author wrote The Sun Also Rises", None, ())
    metrics = estimate_measures([score_answer(question, reading, "clues")], "clues")
    assert metrics["Q-BLEU-1"].value == pytest.approx(q_bleu(reading.answer, question.answers))
    assert {"BLEU-1", "distinct-3", "gold-distinct-3"} <= set(metrics)


QUESTIONS = [
    "this city is the capital of France",
    "This city is the largest of Peru",
    "a king",
    "",
    "it is a river of Peru",
]


def compute_ratio(texts: list[str], order: int) -> float:
    ngrams = [
        tuple(words[start : start + order])
        for words in (text.lower().split() for text in texts)
        for start in range(len(words) - order + 1)
    ]
    return len(set(ngrams)) / len(ngrams)


@pytest.mark.parametrize("order", [1, 2, 3])
def test_distinct_ngrams_and_their_jackknife_are_counted_one_by_one(order: int) -> None:
    estimate = distinct_ngram_ratio(QUESTIONS, order)
    assert estimate is not None
    assert estimate.value == pytest.approx(compute_ratio(QUESTIONS, order))
    jackknife_ratios = [compute_ratio([*QUESTIONS[:n], *QUESTIONS[n + 1 :]], order) for n in range(len(QUESTIONS))]
    width = 1.959964 * ((len(QUESTIONS) - 1) * statistics.pvariance(jackknife_ratios)) ** 0.5
    assert (estimate.low, estimate.high) == pytest.approx(
        (max(0, estimate.value - width), min(1, estimate.value + width))
    )
    assert estimate.n == len(QUESTIONS)


def test_texts_without_a_trigram_have_no_ratio_of_distinct_ones() -> None:
    assert distinct_ngram_ratio(["a king", ""]) is None
    single = distinct_ngram_ratio(["one two three four"])
    assert single is not None
    assert (single.low, single.value, single.high) == (1, 1, 1)
