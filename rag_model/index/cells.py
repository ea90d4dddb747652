"""Cells: how a corpus is cut so that HNSW graphs can be built apart and still be stitched into one.

k-means of a sample gives the centroids. Each vector belongs to its nearest cell. Those nearest to a border (`border`,
a share) join the second nearest cell's graph too, and the next nearest (`linked`, a share) are linked into it without
joining it: it is these two that tie neighbouring graphs together.

Where inner products are compared and norms vary, a vector of large norm is everybody's neighbour and one of small norm
nobody's. `Frame` then adds one dimension that makes all norms equal and no inner product with a question different:

    x' = [x, sqrt(phi^2 - |x|^2)],  q' = [q, 0],  <q', x'> = <q, x>

Source: Bachrach et al. Speeding up the Xbox recommender system using a Euclidean transformation for inner-product
spaces. RecSys 2014.
"""

from dataclasses import dataclass
from typing import Self

import numpy as np
import numpy.typing as npt

from rag_model.errors import ResourceError
from rag_model.index import engine
from rag_model.index.engine import FaissIndex, Vectors, faiss
from rag_model.index.pieces import Array
from rag_model.index.recipe import IndexPlan

_POINTS = 1_000  # training points a cell: enough for borders to repeat from sample to sample
_ROUNDS = 10
_UNEQUAL = 0.01  # norms whose standard deviation is a larger share of their mean are not normalised vectors'
_WHOLE = 0.75  # share of the cells that k-means makes; the rest come of splitting the largest

CellIds = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Frame:
    """The space in which vectors are linked."""

    norm: float  # phi, of every vector with its added dimension; 0: none is added

    @classmethod
    def of(cls, plan: IndexPlan, sample: Vectors) -> Self:
        """Choose for a sample, (m, d) float32: L2 never needs the dimension, inner products where norms vary."""
        norms = np.sqrt(np.square(sample, dtype=np.float64).sum(axis=1))
        wanted = plan.augment if plan.augment is not None else bool(norms.std() > _UNEQUAL * norms.mean())
        return cls(float(norms.max()) if wanted and plan.metric == "ip" else 0.0)

    def lift(self, vectors: Vectors) -> Vectors:
        """Return (m, d) float32 as they are, or (m, d + 1) of equal norm; where a norm is above phi it stays so."""
        if not self.norm:
            return vectors
        lacking = np.maximum(self.norm**2 - np.square(vectors).sum(axis=1), 0.0)
        return np.hstack([vectors, np.sqrt(lacking)[:, None].astype(np.float32)])


@dataclass(frozen=True, slots=True)
class Cells:
    """What is learnt of a corpus before it is cut."""

    frame: Frame
    centroids: Vectors  # (c, d or d + 1) float32, c <= the plan's cells; the cells beyond c stay empty
    border: float  # margins below this one are a border's: |similarity to the first centroid - to the second|
    linked: float  # other margins below this one are linked across it

    def arrays(self) -> list[Array]:
        """Return the cells as arrays."""
        return [np.array([self.frame.norm, self.border, self.linked]), self.centroids]

    @classmethod
    def of(cls, numbers: Array, centroids: Array) -> Self:
        """Return the cells of what `arrays` gave."""
        norm, border, linked = numbers.tolist()
        return cls(Frame(norm), centroids, border, linked)

    def assign(self, metric: engine.Metric, vectors: Vectors) -> tuple[CellIds, CellIds, CellIds]:
        """Return each vector's cell, the cell whose graph holds it too, and the one that it is linked into.

        Args:
            metric: the plan's.
            vectors: (m, d or d + 1) float32, lifted.

        Returns:
            Three (m,) int64; -1 where there is none. The last two are never both set.
        """
        if len(self.centroids) == 1:
            none = np.full(len(vectors), -1, np.int64)
            return np.zeros(len(vectors), np.int64), none, none
        near, cells = _flat(self.centroids, metric).search(vectors, 2)
        margin = np.abs(near[:, 0] - near[:, 1])
        joins, links = margin < self.border, margin < self.linked
        return cells[:, 0], np.where(joins, cells[:, 1], -1), np.where(links & ~joins, cells[:, 1], -1)


def learn(plan: IndexPlan, sample: Vectors) -> Cells:
    """Cut a sample, (m, d) float32, into `plan.cells` cells of about equal size, fewer where its points are few.

    Raises:
        ResourceError: memory ran out.
    """
    frame = Frame.of(plan, sample)
    points = frame.lift(sample)
    if plan.cells == 1:
        return Cells(frame, points[:1] * 0, -1.0, -1.0)
    with engine.guarded(ResourceError, f"{len(sample)} vectors could not be cut into {plan.cells} cells: give fewer"):
        centroids = _centroids(plan, points)
        near = _flat(centroids, plan.metric).search(points, min(2, len(centroids)))[0]
    if len(centroids) == 1:
        return Cells(frame, centroids, -1.0, -1.0)
    margin = np.abs(near[:, 0] - near[:, 1])
    border = float(np.quantile(margin, plan.border)) if plan.border else -1.0
    linked = float(np.quantile(margin, min(1.0, plan.border + plan.linked))) if plan.linked else -1.0
    return Cells(frame, centroids, border, linked)


def sample_size(plan: IndexPlan) -> int:
    """Return how many vectors `learn` wants to see."""
    return min(plan.n, max(_POINTS * plan.cells, 4 * _POINTS))


def _centroids(plan: IndexPlan, points: Vectors) -> Vectors:
    """Return at most `plan.cells` centroids: k-means, then the largest cell split in two, again and again.

    k-means alone leaves cells of two and three times the mean, and the largest one is what everybody waits for.
    """
    centroids = _kmeans(plan, points, max(2, round(_WHOLE * plan.cells)))
    cell = _flat(centroids, plan.metric).search(points, 1)[1][:, 0]
    whole: set[int] = set()  # cells of equal points, which nothing splits
    while len(centroids) < plan.cells:
        sizes = np.bincount(cell, minlength=len(centroids))
        sizes[list(whole)] = 0
        largest = int(sizes.argmax())
        if sizes[largest] < 2:
            break
        own = np.flatnonzero(cell == largest)
        halves = _kmeans(plan, points[own], 2)
        half = _flat(halves, plan.metric).search(points[own], 1)[1][:, 0]
        if half.all() or not half.any():
            whole.add(largest)
            continue
        centroids = np.vstack([centroids, halves[1:]])
        centroids[largest] = halves[0]
        cell[own[half == 1]] = len(centroids) - 1
    used = np.bincount(cell, minlength=len(centroids)) > 0
    return centroids[used]


def _kmeans(plan: IndexPlan, points: Vectors, count: int) -> Vectors:
    kmeans = faiss.Kmeans(
        points.shape[1],
        min(count, len(points)),
        niter=_ROUNDS,
        seed=1 + plan.seed,
        spherical=plan.metric == "ip",
        min_points_per_centroid=1,
        max_points_per_centroid=len(points),
    )
    kmeans.train(points)
    centroids: Vectors = kmeans.centroids
    return centroids


def _flat(centroids: Vectors, metric: engine.Metric) -> FaissIndex:
    index = faiss.IndexFlat(centroids.shape[1], engine.metric_code(metric))
    index.add(centroids)
    return index
