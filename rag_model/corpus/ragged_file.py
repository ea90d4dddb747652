"""Rows of any length: of a part, row i for passage i, in one Arrow file that is memory-mapped.

The file has one column: a list of values a row. Arrow keeps the offsets of the rows beside the values, so rows lie end
to end without padding. A record batch holds at most `ROWS` rows. `token_file` and `sparse_file` say what a value is.
"""

from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Generic, Self, TypeVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from rag_model.errors import InputError
from rag_model.partition import Partition

ROWS = 1_024  # passages of a record batch: 30 MB of float16 at 120 tokens of 128 dimensions
_MAGIC = b"ARROW1"

Offsets = npt.NDArray[np.int64]
Values = npt.NDArray[Any]


class Ragged:
    """The values of m passages, end to end: passage i has those in [offsets[i], offsets[i + 1]).

    A subclass is a dataclass: columns of values, and then `offsets`.
    """

    __slots__ = ()
    offsets: Offsets  # (m + 1,) int64, ascending from 0 to the number of values

    @abstractmethod
    def __init__(self, *columns: Values) -> None:
        """Take the columns of values, and the offsets."""

    @abstractmethod
    def columns(self) -> tuple[Values, ...]:
        """Return the columns of values."""

    @classmethod
    @abstractmethod
    def none(cls) -> Self:
        """Return no passages."""

    @classmethod
    def joined(cls, pieces: Sequence[Self]) -> Self:
        """Return the passages of all pieces, one piece after another."""
        some = pieces or [cls.none()]
        columns = zip(*(piece.columns() for piece in some), strict=True)
        lengths = np.concatenate([np.diff(piece.offsets) for piece in some])
        return cls(*map(np.concatenate, columns), offsets_of(lengths))

    def __len__(self) -> int:
        """Return the number of passages."""
        return len(self.offsets) - 1

    def take(self, rows: npt.NDArray[np.int64]) -> Self:
        """Return the passages at `rows`, (m,) in any order."""
        lengths = self.offsets[rows + 1] - self.offsets[rows]
        places = spread(self.offsets[rows], lengths)
        return type(self)(*(column[places] for column in self.columns()), offsets_of(lengths))


Rows = TypeVar("Rows", bound=Ragged)


class RaggedWriter(Generic[Rows]):
    """Write a part's rows, batch by batch in row order."""

    def __init__(self, path: Path, column: str, value: pa.DataType, metadata: Mapping[str, str] | None = None) -> None:
        """Begin the file; its column is named `column`, and holds lists of `value`."""
        self._schema = pa.schema([pa.field(column, pa.list_(value))], metadata=metadata)
        self._sink = pa.OSFile(str(path), "wb")
        self._writer = pa.ipc.new_file(self._sink, self._schema)

    @abstractmethod
    def values(self, rows: Rows, first: int, last: int) -> pa.Array:
        """Return the values in [first, last) as Arrow has them."""

    def write(self, rows: Rows) -> None:
        """Append passages."""
        for first in range(0, len(rows), ROWS):
            offsets = rows.offsets[first : first + ROWS + 1]
            values = self.values(rows, offsets[0], offsets[-1])
            lists = pa.ListArray.from_arrays(pa.array(offsets - offsets[0], pa.int32()), values)
            self._writer.write_batch(pa.record_batch([lists], schema=self._schema))

    def __enter__(self) -> Self:
        """Return itself."""
        return self

    def __exit__(self, *raised: object) -> None:
        """Finish the file."""
        self._writer.close()
        self._sink.close()


class RaggedFile(Generic[Rows]):
    """A part's rows, memory-mapped."""

    rows: type[Rows]
    holds: str  # what a row is of, as messages call it

    def __init__(self, path: Path) -> None:
        """Map the file and read where its batches begin.

        Raises:
            InputError: it is missing, damaged, or holds something else.
        """
        self.path = path
        try:
            reader = pa.ipc.open_file(pa.memory_map(str(path)))
            self.describe(reader.schema)
            batches = (reader.get_batch(number) for number in range(reader.num_record_batches))
            self._batches = [self.of(*_values(batch)) for batch in batches]
        except (OSError, LookupError, AttributeError, ValueError, pa.ArrowException) as broken:
            raise InputError(f"{path} is no complete file of {self.holds}: encode its part again") from broken
        self._partition = Partition(map(len, self._batches))
        self.n = self._partition.n  # passages

    @abstractmethod
    def describe(self, schema: pa.Schema) -> None:
        """Set what the schema says of the values; a LookupError, AttributeError or ValueError refuses the file."""

    @abstractmethod
    def of(self, values: pa.Array, offsets: Offsets) -> Rows:
        """Return the rows of a record batch; a ValueError refuses the file."""

    def blocks(self) -> Iterator[Rows]:
        """Yield the passages in row order, one record batch at a time."""
        yield from self._batches

    def take(self, rows: npt.NDArray[np.int64]) -> Rows:
        """Return the passages at ascending `rows`."""
        return self.rows.joined([self._batches[number].take(own) for number, _, own in self._partition.split(rows)])


def offsets_of(lengths: npt.NDArray[np.int64]) -> Offsets:
    """Return (m + 1,) offsets of rows of these (m,) lengths."""
    return np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)]).astype(np.int64)


def spread(starts: Offsets, lengths: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Return the places of all values of rows that begin at `starts`, (m,), row by row."""
    before = offsets_of(lengths)
    return np.arange(before[-1]) + np.repeat(starts - before[:-1], lengths)


def column_of(path: Path) -> str:
    """Return the name of the column of an Arrow file; empty: it is no Arrow file.

    Raises:
        InputError: it is one, and damaged.
    """
    with path.open("rb") as file:
        if file.read(len(_MAGIC)) != _MAGIC:
            return ""
    try:
        return str(pa.ipc.open_file(pa.memory_map(str(path))).schema.names[0])
    except (OSError, IndexError, pa.ArrowException) as broken:
        raise InputError(f"{path} is damaged: encode its part again") from broken


def _values(batch: pa.RecordBatch) -> tuple[pa.Array, Offsets]:
    """Return the values of a record batch, and where its rows begin."""
    batch.validate(full=True)  # offsets ascend and lie inside
    column = batch.column(0)
    if column.null_count or column.values.null_count:
        raise ValueError("a row without values")
    offsets = column.offsets.to_numpy().astype(np.int64)
    return column.flatten(), offsets - offsets[0]
