"""What counts as found, and the measures of it: an answer in the text, a relevant page, or a relevant passage.

| judged by | relevant is | measures |
| --- | --- | --- |
| `answers` | a passage that holds an answer, by DPR's token match | Success, RR |
| `pages` | a page that the questions name: BEIR's judgements, KILT's evidence | Success, nDCG, R, RR |
| `passages` | a passage that the questions name by its id, or BEIR's judgements of passages | Success, nDCG, R, RR |

Success@k (Karpukhin et al. 2020 call it top-k retrieval accuracy) is the share of questions with something relevant
among the first k. Grades are measured through `ir_measures`; of a page's passages the best ranked counts.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Literal, Self, get_args

from rag_model.errors import UsageError
from rag_model.evaluation.bootstrap import RESAMPLING, Estimate, Resampling, mean_intervals
from rag_model.evaluation.questions.files import Question, QuestionSet
from rag_model.evaluation.questions.kilt import Evidence, distinct_pages, r_precision, recall_at
from rag_model.evaluation.retrieval.retrieved import Retrieved, cutoffs
from rag_model.extras import require
from rag_model.retrieve.retriever import Hit

JudgedBy = Literal["answers", "pages", "passages"]
Grades = Mapping[str, Mapping[str, int]]  # question -> page or passage -> grade; 0 = not relevant
JUDGED_BY: tuple[JudgedBy, ...] = get_args(JudgedBy)
_ARTICLES = (1, 10)  # distinct pages from the top that the article is looked for in
_MEASURE = re.compile(r"(Success|RR|R|nDCG)@([1-9][0-9]{0,5})")


@dataclass(frozen=True, slots=True)
class Judge:
    """Measures rankings against what the questions say is relevant."""

    by: JudgedBy
    grades: Grades = field(default_factory=dict)  # empty for answers
    patterns: bool = False  # answers are regular expressions

    @classmethod
    def of(cls, asked: QuestionSet, by: JudgedBy | None = None, *, patterns: bool = False) -> Self:
        """Return the judge of a set of questions.

        Args:
            asked: the questions.
            by: how to judge; None: by the pages of a BEIR folder, by passages if every question names one, else by
                answers.
            patterns: take answers as regular expressions.

        Raises:
            UsageError: no question has an answer, or one names no passage or page to judge by.
        """
        chosen = by or _usual(asked)
        if chosen == "answers":
            if not any(question.answers for question in asked.questions):
                raise UsageError("no question has an answer to look for: give a file with answers, or a BEIR folder")
            return cls(chosen, patterns=patterns)
        if asked.grades:
            return cls(chosen, asked.grades, patterns)
        grades = {question.id: _named(question, chosen) for question in asked.questions}
        if bare := next((name for name, named in grades.items() if not named), None):
            raise UsageError(f"question {bare!r} names no {chosen}: name some for every question, or judge by answers")
        return cls(chosen, grades, patterns)

    def measures(self, k: int) -> list[str]:
        """Return the names of the measures of a search of depth `k`, Success first."""
        shares = [f"Success@{depth}" for depth in cutoffs(k)]
        return shares if self.by == "answers" else [*shares, "nDCG@10", f"R@{k}", "RR@10"]

    def ranks(self, k: int) -> list[str]:
        """Return the names of the measures that are reported apart from these."""
        return [f"RR@{k}"] if self.by == "answers" else []

    def can_measure(self, measure: str, k: int) -> bool:
        """Return whether a search of depth `k`, or less in a small corpus, has a measure of this name."""
        try:
            return self.depth(measure) <= k
        except UsageError:
            return False

    def headline(self, k: int) -> str:
        """Return the measure that decides between retrievers at depth `k`."""
        return f"Success@{k}" if self.by == "answers" else "nDCG@10"

    def depth(self, measure: str) -> int:
        """Return how many passages a question a measure looks at.

        Raises:
            UsageError: it is no measure of this judgement.
        """
        found = _MEASURE.fullmatch(measure)
        known = ("Success", "RR") if self.by == "answers" else ("Success", "RR", "R", "nDCG")
        if found is None or found[1] not in known:
            examples = ", ".join(f"{name}@20" for name in known)
            raise UsageError(
                f"{measure!r} is no measure of questions judged by {self.by}: choose one such as {examples}"
            )
        return int(found[2])

    def values(self, outcomes: Sequence[Retrieved], measures: Sequence[str]) -> dict[str, list[float]]:
        """Return each measure of each question, in order; one that found nothing has 0.

        Raises:
            MissingExtraError: there are grades, and `ir_measures` is not installed.
            UsageError: a name is no measure of this judgement.
        """
        depths = {name: self.depth(name) for name in measures}
        if self.by == "answers":
            firsts = [outcome.first for outcome in outcomes]
            return {name: [_of_first(name, first, depth) for first in firsts] for name, depth in depths.items()}
        rank = _passage_ranking if self.by == "passages" else page_ranking
        run = {outcome.question.id: rank(outcome.hits) for outcome in outcomes}
        return _graded(run, self.grades, measures)

    def means(self, outcomes: Sequence[Retrieved], k: int) -> dict[str, float]:
        """Return the mean of each of `measures(k)`, in [0, 1]."""
        values = self.values(outcomes, self.measures(k))
        return {name: sum(some) / len(some) for name, some in values.items()}

    def intervals(
        self, outcomes: Sequence[Retrieved], k: int, resampling: Resampling = RESAMPLING
    ) -> dict[str, Estimate]:
        """Return the mean of each of `measures(k)` and `ranks(k)`, with its interval."""
        return mean_intervals(self.values(outcomes, [*self.measures(k), *self.ranks(k)]), resampling)


def ranks_of(outcomes: Sequence[Retrieved], k: int) -> dict[str, float]:
    """Return the reciprocal rank of the first passage with an answer, and page measures by evidence, each in [0, 1].

    RR@k, the mean of 1 / its rank (0 without); and, over the questions with evidence, page by page: KILT's R-precision
    and recall@5, nDCG@10, and how often a page of the evidence is the first, or among the first 10, of the distinct
    pages found (Article@1, Article@10: Lewis et al. 2020, section 4.4, .71 and .90 for FEVER).

    Raises:
        MissingExtraError: there is evidence, and `ir_measures` is not installed.
    """
    told = [outcome for outcome in outcomes if outcome.question.evidence]
    firsts = [outcome.first for outcome in outcomes]
    ranks = sum(1 / first for first in firsts if first and first <= k) / max(1, len(firsts))
    return {f"RR@{k}": ranks, **(_evidence(told, k) if told else {})}


def evidence_names() -> list[str]:
    """Return the names of the measures that only questions with evidence have."""
    return ["R-precision", "recall@5", "nDCG@10", *(f"Article@{most}" for most in _ARTICLES)]


def page_ranking(hits: Sequence[Hit]) -> dict[str, float]:
    """Return each page's score: minus its best rank, so that passages that tie can't reorder the pages."""
    ranking: dict[str, float] = {}
    for hit in hits:
        ranking.setdefault(hit.passage.page_id, -float(hit.rank))
    return ranking


def _evidence(outcomes: Sequence[Retrieved], k: int) -> dict[str, float]:
    cut = [Retrieved(outcome.question, outcome.hits[:k], outcome.has_answer[:k]) for outcome in outcomes]
    ranked = [[hit.passage.page_id for hit in outcome.hits] for outcome in cut]
    wanted = [outcome.question.evidence for outcome in outcomes]
    grades = {outcome.question.id: dict.fromkeys(chain(*outcome.question.evidence), 1) for outcome in outcomes}
    run = {outcome.question.id: page_ranking(outcome.hits) for outcome in cut}
    gain = _graded(run, grades, ["nDCG@10"])["nDCG@10"]
    precision = sum(map(r_precision, ranked, wanted)) / len(outcomes)
    recall = sum(recall_at(pages, sets, 5) for pages, sets in zip(ranked, wanted, strict=True)) / len(outcomes)
    articles = {f"Article@{most}": _articles(ranked, wanted, most) for most in _ARTICLES}
    return {"R-precision": precision, "recall@5": recall, "nDCG@10": sum(gain) / len(gain), **articles}


def _articles(ranked: Sequence[Sequence[str]], wanted: Sequence[Evidence], most: int) -> float:
    found = [
        not frozenset().union(*sets).isdisjoint(distinct_pages(pages)[:most])
        for pages, sets in zip(ranked, wanted, strict=True)
    ]
    return sum(found) / len(found)


def _usual(asked: QuestionSet) -> JudgedBy:
    if asked.grades:
        return "pages"
    return "passages" if all(question.passages for question in asked.questions) else "answers"


def _named(question: Question, by: JudgedBy) -> dict[str, int]:
    return dict.fromkeys(question.passages if by == "passages" else chain(*question.evidence), 1)


def _of_first(measure: str, first: int | None, depth: int) -> float:
    if first is None or first > depth:
        return 0.0
    return 1.0 if measure.startswith("Success") else 1 / first


def _passage_ranking(hits: Sequence[Hit]) -> dict[str, float]:
    return {hit.passage.id: -float(hit.rank) for hit in hits}


def _graded(run: Mapping[str, Mapping[str, float]], grades: Grades, names: Sequence[str]) -> dict[str, list[float]]:
    """Return the measures of each question of `run`, in its order."""
    measures = require("ir_measures", "pipeline")
    wanted = {measures.parse_measure(name): name for name in names}
    found = {name: dict.fromkeys(run, 0.0) for name in names}
    qrels = {question: dict(grades[question]) for question in run}
    for value in measures.iter_calc(list(wanted), qrels, {q: dict(ranked) for q, ranked in run.items()}):
        found[wanted[value.measure]][value.query_id] = float(value.value)
    return {name: list(values.values()) for name, values in found.items()}
