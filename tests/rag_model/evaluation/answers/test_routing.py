"""The chosen route agrees with a search over all thresholds, and conditions are answered by it."""

import math
import random
from collections.abc import Callable

import pytest

from rag_model.errors import UsageError
from rag_model.evaluation.answers.ablation import EvalCondition
from rag_model.evaluation.answers.readings import AnswerPassage, Reading
from rag_model.evaluation.answers.routing import RoutedAnswers, choose_route, list_route_points
from rag_model.evaluation.questions import Question
from rag_model.reading.answer import TokenUsage
from rag_model.reading.routing import Route
from tests.rag_model.reading.test_routing import RecordingRetriever

QUESTIONS = tuple(Question(str(n), f"who is {n}?", (f"name {n}",)) for n in range(4))
HITS = tuple(tuple(hits) for hits in RecordingRetriever().search([question.text for question in QUESTIONS], 1))
OPEN_BOOK = EvalCondition("open book", 1, QUESTIONS, HITS)


def create_reader(likelihoods: tuple[list[float | None], list[float | None]]) -> Callable[..., list[Reading]]:
    """Return a function that answers questions 0 and 1 correctly without passages, and 2 and 3 with passages."""

    def answer_questions(condition: EvalCondition, on_progress: object) -> list[Reading]:
        is_open = any(condition.hits)
        right = (2, 3) if is_open else (0, 1)
        passages = (AnswerPassage("1-0", "1", "T", "by someone", 0.5, None, None),) if is_open else ()
        return [
            Reading(
                question.id, f"name {n}" if n in right else "x", likelihoods[is_open][n], passages,
                usage=TokenUsage(9, 2), seconds=1.0, stages={"generation": 1.0},
            )
            for n, question in enumerate(condition.questions)
        ]  # fmt: skip

    return answer_questions


LIKELIHOODS = ([-0.2, -0.4, -3.0, -4.0], [-1.0, -1.0, -1.0, -1.0])


def test_the_best_threshold_of_a_signal_is_chosen() -> None:
    rng = random.Random(1)
    for _ in range(50):
        n = rng.randrange(1, 12)
        scores = [rng.choice([-math.inf, *range(-4, 0)]) for _ in range(n)]
        weights, passages = ([float(rng.random() < 0.5) for _ in range(n)] for _ in range(2))

        def mean_value(minimum: float, scores=scores, weights=weights, passages=passages) -> float:  # type: ignore[no-untyped-def]
            rows = zip(scores, weights, passages, strict=True)
            return math.fsum(w if s >= minimum else p for s, w, p in rows) / len(scores)

        expected = max(mean_value(minimum) for minimum in (math.inf, -1, -2, -3, -4))
        signal, point = choose_route({"weights": scores, "difference": scores}, weights, passages)
        assert signal == "weights"
        assert point.value == pytest.approx(expected)
        assert point.value == pytest.approx(mean_value(math.inf if point.least is None else point.least))
        assert [p.value for p in list_route_points(scores, weights, passages)] == pytest.approx(
            [mean_value(math.inf), *(mean_value(minimum) for minimum in (-1, -2, -3, -4) if minimum in scores)]
        )


def test_both_answers_are_used_only_if_that_is_better() -> None:
    assert choose_route({"weights": [0.0], "difference": [0.0]}, [0.0], [0.0])[1].least is None  # both are wrong
    right, wrong = [1.0] * 20 + [0.0] * 20, [0.0] * 20 + [1.0] * 20
    separated, mixed = [0.0] * 20 + [-1.0] * 20, [0.0, -1.0] * 20
    assert choose_route({"weights": mixed, "difference": separated}, right, wrong)[0] == "difference"
    assert choose_route({"weights": separated, "difference": separated}, right, wrong)[0] == "weights"


def test_a_route_is_chosen_and_used_for_every_condition() -> None:
    routed_answers = RoutedAnswers(create_reader(LIKELIHOODS), None, ("sha256:1", "concat"))
    readings = routed_answers(OPEN_BOOK, lambda done, total: None)
    assert [reading.answer for reading in readings] == [f"name {n}" for n in range(4)]
    assert [reading.memory for reading in readings] == ["weights", "weights", "passages", "passages"]
    assert routed_answers.report is not None
    assert routed_answers.report.route == Route("weights", -0.4 / 2, "sha256:1", "concat")
    assert routed_answers.report.to_json() == {
        "route": {"signal": "weights", "least": -0.2, "model": "sha256:1", "reader": "concat"},
        "chosen": True, "measure": "EM", "auto": 1.0, "weights": 0.5, "passages": 0.5,
        "answered_from_weights": 0.5, "reading_skipped": 0.5,
    }  # fmt: skip
    assert "EM is 1.000, from the weights alone 0.500, from passages alone 0.500" in str(routed_answers.report)
    # An answer from passages costs both.
    assert [reading.seconds for reading in readings] == [1, 1, 2, 2]
    assert [reading.usage and reading.usage.new_tokens for reading in readings] == [2, 2, 4, 4]
    assert readings[3].stages == {"weights": 1.0, "generation": 1.0}
    repeated = routed_answers(EvalCondition("gold", 1, QUESTIONS[:1], HITS[:1]), lambda done, total: None)
    assert repeated == readings[:1]
    closed_book = routed_answers(EvalCondition("closed book", 0, QUESTIONS, ((),) * 4), lambda done, total: None)
    assert [reading.memory for reading in closed_book] == ["weights"] * 4


@pytest.mark.parametrize(
    ("route", "share", "skipped", "value"),
    [
        (Route("weights", -1.9), 0.75, 0.75, 0.75),
        (Route("weights", None), 0.0, 0.0, 0.5),
        (Route("difference", 0.0), 0.5, 0.0, 1.0),
        (Route("difference", 9.0), 0.0, 0.0, 0.5),
    ],
)
def test_a_given_route_is_measured(route: Route, share: float, skipped: float, value: float) -> None:
    routed_answers = RoutedAnswers(create_reader(LIKELIHOODS), route)
    routed_answers(OPEN_BOOK, lambda done, total: None)
    assert routed_answers.report is not None
    assert routed_answers.report.route == route
    assert (routed_answers.report.point.weights_share, routed_answers.report.skipped_retrieval_share) == (
        share,
        skipped,
    )
    assert routed_answers.report.point.value == value


def test_no_route_is_chosen_without_passages() -> None:
    empty = EvalCondition("open book", 1, QUESTIONS, ((),) * 4)
    with pytest.raises(UsageError, match="no route can be chosen"):
        RoutedAnswers(create_reader(LIKELIHOODS), None)(empty, lambda done, total: None)
    assert len(RoutedAnswers(create_reader(LIKELIHOODS), Route("weights", -1.9))(empty, lambda done, total: None)) == 4


def test_a_model_without_likelihoods_has_no_route() -> None:
    with pytest.raises(UsageError, match="does not give the likelihood of its answers"):
        RoutedAnswers(create_reader(([None] * 4, [None] * 4)), None)(OPEN_BOOK, lambda done, total: None)
