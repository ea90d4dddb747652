"""Centroids of token vectors: unit vectors, and the one with the largest inner product for each token."""

from math import log2
from typing import Any

import numpy as np
import numpy.typing as npt

from rag_model.errors import InputError, ResourceError
from rag_model.index.files import engine
from rag_model.index.files.engine import Vectors, faiss
from rag_model.index.recipe import POINTS_PER_LIST

_ROUNDS = 8  # of k-means; ColBERTv2's code has 4
_SMALL = 1 << 16  # up to so many centroids an id has two bytes, else four
CentroidIds = npt.NDArray[np.unsignedinteger]


def check_numbers(array: npt.NDArray[Any], axes: int) -> None:
    """Check an array of a file: float32, finite, of so many axes; a ValueError if not."""
    if array.dtype != np.float32 or array.ndim != axes or not np.isfinite(array).all():
        raise ValueError("numbers that no codec has")


def wanted(tokens: int) -> int:
    """Return 2^floor(log2(16 sqrt n)), the number of centroids for n tokens.

    Source: Santhanam et al. 2022 (ColBERTv2), section 3.3, and its code, `indexing/collection_indexer.py`.
    """
    return 1 << int(log2(16 * max(1, tokens) ** 0.5))


def sample_size(tokens: int) -> int:
    """Return how many tokens of n train: as many as the wanted centroids need, at most half a million (256 MB)."""
    return min(tokens, max(1 << 16, min(1 << 19, POINTS_PER_LIST * wanted(tokens))))


def affordable(tokens: int, sample: int) -> int:
    """Return the wanted number of centroids, or the largest power of two that a sample can train."""
    most = max(1, sample // POINTS_PER_LIST)
    return min(wanted(tokens), 1 << (most.bit_length() - 1))


def learn(sample: Vectors, count: int, seed: int) -> Vectors:
    """Return (count, d) float32 unit vectors: spherical k-means of a sample, (t, d).

    Raises:
        ResourceError: memory ran out.
    """
    kmeans = faiss.Kmeans(
        sample.shape[1],
        count,
        niter=_ROUNDS,
        seed=1 + seed,
        spherical=True,
        min_points_per_centroid=1,
        max_points_per_centroid=len(sample),
    )
    with engine.guarded(ResourceError, f"{len(sample)} tokens could not be cut into {count} cells: use fewer"):
        kmeans.train(sample)
    centroids: Vectors = kmeans.centroids
    return centroids


def nearest(centroids: Vectors, vectors: Vectors) -> CentroidIds:
    """Return the centroid with the largest inner product for each of (t, d) vectors: (t,) uint16 or uint32."""
    dtype = np.uint16 if len(centroids) <= _SMALL else np.uint32
    if not len(vectors):
        return np.empty(0, dtype)
    with engine.guarded(InputError, "token vectors do not fit the centroids: train the index again"):
        _, found = faiss.knn(vectors, centroids, 1, metric=faiss.METRIC_INNER_PRODUCT)
    ids: CentroidIds = found[:, 0].astype(dtype)  # (t, 1) -> (t,)
    return ids


def unit(vectors: Vectors) -> Vectors:
    """Return vectors scaled to length 1."""
    lengths = np.sqrt(np.einsum("td,td->t", vectors, vectors))[:, None]
    scaled: Vectors = vectors / np.maximum(lengths, np.float32(1e-12))
    return scaled
