"""Cells: how a corpus is cut so that HNSW graphs can be built apart and still be stitched into one.

k-means of a sample gives the centroids. Each vector belongs to its nearest cell; the share of vectors nearest
to a border belongs to the second nearest too, and it is these that tie neighbouring graphs together.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Self

import numpy as np
import numpy.typing as npt

from rag_model.errors import InputError, ResourceError
from rag_model.index import engine
from rag_model.index.engine import Rows, Vectors, faiss
from rag_model.index.recipe import IndexPlan
from rag_model.index.vectors import VectorFiles

_POINTS = 2_000  # training points a cell: enough for borders to repeat from sample to sample
_ROUNDS = 10

CellIds = npt.NDArray[np.int16]


@dataclass(frozen=True, slots=True)
class Cells:
    """The cells of every row: (n, 2) int16, the second -1 for a row that lies far from every border."""

    of_row: CellIds
    count: int

    def rows(self, cell: int) -> Rows:
        """Return the rows of a cell, ascending, its border included."""
        return np.flatnonzero((self.of_row == cell).any(axis=1))

    def save(self, path: Path) -> None:
        """Write the cells as one `.npy` file, whatever the path ends in."""
        try:
            with path.open("wb") as file:
                np.save(file, self.of_row, allow_pickle=False)
        except OSError as failed:
            raise ResourceError(f"cannot write {path}: {failed.strerror}") from failed

    @classmethod
    def load(cls, path: Path, plan: IndexPlan) -> Self:
        """Read what `save` wrote.

        Raises:
            InputError: the file is missing, damaged, or of another plan.
        """
        try:
            of_row: CellIds = np.load(path, mmap_mode="r", allow_pickle=False)
        except (OSError, ValueError, EOFError) as broken:
            raise InputError(f"{path} is not a whole file of cells: train the index again") from broken
        if of_row.shape != (plan.n, 2) or of_row.dtype != np.int16 or of_row.max() >= plan.cells:
            raise InputError(f"{path} holds the cells of other vectors than the plan's: train the index again")
        return cls(of_row, plan.cells)


def assign(plan: IndexPlan, vectors: VectorFiles) -> Cells:
    """Cut the corpus into `plan.cells` cells; reads a sample, then every vector once, block by block.

    Raises:
        InputError: a row holds a NaN or an infinity.
        ResourceError: memory ran out.
    """
    of_row = np.full((plan.n, 2), -1, np.int16)
    if plan.cells == 1:
        of_row[:, 0] = 0
        return Cells(of_row, 1)
    sample = vectors.sample(_POINTS * plan.cells, plan.seed)
    margin = np.empty(plan.n, np.float32)  # how much nearer the first centroid is than the second
    with engine.guarded(ResourceError, f"{plan.n} vectors could not be cut into {plan.cells} cells: give fewer"):
        centroids = _centroids(plan, sample)
        for first, block in vectors.blocks():
            nearness, cell = centroids.search(block, 2)
            of_row[first : first + len(block)] = cell
            margin[first : first + len(block)] = np.abs(nearness[:, 0] - nearness[:, 1])
    border = margin <= np.quantile(margin, plan.border) if plan.border else np.zeros(plan.n, bool)
    of_row[~border, 1] = -1
    return Cells(of_row, plan.cells)


def _centroids(plan: IndexPlan, sample: Vectors) -> engine.FaissIndex:
    kmeans = faiss.Kmeans(
        plan.d,
        plan.cells,
        niter=_ROUNDS,
        seed=1 + plan.seed,
        spherical=plan.metric == "ip",
        min_points_per_centroid=1,
        max_points_per_centroid=_POINTS,
    )
    kmeans.train(sample)
    return kmeans.index
