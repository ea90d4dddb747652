"""Cells: partition a corpus so that HNSW graphs can be built separately and then stitched into one.

k-means of a sample gives the centroids. Each vector belongs to its nearest cell. Of all pairs of a vector and another
near cell, ordered by margin, the first `border` pairs per vector join that cell's graph too, and the next `linked`
pairs per vector are linked into it without joining it. These two sets connect neighbouring graphs.
"""

from dataclasses import dataclass
from typing import Self

import numpy as np
import numpy.typing as npt

from rag_model.errors import ResourceError
from rag_model.index.files import engine
from rag_model.index.files.engine import FaissIndex, Vectors, faiss
from rag_model.index.files.pieces import Array
from rag_model.index.recipe import VectorPlan

_POINTS = 1_000  # training points per cell: enough for stable borders between samples
_ROUNDS = 10
_NEXT = 3  # further cells that a vector may join: one in seven neighbours lies beyond the second nearest cell
_WHOLE = 0.75  # share of the cells that k-means makes; the others come from splitting the largest
_EVEN = 1.5  # largest allowed cell, as a multiple of the mean
_SPLITS = 2  # at most, per cell

CellIds = npt.NDArray[np.int64]
Pairs = tuple[npt.NDArray[np.int64], CellIds]  # vector numbers, and a cell for each


@dataclass(frozen=True, slots=True)
class Cells:
    """The learnt partition of a corpus."""

    centroids: Vectors  # (c, d) float32, c <= the plan's cells; the cells beyond c stay empty
    border: float  # pairs with a smaller margin join: |similarity to the own centroid - to the other|
    linked: float  # other pairs with a smaller margin are linked

    def arrays(self) -> list[Array]:
        """Return the cells as arrays."""
        return [np.array([self.border, self.linked]), self.centroids]

    @classmethod
    def of(cls, numbers: Array, centroids: Array) -> Self:
        """Return the cells from the result of `arrays`."""
        border, linked = numbers.tolist()
        return cls(centroids, border, linked)

    def assign(self, metric: engine.Metric, vectors: Vectors) -> tuple[CellIds, Pairs, Pairs]:
        """Return each vector's own cell, the other cells that it joins, and those that it is linked into.

        Args:
            metric: the plan's.
            vectors: (m, d) float32.

        Returns:
            (m,) int64 cells; and twice two (p,) int64 arrays: vector numbers and their cells.
        """
        cells, margins = self._nearest(metric, vectors)
        joins = margins < self.border  # (m, c - 1) bool
        links = (margins < self.linked) & ~joins
        return cells[:, 0], _pairs(cells, joins), _pairs(cells, links)  # (m, c) -> (m,)

    def _nearest(self, metric: engine.Metric, vectors: Vectors) -> tuple[CellIds, Vectors]:
        """Return (m, c) cells, the nearest first, and (m, c - 1) margins: how much farther the others are."""
        near, cells = _flat(self.centroids, metric).search(vectors, min(1 + _NEXT, len(self.centroids)))
        return cells, np.abs(near[:, 1:] - near[:, :1])  # (m, c - 1) - (m, 1)


def learn(plan: VectorPlan, sample: Vectors) -> Cells:
    """Cut a sample, (m, d) float32, into `plan.cells` cells of about equal size, fewer if the sample is small.

    Raises:
        ResourceError: memory ran out.
    """
    with engine.guarded(ResourceError, f"{len(sample)} vectors could not be cut into {plan.cells} cells: use fewer"):
        centroids = _centroids(plan, sample) if plan.cells > 1 else np.zeros((1, plan.d), np.float32)
        # (m, c - 1) -> (m (c - 1),)
        margins = np.sort(Cells(centroids, 0, 0)._nearest(plan.metric, sample)[1], axis=None)
    border, linked = (_threshold(margins, share * len(sample)) for share in (plan.border, plan.border + plan.linked))
    return Cells(centroids, border, linked)


def _threshold(margins: Vectors, pairs: float) -> float:
    """Return the margin below which `pairs` pairs of the sample lie; `margins` ascend."""
    return float(margins[min(round(pairs), len(margins) - 1)]) if pairs and len(margins) else 0.0


def _pairs(cells: CellIds, chosen: npt.NDArray[np.bool_]) -> Pairs:
    vectors, place = np.nonzero(chosen)  # (m, c - 1) -> (p,), (p,)
    return vectors, cells[vectors, place + 1]


def sample_size(plan: VectorPlan) -> int:
    """Return the size of the sample for `learn`."""
    return min(plan.n, max(_POINTS * plan.cells, 4 * _POINTS))


def _centroids(plan: VectorPlan, points: Vectors) -> Vectors:
    """Return at most `plan.cells` centroids: k-means, then repeated splits of the largest cell.

    k-means alone leaves cells of two and three times the mean, and the whole build waits for the largest. Once
    there are enough cells, each split removes the smallest cell.
    """
    centroids = _kmeans(plan, points, max(2, round(_WHOLE * plan.cells)))
    cell = _nearest_of(plan, centroids, points)
    for _ in range(_SPLITS * plan.cells):
        sizes = np.bincount(cell, minlength=len(centroids))
        largest = int(sizes.argmax())
        if len(centroids) >= plan.cells and sizes[largest] <= _EVEN * len(points) / plan.cells:
            break
        own = np.flatnonzero(cell == largest)
        halves = _kmeans(plan, points[own], 2)
        second = own[_nearest_of(plan, halves, points[own]) == 1]
        if len(second) in (0, len(own)):  # equal points cannot be split
            break
        centroids = np.vstack([centroids, halves[-1:]])  # (c, d) -> (c + 1, d)
        centroids[largest], cell[second] = halves[0], len(centroids) - 1
        if len(centroids) > plan.cells:
            centroids, cell = _without_smallest(plan, centroids, cell, points)
    return np.ascontiguousarray(centroids[np.bincount(cell, minlength=len(centroids)) > 0])


def _without_smallest(plan: VectorPlan, centroids: Vectors, cell: CellIds, points: Vectors) -> tuple[Vectors, CellIds]:
    smallest = int(np.bincount(cell, minlength=len(centroids)).argmin())
    left = np.delete(centroids, smallest, axis=0)  # (c, d) -> (c - 1, d)
    orphans = cell == smallest
    cell = cell - (cell > smallest)
    cell[orphans] = _nearest_of(plan, left, points[orphans])
    return left, cell


def _nearest_of(plan: VectorPlan, centroids: Vectors, points: Vectors) -> CellIds:
    if not len(points):
        return np.empty(0, np.int64)
    cells: CellIds = _flat(centroids, plan.metric).search(points, 1)[1][:, 0]  # (p, 1) -> (p,)
    return cells


def _kmeans(plan: VectorPlan, points: Vectors, count: int) -> Vectors:
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
