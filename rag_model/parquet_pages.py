"""Bound the decoded size of a Parquet file by reading the headers of its pages.

A footer may lie, and a page of a kilobyte can decode to two gigabytes: Arrow allocates the size
that the page's own header states. Therefore the headers (about 40 bytes each) are read and checked
first. A child process with a memory limit would also work, but transferring batches costs as much
as reading them; reading the headers costs about a fiftieth of it.

Source: github.com/apache/parquet-format, `parquet.thrift`; Thrift's compact protocol.
"""

import mmap
import os
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

# Bytes to read at each attempt to parse a header, which is long if it contains long statistics.
_READ_SIZES = (256, 1 << 14, 1 << 20)
_BUFFER_BYTES = 1 << 20  # bytes of a column per read
DATA_PAGE, DICTIONARY_PAGE, _DATA_PAGE_V2 = 0, 2, 3  # page types
_DELTA_BYTE_ARRAY = 7  # a value may repeat the whole previous one, so few bytes decode to many
_BYTES_BY_TYPE = {"BOOLEAN": 1, "INT32": 4, "INT64": 8, "INT96": 12, "FLOAT": 4, "DOUBLE": 8, "BYTE_ARRAY": 8}
# Linux's flag MAP_NORESERVE, 0x4000, reserves no memory for the map.
_EMPTY_MAP_FLAGS = mmap.MAP_SHARED | mmap.MAP_ANONYMOUS | (0x4000 if sys.platform == "linux" else 0)
# A row group may decode to BASE_DECODED_BYTES + MAX_EXPANSION times the size of the file.
BASE_DECODED_BYTES = 256 << 20
MAX_EXPANSION = 100
_VARINT_PATTERN = rb"[\x80-\xff]{0,4}[\x00-\x7f]"
_HEADER_PATTERN = rb"\x15(%b)\x15(%b)(?:\x15%b%%b|%%b)\x15(%b)\x15(%b)" % ((_VARINT_PATTERN,) * 5)
# Patterns of the headers that most writers produce, without the statistics at their end. Matching
# takes a tenth of `_parse_struct`'s time.
_USUAL_HEADERS = {
    DICTIONARY_PAGE: re.compile(rb"\x15\x04%b[\x11\x12]?\x00\x00" % (_HEADER_PATTERN % (b"\x3c", b"\x4c"))),
    DATA_PAGE: re.compile(
        rb"\x15\x00%b\x15%b\x15%b(?:\x1c|\x00\x00)"
        % (_HEADER_PATTERN % (b"\x1c", b"\x2c"), _VARINT_PATTERN, _VARINT_PATTERN)
    ),
}
_BAD_HEADER = "has a page with an invalid header"
_MAX_DEPTH = 8  # maximum depth of nested structs; a page header has a depth of 3


class ParquetError(ValueError):
    """Pages are invalid, or decode to more bytes than allowed; the message starts with a verb."""


# (header bytes, page type, decoded bytes, stored bytes, number of values, encoding). Creating an
# object of a class would take twice as long.
_PageHeader = tuple[int, int, int, int, int, int]
ReadAt = Callable[[int, int], bytes]  # (offset, size) -> bytes of a file


def get_schema(metadata: pq.FileMetaData) -> pq.ParquetSchema:
    """Return the schema of a footer.

    `metadata.schema` is not used because it forms a reference cycle with `metadata`: both would
    stay in memory until the garbage collector runs, which seldom happens in a command.
    """
    return pq.ParquetSchema(metadata)


def list_leaf_numbers(metadata: pq.FileMetaData, columns: Collection[str]) -> list[int]:
    """Return the numbers of the leaf columns of `columns`; a nested column has several."""
    schema = get_schema(metadata)
    return [
        leaf_number
        for leaf_number in range(len(schema))
        if schema.column(leaf_number).path.partition(".")[0] in columns
    ]


def has_repeated_values(metadata: pq.FileMetaData, leaf_numbers: Iterable[int]) -> bool:
    """Return whether a row may have several values in one of these leaf columns."""
    schema = get_schema(metadata)
    return any(schema.column(leaf_number).max_repetition_level for leaf_number in leaf_numbers)


def list_text_column_paths(metadata: pq.FileMetaData, columns: Collection[str]) -> list[str]:
    """Return the paths of leaf columns that are strings, which Arrow can read as dictionaries."""
    schema = get_schema(metadata)
    leaves = [schema.column(leaf_number) for leaf_number in list_leaf_numbers(metadata, columns)]
    return [leaf.path for leaf in leaves if leaf.physical_type == "BYTE_ARRAY"]


def compute_decoded_size(column: Any) -> int:
    """Return the bytes of a column's values; a dictionary value counts once per row that has it."""
    data_type = column.type
    if pa.types.is_dictionary(data_type):
        return int(pc.sum(pc.binary_length(column.dictionary).take(column.indices)).as_py() or 0)
    if pa.types.is_struct(data_type):
        return sum(compute_decoded_size(child_column) for child_column in column.flatten())
    if pa.types.is_list(data_type) or pa.types.is_large_list(data_type):
        return compute_decoded_size(column.flatten()) + 8 * len(column)
    return int(column.nbytes)


def check_footer(metadata: pq.FileMetaData, size: int) -> None:
    """Check the column metadata in the footer of a file of `size` bytes, without reading data.

    `metadata.row_group(…).column(…)` aborts the process if the statistics do not fit the column.
    A reader that prepares to read all columns raises an error instead. So such a reader is created
    here: it gets an empty memory map instead of the file, and reads no rows.

    Raises:
        ParquetError: The footer is invalid.
    """
    empty_file = pa.BufferReader(pa.py_buffer(mmap.mmap(-1, size, flags=_EMPTY_MAP_FLAGS)))
    try:
        file = pq.ParquetFile(empty_file, metadata=metadata, pre_buffer=True)
        next(file.reader.iter_batches(0, list(range(file.num_row_groups)), use_threads=False), None)
    except (pa.ArrowException, OSError) as error:
        raise ParquetError(f"has an invalid footer ({' '.join(str(error).split())})") from error


def check_row_groups(
    source: Path | IO[bytes],
    file: pq.ParquetFile,
    columns: Collection[str],
    size: int,
    first_row: int = 0,
    end: int | None = None,
) -> int:
    """Check columns with `check_pages` in the row groups that contain rows of [first_row, end).

    `size` is the number of bytes of the file.

    Returns the maximum bytes of dictionary strings that one row may refer to.

    Raises:
        ParquetError: For the same reasons as `check_pages`.
    """
    leaf_numbers = list_leaf_numbers(file.metadata, columns)
    check_footer(file.metadata, size)
    max_row_bytes = 0
    with open_random_access(source) as read:
        for group_number, _, _ in _list_groups(file, first_row, end):
            column_chunks = map(file.metadata.row_group(group_number).column, leaf_numbers)
            max_row_bytes = max(
                max_row_bytes,
                sum(check_pages(read, column_chunks, BASE_DECODED_BYTES + MAX_EXPANSION * size)),
            )
    return max_row_bytes


def open_parquet(source: Path | IO[bytes], *, pre_buffer: bool = False, **options: Any) -> pq.ParquetFile:
    """Open a file; without `pre_buffer`, a column is read `_BUFFER_BYTES` at a time."""
    return pq.ParquetFile(source, buffer_size=_BUFFER_BYTES, pre_buffer=pre_buffer, **options)


def iter_row_range(
    file: pq.ParquetFile, batch_rows: int, columns: Sequence[str], first_row: int = 0, end: int | None = None
) -> Iterator[pa.RecordBatch]:
    """Yield the rows [first_row, end) in order. Each batch is from one row group, and row groups
    without such rows are not read.
    """
    for group_number, group_first_row, group_end in _list_groups(file, first_row, end):
        next_row, end_row = group_first_row, group_end if end is None else min(group_end, end)
        # A batch of several groups would be copied, and Arrow cannot join nested dictionaries. No
        # threads are used, because each thread would keep the memory that it has freed.
        for batch in file.iter_batches(batch_rows, row_groups=[group_number], columns=list(columns), use_threads=False):
            skip_count, next_row = max(first_row - next_row, 0), next_row + len(batch)
            selected_rows = batch.slice(skip_count, max(len(batch) - skip_count - max(next_row - end_row, 0), 0))
            if len(selected_rows):
                yield selected_rows
            if next_row >= end_row:
                break


def _list_groups(file: pq.ParquetFile, first_row: int, end: int | None) -> list[tuple[int, int, int]]:
    """Return (number, first row, end row) of each row group that has rows of [first_row, end)."""
    row_counts = [file.metadata.row_group(i).num_rows for i in range(file.metadata.num_row_groups)]
    groups = enumerate(pairwise([0, *accumulate(row_counts)]))
    return [
        (number, first, group_end)
        for number, (first, group_end) in groups
        if first_row < group_end and (end is None or first < end)
    ]


def check_pages(read: ReadAt, chunks: Iterable[pq.ColumnChunkMetaData], max_bytes: int) -> list[int]:
    """Check that columns of a row group decode to at most `max_bytes`.

    A dictionary value that several rows use counts once, so read such columns as dictionaries, or
    a few rows at a time. Returns, for each column, the maximum bytes of a string in its dictionary;
    0 if it has no dictionary of strings.

    Raises:
        ParquetError: The columns decode to more than `max_bytes`, or their pages are invalid.
        OSError: The file cannot be read.
    """
    total_bytes, dictionary_sizes = 0, []
    for chunk in chunks:
        decoded_bytes, dictionary_bytes = _measure_column_chunk(read, chunk)
        total_bytes += decoded_bytes
        dictionary_sizes.append(dictionary_bytes)
        if total_bytes > max_bytes:
            raise ParquetError(f"decodes to more than {max_bytes >> 20:,} MiB, far more than its size")
    return dictionary_sizes


def _measure_column_chunk(read: ReadAt, chunk: pq.ColumnChunkMetaData) -> tuple[int, int]:
    """Return the decoded bytes of a column chunk, and those of its dictionary of strings."""
    physical_type = chunk.physical_type
    offset, bytes_per_value = find_column_start(chunk), _BYTES_BY_TYPE.get(physical_type, 0)
    total_bytes = n_values_read = dictionary_bytes = 0
    chunk_end, n_column_values = offset + chunk.total_compressed_size, chunk.num_values
    while n_values_read < n_column_values and 0 <= offset < chunk_end:
        header_bytes, page_type, decoded_bytes, stored_bytes, n_values, encoding = read_page_header(read, offset)
        offset += header_bytes + stored_bytes
        total_bytes += decoded_bytes
        if page_type == DICTIONARY_PAGE:
            if physical_type == "BYTE_ARRAY":
                dictionary_bytes += decoded_bytes
            elif not bytes_per_value:  # fixed-length values
                bytes_per_value = decoded_bytes // max(1, n_values) + 1
        elif page_type in (DATA_PAGE, _DATA_PAGE_V2):
            n_values_read += n_values
            if encoding == _DELTA_BYTE_ARRAY:
                total_bytes += decoded_bytes * n_values
    if n_values_read != n_column_values or offset > chunk_end:
        raise ParquetError(f"has pages of column {chunk.path_in_schema} that do not fit its footer")
    return total_bytes + n_values_read * bytes_per_value, dictionary_bytes


def find_column_start(chunk: pq.ColumnChunkMetaData) -> int:
    """Return the offset at which Arrow starts reading a column."""
    data_offset, dictionary_offset = int(chunk.data_page_offset), chunk.dictionary_page_offset
    return min(data_offset, int(dictionary_offset)) if dictionary_offset else data_offset


@contextmanager
def open_random_access(source: Path | IO[bytes]) -> Iterator[ReadAt]:
    """Yield a function that reads a file at any offset."""
    if isinstance(source, Path):
        # A mapped file would end the process with SIGBUS if another program truncates the file.
        with source.open("rb") as file:
            yield lambda offset, size: os.pread(file.fileno(), size, offset) if offset >= 0 else b""
    else:
        yield partial(_read_at, source)


def _read_at(source: IO[bytes], offset: int, size: int) -> bytes:
    source.seek(offset)
    return source.read(size)


def read_page_header(read: ReadAt, offset: int) -> _PageHeader:
    """Return the header of the page at an offset, as the numbers that `_PageHeader` lists.

    Raises:
        ParquetError: The header is invalid.
    """
    for read_size in _READ_SIZES:
        header_data = read(offset, read_size)
        try:
            return _parse_usual_header(header_data) or _build_page_header(*_parse_struct(header_data, 0))
        except IndexError:  # the header is longer than read_size
            continue
    raise ParquetError("has a page whose header does not end")


def _parse_usual_header(header: bytes) -> _PageHeader | None:
    """Parse a header of the form that most writers use; return None for other forms."""
    page_type = header[1] >> 1
    header_match = _USUAL_HEADERS[page_type].match(header) if page_type in _USUAL_HEADERS else None
    if not header_match:
        return None
    header_bytes = header_match.end()
    if header[header_bytes - 1]:
        header_bytes = _skip_statistics(header, header_bytes)
        if header[header_bytes] or header[header_bytes + 1]:
            return None
        header_bytes += 2
    decoded_bytes, stored_bytes, n_values, encoding = map(_decode_unsigned, header_match.groups())
    return header_bytes, page_type, decoded_bytes, stored_bytes, n_values, encoding


def _skip_statistics(data: bytes, start_byte: int) -> int:
    """Return the offset after a struct of statistics; short values are skipped without parsing."""
    offset = start_byte
    while field_header := data[offset]:
        field_type, value_byte = field_header & 15, data[offset + 1]
        if field_type == 8 and value_byte < 128 and field_header > 15:
            offset += value_byte + 2
        elif field_type == 6 and value_byte < 128 and field_header > 15:
            offset += 2
        elif field_type in (1, 2) and field_header > 15:
            offset += 1
        else:
            return _parse_struct(data, start_byte)[1]
    return offset + 1


@lru_cache(1 << 12)
def _decode_unsigned(data: bytes) -> int:
    """Decode a non-negative number of Thrift's compact protocol."""
    decoded_number = 0
    for byte in reversed(data):
        decoded_number = decoded_number << 7 | byte & 127
    if decoded_number & 1:
        raise ParquetError(_BAD_HEADER)
    return decoded_number >> 1


def _build_page_header(fields: dict[int, Any], header_bytes: int) -> _PageHeader:
    page_type, decoded_bytes, stored_bytes = (fields.get(number) for number in (1, 2, 3))
    page_fields = fields.get(
        {DATA_PAGE: 5, DICTIONARY_PAGE: 7, _DATA_PAGE_V2: 8}.get(page_type if isinstance(page_type, int) else -1, 0),
        {},
    )
    n_values = page_fields.get(1, 0) if isinstance(page_fields, dict) else 0
    encoding = page_fields.get(4 if page_type == _DATA_PAGE_V2 else 2, 0) if isinstance(page_fields, dict) else 0
    unchecked_fields = (page_type, decoded_bytes, stored_bytes, n_values, encoding)
    header_fields = [value for value in unchecked_fields if isinstance(value, int) and value >= 0]
    if len(header_fields) < len(unchecked_fields):
        raise ParquetError(_BAD_HEADER)
    page_type, decoded_bytes, stored_bytes, n_values, encoding = header_fields
    return header_bytes, page_type, decoded_bytes, stored_bytes, n_values, encoding


def _parse_struct(data: bytes, offset: int, depth: int = 0) -> tuple[dict[int, Any], int]:
    """Parse a Thrift struct; return (its numbers and structs by field number, offset of its end).

    Raises an IndexError if the bytes end inside the struct. The function is a single loop because
    it runs for every page.
    """
    if depth > _MAX_DEPTH:
        raise ParquetError("has a page whose header is nested too deep")
    values_by_field: dict[int, Any] = {}
    field_number = 0
    while field_header := data[offset]:
        offset += 1
        if field_header >> 4:
            field_number += field_header >> 4
        else:
            field_number, offset = _parse_zigzag(data, offset)
        field_type = field_header & 15
        if field_type == 5 and data[offset] < 128:  # most numbers have one byte
            values_by_field[field_number] = data[offset] >> 1 ^ -(data[offset] & 1)
            offset += 1
        elif 4 <= field_type <= 6:
            values_by_field[field_number], offset = _parse_zigzag(data, offset)
        elif field_type == 12:
            values_by_field[field_number], offset = _parse_struct(data, offset, depth + 1)
        elif field_type == 8:
            string_length, offset = parse_varint(data, offset)
            offset += string_length
        elif field_type in (3, 7):
            offset += 1 if field_type == 3 else 8
        elif field_type not in (1, 2):
            raise ParquetError("has a page whose header contains an unknown type")
    return values_by_field, offset + 1


def _parse_zigzag(data: bytes, offset: int) -> tuple[int, int]:
    unsigned_value, offset = parse_varint(data, offset)
    return unsigned_value >> 1 ^ -(unsigned_value & 1), offset


def parse_varint(data: bytes, offset: int) -> tuple[int, int]:
    """Parse an unsigned varint at an offset; return it and the offset after it."""
    varint = shift = 0
    while (byte := data[offset]) >= 128:
        varint |= (byte & 127) << shift
        shift += 7
        offset += 1
        if shift > 63:
            raise ParquetError(_BAD_HEADER)
    return varint | byte << shift, offset + 1
