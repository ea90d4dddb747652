"""Measures of retrieval collapse have their extremes and hand-computed values, and a collapse is refused."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rag_model.errors import RefusedError, UsageError
from rag_model.evaluation.answers.collapse import CollapseLimits, measure_collapse, measure_unchanged


def test_the_same_passages_for_all_questions_have_no_spread() -> None:
    stats = measure_collapse([["a", "b", "c"]] * 40, corpus_size=1000)
    assert (stats.questions, stats.k, stats.distinct) == (40, 3, 3)
    assert stats.spread == pytest.approx(0)


def test_different_passages_for_each_question_have_the_full_spread() -> None:
    assert measure_collapse(
        [[f"{q}-{n}" for n in range(3)] for q in range(40)], corpus_size=1000
    ).spread == pytest.approx(1)
    small_corpus = [[str(q % 10), str((q + 1) % 10)] for q in range(40)]  # all ten passages equally often
    assert measure_collapse(small_corpus, corpus_size=10).spread == pytest.approx(1)


def test_spread_is_the_normalised_entropy() -> None:
    stats = measure_collapse([["a"], ["a"], ["a"], ["b"]], corpus_size=100)
    entropy = -(0.75 * math.log(0.75) + 0.25 * math.log(0.25))
    assert stats.spread == pytest.approx(entropy / math.log(4))


@given(st.lists(st.lists(st.sampled_from("abcdefgh"), max_size=5, unique=True), max_size=30))
def test_spread_is_between_0_and_1(passages: list[list[str]]) -> None:
    stats = measure_collapse(passages, corpus_size=8)
    assert 0 <= stats.spread <= 1
    assert stats.distinct == len({d for passage in passages for d in passage})


def test_nothing_has_collapsed_if_there_is_no_choice_of_passages() -> None:
    all_passages = measure_collapse([["a", "b"]] * 50, corpus_size=2)  # k is the size of the corpus
    closed_book = measure_collapse([[]] * 50, corpus_size=100)
    assert (all_passages.spread, all_passages.describe_collapse()) == (1, "")
    assert (closed_book.spread, closed_book.describe_collapse()) == (1, "")
    assert measure_collapse([], corpus_size=0).describe_collapse() == ""


def test_a_collapse_is_refused() -> None:
    with pytest.raises(RefusedError, match=r"20 questions got 2 distinct passages .*learning rate"):
        measure_collapse([["a", "b"]] * 20, corpus_size=100).check_limits()
    measure_collapse([["a", "b"]] * 19, corpus_size=100).check_limits()  # too few questions
    measure_collapse([["a", "b"]] * 50, corpus_size=100).check_limits(CollapseLimits(least_spread=0))


def test_a_model_that_ignores_its_passages_is_refused() -> None:
    healthy = [[str(n)] for n in range(50)]
    with pytest.raises(RefusedError, match="ignores its passages: 96% of 50 answers"):
        measure_collapse(healthy, corpus_size=100, unchanged=0.96).check_limits()
    measure_collapse(healthy, corpus_size=100, unchanged=0.9).check_limits()
    measure_collapse(healthy, corpus_size=100).check_limits()
    assert "unchanged" not in measure_collapse(healthy, corpus_size=100).metrics()


def test_unchanged_answers_are_counted_after_normalisation() -> None:
    assert measure_unchanged(["The Nile", "Paris"], ["nile!", "Rome"]) == 0.5
    assert measure_unchanged([], []) == 0


@pytest.mark.parametrize("limits", [{"questions": 0}, {"least_spread": 2}, {"most_unchanged": -1}])
def test_invalid_limits_are_refused(limits: dict[str, float]) -> None:
    with pytest.raises(UsageError, match="shares from 0 to 1"):
        CollapseLimits(**limits)
