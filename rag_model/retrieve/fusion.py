"""Fusion of ranked lists: `rrf(A, B, …, k=60, weights=[…])`.

Reciprocal rank fusion (Cormack, Clarke and Büttcher 2009): RRF(d) = sum over legs of w / (k +
rank), with ranks from 1 and k = 60. It uses no scores, so it fuses legs of any kind.
"""

from collections.abc import Sequence

import numpy as np

from rag_model.index.files.engine import Rows
from rag_model.retrieve.expression import Call
from rag_model.retrieve.factory import RetrieverFactory
from rag_model.retrieve.retriever import Leg, Queries, RankedRows, Scores, SnapshotRetriever

RRF_K = 60  # Cormack et al. 2009, section 3
DEPTH = 100  # of a leg without a depth of its own: the depth of DPR and BEIR
_MAX_K = 1_000_000
_DIGITS = 10  # decimal digits to which scores, relative to the best, are compared
_MAX_WEIGHT = 1e6


class FusedRetriever(SnapshotRetriever):
    """A `Retriever` that fuses the lists of its legs by their ranks."""

    def __init__(self, legs: Sequence[Leg], k: int = RRF_K, weights: Sequence[float] | None = None) -> None:
        """Fuse two legs or more, of one snapshot and of different names.

        Args:
            legs: each is searched to its own depth, or else to 100, or `k` passages if that is
                more.
            k: >= 1; a larger k gives the first ranks less weight.
            weights: > 0, one per leg; by default 1 each.
        """
        super().__init__(legs[0].retriever.snapshot, f"rrf({', '.join(leg.name for leg in legs)})")
        self._legs, self._k = tuple(legs), k
        self._weights = tuple(weights or [1.0] * len(legs))

    @property
    def most(self) -> int:
        """The sum over all legs, up to the number of passages."""
        return min(self.snapshot.n, sum(leg.most for leg in self._legs))

    def find(self, queries: Queries, k: int) -> RankedRows:
        """Search every leg, and rank by the sum of reciprocal ranks; ties by row."""
        ranked_legs = tuple(leg.find(queries, max(DEPTH, k)) for leg in self._legs)
        rows, scores = fuse([ranked.rows for ranked in ranked_legs], self._k, self._weights)
        passages = {row: passage for ranked in ranked_legs for row, passage in ranked.passages.items()}
        return RankedRows(self.name, rows, scores, legs=ranked_legs, passages=passages).truncate(k)


def fuse(lists: Sequence[Rows], k: int, weights: Sequence[float]) -> tuple[Rows, Scores]:
    """Rank the rows of several lists by RRF(d) = sum of w / (k + rank), best first, ties by row.

    A list adds nothing to the score of a row that it does not contain.

    Args:
        lists: (q, k_i) int64 each, -1 after the last row.
        k: of the equation.
        weights: w, one per list.

    Returns:
        (q, m) int64 rows, -1 after the last, and (q, m) float64 scores, 0 where the row is -1; m is
        the largest number of distinct rows of a query.
    """
    q = len(lists[0])
    rows = np.hstack(lists)  # (q, sum of k_i)
    contributions = [w / (k + np.arange(1, leg.shape[1] + 1)) for leg, w in zip(lists, weights, strict=True)]
    contribution_grid = np.broadcast_to(np.concatenate(contributions), rows.shape)
    valid = rows >= 0
    span = int(rows.max(initial=0)) + 1
    key = (np.arange(q)[:, None] * span + rows)[valid]  # unique for each query and row
    contribution = contribution_grid[valid]
    # A fixed order, so that the sum does not depend on that of the legs.
    order = np.lexsort((contribution, key))
    keys, group = np.unique(key[order], return_inverse=True)
    sums = np.bincount(group, weights=contribution[order], minlength=len(keys))
    query, row = np.divmod(keys, span)
    # 1/1002 + 2/1002 and 3/1002 differ in the last bit, but they are a tie.
    rounded = np.round(sums / sums.max(initial=1e-300), _DIGITS)
    order = np.lexsort((row, -rounded, query))
    query, row, sums = query[order], row[order], sums[order]
    counts = np.bincount(query, minlength=q)
    column = np.arange(len(query)) - np.repeat(np.cumsum(counts) - counts, counts)
    fused = np.full((q, int(counts.max(initial=0))), -1, np.int64)
    scores = np.zeros(fused.shape)
    fused[query, column], scores[query, column] = row, sums
    return fused, scores


def build(call: Call, factory: RetrieverFactory) -> SnapshotRetriever:
    """Build `rrf(A, B, …, k=60, weights=[1, 1, …])`.

    Raises:
        UsageError: fewer than two legs, two of one name, or `k` or `weights` out of range.
    """
    call.check_options("k", "weights")
    if len(call.arguments) < 2:
        raise call.error("rrf fuses the lists of two legs or more: name them, as in rrf(hnsw, ivfpq)")
    legs: list[Leg] = []
    for argument in call.arguments:
        legs.append(factory.leg(argument))
        if legs[-1].name in [leg.name for leg in legs[:-1]]:
            raise argument.error(f"the leg {legs[-1].name} is given twice: give it a larger weight instead")
    k = call.get_int("k", RRF_K, 1, _MAX_K)
    weights = call.get_floats("weights", len(legs), _MAX_WEIGHT)
    return FusedRetriever(legs, k, weights)
