"""The index kind `impact`: an inverted index of the weighted terms of a sparse encoder.

A recipe selects it by `[index.splade] factory = "Impact"`, over a `sparse` representation. `Impact`
stores a byte per weight; `Impact1` stores only which terms a passage has, a bag of terms. The
search parameter `terms` limits the query terms that are looked up. The file, the merge, the search
and the derivation from a previous file are the same as for BM25.
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from rag_model.arrays import RowPartition
from rag_model.corpus.ragged_file import QUERY_UNITS, SparseFile, SparseVectors
from rag_model.errors import InputError, UsageError
from rag_model.index.files.engine import Rows, Vectors
from rag_model.index.files.pieces import Array, compute_stamp
from rag_model.index.files.vectors import map_parts, open_row_files
from rag_model.index.kind import IndexEntry, IndexFiles, IndexMeasurement, RepresentationType, SparseQuerySet
from rag_model.index.plan import IndexPlan, IndexStats
from rag_model.index.postings.base_kind import (
    EXHAUSTIVE_QUERIES,
    PostingsKind,
    check_impact_parameters,
    open_postings,
)

if TYPE_CHECKING:
    from rag_model.index.postings.part import PartPostings
    from rag_model.index.postings.search import ImpactIndex

_WEIGHT_BITS = {"Impact": 8, "Impact1": 1}
TERMS_PER_PASSAGE = 128  # for estimates: SPLADE gives a passage of 100 words 100 to 200 terms
_GAP_BITS = 10  # bits per gap for 40,000 passages of 128 terms by Zipf's law
ROW_FILE_BYTES = 5 * TERMS_PER_PASSAGE + 4  # bytes per passage in the file of its part
_SORT_RATE = 2e7  # bytes of rows that one core sorts per second
_MERGE_RATE = 5e6  # postings that one core merges per second


class ImpactKind(PostingsKind):
    """The kind `impact`: weighted terms of a vocabulary."""

    name: ClassVar[str] = "impact"
    represents: ClassVar[RepresentationType] = "sparse"
    libraries: ClassVar[tuple[str, ...]] = ("numpy",)
    VERSION: ClassVar[int] = 1
    part_bytes: ClassVar[int] = 48 * TERMS_PER_PASSAGE
    piece_bytes: ClassVar[int] = 8 * TERMS_PER_PASSAGE
    max_new_passages: ClassVar[int] = 1 << 17

    def takes(self, factory: str) -> bool:
        """Return whether a factory string is `Impact` or `Impact1`."""
        return factory in _WEIGHT_BITS

    def check(self, recipe: Any) -> None:
        """Check the search parameter `terms`.

        Raises:
            UsageError: a setting is unknown or wrong.
        """
        super().check(recipe)
        if recipe.settings:
            raise UsageError(f"settings do not apply to {recipe.factory}: leave them out")
        self.check_search({}, recipe.search)

    def check_search(self, entry: IndexEntry, parameters: Mapping[str, Any]) -> None:
        """Check the search parameter `terms`."""
        check_impact_parameters(parameters)

    def scatter(self, plan: IndexPlan, trained: Path, rows: Path, number: int, out: Path) -> IndexStats:
        """Sort a part's weighted terms by term."""
        postings = _sort_terms(plan.factory, SparseFile(rows).iter_batches())
        return postings.write(out, compute_stamp(plan, trained, "scattered", number))

    def build_postings(self, entry: IndexEntry, batches: Iterator[SparseVectors]) -> "PartPostings":
        """Sort weighted terms by term; the weights must have the scale of the previous file."""
        return _sort_terms(entry["factory"], batches)

    def scale(self, plan: IndexPlan, rows: Sequence[Path]) -> int:
        """Return the common scale of the parts' weights; 1 for a bag of terms.

        Raises:
            InputError: the scales differ.
        """
        scales = sorted({file.scale for file in open_row_files(rows, SparseFile)})
        if len(scales) != 1:
            raise InputError(f"the parts' weights have the scales {scales}: encode all parts with one encoder")
        return 1 if _WEIGHT_BITS[plan.factory] == 1 else scales[0]

    def open(self, files: IndexFiles, entry: IndexEntry, *, mmap: bool = True) -> "ImpactIndex":
        """Open the file.

        Raises:
            InputError: the file is damaged, or a BM25 index.
            MissingExtraError: the text extra is not installed.
        """
        from rag_model.index.postings.search import ImpactIndex  # noqa: PLC0415

        return ImpactIndex(open_postings(files, mapped=mmap), entry["search"])

    def measure(self, files: IndexFiles, entry: IndexEntry, query_set: SparseQuerySet) -> IndexMeasurement:
        """Compare search with and without skipping, and the scores with the weights of the
        passages.
        """
        index = self.open(files, entry)
        index.use_small_cache()
        scores, rows = index.search(query_set.queries, query_set.k)
        exhaustive_rows = index.search(query_set.queries[:EXHAUSTIVE_QUERIES], query_set.k, skip=False)[1]
        _check_scores(index, query_set.queries, scores, rows, files.rows(), str(entry["factory"]))
        source_recall = float((rows == query_set.rows[:, None]).any(axis=1).mean())
        layout = index.file.layout
        metrics = {
            f"source@{query_set.k}": round(source_recall, 4),
            "terms": layout.n_terms,
            "terms_a_passage": round(layout.n_postings / max(1, layout.n), 1),
            "bytes_a_passage": round(layout.size / max(1, layout.n)),
        }
        return IndexMeasurement((rows[: len(exhaustive_rows)] == exhaustive_rows).mean(axis=1), metrics=metrics)

    def bytes_per_passage(self, plan: IndexPlan) -> int:
        """Return the bytes of a passage of 128 terms."""
        weight_bits = _WEIGHT_BITS[plan.factory]
        return 2 + TERMS_PER_PASSAGE * (_GAP_BITS + (weight_bits if weight_bits > 1 else 0)) // 8

    def seconds(self, plan: IndexPlan, stage: str, rows: int, size: int, *, inherited: bool = False) -> float:
        """Estimate the seconds to sort a part's rows, or to merge all postings."""
        return {"scatter": size / _SORT_RATE, "merge": plan.n * TERMS_PER_PASSAGE / _MERGE_RATE}.get(stage, 0.01)


def _sort_terms(factory: str, batches: Iterator[SparseVectors]) -> "PartPostings":
    """Return the postings of passages, which are given in row order."""
    from rag_model.index.postings.part import PartPostings  # noqa: PLC0415

    vectors = SparseVectors.concatenate(list(batches))
    return PartPostings.from_weighted_terms(vectors.terms, _quantize_weights(factory, vectors.weights), vectors.offsets)


def _quantize_weights(factory: str, weights: Array) -> Array:
    """Return the weights that an index stores: `weights`, or ones for a bag of terms."""
    return np.ones_like(weights) if _WEIGHT_BITS[factory] == 1 else weights


def _check_scores(
    index: "ImpactIndex", queries: Vectors, scores: Vectors, hit_rows: Rows, paths: Sequence[Path], factory: str
) -> None:
    """Check that the scores are inner products of the weights of queries and passages.

    Raises:
        InputError: a score differs.
    """
    unique_rows = np.unique(hit_rows[hit_rows >= 0])
    vectors, units_per_score = _read_rows(paths, unique_rows), QUERY_UNITS * index.file.layout.scale
    query_units = np.zeros(int(vectors.terms.max(initial=0)) + 1, np.int64)  # by term
    for terms, term_units, query_scores, query_rows in zip(*index.select_terms(queries), scores, hit_rows, strict=True):
        query_units[:] = 0
        is_passage_term = terms < len(query_units)
        np.add.at(query_units, terms[is_passage_term], term_units[is_passage_term])
        passages = vectors.take(np.searchsorted(unique_rows, query_rows[query_rows >= 0]))
        sums = np.concatenate(
            [[0], np.cumsum(query_units[passages.terms] * _quantize_weights(factory, passages.weights))]
        )
        exact_scores = (sums[passages.offsets[1:]] - sums[passages.offsets[:-1]]) / units_per_score
        if not np.array_equal(exact_scores.astype(np.float32), query_scores[query_rows >= 0]):
            raise InputError(f"the weights in {index.file.path} differ from those of the passages: build it again")


def _read_rows(paths: Sequence[Path], row_numbers: Rows) -> SparseVectors:
    """Return the passages at ascending global rows."""
    files = open_row_files(paths, SparseFile)
    parts = RowPartition(file.n for file in files).split(row_numbers)
    return SparseVectors.concatenate(map_parts(lambda part: files[part[0]].take(part[2]), parts))


KIND = ImpactKind()
