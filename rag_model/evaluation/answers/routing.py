"""Measure the reader `auto`, and choose its routing rule on questions with known answers.

The model answers every question once without passages and once from passages. Both answers to a
question are cached, so that every threshold can be measured without the model. With the threshold
t, questions with a score s >= t (`reading.routing`) get the answer without passages, and all other
questions the answer from passages:

    EM(t) = 1/n (sum over s_i >= t of EM(y_i)  +  sum over s_i < t of EM(y_z,i))

`choose_route` chooses the t with the largest EM(t), and among equal values the t with the most
answers without passages. Only scores of questions whose answer without passages is correct are
candidates for t, because any other t only adds questions whose answer without passages is wrong.
The score is computed by the signal `weights`, which needs no retrieval for these questions. If the
confidence interval shows that the signal `difference` gives better answers, it is used instead.

EM(t) is too high on the questions on which t was chosen, so measure the route on other questions.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import compress
from typing import Any

from rag_model.errors import UsageError
from rag_model.evaluation.answers.ablation import CLOSED_BOOK, EvalCondition
from rag_model.evaluation.answers.readings import Reading
from rag_model.evaluation.answers.scores import get_deciding_measure, score_answer
from rag_model.evaluation.bootstrap import DEFAULT_RESAMPLING, Resampling, estimate_difference
from rag_model.evaluation.measures.measure import AnswerKind
from rag_model.reading.answer import sum_usage
from rag_model.reading.reader import WEIGHTS
from rag_model.reading.routing import NO_LIKELIHOOD, ROUTE_SIGNALS, Route, RouteSignal, mean_log_likelihood

# A function that answers all questions of an `EvalCondition`. Its second argument is called with
# the number of finished questions and the number of all questions.
ConditionAnswerer = Callable[..., list[Reading]]


@dataclass(frozen=True, slots=True)
class RoutePoint:
    """The quality of the routed answers at one threshold."""

    least: float | None  # threshold; if None, every question is answered from passages
    weights_share: float  # share of the questions that are answered without passages
    value: float  # value of the deciding measure at this threshold


@dataclass(frozen=True, slots=True)
class RoutingReport:
    """The effect of a routing rule (closed-book or retrieval) on a set of questions."""

    route: Route
    is_chosen: bool  # whether the route was chosen on these questions
    measure: str  # name of the deciding measure
    point: RoutePoint
    weights_value: float  # value of the measure if every question is answered without passages
    passages_value: float  # value of the measure if every question is answered from passages

    def to_json(self) -> dict[str, Any]:
        """Return the report as JSON values."""
        return {
            "route": asdict(self.route),
            "chosen": self.is_chosen,
            "measure": self.measure,
            "auto": self.point.value,
            "weights": self.weights_value,
            "passages": self.passages_value,
            "answered_from_weights": self.point.weights_share,
            "reading_skipped": self.skipped_retrieval_share,
        }

    @property
    def skipped_retrieval_share(self) -> float:
        """The share of the questions for which no passages are retrieved."""
        return self.point.weights_share if self.route.signal == "weights" else 0.0

    def __str__(self) -> str:
        """Return the report as one sentence."""
        rule_text = (
            "passages answer every question"
            if self.route.least is None
            else f"the weights answer at {self.route.least:.4g} or more nats per token by {self.route.signal}"
        )
        return (
            f"{'chosen route' if self.is_chosen else 'route'}: {rule_text}: {self.point.weights_share:.0%} of the "
            f"questions, and for {self.skipped_retrieval_share:.0%} nothing is searched or read; {self.measure} is "
            f"{self.point.value:.3f}, from the weights alone {self.weights_value:.3f}, from passages alone "
            f"{self.passages_value:.3f}"
        )


def list_route_points(
    scores: Sequence[float], closed_book_values: Sequence[float], open_book_values: Sequence[float]
) -> list[RoutePoint]:
    """Return a point for each threshold, in descending order of the thresholds.

    A question with a score of -inf is answered from passages. Questions with equal scores share a
    point.

    >>> list_route_points([-0.1, -2.0], [1, 0], [0, 1])[1]
    RoutePoint(least=-0.1, weights_share=0.5, value=1.0)
    """
    n, total = len(scores), math.fsum(open_book_values)
    points = [RoutePoint(None, 0.0, total / n)]
    ranked_questions = sorted(zip(scores, closed_book_values, open_book_values, strict=True), key=lambda row: -row[0])
    for n_closed, (score, closed_value, open_value) in enumerate(ranked_questions, start=1):
        total += closed_value - open_value
        if math.isfinite(score) and (n_closed == n or ranked_questions[n_closed][0] < score):
            points.append(RoutePoint(score, n_closed / n, total / n))
    return points


def choose_route(
    scores_by_signal: Mapping[RouteSignal, Sequence[float]],
    closed_book_values: Sequence[float],
    open_book_values: Sequence[float],
    resampling: Resampling = DEFAULT_RESAMPLING,
) -> tuple[RouteSignal, RoutePoint]:
    """Return the best signal and its best threshold, by the rules in the module's docstring."""
    best_point_by_signal: dict[RouteSignal, RoutePoint] = {}
    for signal, scores in scores_by_signal.items():
        correct_scores = {score for score, value in zip(scores, closed_book_values, strict=True) if value > 0}
        points = list_route_points(scores, closed_book_values, open_book_values)
        allowed_points = [point for point in points if point.least is None or point.least in correct_scores]
        best_point_by_signal[signal] = max(allowed_points, key=lambda point: (point.value, point.weights_share))
    routed_values_by_signal = {
        signal: [
            closed_value if point.least is not None and score >= point.least else open_value
            for score, closed_value, open_value in zip(
                scores_by_signal[signal], closed_book_values, open_book_values, strict=True
            )
        ]
        for signal, point in best_point_by_signal.items()
    }
    gain = estimate_difference(routed_values_by_signal["difference"], routed_values_by_signal["weights"], resampling)
    chosen_signal: RouteSignal = "difference" if gain.low > 0 else "weights"
    return chosen_signal, best_point_by_signal[chosen_signal]


class RoutedAnswers:
    """A function that chooses between answers with and without passages, like the reader `auto`.

    If no route is given, it is chosen on the questions of the first condition.
    """

    def __init__(
        self,
        answer_questions: ConditionAnswerer,
        route: Route | None,
        subject: tuple[str, str] = ("", ""),
        kind: AnswerKind = "spans",
        resampling: Resampling = DEFAULT_RESAMPLING,
    ) -> None:
        """Create a function that routes between answers with and without passages.

        Args:
            answer_questions: function that returns the answers of a reader (an `AnswerCache`).
            route: the routing rule; None means that one is chosen.
            subject: the model and the reader for which a chosen route is valid.
            kind: the kind of the answers; its first measure decides which route is best.
            resampling: settings of the interval that compares the signals.
        """
        self._answer_questions, self._route, self._subject = answer_questions, route, subject
        self._kind, self._resampling = kind, resampling
        self.report: RoutingReport | None = None  # report on the first condition that was answered

    def __call__(self, condition: EvalCondition, on_progress: Callable[[int, int], None]) -> list[Reading]:
        """Return the routed answers to all questions of a condition, in order.

        Raises:
            UsageError: the model does not give the likelihood of its answers, or a route must be
                chosen and no question has passages.
        """
        n = len(condition.questions)
        closed_condition = EvalCondition(CLOSED_BOOK, 0, condition.questions, ((),) * n)
        closed_book = self._answer_questions(closed_condition, lambda done, total: on_progress(done // 2, n))
        if not any(condition.hits):
            if condition.k and self.report is None and self._route is None:
                raise UsageError(
                    "no passage was found for any question, so no route can be chosen: choose another --retriever"
                )
            return closed_book
        open_book = self._answer_questions(condition, lambda done, total: on_progress((n + done) // 2, n))
        if all(mean_log_likelihood(reading) is None for reading in closed_book if reading.answer):
            raise UsageError(NO_LIKELIHOOD)
        if self.report is None:
            self.report = self._measure(condition, closed_book, open_book)
        route = self.report.route
        scores = _score_questions(route.signal, closed_book, open_book)
        return [
            _choose_reading(route, score, *readings)
            for score, *readings in zip(scores, closed_book, open_book, strict=True)
        ]

    def _measure(
        self, condition: EvalCondition, closed_book: Sequence[Reading], open_book: Sequence[Reading]
    ) -> RoutingReport:
        """Measure the given route, or choose one. Questions to which the deciding measure does not
        apply are ignored.
        """
        measure = get_deciding_measure(self._kind)
        value_pairs = [
            [score_answer(question, reading, self._kind).measures.get(measure) for reading in readings]
            for question, *readings in zip(condition.questions, closed_book, open_book, strict=True)
        ]
        is_complete = [None not in value_pair for value_pair in value_pairs]
        closed_book_values, open_book_values = (
            [measure_value for measure_value in column if measure_value is not None]
            for column in zip(*(pair for pair in value_pairs if None not in pair), strict=True)
        )
        scores_by_signal = {
            signal: list(compress(_score_questions(signal, closed_book, open_book), is_complete))
            for signal in ROUTE_SIGNALS
        }
        if self._route is None:
            signal, point = choose_route(scores_by_signal, closed_book_values, open_book_values, self._resampling)
            route = Route(signal, point.least, *self._subject)
        else:
            route = self._route
            points = list_route_points(scores_by_signal[route.signal], closed_book_values, open_book_values)
            # The points are in descending order of the threshold.
            points_above_threshold = [p for p in points if p.least is None or route.chooses_weights(p.least)]
            point = replace(points_above_threshold[-1], least=route.least)
        n = len(closed_book_values)
        return RoutingReport(
            route,
            self._route is None,
            measure,
            point,
            math.fsum(closed_book_values) / n,
            math.fsum(open_book_values) / n,
        )


def _score_questions(signal: RouteSignal, closed_book: Sequence[Reading], open_book: Sequence[Reading]) -> list[float]:
    """Return the score of each question; -inf if its answer is empty or a likelihood is unknown."""
    route = Route(signal)
    scores = [
        route.score(*readings) if readings[0].answer else None for readings in zip(closed_book, open_book, strict=True)
    ]
    return [-math.inf if score is None else score for score in scores]


def _choose_reading(route: Route, score: float, closed_book: Reading, open_book: Reading) -> Reading:
    """Return the answer that the route chooses; its costs are those of all answers it needed."""
    is_from_weights = route.chooses_weights(score)
    is_open_book_read = not (is_from_weights and route.signal == "weights")
    readings = [closed_book, open_book] if is_open_book_read else [closed_book]
    seconds = [reading.seconds for reading in readings if reading.seconds is not None]
    weights_seconds = {WEIGHTS: math.fsum(closed_book.stages.values())} if closed_book.stages else {}
    answer = replace(closed_book, passages=(), context=(), statements=()) if is_from_weights else open_book
    return replace(
        answer,
        usage=sum_usage(reading.usage for reading in readings),
        seconds=math.fsum(seconds) if seconds else None,
        stages={**weights_seconds, **(open_book.stages if is_open_book_read else {})},
    )
