"""Token pooling compared with the definition of Ward's criterion, and as a setting of a ColBERT."""

import itertools
from pathlib import Path

import numpy as np
import pytest

from rag_model.encoders.token_encoder import TokenEncoder, cluster_tokens, compute_token_space, pool_tokens
from rag_model.errors import UsageError
from tests.fixtures.tiny_colbert import save_colbert


def draw_vectors(shape: tuple[int, ...], seed: int) -> np.ndarray:
    vectors = np.random.default_rng(seed).normal(size=shape)
    return (vectors / np.linalg.norm(vectors, axis=-1, keepdims=True)).astype(np.float32)


def cluster_by_ward(vectors: np.ndarray, count: int) -> list[list[int]]:
    """Join the two clusters whose union adds least to the sum of squares (Ward 1963)."""

    def squares(members: list[int]) -> float:
        cluster = vectors[members].astype(np.float64)
        return float(np.square(cluster - cluster.mean(0)).sum())

    clusters = [[token] for token in range(len(vectors))]
    while len(clusters) > count:
        pairs = itertools.combinations(clusters, 2)
        first, second = min(pairs, key=lambda pair: squares(pair[0] + pair[1]) - squares(pair[0]) - squares(pair[1]))
        clusters = [cluster for cluster in clusters if cluster not in (first, second)] + [sorted(first + second)]
    return sorted(clusters)


@pytest.mark.parametrize(("tokens", "factor"), [(1, 2), (2, 2), (9, 2), (14, 3), (12, 12)])
def test_clusters_are_wards(tokens: int, factor: int) -> None:
    vectors = draw_vectors((tokens, 6), tokens)
    count = -(-tokens // factor)
    expected = cluster_by_ward(vectors, count)
    numbers = cluster_tokens(vectors, count)
    assert sorted(np.flatnonzero(numbers == number).tolist() for number in range(count)) == expected
    means = np.stack([vectors[members].mean(0) for members in expected])
    means /= np.linalg.norm(means, axis=1, keepdims=True)
    assert np.allclose(pool_tokens(vectors, factor), means, atol=1e-6)


def test_equal_tokens_become_one() -> None:
    vectors = draw_vectors((5, 8), 0)[[0, 1, 2, 3, 4, 0, 1, 2, 3, 4]]
    assert np.allclose(pool_tokens(vectors, 2), vectors[:5], atol=1e-6)


def test_a_colbert_pools_its_passages_and_not_its_questions(tmp_path: Path) -> None:
    folder = save_colbert(tmp_path / "colbert")
    encoder, pooling_encoder = TokenEncoder.load(folder), TokenEncoder.load(folder, {"pool": 2})
    titles, texts = ["river", ""], ["the king of the river city", "queen"]
    full, pooled = encoder.encode_passages(titles, texts), pooling_encoder.encode_passages(titles, texts)
    assert np.diff(pooled.offsets).tolist() == [-(-count // 2) for count in np.diff(full.offsets).tolist()]
    first = full.vectors[: full.offsets[1]]
    assert np.allclose(pooled.vectors[: pooled.offsets[1]], pool_tokens(first, 2), atol=1e-5)
    assert (pooling_encoder.encode_questions(["who?"]) == encoder.encode_questions(["who?"])).all()
    assert compute_token_space(folder, pooling_encoder.spec).pooling == "tokens, pooled by 2"
    assert "pool" not in encoder.spec.to_json(), "files of earlier versions stay equal"
    assert encoder.spec.with_fields(pooling_encoder.spec.to_json()) == pooling_encoder.spec
    with pytest.raises(UsageError, match="pool of a ColBERT is 0: use 1 to 8"):
        TokenEncoder.load(folder, {"pool": 0})
