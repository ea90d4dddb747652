"""Risk and coverage agree with a search over all thresholds, and the rule chooses the best threshold."""

import math
import random
from dataclasses import replace

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


def create_answer(
    right: float, likelihood: float | None, retrieval: float, closed: float | None = None
) -> ScoredAnswer:
    passages = (AnswerPassage("1-0", "1", "T", "text", retrieval, None, None),)
    return ScoredAnswer(Question("q", "?"), Reading("q", "x", likelihood, passages, closed_book=closed), {"EM": right})


def test_each_threshold_has_its_coverage_and_risk() -> None:
    random_ = random.Random(3)
    scores = [random_.randint(0, 9) / 2 for _ in range(60)]
    right = [float(random_.random() < score / 5) for score in scores]
    curve = compute_risk_coverage_curve(scores, right)
    assert [point.minimum_score for point in curve] == sorted(set(scores), reverse=True)
    for point in curve:
        accepted = [value for score, value in zip(scores, right, strict=True) if score >= point.minimum_score]
        assert point.coverage == pytest.approx(len(accepted) / 60)
        assert point.risk == pytest.approx(1 - sum(accepted) / len(accepted))


def test_an_answer_without_a_score_is_never_given() -> None:
    assert compute_risk_coverage_curve([1.0, -math.inf], [1, 0]) == [CoveragePoint(1.0, 0.5, 0.0)]
    assert compute_risk_coverage_curve([-math.inf], [1]) == []
    assert compute_area_under_curve([]) == 1


def test_the_area_is_that_under_the_curve() -> None:
    assert compute_area_under_curve(compute_risk_coverage_curve([3, 2, 1], [1, 1, 0])) == pytest.approx(
        0 / 3 + 0 + (0 + 1 / 3) / 2 / 3
    )
    assert compute_area_under_curve(compute_risk_coverage_curve([3, 2, 1], [0, 1, 1])) > compute_area_under_curve(
        compute_risk_coverage_curve([3, 2, 1], [1, 1, 0])
    )


def test_the_best_signal_and_the_largest_coverage_are_chosen() -> None:
    answers = [
        create_answer(1, -1.0, 0.1, -9.0),
        create_answer(1, -2.0, 0.9, -2.5),
        create_answer(0, -3.0, 0.8, -3.1),
        create_answer(1, -4.0, 0.7, -1.0),
    ]
    choice = choose_threshold(answers, "EM", risk_limit=0.3)
    assert choice.threshold == Threshold("likelihood", -4.0)  # three of four right
    assert (choice.operating_point and choice.operating_point.coverage) == 1
    strict_choice = choose_threshold(answers, "EM", risk_limit=0.1)
    assert strict_choice.threshold == Threshold("likelihood", -2.0)
    assert (
        describe_abstention(strict_choice)
        == "With no answer below -2 by likelihood, 50% of the questions are answered, and "
        "0.0% of these wrong"
    )
    assert set(strict_choice.areas) == {"likelihood", "retrieval", "passages"}
    assert strict_choice.to_json()["threshold"] == {"signal": "likelihood", "least": -2.0}


def test_no_threshold_is_chosen_if_none_keeps_the_risk() -> None:
    choice = choose_threshold([create_answer(0, -1.0, 0.5), create_answer(0, -2.0, 0.4)], "EM", risk_limit=0.5)
    assert choice.threshold is None
    assert set(choice.areas) == {"likelihood", "retrieval"}  # closed book was not scored
    assert describe_abstention(choice) == "No threshold keeps the risk at 0.5 or below"


def test_a_given_threshold_is_measured() -> None:
    answers = [create_answer(1, -1.0, 0.5), create_answer(0, -2.0, 0.4), create_answer(1, -3.0, 0.3)]
    result = measure_threshold(answers, "EM", Threshold("likelihood", -2.5))
    assert result.operating_point == CoveragePoint(-2.5, pytest.approx(2 / 3), 0.5)
    unanswered = measure_threshold(answers, "EM", Threshold("retrieval", 0.6))
    assert unanswered.operating_point is None
    assert "no question is answered" in describe_abstention(unanswered)


def test_empty_answer_does_not_hide_other_likelihoods() -> None:
    answers = [create_answer(1, -1.0, 0.5, -3.0), create_answer(1, -2.0, 0.4, -3.0), create_answer(0, None, 0.9)]
    filtered_answer = replace(answers[2], reading=replace(answers[2].reading, answer=""))
    choice = choose_threshold([*answers[:2], filtered_answer], "EM", risk_limit=0.1)
    assert choice.threshold == Threshold("likelihood", -2.0)
    assert set(choice.areas) == {"likelihood", "retrieval", "passages"}
    result = measure_threshold([*answers[:2], filtered_answer], "EM", Threshold("passages", 1.5))
    assert result.operating_point == CoveragePoint(1.5, pytest.approx(1 / 3), 0)
    assert set(choose_threshold(answers, "EM", risk_limit=0.1).areas) == {"retrieval"}


def test_risk_equal_to_the_limit_is_allowed() -> None:
    for n in range(1, 201):
        for n_wrong in range(n + 1):
            curve = compute_risk_coverage_curve([1.0] * n, [0.0] * n_wrong + [1.0] * (n - n_wrong))
            assert curve == [CoveragePoint(1.0, 1.0, n_wrong / n)]
    answers = [create_answer(float(n > 0), -1.0, 0.5) for n in range(20)]
    assert choose_threshold(answers, "EM", risk_limit=0.05).threshold == Threshold("likelihood", -1.0)


def test_signals_of_a_reading() -> None:
    reading = create_answer(1, -1.0, 0.5, -3.0).reading
    assert [compute_confidence(reading, signal) for signal in ("likelihood", "retrieval", "passages")] == [
        -1.0,
        0.5,
        2.0,
    ]
    without_passages = Reading("q", "x", None, ())
    assert [compute_confidence(without_passages, signal) for signal in ("likelihood", "retrieval", "passages")] == [
        None,
        -math.inf,
        None,
    ]
