"""MaxSim compared with loops, also if all similarities are negative."""

from itertools import pairwise

import numpy as np

from rag_model.corpus.ragged_file import compute_offsets
from rag_model.index.tokens.search import maxsim


def compute_with_loops(questions: np.ndarray, passages: list[np.ndarray]) -> np.ndarray:
    return np.array(
        [[sum(max(t @ v for v in passage) for t in question) for passage in passages] for question in questions]
    )


def test_maxsim_is_the_sum_of_the_largest_products() -> None:
    random = np.random.default_rng(0)
    questions = random.normal(size=(3, 5, 8)).astype(np.float32)
    passages = [random.normal(size=(n, 8)).astype(np.float32) for n in (4, 1, 7, 2)]
    offsets = compute_offsets(np.array([4, 1, 7, 2]))
    scores = maxsim(questions, np.concatenate(passages), offsets)
    assert np.allclose(scores, compute_with_loops(questions, passages), atol=1e-5)


def test_short_passage_is_not_better_if_all_similarities_are_negative() -> None:
    question = np.array([[[1.0, 0.0], [0.8, 0.6]]], np.float32)
    passages = [np.array([[-1.0, 0.0], [-0.6, -0.8]], np.float32), np.array([[-1.0, 0.0]], np.float32)]
    scores = maxsim(question, np.concatenate(passages), compute_offsets(np.array([2, 1])))
    assert (scores < 0).all()
    assert np.allclose(scores, compute_with_loops(question, passages))
    assert scores[0, 0] > scores[0, 1]


def test_passage_without_tokens_ranks_last() -> None:
    question = np.array([[[1.0, 0.0]]], np.float32)
    vectors = np.array([[-1.0, 0.0], [0.5, 0.5]], np.float32)
    assert maxsim(question, vectors, np.array([0, 0, 1, 1, 2, 2])).tolist() == [[-np.inf, -1, -np.inf, 0.5, -np.inf]]
    assert maxsim(question, vectors[:0], np.array([0, 0])).tolist() == [[-np.inf]]
    assert maxsim(question[:0], vectors, np.array([0, 2])).shape == (0, 1)


def test_passages_of_several_tiles_are_scored() -> None:
    random = np.random.default_rng(0)
    lengths = np.array([0, 700, 3, 0, 600, *random.integers(0, 200, 20), 0])
    questions = random.normal(size=(40, 32, 8)).astype(np.float32)
    vectors, offsets = random.normal(size=(lengths.sum(), 8)).astype(np.float32), compute_offsets(lengths)
    scores = maxsim(questions, vectors, offsets)
    passages = [vectors[first:end] for first, end in pairwise(offsets)]
    for scores_of_passage, passage in zip(scores.T, passages, strict=True):
        best = (questions @ passage.T).max(axis=2, initial=-np.inf)
        assert np.allclose(scores_of_passage, best.sum(axis=1), rtol=1e-5)
