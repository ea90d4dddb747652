"""Success@k counted by hand, and judged collections against their definitions."""

import math

import pytest

from rag_model.errors import UsageError
from rag_model.evaluation.judging import page_ranking, ranks_of
from rag_model.evaluation.questions import Question, QuestionSet
from rag_model.evaluation.retrieval import (
    cutoffs,
    intervals_of,
    judged,
    match_hits,
    measures_of,
    page_ranking,
    ranks_of,
    success,
)


def test_success_is_the_share_of_questions_answered_within_k(make_hits) -> None:
    pages = [("1", "nothing"), ("2", "born in Paris"), ("3", "Paris again"), ("4", "x"), ("5", "y")]
    outcomes = [
        match_hits(Question("a", "Q", ("Paris",)), make_hits(pages)),
        match_hits(Question("b", "Q", ("nothing",)), make_hits(pages)),
        match_hits(Question("c", "Q", ("Rome",)), make_hits(pages)),
        match_hits(Question("d", "Q", ()), make_hits(pages)),
    ]
    assert [outcome.first for outcome in outcomes] == [2, 1, None, None]
    assert outcomes[0].has_answer == (False, True, True, False, False)
    assert success(outcomes, 5) == {"Success@1": 0.25, "Success@5": 0.5}


def test_questions_without_any_answer_can_not_be_scored(make_hits) -> None:
    with pytest.raises(UsageError, match="BEIR"):
        success([match_hits(Question("a", "Q"), make_hits([("1", "text")]))], 1)


def test_the_title_is_not_searched(make_hits) -> None:
    assert match_hits(Question("a", "Q", ("Title 1",)), make_hits([("1", "text")])).first is None


@pytest.mark.parametrize(("k", "depths"), [(1, [1]), (5, [1, 5]), (20, [1, 5, 20]), (30, [1, 5, 20, 30])])
def test_depths(k: int, depths: list[int]) -> None:
    assert cutoffs(k) == depths


def test_judged_questions_are_measured_page_by_page(make_hits) -> None:
    hits = make_hits([("9", "a"), ("1", "b"), ("1", "c"), ("2", "d")])
    assert page_ranking(hits) == {"9": -1.0, "1": -2.0, "2": -4.0}
    values = judged([match_hits(Question("q", "Q"), hits)], {"q": {"1": 1, "2": 1, "3": 1}}, k=4)
    ideal = sum(1 / math.log2(rank + 1) for rank in (1, 2, 3))
    assert values["nDCG@10"] == pytest.approx((1 / math.log2(3) + 1 / math.log2(4)) / ideal, abs=1e-4)
    assert values["R@4"] == pytest.approx(2 / 3, abs=1e-4)
    assert values["RR@10"] == pytest.approx(0.5)


def test_the_ranks_of_answers_and_of_evidence(make_hits) -> None:
    hits = make_hits([("9", "a"), ("1", "Paris"), ("1", "c"), ("2", "d")])
    plain, told = Question("a", "Q", ("Paris",)), Question("b", "Q", ("Rome",), (frozenset({"1", "2"}),))
    outcomes = [match_hits(plain, hits), match_hits(told, hits)]
    seen = ranks_of(outcomes, 4)
    assert seen["RR@4"] == pytest.approx((1 / 2 + 0) / 2)
    assert (seen["R-precision"], seen["recall@5"]) == (0.5, 1)  # of the one question with evidence: pages 9, 1, 2
    ideal = sum(1 / math.log2(rank + 1) for rank in (1, 2))
    assert seen["nDCG@10"] == pytest.approx((1 / math.log2(3) + 1 / math.log2(4)) / ideal, abs=1e-4)
    assert ranks_of(outcomes[:1], 4) == {"RR@4": 0.5}
    assert ranks_of([], 4) == {"RR@4": 0}
    assert ranks_of(outcomes, 1) == {"RR@1": 0, "R-precision": 0, "recall@5": 0, "nDCG@10": 0}  # of the first alone


def test_a_set_is_measured_by_what_it_tells(make_hits) -> None:
    asked = Question("q", "Q", ("a",))
    outcomes = [match_hits(asked, make_hits([("1", "a")]))]
    assert measures_of(QuestionSet((asked,)), outcomes, 1) == {"Success@1": 1}
    assert set(measures_of(QuestionSet((asked,), {"q": {"1": 1}}), outcomes, 1)) == {"nDCG@10", "R@1", "RR@10"}


def test_every_figure_has_an_interval_around_it(make_hits) -> None:
    texts = {"a": ["x", "Paris"], "b": ["Paris", "x"], "c": ["x", "y"], "d": ["x", "Paris"]}
    outcomes = [
        match_hits(Question(name, "Q", ("Paris",)), make_hits([(str(n), one) for n, one in enumerate(some)]))
        for name, some in texts.items()
    ]
    plain = QuestionSet(tuple(outcome.question for outcome in outcomes))
    judged_too = QuestionSet(plain.questions, {name: {"0": 1} for name in texts} | {"unasked": {"1": 1}})
    for asked, ranks in ((plain, ranks_of(outcomes, 2)), (judged_too, {})):
        found = intervals_of(asked, outcomes, 2)
        expected = {**measures_of(asked, outcomes, 2), **ranks}
        assert {name: one.value for name, one in found.items()} == pytest.approx(expected)
        assert all(one.low <= one.value <= one.high and one.n == 4 + bool(asked.grades) for one in found.values())
    assert found["RR@10"].value == 0.8
    assert intervals_of(plain, outcomes, 2)["RR@2"].value == (0.5 + 1 + 0 + 0.5) / 4


def test_patterns_are_looked_for_anywhere(make_hits) -> None:
    asked = Question("a", "Q", (r"19\d\d",))
    hits = make_hits([("1", "in 1789"), ("2", "about 1912")])
    assert match_hits(asked, hits, patterns=True).has_answer == (False, True)
    assert match_hits(asked, hits).first is None
