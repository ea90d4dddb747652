"""The kind `bm25`: postings of terms with their frequencies, ranked by BM25.

A recipe asks for it by `[index.bm25] factory = "BM25"`. Its settings are `language`, of the stemmer; and `search` takes
`k1` and `b`, which any question may change. What works on postings is imported when it is called: it needs numba, which
takes a second, and reading a recipe does not.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from rag_model.errors import InputError, StoreError, UsageError
from rag_model.index.files.engine import Rows
from rag_model.index.kind import Entry, IndexFiles, Measurement, TextTrial
from rag_model.index.plan import Facts, IndexPlan
from rag_model.index.postings.analyzer import Analyzer
from rag_model.index.postings.joined import HELD, PostingsKind, stamp
from rag_model.index.postings.parameters import K1, B, check_parameters
from rag_model.index.sizing.estimate import PROCESS, Estimate

if TYPE_CHECKING:
    import pyarrow as pa

    from rag_model.index.postings.search import Bm25Index

_LANGUAGE = "english"
_BYTES = 90  # a passage of about 100 words, in the index; its terms' dictionary is a fifth of that
_COUNTED = 2_000  # bytes a passage in memory while its terms are counted
_CARRIED = 30  # bytes a passage in memory while postings are carried over
_FRESH = 1 << 18  # new passages at most; with more the index is built as a whole
_PIECE = 300  # bytes a passage in a part's piece
_RATE = 1.2e7  # bytes of compressed passages a second that one core analyses
_MERGED = 500_000  # passages a second that one core merges


class Bm25Kind(PostingsKind):
    """Words and how often each passage has them."""

    name: ClassVar[str] = "bm25"
    libraries: ClassVar[tuple[str, ...]] = ("PyStemmer",)
    VERSION: ClassVar[int] = 1  # raise with it `file.MAGIC`, or `derive` mixes postings of two

    def takes(self, factory: str) -> bool:
        """Whether a factory string is `BM25`."""
        return factory == "BM25"

    def check(self, recipe: Any) -> None:
        """Check the settings `language`, and `k1` and `b` of `search`.

        Raises:
            MissingExtraError: the text extra is not installed.
            UsageError: one is unknown or wrong.
        """
        super().check(recipe)
        unknown = sorted(set(recipe.settings) - {"language"})
        if unknown:
            raise UsageError(f"{unknown[0]} is not a setting of {recipe.factory}: it takes language")
        Analyzer(recipe.settings.get("language", _LANGUAGE))
        check_parameters(recipe.search)

    def check_search(self, entry: Entry, parameters: Mapping[str, Any]) -> None:
        """Check `k1` and `b`."""
        check_parameters(parameters)

    def plan(
        self, recipe: Any, n: int, width: int, *, memory: int | None = None, part_rows: int | None = None
    ) -> IndexPlan:
        """Return a plan with the analyzer's language and fingerprint among its settings."""
        plan = super().plan(recipe, n, width, memory=memory, part_rows=part_rows)
        language = recipe.settings.get("language", _LANGUAGE)
        settings = {"language": language, "analyzer": Analyzer(language).fingerprint}
        return replace(plan, settings=settings, search={"k1": K1, "b": B, **recipe.search})

    def scatter(self, plan: IndexPlan, trained: Path, rows: Path, number: int, out: Path) -> Facts:
        """Count and sort the terms of a part's passages, titles included."""
        from rag_model.index.postings.counting import counted  # noqa: PLC0415

        postings = counted(rows, _analyzer(plan.settings))
        return postings.write(out, stamp(plan, trained, number))

    def derive(
        self,
        earlier: Entry,
        entry: Entry,
        before: Path,
        kept: Rows,
        texts: Callable[[Rows], Iterator["pa.RecordBatch"]],
        out: Path,
    ) -> Facts | None:
        """Write the index file of passages that an earlier one mostly has; see `DerivingKind`."""
        if earlier["settings"] != entry["settings"]:
            return None
        from rag_model.index.postings.derive import derived  # noqa: PLC0415

        return derived(before, kept, texts, _analyzer(entry["settings"]), out, most=_FRESH)

    def to_derive(self, n: int) -> int:
        """Return the bytes of memory for rows, and for the terms of some new passages."""
        return PROCESS + n * _CARRIED + min(n, _FRESH) * _COUNTED

    def open(self, files: IndexFiles, entry: Entry, *, mmap: bool = True) -> "Bm25Index":
        """Open the file; a question is analyzed as the passages were.

        Raises:
            InputError: the file is damaged.
            MissingExtraError: the text extra is not installed.
            StoreError: it was built by another analyzer than the one installed here.
        """
        from rag_model.index.postings.search import Bm25Index  # noqa: PLC0415

        return Bm25Index(files.index, _analyzer(entry["settings"]), entry["search"], mmap=mmap)

    def measure(self, files: IndexFiles, entry: Entry, trial: TextTrial) -> Measurement:
        """Compare search with a reading of every posting, and postings with the words of the questions' passages."""
        index = self.open(files, entry)
        index.hold_few()
        found = index.search(trial.questions, trial.k)[1]
        every = index.every(trial.questions, trial.k)
        _check_sources(index, trial)
        source = float((found == trial.rows[:, None]).any(axis=1).mean())
        layout = index.file.layout
        figures = {f"source@{trial.k}": round(source, 4), "terms": layout.terms, "postings": layout.postings}
        return Measurement((found == every).mean(axis=1), figures=figures)

    def estimate(self, plan: IndexPlan, part_rows: int | None = None) -> Estimate:
        """Return what the build costs: a part in memory while it is analysed, a batch of postings while merged."""
        part = (part_rows or min(plan.n, 100_000)) * _COUNTED
        size = plan.n * _BYTES
        stages = {"train": PROCESS, "scatter": PROCESS + part, "merge": 2 * PROCESS + plan.n * HELD}
        return Estimate(stages, size + PROCESS, size, size + plan.n * _PIECE)

    def seconds(self, plan: IndexPlan, stage: str, rows: int, size: int, *, inherited: bool = False) -> float:
        """Return the seconds to analyse a part's compressed passages, or to merge all postings."""
        return {"scatter": size / _RATE, "merge": plan.n / _MERGED}.get(stage, 0.01)


def _analyzer(settings: Any) -> Analyzer:
    """Return the analyzer that an index was built with.

    Raises:
        StoreError: the one installed here gives other terms.
    """
    analyzer = Analyzer(settings["language"])
    if analyzer.fingerprint != settings["analyzer"]:
        raise StoreError(
            f"the index was built by another analyzer of {analyzer.language} words than {analyzer.versions}: install "
            "the versions that the snapshot's provenance names, or build the index again"
        )
    return analyzer


def _check_sources(index: "Bm25Index", trial: TextTrial) -> None:
    """Check that the index knows each question's words: a question is a sentence of a passage.

    Raises:
        InputError: it does not.
    """
    for question in trial.questions:
        missing = index.missing(question)
        if missing:
            raise InputError(f"{index.file.path} lacks the term {missing[0]!r} of a passage: build it again")


KIND = Bm25Kind()
