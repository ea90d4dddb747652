"""Check queries in one place, so that every index refuses the same inputs."""

from math import isfinite
from typing import Any

import numpy as np
import numpy.typing as npt

from rag_model.errors import UsageError
from rag_model.index.files.engine import Vectors


def check_question(vectors: npt.NDArray[Any], k: int, n: int, dim: int) -> Vectors:
    """Return `vectors` as contiguous float32 if they and `k` fit an index of `n` vectors.

    Raises:
        UsageError: wrong shape, a NaN or an infinity, or `k` outside 1 … n.
    """
    if vectors.ndim != 2 or vectors.shape[1] != dim:
        raise UsageError(f"vectors of shape {vectors.shape} do not fit an index of {dim} dimensions: give (q, {dim})")
    if not 1 <= k <= n:
        raise UsageError(f"k is {k} but the index holds {n} vectors: ask for 1 to {n}")
    if not isfinite(np.vdot(vectors, vectors)):  # cheaper than checking each number; large numbers may overflow it too
        bad = np.flatnonzero(~np.isfinite(vectors).all(axis=1))
        if len(bad):
            raise UsageError(f"vector {bad[0]} of the query holds a NaN or an infinity: encode it again")
    return np.ascontiguousarray(vectors, dtype=np.float32)
