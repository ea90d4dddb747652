"""Judge whether hits are relevant, and measure retrieval.

| judged by | relevant hits | measures |
| --- | --- | --- |
| `answers` | passages that contain the tokens of an answer, as in DPR | Success, RR |
| `pages` | pages in BEIR's qrels or in KILT's evidence of the question | Success, nDCG, R, RR |
| `passages` | passages whose ids the question or BEIR's qrels list | Success, nDCG, R, RR |

`measures.measure` defines the measures; packages can add measures. The rank of a page is the rank
of its best passage.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from typing import Self

from rag_model.corpus.records import PASSAGE_KINDS, PROSE
from rag_model.errors import UsageError
from rag_model.evaluation.bootstrap import DEFAULT_RESAMPLING, Estimate, Resampling, estimate_means
from rag_model.evaluation.matching import AnswerMatcher, pattern_search
from rag_model.evaluation.measures.measure import (
    JudgedBy,
    Ranking,
    RankingMeasure,
    list_ranking_measures,
    parse_ranking_measure,
)
from rag_model.evaluation.measures.retrieval import NDCG, Evidence, list_distinct_pages, r_precision, recall_at
from rag_model.evaluation.questions import Question, QuestionSet
from rag_model.retrieve.hits import Hit, Retriever
from rag_model.retrieve.retriever import SnapshotRetriever

# enough queries for an encoder's batch, but few enough to keep all their hits in memory
QUERY_BATCH = 256
# grade by question and by page or passage; 0 means not relevant
Qrels = Mapping[str, Mapping[str, int]]
_ARTICLE_DEPTHS = (1, 10)  # values of k for Article@k, in distinct pages


@dataclass(frozen=True, slots=True)
class RetrievalResult:
    """The hits of one question, and which hits contain an answer."""

    question: Question
    hits: tuple[Hit, ...]
    has_answer: tuple[bool, ...]  # one per hit

    @property
    def first_answer_rank(self) -> int | None:
        """The rank, from 1, of the first hit that contains an answer; None if no hit does."""
        return next((rank for rank, has_answer in enumerate(self.has_answer, start=1) if has_answer), None)


def build_answer_matcher(question: Question, *, patterns: bool = False) -> Callable[[str], bool]:
    """Return a function that tests whether a text contains an answer to the question.

    Answers are compared token by token as in DPR; with `patterns`, they are regular expressions.
    """
    return partial(pattern_search, patterns=question.answers) if patterns else AnswerMatcher(question.answers).match


def match_hits(question: Question, hits: Sequence[Hit], *, patterns: bool = False) -> RetrievalResult:
    """Test for each hit whether its text, without the title, contains an answer to the question."""
    contains_answer = build_answer_matcher(question, patterns=patterns)
    return RetrievalResult(question, tuple(hits), tuple(contains_answer(hit.passage.text) for hit in hits))


def drop_own_document(question: Question, hits: Sequence[Hit]) -> list[Hit]:
    """Remove hits from the document that is the question itself, and rank the other hits from 1.

    In some data sets the questions are documents of the corpus. BEIR's evaluator removes the
    document with the question's id, which would always be the first hit.
    """
    if not question.own_document:
        return list(hits)
    other_hits = (hit for hit in hits if question.own_document not in {hit.page_id, hit.id})
    return [replace(hit, rank=rank) for rank, hit in enumerate(other_hits, start=1)]


def choose_search_depth(questions: Sequence[Question], k: int, max_depth: int) -> int:
    """Return the search depth with which `k` hits remain if one hit is the question itself and is
    removed.
    """
    return min(k + 1, max_depth) if any(question.own_document for question in questions) else k


def deepen_search(depth: int, max_depth: int, n_missing: int) -> int | None:
    """Return a greater search depth if `n_missing` hits are missing because hits were removed.

    Return None if no hit is missing or if the retriever cannot search deeper.
    """
    return min(depth + n_missing, max_depth) if n_missing > 0 and depth < max_depth else None


def search_questions(retriever: Retriever, questions: Sequence[Question], k: int) -> list[list[Hit]]:
    """Return up to `k` hits of each question, without the document that is the question itself.

    Raises:
        UsageError: See `Retriever.search`.
    """
    max_depth = max(k, retriever.most) if isinstance(retriever, SnapshotRetriever) else k
    depth: int | None = choose_search_depth(questions, k, max_depth)
    hit_lists: list[list[Hit]] = []
    while depth is not None:
        all_hit_lists = retriever.search([question.text for question in questions], depth)
        hit_lists = [
            drop_own_document(question, hits)[:k] for question, hits in zip(questions, all_hit_lists, strict=True)
        ]
        n_missing = max(
            (k - len(hits) for hits, all_hits in zip(hit_lists, all_hit_lists, strict=True) if len(all_hits) == depth),
            default=0,
        )
        depth = deepen_search(depth, max_depth, n_missing)
    return hit_lists


def retrieve(
    retriever: Retriever, questions: Sequence[Question], k: int, *, patterns: bool = False
) -> Iterator[RetrievalResult]:
    """Retrieve `k` hits for each question, and test which hits contain an answer.

    The results are in the order of the questions, which are searched in batches. With `patterns`,
    answers are regular expressions, as in CuratedTREC.

    Raises:
        UsageError: See `Retriever.search`.
        InputError: An answer pattern is malformed, or takes too long to match.
    """
    for first_question in range(0, len(questions), QUERY_BATCH):
        batch = questions[first_question : first_question + QUERY_BATCH]
        hit_lists = search_questions(retriever, batch, k)
        yield from (
            match_hits(question, hits, patterns=patterns) for question, hits in zip(batch, hit_lists, strict=True)
        )


@dataclass(frozen=True, slots=True)
class RetrievalJudge:
    """Measures ranked hits by relevance judgements."""

    judged_by: JudgedBy
    # grades of page or passage ids, by question; empty if questions are judged by answers
    qrels: Qrels = field(default_factory=dict)
    patterns: bool = False  # whether answers are regular expressions

    @classmethod
    def for_questions(
        cls, question_set: QuestionSet, judged_by: JudgedBy | None = None, *, patterns: bool = False
    ) -> Self:
        """Create the judge for a question set.

        Args:
            question_set: The questions.
            judged_by: What counts as relevant; None means pages for a BEIR folder, passages if
                every question names passages, else answers.
            patterns: Whether answers are regular expressions.

        Raises:
            UsageError: No question has an answer, or a question names no passage or page.
        """
        judgement = judged_by or _choose_judgement(question_set)
        if judgement == "answers":
            if not any(question.answers for question in question_set.questions):
                raise UsageError("no question has an answer to look for: give a file with answers, or a BEIR folder")
            return cls(judgement, patterns=patterns)
        if question_set.qrels:
            return cls(judgement, question_set.qrels, patterns)
        grades_by_question = {
            question.id: _list_relevant_ids(question, judgement) for question in question_set.questions
        }
        if question_id := next((name for name, ids in grades_by_question.items() if not ids), None):
            raise UsageError(
                f"question {question_id!r} names no {judgement}: name some for every question, or judge by answers"
            )
        return cls(judgement, grades_by_question, patterns)

    def list_measures(self, k: int) -> list[str]:
        """Return the names of the main measures for a search of depth `k`, with Success first."""
        return self._list_measures(k, listed_apart=False)

    def list_rank_measures(self, k: int) -> list[str]:
        """Return the names of the measures that reports list separately, under `ranks`."""
        return self._list_measures(k, listed_apart=True)

    def _list_measures(self, k: int, *, listed_apart: bool) -> list[str]:
        return [
            f"{name}@{cutoff}"
            for name, measure in list_ranking_measures(self.judged_by).items()
            if (self.judged_by in measure.listed_apart) == listed_apart
            for cutoff in measure.report_cutoffs(k, self.judged_by)
        ]

    def get_headline_measure(self, k: int) -> str:
        """Return the name of the measure by which retrievers are ordered at depth `k`."""
        return f"Success@{k}" if self.judged_by == "answers" else "nDCG@10"

    def get_cutoff(self, measure: str) -> int:
        """Return the cutoff k of a measure such as Success@20.

        Raises:
            UsageError: The measure does not apply to this kind of judgement.
        """
        return self._parse_measure(measure)[1]

    def compute_values(self, results: Sequence[RetrievalResult], measures: Sequence[str]) -> dict[str, list[float]]:
        """Return the values of each measure, one per question; 0 for a question without hits.

        Raises:
            MissingExtraError: A package that a measure needs is not installed.
            UsageError: A measure does not apply to this kind of judgement.
        """
        parsed_measures = {name: self._parse_measure(name) for name in measures}
        rankings = [self._rank_hits(result) for result in results]
        return {name: list(measure.compute(rankings, cutoff)) for name, (measure, cutoff) in parsed_measures.items()}

    def _parse_measure(self, measure: str) -> tuple[RankingMeasure, int]:
        parsed_measure = parse_ranking_measure(measure, self.judged_by)
        if parsed_measure is None:
            examples = ", ".join(f"{name}@20" for name in list_ranking_measures(self.judged_by))
            raise UsageError(
                f"{measure!r} is not a measure of questions judged by {self.judged_by}: choose one such as {examples}"
            )
        return parsed_measure

    def _rank_hits(self, result: RetrievalResult) -> Ranking:
        if self.judged_by == "answers":
            grades = {str(position): int(has_answer) for position, has_answer in enumerate(result.has_answer)}
            return Ranking(tuple(grades), grades)
        score_hits = score_pages_by_rank if self.judged_by == "pages" else _score_passages_by_rank
        return _create_ranking(score_hits(result.hits), self.qrels[result.question.id])

    def compute_shares_by_kind(self, results: Sequence[RetrievalResult], k: int) -> dict[str, float]:
        """Return, for each kind of passage, the share of questions whose first relevant hit within
        `k` is of this kind.

        The shares add up to Success@k. The result is empty if all hits are prose.
        """
        kind_counts: dict[str, int] = {hit.kind: 0 for result in results for hit in result.hits}
        if not kind_counts.keys() - {PROSE}:
            return {}
        for result in results:
            hits = zip(result.hits[:k], result.has_answer, strict=False)
            kind = next((hit.kind for hit, has_answer in hits if self._is_relevant(result, hit, has_answer)), None)
            if kind is not None:
                kind_counts[kind] += 1
        return {kind: kind_counts[kind] / len(results) for kind in PASSAGE_KINDS if kind in kind_counts}

    def _is_relevant(self, result: RetrievalResult, hit: Hit, has_answer: bool) -> bool:
        if self.judged_by == "answers":
            return has_answer
        judged_id = hit.page_id if self.judged_by == "pages" else hit.id
        return self.qrels[result.question.id].get(judged_id, 0) > 0

    def compute_means(self, results: Sequence[RetrievalResult], k: int) -> dict[str, float]:
        """Return the mean of each of `list_measures(k)`, in [0, 1]."""
        values_by_measure = self.compute_values(results, self.list_measures(k))
        return {name: sum(column) / len(column) for name, column in values_by_measure.items()}

    def estimate_measures(
        self, results: Sequence[RetrievalResult], k: int, resampling: Resampling = DEFAULT_RESAMPLING
    ) -> dict[str, Estimate]:
        """Return the mean of each of `list_measures(k)` and `list_rank_measures(k)`, with its interval."""
        return estimate_means(
            self.compute_values(results, [*self.list_measures(k), *self.list_rank_measures(k)]), resampling
        )


def compute_rank_metrics(results: Sequence[RetrievalResult], k: int) -> dict[str, float]:
    """Return RR@k and, if there are questions with evidence, page measures, all in [0, 1].

    RR@k is the mean of 1 / rank of the first passage with an answer; a question without such a
    passage counts as 0. The page measures are means over the questions with evidence: R-precision
    and recall@5 as in KILT, nDCG@10, and the share of questions with an evidence page among the
    first 1 or 10 distinct pages (Article@1, Article@10; Lewis et al. 2020, section 4.4, report .71
    and .90 for FEVER).

    Raises:
        MissingExtraError: A question has evidence, and `ir_measures` is not installed.
    """
    evidence_results = [result for result in results if result.question.evidence]
    first_ranks = [result.first_answer_rank for result in results]
    mean_reciprocal_rank = sum(1 / rank for rank in first_ranks if rank and rank <= k) / max(1, len(first_ranks))
    return {f"RR@{k}": mean_reciprocal_rank, **(_measure_evidence(evidence_results, k) if evidence_results else {})}


def list_evidence_measures() -> list[str]:
    """Return the names of the measures that apply only to questions with evidence."""
    return ["R-precision", "recall@5", "nDCG@10", *(f"Article@{depth}" for depth in _ARTICLE_DEPTHS)]


def score_pages_by_rank(hits: Sequence[Hit]) -> dict[str, float]:
    """Return the negative best rank of each page as its score, so that no two pages tie."""
    score_by_page: dict[str, float] = {}
    for hit in hits:
        score_by_page.setdefault(hit.passage.page_id, -float(hit.rank))
    return score_by_page


def _measure_evidence(results: Sequence[RetrievalResult], k: int) -> dict[str, float]:
    cut_results = [RetrievalResult(result.question, result.hits[:k], result.has_answer[:k]) for result in results]
    page_lists = [[hit.passage.page_id for hit in result.hits] for result in cut_results]
    evidence_sets = [result.question.evidence for result in results]
    grades_by_question = {result.question.id: dict.fromkeys(chain(*result.question.evidence), 1) for result in results}
    run = {result.question.id: score_pages_by_rank(result.hits) for result in cut_results}
    gains = NDCG.compute([_create_ranking(run[name], grades_by_question[name]) for name in run], 10)
    precision = sum(map(r_precision, page_lists, evidence_sets)) / len(results)
    recall = sum(
        recall_at(page_ids, evidence, 5) for page_ids, evidence in zip(page_lists, evidence_sets, strict=True)
    ) / len(results)
    article_shares = {
        f"Article@{depth}": _measure_articles(page_lists, evidence_sets, depth) for depth in _ARTICLE_DEPTHS
    }
    return {"R-precision": precision, "recall@5": recall, "nDCG@10": sum(gains) / len(gains), **article_shares}


def _measure_articles(page_lists: Sequence[Sequence[str]], evidence_sets: Sequence[Evidence], depth: int) -> float:
    has_evidence_page = [
        not frozenset().union(*evidence).isdisjoint(list_distinct_pages(pages)[:depth])
        for pages, evidence in zip(page_lists, evidence_sets, strict=True)
    ]
    return sum(has_evidence_page) / len(has_evidence_page)


def _choose_judgement(question_set: QuestionSet) -> JudgedBy:
    if question_set.qrels:
        return "pages"
    return "passages" if all(question.passages for question in question_set.questions) else "answers"


def _list_relevant_ids(question: Question, judged_by: JudgedBy) -> dict[str, int]:
    return dict.fromkeys(question.passages if judged_by == "passages" else chain(*question.evidence), 1)


def _score_passages_by_rank(hits: Sequence[Hit]) -> dict[str, float]:
    return {hit.passage.id: -float(hit.rank) for hit in hits}


def _create_ranking(scores: Mapping[str, float], grades: Mapping[str, int]) -> Ranking:
    return Ranking(tuple(sorted(scores, key=scores.__getitem__, reverse=True)), grades)
