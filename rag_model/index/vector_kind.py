"""The base class of index kinds over vectors, whose indexes are faiss files."""

import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import ClassVar

from rag_model.index.estimate import estimate_resources, fit_into_memory
from rag_model.index.files.engine import Vectors
from rag_model.index.files.vectors import open_vectors
from rag_model.index.kind import IndexEntry, IndexFiles, IndexMeasurement, UnshardedKind
from rag_model.index.quality.health import FitSample, inspect_index, sample_changes
from rag_model.index.quality.results import FitResult, ResourceEstimate, TuningResult
from rag_model.index.quality.sweep import VectorQuerySet, list_near_settings, measure_recalls
from rag_model.index.quality.tune import tune_search
from rag_model.index.recipe import IndexRecipe, VectorPlan, check_vector_recipe, resolve
from rag_model.index.search import FaissFileIndex, VectorOpener, open_index

# Rates of one core, measured with 8,000 to 200,000 vectors of 96 to 768 dimensions (AMD EPYC with
# AVX512).
PRODUCTS_PER_SECOND = 5.4e10  # multiply-adds per second while vectors are compared with centroids
BYTES_PER_SECOND = 5e7  # bytes of vectors per second that are read, sorted and written
# number of queries for each setting but the index's own, because some settings are slow
_CURVE_QUERIES = 64
KMEANS_ROUNDS = 10


class VectorKind(VectorOpener, UnshardedKind[VectorPlan], ABC):
    """The base class of index kinds over vectors.

    Subclasses implement `train`, `scatter`, `merge`, `losses` and `seconds`, and `shard` if they
    have shards.
    """

    suffix: ClassVar[str] = "faiss"
    learns: ClassVar[bool] = True
    libraries: ClassVar[tuple[str, ...]] = ("faiss-cpu",)
    factories: ClassVar[re.Pattern[str]]  # matches the beginning of this kind's factory strings

    def takes(self, factory: str) -> bool:
        """Return whether the factory string is of this kind."""
        return self.factories.match(factory) is not None

    def check(self, recipe: IndexRecipe) -> None:
        """Check the settings and the search parameters of a recipe."""
        check_vector_recipe(recipe)

    def plan(
        self, recipe: IndexRecipe, n: int, width: int, *, memory: int | None = None, part_rows: int | None = None
    ) -> VectorPlan:
        """Resolve a recipe; if memory is limited, use more cells or a smaller sample."""
        return resolve(recipe, n, width) if memory is None else fit_into_memory([recipe], n, width, memory, part_rows)

    @abstractmethod
    def losses(self, plan: VectorPlan, trained: Path, vectors: Vectors) -> dict[str, float]:
        """Return the loss of vectors by trained component, such as `cells` or `codes`."""

    def recalls(
        self, plan: VectorPlan, trained: Path, new_vectors: Vectors, old_vectors: Vectors
    ) -> tuple[float, float] | None:
        """Return the recall of new and of old vectors with a trained file; None if it is not
        measured.
        """
        return None

    def fit(
        self,
        plan: VectorPlan,
        trained: Path,
        losses: Mapping[str, float],
        changed_files: Sequence[tuple[Path, Sequence[Path]]],
        unchanged_files: Sequence[Path],
    ) -> FitResult:
        """Measure the fit with samples of new and old vectors."""
        return self.fit_samples(plan, trained, losses, sample_changes(changed_files, unchanged_files, plan.seed))

    def fit_samples(
        self, plan: VectorPlan, trained: Path, losses: Mapping[str, float], fit_sample: FitSample
    ) -> FitResult:
        """Measure the fit with samples of the current corpus; without new vectors the file fits."""
        if not len(fit_sample.new_vectors):
            return FitResult(0, {})
        current_losses = self.losses(plan, trained, fit_sample.changed_vectors)
        loss_pair_by_name = {name: (loss, losses[name]) for name, loss in current_losses.items() if name in losses}
        recall = self.recalls(plan, trained, fit_sample.new_vectors, fit_sample.old_vectors)
        return FitResult(len(fit_sample.new_vectors), loss_pair_by_name, recall)

    def _open_for_few_queries(self, files: IndexFiles, entry: IndexEntry) -> FaissFileIndex:
        """Open a faiss file for few queries.

        If vectors in an object store rerank the hits, only those of the candidates are read.
        """
        row_files = files.rows() if entry.get("refine") == "vectors" else []
        return open_index(files.index, defaults=entry["search"], vectors=row_files)

    def measure(self, files: IndexFiles, entry: IndexEntry, query_set: VectorQuerySet) -> IndexMeasurement:
        """Compare the index with exact search, and inspect its file.

        Settings near the index's own are measured too, with fewer queries.
        """
        index = self._open_for_few_queries(files, entry)
        own_setting, settings = index.defaults, list_near_settings(index, query_set.k)
        few_queries = query_set.take_first(_CURVE_QUERIES)
        # The cheapest setting is searched first, so that the others find the file in memory.
        results = [
            measure_recalls(index, query_set if setting == own_setting else few_queries, setting)
            for setting in settings
        ]
        curve = [point for point, _ in results]
        point, recalls = (
            results[settings.index(own_setting)]
            if own_setting in settings
            else measure_recalls(index, query_set, own_setting)
        )
        del index  # free its memory: `inspect_index` opens the file again
        return IndexMeasurement(recalls, curve, point, inspect_index(files.index, open_vectors(files.rows())))

    def tune(self, files: IndexFiles, entry: IndexEntry, query_set: VectorQuerySet, target: float) -> TuningResult:
        """Return the smallest efSearch or nprobe that reaches the target."""
        return tune_search(self._open_for_few_queries(files, entry), query_set, target)

    def estimate(self, plan: VectorPlan, part_rows: int | None = None) -> ResourceEstimate:
        """Estimate memory by stage, and bytes on disk."""
        return estimate_resources(plan, part_rows)
