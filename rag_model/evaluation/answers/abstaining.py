"""Selective answering: the risk at each coverage, and the choice of a threshold for abstention.

For the answers whose score (`reading.confidence`) is at least t, *coverage* is their share of all
questions, and *risk* is the share of them that is wrong (selective classification: El-Yaniv &
Wiener 2010, Geifman & El-Yaniv 2017). `choose_threshold` takes the signal with the smallest area
under the risk-coverage curve, and the threshold with the largest coverage at a risk of at most r.

The risk is measured on the sample and may be larger on other questions: choose the threshold on
questions like those that users ask, and measure it on others.
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

    minimum_score: float  # answers with at least this score are given
    coverage: float  # share of the questions that are answered
    risk: float  # share of the given answers that is wrong


@dataclass(frozen=True, slots=True)
class AbstentionReport:
    """The risk-coverage curves of a question set, and the threshold chosen or measured on them."""

    curves: Mapping[Signal, Sequence[CoveragePoint]]  # by signal; descending threshold
    areas: Mapping[Signal, float]  # area under each curve; smaller is better
    threshold: Threshold | None  # None: every threshold exceeds the risk limit
    operating_point: CoveragePoint | None  # None: no threshold, or it answers no question
    risk_limit: float | None  # maximum risk; None: the threshold was given

    def to_json(self) -> dict[str, Any]:
        """Return the report as JSON values, without the curves."""
        threshold = None if self.threshold is None else asdict(self.threshold)
        operating_point = (
            None
            if self.operating_point is None
            else {"coverage": self.operating_point.coverage, "risk": self.operating_point.risk}
        )
        return {
            "threshold": threshold,
            "at": operating_point,
            "wanted_risk": self.risk_limit,
            "areas": dict(self.areas),
        }


def risk_coverage_curve(scores: Sequence[float], is_correct: Sequence[float]) -> list[CoveragePoint]:
    """Return coverage and risk at each threshold, in descending order of the threshold.

    `is_correct` is 1 for a correct answer. Equal scores share one point. An answer with a score of
    -inf is below every threshold.

    >>> risk_coverage_curve([0.9, 0.5, 0.5, 0.1], [1, 1, 0, 0])[1]
    CoveragePoint(minimum_score=0.5, coverage=0.75, risk=0.33333333333333337)
    """
    ranked = sorted(zip(scores, is_correct, strict=True), key=lambda pair: -pair[0])
    points: list[CoveragePoint] = []
    correct = 0.0
    for answered, (score, is_right) in enumerate(ranked, start=1):
        correct += is_right
        if score > -math.inf and (answered == len(ranked) or ranked[answered][0] < score):
            points.append(CoveragePoint(score, answered / len(ranked), 1 - correct / answered))
    return points


def area_under_curve(points: Sequence[CoveragePoint]) -> float:
    """Return the mean risk over the coverage by the trapezoidal rule.

    The first risk also holds below the first coverage.
    """
    if not points:
        return 1.0
    between = (
        (following.coverage - previous.coverage) * (following.risk + previous.risk) / 2
        for previous, following in pairwise(points)
    )
    return (points[0].coverage * points[0].risk + math.fsum(between)) / points[-1].coverage


def choose_threshold(scored: Sequence[ScoredAnswer], measure: str, risk: float) -> AbstentionReport:
    """Choose signal and threshold at a maximum risk, over the questions with this measure."""
    curves, areas = _compute_curves(scored, measure)
    for signal in sorted(areas, key=areas.__getitem__):
        if allowed_points := [point for point in curves[signal] if point.risk <= risk]:
            operating_point = max(allowed_points, key=lambda point: point.coverage)
            return AbstentionReport(
                curves, areas, Threshold(signal, operating_point.minimum_score), operating_point, risk
            )
    return AbstentionReport(curves, areas, None, None, risk)


def measure_threshold(scored: Sequence[ScoredAnswer], deciding_measure: str, threshold: Threshold) -> AbstentionReport:
    """Measure coverage and risk of a given threshold on these questions."""
    curves, areas = _compute_curves(scored, deciding_measure)
    points = [point for point in curves.get(threshold.signal, ()) if point.minimum_score >= threshold.least]
    operating_point = CoveragePoint(threshold.least, points[-1].coverage, points[-1].risk) if points else None
    return AbstentionReport(curves, areas, threshold, operating_point, None)


def reading_score(reading: Reading, signal: Signal) -> float | None:
    """Return an answer's score by a signal, as `confidence.get_score`; None if it is unknown."""
    if signal == "retrieval":
        return max((passage.score for passage in reading.passages if passage.id), default=-math.inf)
    if signal == "likelihood" or reading.log_likelihood is None:
        return reading.log_likelihood
    return None if reading.closed_book is None else reading.log_likelihood - reading.closed_book


def describe_abstention(report: AbstentionReport) -> str:
    """Return one sentence about the coverage and risk of the threshold, or that there is none."""
    if report.threshold is None:
        return f"No threshold keeps the risk at {report.risk_limit:g} or below"
    below = f"below {report.threshold.least:.4g} by {report.threshold.signal}"
    if report.operating_point is None:
        return f"With no answer {below}, no question is answered"
    coverage_text, risk_text = (
        f"{report.operating_point.coverage:.0%} of the questions are answered",
        f"{report.operating_point.risk:.1%} of these wrong",
    )
    return f"With no answer {below}, {coverage_text}, and {risk_text}"


def _compute_curves(
    scored: Sequence[ScoredAnswer], right_by: str
) -> tuple[dict[Signal, list[CoveragePoint]], dict[Signal, float]]:
    answers = [answer for answer in scored if right_by in answer.measures]
    right = [answer.measures[right_by] for answer in answers]
    curves: dict[Signal, list[CoveragePoint]] = {}
    for signal in SIGNALS:
        scores = [reading_score(answer.reading, signal) for answer in answers]
        known_scores = [score for score in scores if score is not None]
        if answers and len(known_scores) == len(scores):
            curves[signal] = risk_coverage_curve(known_scores, right)
    return curves, {signal: area_under_curve(points) for signal, points in curves.items()}
