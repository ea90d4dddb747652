"""Selective answering: the risk at each coverage, and the choice of a threshold for abstention.

A question is answered if the score of its answer (`reading.confidence`) is at least the threshold.
*Coverage* is the share of the questions that are answered, and *risk* is the share of wrong answers
among them (selective classification: El-Yaniv & Wiener 2010, Geifman & El-Yaniv 2017).
`choose_threshold` chooses the score with the smallest area under the risk-coverage curve, and the
threshold with the largest coverage whose risk is at most r.

The risk is measured on a sample and may be larger for other questions. Therefore choose the
threshold on questions like those of users, and measure its risk on a second set of questions.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

from rag_model.evaluation.answers.readings import Reading
from rag_model.evaluation.answers.scores import ScoredAnswer
from rag_model.reading.confidence import SIGNALS, Signal, Threshold


@dataclass(frozen=True, slots=True)
class CoveragePoint:
    """One point of a risk-coverage curve."""

    minimum_score: float  # threshold; only answers with at least this score are given
    coverage: float  # share of the questions that are answered
    risk: float  # share of wrong answers among the answers that are given


@dataclass(frozen=True, slots=True)
class AbstentionReport:
    """The risk-coverage curves of a question set, and the threshold chosen or measured on them."""

    # curve by signal, in descending order of the threshold
    curves: Mapping[Signal, Sequence[CoveragePoint]]
    areas: Mapping[Signal, float]  # area under the curve by signal; smaller is better
    threshold: Threshold | None  # chosen threshold; None if every threshold exceeds the risk limit
    # curve point at the threshold; None if there is no threshold or it answers no question
    operating_point: CoveragePoint | None
    # maximum risk of the chosen threshold; None if the threshold was given
    risk_limit: float | None

    def to_json(self) -> dict[str, Any]:
        """Return the report as JSON values, without the curves."""
        point = self.operating_point
        return {
            "threshold": self.threshold and asdict(self.threshold),
            "at": point and {"coverage": point.coverage, "risk": point.risk},
            "wanted_risk": self.risk_limit,
            "areas": dict(self.areas),
        }


def compute_risk_coverage_curve(scores: Sequence[float], correctness: Sequence[float]) -> list[CoveragePoint]:
    """Return coverage and risk at each threshold, in descending order of the threshold.

    `correctness` has 1 for a correct answer. Equal scores share one point. An answer with a score
    of -inf is below every threshold.

    >>> compute_risk_coverage_curve([0.9, 0.5, 0.5, 0.1], [1, 1, 0, 0])[1]
    CoveragePoint(minimum_score=0.5, coverage=0.75, risk=0.3333333333333333)
    """
    pairs = sorted(zip(scores, correctness, strict=True), key=lambda pair: -pair[0])
    points: list[CoveragePoint] = []
    n_correct = 0.0
    for n_answered, (score, correct_share) in enumerate(pairs, start=1):
        n_correct += correct_share
        if score > -math.inf and (n_answered == len(pairs) or pairs[n_answered][0] < score):
            points.append(CoveragePoint(score, n_answered / len(pairs), (n_answered - n_correct) / n_answered))
    return points


def compute_area_under_curve(points: Sequence[CoveragePoint]) -> float:
    """Return the mean risk over the coverage by the trapezoidal rule.

    From coverage 0 to the first point, the risk of the first point is used.
    """
    if not points:
        return 1.0
    trapezoid_areas = (
        (next_point.coverage - previous_point.coverage) * (next_point.risk + previous_point.risk) / 2
        for previous_point, next_point in pairwise(points)
    )
    return (points[0].coverage * points[0].risk + math.fsum(trapezoid_areas)) / points[-1].coverage


def choose_threshold(scored_answers: Sequence[ScoredAnswer], measure: str, risk_limit: float) -> AbstentionReport:
    """Choose a signal and a threshold whose risk is at most `risk_limit`. Questions to which
    `measure` does not apply are ignored.
    """
    points_by_signal, areas = _compute_curves(scored_answers, measure)
    for signal in sorted(areas, key=areas.__getitem__):
        if allowed_points := [p for p in points_by_signal[signal] if p.risk <= risk_limit]:
            operating_point = max(allowed_points, key=lambda point: point.coverage)
            return AbstentionReport(
                points_by_signal, areas, Threshold(signal, operating_point.minimum_score), operating_point, risk_limit
            )
    return AbstentionReport(points_by_signal, areas, None, None, risk_limit)


def measure_threshold(scored_answers: Sequence[ScoredAnswer], measure: str, threshold: Threshold) -> AbstentionReport:
    """Measure the coverage and the risk of a given threshold on these questions."""
    curves, areas = _compute_curves(scored_answers, measure)
    points = [point for point in curves.get(threshold.signal, ()) if point.minimum_score >= threshold.least]
    operating_point = CoveragePoint(threshold.least, points[-1].coverage, points[-1].risk) if points else None
    return AbstentionReport(curves, areas, threshold, operating_point, None)


def compute_confidence(reading: Reading, signal: Signal) -> float | None:
    """Return the confidence score of an answer, as `confidence.get_score` does; None if unknown.

    An empty answer without a likelihood has the score -inf, as in `Threshold.apply`.
    """
    if signal == "retrieval":
        return max((passage.score for passage in reading.passages if passage.id), default=-math.inf)
    if reading.log_likelihood is None and not reading.answer:
        return -math.inf
    if signal == "likelihood" or reading.log_likelihood is None:
        return reading.log_likelihood
    return None if reading.closed_book is None else reading.log_likelihood - reading.closed_book


def describe_abstention(report: AbstentionReport) -> str:
    """Return a sentence about the coverage and the risk of the threshold."""
    if report.threshold is None:
        return f"No threshold keeps the risk at {report.risk_limit:g} or below"
    threshold_text = f"below {report.threshold.least:.4g} by {report.threshold.signal}"
    if report.operating_point is None:
        return f"With no answer {threshold_text}, no question is answered"
    coverage_text = f"{report.operating_point.coverage:.0%} of the questions are answered"
    risk_text = f"{report.operating_point.risk:.1%} of these wrong"
    return f"With no answer {threshold_text}, {coverage_text}, and {risk_text}"


def _compute_curves(
    scored_answers: Sequence[ScoredAnswer], measure: str
) -> tuple[dict[Signal, list[CoveragePoint]], dict[Signal, float]]:
    answers = [answer for answer in scored_answers if measure in answer.measures]
    correctness = [answer.measures[measure] for answer in answers]
    curves: dict[Signal, list[CoveragePoint]] = {}
    for signal in SIGNALS:
        scores = [compute_confidence(answer.reading, signal) for answer in answers]
        known_scores = [score for score in scores if score is not None]
        if answers and len(known_scores) == len(scores):
            curves[signal] = compute_risk_coverage_curve(known_scores, correctness)
    return curves, {signal: compute_area_under_curve(points) for signal, points in curves.items()}
