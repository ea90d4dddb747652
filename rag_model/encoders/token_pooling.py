"""Token pooling: the tokens of a passage in fewer vectors, each the mean of tokens that resemble one another.

Source: Clavié, Chaffin and Adams 2024, "Reducing the Footprint of Multi-Vector Retrieval with Minimal Performance
Impact via Token Pooling" (arXiv 2409.14683), section 2: hierarchical clustering by Ward's criterion into a share of the
tokens, and the mean of each cluster; here at length 1, as MaxSim compares cosines.
"""

import numpy as np
import numpy.typing as npt

from rag_model.encoders.encoder import Vectors


def pooled(vectors: Vectors, factor: int) -> Vectors:
    """Return (ceil(t / factor), d) float32 unit vectors of (t, d) unit vectors, in the order of their first tokens."""
    count = -(-len(vectors) // factor)
    if count == len(vectors):
        return vectors
    sums = np.zeros((count, vectors.shape[1]), np.float32)
    np.add.at(sums, clusters(vectors, count), vectors)  # (t,), (t, d) -> (count, d)
    found: Vectors = sums / np.maximum(np.linalg.norm(sums, axis=1, keepdims=True), np.float32(1e-12))
    return found


def clusters(vectors: Vectors, count: int) -> npt.NDArray[np.int64]:
    """Return the (t,) cluster of each token, numbered from 0 by first tokens; of equal distances the first is taken.

    From one cluster a token on, the two are joined whose union adds least to the sum of squared distances from the
    means (Ward 1963), until `count` are left. The distances after a step follow from those before (Lance and Williams
    1967): d(k, i+j) = ((k + i) d(k, i) + (k + j) d(k, j) - k d(i, j)) / (k + i + j), by the sizes k, i and j.
    """
    n = len(vectors)
    exact = vectors.astype(np.float64)
    lengths = np.einsum("td,td->t", exact, exact)
    apart = lengths[:, None] + lengths[None, :] - 2 * exact @ exact.T  # (t, t) squared distances
    np.fill_diagonal(apart, np.inf)
    sizes, own = np.ones(n), np.arange(n)
    for _ in range(n - count):
        i, j = sorted(divmod(int(apart.argmin()), n))
        joined = (sizes + sizes[i]) * apart[i] + (sizes + sizes[j]) * apart[j] - sizes * apart[i, j]
        joined /= sizes + sizes[i] + sizes[j]
        apart[i] = apart[:, i] = joined  # inf where a cluster is gone, and for i itself
        apart[j] = apart[:, j] = np.inf
        sizes[i] += sizes[j]
        own[own == j] = i
    numbers: npt.NDArray[np.int64] = np.unique(own, return_inverse=True)[1]
    return numbers
