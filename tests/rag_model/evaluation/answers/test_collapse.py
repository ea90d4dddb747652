"""Retrieval collapse: the figures at their ends, by hand between them, and the refusal."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rag_model.errors import RefusedError, UsageError
from rag_model.evaluation.answers.collapse import CollapseLimits, measure_collapse, measure_unchanged


def test_the_same_passages_for_all_are_no_spread() -> None:
    seen = measure_collapse([["a", "b", "c"]] * 40, corpus_size=1000)
    assert (seen.questions, seen.k, seen.distinct) == (40, 3, 3)
    assert seen.spread == pytest.approx(0)


def test_other_passages_for_each_are_all_the_spread_there_is() -> None:
    assert measure_collapse(
        [[f"{q}-{n}" for n in range(3)] for q in range(40)], corpus_size=1000
    ).spread == pytest.approx(1)
    small = [[str(q % 10), str((q + 1) % 10)] for q in range(40)]  # all ten passages equally often
    assert measure_collapse(small, corpus_size=10).spread == pytest.approx(1)


def test_spread_by_hand() -> None:
    seen = measure_collapse([["a"], ["a"], ["a"], ["b"]], corpus_size=100)
    entropy = -(0.75 * math.log(0.75) + 0.25 * math.log(0.25))
    assert seen.spread == pytest.approx(entropy / math.log(4))


@given(st.lists(st.lists(st.sampled_from("abcdefgh"), max_size=5, unique=True), max_size=30))
def test_spread_is_a_share(passages: list[list[str]]) -> None:
    seen = measure_collapse(passages, corpus_size=8)
    assert 0 <= seen.spread <= 1
    assert seen.distinct == len({d for passage in passages for d in passage})


def test_where_there_is_no_choice_nothing_has_collapsed() -> None:
    whole = measure_collapse([["a", "b"]] * 50, corpus_size=2)  # k is the corpus
    closed = measure_collapse([[]] * 50, corpus_size=100)  # closed book
    assert (whole.spread, whole.describe_collapse()) == (1, "")
    assert (closed.spread, closed.describe_collapse()) == (1, "")
    assert measure_collapse([], corpus_size=0).describe_collapse() == ""


def test_a_collapse_fails_loudly() -> None:
    with pytest.raises(RefusedError, match=r"20 questions got 2 distinct passages .*learning rate"):
        measure_collapse([["a", "b"]] * 20, corpus_size=100).check_limits()
    measure_collapse([["a", "b"]] * 19, corpus_size=100).check_limits()  # too few to say
    measure_collapse([["a", "b"]] * 50, corpus_size=100).check_limits(CollapseLimits(least_spread=0))


def test_a_model_that_does_not_read_fails_loudly() -> None:
    healthy = [[str(n)] for n in range(50)]
    with pytest.raises(RefusedError, match="ignores its passages: 96% of 50 answers"):
        measure_collapse(healthy, corpus_size=100, unchanged=0.96).check_limits()
    measure_collapse(healthy, corpus_size=100, unchanged=0.9).check_limits()
    measure_collapse(healthy, corpus_size=100).check_limits()
    assert "unchanged" not in measure_collapse(healthy, corpus_size=100).metrics()


def test_unchanged_answers_are_counted_normalised() -> None:
    assert measure_unchanged(["The Nile", "Paris"], ["nile!", "Rome"]) == 0.5
    assert measure_unchanged([], []) == 0


@pytest.mark.parametrize("wrong", [{"questions": 0}, {"least_spread": 2}, {"most_unchanged": -1}])
def test_limits_that_make_no_sense(wrong: dict[str, float]) -> None:
    with pytest.raises(UsageError, match="shares from 0 to 1"):
        CollapseLimits(**wrong)
