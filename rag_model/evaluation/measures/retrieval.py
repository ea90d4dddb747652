"""Measures of ranked results: Success, nDCG, R and RR, and provenance measures as in KILT.

Success and RR depend on the first relevant result; the package `ir_measures` computes nDCG and R.

KILT's provenance measures (Petroni et al. 2021) compare distinct retrieved pages, best first, with
the *evidence sets* of a question. Each evidence set is a set of Wikipedia page ids whose pages
together contain the answer. KILT's variants of the answer measures count an answer only if
R-precision is 1.
"""

from collections.abc import Iterable, Sequence
from functools import partial

from rag_model.evaluation.measures.measure import JudgedBy, Ranking, RankingMeasure
from rag_model.extras import require

Evidence = Sequence[frozenset[str]]  # alternative sets of page ids; no set is empty
DPR_CUTOFFS = (1, 5, 20, 100)  # cutoffs in DPR's tables


def list_distinct_pages(page_ids: Iterable[str]) -> list[str]:
    """Return the distinct page ids in order of their first occurrence."""
    return list(dict.fromkeys(page_ids))


def r_precision(page_ids: Sequence[str], evidence: Evidence) -> float:
    """Return the share of an evidence set with R pages that is among the first R distinct pages.

    The result is the maximum over the evidence sets; it is 0.0 if there are none.

    >>> r_precision(["7", "9", "8"], [frozenset({"7", "8"}), frozenset({"1"})])
    0.5
    """
    ranked_page_ids = list_distinct_pages(page_ids)
    return max(
        (len(gold_ids & set(ranked_page_ids[: len(gold_ids)])) / len(gold_ids) for gold_ids in evidence),
        default=0.0,
    )


def recall_at(page_ids: Sequence[str], evidence: Evidence, k: int) -> float:
    """Return the share of evidence sets that are complete within the first k ranks; 0.0 if there
    are no evidence sets.

    All pages of an evidence set count as one rank, the rank of the set's last page. A page that is
    in no set has its own rank. Equal sets count once.
    """
    evidence_sets = list(dict.fromkeys(evidence))
    completed_ranks = _rank_evidence(list_distinct_pages(page_ids), evidence_sets)
    return completed_ranks[:k].count(True) / len(evidence_sets) if evidence_sets else 0.0


def _rank_evidence(page_ids: Sequence[str], sets: Sequence[frozenset[str]]) -> list[bool | int]:
    """Return a list with one item per rank: True for a complete evidence set, False for a page that
    is in no set, and n for the incomplete set at position n - 2 of `sets`.
    """
    ranking: list[bool | int] = []
    missing_ids_by_set = [set(evidence_set) for evidence_set in sets]
    for page_id in page_ids:
        # Sets are numbered from 2, because `ranking` also has False, which equals 0, and True,
        # which equals 1.
        set_numbers = [n for n, missing_ids in enumerate(missing_ids_by_set, start=2) if page_id in missing_ids]
        for n in set_numbers:
            if n in ranking:
                ranking.remove(n)
            missing_ids_by_set[n - 2].remove(page_id)
            ranking.append(n if missing_ids_by_set[n - 2] else True)
        if not set_numbers:
            ranking.append(False)
    return ranking


def report_cutoffs(depth: int, judged_by: JudgedBy | None = None) -> list[int]:
    """Return the cutoffs to report: the depth of the search, and 1, 5, 20 and 100 if below it.

    >>> report_cutoffs(10)
    [1, 5, 10]
    """
    return sorted({cutoff for cutoff in DPR_CUTOFFS if cutoff <= depth} | {depth})


def find_relevant_rank(ranking: Ranking) -> int | None:
    """Return the rank, from 1, of the first relevant result; None if no result is relevant."""
    return next(
        (rank for rank, result in enumerate(ranking.results, start=1) if ranking.grades.get(result, 0) > 0), None
    )


def compute_success(rankings: Sequence[Ranking], cutoff: int) -> list[float]:
    """Return 1.0 for each ranking with a relevant result within the cutoff, else 0.0.

    The mean is top-k retrieval accuracy (Karpukhin et al. 2020).
    """
    return [float((find_relevant_rank(ranking) or cutoff + 1) <= cutoff) for ranking in rankings]


def compute_reciprocal_rank(rankings: Sequence[Ranking], cutoff: int) -> list[float]:
    """Return 1 / rank of the first relevant result of each ranking; 0.0 if no result within the
    cutoff is relevant.
    """
    ranks = [find_relevant_rank(ranking) for ranking in rankings]
    return [1 / rank if rank is not None and rank <= cutoff else 0.0 for rank in ranks]


def compute_by_ir_measures(name: str, rankings: Sequence[Ranking], cutoff: int) -> list[float]:
    """Compute a measure with the package `ir_measures`; 0.0 for a ranking without results.

    Raises:
        MissingExtraError: `ir_measures` is not installed.
    """
    package = require("ir_measures", "pipeline")
    qrels = {str(query): dict(ranking.grades) for query, ranking in enumerate(rankings)}
    trec_run = {
        str(query): {result: -float(rank) for rank, result in enumerate(ranking.results)}
        for query, ranking in enumerate(rankings)
    }
    ranking_values = [0.0] * len(rankings)
    for result in package.iter_calc([package.parse_measure(f"{name}@{cutoff}")], qrels, trec_run):
        ranking_values[int(result.query_id)] = float(result.value)
    return ranking_values


def _report_cutoff_ten(depth: int, judged_by: JudgedBy) -> list[int]:
    return [10]


def _report_depth(depth: int, judged_by: JudgedBy) -> list[int]:
    return [depth]


def _report_reciprocal_rank_cutoff(depth: int, judged_by: JudgedBy) -> list[int]:
    return [depth] if judged_by == "answers" else [10]


SUCCESS = RankingMeasure(compute_success, report_cutoffs)
NDCG = RankingMeasure(partial(compute_by_ir_measures, "nDCG"), _report_cutoff_ten, needs_qrels=True)
RECALL = RankingMeasure(partial(compute_by_ir_measures, "R"), _report_depth, needs_qrels=True)
RECIPROCAL_RANK = RankingMeasure(compute_reciprocal_rank, _report_reciprocal_rank_cutoff, listed_apart=("answers",))
