"""Bound the decoded size of a Parquet file by reading the headers of its pages.

A footer may lie, and a page of a kilobyte can decode to two gigabytes: Arrow allocates the size
that the page's own header states. Therefore the headers (about 40 bytes each) are read and checked
first. A child process with a memory limit would also work, but transferring batches costs as much
as reading them; reading the headers costs about a fiftieth of it.

Source: github.com/apache/parquet-format, `parquet.thrift`; Thrift's compact protocol.
"""

import mmap
import re
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache, partial
from itertools import accumulate, pairwise
from pathlib import Path
from typing import IO, Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

# Bytes to try until a header fits; statistics may make it long.
_READ_SIZES = (256, 1 << 14, 1 << 20)
_BUFFER_BYTES = 1 << 20  # bytes of a column that are read at once
DATA_PAGE, DICTIONARY_PAGE, _DATA_PAGE_V2 = 0, 2, 3  # page types
_DELTA_BYTE_ARRAY = 7  # an encoding in which a value may repeat the whole previous one
_WIDTHS = {"BOOLEAN": 1, "INT32": 4, "INT64": 8, "INT96": 12, "FLOAT": 4, "DOUBLE": 8, "BYTE_ARRAY": 8}
# MAP_NORESERVE.
_EMPTY_MAP_FLAGS = mmap.MAP_SHARED | mmap.MAP_ANONYMOUS | (0x4000 if sys.platform == "linux" else 0)
FREE_BYTES = 256 << 20  # decoded bytes that a row group of any file may have
MAX_EXPANSION = 100  # a row group may decode to FREE_BYTES + this factor times the file size
_VARINT_PATTERN = rb"[\x80-\xff]{0,4}[\x00-\x7f]"
_HEADER_PATTERN = rb"\x15(%b)\x15(%b)(?:\x15%b%%b|%%b)\x15(%b)\x15(%b)" % ((_VARINT_PATTERN,) * 5)
# Headers of most writers, except statistics at the end. A match takes a tenth of `_parse_struct`'s
# time.
_USUAL_HEADERS = {
    DICTIONARY_PAGE: re.compile(rb"\x15\x04%b[\x11\x12]?\x00\x00" % (_HEADER_PATTERN % (b"\x3c", b"\x4c"))),
    DATA_PAGE: re.compile(
        rb"\x15\x00%b\x15%b\x15%b(?:\x1c|\x00\x00)"
        % (_HEADER_PATTERN % (b"\x1c", b"\x2c"), _VARINT_PATTERN, _VARINT_PATTERN)
    ),
}
_BAD_HEADER = "has a page with an invalid header"
_MAX_DEPTH = 8  # nested structs; a page header has three levels


class PagesError(ValueError):
    """The pages of a column are invalid or too large; the message lacks a full stop."""


# Header bytes, page type, decoded bytes, stored bytes, values, encoding. A class would take twice
# as long.
_Page = tuple[int, int, int, int, int, int]
ReadAt = Callable[[int, int], bytes]  # (offset, size) -> bytes of a file


def get_schema(metadata: pq.FileMetaData) -> pq.ParquetSchema:
    """Return the schema of a footer.

    `metadata.schema` is not used because it forms a reference cycle with `metadata`: both would
    stay in memory until the garbage collector runs, which is rare in the command.
    """
    return pq.ParquetSchema(metadata)


def list_leaves(metadata: pq.FileMetaData, columns: Collection[str]) -> list[int]:
    """Return the leaf numbers of these columns; a nested column has several leaves."""
    schema = get_schema(metadata)
    return [
        leaf_number
        for leaf_number in range(len(schema))
        if schema.column(leaf_number).path.partition(".")[0] in columns
    ]


def has_repeated_values(metadata: pq.FileMetaData, leaves: Iterable[int]) -> bool:
    """Return whether a row may have several values of one of these leaves."""
    schema = get_schema(metadata)
    return any(schema.column(leaf).max_repetition_level for leaf in leaves)


def list_text_paths(metadata: pq.FileMetaData, columns: Collection[str]) -> list[str]:
    """Return the paths of text leaves, which Arrow can read as dictionaries."""
    schema = get_schema(metadata)
    leaves = [schema.column(leaf_number) for leaf_number in list_leaves(metadata, columns)]
    return [leaf.path for leaf in leaves if leaf.physical_type == "BYTE_ARRAY"]


def compute_decoded_size(column: Any) -> int:
    """Return the bytes of a column if every row had its own copy of its dictionary value."""
    data_type = column.type
    if pa.types.is_dictionary(data_type):
        return int(pc.sum(pc.binary_length(column.dictionary).take(column.indices)).as_py() or 0)
    if pa.types.is_struct(data_type):
        return sum(compute_decoded_size(inner) for inner in column.flatten())
    if pa.types.is_list(data_type) or pa.types.is_large_list(data_type):
        return compute_decoded_size(column.flatten()) + 8 * len(column)
    return int(column.nbytes)


def check_footer(metadata: pq.FileMetaData, size: int) -> None:
    """Check the column metadata in the footer of a file of `size` bytes, without reading data.

    `metadata.row_group(…).column(…)` aborts the process if the statistics do not fit the column. A
    reader that prepares to read all columns raises an error instead. It gets an empty memory map of
    the same size and reads no rows.

    Raises:
        PagesError: The footer is invalid.
    """
    empty = pa.BufferReader(pa.py_buffer(mmap.mmap(-1, size, flags=_EMPTY_MAP_FLAGS)))
    try:
        file = pq.ParquetFile(empty, metadata=metadata, pre_buffer=True)
        next(file.reader.iter_batches(0, list(range(file.num_row_groups)), use_threads=False), None)
    except (pa.ArrowException, OSError) as error:
        raise PagesError(f"has an invalid footer ({' '.join(str(error).split())})") from error


def check_groups(
    source: Path | IO[bytes],
    file: pq.ParquetFile,
    columns: Collection[str],
    size: int,
    first: int = 0,
    end: int | None = None,
) -> int:
    """Check, with `check_pages`, columns of the row groups that have rows of [first, end).

    `size` is the number of bytes of the file.

    Returns the maximum bytes that one row may take from text dictionaries.

    Raises:
        PagesError: As for `check_pages`.
    """
    leaves = list_leaves(file.metadata, columns)
    check_footer(file.metadata, size)
    max_row_bytes = 0
    with open_random_access(source) as read:
        for group, _, _ in _list_groups(file, first, end):
            chunks = map(file.metadata.row_group(group).column, leaves)
            max_row_bytes = max(max_row_bytes, sum(check_pages(read, chunks, FREE_BYTES + MAX_EXPANSION * size)))
    return max_row_bytes


def open_parquet(source: Path | IO[bytes], *, pre_buffer: bool = False, **options: Any) -> pq.ParquetFile:
    """Open a file; without `pre_buffer`, a column is read `_BUFFER_BYTES` at a time."""
    return pq.ParquetFile(source, buffer_size=_BUFFER_BYTES, pre_buffer=pre_buffer, **options)


def iter_row_range(
    file: pq.ParquetFile, batch_rows: int, columns: Sequence[str], first: int = 0, end: int | None = None
) -> Iterator[pa.RecordBatch]:
    """Yield the rows [first, end) in order, each batch of one row group; reads no other row groups."""
    for group, start, stop in _list_groups(file, first, end):
        next_row, last = start, stop if end is None else min(stop, end)
        # A batch of several groups would be copied, and Arrow cannot join nested dictionaries. No
        # threads are used, because each would hold on to memory that it freed.
        for batch in file.iter_batches(batch_rows, row_groups=[group], columns=list(columns), use_threads=False):
            skip_count, next_row = max(first - next_row, 0), next_row + len(batch)
            selected = batch.slice(skip_count, max(len(batch) - skip_count - max(next_row - last, 0), 0))
            if len(selected):
                yield selected
            if next_row >= last:
                break


def _list_groups(file: pq.ParquetFile, first: int, end: int | None) -> list[tuple[int, int, int]]:
    """Return (number, its first row, its end row) of each row group that has rows of [first, end)."""
    row_counts = [file.metadata.row_group(i).num_rows for i in range(file.metadata.num_row_groups)]
    groups = enumerate(pairwise([0, *accumulate(row_counts)]))
    return [(group, start, stop) for group, (start, stop) in groups if first < stop and (end is None or start < end)]


def check_pages(read: ReadAt, chunks: Iterable[pq.ColumnChunkMetaData], max_bytes: int) -> list[int]:
    """Check that columns of a row group decode to at most `max_bytes`, counting each value once.

    A text that a dictionary encodes several times counts once: read such columns as dictionaries,
    or few rows at a time. Returns, for each column, the maximum bytes of one value of its text
    dictionary; 0 if it has none.

    Raises:
        PagesError: The columns decode to more bytes, or their pages are invalid.
        OSError: The file cannot be read.
    """
    total, dictionary_bytes = 0, []
    for chunk in chunks:
        decoded, dictionary = _measure_column(read, chunk)
        total += decoded
        dictionary_bytes.append(dictionary)
        if total > max_bytes:
            raise PagesError(f"decodes to more than {max_bytes >> 20:,} MiB, far more than its size")
    return dictionary_bytes


def _measure_column(read: ReadAt, chunk: pq.ColumnChunkMetaData) -> tuple[int, int]:
    """Return the decoded bytes of a column and of its text dictionary."""
    physical_type = chunk.physical_type
    offset, total, values, width, dictionary_bytes = find_column_start(chunk), 0, 0, _WIDTHS.get(physical_type, 0), 0
    end, rows = offset + chunk.total_compressed_size, chunk.num_values
    while values < rows and 0 <= offset < end:
        length, page, decoded, stored, n_values, encoding = read_page_header(read, offset)
        offset += length + stored
        total += decoded
        if page == DICTIONARY_PAGE:
            if physical_type == "BYTE_ARRAY":
                dictionary_bytes += decoded
            elif not width:  # fixed-length values
                width = decoded // max(1, n_values) + 1
        elif page in (DATA_PAGE, _DATA_PAGE_V2):
            values += n_values
            if encoding == _DELTA_BYTE_ARRAY:
                total += decoded * n_values
    if values != rows or offset > end:
        raise PagesError(f"has pages of column {chunk.path_in_schema} that do not fit its footer")
    return total + values * width, dictionary_bytes


def find_column_start(chunk: pq.ColumnChunkMetaData) -> int:
    """Return the offset at which Arrow starts reading a column."""
    data_offset, dictionary_offset = int(chunk.data_page_offset), chunk.dictionary_page_offset
    return min(data_offset, int(dictionary_offset)) if dictionary_offset else data_offset


@contextmanager
def open_random_access(source: Path | IO[bytes]) -> Iterator[ReadAt]:
    """Open a file for cheap random reads."""
    if isinstance(source, Path):
        with source.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
            yield lambda offset, size: mapped[offset : offset + size]
    else:
        yield partial(_read_at, source)


def _read_at(source: IO[bytes], offset: int, size: int) -> bytes:
    source.seek(offset)
    return source.read(size)


def read_page_header(read: ReadAt, offset: int) -> _Page:
    """Return the header of the page at an offset, as the numbers that `_Page` lists.

    Raises:
        PagesError: The header is invalid.
    """
    for read_size in _READ_SIZES:
        data = read(offset, read_size)
        try:
            return _parse_usual_header(data) or _build_page(*_parse_struct(data, 0))
        except IndexError:  # the header is longer than read_size
            continue
    raise PagesError("has a page whose header does not end")


def _parse_usual_header(data: bytes) -> _Page | None:
    """Parse a header in the form of most writers; None if it has another form."""
    kind = data[1] >> 1
    match = _USUAL_HEADERS[kind].match(data) if kind in _USUAL_HEADERS else None
    if not match:
        return None
    length = match.end()
    if data[length - 1]:
        length = _skip_statistics(data, length)
        if data[length] or data[length + 1]:
            return None
        length += 2
    decoded, stored, values, encoding = match.groups()
    return (
        length,
        kind,
        _decode_unsigned(decoded),
        _decode_unsigned(stored),
        _decode_unsigned(values),
        _decode_unsigned(encoding),
    )


def _skip_statistics(data: bytes, start: int) -> int:
    """Return the end of a struct, with a fast path for short numbers, bytes and booleans."""
    offset = start
    while head := data[offset]:
        kind, size = head & 15, data[offset + 1]
        if kind == 8 and size < 128 and head > 15:
            offset += size + 2
        elif kind == 6 and size < 128 and head > 15:
            offset += 2
        elif kind in (1, 2) and head > 15:
            offset += 1
        else:
            return _parse_struct(data, start)[1]
    return offset + 1


@lru_cache(1 << 12)
def _decode_unsigned(data: bytes) -> int:
    """Decode a non-negative number of Thrift's compact protocol."""
    value = 0
    for byte in reversed(data):
        value = value << 7 | byte & 127
    if value & 1:
        raise PagesError(_BAD_HEADER)
    return value >> 1


def _build_page(fields: dict[int, Any], length: int) -> _Page:
    kind, decoded, stored = (fields.get(number) for number in (1, 2, 3))
    inner = fields.get(
        {DATA_PAGE: 5, DICTIONARY_PAGE: 7, _DATA_PAGE_V2: 8}.get(kind if isinstance(kind, int) else -1, 0), {}
    )
    values = inner.get(1, 0) if isinstance(inner, dict) else 0
    encoding = inner.get(4 if kind == _DATA_PAGE_V2 else 2, 0) if isinstance(inner, dict) else 0
    values_or_none = (kind, decoded, stored, values, encoding)
    numbers = [value for value in values_or_none if isinstance(value, int) and value >= 0]
    if len(numbers) < len(values_or_none):
        raise PagesError(_BAD_HEADER)
    kind, decoded, stored, values, encoding = numbers
    return length, kind, decoded, stored, values, encoding


def _parse_struct(data: bytes, offset: int, depth: int = 0) -> tuple[dict[int, Any], int]:
    """Parse a Thrift struct; return its numbers and structs by field, and its end.

    Raises an IndexError if the bytes end inside the struct. A single loop, because it runs for
    every page.
    """
    if depth > _MAX_DEPTH:
        raise PagesError("has a page whose header is nested too deep")
    values_by_field: dict[int, Any] = {}
    field = 0
    while head := data[offset]:
        offset += 1
        if head >> 4:
            field += head >> 4
        else:
            field, offset = _parse_zigzag(data, offset)
        kind = head & 15
        if kind == 5 and data[offset] < 128:  # most numbers have one byte
            values_by_field[field] = data[offset] >> 1 ^ -(data[offset] & 1)
            offset += 1
        elif 4 <= kind <= 6:
            values_by_field[field], offset = _parse_zigzag(data, offset)
        elif kind == 12:
            values_by_field[field], offset = _parse_struct(data, offset, depth + 1)
        elif kind == 8:
            size, offset = parse_varint(data, offset)
            offset += size
        elif kind in (3, 7):
            offset += 1 if kind == 3 else 8
        elif kind not in (1, 2):
            raise PagesError("has a page whose header contains an unknown type")
    return values_by_field, offset + 1


def _parse_zigzag(data: bytes, offset: int) -> tuple[int, int]:
    count, offset = parse_varint(data, offset)
    return count >> 1 ^ -(count & 1), offset


def parse_varint(data: bytes, offset: int) -> tuple[int, int]:
    """Parse an unsigned varint at an offset; return it and the offset after it."""
    value = shift = 0
    while (byte := data[offset]) >= 128:
        value |= (byte & 127) << shift
        shift += 7
        offset += 1
        if shift > 63:
            raise PagesError(_BAD_HEADER)
    return value | byte << shift, offset + 1
