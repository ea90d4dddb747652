"""Retrieval measures have hand-computed values, and question sets are judged by their contents."""

import math

import pytest

from rag_model.errors import UsageError
from rag_model.evaluation.measures.measure import JudgedBy
from rag_model.evaluation.questions import Question, QuestionSet
from rag_model.evaluation.retrieval.judging import RetrievalJudge, compute_rank_metrics, match_hits, score_pages_by_rank

PARIS = Question("a", "Q", ("Paris",))


def test_success_is_the_share_of_questions_answered_within_k(make_hits) -> None:
    pages = [("1", "nothing"), ("2", "born in Paris"), ("3", "Paris again"), ("4", "x"), ("5", "y")]
    questions = (PARIS, Question("b", "Q", ("nothing",)), Question("c", "Q", ("Rome",)), Question("d", "Q", ()))
    outcomes = [match_hits(question, make_hits(pages)) for question in questions]
    assert [outcome.first_answer_rank for outcome in outcomes] == [2, 1, None, None]
    assert outcomes[0].has_answer == (False, True, True, False, False)
    judge = RetrievalJudge.for_questions(QuestionSet(questions))
    assert judge.judged_by == "answers"
    assert judge.compute_means(outcomes, 5) == {"Success@1": 0.25, "Success@5": 0.5}
    assert judge.compute_values(outcomes, ["RR@1", "RR@2", "Success@3"]) == {
        "RR@1": [0, 1, 0, 0],
        "RR@2": [0.5, 1, 0, 0],
        "Success@3": [1, 1, 0, 0],
    }


def test_questions_without_answers_are_refused() -> None:
    with pytest.raises(UsageError, match="BEIR"):
        RetrievalJudge.for_questions(QuestionSet((Question("a", "Q"),)))


def test_questions_with_relevance_judgements_are_measured_by_page(make_hits) -> None:
    hits = make_hits([("9", "a"), ("1", "b"), ("1", "c"), ("2", "d")])
    assert score_pages_by_rank(hits) == {"9": -1.0, "1": -2.0, "2": -4.0}
    judge = RetrievalJudge("pages", {"q": {"1": 1, "2": 1, "3": 1, "9": 0}})
    values = judge.compute_means([match_hits(Question("q", "Q"), hits)], k=4)
    ideal = sum(1 / math.log2(rank + 1) for rank in (1, 2, 3))
    assert values["nDCG@10"] == pytest.approx((1 / math.log2(3) + 1 / math.log2(4)) / ideal, abs=1e-4)
    assert values["R@4"] == pytest.approx(2 / 3, abs=1e-4)
    assert values["RR@10"] == pytest.approx(0.5)
    assert (values["Success@1"], values["Success@4"]) == (0, 1)


def test_passages_are_judged_by_their_ids(make_hits) -> None:
    question = Question("q", "Q", ("b",), passages=("1-3", "2-4"))  # a page and a rank
    hits = make_hits([("9", "a"), ("1", "b"), ("1", "c"), ("2", "d")])
    judge = RetrievalJudge.for_questions(QuestionSet((question,)))
    assert judge.judged_by == "passages"
    values = judge.compute_means([match_hits(question, hits)], k=4)
    ideal = sum(1 / math.log2(rank + 1) for rank in (1, 2))
    assert values["nDCG@10"] == pytest.approx((1 / math.log2(4) + 1 / math.log2(5)) / ideal, abs=1e-4)
    assert (values["R@4"], values["Success@1"]) == (1, 0)
    assert values["RR@10"] == pytest.approx(1 / 3)
    by_answer = RetrievalJudge.for_questions(QuestionSet((question,)), "answers").compute_means(
        [match_hits(question, hits)], k=4
    )
    assert by_answer == {"Success@1": 0, "Success@4": 1}


def test_a_question_without_hits_counts_as_missed(make_hits) -> None:
    judge = RetrievalJudge("passages", {"q": {"1-1": 1}, "empty": {"1-1": 1}})
    outcomes = [match_hits(Question("q", "Q"), make_hits([("1", "x")])), match_hits(Question("empty", "Q"), ())]
    assert all(values == [1, 0] for values in judge.compute_values(outcomes, judge.list_measures(5)).values())


@pytest.mark.parametrize(
    ("judged_by", "question", "message"),
    [
        ("passages", Question("x", "Q", ("a",)), "question 'x' names no passages"),
        ("pages", Question("x", "Q", ("a",), passages=("1-0",)), "question 'x' names no pages"),
        ("answers", Question("x", "Q", passages=("1-0",)), "no question has an answer"),
    ],
)
def test_questions_without_the_chosen_judgements_are_refused(
    judged_by: JudgedBy, question: Question, message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        RetrievalJudge.for_questions(QuestionSet((question,)), judged_by)


@pytest.mark.parametrize("name", ["Success", "Success@0", "nDCG@10", "R@5", "MAP", "EM"])
def test_a_measure_that_does_not_apply_is_refused(name: str) -> None:
    with pytest.raises(UsageError, match="judged by answers: choose one such as Success@20, RR@20"):
        RetrievalJudge("answers").get_cutoff(name)


def test_evidence_of_kilt_judges_by_pages(make_hits) -> None:
    question = Question("k", "Q", ("a",), (frozenset({"1", "2"}), frozenset({"3"})))
    assert RetrievalJudge.for_questions(QuestionSet((question,))).judged_by == "answers"
    judge = RetrievalJudge.for_questions(QuestionSet((question,)), "pages")
    assert judge.compute_means([match_hits(question, make_hits([("3", "x")]))], 1)["R@1"] == pytest.approx(
        1 / 3, abs=1e-4
    )


def test_rank_metrics_use_answers_and_evidence(make_hits) -> None:
    hits = make_hits([("9", "a"), ("1", "Paris"), ("1", "c"), ("2", "d")])
    questions = Question("a", "Q", ("Paris",)), Question("b", "Q", ("Rome",), (frozenset({"1", "2"}),))
    outcomes = [match_hits(question, hits) for question in questions]
    metrics = compute_rank_metrics(outcomes, 4)
    assert metrics["RR@4"] == pytest.approx((1 / 2 + 0) / 2)
    assert (metrics["Article@1"], metrics["Article@10"]) == (0, 1)
    assert (metrics["R-precision"], metrics["recall@5"]) == (0.5, 1)  # of the question with evidence
    ideal = sum(1 / math.log2(rank + 1) for rank in (1, 2))
    assert metrics["nDCG@10"] == pytest.approx((1 / math.log2(3) + 1 / math.log2(4)) / ideal, abs=1e-4)
    assert compute_rank_metrics(outcomes[:1], 4) == {"RR@4": 0.5}
    assert compute_rank_metrics([], 4) == {"RR@4": 0}
    assert compute_rank_metrics(outcomes, 1) == {  # at the first rank alone
        **dict.fromkeys(("RR@1", "R-precision", "recall@5", "nDCG@10", "Article@1", "Article@10"), 0)
    }


def test_a_question_set_is_judged_by_its_contents() -> None:
    without_passage, with_passage = Question("q", "Q", ("a",)), Question("p", "Q", ("a",), passages=("1-0",))
    assert RetrievalJudge.for_questions(QuestionSet((without_passage, with_passage))).judged_by == "answers"
    assert RetrievalJudge.for_questions(QuestionSet((with_passage,))).judged_by == "passages"
    question_set = QuestionSet((with_passage,), {"p": {"1": 1}})
    assert (
        RetrievalJudge.for_questions(question_set).judged_by,
        RetrievalJudge.for_questions(question_set, "passages").judged_by,
    ) == ("pages", "passages")
    assert RetrievalJudge.for_questions(question_set).list_measures(20) == [
        "Success@1",
        "Success@5",
        "Success@20",
        "nDCG@10",
        "R@20",
        "RR@10",
    ]


def test_every_metric_is_within_its_interval(make_hits) -> None:
    texts = {"a": ["x", "Paris"], "b": ["Paris", "x"], "c": ["x", "y"], "d": ["x", "Paris"]}
    outcomes = [
        match_hits(Question(name, "Q", ("Paris",)), make_hits([(str(n), text) for n, text in enumerate(page_texts)]))
        for name, page_texts in texts.items()
    ]
    answer_judge = RetrievalJudge("answers")
    for judge, ranks in (
        (answer_judge, compute_rank_metrics(outcomes, 2)),
        (RetrievalJudge("pages", {name: {"0": 1} for name in texts}), {}),
    ):
        estimates = judge.estimate_measures(outcomes, 2)
        assert {name: estimate.value for name, estimate in estimates.items()} == pytest.approx(
            judge.compute_means(outcomes, 2) | ranks
        )
        assert all(
            estimate.low <= estimate.value <= estimate.high and estimate.n == 4 for estimate in estimates.values()
        )
    assert answer_judge.estimate_measures(outcomes, 2)["RR@2"].value == (0.5 + 1 + 0 + 0.5) / 4
