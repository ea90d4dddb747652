"""A memory-mapped copy of a passage file, for a service with many reads.

It is an uncompressed Arrow IPC file, written from the verified Parquet file of a pull: a passage is read in place,
without decompression, and all processes that read it share the memory pages. It is about three times as large.
"""

from bisect import bisect_right
from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa

from rag_model.corpus.passages import PASSAGE_SCHEMA, PassageFile
from rag_model.corpus.records import Passage
from rag_model.errors import InputError
from rag_model.landing import landing


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
        try:
            self._source = pa.memory_map(str(path))
            self._file = pa.ipc.open_file(self._source)
        except (pa.ArrowInvalid, OSError) as broken:
            raise InputError(f"{path} is not a readable copy of passages ({broken}): pull it again") from broken
        if self._file.schema != PASSAGE_SCHEMA:
            raise InputError(f"{path} does not have the columns of passages: pull it again")
        self._batches: dict[int, pa.RecordBatch] = {}
        self._starts = [0]
        for number in range(self._file.num_record_batches):
            self._starts.append(self._starts[-1] + self._batch(number).num_rows)
        self.n_rows = self._starts[-1]

    def rows(self, rows: Sequence[int]) -> list[Passage]:
        """Return the passages of these rows (0 <= row < n_rows), in the order given.

        Raises:
            IndexError: a row lies outside the file.
        """
        return [self._passage(row) for row in rows]

    def _passage(self, row: int) -> Passage:
        if not 0 <= row < self.n_rows:
            raise IndexError(f"row {row} lies outside a copy of {self.n_rows} passages")
        number = bisect_right(self._starts, row) - 1
        batch, place = self._batch(number), row - self._starts[number]
        return Passage(*(column[place].as_py() for column in batch.columns))

    def _batch(self, number: int) -> pa.RecordBatch:
        if number not in self._batches:  # a view of the mapped file: a few hundred bytes
            self._batches[number] = self._file.get_batch(number)
        return self._batches[number]

    def close(self) -> None:
        """Close the file; passages that were read from it stay valid."""
        self._source.close()
