"""Exact search over memory-mapped vectors: the reference for every other index.

Blocks of the parts are read one at a time, so memory is bounded by a block and the best k so far, and a
corpus larger than memory can be searched without an index.
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from rag_model.errors import ResourceError
from rag_model.index.files import engine
from rag_model.index.files.engine import Metric, Rows, Vectors, faiss
from rag_model.index.files.vectors import VectorFiles
from rag_model.index.quality.question import check_question
from rag_model.index.recipe import check_search


class ExactIndex:
    """A `SearchIndex` that compares a query with every vector."""

    def __init__(self, vectors: Sequence[Path], metric: Metric = "ip") -> None:
        """Map the parts' `.npy` files, in row order.

        Raises:
            InputError: a file is missing, damaged or of another dimension.
        """
        self._files = VectorFiles(vectors)
        self.n, self.dim, self.metric = self._files.n, self._files.dim, metric

    def search(self, vectors: Vectors, k: int, **parameters: int) -> tuple[Vectors, Rows]:
        """Return the k best rows of each vector: (q, k) float32 scores, best first, and (q, k) int64 rows.

        Scores are inner products, or negated squared distances, so larger is better. Of equal scores the
        smaller row comes first, except at the k-th place, where any of the equal rows may be left out.

        Raises:
            UsageError: the vectors or `k` do not fit the index, or a search parameter is given.
            InputError: a row of the corpus holds a NaN or an infinity.
        """
        vectors = check_question(vectors, k, self.n, self.dim)
        check_search(parameters, ())
        scores = np.empty((len(vectors), 0), np.float32)
        rows = np.empty((len(vectors), 0), np.int64)
        for first, block in self._files.blocks():
            found, local = self._best(vectors, block, min(k, len(block)))
            # (q, j + m) -> (q, k)
            scores, rows = best_of(np.hstack([scores, found]), np.hstack([rows, local + first]), k)
        return scores, rows

    def score(self, vectors: Vectors, rows: Rows) -> Vectors:
        """Return the (q, k) float32 scores of each vector with its own `rows`, (q, k); -inf for row -1.

        Raises:
            InputError: a row of the corpus holds a NaN or an infinity.
        """
        return exact_scores(self._files, self.metric, vectors, rows)

    def _best(self, vectors: Vectors, block: Vectors, k: int) -> tuple[Vectors, Rows]:
        with engine.guarded(ResourceError, f"exact search of {len(vectors)} vectors failed: search fewer at once"):
            found, rows = faiss.knn(vectors, block, k, metric=engine.metric_code(self.metric))
        return (found if self.metric == "ip" else -found), rows


def best_of(scores: Vectors, rows: Rows, k: int) -> tuple[Vectors, Rows]:
    """Return the k best of each row of scores, best first; of equal scores the smaller row number comes first."""
    order = np.lexsort((rows, -scores), axis=1)[:, :k]  # (q, w) -> (q, k)
    return np.take_along_axis(scores, order, 1), np.take_along_axis(rows, order, 1)


def exact_scores(files: VectorFiles, metric: Metric, vectors: Vectors, rows: Rows) -> Vectors:
    """Return the (q, k) float32 scores of each of `vectors`, (q, d), with its own `rows`, (q, k); -inf for row -1.

    Scores are inner products, or negated squared distances. All rows' vectors are in memory at once.

    Raises:
        InputError: a row of the corpus holds a NaN or an infinity.
    """
    wanted = np.unique(rows[rows >= 0])
    taken = files.take(wanted)
    scores = np.full(rows.shape, -np.inf, np.float32)
    for vector, found, filled in zip(vectors, rows, scores, strict=True):
        candidates = taken[np.searchsorted(wanted, found[found >= 0])]  # (c, d)
        if metric == "ip":
            filled[found >= 0] = candidates @ vector  # (c, d) @ (d,) -> (c,)
        else:
            filled[found >= 0] = -np.square(candidates - vector).sum(axis=1)
    return scores
