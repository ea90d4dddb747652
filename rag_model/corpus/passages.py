"""Passage files: Parquet with small row groups, so that a single passage is cheap to read.

The *logical digest* of a file depends only on the values of its rows, article by article, so
another Parquet version or compression level does not change memo keys. Files are written
atomically: a file that exists is complete. Files written before passages had dates have no column
`revised`, and files that contain only prose have no column `kind`.
"""

import hashlib
from bisect import bisect_right
from collections import Counter, OrderedDict
from collections.abc import Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from itertools import accumulate, chain, groupby, pairwise
from json.encoder import encode_basestring
from operator import attrgetter
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from rag_model.atomic_write import atomic_write
from rag_model.corpus.records import PROSE, Passage, check_seconds
from rag_model.digest import ALGORITHM
from rag_model.errors import InputError, format_error
from rag_model.parquet_pages import (
    BASE_DECODED_BYTES,
    MAX_EXPANSION,
    ParquetError,
    check_footer,
    check_pages,
    compute_decoded_size,
    find_column_start,
    has_repeated_values,
    list_leaf_numbers,
    list_text_column_paths,
    open_random_access,
)

ARTICLE_DIGEST_BYTES = 16  # first bytes of the SHA-256 digest
ROW_GROUP = 1024  # rows; 20 random rows take about 10 ms to read, or 455 ms from groups of 50,000
# A 2 KB file can repeat a 1 MB text 5,000 times, so the decoded size is limited by the file size.
_MAX_GROUP_ROWS = 1 << 16  # rows
_MAX_GROUP_BYTES = 512 << 20  # bytes of one decoded row group
_MIN_BATCH_ROWS = 256  # minimum rows of a batch
# White space of `str.split()` outside of ASCII, in UTF-8: first two bytes -> possible third bytes.
_WIDE_SPACES: dict[int, list[int]] = {
    **{0xC285: [], 0xC2A0: [], 0xE19A: [0x80], 0xE281: [0x9F], 0xE380: [0x80]},
    0xE280: [*range(0x80, 0x8B), 0xA8, 0xA9, 0xAF],
}
PAGE_HEADER_BYTES = 1 << 10  # maximum bytes read for a header, even past the row group

UNDATED_SCHEMA = pa.schema(  # schema of files written before passages had dates
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
DATE, KIND = "revised", "kind"  # names of columns that a passage file may lack
_SECONDS = pa.timestamp("s", tz="UTC")
# Parquet has no unit of seconds.
PASSAGE_SCHEMA = UNDATED_SCHEMA.append(pa.field(DATE, pa.timestamp("ms", tz="UTC")))
# This schema also has the kind of each passage; used only for snapshots with structures.
KIND_SCHEMA = PASSAGE_SCHEMA.append(pa.field(KIND, pa.string(), nullable=False))
METADATA_COLUMNS = ("language", "wikidata", "categories")
# This schema also has metadata of each passage's page; used only for snapshots whose recipe
# requests them.
_METADATA_FIELDS = [pa.field(name, pa.string(), nullable=False) for name in METADATA_COLUMNS]
FULL_SCHEMA = pa.schema([*KIND_SCHEMA, *_METADATA_FIELDS])
PASSAGE_SCHEMAS = (PASSAGE_SCHEMA, KIND_SCHEMA, FULL_SCHEMA, UNDATED_SCHEMA)
_REQUIRED = UNDATED_SCHEMA.names  # columns of every passage file
_TEXTS = [field.name for field in FULL_SCHEMA if pa.types.is_string(field.type)]
# Values for columns that a file does not have.
_DEFAULTS = {KIND: PROSE, **dict.fromkeys(METADATA_COLUMNS, "")}


class PassageWriter:
    """Write passages to a new Parquet file; little more than a row group is in memory.

    `rows`, `digest` and `lengths` cover the passages written so far. If the block fails, no file is
    created.
    """

    def __init__(self, path: Path, schema: pa.Schema = PASSAGE_SCHEMA) -> None:
        """Write to `path` the columns of `schema`, which is one of `PASSAGE_SCHEMAS`."""
        self._schema = schema
        # This takes a tenth of the time of `astuple`, which copies values.
        self._get_values = attrgetter(*self._schema.names)
        self.rows = 0
        self.lengths = Counter[int]()  # passage counts by number of words
        self._hasher = hashlib.sha256()
        self._written_rows = 0
        self._tables: list[pa.Table] = []  # tables of rows that are not written yet
        self._new_rows: list[tuple[Any, ...]] = []
        # (file, first row, end row) of rows to copy from another file
        self._run: tuple[PassageFile, int, int] | None = None
        self._atomic_write = atomic_write(path)
        self._file: pq.ParquetWriter

    def write(self, passage: Passage) -> None:
        """Append one passage, as an article of its own."""
        self.write_article([passage])

    def write_article(self, passages: Sequence[Passage]) -> bytes:
        """Append the passages of an article; return their digest, 16 bytes."""
        self._flush_run()
        rows = list(map(self._get_values, passages))
        digest = hashlib.sha256(b"".join(map(_encode_row, rows))).digest()[:ARTICLE_DIGEST_BYTES]
        self._new_rows += rows
        self._record_rows(len(rows), digest)
        return digest

    def write_table(self, rows: pa.Table) -> None:
        """Append a table with this file's schema; `digest` does not cover its rows."""
        self._flush_new_rows()
        self._flush_run()
        self._tables.append(rows)
        self._record_rows(rows.num_rows, b"")

    def copy_article(self, file: "PassageFile", first_row: int, n_rows: int, digest: bytes) -> None:
        """Append an article from the rows of another file; `digest` is the article's digest.

        Consecutive articles are copied together, as columns. The file must stay open.

        Raises:
            InputError: the other file is damaged.
        """
        self._flush_new_rows()
        if self._run is not None and self._run[0] is file and self._run[2] == first_row:
            self._run = file, self._run[1], first_row + n_rows
        else:
            self._flush_run()
            self._run = file, first_row, first_row + n_rows
        self._record_rows(n_rows, digest)

    @property
    def digest(self) -> str:
        """The digest of the rows in order: SHA-256 over the digests of the articles.

        The digest of an article is SHA-256 over one line of canonical JSON for each passage.
        """
        return f"{ALGORITHM}:{self._hasher.hexdigest()}"

    def _record_rows(self, n_passages: int, digest: bytes) -> None:
        self._hasher.update(digest if n_passages else b"")
        self.rows += n_passages
        if self.rows - self._written_rows >= ROW_GROUP:
            self._write_row_groups(ROW_GROUP)

    def _flush_new_rows(self) -> None:
        if self._new_rows:
            columns = zip(*self._new_rows, strict=True)
            arrays = [_build_array(column, field.type) for column, field in zip(columns, self._schema, strict=True)]
            self._tables.append(pa.Table.from_arrays(arrays, schema=self._schema))
            self._new_rows.clear()

    def _flush_run(self) -> None:
        if self._run is not None:
            (file, first_row, end_row), self._run = self._run, None
            tables = file.iter_tables(first_row, end_row)
            self._tables += [table if table.schema == self._schema else table.cast(self._schema) for table in tables]

    def _write_row_groups(self, min_rows: int) -> None:
        """Write row groups until fewer than `min_rows` collected rows are left."""
        self._flush_new_rows()
        self._flush_run()
        table = pa.concat_tables(self._tables)
        self._tables.clear()
        while table.num_rows >= min_rows:
            row_group = table.slice(0, ROW_GROUP).combine_chunks()
            self._file.write_table(row_group, row_group_size=ROW_GROUP)
            lengths, length_counts = np.unique(row_group["n_words"].to_numpy(), return_counts=True)
            self.lengths.update(dict(zip(lengths.tolist(), length_counts.tolist(), strict=True)))
            self._written_rows += row_group.num_rows
            table = table.slice(ROW_GROUP)
        if table.num_rows:
            self._tables.append(table)

    def __enter__(self) -> Self:
        self._file = open_passage_writer(self._atomic_write.__enter__(), self._schema)
        return self

    def __exit__(
        self, error_type: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error_type is None and self.rows > self._written_rows:
            self._write_row_groups(1)
        self._file.close()
        self._atomic_write.__exit__(error_type, error, trace)


class DecodedCache:
    """A least-recently-used cache of decoded row groups or passages; not thread-safe."""

    def __init__(self, max_bytes: int) -> None:
        """Create a cache that holds values of at most `max_bytes` in total."""
        self._max_bytes, self._bytes = max_bytes, 0
        self._values: OrderedDict[Hashable, tuple[Any, int]] = OrderedDict()

    def find(self, key: Hashable) -> Any:
        """Return the value of a key, or None, and mark it as recently used."""
        if key in self._values:
            self._values.move_to_end(key)
        return self._values.get(key, (None,))[0]

    def add(self, key: Hashable, value: Any, nbytes: int) -> None:
        """Add or replace a value, and evict the least recently used values beyond the limit."""
        self._bytes += nbytes - self._values.pop(key, (None, 0))[1]
        self._values[key] = value, nbytes
        while self._bytes > self._max_bytes:
            self._bytes -= self._values.popitem(last=False)[1][1]


class PassageFile:
    """Read a passage file by batch or by row, from a path or a seekable binary file."""

    def __init__(
        self,
        source: Path | IO[bytes],
        required_columns: Sequence[str] = _REQUIRED,
        group_cache: DecodedCache | None = None,
    ) -> None:
        """Open the file and read its footer.

        `read_rows` keeps row groups in `group_cache`; files that share a cache must have different
        names.

        Raises:
            InputError: The file is not Parquet, or one of `required_columns` is missing.
        """
        self._source, self._name = source, getattr(source, "name", source)
        self._group_cache = group_cache
        # (row group, position of a leaf column) -> maximum bytes of a string in its dictionary
        self._checked_leaves: dict[tuple[int, int], int] = {}
        with self._translate_errors():
            self._file = self._open_parquet()
            columns = self._file.schema_arrow.names
        missing_columns = [column for column in required_columns if column not in columns]
        if missing_columns:
            column_list = ", ".join(missing_columns)
            raise InputError(f"{self._name} lacks the columns {column_list} of a passage file: build it again")
        schemas = sorted(PASSAGE_SCHEMAS, key=len, reverse=True)
        # The largest passage schema whose columns are all in the file.
        self.schema = next(schema for schema in schemas if {*schema.names[len(_REQUIRED) :]} <= {*columns})
        self._last_group: tuple[int, pa.Table] | None = None
        metadata = self._file.metadata
        self.n_rows: int = metadata.num_rows
        group_sizes = [metadata.row_group(i).num_rows for i in range(metadata.num_row_groups)]
        file_bytes = _get_size(source)
        self._max_decoded = BASE_DECODED_BYTES + MAX_EXPANSION * file_bytes
        is_plausible = all(0 <= n_rows <= _MAX_GROUP_ROWS for n_rows in group_sizes) and self.n_rows <= file_bytes
        if sum(group_sizes) != self.n_rows or not is_plausible:
            size_claim = f"claims {self.n_rows:,} rows in {file_bytes:,} bytes"
            raise InputError(f"{self._name} {size_claim}: build or pull it again")
        with self._translate_errors():
            check_footer(metadata, file_bytes)
        for group in range(metadata.num_row_groups):  # check sizes before Arrow allocates memory
            self._check_decoded_size(metadata.row_group(group).total_byte_size)
        self._starts = [0, *accumulate(group_sizes)]

    @property
    def name(self) -> str:
        """The path of the file, for messages."""
        return str(self._name)

    @property
    def has_dates(self) -> bool:
        """Whether the file has dates."""
        return DATE in self.schema.names

    @property
    def created_by(self) -> str:
        """The name and version of the Parquet library that wrote the file."""
        return str(self._file.metadata.created_by)

    @property
    def metadata(self) -> dict[bytes, bytes]:
        """The metadata of the Parquet file; empty for plain passage files."""
        return dict(self._file.metadata.metadata or {})

    def iter_batches(self, columns: Sequence[str] | None = None, max_rows: int = ROW_GROUP) -> Iterator[pa.RecordBatch]:
        """Yield the rows in order, at most `max_rows` at a time, with all or the given columns.

        Requested columns that the file does not have are filled with null dates, kind `prose` or
        empty metadata.

        Raises:
            InputError: The file is damaged, or decodes to far more bytes than its size.
        """
        all_columns = (self.schema if self.has_dates else PASSAGE_SCHEMA).names
        column_names, decoded_bytes = all_columns if columns is None else list(columns), 0
        stored_columns = self._select_stored_columns(column_names)
        leaves = list_leaf_numbers(self._file.metadata, stored_columns)
        max_row_bytes = self._check_pages(range(self._file.num_row_groups), leaves)
        while max_rows > _MIN_BATCH_ROWS and max_rows * max_row_bytes > _MAX_GROUP_BYTES:
            max_rows //= 2
        file = self._select_file(max_rows, max_row_bytes, leaves)
        with self._translate_errors():
            for batch in file.iter_batches(batch_size=max_rows, columns=stored_columns, use_threads=False):
                decoded_bytes += _compute_batch_bytes(batch)
                self._check_decoded_size(decoded_bytes)
                yield _add_missing_columns(decode_dictionaries(batch), column_names)

    def iter_selected(self, rows: Sequence[int], columns: Sequence[str]) -> Iterator[pa.RecordBatch]:
        """Yield the given ascending rows with these columns; read only their row groups.

        Raises:
            InputError: The file is damaged, or decodes to far more bytes than its size.
        """
        stored_columns = self._select_stored_columns(columns)
        leaves = list_leaf_numbers(self._file.metadata, stored_columns)
        for group, group_rows in groupby(rows, self._find_group):
            self._check_pages([group], leaves)
            with self._translate_errors():
                table = self._dictionary_file.read_row_group(group, columns=stored_columns, use_threads=False)
                selected_rows = table.take(_build_row_array(group_rows, self._starts[group])).combine_chunks()
                for batch in selected_rows.to_batches():
                    self._check_decoded_size(sum(map(compute_decoded_size, batch.columns)))
                    yield _add_missing_columns(decode_dictionaries(batch), columns)

    def iter_tables(self, first_row: int, end_row: int) -> Iterator[pa.Table]:
        """Yield the stored columns of the rows [first_row, end_row), a table for each row group.

        The row group that was read last is kept in memory.

        Raises:
            InputError: The file is damaged, or decodes to far more bytes than its size.
        """
        while first_row < end_row:
            group = self._find_group(first_row)
            if self._last_group is None or self._last_group[0] != group:
                self._last_group = group, self._read_group(group)
            group_start = self._starts[group]
            table = self._last_group[1].slice(first_row - group_start, end_row - first_row)
            yield table
            first_row += table.num_rows

    def _read_group(self, group: int) -> pa.Table:
        names = self.schema.names
        leaves = list_leaf_numbers(self._file.metadata, names)
        max_row_bytes = self._check_pages([group], leaves)
        file = self._select_file(self._starts[group + 1] - self._starts[group], max_row_bytes, leaves)
        with self._translate_errors():
            (batch,) = file.read_row_group(group, names, use_threads=False).combine_chunks().to_batches()
            self._check_decoded_size(sum(map(compute_decoded_size, batch.columns)))
            return pa.Table.from_batches([decode_dictionaries(batch)])

    def iter_passages(self) -> Iterator[Passage]:
        """Yield every passage in row order."""
        for batch in self.iter_batches():
            with self._translate_errors():
                passages = _table_to_passages(pa.Table.from_batches([batch]))
            yield from passages

    def read_rows(self, rows: Sequence[int]) -> list[Passage]:
        """Return the passages of these rows (0 <= row < n_rows), in the given order.

        Reads only the row groups of these rows.

        Raises:
            IndexError: A row is outside the file.
            InputError: The file is damaged, or decodes to far more bytes than its size.
        """
        groups, stored_columns = [self._find_group(row) for row in rows], self.schema.names
        leaves = list_leaf_numbers(self._file.metadata, stored_columns)
        passage_by_row: dict[int, Passage] = {}
        for group in sorted(set(groups)):
            group_start = self._starts[group]
            group_rows = sorted({row for row, row_group in zip(rows, groups, strict=True) if row_group == group})
            group_table = self._find_or_read_group(group, stored_columns, leaves)
            with self._translate_errors():
                table = group_table.take(_build_row_array(group_rows, group_start))
                self._check_decoded_size(
                    sum(compute_decoded_size(chunk) for column in table.columns for chunk in column.chunks)
                )
                passage_by_row.update(zip(group_rows, _table_to_passages(table), strict=True))
        return [passage_by_row[row] for row in rows]

    def _find_or_read_group(self, group: int, stored_columns: list[str], leaves: Sequence[int]) -> pa.Table:
        """Return a whole row group with dictionary-encoded texts, from the cache if it is there."""
        key = str(self._name), group
        table: pa.Table | None = None if self._group_cache is None else self._group_cache.find(key)
        if table is None:
            self._check_pages([group], leaves)
            with self._translate_errors():
                # Threads would more than double the CPU time for 1,024 passages, and take longer on
                # two cores.
                table = self._dictionary_file.read_row_group(group, stored_columns, use_threads=False)
            if self._group_cache is not None:
                self._group_cache.add(key, table, table.nbytes)
        return table

    @cached_property
    def _dictionary_file(self) -> pq.ParquetFile:
        """The file with dictionary-encoded texts, so that repeated texts are in memory once."""
        metadata = self._file.metadata
        return self._open_parquet(metadata=metadata, read_dictionary=list_text_column_paths(metadata, _TEXTS))

    def _open_parquet(self, **options: Any) -> pq.ParquetFile:
        """Open the file; read a local file without read-ahead threads, which cost CPU time."""
        pre_buffer = not isinstance(self._source, Path)
        return pq.ParquetFile(self._source, page_checksum_verification=True, pre_buffer=pre_buffer, **options)

    def _select_stored_columns(self, columns: Sequence[str]) -> list[str]:
        """Return the columns that the file contains; dates, kinds and metadata may be missing."""
        missing_columns = {*FULL_SCHEMA.names} - {*self.schema.names}
        # one column is needed to count the rows
        return [name for name in columns if name not in missing_columns] or ["n_words"]

    def _check_pages(self, groups: Sequence[int], leaves: Sequence[int]) -> int:
        """Check the decoded size of each column chunk once, before Arrow decodes it.

        `leaves` are the positions of Parquet's leaf columns. Returns the maximum bytes of the texts
        of one row.
        """
        unchecked_leaves_by_group = {
            group: [leaf for leaf in leaves if (group, leaf) not in self._checked_leaves] for group in groups
        }
        if any(unchecked_leaves_by_group.values()):
            with self._translate_errors(), open_random_access(self._source) as read_range:
                for group, group_leaves in unchecked_leaves_by_group.items():
                    get_column = self._file.metadata.row_group(group).column
                    dictionary_bytes = check_pages(
                        read_range, map(get_column, group_leaves), min(self._max_decoded, _MAX_GROUP_BYTES)
                    )
                    self._checked_leaves.update(
                        zip([(group, leaf) for leaf in group_leaves], dictionary_bytes, strict=True)
                    )
        return max((sum(self._checked_leaves[group, leaf] for leaf in leaves) for group in groups), default=0)

    def _select_file(self, n_rows: int, max_row_bytes: int, leaves: Sequence[int]) -> pq.ParquetFile:
        """Choose the file without dictionaries, which is faster, unless the rows may be large."""
        is_small = n_rows * max_row_bytes <= _MAX_GROUP_BYTES and not has_repeated_values(self._file.metadata, leaves)
        return self._file if is_small else self._dictionary_file

    def _check_decoded_size(self, n_bytes: int) -> None:
        if n_bytes > self._max_decoded:
            raise InputError(
                f"{self._name} decodes to more than {self._max_decoded >> 20:,} MiB, far more than "
                "its size: build or pull it again"
            )

    @contextmanager
    def _translate_errors(self) -> Iterator[None]:
        try:
            yield
        except ParquetError as error:
            message = f"{self._name} is not a readable passage file ({error}): build or pull it again"
            raise InputError(message) from error
        # ValueError: invalid UTF-8 or date.
        except (pa.ArrowException, OSError, ValueError) as error:
            message = f"{self._name} is not a readable passage file ({format_error(error)}): build or pull it again"
            raise InputError(message) from error

    def _find_group(self, row: int) -> int:
        if not 0 <= row < self.n_rows:
            raise IndexError(f"row {row} is outside a passage file of {self.n_rows} rows")
        return bisect_right(self._starts, row) - 1

    def list_ranges(self, rows: Sequence[int]) -> list[tuple[int, int]]:
        """Return the byte ranges of the file that `read_rows` reads for these rows."""
        return [self._locate_group(group) for group in sorted(set(map(self._find_group, rows)))]

    def build_outline(self) -> dict[str, Any] | None:
        """Return the rows per group and the groups' byte ranges; None if group sizes differ."""
        group_sizes = {end - start for start, end in pairwise(self._starts[:-1])}
        group_rows = group_sizes.pop() if group_sizes else ROW_GROUP
        if group_sizes or self._starts[-1] - self._starts[-2] > group_rows:
            return None
        return {"rows": group_rows, "ranges": [self._locate_group(group) for group in range(len(self._starts) - 1)]}

    def _locate_group(self, group: int) -> tuple[int, int]:
        metadata = self._file.metadata.row_group(group)
        chunks = [metadata.column(leaf) for leaf in list_leaf_numbers(self._file.metadata, self.schema.names)]
        chunk_starts = list(map(find_column_start, chunks))
        chunk_ends = [start + chunk.total_compressed_size for start, chunk in zip(chunk_starts, chunks, strict=True)]
        return min(chunk_starts), max(chunk_ends) + PAGE_HEADER_BYTES

    def close(self) -> None:
        """Close the file."""
        self._file.close()
        if "_dictionary_file" in self.__dict__:
            self._dictionary_file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def to_passages(tables: Iterable[pa.Table]) -> list[Passage]:
    """Return the passages in the tables of `PassageFile.iter_tables`.

    Raises:
        InputError: A date is invalid.
    """
    try:
        return [passage for table in tables for passage in _table_to_passages(table)]
    except ValueError as error:
        raise InputError(f"a passage's date is invalid ({error}): build its part again") from error


def open_passage_writer(path: Path, schema: pa.Schema) -> pq.ParquetWriter:
    """Open a Parquet writer for passages; equal rows in equal row groups become equal bytes.

    Each Parquet page has a checksum, so a reader of byte ranges detects damage without reading the
    whole file.
    """
    return pq.ParquetWriter(path, schema, compression="zstd", store_schema=False, write_page_checksum=True)


def to_seconds(dates: pa.Array) -> pa.Array:
    """Convert a column of dates to seconds since 1970, UTC: int64, with nulls.

    Raises:
        ValueError: A date is not a whole second, or outside of the years 1 to 9999.
    """
    seconds = dates.cast(_SECONDS).cast(pa.int64())
    for date_bound in pc.min_max(seconds).as_py().values():
        check_seconds(date_bound or 0)
    return seconds


def read_hashes(passages: Path) -> pa.Array:
    """Return the hashes of a part's passages in row order.

    Raises:
        InputError: The file is missing or corrupt.
    """
    with PassageFile(passages, ["hash"]) as file:
        hash_columns = [batch.column(0) for batch in file.iter_batches(["hash"])]
    return pa.chunked_array(hash_columns, pa.string()).combine_chunks()


def build_passage_table(
    ids: pa.Array, titles: pa.Array, texts: pa.Array, revised: pa.Array, page_ids: pa.Array
) -> pa.Table:
    """Build the table of imported passages from their columns.

    Passages with empty page ids and the same title form a page; a passage with neither a page id
    nor a title is a page by itself.
    """
    n_rows, default_page_ids = len(ids), pc.if_else(pc.equal(titles, ""), ids, titles)
    columns = {
        "id": ids,
        "page_id": pc.if_else(pc.equal(page_ids, ""), default_page_ids, page_ids),
        "rev_id": pa.repeat(0, n_rows),
        "title": titles,
        "section": pa.repeat("", n_rows),
        "text": texts,
        "start_word": pa.repeat(0, n_rows),
        "n_words": pa.array(count_words(texts)),
        "hash": hash_passages(titles, texts),
        DATE: revised.cast(_SECONDS),
    }
    arrays = [columns[field.name].cast(field.type) for field in PASSAGE_SCHEMA]
    return pa.Table.from_arrays(arrays, schema=PASSAGE_SCHEMA)


def count_words(texts: pa.Array) -> npt.NDArray[np.int32]:
    """Return (n,) `len(text.split())` of each text, without creating Python strings."""
    data, offsets = _view_strings(texts)
    is_space = (data == 0x20) | (data - 0x09 < 5) | (data - 0x1C < 4)  # unsigned: never below 0
    if data.max(initial=0) > 0x7F:
        byte_pairs = data[:-1].astype(np.uint16) << 8 | data[1:]
        for space_pair, third_bytes in _WIDE_SPACES.items():
            space_starts = np.flatnonzero(byte_pairs == space_pair)
            if third_bytes:
                space_starts = space_starts[np.isin(data[space_starts + 2], third_bytes)]
                is_space[space_starts + 2] = True
            is_space[space_starts] = is_space[space_starts + 1] = True
    starts_word = ~is_space
    starts_word[1:] &= is_space[:-1]
    is_nonempty = offsets[:-1] < offsets[1:]
    first_bytes = offsets[:-1][is_nonempty]
    # a text starts a word even if the previous text ends with a letter
    starts_word[first_bytes] = ~is_space[first_bytes]
    word_counts = np.zeros(len(texts), np.int32)
    if len(first_bytes):
        word_counts[is_nonempty] = np.add.reduceat(starts_word, first_bytes, dtype=np.int32)
    return word_counts


def hash_passages(titles: pa.Array, texts: pa.Array) -> pa.Array:
    """Return `Passage.hash_of` for each row, from the canonical JSON of all rows at once."""
    columns = map(_escape_json, (titles, texts))
    json_pairs = pc.binary_join_element_wise('["', *chain.from_iterable(zip(columns, ('","', '"]'), strict=True)), "")
    json_bytes, offsets = _view_strings(json_pairs)
    byte_view, sha256 = json_bytes.data, hashlib.sha256
    digests = b"".join([sha256(byte_view[start:end]).digest()[:16] for start, end in pairwise(offsets.tolist())])
    hash_offsets = np.arange(len(json_pairs) + 1, dtype=np.int32) * 32
    buffers = [None, pa.py_buffer(hash_offsets), pa.py_buffer(digests.hex().encode())]
    return pa.Array.from_buffers(pa.string(), len(json_pairs), buffers)


def _escape_json(strings: pa.Array) -> pa.Array:
    """Escape a column as `encode_basestring` does, without the quotation marks around a string."""
    data, _ = _view_strings(strings)
    special_bytes = np.unique(data[(data < 0x20) | (data == 0x22) | (data == 0x5C)])
    # The backslash is escaped first, because the escapes of other characters contain it.
    for character in map(chr, sorted(special_bytes.tolist(), key=lambda byte: byte != 0x5C)):
        strings = pc.replace_substring(strings, character, encode_basestring(character)[1:-1])
    return strings


def _view_strings(strings: pa.Array) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.int64]]:
    """Return the UTF-8 bytes of a column without nulls, and its (n + 1,) offsets from 0."""
    _, offset_buffer, data_buffer = strings.buffers()
    if not len(strings) or data_buffer is None:
        return np.zeros(0, np.uint8), np.zeros(len(strings) + 1, np.int64)
    offsets = np.frombuffer(offset_buffer, np.int32)[strings.offset :][: len(strings) + 1].astype(np.int64)
    return np.frombuffer(data_buffer, np.uint8)[offsets[0] : offsets[-1]], offsets - offsets[0]


def _encode_row(row: Sequence[str | int | None]) -> bytes:
    """Return the row as a line of canonical JSON; the general encoder takes twice as long."""
    json_values = ["null" if v is None else encode_basestring(v) if isinstance(v, str) else str(v) for v in row]
    return f"[{','.join(json_values)}]\n".encode()


def _build_array(values: Sequence[Any], dtype: pa.DataType) -> pa.Array:
    return pa.array(values, _SECONDS).cast(dtype) if pa.types.is_timestamp(dtype) else pa.array(values, dtype)


def _table_to_passages(table: pa.Table) -> list[Passage]:
    """Convert rows to passages.

    Raises:
        ValueError: As for `to_seconds`.
    """
    date_index = table.schema.get_field_index(DATE)
    if date_index >= 0:
        table = table.set_column(date_index, DATE, to_seconds(table.column(date_index)))
    return [Passage(**row) for row in table.to_pylist()]


def _add_missing_columns(batch: pa.RecordBatch, columns: Sequence[str]) -> pa.RecordBatch:
    """Add requested columns that are missing: null dates, kind `prose`, empty metadata."""
    for name in (DATE, *_DEFAULTS):
        if name in columns and name not in batch.schema.names:
            field, default = FULL_SCHEMA.field(name), _DEFAULTS.get(name)
            n_rows = batch.num_rows
            column = pa.nulls(n_rows, field.type) if name == DATE else pa.repeat(default, n_rows)
            batch = pa.record_batch([*batch.columns, column], schema=batch.schema.append(field))
    return batch if batch.schema.names == list(columns) else batch.select(columns)


def _build_row_array(row_numbers: Iterable[int], first_row: int) -> pa.Array:
    """Return `row_numbers` - `first_row` in Arrow; the conversion of a list would import pandas."""
    offsets = np.fromiter(row_numbers, np.int64) - first_row
    return pa.Array.from_buffers(pa.int64(), len(offsets), [None, pa.py_buffer(offsets)])


def _get_size(source: Path | IO[bytes]) -> int:
    if isinstance(source, Path):
        return source.stat().st_size
    size = source.seek(0, 2)
    source.seek(0)
    return size


def _compute_batch_bytes(batch: pa.RecordBatch) -> int:
    if any(map(pa.types.is_dictionary, batch.schema.types)):
        return sum(map(compute_decoded_size, batch.columns))
    return int(batch.get_total_buffer_size())


def decode_dictionaries(batch: pa.RecordBatch) -> pa.RecordBatch:
    """Decode the dictionary columns of a batch, since Arrow converts plain columns much faster."""
    if not any(map(pa.types.is_dictionary, batch.schema.types)):
        return batch
    arrays = [column.dictionary_decode() if pa.types.is_dictionary(column.type) else column for column in batch.columns]
    schema = pa.schema([field.with_type(column.type) for field, column in zip(batch.schema, arrays, strict=True)])
    return pa.record_batch(arrays, schema=schema)
