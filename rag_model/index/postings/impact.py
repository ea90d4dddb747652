"""The kind `impact`: postings of an encoder's weighted terms, in one byte each or in one bit.

A recipe asks for it by `[index.splade] factory = "Impact"`, over a representation of the kind `sparse`; `Impact1` keeps
which terms a passage has, and not how much they weigh: a bag of terms. `search` takes `terms`, how many of a question's
terms are looked up. The file, its merge and its search are those of BM25.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from rag_model.corpus.sparse_file import QUESTION_UNITS, SparseFile, SparseVectors
from rag_model.errors import InputError, UsageError
from rag_model.index.files.engine import Rows, Vectors
from rag_model.index.files.pieces import Array
from rag_model.index.kind import Entry, IndexFiles, Measurement, Represents, SparseTrial
from rag_model.index.plan import Facts, IndexPlan
from rag_model.index.postings.joined import HELD, PostingsKind, stamp
from rag_model.index.postings.parameters import check_terms
from rag_model.index.sizing.estimate import PROCESS, Estimate
from rag_model.partition import Partition

if TYPE_CHECKING:
    from rag_model.index.postings.impacts import ImpactIndex

_BITS = {"Impact": 8, "Impact1": 1}  # of a weight
TERMS = 128  # of a passage, for estimates: SPLADE's models have 100 to 200 on passages of 100 words
_GAP = 10  # bits of a posting's row, for estimates: of 128 terms by Zipf's law in 40,000 passages
ROW_BYTES = 5 * TERMS + 4  # of a passage in its part's file
_PIECE = 8 * TERMS  # bytes a passage in a part's piece
_SORTED = 48 * TERMS  # bytes a passage in memory while a part is sorted
_RATE = 2e7  # bytes of rows a second that one core sorts
_MERGED = 5e6  # postings a second that one core merges


class ImpactKind(PostingsKind):
    """Weighted terms of a vocabulary."""

    name: ClassVar[str] = "impact"
    represents: ClassVar[Represents] = "sparse"
    libraries: ClassVar[tuple[str, ...]] = ("numpy",)
    VERSION: ClassVar[int] = 1

    def takes(self, factory: str) -> bool:
        """Whether a factory string is `Impact` or `Impact1`."""
        return factory in _BITS

    def check(self, recipe: Any) -> None:
        """Check `terms` of `search`.

        Raises:
            UsageError: a setting is unknown or wrong.
        """
        super().check(recipe)
        if recipe.settings:
            raise UsageError(f"settings do not apply to {recipe.factory}: Impact keeps a byte a weight, Impact1 a bit")
        self.check_search({}, recipe.search)

    def check_search(self, entry: Entry, parameters: Mapping[str, Any]) -> None:
        """Check `terms`."""
        check_terms(parameters)

    def scatter(self, plan: IndexPlan, trained: Path, rows: Path, number: int, out: Path) -> Facts:
        """Sort a part's weighted terms by term."""
        from rag_model.index.postings.part import PartPostings  # noqa: PLC0415

        held = SparseVectors.joined(list(SparseFile(rows).blocks()))
        postings = PartPostings.weighted(held.terms, _kept(plan.factory, held.weights), held.offsets)
        postings.write(out, stamp(plan, trained, number))
        return {"rows": len(held), "terms": len(postings.terms), "postings": len(postings.rows)}

    def scale(self, plan: IndexPlan, rows: Sequence[Path]) -> int:
        """Return the scale of the parts' weights, which they share; 1 of a bag of terms.

        Raises:
            InputError: they do not share it.
        """
        known = sorted({SparseFile(path).scale for path in rows})
        if len(known) != 1:
            raise InputError(f"the parts' weights have the scales {known}: encode all of them by one encoder")
        return 1 if _BITS[plan.factory] == 1 else known[0]

    def open(self, files: IndexFiles, entry: Entry, *, mmap: bool = True) -> "ImpactIndex":
        """Open the file.

        Raises:
            InputError: the file is damaged, or an index of words.
            MissingExtraError: the text extra is not installed.
        """
        from rag_model.index.postings.impacts import ImpactIndex  # noqa: PLC0415

        return ImpactIndex(files.index, entry["search"], mmap=mmap)

    def measure(self, files: IndexFiles, entry: Entry, trial: SparseTrial) -> Measurement:
        """Compare search with a reading of every posting, and the scores with the passages' own weights."""
        index = self.open(files, entry)
        index.hold_few()
        scores, found = index.search(trial.questions, trial.k)
        every = index.search(trial.questions, trial.k, skip=False)[1]
        _check_scores(index, trial.questions, scores, found, files.rows(), str(entry["factory"]))
        source = float((found == trial.rows[:, None]).any(axis=1).mean())
        layout = index.file.layout
        figures = {
            f"source@{trial.k}": round(source, 4),
            "terms": layout.terms,
            "terms_a_passage": round(layout.postings / max(1, layout.n), 1),
            "bytes_a_passage": round(layout.size / max(1, layout.n)),
        }
        return Measurement((found == every).mean(axis=1), figures=figures)

    def estimate(self, plan: IndexPlan, part_rows: int | None = None) -> Estimate:
        """Return what the build costs at 128 terms a passage."""
        part, size = part_rows or min(plan.n, 100_000), plan.n * passage_bytes(plan)
        stages = {"train": PROCESS, "scatter": PROCESS + part * _SORTED, "merge": 2 * PROCESS + plan.n * HELD}
        return Estimate(stages, size + PROCESS, size, size + plan.n * _PIECE)

    def seconds(self, plan: IndexPlan, stage: str, rows: int, size: int, *, inherited: bool = False) -> float:
        """Return the seconds to sort a part's rows, or to merge all postings."""
        return {"scatter": size / _RATE, "merge": plan.n * TERMS / _MERGED}.get(stage, 0.01)


def passage_bytes(plan: IndexPlan) -> int:
    """Return the bytes of a passage of 128 terms in the index file."""
    return 2 + TERMS * (_GAP + (_BITS[plan.factory] if _BITS[plan.factory] > 1 else 0)) // 8


def _kept(factory: str, weights: Array) -> Array:
    """Return the weights that an index keeps: all, or ones."""
    return np.ones_like(weights) if _BITS[factory] == 1 else weights


def _check_scores(
    index: "ImpactIndex", questions: Vectors, scores: Vectors, found: Rows, rows: Sequence[Path], factory: str
) -> None:
    """Check that scores are the products of the questions' and the passages' weights.

    Raises:
        InputError: they are not.
    """
    wanted = np.unique(found[found >= 0])
    held, unit = _taken(rows, wanted), QUESTION_UNITS * index.file.layout.scale
    table = np.zeros(int(held.terms.max(initial=0)) + 1, np.int64)  # units of a question by term
    for terms, units, told, own in zip(*index.heaviest(questions), scores, found, strict=True):
        table[:] = 0
        known = terms < len(table)
        np.add.at(table, terms[known], units[known])
        passages = held.take(np.searchsorted(wanted, own[own >= 0]))
        sums = np.concatenate([[0], np.cumsum(table[passages.terms] * _kept(factory, passages.weights))])
        products = (sums[passages.offsets[1:]] - sums[passages.offsets[:-1]]) / unit
        if not np.array_equal(products.astype(np.float32), told[own >= 0]):
            raise InputError(f"{index.file.path} has other weights than the passages: build it again")


def _taken(rows: Sequence[Path], wanted: Rows) -> SparseVectors:
    """Return the passages at ascending rows of all parts."""
    files = [SparseFile(path) for path in rows]
    partition = Partition(file.n for file in files)
    return SparseVectors.joined([files[number].take(local) for number, _, local in partition.split(wanted)])


KIND = ImpactKind()
