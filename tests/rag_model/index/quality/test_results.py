"""Recall against exact search, ties included."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from rag_model.index.quality.results import compute_p5, compute_recall


def rank(vectors: np.ndarray, queries: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
    scores = queries @ vectors.T
    rows = np.argsort(-scores, axis=1, kind="stable")[:, :k]
    return rows.astype(np.int64), np.take_along_axis(scores, rows, axis=1).astype(np.float32)


def test_recall_is_the_share_of_exact_hits() -> None:
    exact = np.array([[1, 2, 3, 4], [5, 6, 7, 8]])
    scores = np.array([[4, 3, 2, 1], [4, 3, 2, 1]], np.float32)
    rows = np.array([[2, 1, 9, -1], [8, 9, 10, 11]])
    assert compute_recall(rows, exact, scores, 2).tolist() == [1.0, 0.0]
    assert compute_recall(rows, exact, scores, 4).tolist() == [0.5, 0.25]


def test_recall_counts_only_the_first_k_rows() -> None:
    exact, scores = np.array([[1, 2]]), np.array([[2, 1]], np.float32)
    assert compute_recall(np.array([[9, 1, 2]]), exact, scores, 2).tolist() == [0.5]


def test_rows_tied_at_rank_k_are_correct() -> None:
    exact, scores = np.array([[1, 2, 3, 4]]), np.array([[0.9, 0.5, 0.5, 0.1]], np.float32)
    assert compute_recall(np.array([[3, 1]]), exact, scores, 2).tolist() == [1.0]
    assert compute_recall(np.array([[4, 1]]), exact, scores, 2).tolist() == [0.5]


def test_ties_beyond_the_exact_rows_count_by_score() -> None:
    corpus = np.array([[1.0]] * 50 + [[0.5]] * 50, np.float32)
    exact, scores = np.arange(4)[None].repeat(2, 0), np.ones((2, 4), np.float32)

    def score(queries: np.ndarray, rows: np.ndarray) -> np.ndarray:
        return np.where(rows < 0, -np.inf, corpus[rows, 0] * np.ones((len(queries), 1)))

    rows = np.array([[40, 30], [20, 70]])
    assert compute_recall(rows, exact, scores, 2).tolist() == [0, 0]
    assert compute_recall(rows, exact, scores, 2, score).tolist() == [1.0, 0.5]
    assert compute_recall(np.array([[40, -1], [-1, -1]]), exact, scores, 2, score).tolist() == [0.5, 0.0]
    ends = np.array([[1, 1, 1, 0.9]], np.float32)  # the list ends below the tie, so it has all correct rows
    assert compute_recall(np.array([[40, 2]]), exact[:1], ends, 2, score).tolist() == [0.5]


def test_recall_of_a_corpus_smaller_than_k() -> None:
    exact, scores = np.array([[1, 0]]), np.array([[2, 1]], np.float32)
    assert compute_recall(np.array([[0, 1, -1]]), exact, scores, 20).tolist() == [1.0]


@given(arrays(np.float32, (12, 3), elements=st.integers(-2, 2)), st.integers(1, 12), st.data())
def test_exact_search_has_recall_one_with_ties(vectors: np.ndarray, k: int, data: st.DataObject) -> None:
    queries = np.eye(3, dtype=np.float32)
    exact, scores = rank(vectors, queries, 12)
    order = np.array(data.draw(st.permutations(range(12))))
    shuffled, _ = rank(vectors[order], queries, k)  # in another order, ties break differently
    assert compute_recall(order[shuffled], exact, scores, k).tolist() == [1.0, 1.0, 1.0]


def test_fifth_percentile_shows_the_worst_queries() -> None:
    assert compute_p5(np.array([0.0] * 6 + [1.0] * 94)) < 0.5 < compute_p5(np.array([0.0] * 4 + [1.0] * 96))
