"""The common part of kinds over vectors: faiss factory strings, faiss files, exact search as the reference."""

import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

from rag_model.errors import UsageError
from rag_model.index.factory import parse
from rag_model.index.files.engine import Vectors
from rag_model.index.kind import Entry, IndexFiles, Measurement, PlainKind, Represents
from rag_model.index.plan import Facts
from rag_model.index.quality import fit
from rag_model.index.quality.fit import Fit
from rag_model.index.quality.health import Effort, Trial, effort, examine, setting_name, sweep
from rag_model.index.quality.recall import FLOOR, Floor
from rag_model.index.quality.tune import Tuned, tune
from rag_model.index.recipe import IndexRecipe, VectorPlan, check_search, check_vectors, parameters_of, resolve
from rag_model.index.search import IndexFile, open_index
from rag_model.index.sizing.estimate import Estimate, estimate, fitted

# Of one core, measured on 8,000 to 200,000 vectors of 96 to 768 dimensions (AMD EPYC with AVX512).
PRODUCTS = 5.4e10  # multiplications and additions per second, to compare vectors with centroids
MOVED = 5e7  # bytes of vectors per second that are read, sorted and written
ROUNDS = 10  # of k-means


class VectorKind(PlainKind[VectorPlan], ABC):
    """A kind over vectors. Each has its own `train`, `scatter`, `merge` and `losses`, and `shard` if it has shards."""

    represents: ClassVar[Represents] = "vectors"
    suffix: ClassVar[str] = "faiss"
    learns: ClassVar[bool] = True
    libraries: ClassVar[tuple[str, ...]] = ("faiss-cpu",)
    factories: ClassVar[re.Pattern[str]]  # the beginning of this kind's factory strings

    def takes(self, factory: str) -> bool:
        """Whether a factory string asks for this kind."""
        return self.factories.match(factory) is not None

    def check(self, recipe: IndexRecipe) -> None:
        """Check settings and search parameters."""
        check_vectors(recipe)

    def plan(
        self, recipe: IndexRecipe, n: int, width: int, *, memory: int | None = None, part_rows: int | None = None
    ) -> VectorPlan:
        """Resolve a recipe; with limited memory, use more cells or a smaller sample."""
        return resolve(recipe, n, width) if memory is None else fitted([recipe], n, width, memory, part_rows)

    @abstractmethod
    def losses(self, plan: VectorPlan, trained: Path, vectors: Vectors) -> dict[str, float]:
        """Return how far vectors lie from the trained values."""

    def recalls(self, plan: VectorPlan, trained: Path, new: Vectors, old: Vectors) -> tuple[float, float] | None:
        """Return the recall of new vectors and of old ones under a trained file; None: not measured."""
        return None

    def fit(
        self,
        plan: VectorPlan,
        trained: Path,
        losses: Mapping[str, float],
        changed: Sequence[tuple[Path, Sequence[Path]]],
        same: Sequence[Path],
    ) -> Fit:
        """Measure the fit on samples of new and old vectors."""
        sampled = fit.sample(changed, same, plan.seed)
        return fit.measure(self, plan, trained, losses, sampled)

    def follow(self, plan: VectorPlan, trained: Path, rows: Sequence[Path], out: Path) -> Facts:
        """Refuse: `recalls` never reports misses for this kind.

        Raises:
            ValueError: always.
        """
        raise ValueError(f"{plan.factory} cannot be adapted to new vectors: train it again")

    def open(self, files: IndexFiles, entry: Entry, *, mmap: bool = True) -> IndexFile:
        """Open a faiss file, with the vectors if they rank its candidates again."""
        vectors = files.rows() if entry.get("refine") == "vectors" else []
        return open_index(files.index, mmap=mmap, defaults=entry["search"], vectors=vectors)

    def measure(self, files: IndexFiles, entry: Entry, trial: Trial) -> Measurement:
        """Compare with exact search over a range of settings, and examine the file."""
        index = self.open(files, entry)
        rows = index.search(trial.vectors, trial.k)[1]
        curve = sweep(index, trial)
        setting = _setting(index, trial, entry["search"], curve)
        del index  # or its memory would be held twice: to examine the file it is opened again
        return Measurement(trial.recalls(rows), curve, setting, examine(files.index, files.rows()))

    def check_search(self, entry: Entry, parameters: Mapping[str, Any]) -> None:
        """Check efSearch, nprobe and refine: whole numbers from 1 to the number of vectors."""
        refined = ("refine",) if entry.get("refine") == "vectors" else ()
        check_search(parameters, (*parameters_of(parse(str(entry["factory"]))), *refined))
        for name, value in parameters.items():
            if value > entry["n"]:
                raise UsageError(f"{name} is {value:,}, but the index holds {entry['n']:,} vectors: give at most that")

    def tune(self, files: IndexFiles, entry: Entry, trial: Trial, target: float) -> Tuned:
        """Find the smallest efSearch or nprobe that reaches the target."""
        return tune(self.open(files, entry), trial, target)

    def floor(self, factory: str) -> Floor:
        """Return the floor of an index whose storage loses almost nothing."""
        return FLOOR

    def estimate(self, plan: VectorPlan, part_rows: int | None = None) -> Estimate:
        """Return memory by stage, and bytes on disk."""
        return estimate(plan, part_rows)


def steady_cells(plan: VectorPlan, cells: int, most: float) -> VectorPlan:
    """Return the plan with `cells` cells if the ratio to its own is from 1/`most` to `most`."""
    return replace(plan, cells=cells) if 1 / most <= cells / plan.cells <= most else plan


def _setting(index: IndexFile, trial: Trial, search: Mapping[str, int], curve: Sequence[Effort]) -> Effort:
    """Return the effort of an index's default setting, taken from its curve if it is there."""
    known = {point.setting: point for point in curve}
    return known.get(setting_name(search)) or effort(index, trial, search)
