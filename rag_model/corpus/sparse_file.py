"""Weighted terms of passages: of a part, row i for passage i, in one Arrow file that is memory-mapped.

The file has one column, `terms`: a list of (term, weight) a row, terms ascending. A term is a number of the encoder's
vocabulary, a weight a whole number from 1 to 255, in units: `scale` units are a weight of 1. The scale is the encoder's
and not the corpus's, so equal passages have equal rows in every part and build. The size of the vocabulary (`dim`) and
the scale are metadata of the file.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from rag_model.corpus.token_file import ROWS, Offsets, column_of, offsets_of, spread
from rag_model.errors import InputError
from rag_model.partition import Partition

MOST_TERMS = 1 << 24  # of a vocabulary
MOST_WEIGHT = 255
QUESTION_UNITS = 4096  # of a question's weight of 1: finer than any encoder's rounding
_COLUMN = "terms"


@dataclass(frozen=True, slots=True)
class SparseVectors:
    """The weighted terms of m passages, end to end: passage i has those in [offsets[i], offsets[i + 1])."""

    terms: npt.NDArray[np.int32]  # (t,) ascending within a passage
    weights: npt.NDArray[np.uint8]  # (t,) in units, at least 1
    offsets: Offsets  # (m + 1,) int64, ascending from 0 to t

    @classmethod
    def joined(cls, pieces: Sequence["SparseVectors"]) -> Self:
        """Return the passages of all pieces, one piece after another."""
        lengths = np.concatenate([np.zeros(0, np.int64), *(np.diff(piece.offsets) for piece in pieces)])
        terms = np.concatenate([np.zeros(0, np.int32), *(piece.terms for piece in pieces)])
        return cls(
            terms, np.concatenate([np.zeros(0, np.uint8), *(one.weights for one in pieces)]), offsets_of(lengths)
        )

    def __len__(self) -> int:
        """Return the number of passages."""
        return len(self.offsets) - 1

    def take(self, rows: npt.NDArray[np.int64]) -> "SparseVectors":
        """Return the passages at `rows`, (m,) in any order."""
        lengths = self.offsets[rows + 1] - self.offsets[rows]
        places = spread(self.offsets[rows], lengths)
        return SparseVectors(self.terms[places], self.weights[places], offsets_of(lengths))


class SparseWriter:
    """Write a part's weighted terms, batch by batch in row order."""

    def __init__(self, path: Path, dim: int, scale: int) -> None:
        """Begin the file of a vocabulary of `dim` terms, with `scale` units for a weight of 1."""
        pair = pa.struct([("term", pa.int32()), ("weight", pa.uint8())])
        told = {"dim": str(dim), "scale": str(scale)}
        self._schema = pa.schema([pa.field(_COLUMN, pa.list_(pair))], metadata=told)
        self._sink = pa.OSFile(str(path), "wb")
        self._writer = pa.ipc.new_file(self._sink, self._schema)

    def write(self, rows: SparseVectors) -> None:
        """Append passages."""
        for first in range(0, len(rows), ROWS):
            offsets = rows.offsets[first : first + ROWS + 1]
            terms, weights = rows.terms[offsets[0] : offsets[-1]], rows.weights[offsets[0] : offsets[-1]]
            pairs = pa.StructArray.from_arrays([pa.array(terms), pa.array(weights)], ["term", "weight"])
            column = pa.ListArray.from_arrays(pa.array(offsets - offsets[0], pa.int32()), pairs)
            self._writer.write_batch(pa.record_batch([column], schema=self._schema))

    def __enter__(self) -> Self:
        """Return itself."""
        return self

    def __exit__(self, *raised: object) -> None:
        """Finish the file."""
        self._writer.close()
        self._sink.close()


class SparseFile:
    """A part's weighted terms, memory-mapped."""

    def __init__(self, path: Path) -> None:
        """Map the file and read where its batches begin.

        Raises:
            InputError: it is missing, damaged, or holds something else.
        """
        self.path = path
        try:
            self._reader = pa.ipc.open_file(pa.memory_map(str(path)))
            told = self._reader.schema.metadata or {}
            self.dim, self.scale = int(told[b"dim"]), int(told[b"scale"])
            self._batches = [self._read(number) for number in range(self._reader.num_record_batches)]
        except (OSError, LookupError, AttributeError, ValueError, pa.ArrowException) as broken:
            raise InputError(f"{path} is no complete file of weighted terms: encode its part again") from broken
        self._partition = Partition(map(len, self._batches))
        self.n = self._partition.n  # passages

    @property
    def postings(self) -> int:
        """The number of pairs of a passage and a term."""
        return sum(len(batch.terms) for batch in self._batches)

    def blocks(self) -> Iterator[SparseVectors]:
        """Yield the passages in row order, one record batch at a time."""
        yield from self._batches

    def take(self, rows: npt.NDArray[np.int64]) -> SparseVectors:
        """Return the passages at ascending `rows`."""
        pieces = [self._batches[number].take(local) for number, _, local in self._partition.split(rows)]
        return SparseVectors.joined(pieces)

    def _read(self, number: int) -> SparseVectors:
        batch = self._reader.get_batch(number)
        batch.validate(full=True)  # offsets ascend and lie inside
        column = batch.column(0)
        if column.null_count or column.values.null_count:
            raise ValueError("a row without terms")
        pairs = column.flatten()
        terms, weights = (_numbers(pairs.field(name)) for name in ("term", "weight"))
        offsets = column.offsets.to_numpy().astype(np.int64)
        found = SparseVectors(terms, weights, offsets - offsets[0])
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
