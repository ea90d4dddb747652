"""How far live questions differ from those that a snapshot was evaluated with.

An evaluation is valid for questions like its own. If users ask other ones (another language, keywords instead of
sentences, a broken client), its figures no longer apply. This shows in the questions' vectors, without any labels.
"""

from typing import Self

import numpy as np
import numpy.typing as npt

from rag_model.errors import UsageError
from rag_model.index.files.engine import Vectors

LEAST = 20  # of either sample: of fewer the distance is mostly noise
MOST = 1000  # questions of a reference: more change nothing and cost time
_ALIKE = 1e-5  # of a vector's squared length: what rounding leaves of a distance of 0


class Reference:
    """A sample of questions that others are compared with: immutable once made."""

    def __init__(self, vectors: Vectors, bandwidth: float, alike: float) -> None:
        """Hold what `of` computed."""
        self._vectors, self._bandwidth, self._alike = vectors, bandwidth, alike

    @classmethod
    def of(cls, vectors: Vectors) -> Self:
        """Take (n, d) vectors as the reference.

        Raises:
            UsageError: there are fewer than 20, or all of them are equal.
        """
        if len(vectors) < LEAST:
            raise UsageError(f"{len(vectors)} questions are too few to measure drift against: give at least {LEAST}")
        squared = _squared(vectors, vectors)
        bandwidth = float(np.median(squared[np.triu_indices(len(vectors), 1)]))
        if bandwidth <= _ALIKE * float((vectors * vectors).sum(1).mean()):
            raise UsageError("the questions to measure drift against are all alike: give different ones")
        return cls(vectors, bandwidth, _among(np.exp(-squared / bandwidth)))

    def distance(self, vectors: Vectors) -> float:
        """Return how far (m, d) vectors, m >= 2, lie from the reference: 0 = drawn as it was, up to chance.

        The unbiased squared maximum mean discrepancy (Gretton et al. 2012, lemma 6) under a Gaussian kernel as wide as
        the median distance in the reference (their section 8), over the reference's variance in the kernel's space:

            (E k(x,x') + E k(y,y') - 2 E k(x,y)) / (1 - E k(x,x'))

        so 1 means that the two means lie a standard deviation apart, whatever the encoder and the number of questions.
        Slightly negative by chance. A Fréchet distance would estimate d² covariances from a few hundred vectors, and is
        biased upwards by that (Bińkowski et al. 2018): .17 between two halves of one set at 384 dimensions, where this
        is .000.
        """
        own = _among(np.exp(-_squared(vectors, vectors) / self._bandwidth))
        between = float(np.exp(-_squared(self._vectors, vectors) / self._bandwidth).mean())
        return (self._alike + own - 2 * between) / (1 - self._alike)


def _squared(one: Vectors, other: Vectors) -> npt.NDArray[np.float64]:
    """Return (n, m) squared distances."""
    x, y = one.astype(np.float64), other.astype(np.float64)
    squared: npt.NDArray[np.float64] = (x * x).sum(1)[:, None] + (y * y).sum(1)[None] - 2 * (x @ y.T)
    return np.maximum(squared, 0.0, out=squared)


def _among(kernel: npt.NDArray[np.float64]) -> float:
    """Return the mean over pairs of different rows."""
    n = len(kernel)
    return float((kernel.sum() - np.trace(kernel)) / (n * (n - 1)))
