"""Exact search and reranking over memory-mapped vectors, the reference for every other index.

`ExactIndex` reads the parts' files block by block, so memory is bounded by a block and the best k
so far, and a corpus larger than memory can be searched without an index.

`rerank` ranks an index's candidates by the vectors themselves. Codes find the right passages but
not in the right order: with 60,000 passages at one byte per 4 dimensions, the first 20 candidates
held .82 of the true 20, the first 80 held .996, and the first 200 held all. The vectors are the
memory-mapped embeddings, so the index does not grow, and a query reads only the rows that it ranks.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from rag_model.errors import ResourceError, UsageError, format_count
from rag_model.index.files import engine
from rag_model.index.files.engine import Metric, Rows, Vectors, faiss
from rag_model.index.files.vectors import BLOCK_BYTES, VectorFiles, VectorRows
from rag_model.index.recipe import check_depth, check_search_parameters


def check_queries(vectors: npt.NDArray[Any], k: int, n: int, dim: int) -> Vectors:
    """Return `vectors` as contiguous float32 if they and `k` fit an index of `n` vectors.

    Raises:
        UsageError: wrong shape, a NaN or an infinity, or `k` outside 1 … n.
    """
    if vectors.ndim != 2 or vectors.shape[1] != dim:
        raise UsageError(f"vectors of shape {vectors.shape} do not fit an index of {dim} dimensions: give (q, {dim})")
    check_depth(k, n, "vector")
    if not isfinite(np.vdot(vectors, vectors)):  # cheap, but also infinite if the sum overflows
        bad_vectors = np.flatnonzero(~np.isfinite(vectors).all(axis=1))
        if len(bad_vectors):
            raise UsageError(f"vector {bad_vectors[0]} of the query holds a NaN or an infinity: encode it again")
    return np.ascontiguousarray(vectors, dtype=np.float32)


class ExactIndex:
    """A `VectorIndex` that compares a query with every vector."""

    def __init__(self, vectors: Sequence[Path], metric: Metric = "ip") -> None:
        """Map the parts' `.npy` files, in row order.

        Raises:
            InputError: a file is missing or damaged, or the files differ in dimension.
        """
        self._files = VectorFiles(vectors)
        self.n, self.dim, self.metric = self._files.n, self._files.dim, metric

    def search(self, vectors: Vectors, k: int, **parameters: int) -> tuple[Vectors, Rows]:
        """Return the k best rows of each vector: (q, k) float32 scores and (q, k) int64 rows.

        Scores are inner products, or negated squared distances, so larger is better. Rows of equal
        score are in ascending order. If more rows have the k-th best score than fit into the
        result, any of them may be omitted.

        Raises:
            UsageError: the vectors or `k` do not fit the index, or a search parameter is given.
            InputError: a row of the corpus holds a NaN or an infinity.
        """
        vectors = check_queries(vectors, k, self.n, self.dim)
        check_search_parameters(parameters, ())
        blocks = ((np.arange(first, first + len(block)), block) for first, block in self._files.blocks())
        return self._search_blocks(vectors, blocks, k)

    def search_among(self, vectors: Vectors, rows: Rows, k: int) -> tuple[Vectors, Rows]:
        """Search only among the (m,) ascending `rows`; return the min(k, m) best, as `search` does.

        Raises:
            InputError: one of these rows holds a NaN or an infinity.
        """
        block_size = max(1, BLOCK_BYTES // (4 * self.dim))
        row_blocks = (rows[i : i + block_size] for i in range(0, len(rows), block_size))
        blocks = ((block_rows, self._files.read_rows(block_rows)) for block_rows in row_blocks)
        return self._search_blocks(vectors, blocks, k)

    def score(self, vectors: Vectors, rows: Rows) -> Vectors:
        """Return (q, k) float32: the score of each vector with each of its k `rows`; -inf for -1.

        Raises:
            InputError: a row of the corpus holds a NaN or an infinity.
        """
        return compute_exact_scores(self._files, self.metric, vectors, rows)

    def _search_blocks(self, vectors: Vectors, blocks: Iterable[tuple[Rows, Vectors]], k: int) -> tuple[Vectors, Rows]:
        """Search blocks of rows with their vectors; return the k best of all blocks."""
        message = f"exact search of {format_count(len(vectors), 'vector')} failed: search fewer at once"
        metric = engine.to_faiss_metric(self.metric)
        scores, rows = np.empty((len(vectors), 0), np.float32), np.empty((len(vectors), 0), np.int64)
        for block_rows, block in blocks:
            with engine.translate_errors(ResourceError, message):
                distances, positions = faiss.knn(vectors, block, min(k, len(block)), metric=metric)
            block_scores = distances if self.metric == "ip" else -distances
            # (q, j + m) -> (q, k)
            scores, rows = select_top_k(np.hstack([scores, block_scores]), np.hstack([rows, block_rows[positions]]), k)
        return scores, rows


@dataclass(frozen=True, slots=True)
class NeighborLists:
    """The best rows of a part for each query, from which the lists of the part's next version are
    derived.

    Every row whose score for a query is above the query's `floor` is in the query's list.
    """

    scores: Vectors  # (q, w), best first; -inf where a list is shorter
    rows: Rows  # (q, w); -1 where a list is shorter
    floor: Vectors  # (q,): the list contains every row of the part with a higher score

    def select(self, queries: Rows) -> "NeighborLists":
        """Return the lists of these queries, (m,); query -1 gets an empty list with an infinite
        floor.
        """
        is_known_query = queries >= 0
        return NeighborLists(
            np.where(is_known_query[:, None], self.scores[queries], np.float32(-np.inf)),
            np.where(is_known_query[:, None], self.rows[queries], -1),
            np.where(is_known_query, self.floor[queries], np.float32(np.inf)),
        )


def search_neighbors(index: ExactIndex, vectors: Vectors, width: int) -> NeighborLists:
    """Return the `width` best rows of each query by exact search, or all rows if there are
    fewer.
    """
    scores, rows = index.search(vectors, min(width, index.n))
    is_truncated = width < index.n
    min_scores = scores[:, -1] if is_truncated else np.full(len(vectors), -np.inf, np.float32)
    return NeighborLists(*_pad_lists(scores, rows, width), min_scores)


def update_neighbors(
    index: ExactIndex, vectors: Vectors, previous: Sequence[tuple[NeighborLists, Rows]], depth: int, width: int
) -> NeighborLists:
    """Return lists of at least `depth` neighbours, derived from the lists of an earlier version.

    Only new rows are compared with the queries. A query whose list would be shorter than `depth` is
    compared with all rows.

    Args:
        index: an exact index over the current rows.
        vectors: (q, d) float32 queries.
        previous: for each earlier version, its lists for the same queries, and (m,) the current
            row that equals each of its rows; -1 if there is none.
        depth: minimum length of a list.
        width: maximum length of a list; longer than `depth`, because lists lose removed rows.

    Raises:
        InputError: a row holds a NaN or an infinity.
    """
    is_new = np.ones(index.n, bool)
    for _, current_rows in previous:
        is_new[current_rows[current_rows >= 0]] = False
    new_rows = np.flatnonzero(is_new)
    if not previous or 2 * len(new_rows) > index.n:
        return search_neighbors(index, vectors, width)
    new_scores, best_new_rows = index.search_among(vectors, new_rows, width)
    candidate_lists = [(new_scores, best_new_rows)]
    # If there are more than `width` new rows, the omitted ones do not score higher than the last.
    min_scores = new_scores[:, -1] if len(new_rows) > width else np.full(len(vectors), -np.inf, np.float32)
    for previous_lists, current_rows in previous:
        # The padding of a list, row -1, selects the last row, but its score -inf excludes it.
        candidate_lists.append((previous_lists.scores, current_rows[previous_lists.rows]))
        min_scores = np.maximum(min_scores, previous_lists.floor)
    scores, rows = (np.concatenate(arrays, axis=1) for arrays in zip(*candidate_lists, strict=True))
    is_listed = (rows >= 0) & (scores >= min_scores[:, None]) & (scores > -np.inf) & ~_find_repeats(rows, scores)
    scores, rows = np.where(is_listed, scores, np.float32(-np.inf)), np.where(is_listed, rows, -1)
    scores, rows = _pad_lists(*select_top_k(scores, rows, width), width)
    is_truncated = is_listed.sum(axis=1) > width
    min_scores = np.maximum(min_scores, np.where(is_truncated, scores[:, -1], np.float32(-np.inf)))
    is_short = (rows >= 0).sum(axis=1) < min(depth, index.n)
    if is_short.any():
        full_lists = search_neighbors(index, vectors[is_short], width)
        scores[is_short], rows[is_short], min_scores[is_short] = full_lists.scores, full_lists.rows, full_lists.floor
    return NeighborLists(scores, rows, min_scores)


def _pad_lists(scores: Vectors, rows: Rows, n_columns: int) -> tuple[Vectors, Rows]:
    """Return lists of `n_columns` entries, (q, n_columns), padded with row -1 and score -inf."""
    widths = (0, 0), (0, n_columns - scores.shape[1])
    return np.pad(scores, widths, constant_values=-np.inf), np.pad(rows, widths, constant_values=-1)


def _find_repeats(rows: Rows, scores: Vectors) -> npt.NDArray[np.bool_]:
    """Return a (q, w) mask of entries that repeat the row of a better, or equal earlier, entry."""
    order = np.lexsort((-scores, rows), axis=1)
    sorted_rows = np.take_along_axis(rows, order, 1)
    is_repeated = np.zeros(rows.shape, bool)
    np.put_along_axis(is_repeated, order[:, 1:], sorted_rows[:, 1:] == sorted_rows[:, :-1], 1)
    return is_repeated


def select_top_k(scores: Vectors, rows: Rows, k: int) -> tuple[Vectors, Rows]:
    """Return the k best of each row of scores, best first; equal scores are ordered by row."""
    best_columns = np.lexsort((rows, -scores), axis=1)[:, :k]  # (q, w) -> (q, k)
    return np.take_along_axis(scores, best_columns, 1), np.take_along_axis(rows, best_columns, 1)


def compute_exact_scores(files: VectorRows, metric: Metric, vectors: Vectors, rows: Rows) -> Vectors:
    """Return (q, k) float32: the score of each vector with each of its k `rows`; -inf for -1.

    Scores are inner products, or negated squared distances. The vectors of all rows are in memory
    at once.

    Raises:
        InputError: a row of the corpus holds a NaN or an infinity.
    """
    has_row = rows >= 0
    distinct_rows, inverse = np.unique(rows[has_row], return_inverse=True)
    positions = np.zeros(rows.shape, np.int64)
    positions[has_row] = inverse
    stored_vectors = files.read_rows(distinct_rows)
    scores = np.full(rows.shape, -np.inf, np.float32)
    for query, is_candidate, candidate_positions, query_scores in zip(vectors, has_row, positions, scores, strict=True):
        candidate_vectors = stored_vectors[candidate_positions[is_candidate]]  # (c, d)
        if metric == "ip":
            query_scores[is_candidate] = candidate_vectors @ query  # (c, d) @ (d,) -> (c,)
        else:
            query_scores[is_candidate] = -np.square(candidate_vectors - query).sum(axis=1)
    return scores


def rerank(files: VectorRows, metric: Metric, vectors: Vectors, rows: Rows, k: int) -> tuple[Vectors, Rows]:
    """Return the k best candidates of each query: (q, k) exact float32 scores and (q, k) rows.

    Queries are processed in groups with 32 MiB of candidate vectors.

    Args:
        files: the corpus's vectors.
        metric: scores are inner products, or negated squared distances.
        vectors: (q, d) float32.
        rows: (q, >= k) candidates, padded with -1, which ranks last with -inf.
        k: number of rows to return.

    Raises:
        InputError: a candidate's vector holds a NaN or an infinity.
    """
    queries_per_group = max(1, BLOCK_BYTES // (4 * files.dim * rows.shape[1]))
    scores = [np.empty((0, rows.shape[1]), np.float32)]
    for first_query in range(0, len(rows), queries_per_group):
        scores.append(
            compute_exact_scores(
                files,
                metric,
                vectors[first_query : first_query + queries_per_group],
                rows[first_query : first_query + queries_per_group],
            )
        )
    return select_top_k(np.concatenate(scores), rows, k)  # (q, w) -> (q, k)
