"""Answer measures against SQuAD's official formulas re-stated, sacrebleu and rouge-score themselves."""

import re
import string
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rouge_score.rouge_scorer import RougeScorer
from sacrebleu.metrics import BLEU

from rag_model.evaluation.measures.answers import (
    FEVER_2WAY,
    FEVER_3WAY,
    bleu,
    bleu_counts,
    exact_match,
    label_match,
    normalise,
    rouge_l,
    token_f1,
)

# Words that collide after normalisation, punctuation, articles, and any other text.
TEXTS = st.one_of(
    st.lists(st.sampled_from(["The", "a", "An", "cat", "Cat,", "dog", "dog's", "-", "é", "thé"]), max_size=6).map(
        " ".join
    ),
    st.text(max_size=20),
)
GOLDS = st.lists(TEXTS, min_size=1, max_size=3)


# SQuAD's evaluate-v2.0.py, re-stated step by step.
def squad_normalise(text: str) -> str:
    lowered = text.lower()
    bare = "".join(char for char in lowered if char not in set(string.punctuation))
    without = re.sub(re.compile(r"\b(a|an|the)\b", re.UNICODE), " ", bare)
    return " ".join(without.split())


def squad_f1(gold: str, said: str) -> float:
    gold_tokens, said_tokens = squad_normalise(gold).split(), squad_normalise(said).split()
    common = Counter(gold_tokens) & Counter(said_tokens)
    same = sum(common.values())
    if len(gold_tokens) == 0 or len(said_tokens) == 0:
        return float(gold_tokens == said_tokens)
    if same == 0:
        return 0.0
    precision, recall = same / len(said_tokens), same / len(gold_tokens)
    return 2 * precision * recall / (precision + recall)


@given(TEXTS, GOLDS)
def test_exact_match_and_f1_are_squads(said: str, golds: list[str]) -> None:
    assert normalise(said) == squad_normalise(said)
    assert exact_match(said, golds) == max(float(squad_normalise(said) == squad_normalise(gold)) for gold in golds)
    assert token_f1(said, golds) == pytest.approx(max(squad_f1(gold, said) for gold in golds))
    assert exact_match(said, golds) <= token_f1(said, golds) <= 1


def test_words_count_as_often_as_they_are_said() -> None:
    assert token_f1("cat cat cat", ["cat dog"]) == pytest.approx(2 * (1 / 3) * (1 / 2) / (1 / 3 + 1 / 2))


def test_without_golds_nothing_is_right() -> None:
    assert (exact_match("x", []), token_f1("x", []), rouge_l("x", [])) == (0, 0, 0)
    assert bleu(bleu_counts("x", [])) == 0


def test_labels() -> None:
    assert label_match("supports.", ["SUPPORTS"], FEVER_3WAY) == 1
    assert label_match("not enough info", ["NOT ENOUGH INFO"], FEVER_3WAY) == 1
    assert label_match("maybe", ["REFUTES"], FEVER_3WAY) == 0
    assert label_match("SUPPORTS", ["NOT ENOUGH INFO"], FEVER_2WAY) is None  # no claim of the two-way set
    assert label_match("NOT ENOUGH INFO", ["SUPPORTS"], FEVER_2WAY) == 0


@given(TEXTS, GOLDS)
def test_rouge_is_rouge_scores(said: str, golds: list[str]) -> None:
    expected = RougeScorer(["rougeL"]).score_multi(golds, said)["rougeL"].fmeasure
    assert rouge_l(said, golds) == pytest.approx(expected)


WORDS = ["the", "cat", "sat", "on", "a", "mat", ",", "and", "slept", ".", "The", "dog"]
PHRASES = st.lists(st.sampled_from(WORDS), max_size=9).map(" ".join)


@pytest.mark.parametrize("order", [1, 4])
@given(pairs=st.lists(st.tuples(PHRASES, st.lists(PHRASES, min_size=1, max_size=3)), min_size=1, max_size=4))
def test_bleu_of_a_set_is_sacrebleus(order: int, pairs: list[tuple[str, list[str]]]) -> None:
    widest = max(len(golds) for _, golds in pairs)
    streams = [[golds[n] if n < len(golds) else None for _, golds in pairs] for n in range(widest)]
    expected = BLEU(max_ngram_order=order).corpus_score([said for said, _ in pairs], streams).score / 100
    counts = np.sum([bleu_counts(said, golds, order) for said, golds in pairs], axis=0)
    assert bleu(counts) == pytest.approx(expected)
