"""ColBERTv2's codec: some bits for each component of the residual, by quantiles (Santhanam et al. 2022, section 3.3).

Code = the centroid with the largest inner product. Residual = vector - centroid. One set of quantiles for all
dimensions: 2^b - 1 cut-offs at i / 2^b, and 2^b weights at (i + .5) / 2^b. Rebuilt = centroid + weights, at length 1.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from rag_model.index.files.engine import Vectors
from rag_model.index.tokens.centroids import CentroidIds, check_numbers, nearest, unit

_RESIDUALS = 1 << 16  # tokens whose residuals give the quantiles: 8 million numbers at 128 dimensions
_WEIGHTS = (2, 4, 16, 256)  # those whose numbers fill bytes
_BLOCK = 1 << 14  # tokens encoded at a time


@dataclass(frozen=True, slots=True)
class ResidualBits:
    """A trained codec of b bits a component."""

    centroids: Vectors  # (K, d)
    cutoffs: npt.NDArray[np.float32]  # (2^b - 1,) ascending
    weights: npt.NDArray[np.float32]  # (2^b,)

    @classmethod
    def train(cls, sample: Vectors, centroids: Vectors, bits: int) -> Self:
        """Learn the quantiles from (t, d) unit vectors."""
        some = sample[:: max(1, len(sample) // _RESIDUALS)]
        residuals = some - centroids[nearest(centroids, some)]
        shares = np.arange(1 << bits) / (1 << bits)
        middle = shares + 0.5 / (1 << bits)
        cutoffs, weights = np.quantile(residuals, shares[1:]), np.quantile(residuals, middle)
        return cls(centroids, cutoffs.astype(np.float32), weights.astype(np.float32))

    @classmethod
    def of(cls, arrays: Mapping[str, npt.NDArray[Any]]) -> Self:
        """Return the codec from the result of `arrays`; a ValueError if they do not fit each other."""
        found = cls(arrays["centroids"], arrays["cutoffs"], arrays["weights"])
        check_numbers(found.centroids, 2)
        check_numbers(found.cutoffs, 1)
        check_numbers(found.weights, 1)
        if len(found.cutoffs) + 1 != len(found.weights) or len(found.weights) not in _WEIGHTS:
            raise ValueError("quantiles that do not fit each other")
        return found

    def arrays(self) -> Mapping[str, npt.NDArray[Any]]:
        """Return all that it has learnt, by name."""
        return {"centroids": self.centroids, "cutoffs": self.cutoffs, "weights": self.weights}

    @property
    def bits(self) -> int:
        """Bits of a component."""
        return len(self.weights).bit_length() - 1

    @property
    def width(self) -> int:
        """Bytes of a residual's code."""
        return int(self.centroids.shape[1]) * self.bits // 8

    def encode(self, vectors: Vectors) -> tuple[CentroidIds, npt.NDArray[np.uint8]]:
        """Return the centroids, (t,), and the residuals' codes, (t, width); the first component has the low bits."""
        ids = nearest(self.centroids, vectors)
        codes = np.empty((len(vectors), self.width), np.uint8)
        places = np.arange(8 // self.bits, dtype=np.uint8) * np.uint8(self.bits)
        for first in range(0, len(vectors), _BLOCK):
            part = slice(first, first + _BLOCK)
            buckets = np.searchsorted(self.cutoffs, vectors[part] - self.centroids[ids[part]]).astype(np.uint8)
            # (t, d) -> (t, width, 8 / b) -> (t, width)
            codes[part] = (buckets.reshape(len(buckets), self.width, -1) << places).sum(2, dtype=np.uint8)
        return ids, codes

    def decode(self, ids: CentroidIds, codes: npt.NDArray[np.uint8]) -> Vectors:
        """Return (t, d) float32 unit vectors."""
        rebuilt = self.centroids[ids]
        rebuilt += self._table()[codes].reshape(rebuilt.shape)  # (t, width) -> (t, width, 8 / b) -> (t, d)
        return unit(rebuilt)

    def _table(self) -> Vectors:
        """Return the weights that each byte stands for, (256, 8 / b)."""
        places = np.arange(8 // self.bits) * self.bits
        found: Vectors = self.weights[np.arange(256)[:, None] >> places & (len(self.weights) - 1)]
        return found
