"""Verdicts on whether a relative finding of a paper is reproduced, from the interval of a paired difference.

Every finding states that in the paper one side's figure is larger than the other's. Our figures are of the same
questions on both sides. If the interval of our difference is above 0, the finding is reproduced; below 0, it is not; if
it contains 0, the finding is undecidable at this size. So it is with fewer than 6 questions on which the sides differ:
a sign test of 5 that all agree has p = .0625, and a bootstrap of so few is overconfident. The interval is over the
questions of all seeds and does not cover the variance of worlds and trainings, so a seed whose difference has the other
sign makes a finding undecidable too.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import NormalDist, fmean
from typing import Any, TypeAlias

import numpy as np

from rag_model.evaluation.answers.scores import ScoredAnswer
from rag_model.evaluation.bootstrap import DEFAULT_RESAMPLING, Estimate, estimate_difference, estimate_from_sums
from rag_model.evaluation.measures.answers import bleu, bleu_counts
from rag_model.evaluation.measures.ngrams import distinct_ngram_ratio

REPRODUCED, NOT, UNDECIDABLE = "reproduced", "not reproduced", "undecidable at this size"
MIN_DIFFERING = 6  # questions that differ: 2 / 2^6 = .031
NOTHING, GOLD = "nothing", "gold"  # sides without a model: a figure of 0, and the gold answers
Arms = Mapping[
    str, Sequence[ScoredAnswer]
]  # answers by task and arm, `qa: closed book`; arms of a task share questions


@dataclass(frozen=True, slots=True)
class Finding:
    """A finding of the paper: one side's figure is larger than the other's."""

    where: str  # in the paper
    task: str
    measure: str
    larger: str  # an arm
    smaller: str
    theirs: tuple[float, float] | None = None  # percent, the larger first; None: only drawn, or another measure

    @property
    def claim(self) -> str:
        return f"{self.task}: {self.larger} > {self.smaller}"


@dataclass(frozen=True, slots=True)
class Judged:
    """A finding, with our figures."""

    finding: Finding
    ours: tuple[float, float]  # shares in [0, 1]
    difference: Estimate
    differing: int  # questions
    seeds: tuple[float, ...]  # the difference of each seed's questions

    @property
    def verdict(self) -> str:
        return verdict(self.difference, self.differing, self.seeds)

    def to_json(self) -> dict[str, Any]:
        finding, gap = self.finding, self.difference
        return {
            "where": finding.where,
            "finding": finding.claim,
            "measure": finding.measure,
            "theirs": finding.theirs,
            "ours": [round(100 * value, 1) for value in self.ours],
            "difference": [round(100 * value, 1) for value in (gap.value, gap.low, gap.high)],
            "seeds": [round(100 * value, 1) for value in self.seeds],
            "questions": gap.n,
            "differing": self.differing,
            "verdict": self.verdict,
        }


def verdict(difference: Estimate, differing: int, seeds: Sequence[float] = ()) -> str:
    """Return the verdict on a paired difference that is above 0 in the paper; `seeds` has one difference per seed."""
    if differing < MIN_DIFFERING or difference.low <= 0 <= difference.high:
        return UNDECIDABLE
    if any(seed_difference * difference.value < 0 for seed_difference in seeds):
        return UNDECIDABLE
    return REPRODUCED if difference.low > 0 else NOT


def judge(finding: Finding, arms: Arms) -> Judged | None:
    """Compare both sides of a finding over their common questions; return None if an arm was not run."""
    larger, smaller = (_side(finding, name, arms) for name in (finding.larger, finding.smaller))
    name, seeds = finding.measure, defaultdict[str, list[Pair]](list)
    for key, larger_answer in larger.items():
        if key in smaller and all(name in CORPUS or name in side.measures for side in (larger_answer, smaller[key])):
            seeds[key.rpartition("-")[0].partition("-")[0]].append((larger_answer, smaller[key]))
    if not seeds:
        return None
    pairs = [pair for seed_pairs in seeds.values() for pair in seed_pairs]
    compare = CORPUS.get(name) or partial(_means, name)
    ours, difference = compare(pairs)
    differing = sum(a.text != b.text if name in CORPUS else a.measures[name] != b.measures[name] for a, b in pairs)
    return Judged(
        finding, ours, difference, differing, tuple(compare(seed_pairs)[1].value for seed_pairs in seeds.values())
    )


@dataclass(frozen=True, slots=True)
class _SideAnswer:
    """The answer of one side to a question."""

    text: str
    golds: Sequence[str]
    measures: Mapping[str, float]


Pair: TypeAlias = tuple[_SideAnswer, _SideAnswer]  # one question's, the larger side's first
Comparison: TypeAlias = tuple[tuple[float, float], Estimate]  # both figures, and their difference


def _side(finding: Finding, name: str, arms: Arms) -> dict[str, _SideAnswer]:
    model = finding.larger if name == NOTHING else finding.smaller if name == GOLD else name
    answers = {}
    for scored_answer in arms.get(f"{finding.task}: {model}", ()):
        golds = scored_answer.question.answers
        answer = _SideAnswer(scored_answer.reading.answer, golds, scored_answer.measures)
        if name == NOTHING:
            answer = _SideAnswer("", golds, dict.fromkeys(scored_answer.measures, 0.0))
        elif name == GOLD:
            answer = _SideAnswer(golds[0], golds, {})
        answers[scored_answer.question.id] = answer
    return answers


def _means(name: str, pairs: Sequence[Pair]) -> Comparison:
    """Compare the means of a measure of each answer."""
    ours = [a.measures[name] for a, _ in pairs], [b.measures[name] for _, b in pairs]
    return (fmean(ours[0]), fmean(ours[1])), estimate_difference(*ours)


def _bleu_1(pairs: Sequence[Pair]) -> Comparison:
    """Compare corpus BLEU-1, by resampling the questions with both sides' counts."""
    rows = [[bleu_counts(answer.text, answer.golds, order=1) for answer in pair] for pair in pairs]
    counts = np.array(rows).reshape(len(rows), -1)  # (n, 2, 4) -> (n, 8)
    total = counts.sum(axis=0)
    gap = estimate_from_sums(counts, lambda sums: bleu(sums[:4]) - bleu(sums[4:]))
    return (bleu(total[:4]), bleu(total[4:])), gap


def _distinct_3(pairs: Sequence[Pair]) -> Comparison:
    """Compare the ratio of distinct trigrams; the interval is value ± z s, s from a jackknife over the questions."""
    sides = [answer.text for answer, _ in pairs], [answer.text for _, answer in pairs]

    def ratios(without: int | None) -> tuple[float, float]:
        side_texts = [[text for number, text in enumerate(side) if number != without] for side in sides]
        first, second = (distinct_ngram_ratio(side) for side in side_texts)
        return first.value if first else 0.0, second.value if second else 0.0

    n, ours = len(pairs), ratios(None)
    gaps = np.array([a - b for a, b in map(ratios, range(n))])
    width = NormalDist().inv_cdf((1 + DEFAULT_RESAMPLING.level) / 2)
    width *= math.sqrt((n - 1) / n * float(np.square(gaps - gaps.mean()).sum()))
    value = ours[0] - ours[1]
    return ours, Estimate(value, value - width, value + width, n)


CORPUS: Mapping[str, Callable[[Sequence[Pair]], Comparison]] = {
    "BLEU-1": _bleu_1,
    "distinct-3": _distinct_3,
}  # of a set, not of one answer


def table(judged: Sequence[Judged]) -> str:
    """Return the findings as a table, theirs and ours side by side, in percent."""
    head = ["in the paper", "finding", "measure", "theirs", "ours", "difference, 95 %", "each seed", "n", "verdict"]
    return "\n".join(_line(row) for row in (head, ["---"] * len(head), *map(_cells, judged)))


def _cells(judged: Judged) -> list[str]:
    gap, finding = judged.difference, judged.finding
    theirs = "{:.1f} v {:.1f}".format(*finding.theirs) if finding.theirs else "-"
    ours = "{:.1f} v {:.1f}".format(*(100 * value for value in judged.ours))
    ends = f"{100 * gap.value:+.1f} [{100 * gap.low:+.1f}, {100 * gap.high:+.1f}]"
    seeds = ", ".join(f"{100 * value:+.1f}" for value in judged.seeds)
    return [finding.where, finding.claim, finding.measure, theirs, ours, ends, seeds, str(gap.n), judged.verdict]


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"
