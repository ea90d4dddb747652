"""MUVERA beside brute force: buckets, the nearest by Hamming distance, sums and means, and what the mean tends to."""

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


def unit(shape: tuple[int, ...], seed: int) -> np.ndarray:
    drawn = np.random.default_rng(seed).normal(size=shape) + 0.3
    return (drawn / np.linalg.norm(drawn, axis=-1, keepdims=True)).astype(np.float32)


def hamming(one: int, two: int) -> int:
    return bin(one ^ two).count("1")


@pytest.mark.parametrize("bits", [1, 2, 3, 4, 5])
def test_an_empty_bucket_takes_the_nearest_of_all_tokens(bits: int) -> None:
    random = np.random.default_rng(bits)
    buckets, expected = random.integers(0, 1 << bits, 7), np.arange(1 << bits)
    for bucket, place in zip(expected, find_nearest_tokens(buckets, expected), strict=True):
        distances = [hamming(int(bucket), int(own)) for own in buckets]
        assert distances[place] == min(distances)
        assert place == distances.index(min(distances))


def test_questions_sum_and_passages_take_means_and_fill() -> None:
    bits = 3
    made = Muvera(D, repetitions=4, bits=bits, projected=D, seed=7)
    question, passage = unit((2, 5, D), 1), unit((9, D), 2)
    told = made.encode_passages(TokenVectors(passage, np.array([0, 9])))[0].reshape(4, 1 << bits, D)
    query_vectors = made.encode_questions(question)[1].reshape(4, 1 << bits, D)

    def bucket(r: int, token: np.ndarray) -> int:
        return sum(1 << j for j in range(bits) if made._planes[r, j] @ token > 0)

    for r, b in itertools.product(range(4), range(1 << bits)):
        sides = [bucket(r, token) for token in passage]
        own = [token for token, side in zip(passage, sides, strict=True) if side == b]
        near = min(range(9), key=lambda place: (hamming(sides[place], b), place))
        expected = np.mean(own, axis=0) if own else passage[near]
        assert np.allclose(told[r, b], expected / 2, atol=1e-6)  # over sqrt(R)
        actual = [token for token in question[1] if bucket(r, token) == b]
        assert np.allclose(query_vectors[r, b], np.sum(actual, axis=0) / 2 if actual else 0, atol=1e-6)


def chamfer(question: np.ndarray, passage: np.ndarray) -> float:
    return float((question @ passage.T).max(1).sum())


def product(made: Muvera, question: np.ndarray, passages: TokenVectors) -> np.ndarray:
    return made.encode_passages(passages) @ made.encode_questions(question)[0]


def test_the_mean_over_repetitions_tends_to_chamfer() -> None:
    question, passages = unit((1, 6, D), 3), []
    for seed, others in enumerate((4, 9, 14, 2)):  # tokens near the question's, as a relevant passage has, and others
        near = question[0] + np.random.default_rng(seed).normal(size=(6, D)).astype(np.float32) * 0.02 * (1 + seed)
        near /= np.linalg.norm(near, axis=1, keepdims=True)
        passages.append(np.concatenate([near, unit((others, D), 10 + seed)]))
    tokens = TokenVectors(np.concatenate(passages), compute_offsets(np.array([len(passage) for passage in passages])))
    expected = np.array([chamfer(question[0], passage) for passage in passages])
    errors = []
    for bits in (0, 3, 6, 9):  # the more buckets, the fewer strangers share one
        found = product(Muvera(D, repetitions=60, bits=bits, projected=D, seed=1), question, tokens)
        assert (found <= expected + 1e-4).all()  # a mean, or one token, is never better than the best token
        errors.append(float(np.abs(found - expected).mean() / expected.mean()))
    assert errors == sorted(errors, reverse=True)
    assert errors[-1] < 0.25
    few, many = (
        np.std([product(Muvera(D, r, 4, D, seed), question, tokens) for seed in range(12)], axis=0) for r in (1, 16)
    )
    assert (many < few / 2).all()  # the more repetitions, the nearer to their mean


def test_a_projection_keeps_products_on_average() -> None:
    question, passage = unit((1, 6, D), 3), TokenVectors(unit((9, D), 4), np.array([0, 9]))

    def mean(projected: int) -> float:
        return float(np.mean([product(Muvera(D, 400, 3, projected, seed), question, passage) for seed in range(3)]))

    assert mean(4) == pytest.approx(mean(D), rel=0.1)
    assert Muvera(D, 1, 3, D).encoded_dim == 8 * D
    assert Muvera(128).encoded_dim == 10_240


def test_equal_seeds_give_equal_vectors_and_empty_passages_are_zero() -> None:
    tokens = TokenVectors(unit((5, D), 4), np.array([0, 0, 5, 5]))
    one, two, other = (Muvera(D, 3, 2, 4, seed).encode_passages(tokens) for seed in (1, 1, 2))
    assert (one == two).all()
    assert (one != other).any()
    assert not one[0].any()
    assert not one[2].any()


@pytest.mark.parametrize("factory", ["IVF8,PQ64np", "HNSW8"])
def test_an_index_over_its_vectors_finds_what_maxsim_finds(factory: str, tmp_path: Path) -> None:
    passages, asked, length = 500, 40, 6
    tokens = unit((passages * 10, D), 5)
    random = np.random.default_rng(6)
    picked = random.choice(passages, asked, replace=False)
    own = tokens.reshape(passages, 10, D)[picked, :length] + random.normal(size=(asked, length, D)) * 0.15
    questions = (own / np.linalg.norm(own, axis=-1, keepdims=True)).astype(np.float32)
    offsets = compute_offsets(np.full(passages, 10))
    best = maxsim(questions, tokens, offsets).argmax(axis=1)
    made = Muvera(D, repetitions=8, bits=3, projected=8)
    np.save(tmp_path / "rows.npy", made.encode_passages(TokenVectors(tokens, offsets)))
    plan = get_kind_for_factory(factory).plan(IndexRecipe(factory), passages, made.encoded_dim)
    run_stages(plan, [tmp_path / "rows.npy"], tmp_path / "index", tmp_path)
    index = open_index(tmp_path / "index", defaults={"nprobe": 8} if "IVF" in factory else {"efSearch": 64})
    found = index.search(made.encode_questions(questions), 25)[1]
    assert (found == best[:, None]).any(axis=1).mean() >= 0.95


def test_impossible_numbers_are_refused() -> None:
    for wrong in ({"repetitions": 0}, {"bits": 11}, {"bits": -1}, {"projected": 0}, {"projected": D + 1}):
        with pytest.raises(UsageError, match="of MUVERA"):
            Muvera(D, **wrong)
