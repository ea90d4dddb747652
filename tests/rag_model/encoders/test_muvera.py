"""MUVERA compared with brute force: buckets, nearest tokens, sums, means, and the limit of its product."""

import itertools
from pathlib import Path

import numpy as np
import pytest

from rag_model.corpus.ragged_file import TokenVectors, compute_offsets
from rag_model.encoders.muvera import Muvera, find_nearest_tokens
from rag_model.errors import UsageError
from rag_model.index.build import run_stages
from rag_model.index.kind import get_kind_for_factory
from rag_model.index.recipe import IndexRecipe
from rag_model.index.search import open_index
from rag_model.index.tokens.search import maxsim

D = 12


def draw_vectors(shape: tuple[int, ...], seed: int) -> np.ndarray:
    vectors = np.random.default_rng(seed).normal(size=shape) + 0.3
    return (vectors / np.linalg.norm(vectors, axis=-1, keepdims=True)).astype(np.float32)


def count_different_bits(a: int, b: int) -> int:
    return bin(a ^ b).count("1")


@pytest.mark.parametrize("bits", [1, 2, 3, 4, 5])
def test_an_empty_bucket_takes_the_nearest_of_all_tokens(bits: int) -> None:
    random = np.random.default_rng(bits)
    buckets, expected = random.integers(0, 1 << bits, 7), np.arange(1 << bits)
    for bucket, position in zip(expected, find_nearest_tokens(buckets, expected), strict=True):
        distances = [count_different_bits(int(bucket), int(token_bucket)) for token_bucket in buckets]
        assert distances[position] == min(distances)
        assert position == distances.index(min(distances))


def test_questions_sum_and_passages_take_means_and_fill() -> None:
    bits = 3
    muvera = Muvera(D, repetitions=4, bits=bits, projected=D, seed=7)
    question, passage = draw_vectors((2, 5, D), 1), draw_vectors((9, D), 2)
    passage_vectors = muvera.encode_passages(TokenVectors(passage, np.array([0, 9])))[0].reshape(4, 1 << bits, D)
    query_vectors = muvera.encode_questions(question)[1].reshape(4, 1 << bits, D)

    def bucket(r: int, token: np.ndarray) -> int:
        return sum(1 << j for j in range(bits) if muvera._planes[r, j] @ token > 0)

    for r, b in itertools.product(range(4), range(1 << bits)):
        buckets = [bucket(r, token) for token in passage]
        bucket_tokens = [token for token, token_bucket in zip(passage, buckets, strict=True) if token_bucket == b]
        nearest = min(range(9), key=lambda i: (count_different_bits(buckets[i], b), i))
        expected = np.mean(bucket_tokens, axis=0) if bucket_tokens else passage[nearest]
        assert np.allclose(passage_vectors[r, b], expected / 2, atol=1e-6)  # over sqrt(R)
        question_tokens = [token for token in question[1] if bucket(r, token) == b]
        expected = np.sum(question_tokens, axis=0) if question_tokens else np.zeros(D)
        assert np.allclose(query_vectors[r, b], expected / 2, atol=1e-6)


def compute_chamfer(question: np.ndarray, passage: np.ndarray) -> float:
    return float((question @ passage.T).max(1).sum())


def multiply(muvera: Muvera, question: np.ndarray, passages: TokenVectors) -> np.ndarray:
    return muvera.encode_passages(passages) @ muvera.encode_questions(question)[0]


def test_product_tends_to_chamfer_with_more_buckets() -> None:
    question, passages = draw_vectors((1, 6, D), 3), []
    for seed, n_others in enumerate((4, 9, 14, 2)):  # a relevant passage has tokens near the question's
        noise = np.random.default_rng(seed).normal(size=(6, D)).astype(np.float32)
        near_tokens = question[0] + noise * 0.02 * (1 + seed)
        near_tokens /= np.linalg.norm(near_tokens, axis=1, keepdims=True)
        passages.append(np.concatenate([near_tokens, draw_vectors((n_others, D), 10 + seed)]))
    tokens = TokenVectors(np.concatenate(passages), compute_offsets(np.array([len(passage) for passage in passages])))
    expected = np.array([compute_chamfer(question[0], passage) for passage in passages])
    errors = []
    for bits in (0, 3, 6, 9):  # more buckets separate unrelated tokens
        products = multiply(Muvera(D, repetitions=60, bits=bits, projected=D, seed=1), question, tokens)
        assert (products <= expected + 1e-4).all()  # a mean or a single token is at most the best token
        errors.append(float(np.abs(products - expected).mean() / expected.mean()))
    assert errors == sorted(errors, reverse=True)
    assert errors[-1] < 0.25
    few_spread, many_spread = (
        np.std([multiply(Muvera(D, r, 4, D, seed), question, tokens) for seed in range(12)], axis=0) for r in (1, 16)
    )
    assert (many_spread < few_spread / 2).all()  # more repetitions are nearer to their mean


def test_a_projection_keeps_products_on_average() -> None:
    question, passage = draw_vectors((1, 6, D), 3), TokenVectors(draw_vectors((9, D), 4), np.array([0, 9]))

    def mean(dim: int) -> float:
        return float(np.mean([multiply(Muvera(D, 400, 3, dim, seed), question, passage) for seed in range(3)]))

    assert mean(4) == pytest.approx(mean(D), rel=0.1)
    assert Muvera(D, 1, 3, D).encoded_dim == 8 * D
    assert Muvera(128).encoded_dim == 10_240


def test_equal_seeds_give_equal_vectors_and_empty_passages_are_zero() -> None:
    tokens = TokenVectors(draw_vectors((5, D), 4), np.array([0, 0, 5, 5]))
    first, same_seed, other_seed = (Muvera(D, 3, 2, 4, seed).encode_passages(tokens) for seed in (1, 1, 2))
    assert (first == same_seed).all()
    assert (first != other_seed).any()
    assert not first[0].any()
    assert not first[2].any()


@pytest.mark.parametrize("factory", ["IVF8,PQ64np", "HNSW8"])
def test_index_of_muvera_vectors_finds_the_best_passage_by_maxsim(factory: str, tmp_path: Path) -> None:
    n_passages, n_questions, length = 500, 40, 6
    tokens = draw_vectors((n_passages * 10, D), 5)
    random = np.random.default_rng(6)
    passage_rows = random.choice(n_passages, n_questions, replace=False)
    questions = tokens.reshape(n_passages, 10, D)[passage_rows, :length]
    questions += (random.normal(size=questions.shape) * 0.15).astype(np.float32)
    questions /= np.linalg.norm(questions, axis=-1, keepdims=True)
    offsets = compute_offsets(np.full(n_passages, 10))
    best = maxsim(questions, tokens, offsets).argmax(axis=1)
    muvera = Muvera(D, repetitions=8, bits=3, projected=8)
    np.save(tmp_path / "rows.npy", muvera.encode_passages(TokenVectors(tokens, offsets)))
    plan = get_kind_for_factory(factory).plan(IndexRecipe(factory), n_passages, muvera.encoded_dim)
    run_stages(plan, [tmp_path / "rows.npy"], tmp_path / "index", tmp_path)
    index = open_index(tmp_path / "index", defaults={"nprobe": 8} if "IVF" in factory else {"efSearch": 64})
    rows = index.search(muvera.encode_questions(questions), 25)[1]
    assert (rows == best[:, None]).any(axis=1).mean() >= 0.95


def test_impossible_numbers_are_refused() -> None:
    for settings in ({"repetitions": 0}, {"bits": 11}, {"bits": -1}, {"projected": 0}, {"projected": D + 1}):
        with pytest.raises(UsageError, match="of MUVERA"):
            Muvera(D, **settings)
