"""Fusion of ranked lists: `rrf(A, B, …, k=60, weights=[…])`.

Reciprocal rank fusion (Cormack, Clarke and Büttcher 2009): RRF(d) = sum over legs of w / (k + rank), rank from 1,
k = 60. It needs no comparable scores, so it fuses legs of any kind.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from rag_model.retrieve.found import Found, Scores, SnapshotRetriever
from rag_model.retrieve.leg import Leg
from rag_model.retrieve.nodes import Call
from rag_model.retrieve.questions import Questions

if TYPE_CHECKING:
    from rag_model.index.files.engine import Rows
    from rag_model.retrieve.composer import Composer

RRF_K = 60  # Cormack et al. 2009, section 3
DEPTH = 100  # passages that a leg without a depth is asked for: DPR's and BEIR's depth
_MOST_K = 1_000_000
_DIGITS = 10  # of the best score, to which scores are told apart
_MOST_WEIGHT = 1e6


class FusedRetriever(SnapshotRetriever):
    """A `Retriever` that fuses the lists of its legs by their ranks."""

    def __init__(self, legs: Sequence[Leg], k: int = RRF_K, weights: Sequence[float] | None = None) -> None:
        """Fuse two legs or more, of one snapshot and of different names.

        Args:
            legs: each is asked for its own depth, else for 100 or as many as are wanted.
            k: >= 1; the larger, the less the first ranks count.
            weights: > 0, one a leg; by default 1 each.
        """
        super().__init__(legs[0].retriever.snapshot, f"rrf({', '.join(leg.name for leg in legs)})")
        self._legs, self._k = tuple(legs), k
        self._weights = tuple(weights or [1.0] * len(legs))

    @property
    def most(self) -> int:
        """As many as all legs together can give."""
        return min(self.snapshot.n, sum(leg.most for leg in self._legs))

    def find(self, asked: Questions, k: int) -> Found:
        """Find with every leg, and order by the sum of reciprocal ranks; of rows that tie the smaller comes first."""
        below = tuple(leg.find(asked, max(DEPTH, k)) for leg in self._legs)
        rows, scores = fuse([found.rows for found in below], self._k, self._weights)
        passages = {row: passage for found in below for row, passage in found.passages.items()}
        return Found(self.name, rows, scores, below=below, passages=passages).cut(k)


def fuse(lists: Sequence["Rows"], k: int, weights: Sequence[float]) -> tuple["Rows", Scores]:
    """Return the rows of ranked lists by RRF(d) = sum of w / (k + rank), best first, ties by row.

    A row that a list lacks gets nothing from it.

    Args:
        lists: (q, k_i) int64 each, -1 after the last.
        k: of the equation.
        weights: w, one a list.

    Returns:
        (q, m) int64 rows, -1 after the last, and (q, m) float64 scores, 0 there; m is the longest line's length.
    """
    q = len(lists[0])
    rows = np.hstack(lists)  # (q, sum of k_i)
    ranked = [w / (k + np.arange(1, found.shape[1] + 1)) for found, w in zip(lists, weights, strict=True)]
    parts = np.broadcast_to(np.concatenate(ranked), rows.shape)
    kept = rows >= 0
    span = int(rows.max(initial=0)) + 1
    key = (np.arange(q)[:, None] * span + rows)[kept]  # one a question and row
    part = parts[kept]
    order = np.lexsort((part, key))  # equal parts give equal sums, in whichever legs they are
    keys, place = np.unique(key[order], return_inverse=True)
    sums = np.bincount(place, weights=part[order], minlength=len(keys))
    owner, row = np.divmod(keys, span)
    tied = np.round(sums / sums.max(initial=1e-300), _DIGITS)  # 1/1002 + 2/1002 and 3/1002 differ in their last bit
    order = np.lexsort((row, -tied, owner))
    owner, row, sums = owner[order], row[order], sums[order]
    counts = np.bincount(owner, minlength=q)
    column = np.arange(len(owner)) - np.repeat(np.cumsum(counts) - counts, counts)
    found = np.full((q, int(counts.max(initial=0))), -1, np.int64)
    scores = np.zeros(found.shape)
    found[owner, column], scores[owner, column] = row, sums
    return found, scores


def build(call: Call, composer: "Composer") -> SnapshotRetriever:
    """Build `rrf(A, B, …, k=60, weights=[1, 1, …])`.

    Raises:
        UsageError: fewer than two legs, two of one name, or `k` or `weights` out of range.
    """
    call.check_options("k", "weights")
    if len(call.arguments) < 2:
        raise call.wrong("rrf fuses the lists of two legs or more: name them, as in rrf(hnsw, ivfpq)")
    legs: list[Leg] = []
    for argument in call.arguments:
        legs.append(composer.leg(argument))
        if legs[-1].name in [leg.name for leg in legs[:-1]]:
            raise argument.wrong(f"the leg {legs[-1].name} is given twice: give it a larger weight instead")
    k = call.whole("k", RRF_K, 1, _MOST_K)
    weights = call.reals("weights", len(legs), _MOST_WEIGHT)
    return FusedRetriever(legs, k, weights)
