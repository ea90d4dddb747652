"""Encode each token vector as the id of a centroid and a code of the residual.

The centroids are unit vectors, and a vector is assigned to the centroid with the largest inner
product. The residual is the vector minus its centroid. A decoded vector is scaled to length 1.

| factory | residual |
| --- | --- |
| `MaxSim,Bits2` | 2 bits a component, by quantiles of all residuals: ColBERTv2's codec (`bits`) |
| `MaxSim,PQ32`, `MaxSim,PQ64x4` | a product quantizer (`products`): 32 codes of 8 bits; 64 of 4 |
| `MaxSim` | the default: `PQ32`, or the nearest that divides the dimensions |
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import log2
from pathlib import Path
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from rag_model.errors import InputError, ResourceError, UsageError
from rag_model.index.factory import find_largest_divisor
from rag_model.index.files import engine
from rag_model.index.files.engine import FaissIndex, Vectors, faiss
from rag_model.index.files.tensors import TensorStream, read_tensors, write_tensors
from rag_model.index.recipe import POINTS_PER_LIST

FACTORY_NAME = "MaxSim"
_FACTORY_PATTERN = re.compile(FACTORY_NAME + r"(?:,(?:Bits(?P<bits>\d+)|PQ(?P<pieces>\d+)(?P<narrow>x4)?))?")
_BITS_CHOICES = (1, 2, 4, 8)  # bits per component of `ResidualBits`
Array = npt.NDArray[Any]
_KMEANS_ROUNDS = 8  # of the centroids; ColBERTv2's code has 4
# Number of tokens whose residuals determine the quantiles: 8 million values at 128 dimensions.
_SAMPLE_TOKENS = 1 << 16
_WEIGHT_COUNTS = (2, 4, 16, 256)  # valid lengths of `weights`, for codes of 1, 2, 4 or 8 bits
_BLOCK_TOKENS = 1 << 14  # number of tokens that are encoded at a time
_POINTS_PER_CENTROID = 256  # training tokens per centroid of a sub-quantizer, as in faiss


_MAX_UINT16_CENTROIDS = 1 << 16  # up to this number of centroids, an id has two bytes, else four
CentroidIds = npt.NDArray[np.unsignedinteger]


def check_float_array(array: npt.NDArray[Any], n_axes: int) -> None:
    """Raise ValueError unless an array is float32, finite, and has `n_axes` axes."""
    if array.dtype != np.float32 or array.ndim != n_axes or not np.isfinite(array).all():
        raise ValueError(f"the array is not finite, not float32, or does not have {n_axes} axes")


def compute_ideal_centroid_count(n_tokens: int) -> int:
    """Return 2^floor(log2(16 sqrt n)), the number of centroids for n tokens.

    Source: Santhanam et al. 2022 (ColBERTv2), section 3.3, and its code,
        `indexing/collection_indexer.py`.
    """
    return 1 << int(log2(16 * max(1, n_tokens) ** 0.5))


def choose_sample_size(n_tokens: int) -> int:
    """Return the number of tokens to train with: enough for all centroids, at most half a million
    (256 MB).
    """
    return min(n_tokens, max(1 << 16, min(1 << 19, POINTS_PER_LIST * compute_ideal_centroid_count(n_tokens))))


def choose_centroid_count(n_tokens: int, n_samples: int) -> int:
    """Return the number of centroids for n tokens: the ideal one, or the largest power of two that
    the sample can train if that is less.
    """
    max_count = max(1, n_samples // POINTS_PER_LIST)
    return min(compute_ideal_centroid_count(n_tokens), 1 << (max_count.bit_length() - 1))


def train_centroids(sample: Vectors, count: int, seed: int) -> Vectors:
    """Return (count, d) float32 unit vectors, trained by spherical k-means on (t, d) vectors.

    Raises:
        ResourceError: memory ran out.
    """
    kmeans = faiss.Kmeans(
        sample.shape[1],
        count,
        niter=_KMEANS_ROUNDS,
        seed=1 + seed,
        spherical=True,
        min_points_per_centroid=1,
        max_points_per_centroid=len(sample),
    )
    with engine.translate_errors(ResourceError, f"{len(sample)} tokens could not be cut into {count} cells: use fewer"):
        kmeans.train(sample)
    centroids: Vectors = kmeans.centroids
    return centroids


def assign_centroids(centroids: Vectors, vectors: Vectors) -> CentroidIds:
    """Return the centroid of each of (t, d) vectors, by inner product: (t,) uint16 or uint32."""
    dtype = np.uint16 if len(centroids) <= _MAX_UINT16_CENTROIDS else np.uint32
    if not len(vectors):
        return np.empty(0, dtype)
    with engine.translate_errors(InputError, "token vectors do not fit the centroids: train the index again"):
        _, nearest_ids = faiss.knn(vectors, centroids, 1, metric=faiss.METRIC_INNER_PRODUCT)
    ids: CentroidIds = nearest_ids[:, 0].astype(dtype)  # (t, 1) -> (t,)
    return ids


def normalize(vectors: Vectors) -> Vectors:
    """Return vectors scaled to length 1."""
    norms = np.sqrt(np.einsum("td,td->t", vectors, vectors))[:, None]
    unit_vectors: Vectors = vectors / np.maximum(norms, np.float32(1e-12))
    return unit_vectors


@dataclass(frozen=True, slots=True)
class ResidualBits:
    """ColBERTv2's codec: b bits per component of the residual, by quantiles (Santhanam et al. 2022,
    section 3.3).

    All components share one set of quantiles: 2^b - 1 cut-offs at i / 2^b, and 2^b weights at (i +
    .5) / 2^b.
    """

    centroids: Vectors  # (K, d)
    cutoffs: npt.NDArray[np.float32]  # (2^b - 1,) ascending
    weights: npt.NDArray[np.float32]  # (2^b,) decoded component of each code

    @classmethod
    def train(cls, sample: Vectors, centroids: Vectors, bits: int) -> Self:
        """Compute the quantiles of (t, d) unit vectors."""
        training_vectors = sample[:: max(1, len(sample) // _SAMPLE_TOKENS)]
        residuals = training_vectors - centroids[assign_centroids(centroids, training_vectors)]
        quantiles = np.arange(1 << bits) / (1 << bits)
        midpoints = quantiles + 0.5 / (1 << bits)
        cutoffs, weights = np.quantile(residuals, quantiles[1:]), np.quantile(residuals, midpoints)
        return cls(centroids, cutoffs.astype(np.float32), weights.astype(np.float32))

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, npt.NDArray[Any]]) -> Self:
        """Create a codec from the result of `arrays`.

        Raise ValueError if the arrays do not fit each other.
        """
        codec = cls(arrays["centroids"], arrays["cutoffs"], arrays["weights"])
        check_float_array(codec.centroids, 2)
        check_float_array(codec.cutoffs, 1)
        check_float_array(codec.weights, 1)
        if len(codec.cutoffs) + 1 != len(codec.weights) or len(codec.weights) not in _WEIGHT_COUNTS:
            raise ValueError("the cut-offs and weights do not fit each other")
        return codec

    def arrays(self) -> Mapping[str, npt.NDArray[Any]]:
        """Return the trained arrays by name."""
        return {"centroids": self.centroids, "cutoffs": self.cutoffs, "weights": self.weights}

    @property
    def bits(self) -> int:
        """Bits per component."""
        return len(self.weights).bit_length() - 1

    @property
    def width(self) -> int:
        """Bytes of a residual's code."""
        return int(self.centroids.shape[1]) * self.bits // 8

    def encode(self, vectors: Vectors) -> tuple[CentroidIds, npt.NDArray[np.uint8]]:
        """Return (t,) centroids and (t, width) codes of residuals.

        The first component is in the low bits.
        """
        ids = assign_centroids(self.centroids, vectors)
        codes = np.empty((len(vectors), self.width), np.uint8)
        shifts = np.arange(8 // self.bits, dtype=np.uint8) * np.uint8(self.bits)
        for first_vector in range(0, len(vectors), _BLOCK_TOKENS):
            block = slice(first_vector, first_vector + _BLOCK_TOKENS)
            buckets = np.searchsorted(self.cutoffs, vectors[block] - self.centroids[ids[block]]).astype(np.uint8)
            # (t, d) -> (t, width, 8 / b) -> (t, width)
            codes[block] = (buckets.reshape(len(buckets), self.width, -1) << shifts).sum(2, dtype=np.uint8)
        return ids, codes

    def decode(self, ids: CentroidIds, codes: npt.NDArray[np.uint8]) -> Vectors:
        """Return (t, d) float32 unit vectors."""
        decoded_vectors = self.centroids[ids]
        # (t, width) -> (t, width, 8 / b) -> (t, d)
        decoded_vectors += self._build_table()[codes].reshape(decoded_vectors.shape)
        return normalize(decoded_vectors)

    def _build_table(self) -> Vectors:
        """Return the weights of the codes in each possible byte, (256, 8 / b)."""
        shifts = np.arange(8 // self.bits) * self.bits
        table: Vectors = self.weights[np.arange(256)[:, None] >> shifts & (len(self.weights) - 1)]
        return table


@dataclass(frozen=True, slots=True)
class ResidualProducts:
    """A product quantizer of the residual with M sub-quantizers (Jégou et al. 2011).

    Each sub-vector of the residual is replaced by one of 2^b learned vectors. `ResidualBits`
    loses more with as many bytes, because it ignores correlations between components, and spends as
    many bits on components that hardly vary as on all others.
    """

    centroids: Vectors  # (K, d)
    codebooks: Vectors  # (M, 2^b, d / M)
    quantizer: FaissIndex = field(repr=False, compare=False)  # of faiss, with the codebooks

    @classmethod
    def train(cls, sample: Vectors, centroids: Vectors, n_pieces: int, bits: int) -> Self:
        """Train the codebooks with (t, d) unit vectors.

        Raises:
            ResourceError: memory ran out.
        """
        training_vectors = sample[:: max(1, len(sample) // (_POINTS_PER_CENTROID << bits))]
        quantizer = faiss.ProductQuantizer(sample.shape[1], n_pieces, bits)
        quantizer.cp.min_points_per_centroid = 1
        if len(training_vectors) < 1 << bits:  # k-means needs as many points as centroids
            training_vectors = np.resize(training_vectors, (1 << bits, training_vectors.shape[1]))
        with engine.translate_errors(
            ResourceError, f"{len(training_vectors)} residuals could not train {n_pieces} pieces: use fewer"
        ):
            quantizer.train(
                np.ascontiguousarray(training_vectors - centroids[assign_centroids(centroids, training_vectors)])
            )
        codebooks = engine.copy_array(quantizer.centroids).reshape(n_pieces, 1 << bits, -1)
        return cls(centroids, codebooks, quantizer)

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, npt.NDArray[Any]]) -> Self:
        """Create a codec from the result of `arrays`.

        Raise ValueError if the arrays do not fit each other.
        """
        centroids, codebooks = arrays["centroids"], arrays["books"]
        check_float_array(centroids, 2)
        check_float_array(codebooks, 3)
        n_pieces, centroids_per_piece, piece_width = codebooks.shape
        if centroids.shape[1] != n_pieces * piece_width or centroids_per_piece not in (16, 256):
            raise ValueError("the codebooks do not fit the centroids")
        quantizer = faiss.ProductQuantizer(n_pieces * piece_width, n_pieces, centroids_per_piece.bit_length() - 1)
        faiss.copy_array_to_vector(np.ascontiguousarray(codebooks, np.float32).reshape(-1), quantizer.centroids)
        return cls(centroids, codebooks, quantizer)

    def arrays(self) -> Mapping[str, npt.NDArray[Any]]:
        """Return the trained arrays by name."""
        return {"centroids": self.centroids, "books": self.codebooks}

    @property
    def width(self) -> int:
        """Bytes of a residual's code."""
        return int(self.quantizer.code_size)

    def encode(self, vectors: Vectors) -> tuple[CentroidIds, npt.NDArray[np.uint8]]:
        """Return (t,) centroids and (t, width) codes of residuals, as faiss packs them."""
        ids = assign_centroids(self.centroids, vectors)
        if not len(ids):
            return ids, np.empty((0, self.width), np.uint8)
        with engine.translate_errors(InputError, "token vectors do not fit the codec: train the index again"):
            codes: npt.NDArray[np.uint8] = self.quantizer.compute_codes(vectors - self.centroids[ids])
        return ids, codes

    def decode(self, ids: CentroidIds, codes: npt.NDArray[np.uint8]) -> Vectors:
        """Return (t, d) float32 unit vectors."""
        decoded_vectors = self.centroids[ids]
        if len(ids):
            decoded_vectors += self.quantizer.decode(np.ascontiguousarray(codes))
        return normalize(decoded_vectors)


# a trained codec, which encodes unit vectors and decodes them
Codec = ResidualBits | ResidualProducts


@dataclass(frozen=True, slots=True)
class CodecFormat:
    """The type and the size of the codec that a factory string describes."""

    bits: int | None = None  # bits per component, by quantiles; None for a product quantizer
    pieces: int = 0  # number of sub-quantizers of the product quantizer
    piece_bits: int = 8  # bits of a sub-quantizer's code

    def __str__(self) -> str:
        """Return the factory string."""
        if self.bits:
            return f"{FACTORY_NAME},Bits{self.bits}"
        return f"{FACTORY_NAME},PQ{self.pieces}{'x4' if self.piece_bits == 4 else ''}"

    def width(self, d: int) -> int:
        """Return the bytes of a residual's code."""
        return d * self.bits // 8 if self.bits else self.pieces * self.piece_bits // 8

    def train(self, sample: Vectors, centroids: Vectors) -> Codec:
        """Train the codec with (t, d) unit vectors."""
        if self.bits:
            return ResidualBits.train(sample, centroids, self.bits)
        return ResidualProducts.train(sample, centroids, self.pieces, self.piece_bits)


def is_token_factory(factory: str) -> bool:
    """Return whether a factory string describes a token-vector index."""
    return factory.partition(",")[0] == FACTORY_NAME


def parse_codec_factory(factory: str, d: int | None = None) -> CodecFormat:
    """Parse a factory string; defaults are chosen for `d` dimensions.

    Raises:
        UsageError: the string names no codec of token vectors, or does not fit `d` dimensions.
    """
    match = _FACTORY_PATTERN.fullmatch(factory)
    if match is None:
        raise UsageError(f"{factory!r} is not a codec of token vectors: use MaxSim, MaxSim,Bits2 or MaxSim,PQ32")
    if match["bits"]:
        codec_format = CodecFormat(bits=int(match["bits"]))
        if codec_format.bits not in _BITS_CHOICES or (d is not None and d * codec_format.bits % 8):
            raise UsageError(f"{factory} does not fill bytes: use 1, 2, 4 or 8 bits, and a multiple of 8 dimensions")
        return codec_format
    n_pieces = int(match["pieces"] or (find_largest_divisor(d, d // 4) or 1 if d else 0))
    codec_format = CodecFormat(pieces=n_pieces, piece_bits=4 if match["narrow"] else 8)
    if match["pieces"] and (
        n_pieces < 1 or (d is not None and d % n_pieces) or (codec_format.piece_bits == 4 and n_pieces % 2)
    ):
        raise UsageError(f"{factory} cannot cut {d or 'the'} dimensions into {n_pieces} pieces: use a divisor of them")
    return codec_format


def write_codec(codec: Codec, path: Path) -> None:
    """Write a trained codec to a small file, which all workers read."""
    write_tensors(path, list_codec_streams(codec), {"codec": type(codec).__name__})


def list_codec_streams(codec: Codec) -> list[TensorStream]:
    """Return the arrays of a codec as tensors to write."""
    return [TensorStream(name, array.dtype, array.shape, [array]) for name, array in codec.arrays().items()]


def read_codec(path: Path) -> Codec:
    """Read a trained codec.

    Raises:
        InputError: the file is missing or damaged, or does not contain a codec.
    """
    arrays, metadata = read_tensors(path, mmap=False)
    return create_codec(arrays, metadata, path)


def create_codec(arrays: Mapping[str, Array], metadata: Mapping[str, str], path: Path) -> Codec:
    """Create a codec from the arrays and the metadata of a file.

    Raises:
        InputError: the arrays do not describe a codec.
    """
    codec_by_name = {codec.__name__: codec for codec in (ResidualBits, ResidualProducts)}
    try:
        return codec_by_name[metadata["codec"]].from_arrays(arrays)
    except (KeyError, ValueError, TypeError, IndexError) as error:
        raise InputError(f"{path} does not contain a codec of token vectors: build it again") from error
