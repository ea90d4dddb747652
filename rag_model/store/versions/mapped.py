"""A memory-mapped copy of a passage file, for a service with many reads.

It is an uncompressed Arrow IPC file, written from the verified Parquet file of a pull: a passage is read in place,
without decompression, and all processes that read it share the memory pages. It is about three times as large.
"""

from bisect import bisect_right
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import pyarrow as pa

from rag_model.corpus.moments import checked
from rag_model.corpus.passages import PASSAGE_SCHEMA, UNDATED_SCHEMA, PassageFile
from rag_model.corpus.records import Passage
from rag_model.errors import InputError
from rag_model.landing import landing

_MILLISECONDS = 1000  # of a second
_FORMATS: dict[pa.DataType, Literal["i", "q"]] = {pa.int32(): "i", pa.int64(): "q"}  # as `memoryview` names them


def write_mapped(passages: Path, copy: Path) -> None:
    """Write the passages of a Parquet file as Arrow; at most one row group is in memory. `copy` is renamed complete.

    Raises:
        InputError: the file is not a passage file.
        OSError: `copy` cannot be written.
    """
    with (
        PassageFile(passages) as file,
        landing(copy) as temporary,
        pa.OSFile(str(temporary), "wb") as sink,
        pa.ipc.new_file(sink, PASSAGE_SCHEMA) as writer,
    ):
        for batch in file.iter_batches():
            writer.write_batch(pa.RecordBatch.from_arrays(batch.columns, schema=PASSAGE_SCHEMA))


class MappedPassages:
    """Read passages by row from a mapped copy, with the same methods as `PassageFile`."""

    def __init__(self, path: Path) -> None:
        """Map the file.

        Raises:
            InputError: it is not an Arrow file of passages.
        """
        self._path = path
        try:
            self._source = pa.memory_map(str(path))
            self._file = pa.ipc.open_file(self._source)
        except (pa.ArrowInvalid, OSError) as broken:
            raise InputError(f"{path} is not a readable copy of passages ({broken}): pull it again") from broken
        if self._file.schema not in (PASSAGE_SCHEMA, UNDATED_SCHEMA):
            raise InputError(f"{path} does not have the columns of passages: pull it again")
        self._batches: dict[int, list[Callable[[int], Any]]] = {}  # of each column, what reads a value
        self._starts = [0]
        for number in range(self._file.num_record_batches):
            self._starts.append(self._starts[-1] + self._file.get_batch(number).num_rows)
        self.n_rows = self._starts[-1]

    def rows(self, rows: Sequence[int]) -> list[Passage]:
        """Return the passages of these rows (0 <= row < n_rows), in the order given.

        Raises:
            IndexError: a row lies outside the file.
            InputError: the file is damaged.
        """
        return [self._passage(row) for row in rows]

    def _passage(self, row: int) -> Passage:
        if not 0 <= row < self.n_rows:
            raise IndexError(f"row {row} lies outside a copy of {self.n_rows} passages")
        number = bisect_right(self._starts, row) - 1
        place = row - self._starts[number]
        try:
            return Passage(*[value(place) for value in self._columns(number)])
        except (IndexError, TypeError, ValueError) as broken:  # a buffer is shorter than its rows, or no text
            raise InputError(f"row {row} of {self._path} is damaged ({broken}): pull it again") from broken

    def _columns(self, number: int) -> list[Callable[[int], Any]]:
        if number not in self._batches:  # views of the mapped file: a few hundred bytes
            self._batches[number] = [_reader(column) for column in self._file.get_batch(number).columns]
        return self._batches[number]

    def close(self) -> None:
        """Close the file; passages that were read from it stay valid."""
        self._source.close()


def _reader(column: pa.Array) -> Callable[[int], Any]:
    """Return what gives a column's value in a row; by Arrow's own objects a passage takes three times as long."""
    validity, values, *rest = column.buffers()
    if pa.types.is_timestamp(column.type):
        return _dates(column.offset, validity, values)
    if validity is not None or column.offset:
        return lambda row: column[row].as_py()
    if column.type in _FORMATS:
        return memoryview(values).cast("B").cast(_FORMATS[column.type]).__getitem__
    ends, texts = memoryview(values).cast("B").cast("i"), memoryview(rest[0] or b"").cast("B")
    return lambda row: str(texts[ends[row] : ends[row + 1]], "utf-8")


def _dates(offset: int, validity: pa.Buffer | None, values: pa.Buffer) -> Callable[[int], int | None]:
    """Return what gives a row's date in seconds, from milliseconds and the bits of the rows that have one."""
    bits = None if validity is None else memoryview(validity).cast("B")
    milliseconds = memoryview(values).cast("B").cast("q")

    def date(row: int) -> int | None:
        at = row + offset
        known = bits is None or bits[at >> 3] >> (at & 7) & 1
        return checked(milliseconds[at] // _MILLISECONDS) if known else None

    return date
