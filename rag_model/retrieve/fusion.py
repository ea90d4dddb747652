"""Fusion of ranked lists: by ranks, `rrf(A, B, …, k=60, weights=[…])`, or by scores,
`interpolate(A, B, alpha)`.

Reciprocal rank fusion (Cormack, Clarke and Büttcher 2009): RRF(d) = sum over retrievers of w / (k +
rank), with ranks from 1 and k = 60. The formula uses no scores, so it fuses retrievers of any kind.

Interpolation follows Pyserini's `HybridSearcher` (`pyserini/search/hybrid/_searcher.py`):
score(d) = A(d) + alpha * B(d). A retriever that has not retrieved d gives d its lowest score for
the query. Pyserini's dense retriever is A and its sparse retriever B, or the reverse with
`--weight-on-dense`. With `normalization=true` the scores of each retriever are first mapped
linearly from its lowest and highest score to [-0.5, 0.5]. If both are equal, Pyserini divides by
zero; here the mapped scores are 0.
"""

from collections.abc import Callable, Iterator, Sequence

import numpy as np

from rag_model.index.files.engine import Rows
from rag_model.retrieve.expression import Call, Node
from rag_model.retrieve.factory import RetrieverFactory
from rag_model.retrieve.retriever import ChildRetriever, Queries, RankedRows, Scores, SnapshotRetriever

RRF_K = 60  # Cormack et al. 2009, section 3
DEFAULT_DEPTH = 100  # default depth of a child retriever, as in DPR and BEIR
_MAX_RRF_K = 1_000_000
_TIE_DIGITS = 10  # scores are a tie if their ratios to the best score agree in so many decimals
_MAX_WEIGHT = 1e6
Fusion = Callable[[Sequence[RankedRows]], tuple[Rows, Scores]]


class FusedRetriever(SnapshotRetriever):
    """A `Retriever` that fuses the ranked lists of its child retrievers."""

    def __init__(self, name: str, children: Sequence[ChildRetriever], fuse_lists: Fusion) -> None:
        """Create a fusion of two or more child retrievers of one snapshot, with different names.

        Args:
            name: spelling of the fusion in an expression, without its own depth.
            children: child retrievers; each is searched to its own depth, or else to the maximum of
                100 and `k` passages.
            fuse_lists: returns the fused rows, -1 after the last, and their scores.
        """
        super().__init__(children[0].retriever.snapshot, name)
        self._children, self._fuse_lists = tuple(children), fuse_lists

    @property
    def most(self) -> int:
        """The sum of the child retrievers' maximums, but at most the number of passages."""
        return min(self.snapshot.n, sum(child.most for child in self._children))

    def find(self, queries: Queries, k: int) -> RankedRows:
        """Search every child retriever, and rank by the fused score; ties are ordered by row."""
        rankings = tuple(child.find(queries, max(DEFAULT_DEPTH, k)) for child in self._children)
        fused_rows, scores = self._fuse_lists(rankings)
        passage_by_row = {row: passage for ranking in rankings for row, passage in ranking.passages.items()}
        return RankedRows(self.name, fused_rows, scores, legs=rankings, passages=passage_by_row).truncate(k)


def fuse(lists: Sequence[Rows], k: int, weights: Sequence[float]) -> tuple[Rows, Scores]:
    """Rank the rows of several lists by RRF(d) = sum of w / (k + rank), best first; ties are
    ordered by row.

    A list adds nothing to the score of a row that it does not contain.

    Args:
        lists: (q, k_i) int64 each, -1 after the last row.
        k: the constant k of the equation.
        weights: the weight w of each list.

    Returns:
        (q, m) int64 rows, -1 after the last, and (q, m) float64 scores, 0 where the row is -1; m is
        the largest number of distinct rows of a query.
    """
    q = len(lists[0])
    all_rows = np.hstack(lists)  # (q, sum of k_i)
    contributions = [w / (k + np.arange(1, hits.shape[1] + 1)) for hits, w in zip(lists, weights, strict=True)]
    contribution_grid = np.broadcast_to(np.concatenate(contributions), all_rows.shape)
    is_hit = all_rows >= 0
    row_range = int(all_rows.max(initial=0)) + 1
    # one integer per pair of query and row
    query_row_keys = (np.arange(q)[:, None] * row_range + all_rows)[is_hit]
    hit_contributions = contribution_grid[is_hit]
    # Add in a fixed order, so that the sum does not depend on the order of the lists.
    order = np.lexsort((hit_contributions, query_row_keys))
    pair_keys, inverse = np.unique(query_row_keys[order], return_inverse=True)
    fused_scores = np.bincount(inverse, weights=hit_contributions[order], minlength=len(pair_keys))
    key_queries, key_rows = np.divmod(pair_keys, row_range)
    # 1/1002 + 2/1002 and 3/1002 differ in the last bit, but they are a tie.
    rounded_scores = np.round(fused_scores / fused_scores.max(initial=1e-300), _TIE_DIGITS)
    order = np.lexsort((key_rows, -rounded_scores, key_queries))
    key_queries, key_rows, fused_scores = key_queries[order], key_rows[order], fused_scores[order]
    query_ends = np.cumsum(np.bincount(key_queries, minlength=q))[:-1]
    return _pad_lists(np.split(key_rows, query_ends), np.split(fused_scores, query_ends))


def interpolate(first: RankedRows, second: RankedRows, alpha: float, *, normalize: bool = False) -> tuple[Rows, Scores]:
    """Rank the rows of two lists by score(d) = first(d) + alpha * second(d), best first; ties are
    ordered by row.

    If a row is missing in a list, its score there is the list's lowest score for the query, or 0 if
    the list is empty.

    Returns:
        (q, m) int64 rows, -1 after the last, and (q, m) float64 scores, like those of `fuse`.
    """
    row_lists, score_lists = [], []
    for rankings in zip(_iter_lists(first), _iter_lists(second), strict=True):
        union_rows = np.union1d(rankings[0][0], rankings[1][0])
        first_scores, second_scores = (_score_rows(union_rows, *ranking, normalize=normalize) for ranking in rankings)
        scores = first_scores + alpha * second_scores
        sorted_positions = np.lexsort((union_rows, -scores))
        row_lists.append(union_rows[sorted_positions])
        score_lists.append(scores[sorted_positions])
    return _pad_lists(row_lists, score_lists)


def _iter_lists(ranked_rows: RankedRows) -> Iterator[tuple[Rows, Scores]]:
    """Yield (rows, scores) of each query."""
    for query_rows, scores in zip(ranked_rows.rows, ranked_rows.scores, strict=True):
        yield query_rows[query_rows >= 0], scores[query_rows >= 0].astype(np.float64)


def _score_rows(rows: Rows, list_rows: Rows, list_scores: Scores, *, normalize: bool) -> Scores:
    """Return the score of each of `rows` in a list; `rows` are sorted and contain the list's
    rows.
    """
    minimum, maximum = (list_scores.min(), list_scores.max()) if len(list_scores) else (0.0, 1.0)
    scores = np.full(len(rows), minimum)
    scores[np.searchsorted(rows, list_rows)] = list_scores
    return (scores - (minimum + maximum) / 2) / (maximum - minimum or 1.0) if normalize else scores


def _pad_lists(row_lists: Sequence[Rows], score_lists: Sequence[Scores]) -> tuple[Rows, Scores]:
    """Return (rows, scores) as (q, m) arrays, padded with row -1 and score 0."""
    padded_rows = np.full((len(row_lists), max(map(len, row_lists), default=0)), -1, np.int64)
    scores = np.zeros(padded_rows.shape)
    for i, (row_list, score_list) in enumerate(zip(row_lists, score_lists, strict=True)):
        padded_rows[i, : len(row_list)], scores[i, : len(row_list)] = row_list, score_list
    return padded_rows, scores


def build_rrf(call: Call, factory: RetrieverFactory) -> SnapshotRetriever:
    """Build `rrf(A, B, …, k=60, weights=[1, 1, …])`.

    Raises:
        UsageError: there are fewer than two child retrievers, two have the same name, or `k` or
            `weights` is out of range.
    """
    call.check_options("k", "weights")
    if len(call.arguments) < 2:
        raise call.error("rrf fuses two or more retrievers: name them, as in rrf(hnsw, ivfpq)")
    children = _build_children(call.arguments, factory)
    k = call.get_int("k", RRF_K, 1, _MAX_RRF_K)
    weights = call.get_floats("weights", len(children), _MAX_WEIGHT) or (1.0,) * len(children)
    equal_weights = f"[{', '.join('1' * len(children))}]"
    name = call.format_name([child.expression for child in children], {"k": str(RRF_K), "weights": equal_weights})
    return FusedRetriever(name, children, lambda lists: fuse([ranking.rows for ranking in lists], k, weights))


def build_interpolation(call: Call, factory: RetrieverFactory) -> SnapshotRetriever:
    """Build `interpolate(A, B, alpha, normalization=false)`.

    Raises:
        UsageError: there are not two child retrievers with different names, or the weight is
            missing or out of range.
    """
    call.check_options("alpha", "normalization")
    if len(call.arguments) + ("alpha" in call.options) != 3:
        raise call.error("interpolate takes two retrievers and the weight of the second: interpolate(exact, bm25, 1.3)")
    children = _build_children(call.arguments[:2], factory)
    alpha = call.get_number("alpha" if "alpha" in call.options else 2)
    if not 0 <= alpha <= _MAX_WEIGHT:
        raise call.error(f"alpha of interpolate is {alpha}: give a number from 0 to {_MAX_WEIGHT:,.0f}")
    normalization = str(call.options.get("normalization", "false"))
    if normalization not in {"true", "false"}:
        raise call.options["normalization"].error(
            f"normalization of interpolate is {normalization}: give true or false"
        )
    normalize = normalization == "true"
    first, second = (child.expression for child in children)
    name = f"interpolate({first}, {second}, {alpha}{', normalization=true' if normalize else ''})"
    return FusedRetriever(name, children, lambda lists: interpolate(lists[0], lists[1], alpha, normalize=normalize))


def _build_children(arguments: Sequence[Node], factory: RetrieverFactory) -> list[ChildRetriever]:
    children: list[ChildRetriever] = []
    for argument in arguments:
        children.append(factory.leg(argument))
        if children[-1].name in [child.name for child in children[:-1]]:
            raise argument.error(f"the retriever {children[-1].name} is given twice: give it a larger weight instead")
    return children
