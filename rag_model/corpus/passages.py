"""Passage files: Parquet with row groups small enough that one passage is cheap to read.

A file's *logical digest* depends only on the values of its rows, so another Parquet version or compression level,
which changes the bytes, changes no memo key. A file is renamed when it is complete: one that exists is complete.

Files that were written before passages had dates lack that column: their passages have none.
"""

import hashlib
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from itertools import groupby
from operator import attrgetter
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from rag_model.corpus.moments import checked
from rag_model.corpus.records import Passage
from rag_model.digest import ALGORITHM, canonical_json
from rag_model.errors import InputError, reason
from rag_model.landing import landing
from rag_model.parquet_pages import (
    EXPANDS,
    FREE,
    PagesError,
    check_footer,
    check_pages,
    decoded_size,
    leaves_of,
    opened,
    schema_of,
    texts_of,
)

ROW_GROUP = 1024  # rows; 20 random rows of one file then cost about 10 ms, against 455 ms at 50,000
# A file of two kilobytes can name one text of a megabyte 5,000 times: what it decodes to is bounded by its size.
_MOST_GROUP = 1 << 16  # rows
_MOST_PAGES = 512 << 20  # bytes of one row group, in memory at once
_FEWEST = 256  # rows of a batch

UNDATED_SCHEMA = pa.schema(  # of files that were written before passages had dates
    [
        pa.field(name, pa.type_for_alias(kind), nullable=False)
        for name, kind in {
            "id": "string",
            "page_id": "string",
            "rev_id": "int64",
            "title": "string",
            "section": "string",
            "text": "string",
            "start_word": "int32",
            "n_words": "int32",
            "hash": "string",
        }.items()
    ]
)
DATE = "revised"
_SECONDS = pa.timestamp("s", tz="UTC")
PASSAGE_SCHEMA = UNDATED_SCHEMA.append(pa.field(DATE, pa.timestamp("ms", tz="UTC")))  # Parquet has no seconds
_NAMES, _NEEDED = PASSAGE_SCHEMA.names, UNDATED_SCHEMA.names
_TEXTS = [field.name for field in PASSAGE_SCHEMA if pa.types.is_string(field.type)]


class PassageWriter:
    """Write passages to a new Parquet file; at most one row group is in memory.

    `rows` and `digest` cover the passages written so far. If the block fails, no file appears.
    """

    def __init__(self, path: Path, *, dated: bool = True) -> None:
        """Write to `path`; without `dated` in the form from before passages had dates, as their file was."""
        self._schema = PASSAGE_SCHEMA if dated else UNDATED_SCHEMA
        self._values = attrgetter(*self._schema.names)  # ten times as fast as `astuple`, which copies
        self.rows = 0
        self._running = hashlib.sha256()
        self._held: list[tuple[Any, ...]] = []
        self._landing = landing(path)
        self._file: pq.ParquetWriter

    def write(self, passage: Passage) -> None:
        """Append one passage."""
        row = self._values(passage)
        self._running.update(canonical_json(row) + b"\n")
        self._held.append(row)
        self.rows += 1
        if len(self._held) == ROW_GROUP:
            self._flush()

    @property
    def digest(self) -> str:
        """The digest of the rows in order: SHA-256 over one line of canonical JSON for each."""
        return f"{ALGORITHM}:{self._running.hexdigest()}"

    def _flush(self) -> None:
        columns = zip(*self._held, strict=True)
        arrays = [_array(column, field.type) for column, field in zip(columns, self._schema, strict=True)]
        self._file.write_table(pa.Table.from_arrays(arrays, schema=self._schema), row_group_size=ROW_GROUP)
        self._held.clear()

    def __enter__(self) -> Self:
        self._file = passage_parquet(self._landing.__enter__(), self._schema)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None and self._held:
            self._flush()
        self._file.close()
        self._landing.__exit__(kind, error, trace)


class PassageFile:
    """Read a passage file by batches or by row, from a path or a seekable binary file."""

    def __init__(self, source: Path | IO[bytes], needs: Sequence[str] = _NEEDED) -> None:
        """Open the file and read its footer.

        Raises:
            InputError: it is not Parquet, or lacks a column that its reader `needs`.
        """
        self._source, self._name = source, getattr(source, "name", source)
        name, self._checked = self._name, dict[tuple[int, int], int]()
        with self._reading():
            self._file = pq.ParquetFile(source, page_checksum_verification=True)
            columns = self._file.schema_arrow.names
        missing = [column for column in needs if column not in columns]
        if missing:
            raise InputError(f"{name} lacks the columns {', '.join(missing)} of a passage file: build it again")
        self.dated = DATE in columns
        metadata = self._file.metadata
        self.n_rows: int = metadata.num_rows
        sizes = [metadata.row_group(i).num_rows for i in range(metadata.num_row_groups)]
        held = _size_of(source)
        self._most = FREE + EXPANDS * held
        if sum(sizes) != self.n_rows or not all(0 <= size <= _MOST_GROUP for size in sizes) or self.n_rows > held:
            raise InputError(f"{name} claims {self.n_rows:,} rows in {held:,} bytes: build or pull it again")
        with self._reading():
            check_footer(metadata, held)
        for group in range(metadata.num_row_groups):  # before Arrow makes room for the pages of one
            self._check_decoded(metadata.row_group(group).total_byte_size)
        self._starts = [0]
        for size in sizes:
            self._starts.append(self._starts[-1] + size)

    @property
    def notes(self) -> dict[bytes, bytes]:
        """What its writer noted beside the rows; of a passage file itself nothing."""
        return dict(self._file.metadata.metadata or {})

    def iter_batches(self, columns: Sequence[str] | None = None, rows: int = ROW_GROUP) -> Iterator[pa.RecordBatch]:
        """Yield the rows in order, at most `rows` at a time, with `columns` of `PASSAGE_SCHEMA` or all.

        Dates that the file does not have are null.

        Raises:
            InputError: the file is damaged, or decodes to far more bytes than it has.
        """
        wanted, decoded = _NAMES if columns is None else list(columns), 0
        chosen = self._held(wanted)
        leaves = leaves_of(self._file.metadata, chosen)
        row = self._check_pages(range(self._file.num_row_groups), leaves)
        while rows > _FEWEST and rows * row > _MOST_PAGES:
            rows //= 2
        # What few rows may take at most fits: their texts need not be read as dictionaries, which takes a tenth longer.
        flat = rows * row <= _MOST_PAGES and not self._repeats(leaves)
        file = self._file if flat else self._dictionaries
        with self._reading():
            for batch in file.iter_batches(batch_size=rows, columns=chosen, use_threads=False):
                decoded += _decoded_size(batch)
                self._check_decoded(decoded)
                yield _whole(_plain(batch), wanted)

    def iter_chosen(self, rows: Sequence[int], columns: Sequence[str]) -> Iterator[pa.RecordBatch]:
        """Yield the rows of these numbers, ascending, with these columns; reads only their row groups.

        Raises:
            InputError: the file is damaged, or decodes to far more bytes than it has.
        """
        held = self._held(columns)
        leaves = leaves_of(self._file.metadata, held)
        for group, chosen in groupby(rows, self._group_of):
            self._check_pages([group], leaves)
            with self._reading():
                table = self._dictionaries.read_row_group(group, columns=held, use_threads=False)
                for batch in table.take(_numbers(chosen, self._starts[group])).combine_chunks().to_batches():
                    self._check_decoded(sum(map(decoded_size, batch.columns)))
                    yield _whole(_plain(batch), columns)

    def passages(self) -> Iterator[Passage]:
        """Yield every passage in row order."""
        for batch in self.iter_batches():
            with self._reading():
                found = _passages(pa.Table.from_batches([batch]))
            yield from found

    def rows(self, rows: Sequence[int]) -> list[Passage]:
        """Return the passages of these rows (0 <= row < n_rows), in the order given; reads only their row groups.

        Raises:
            IndexError: a row lies outside the file.
            InputError: the file is damaged, or decodes to far more bytes than it has.
        """
        groups, held = [self._group_of(row) for row in rows], self._held(_NAMES)
        leaves = leaves_of(self._file.metadata, held)
        found: dict[int, Passage] = {}
        for group in sorted(set(groups)):
            start = self._starts[group]
            wanted = sorted({row for row, its in zip(rows, groups, strict=True) if its == group})
            self._check_pages([group], leaves)
            with self._reading():
                table = self._dictionaries.read_row_group(group, columns=held).take(_numbers(wanted, start))
                self._check_decoded(sum(decoded_size(chunk) for column in table.columns for chunk in column.chunks))
                found.update(zip(wanted, _passages(table), strict=True))
        return [found[row] for row in rows]

    @cached_property
    def _dictionaries(self) -> pq.ParquetFile:
        """The file, its texts read as dictionaries: one that many rows name is held once."""
        metadata = self._file.metadata
        return pq.ParquetFile(
            self._source,
            metadata=metadata,
            page_checksum_verification=True,
            read_dictionary=texts_of(metadata, _TEXTS),
        )

    def _held(self, columns: Sequence[str]) -> list[str]:
        """Return those of the columns that the file has: all, or all but the dates."""
        return [name for name in columns if self.dated or name != DATE]

    def _check_pages(self, groups: Sequence[int], leaves: Sequence[int]) -> int:
        """Check what columns decode to before Arrow decodes them, once; return a row's most bytes of dictionaries."""
        new = {group: [leaf for leaf in leaves if (group, leaf) not in self._checked] for group in groups}
        if any(new.values()):
            with self._reading(), opened(self._source) as read:
                for group, unread in new.items():
                    column = self._file.metadata.row_group(group).column
                    found = check_pages(read, map(column, unread), min(self._most, _MOST_PAGES))
                    self._checked.update(zip([(group, leaf) for leaf in unread], found, strict=True))
        return max((sum(self._checked[group, leaf] for leaf in leaves) for group in groups), default=0)

    def _repeats(self, leaves: Sequence[int]) -> bool:
        """Whether a row may have more than one value of a column."""
        schema = schema_of(self._file.metadata)
        return any(schema.column(leaf).max_repetition_level for leaf in leaves)

    def _check_decoded(self, size: int) -> None:
        if size > self._most:
            raise InputError(
                f"{self._name} decodes to more than {self._most >> 20:,} MiB, far more than its size: build or pull it "
                "again"
            )

    @contextmanager
    def _reading(self) -> Iterator[None]:
        try:
            yield
        except PagesError as hostile:
            sentence = f"{self._name} is not a readable passage file ({hostile}): build or pull it again"
            raise InputError(sentence) from hostile
        except (pa.ArrowException, OSError, ValueError) as broken:  # ValueError: no UTF-8, or an impossible date
            sentence = f"{self._name} is not a readable passage file ({reason(broken)}): build or pull it again"
            raise InputError(sentence) from broken

    def _group_of(self, row: int) -> int:
        if not 0 <= row < self.n_rows:
            raise IndexError(f"row {row} lies outside a passage file of {self.n_rows} rows")
        return bisect_right(self._starts, row) - 1

    def close(self) -> None:
        """Close the file, if it was opened here."""
        self._file.close()
        if "_dictionaries" in self.__dict__:
            self._dictionaries.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def passage_parquet(path: Path, schema: pa.Schema) -> pq.ParquetWriter:
    """Return what writes a passage file's row groups, of `ROW_GROUP` rows each: equal rows give equal bytes.

    One checksum per Parquet page: a reader by range detects damage without reading the whole file.
    """
    return pq.ParquetWriter(path, schema, compression="zstd", store_schema=False, write_page_checksum=True)


def in_seconds(dates: pa.Array) -> pa.Array:
    """Return a column of dates (`revised`) in whole seconds since 1970, UTC: int64, null where they are.

    Raises:
        ValueError: a date is no whole second, or lies outside of the years 1 to 9999.
    """
    seconds = dates.cast(_SECONDS).cast(pa.int64())
    for bound in pc.min_max(seconds).as_py().values():
        checked(bound or 0)
    return seconds


def hashes_of(passages: Path) -> pa.Array:
    """Return the hashes of a part's passages, in row order.

    Raises:
        InputError: the file is missing or corrupt.
    """
    with PassageFile(passages, ["hash"]) as file:
        found = [batch.column(0) for batch in file.iter_batches(["hash"])]
    return pa.chunked_array(found, pa.string()).combine_chunks()


def _array(values: Sequence[Any], kind: pa.DataType) -> pa.Array:
    return pa.array(values, _SECONDS).cast(kind) if pa.types.is_timestamp(kind) else pa.array(values, kind)


def _passages(table: pa.Table) -> list[Passage]:
    """Return the passages of rows, their dates in seconds.

    Raises:
        ValueError: as `in_seconds`.
    """
    place = table.schema.get_field_index(DATE)
    if place >= 0:
        table = table.set_column(place, DATE, in_seconds(table.column(place)))
    return [Passage(**row) for row in table.to_pylist()]


def _whole(batch: pa.RecordBatch, wanted: Sequence[str]) -> pa.RecordBatch:
    """Return a batch with the dates that were asked for, null where its file has none."""
    if DATE not in wanted or DATE in batch.schema.names:
        return batch
    field = PASSAGE_SCHEMA.field(DATE)
    columns = [*batch.columns, pa.nulls(batch.num_rows, field.type)]
    return pa.record_batch(columns, schema=batch.schema.append(field))


def _numbers(rows: Iterable[int], start: int) -> pa.Array:
    """Return rows, counted from `start`, for `take`; to make an array of a list, Arrow imports pandas if it can."""
    numbers = np.fromiter(rows, np.int64) - start
    return pa.Array.from_buffers(pa.int64(), len(numbers), [None, pa.py_buffer(numbers)])


def _size_of(source: Path | IO[bytes]) -> int:
    if isinstance(source, Path):
        return source.stat().st_size
    size = source.seek(0, 2)
    source.seek(0)
    return size


def _decoded_size(batch: pa.RecordBatch) -> int:
    if any(map(pa.types.is_dictionary, batch.schema.types)):
        return sum(map(decoded_size, batch.columns))
    return int(batch.get_total_buffer_size())


def _plain(batch: pa.RecordBatch) -> pa.RecordBatch:
    """Return a batch whose texts are decoded."""
    if not any(map(pa.types.is_dictionary, batch.schema.types)):
        return batch
    columns = [one.dictionary_decode() if pa.types.is_dictionary(one.type) else one for one in batch.columns]
    schema = pa.schema([field.with_type(column.type) for field, column in zip(batch.schema, columns, strict=True)])
    return pa.record_batch(columns, schema=schema)
