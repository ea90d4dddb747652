"""Memory-mapped copies of passage files, for a service with many reads.

A copy is an uncompressed Arrow IPC file, written from the verified Parquet file of a pull. A
passage is read in place, without decompression, and all processes that read it share the memory
pages. The copy is about three times as large as the Parquet file.
"""

import mmap
from bisect import bisect_right
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import pyarrow as pa

from rag_model.atomic_write import atomic_write
from rag_model.corpus.passages import PASSAGE_SCHEMA, PASSAGE_SCHEMAS, PassageFile
from rag_model.corpus.records import Passage, check_seconds
from rag_model.errors import InputError

_MS_PER_SECOND = 1000
# Type codes of `memoryview` by the Arrow type of a column.
_FORMATS: dict[pa.DataType, Literal["i", "q"]] = {pa.int32(): "i", pa.int64(): "q"}


def write_mapped_copy(passages: Path, copy: Path) -> None:
    """Write the passages of a Parquet file to the Arrow file `copy`, atomically.

    At most one row group is in memory.

    Raises:
        InputError: the file is not a passage file.
        OSError: `copy` cannot be written.
    """
    with PassageFile(passages) as file, atomic_write(copy) as temporary, pa.OSFile(str(temporary), "wb") as sink:
        schema = file.schema if file.has_dates else PASSAGE_SCHEMA
        with pa.ipc.new_file(sink, schema) as writer:
            for batch in file.iter_batches():
                writer.write_batch(pa.RecordBatch.from_arrays(batch.columns, schema=schema))


class MappedPassages:
    """Reads passages by row from a memory-mapped copy, with the methods of `PassageFile`."""

    def __init__(self, path: Path) -> None:
        """Map the file.

        Raises:
            InputError: the file is not an Arrow file of passages.
        """
        self._path = path
        try:
            with path.open("rb") as file:
                memory_map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            if hasattr(memory_map, "madvise"):
                # Without this advice, reading a passage also reads megabytes around it.
                memory_map.madvise(mmap.MADV_RANDOM)
            self._source = pa.BufferReader(pa.py_buffer(memory_map))
            self._file = pa.ipc.open_file(self._source)
        except (pa.ArrowInvalid, OSError, ValueError) as error:  # ValueError: the file is empty
            raise InputError(f"{path} is not a readable copy of passages ({error}): pull it again") from error
        if self._file.schema not in PASSAGE_SCHEMAS:
            raise InputError(f"{path} does not have the columns of passages: pull it again")
        # Batch number -> functions that read a value of each column.
        self._readers: dict[int, list[Callable[[int], Any]]] = {}
        self._starts = [0]
        for batch_number in range(self._file.num_record_batches):
            self._starts.append(self._starts[-1] + self._file.get_batch(batch_number).num_rows)
        self.n_rows = self._starts[-1]

    def read_rows(self, rows: Sequence[int]) -> list[Passage]:
        """Return the passages of these rows (0 <= row < n_rows), in the given order.

        Raises:
            IndexError: a row lies outside the file.
            InputError: the file is damaged.
        """
        return [self._read_passage(row) for row in rows]

    def _read_passage(self, row: int) -> Passage:
        if not 0 <= row < self.n_rows:
            raise IndexError(f"row {row} is outside a copy of {self.n_rows} passages")
        batch_number = bisect_right(self._starts, row) - 1
        offset = row - self._starts[batch_number]
        try:
            return Passage(*[read_value(offset) for read_value in self._get_batch_readers(batch_number)])
        except (IndexError, TypeError, ValueError) as error:
            # A buffer is too short, or is not UTF-8.
            raise InputError(f"row {row} of {self._path} is damaged ({error}): pull it again") from error

    def _get_batch_readers(self, batch_number: int) -> list[Callable[[int], Any]]:
        # Readers are cached: each is a view of the mapped file, and takes a few hundred bytes.
        if batch_number not in self._readers:
            batch = self._file.get_batch(batch_number)
            self._readers[batch_number] = [_create_value_reader(column) for column in batch.columns]
        return self._readers[batch_number]

    def close(self) -> None:
        """Close the file; passages that were read from it stay valid."""
        self._source.close()


def _create_value_reader(column: pa.Array) -> Callable[[int], Any]:
    """Return a function that reads a value of a column by row, three times as fast as Arrow."""
    validity, values, *more_buffers = column.buffers()
    if pa.types.is_timestamp(column.type):
        return _create_date_reader(column.offset, validity, values)
    if validity is not None or column.offset:
        return lambda row: column[row].as_py()
    if column.type in _FORMATS:
        return memoryview(values).cast("B").cast(_FORMATS[column.type]).__getitem__
    offsets, texts = memoryview(values).cast("B").cast("i"), memoryview(more_buffers[0] or b"").cast("B")
    return lambda row: str(texts[offsets[row] : offsets[row + 1]], "utf-8")


def _create_date_reader(offset: int, validity: pa.Buffer | None, values: pa.Buffer) -> Callable[[int], int | None]:
    """Return a function that reads the date of a row in seconds, or None if it has no date."""
    validity_bits = None if validity is None else memoryview(validity).cast("B")
    milliseconds = memoryview(values).cast("B").cast("q")

    def read_date(row: int) -> int | None:
        value_index = row + offset
        is_dated = validity_bits is None or validity_bits[value_index >> 3] >> (value_index & 7) & 1
        return check_seconds(milliseconds[value_index] // _MS_PER_SECOND) if is_dated else None

    return read_date
