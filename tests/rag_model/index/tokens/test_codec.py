"""Codecs: ColBERTv2's equals a numpy implementation byte for byte, and product quantizers lose less than it."""

from pathlib import Path

import numpy as np
import pytest

from rag_model.errors import InputError, UsageError
from rag_model.index.tokens import codec as centroids
from rag_model.index.tokens.codec import ResidualBits, ResidualProducts, parse_codec_factory, read_codec, write_codec
from rag_model.index.tokens.kind import compute_reconstruction_loss

D = 32


def normalize(vectors: np.ndarray) -> np.ndarray:
    return (vectors / np.linalg.norm(vectors, axis=1, keepdims=True)).astype(np.float32)


@pytest.fixture(scope="module")
def vectors() -> np.ndarray:
    """Return unit vectors around some topics, with correlated components, like those of tokens."""
    random = np.random.default_rng(1)
    topics, mix = random.normal(size=(24, D)), random.normal(size=(D, D)) ** 3
    return normalize(topics[random.integers(24, size=6000)] * 2 + random.normal(size=(6000, D)) @ mix / 6)


def encode_plainly(sample: np.ndarray, cells: np.ndarray, vectors: np.ndarray, bits: int) -> tuple[np.ndarray, ...]:
    """Encode and decode with ColBERTv2's codec, in plain numpy (Santhanam et al. 2022, section 3.3)."""
    residuals = sample - cells[(sample @ cells.T).argmax(1)]
    cutoffs = np.quantile(residuals, [i / 2**bits for i in range(1, 2**bits)]).astype(np.float32)
    weights = np.quantile(residuals, [(i + 0.5) / 2**bits for i in range(2**bits)]).astype(np.float32)
    codes = (vectors @ cells.T).argmax(1)
    packed, rebuilt = [], []
    for vector, code in zip(vectors, codes, strict=True):
        buckets = [int((component > cutoffs).sum()) for component in vector - cells[code]]
        row_bytes = []
        for first in range(0, len(buckets), 8 // bits):
            byte = 0
            for position, bucket in enumerate(buckets[first : first + 8 // bits]):
                byte |= bucket << (position * bits)
            row_bytes.append(byte)
        packed.append(row_bytes)
        decoded = cells[code] + weights[buckets]
        rebuilt.append(decoded / np.sqrt((decoded * decoded).sum()))
    return codes, np.array(packed, np.uint8), np.array(rebuilt, np.float32), cutoffs, weights


@pytest.mark.parametrize("bits", [1, 2, 4])
def test_residual_bits_equal_colberts_codec(vectors: np.ndarray, bits: int) -> None:
    cells = centroids.train_centroids(vectors[:3000], 16, seed=3)
    codec = ResidualBits.train(vectors[:3000], cells, bits)
    ids, codes = codec.encode(vectors[3000:3500])
    expected = encode_plainly(vectors[:3000], cells, vectors[3000:3500], bits)
    assert (ids == expected[0]).all()
    assert codes.tobytes() == expected[1].tobytes()
    assert (codec.cutoffs == expected[3]).all()
    assert (codec.weights == expected[4]).all()
    assert np.abs(codec.decode(ids, codes) - expected[2]).max() < 1e-6
    assert codes.shape[1] == D * bits // 8


def test_centroids_are_unit_vectors_and_as_many_as_the_paper_says() -> None:
    assert [centroids.compute_ideal_centroid_count(n) for n in (1, 200_000, 2_500_000_000)] == [16, 4096, 1 << 19]
    assert centroids.choose_centroid_count(200_000, 200_000) == 4096
    assert centroids.choose_centroid_count(200_000, 1000) == 16
    assert centroids.choose_centroid_count(3, 3) == 1
    trained_centroids = centroids.train_centroids(normalize(np.random.default_rng(0).normal(size=(400, D))), 8, seed=0)
    assert np.linalg.norm(trained_centroids, axis=1) == pytest.approx(np.ones(8), abs=1e-5)


def test_at_equal_bytes_a_product_quantizer_loses_less(vectors: np.ndarray) -> None:
    cells = centroids.train_centroids(vectors, 16, seed=3)
    losses = {}
    for factory in ("MaxSim,Bits2", "MaxSim,PQ8", "MaxSim,PQ16x4"):
        codec = parse_codec_factory(factory, D).train(vectors, cells)
        assert codec.width == 8
        losses[factory] = compute_reconstruction_loss(codec, vectors)
    assert max(losses["MaxSim,PQ8"], losses["MaxSim,PQ16x4"]) < losses["MaxSim,Bits2"]


@pytest.mark.parametrize("factory", ["MaxSim,Bits2", "MaxSim,PQ8", "MaxSim,PQ16x4"])
def test_a_codec_is_read_back(vectors: np.ndarray, tmp_path: Path, factory: str) -> None:
    codec = parse_codec_factory(factory, D).train(vectors, centroids.train_centroids(vectors, 16, seed=3))
    write_codec(codec, tmp_path / "codec")
    loaded = read_codec(tmp_path / "codec")
    ids, codes = codec.encode(vectors[:50])
    assert (loaded.encode(vectors[:50])[1] == codes).all()
    assert (loaded.decode(ids, codes) == codec.decode(ids, codes)).all()
    data = (tmp_path / "codec").read_bytes()
    for damaged in (b"", data[:-1], b"\xff" * len(data), data.replace(b"Residual", b"Unknown_")):
        (tmp_path / "codec").write_bytes(damaged)
        with pytest.raises(InputError):
            read_codec(tmp_path / "codec")


def test_few_tokens_train_a_codec(vectors: np.ndarray) -> None:
    codec = ResidualProducts.train(vectors[:20], centroids.train_centroids(vectors[:20], 1, seed=0), 8, 8)
    assert compute_reconstruction_loss(codec, vectors[:20]) < 0.05


def test_default_is_a_byte_for_four_components() -> None:
    assert str(parse_codec_factory("MaxSim", 128)) == "MaxSim,PQ32"
    assert str(parse_codec_factory("MaxSim", 96)) == "MaxSim,PQ24"
    assert (
        parse_codec_factory("MaxSim,Bits2", 128).width(128)
        == parse_codec_factory("MaxSim,PQ64x4", 128).width(128)
        == 32
    )


@pytest.mark.parametrize("factory", ["MaxSim,Bits3", "MaxSim,PQ7", "MaxSim,PQ9x4", "MaxSim,PQ0", "MaxSim,"])
def test_a_wrong_codec_is_refused(factory: str) -> None:
    with pytest.raises(UsageError):
        parse_codec_factory(factory, D)
