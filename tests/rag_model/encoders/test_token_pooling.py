"""Token pooling beside Ward's criterion as it is defined, and as a setting of a ColBERT."""

import itertools
from pathlib import Path

import numpy as np
import pytest

from rag_model.encoders.token_encoder import TokenEncoder, cluster_tokens, compute_token_space, pool_tokens
from rag_model.errors import UsageError
from tests.fixtures.tiny_colbert import save_colbert


def unit(shape: tuple[int, ...], seed: int) -> np.ndarray:
    drawn = np.random.default_rng(seed).normal(size=shape)
    return (drawn / np.linalg.norm(drawn, axis=-1, keepdims=True)).astype(np.float32)


def by_definition(vectors: np.ndarray, count: int) -> list[list[int]]:
    """Join the two clusters whose union adds least to the sum of squares, as Ward 1963 says it."""

    def squares(members: list[int]) -> float:
        own = vectors[members].astype(np.float64)
        return float(np.square(own - own.mean(0)).sum())

    found = [[token] for token in range(len(vectors))]
    while len(found) > count:
        pairs = itertools.combinations(found, 2)
        one, two = min(pairs, key=lambda pair: squares(pair[0] + pair[1]) - squares(pair[0]) - squares(pair[1]))
        found = [some for some in found if some not in (one, two)] + [sorted(one + two)]
    return sorted(found)


@pytest.mark.parametrize(("tokens", "factor"), [(1, 2), (2, 2), (9, 2), (14, 3), (12, 12)])
def test_clusters_are_wards(tokens: int, factor: int) -> None:
    vectors = unit((tokens, 6), tokens)
    count = -(-tokens // factor)
    expected = by_definition(vectors, count)
    numbers = cluster_tokens(vectors, count)
    assert sorted(np.flatnonzero(numbers == number).tolist() for number in range(count)) == expected
    means = np.stack([vectors[members].mean(0) for members in expected])
    means /= np.linalg.norm(means, axis=1, keepdims=True)
    assert np.allclose(pool_tokens(vectors, factor), means, atol=1e-6)


def test_equal_tokens_become_one() -> None:
    vectors = unit((5, 8), 0)[[0, 1, 2, 3, 4, 0, 1, 2, 3, 4]]
    assert np.allclose(pool_tokens(vectors, 2), vectors[:5], atol=1e-6)


def test_a_colbert_pools_its_passages_and_not_its_questions(tmp_path: Path) -> None:
    folder = save_colbert(tmp_path / "colbert")
    whole, half = TokenEncoder.load(folder), TokenEncoder.load(folder, {"pool": 2})
    titles, texts = ["river", ""], ["the king of the river city", "queen"]
    every, some = whole.encode_passages(titles, texts), half.encode_passages(titles, texts)
    assert np.diff(some.offsets).tolist() == [-(-count // 2) for count in np.diff(every.offsets).tolist()]
    first = every.vectors[: every.offsets[1]]
    assert np.allclose(some.vectors[: some.offsets[1]], pool_tokens(first, 2), atol=1e-5)
    assert (half.encode_questions(["who?"]) == whole.encode_questions(["who?"])).all()
    assert compute_token_space(folder, half.spec).pooling == "tokens, pooled by 2"
    assert "pool" not in whole.spec.to_json(), "what earlier versions wrote stays equal"
    assert whole.spec.with_fields(half.spec.to_json()) == half.spec
    with pytest.raises(UsageError, match="pool of a ColBERT is 0: use 1 to 8"):
        TokenEncoder.load(folder, {"pool": 0})
