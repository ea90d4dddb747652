"""Weighted terms of passages: of a part, row i for passage i, in one Arrow file that is memory-mapped.

The file has one column, `terms`: a list of (term, weight) a row, terms ascending. A term is a number of the encoder's
vocabulary, a weight a whole number from 1 to 255, in units: `scale` units are a weight of 1. The scale is the encoder's
and not the corpus's, so equal passages have equal rows in every part and build. The size of the vocabulary (`dim`) and
the scale are metadata of the file.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from rag_model.corpus.ragged_file import Offsets, Ragged, RaggedFile, RaggedWriter, column_of

MOST_TERMS = 1 << 24  # of a vocabulary
MOST_WEIGHT = 255
QUESTION_UNITS = 4096  # of a question's weight of 1: finer than any encoder's rounding
_COLUMN = "terms"


@dataclass(frozen=True, slots=True)
class SparseVectors(Ragged):
    """The weighted terms of m passages, end to end: passage i has those in [offsets[i], offsets[i + 1])."""

    terms: npt.NDArray[np.int32]  # (t,) ascending within a passage
    weights: npt.NDArray[np.uint8]  # (t,) in units, at least 1
    offsets: Offsets  # (m + 1,) int64, ascending from 0 to t

    def columns(self) -> tuple[npt.NDArray[Any], ...]:
        """Return the terms and their weights."""
        return self.terms, self.weights

    @classmethod
    def none(cls) -> Self:
        """Return no passages."""
        return cls(np.zeros(0, np.int32), np.zeros(0, np.uint8), np.zeros(1, np.int64))


class SparseWriter(RaggedWriter[SparseVectors]):
    """Write a part's weighted terms, batch by batch in row order."""

    def __init__(self, path: Path, dim: int, scale: int) -> None:
        """Begin the file of a vocabulary of `dim` terms, with `scale` units for a weight of 1."""
        pair = pa.struct([("term", pa.int32()), ("weight", pa.uint8())])
        super().__init__(path, _COLUMN, pair, {"dim": str(dim), "scale": str(scale)})

    def values(self, rows: SparseVectors, first: int, last: int) -> pa.Array:
        """Return pairs of a term and its weight as Arrow has them."""
        pairs = [pa.array(rows.terms[first:last]), pa.array(rows.weights[first:last])]
        return pa.StructArray.from_arrays(pairs, ["term", "weight"])


class SparseFile(RaggedFile[SparseVectors]):
    """A part's weighted terms, memory-mapped."""

    rows, holds = SparseVectors, "weighted terms"

    @property
    def postings(self) -> int:
        """The number of pairs of a passage and a term."""
        return sum(len(batch.terms) for batch in self._batches)

    def describe(self, schema: pa.Schema) -> None:
        """Set the size of the vocabulary and the scale."""
        told = schema.metadata or {}
        self.dim, self.scale = int(told[b"dim"]), int(told[b"scale"])

    def of(self, values: pa.Array, offsets: Offsets) -> SparseVectors:
        """Return the terms of a record batch."""
        found = SparseVectors(_numbers(values.field("term")), _numbers(values.field("weight")), offsets)
        _check(found, self.dim)
        return found


def is_sparse_file(path: Path) -> bool:
    """Whether a file holds weighted terms.

    Raises:
        InputError: it is damaged.
    """
    return column_of(path) == _COLUMN


def _numbers(column: Any) -> npt.NDArray[Any]:
    found: npt.NDArray[Any] = column.to_numpy(zero_copy_only=True)
    return found


def _check(rows: SparseVectors, dim: int) -> None:
    """Check that terms are of the vocabulary and ascend in each row, and that weights are at least 1."""
    if not len(rows.terms):
        return
    rises = np.diff(rows.terms) > 0
    starts = rows.offsets[1:-1]
    rises[starts[(starts > 0) & (starts < len(rows.terms))] - 1] = True
    if rows.terms.min() < 0 or rows.terms.max() >= dim or rows.weights.min() < 1 or not rises.all():
        raise ValueError("terms out of order")
