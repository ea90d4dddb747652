"""Exact search and reranking over memory-mapped vectors, the reference for every other index.

`ExactIndex` reads the parts' files block by block, so memory is bounded by a block and the best k
so far, and a corpus larger than memory can be searched without an index.

`rerank` ranks an index's candidates by the vectors themselves. Codes find the right passages but
not in the right order: with 60,000 passages at one byte per 4 dimensions, the first 20 candidates
held .82 of the true 20, the first 80 held .996, and the first 200 held all. The vectors are the
memory-mapped embeddings, so the index grows by nothing, and a query reads as many rows as it ranks.
"""

from collections.abc import Sequence
from math import isfinite
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from rag_model.errors import ResourceError, UsageError, format_count
from rag_model.index.files import engine
from rag_model.index.files.engine import Metric, Rows, Vectors, faiss
from rag_model.index.files.vectors import BLOCK_BYTES, VectorFiles, VectorRows
from rag_model.index.recipe import check_search_parameters


def check_queries(vectors: npt.NDArray[Any], k: int, n: int, dim: int) -> Vectors:
    """Return `vectors` as contiguous float32 if they and `k` fit an index of `n` vectors.

    Raises:
        UsageError: wrong shape, a NaN or an infinity, or `k` outside 1 … n.
    """
    if vectors.ndim != 2 or vectors.shape[1] != dim:
        raise UsageError(f"vectors of shape {vectors.shape} do not fit an index of {dim} dimensions: give (q, {dim})")
    if not 1 <= k <= n:
        raise UsageError(f"k is {k} but the index holds {format_count(n, 'vector')}: ask for 1 to {n}")
    if not isfinite(np.vdot(vectors, vectors)):  # cheap; large finite numbers fail it too
        bad = np.flatnonzero(~np.isfinite(vectors).all(axis=1))
        if len(bad):
            raise UsageError(f"vector {bad[0]} of the query holds a NaN or an infinity: encode it again")
    return np.ascontiguousarray(vectors, dtype=np.float32)


class ExactIndex:
    """A `VectorIndex` that compares a query with every vector."""

    def __init__(self, vectors: Sequence[Path], metric: Metric = "ip") -> None:
        """Map the parts' `.npy` files, in row order.

        Raises:
            InputError: a file is missing, damaged or of another dimension.
        """
        self._files = VectorFiles(vectors)
        self.n, self.dim, self.metric = self._files.n, self._files.dim, metric

    def search(self, vectors: Vectors, k: int, **parameters: int) -> tuple[Vectors, Rows]:
        """Return the k best rows of each vector: (q, k) float32 scores and (q, k) int64 rows.

        Scores are inner products, or negated squared distances, so larger is better. Of equal
        scores the smaller row comes first, except at rank k, where any of the equal rows may be
        left out.

        Raises:
            UsageError: the vectors or `k` do not fit the index, or a search parameter is given.
            InputError: a row of the corpus holds a NaN or an infinity.
        """
        vectors = check_queries(vectors, k, self.n, self.dim)
        check_search_parameters(parameters, ())
        scores = np.empty((len(vectors), 0), np.float32)
        rows = np.empty((len(vectors), 0), np.int64)
        for first, block in self._files.blocks():
            block_scores, local = self._search_block(vectors, block, min(k, len(block)))
            # (q, j + m) -> (q, k)
            scores, rows = select_top_k(np.hstack([scores, block_scores]), np.hstack([rows, local + first]), k)
        return scores, rows

    def score(self, vectors: Vectors, rows: Rows) -> Vectors:
        """Return (q, k) float32 scores of vectors with their `rows`, (q, k); -inf for row -1.

        Raises:
            InputError: a row of the corpus holds a NaN or an infinity.
        """
        return compute_exact_scores(self._files, self.metric, vectors, rows)

    def _search_block(self, vectors: Vectors, block: Vectors, k: int) -> tuple[Vectors, Rows]:
        with engine.translate_errors(
            ResourceError, f"exact search of {format_count(len(vectors), 'vector')} failed: search fewer at once"
        ):
            scores, rows = faiss.knn(vectors, block, k, metric=engine.faiss_metric(self.metric))
        return (scores if self.metric == "ip" else -scores), rows


def select_top_k(scores: Vectors, rows: Rows, k: int) -> tuple[Vectors, Rows]:
    """Return the k best of each row of scores, best first; equal scores are ordered by row."""
    order = np.lexsort((rows, -scores), axis=1)[:, :k]  # (q, w) -> (q, k)
    return np.take_along_axis(scores, order, 1), np.take_along_axis(rows, order, 1)


def compute_exact_scores(files: VectorRows, metric: Metric, vectors: Vectors, rows: Rows) -> Vectors:
    """Return (q, k) float32 scores of `vectors`, (q, d), with `rows`, (q, k); -inf for row -1.

    Scores are inner products, or negated squared distances. The vectors of all rows are in memory
    at once.

    Raises:
        InputError: a row of the corpus holds a NaN or an infinity.
    """
    distinct_rows = np.unique(rows[rows >= 0])
    stored_vectors = files.read_rows(distinct_rows)
    scores = np.full(rows.shape, -np.inf, np.float32)
    for vector, candidate_rows, row_scores in zip(vectors, rows, scores, strict=True):
        candidates = stored_vectors[np.searchsorted(distinct_rows, candidate_rows[candidate_rows >= 0])]  # (c, d)
        if metric == "ip":
            row_scores[candidate_rows >= 0] = candidates @ vector  # (c, d) @ (d,) -> (c,)
        else:
            row_scores[candidate_rows >= 0] = -np.square(candidates - vector).sum(axis=1)
    return scores


def rerank(files: VectorFiles, metric: Metric, vectors: Vectors, rows: Rows, k: int) -> tuple[Vectors, Rows]:
    """Return the k best candidates of each query: (q, k) exact float32 scores and (q, k) rows.

    Processes as many queries at once as have candidates of 32 MiB.

    Args:
        files: the corpus's vectors.
        metric: scores are inner products, or negated squared distances.
        vectors: (q, d) float32.
        rows: (q, >= k) candidates, padded with -1, which ranks last with -inf.
        k: number of rows to return.

    Raises:
        InputError: a candidate's vector holds a NaN or an infinity.
    """
    step = max(1, BLOCK_BYTES // (4 * files.dim * rows.shape[1]))
    scores = [np.empty((0, rows.shape[1]), np.float32)]
    for first in range(0, len(rows), step):
        scores.append(compute_exact_scores(files, metric, vectors[first : first + step], rows[first : first + step]))
    return select_top_k(np.concatenate(scores), rows, k)  # (q, w) -> (q, k)
