"""When to give no answer: the risk at each coverage, and the threshold that questions with known answers choose.

Of the answers whose score (`reading.confidence`) is at least t, *coverage* is their share of all questions, and *risk*
the share of them that is wrong (selective classification: El-Yaniv & Wiener 2010, Geifman & El-Yaniv 2017). The
rule: the signal whose area under the curve of risk by coverage is smallest, and of it the threshold of the largest
coverage at a risk of at most r. The risk is that of the sample: on other questions it may be more, so choose on
questions like those that will be asked, and measure on others.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

from rag_model.evaluation.answers.readings import Reading
from rag_model.evaluation.answers.scores import Scored
from rag_model.reading.confidence import SIGNALS, Signal, Threshold


@dataclass(frozen=True, slots=True)
class Coverage:
    """What a threshold gives."""

    least: float  # answers with this score, or more, are given
    coverage: float  # share of the questions that are answered
    risk: float  # share of these answers that is wrong


@dataclass(frozen=True, slots=True)
class Abstaining:
    """The curves of a set of questions, and the threshold that they choose or were measured with."""

    curves: Mapping[Signal, Sequence[Coverage]]  # of the signals that are known, by falling threshold
    areas: Mapping[Signal, float]  # under each curve; smaller is better
    threshold: Threshold | None  # None: no coverage has so little risk
    at: Coverage | None  # what it gives on these questions; None: as above, or it answers none of them
    wanted: float | None  # risk at most; None: the threshold was given

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON values, without the curves."""
        chosen = None if self.threshold is None else asdict(self.threshold)
        at = None if self.at is None else {"coverage": self.at.coverage, "risk": self.at.risk}
        return {"threshold": chosen, "at": at, "wanted_risk": self.wanted, "areas": dict(self.areas)}


def curve(scores: Sequence[float], right: Sequence[float]) -> list[Coverage]:
    """Return coverage and risk at each threshold, by falling threshold; equal scores are answered together.

    `right` is 1 for a correct answer. No threshold answers -inf.

    >>> curve([0.9, 0.5, 0.5, 0.1], [1, 1, 0, 0])[1]
    Coverage(least=0.5, coverage=0.75, risk=0.33333333333333337)
    """
    ranked = sorted(zip(scores, right, strict=True), key=lambda one: -one[0])
    points: list[Coverage] = []
    done = 0.0
    for given, (score, value) in enumerate(ranked, start=1):
        done += value
        if score > -math.inf and (given == len(ranked) or ranked[given][0] < score):
            points.append(Coverage(score, given / len(ranked), 1 - done / given))
    return points


def area(points: Sequence[Coverage]) -> float:
    """Return the mean risk over the coverage, by trapezoids; the first risk counts below the first coverage too."""
    if not points:
        return 1.0
    between = (
        (after.coverage - before.coverage) * (after.risk + before.risk) / 2 for before, after in pairwise(points)
    )
    return (points[0].coverage * points[0].risk + math.fsum(between)) / points[-1].coverage


def choose(scored: Sequence[Scored], right_by: str, risk: float) -> Abstaining:
    """Choose signal and threshold by the rule above; questions that the measure does not apply to are left out."""
    curves, areas = _curves(scored, right_by)
    for signal in sorted(areas, key=areas.__getitem__):
        if fitting := [point for point in curves[signal] if point.risk <= risk]:
            at = max(fitting, key=lambda point: point.coverage)
            return Abstaining(curves, areas, Threshold(signal, at.least), at, risk)
    return Abstaining(curves, areas, None, None, risk)


def measure(scored: Sequence[Scored], right_by: str, threshold: Threshold) -> Abstaining:
    """Return what a threshold that was chosen elsewhere gives on these questions."""
    curves, areas = _curves(scored, right_by)
    given = [point for point in curves.get(threshold.signal, ()) if point.least >= threshold.least]
    at = Coverage(threshold.least, given[-1].coverage, given[-1].risk) if given else None
    return Abstaining(curves, areas, threshold, at, None)


def score_of(reading: Reading, signal: Signal) -> float | None:
    """Return an answer's score by a signal, as `confidence.score_of`; None: it is not known."""
    if signal == "retrieval":
        return max((one.score for one in reading.passages if one.id), default=-math.inf)
    if signal == "likelihood" or reading.log_likelihood is None:
        return reading.log_likelihood
    return None if reading.closed_book is None else reading.log_likelihood - reading.closed_book


def abstention_words(found: Abstaining) -> str:
    """Return one sentence that says what a threshold gives, or that there is none."""
    if found.threshold is None:
        return f"No threshold keeps the risk at {found.wanted:g} or below"
    below = f"below {found.threshold.least:.4g} by {found.threshold.signal}"
    if found.at is None:
        return f"With no answer {below}, no question is answered"
    given, wrong = f"{found.at.coverage:.0%} of the questions are answered", f"{found.at.risk:.1%} of these wrong"
    return f"With no answer {below}, {given}, and {wrong}"


def _curves(scored: Sequence[Scored], right_by: str) -> tuple[dict[Signal, list[Coverage]], dict[Signal, float]]:
    asked = [one for one in scored if right_by in one.measures]
    right = [one.measures[right_by] for one in asked]
    found: dict[Signal, list[Coverage]] = {}
    for signal in SIGNALS:
        scores = [score_of(one.reading, signal) for one in asked]
        known = [score for score in scores if score is not None]
        if asked and len(known) == len(scores):
            found[signal] = curve(known, right)
    return found, {signal: area(points) for signal, points in found.items()}
