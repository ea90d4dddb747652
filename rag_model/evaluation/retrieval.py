"""How often retrieval finds a passage with the answer, or a relevant page.

Success@k (Karpukhin et al. 2020 call it top-k retrieval accuracy): the share of questions with an answer in
at least one of the first k passages, by DPR's token match over the passage's text, its title left out. Judged
collections (BEIR) are measured through `ir_measures`, page by page.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain

from rag_model.errors import UsageError
from rag_model.evaluation.answers import pattern_in
from rag_model.evaluation.bootstrap import RESAMPLING, Estimate, Resampling, mean_interval
from rag_model.evaluation.kilt import r_precision, recall_at
from rag_model.evaluation.match import Answers
from rag_model.evaluation.questions import Question, QuestionSet
from rag_model.extras import require
from rag_model.retrieve.retriever import Hit, Retriever

CUTOFFS = (1, 5, 20, 100)  # the k of DPR's tables
_BATCH = 256  # questions: enough to fill an encoder's batch, few enough that a long list holds little at once


@dataclass(frozen=True, slots=True)
class Retrieved:
    """One question, what was found for it, and which of the hits hold an answer."""

    question: Question
    hits: tuple[Hit, ...]
    has_answer: tuple[bool, ...]  # one a hit

    @property
    def first(self) -> int | None:
        """The rank, from 1, of the first passage with an answer; None if none has one."""
        return next((rank for rank, found in enumerate(self.has_answer, start=1) if found), None)


def match_hits(question: Question, hits: Sequence[Hit], *, patterns: bool = False) -> Retrieved:
    """Look for the question's answers in each of its hits: by token match, or as regular expressions."""
    found = partial(pattern_in, patterns=question.answers) if patterns else Answers(question.answers).are_in
    return Retrieved(question, tuple(hits), tuple(found(hit.passage.text) for hit in hits))


def ask(retriever: Retriever, questions: Sequence[Question], k: int, *, patterns: bool = False) -> Iterator[Retrieved]:
    """Search each question to depth `k` and match its answers: in order, batch by batch.

    With `patterns` the answers are regular expressions, as CuratedTREC's are.

    Raises:
        UsageError: what `Retriever.search` refuses.
        InputError: an answer is no regular expression, or one that never ends.
    """
    for start in range(0, len(questions), _BATCH):
        batch = questions[start : start + _BATCH]
        found = retriever.search([question.text for question in batch], k)
        yield from (match_hits(question, hits, patterns=patterns) for question, hits in zip(batch, found, strict=True))


def cutoffs(k: int) -> list[int]:
    """Return the depths to report for a search of depth `k`: 1, 5, 20, 100 as far as they go, and `k`.

    >>> cutoffs(10)
    [1, 5, 10]
    """
    return sorted({depth for depth in CUTOFFS if depth <= k} | {k})


def success(outcomes: Sequence[Retrieved], k: int) -> dict[str, float]:
    """Return `Success@…` at each depth of `cutoffs(k)`, in [0, 1]; a question without answers is missed.

    Raises:
        UsageError: no question has an answer, so there is nothing to look for.
    """
    if not any(outcome.question.answers for outcome in outcomes):
        raise UsageError("no question has an answer to look for: give a file with answers, or a BEIR folder")
    firsts = [outcome.first for outcome in outcomes]
    return {
        f"Success@{depth}": sum(first is not None and first <= depth for first in firsts) / len(firsts)
        for depth in cutoffs(k)
    }


def measures_of(asked: QuestionSet, outcomes: Sequence[Retrieved], k: int) -> dict[str, float]:
    """Return what a set's questions are measured by at depth `k`: `judged` where they are, else `success`.

    Raises:
        UsageError: no question has an answer or a judgement.
        MissingExtraError: `ir_measures` is needed and not installed.
    """
    return judged(outcomes, asked.grades, k) if asked.grades else success(outcomes, k)


def ranks_of(outcomes: Sequence[Retrieved], k: int) -> dict[str, float]:
    """Return the reciprocal rank of the first passage with an answer, and page measures by evidence, each in [0, 1].

    RR@k, the mean of 1 / its rank (0 without); and, over the questions with evidence, KILT's R-precision and recall@5
    and nDCG@10, page by page.

    Raises:
        MissingExtraError: there is evidence, and `ir_measures` is not installed.
    """
    told = [outcome for outcome in outcomes if outcome.question.evidence]
    firsts = [outcome.first for outcome in outcomes]
    ranks = sum(1 / first for first in firsts if first and first <= k) / max(1, len(firsts))
    return {f"RR@{k}": ranks, **(_evidence(told, k) if told else {})}


def intervals_of(
    asked: QuestionSet, outcomes: Sequence[Retrieved], k: int, resampling: Resampling = RESAMPLING
) -> dict[str, Estimate]:
    """Return what `measures_of` says and, of questions without judgements, RR@k, each with its interval.

    Raises:
        UsageError: no question has an answer or a judgement.
        MissingExtraError: `ir_measures` is needed and not installed.
    """
    if asked.grades:
        values = _judged_values(outcomes, asked.grades, k)
    else:
        firsts = [outcome.first or 0 for outcome in outcomes]  # 0: none
        values = {name: [float(0 < first <= int(name[8:])) for first in firsts] for name in success(outcomes, k)}
        values[f"RR@{k}"] = [1 / first if 0 < first <= k else 0.0 for first in firsts]
    return {name: mean_interval(some, resampling) for name, some in values.items()}


def _evidence(outcomes: Sequence[Retrieved], k: int) -> dict[str, float]:
    cut = [Retrieved(outcome.question, outcome.hits[:k], outcome.has_answer[:k]) for outcome in outcomes]
    ranked = [[hit.passage.page_id for hit in outcome.hits] for outcome in cut]
    wanted = [outcome.question.evidence for outcome in outcomes]
    grades = {outcome.question.id: dict.fromkeys(chain(*outcome.question.evidence), 1) for outcome in outcomes}
    precision = sum(map(r_precision, ranked, wanted)) / len(outcomes)
    recall = sum(recall_at(pages, sets, 5) for pages, sets in zip(ranked, wanted, strict=True)) / len(outcomes)
    return {"R-precision": precision, "recall@5": recall, "nDCG@10": judged(cut, grades, k)["nDCG@10"]}


def judged(outcomes: Sequence[Retrieved], grades: Mapping[str, Mapping[str, int]], k: int) -> dict[str, float]:
    """Return nDCG@10, R@k and RR@10 against graded pages, each in [0, 1].

    A document is a page (`page_id`); of a page's passages the best ranked counts, so a search of depth `k`
    may reach fewer than `k` documents.

    Raises:
        MissingExtraError: `ir_measures` is not installed.
    """
    return {name: sum(some) / len(some) for name, some in _judged_values(outcomes, grades, k).items()}


def _judged_values(
    outcomes: Sequence[Retrieved], grades: Mapping[str, Mapping[str, int]], k: int
) -> dict[str, list[float]]:
    """Return the measures of each judged question; one that was not asked, or found nothing, has 0."""
    measures = require("ir_measures", "pipeline")
    run = {outcome.question.id: page_ranking(outcome.hits) for outcome in outcomes}
    wanted = {measures.parse_measure(name): name for name in ("nDCG@10", f"R@{k}", "RR@10")}
    found = {name: dict.fromkeys(grades, 0.0) for name in wanted.values()}
    for value in measures.iter_calc(list(wanted), {q: dict(g) for q, g in grades.items()}, run):
        found[wanted[value.measure]][value.query_id] = float(value.value)
    return {name: list(values.values()) for name, values in found.items()}


def page_ranking(hits: Sequence[Hit]) -> dict[str, float]:
    """Return each page's score: minus its best rank, so that passages that tie can't reorder the pages."""
    ranking: dict[str, float] = {}
    for hit in hits:
        ranking.setdefault(hit.passage.page_id, -float(hit.rank))
    return ranking
