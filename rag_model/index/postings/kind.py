"""The index kind `bm25`: an inverted index of words with their frequencies, ranked by BM25.

A recipe selects it by `[index.bm25] factory = "BM25"`. The kind's settings are `language` (the
language of the stemmer) and `analyzer`; its search parameters are `k1` and `b`. Importing numba
takes a second and reading a recipe does not need it, so modules that need numba are imported when
they are used.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from rag_model.errors import InputError, UsageError
from rag_model.index.files.pieces import compute_stamp
from rag_model.index.kind import IndexEntry, IndexFiles, IndexMeasurement, TextQuerySet
from rag_model.index.plan import IndexPlan, IndexStats
from rag_model.index.postings.base_kind import (
    EXHAUSTIVE_QUERIES,
    K1,
    B,
    PostingsKind,
    check_bm25_parameters,
    open_postings,
)
from rag_model.index.postings.lucene_analyzer import choose_analyzer, load_analyzer

if TYPE_CHECKING:
    import pyarrow as pa

    from rag_model.index.postings.part import PartPostings
    from rag_model.index.postings.search import Bm25Index

_ANALYZE_RATE = 1.2e7  # bytes of compressed passages that one core analyzes per second
_MERGE_RATE = 500_000  # passages that one core merges per second


class Bm25Kind(PostingsKind):
    """The kind `bm25`: the words of passages and their frequencies."""

    name: ClassVar[str] = "bm25"
    libraries: ClassVar[tuple[str, ...]] = ("PyStemmer",)
    # Increase `file.MAGIC` too, or `derive` mixes postings of two versions.
    VERSION: ClassVar[int] = 1
    part_bytes: ClassVar[int] = 2_000
    piece_bytes: ClassVar[int] = 300
    max_new_passages: ClassVar[int] = 1 << 18

    def takes(self, factory: str) -> bool:
        """Return whether a factory string is `BM25`."""
        return factory == "BM25"

    def check(self, recipe: Any) -> None:
        """Check the settings `language` and `analyzer`, and the search parameters `k1` and `b`.

        Raises:
            MissingExtraError: the text extra is not installed.
            UsageError: a setting or a parameter is unknown or wrong.
        """
        super().check(recipe)
        unknown_settings = sorted(set(recipe.settings) - {"language", "analyzer"})
        if unknown_settings:
            raise UsageError(
                f"{unknown_settings[0]} is not a setting of {recipe.factory}: it takes language and analyzer"
            )
        choose_analyzer(recipe.settings)
        check_bm25_parameters(recipe.search)

    def check_search(self, entry: IndexEntry, parameters: Mapping[str, Any]) -> None:
        """Check the search parameters `k1` and `b`."""
        check_bm25_parameters(parameters)

    def plan(
        self, recipe: Any, n: int, width: int, *, memory: int | None = None, part_rows: int | None = None
    ) -> IndexPlan:
        """Return a plan whose settings include the analyzer's language and fingerprint."""
        plan = super().plan(recipe, n, width, memory=memory, part_rows=part_rows)
        analyzer = choose_analyzer(recipe.settings)
        settings = {"language": analyzer.language, "analyzer": analyzer.fingerprint}
        return replace(plan, settings=settings, search={"k1": K1, "b": B, **recipe.search})

    def scatter(self, plan: IndexPlan, trained: Path, rows: Path, number: int, out: Path) -> IndexStats:
        """Count and sort the terms of a part's passages, including titles."""
        from rag_model.index.postings.counting import count_passages  # noqa: PLC0415

        postings = count_passages(rows, load_analyzer(plan.settings))
        return postings.write(out, compute_stamp(plan, trained, "scattered", number))

    def build_postings(self, entry: IndexEntry, batches: Iterator["pa.RecordBatch"]) -> "PartPostings":
        """Count and sort the terms of passages."""
        from rag_model.index.postings.counting import count_texts, gather_batches, iter_texts  # noqa: PLC0415

        return count_texts(iter_texts(gather_batches(batches)), load_analyzer(entry["settings"]))

    def open(self, files: IndexFiles, entry: IndexEntry, *, mmap: bool = True) -> "Bm25Index":
        """Open the file, with the analyzer that the passages were analyzed with.

        Raises:
            InputError: the file is damaged.
            MissingExtraError: the text extra is not installed.
            StoreError: the installed analyzer gives other terms than the analyzer of the build.
        """
        from rag_model.index.postings.search import Bm25Index  # noqa: PLC0415

        return Bm25Index(open_postings(files, mapped=mmap), load_analyzer(entry["settings"]), entry["search"])

    def measure(self, files: IndexFiles, entry: IndexEntry, query_set: TextQuerySet) -> IndexMeasurement:
        """Compare search with and without skipping, and look up the words of the passages that
        queries come from.
        """
        index = self.open(files, entry)
        index.use_small_cache()
        hit_rows = index.search(query_set.queries, query_set.k)[1]
        exhaustive_rows = index.search_exhaustively(query_set.queries[:EXHAUSTIVE_QUERIES], query_set.k)
        _check_sources(index, query_set)
        source_recall = float((hit_rows == query_set.rows[:, None]).any(axis=1).mean())
        layout = index.file.layout
        metrics = {
            f"source@{query_set.k}": round(source_recall, 4),
            "terms": layout.n_terms,
            "postings": layout.n_postings,
        }
        return IndexMeasurement((hit_rows[: len(exhaustive_rows)] == exhaustive_rows).mean(axis=1), metrics=metrics)

    def bytes_per_passage(self, plan: IndexPlan) -> int:
        """Return the bytes of a passage of about 100 words; a fifth of it is the dictionary."""
        return 90

    def seconds(self, plan: IndexPlan, stage: str, rows: int, size: int, *, inherited: bool = False) -> float:
        """Estimate the seconds to analyze a part's compressed passages, or to merge all
        postings.
        """
        return {"scatter": size / _ANALYZE_RATE, "merge": plan.n / _MERGE_RATE}.get(stage, 0.01)


def _check_sources(index: "Bm25Index", query_set: TextQuerySet) -> None:
    """Check that the index has the terms of each query, which is a sentence of a passage.

    Raises:
        InputError: a term is missing.
    """
    for query in query_set.queries:
        missing_terms = index.find_missing_terms(query)
        if missing_terms:
            raise InputError(f"{index.file.path} lacks the term {missing_terms[0]!r} of a passage: build it again")


KIND = Bm25Kind()
