"""The kind `hnsw`: one graph over all vectors, built by cells."""

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from rag_model.index.files.engine import Vectors
from rag_model.index.files.pieces import Opener
from rag_model.index.graphs import hnsw
from rag_model.index.graphs.cells import sample_size
from rag_model.index.plan import Facts
from rag_model.index.recipe import IndexRecipe, VectorPlan
from rag_model.index.vector_kind import MOVED, PRODUCTS, ROUNDS, VectorKind, steady_cells

_LINKED = 3.2e-9  # seconds of one core per dimension and candidate, to insert a vector into a graph of `_NODES`
_STEPS = 140  # dimensions whose products take as long as the rest of an insertion
_NODES, _GROWS = 20_000, 0.35  # cost grows with this power of the nodes: measured .31 at 96 dimensions, .55 at 768
_STEADY = 1.25  # keep the parent's number of cells within this factor: another number would rebuild all cells


class GraphKind(VectorKind):
    """HNSW: `HNSW32`, `HNSW32_SQ8`, `HNSW32_SQfp16`."""

    name: ClassVar[str] = "hnsw"
    VERSION: ClassVar[int] = hnsw.VERSION
    threaded: ClassVar[bool] = True
    factories = re.compile("HNSW")

    def steady(self, recipe: IndexRecipe, plan: VectorPlan, before: Mapping[str, Any]) -> VectorPlan:
        """Keep the parent index's number of cells if the recipe does not set it and it is close enough.

        A corpus grows a little every month. If the number of cells grew with it each time, no cell could be inherited.
        """
        cells = before.get("cells", 0)
        chosen = recipe.cells is None and min(cells, plan.cells) > 1
        return steady_cells(plan, cells, _STEADY) if chosen else plan

    def train(self, plan: VectorPlan, rows: Sequence[Path], out: Path) -> Facts:
        """Learn the cells of the corpus from a sample."""
        return hnsw.train(plan, rows, out)

    def losses(self, plan: VectorPlan, trained: Path, vectors: Vectors) -> dict[str, float]:
        """Return how far vectors lie from their cells, how few links cross borders, and the error of the codes."""
        return hnsw.losses(plan, trained, vectors)

    def scatter(self, plan: VectorPlan, trained: Path, rows: Path, number: int, out: Path) -> Facts:
        """Sort a part's vectors by cell."""
        return hnsw.scatter(plan, trained, rows, number, out)

    def shard(self, plan: VectorPlan, trained: Path, slices: Iterable[bytes], number: int, out: Path) -> Facts:
        """Build the graph of one cell."""
        return hnsw.shard(plan, trained, slices, number, out)

    def merge(
        self,
        plan: VectorPlan,
        trained: Path,
        rows: Sequence[Path],
        scattered: Sequence[Opener],
        shards: Sequence[Opener],
        out: Path,
    ) -> Facts:
        """Stitch the cells' graphs into one."""
        return hnsw.merge(plan, trained, rows, scattered, shards, out)

    def seconds(self, plan: VectorPlan, stage: str, rows: int, size: int, *, inherited: bool = False) -> float:
        """Return about how many seconds of one core a task of a stage takes."""
        if stage == "train":
            return 1 if inherited else 0.1 + ROUNDS * sample_size(plan) * plan.cells * plan.d / PRODUCTS
        if stage == "scatter":
            return size / MOVED + size / 2 * plan.cells / PRODUCTS  # size / (2 d) rows, each compared with the cells
        if stage == "shard":
            inserted: float = rows * (1 + plan.linked / 2) * plan.ef_construction * (rows / _NODES) ** _GROWS
            return inserted * (_STEPS + plan.d) * _LINKED
        return 1.5 * plan.n * plan.d / MOVED


KIND = GraphKind()
