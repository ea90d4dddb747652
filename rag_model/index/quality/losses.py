"""The error of approximations of vectors: by cells, lists and codes."""

import numpy as np

from rag_model.index.files.engine import Metric, Vectors


def relative_error(true: Vectors, decoded: Vectors) -> float:
    """Return the mean of |x - y|^2 / |x|^2 over rows x of `true` and y of `decoded`; rows of zeros are left out."""
    norms = np.square(true, dtype=np.float64).sum(axis=1)  # (m, d) -> (m,)
    errors = np.square(true - decoded, dtype=np.float64).sum(axis=1)
    return float((errors[norms > 0] / norms[norms > 0]).mean()) if norms.any() else 0.0


def distance(vectors: Vectors, centroids: Vectors, metric: Metric) -> float:
    """Return the distance of vectors to their centroids, row by row: for inner product the mean of 1 - cosine.

    For L2 it is `relative_error`. Centroids for inner product are directions, independent of the vectors' norms.
    """
    if metric == "l2":
        return relative_error(vectors, centroids)
    lengths = np.linalg.norm(vectors, axis=1) * np.linalg.norm(centroids, axis=1)
    products = np.einsum("ij,ij->i", vectors, centroids)  # (m, d), (m, d) -> (m,)
    return float((1 - products[lengths > 0] / lengths[lengths > 0]).mean()) if lengths.any() else 0.0
