"""Risk and coverage beside a restatement that tries every threshold, and the rule that chooses one."""

import math
import random

import pytest

from rag_model.evaluation.answers.abstaining import (
    CoveragePoint,
    choose_threshold,
    compute_area_under_curve,
    compute_confidence,
    compute_risk_coverage_curve,
    describe_abstention,
    measure_threshold,
)
from rag_model.evaluation.answers.readings import AnswerPassage, Reading
from rag_model.evaluation.answers.scores import ScoredAnswer
from rag_model.evaluation.questions import Question
from rag_model.reading.confidence import Threshold


def scored(right: float, likelihood: float | None, retrieval: float, closed: float | None = None) -> ScoredAnswer:
    shown = (AnswerPassage("1-0", "1", "T", "text", retrieval, None, None),)
    return ScoredAnswer(Question("q", "?"), Reading("q", "x", likelihood, shown, closed_book=closed), {"EM": right})


def test_each_threshold_has_its_coverage_and_risk() -> None:
    random_ = random.Random(3)
    scores = [random_.randint(0, 9) / 2 for _ in range(60)]
    right = [float(random_.random() < score / 5) for score in scores]
    found = compute_risk_coverage_curve(scores, right)
    assert [point.minimum_score for point in found] == sorted(set(scores), reverse=True)
    for point in found:
        given = [value for score, value in zip(scores, right, strict=True) if score >= point.minimum_score]
        assert point.coverage == pytest.approx(len(given) / 60)
        assert point.risk == pytest.approx(1 - sum(given) / len(given))


def test_what_has_no_score_is_never_answered() -> None:
    assert compute_risk_coverage_curve([1.0, -math.inf], [1, 0]) == [CoveragePoint(1.0, 0.5, 0.0)]
    assert compute_risk_coverage_curve([-math.inf], [1]) == []
    assert compute_area_under_curve([]) == 1


def test_the_area_is_of_the_curve() -> None:
    assert compute_area_under_curve(compute_risk_coverage_curve([3, 2, 1], [1, 1, 0])) == pytest.approx(
        0 / 3 + 0 + (0 + 1 / 3) / 2 / 3
    )
    assert compute_area_under_curve(compute_risk_coverage_curve([3, 2, 1], [0, 1, 1])) > compute_area_under_curve(
        compute_risk_coverage_curve([3, 2, 1], [1, 1, 0])
    )


def test_the_better_signal_and_the_largest_coverage_are_chosen() -> None:
    answers = [
        scored(1, -1.0, 0.1, -9.0),
        scored(1, -2.0, 0.9, -2.5),
        scored(0, -3.0, 0.8, -3.1),
        scored(1, -4.0, 0.7, -1.0),
    ]
    found = choose_threshold(answers, "EM", risk=0.3)
    assert found.threshold == Threshold("likelihood", -4.0)  # three of four right
    assert (found.operating_point and found.operating_point.coverage) == 1
    strict = choose_threshold(answers, "EM", risk=0.1)
    assert strict.threshold == Threshold("likelihood", -2.0)
    assert (
        describe_abstention(strict) == "With no answer below -2 by likelihood, 50% of the questions are answered, and "
        "0.0% of these wrong"
    )
    assert set(strict.areas) == {"likelihood", "retrieval", "passages"}
    assert strict.to_json()["threshold"] == {"signal": "likelihood", "least": -2.0}


def test_where_no_threshold_keeps_the_risk_there_is_none() -> None:
    found = choose_threshold([scored(0, -1.0, 0.5), scored(0, -2.0, 0.4)], "EM", risk=0.5)
    assert found.threshold is None
    assert set(found.areas) == {"likelihood", "retrieval"}  # closed book was not scored
    assert describe_abstention(found) == "No threshold keeps the risk at 0.5 or below"


def test_a_threshold_of_other_questions_is_measured() -> None:
    answers = [scored(1, -1.0, 0.5), scored(0, -2.0, 0.4), scored(1, -3.0, 0.3)]
    found = measure_threshold(answers, "EM", Threshold("likelihood", -2.5))
    assert found.operating_point == CoveragePoint(-2.5, pytest.approx(2 / 3), 0.5)
    nothing = measure_threshold(answers, "EM", Threshold("retrieval", 0.6))
    assert nothing.operating_point is None
    assert "no question is answered" in describe_abstention(nothing)


def test_signals_of_a_reading() -> None:
    one = scored(1, -1.0, 0.5, -3.0).reading
    assert [compute_confidence(one, signal) for signal in ("likelihood", "retrieval", "passages")] == [-1.0, 0.5, 2.0]
    bare = Reading("q", "x", None, ())
    assert [compute_confidence(bare, signal) for signal in ("likelihood", "retrieval", "passages")] == [
        None,
        -math.inf,
        None,
    ]
