"""A product quantizer of the residual: at equal bytes it loses less than a number for each component.

A quantile a component ignores that components of a residual go together, and spends as much on those that do not vary.
A product quantizer (Jégou et al. 2011) learns one of 2^b small vectors for each piece of the residual.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from rag_model.errors import InputError, ResourceError
from rag_model.index.files import engine
from rag_model.index.files.engine import FaissIndex, Vectors, faiss
from rag_model.index.tokens.centroids import CentroidIds, check_numbers, nearest, unit

_POINTS = 256  # training tokens for each of a piece's vectors, as faiss takes them


@dataclass(frozen=True, slots=True)
class ResidualProducts:
    """A trained codec of M pieces."""

    centroids: Vectors  # (K, d)
    books: Vectors  # (M, 2^b, d / M)
    quantizer: FaissIndex = field(repr=False, compare=False)

    @classmethod
    def train(cls, sample: Vectors, centroids: Vectors, pieces: int, bits: int) -> Self:
        """Learn the pieces' vectors from (t, d) unit vectors.

        Raises:
            ResourceError: memory ran out.
        """
        some = sample[:: max(1, len(sample) // (_POINTS << bits))]
        quantizer = faiss.ProductQuantizer(sample.shape[1], pieces, bits)
        quantizer.cp.min_points_per_centroid = 1
        if len(some) < 1 << bits:  # a small corpus: k-means needs as many points as centroids
            some = np.resize(some, (1 << bits, some.shape[1]))
        with engine.guarded(ResourceError, f"{len(some)} residuals could not train {pieces} pieces: use fewer"):
            quantizer.train(np.ascontiguousarray(some - centroids[nearest(centroids, some)]))
        books = engine.array_of(quantizer.centroids).reshape(pieces, 1 << bits, -1)
        return cls(centroids, books, quantizer)

    @classmethod
    def of(cls, arrays: Mapping[str, npt.NDArray[Any]]) -> Self:
        """Return the codec from the result of `arrays`; a ValueError if they do not fit each other."""
        centroids, books = arrays["centroids"], arrays["books"]
        check_numbers(centroids, 2)
        check_numbers(books, 3)
        pieces, many, piece = books.shape
        if centroids.shape[1] != pieces * piece or many not in (16, 256):
            raise ValueError("pieces that do not fit the centroids")
        quantizer = faiss.ProductQuantizer(pieces * piece, pieces, many.bit_length() - 1)
        faiss.copy_array_to_vector(np.ascontiguousarray(books, np.float32).reshape(-1), quantizer.centroids)
        return cls(centroids, books, quantizer)

    def arrays(self) -> Mapping[str, npt.NDArray[Any]]:
        """Return all that it has learnt, by name."""
        return {"centroids": self.centroids, "books": self.books}

    @property
    def width(self) -> int:
        """Bytes of a residual's code."""
        return int(self.quantizer.code_size)

    def encode(self, vectors: Vectors) -> tuple[CentroidIds, npt.NDArray[np.uint8]]:
        """Return the centroids, (t,), and the residuals' codes, (t, width), as faiss packs them."""
        ids = nearest(self.centroids, vectors)
        if not len(ids):
            return ids, np.empty((0, self.width), np.uint8)
        with engine.guarded(InputError, "token vectors do not fit the codec: train the index again"):
            codes: npt.NDArray[np.uint8] = self.quantizer.compute_codes(vectors - self.centroids[ids])
        return ids, codes

    def decode(self, ids: CentroidIds, codes: npt.NDArray[np.uint8]) -> Vectors:
        """Return (t, d) float32 unit vectors."""
        rebuilt = self.centroids[ids]
        if len(ids):
            rebuilt += self.quantizer.decode(np.ascontiguousarray(codes))
        return unit(rebuilt)
