"""What the pages of a Parquet file decode to, read from their headers before any is decoded.

A footer may lie, and a page of a kilobyte can decode to two gigabytes: Arrow makes room for what a page's own header
says. So the headers are read first, some forty bytes each, and what they say is bounded. A child process with little
memory would also do, but handing batches over costs as much as reading them; reading headers costs about a fiftieth.

Source: github.com/apache/parquet-format, `parquet.thrift`; Thrift's compact protocol.
"""

import mmap
import re
import sys
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from functools import lru_cache, partial
from pathlib import Path
from typing import IO, Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

_AHEAD = (256, 1 << 14, 1 << 20)  # bytes that are read to find the end of a header: statistics may make it long
_DATA, _DICTIONARY, _DATA_V2 = 0, 2, 3  # types of pages
_PREFIXED = 7  # DELTA_BYTE_ARRAY: a value may repeat the whole one before it
_WIDTHS = {"BOOLEAN": 1, "INT32": 4, "INT64": 8, "INT96": 12, "FLOAT": 4, "DOUBLE": 8, "BYTE_ARRAY": 8}
_EMPTY = mmap.MAP_SHARED | mmap.MAP_ANONYMOUS | (0x4000 if sys.platform == "linux" else 0)  # MAP_NORESERVE
FREE = 256 << 20  # bytes that a row group of any file may decode to
EXPANDS = 100  # times the size of the whole file, beyond that
_NUMBER = rb"[\x80-\xff]{0,4}[\x00-\x7f]"
_HEAD = rb"\x15(%b)\x15(%b)(?:\x15%b%%b|%%b)\x15(%b)\x15(%b)" % ((_NUMBER,) * 5)
# Whole headers as most writers write them, but for statistics at the end: a match takes a tenth of `_structure`.
_USUAL = {
    _DICTIONARY: re.compile(rb"\x15\x04%b[\x11\x12]?\x00\x00" % (_HEAD % (b"\x3c", b"\x4c"))),
    _DATA: re.compile(rb"\x15\x00%b\x15%b\x15%b(?:\x1c|\x00\x00)" % (_HEAD % (b"\x1c", b"\x2c"), _NUMBER, _NUMBER)),
}
_SENSELESS = "has a page whose header makes no sense"
_DEEPEST = 8  # structures within one another; a page's header has three


class PagesError(ValueError):
    """The pages of a column make no sense, or decode to too much; the message says so, without a full stop."""


# A page: bytes of its header, type, decoded bytes, stored bytes, values, encoding. An object would take twice as long.
_Page = tuple[int, int, int, int, int, int]
Read = Callable[[int, int], bytes]  # some bytes of a file from a place on


def schema_of(metadata: pq.FileMetaData) -> pq.ParquetSchema:
    """Return the schema of a footer.

    `metadata.schema` refers to `metadata`, which keeps it: both would stay in memory, with all that Arrow holds for
    them, until Python looks for such cycles, which the command does seldom.
    """
    return pq.ParquetSchema(metadata)


def leaves_of(metadata: pq.FileMetaData, columns: Collection[str]) -> list[int]:
    """Return the numbers of the leaves of these columns, of which a nested one has several."""
    schema = schema_of(metadata)
    return [place for place in range(len(schema)) if schema.column(place).path.partition(".")[0] in columns]


def texts_of(metadata: pq.FileMetaData, columns: Collection[str]) -> list[str]:
    """Return the paths of the texts in these columns, which Arrow can read as dictionaries."""
    schema = schema_of(metadata)
    leaves = [schema.column(place) for place in leaves_of(metadata, columns)]
    return [leaf.path for leaf in leaves if leaf.physical_type == "BYTE_ARRAY"]


def decoded_size(column: Any) -> int:
    """Return the bytes of a column's values once each row has its own copy of what a dictionary holds."""
    kind = column.type
    if pa.types.is_dictionary(kind):
        return int(pc.sum(pc.binary_length(column.dictionary).take(column.indices)).as_py() or 0)
    if pa.types.is_struct(kind):
        return sum(decoded_size(inner) for inner in column.flatten())
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        return decoded_size(column.flatten()) + 8 * len(column)
    return int(column.nbytes)


def check_footer(metadata: pq.FileMetaData, size: int) -> None:
    """Let Arrow read what the footer of a file of `size` bytes says of each column; reads nothing else.

    `metadata.row_group(…).column(…)` ends the process where a column's statistics do not fit it. So does not a reader
    that makes ready to read all columns. It is given an empty map of the same size, and asked for no row.

    Raises:
        PagesError: what it says makes no sense.
    """
    empty = pa.BufferReader(pa.py_buffer(mmap.mmap(-1, size, flags=_EMPTY)))
    try:
        file = pq.ParquetFile(empty, metadata=metadata, pre_buffer=True)
        next(file.reader.iter_batches(0, list(range(file.num_row_groups)), use_threads=False), None)
    except (pa.ArrowException, OSError) as broken:
        raise PagesError(f"has a footer that makes no sense ({' '.join(str(broken).split())})") from broken


def check_groups(source: Path | IO[bytes], file: pq.ParquetFile, columns: Collection[str], size: int) -> None:
    """Check columns of all row groups of a file of `size` bytes, as `check_pages`.

    Raises:
        PagesError: as `check_pages`.
    """
    leaves = leaves_of(file.metadata, columns)
    check_footer(file.metadata, size)
    with opened(source) as read:
        for group in range(file.num_row_groups):
            columns_of = file.metadata.row_group(group).column
            check_pages(read, map(columns_of, leaves), FREE + EXPANDS * size)


def check_pages(read: Read, chunks: Iterable[pq.ColumnChunkMetaData], most: int) -> list[int]:
    """Check that columns of a row group of an `opened` file decode to at most `most` bytes, each value counted once.

    Texts that a dictionary names more than once are counted once: read them as dictionaries, or few rows at a time.
    Returns the most bytes that one row may take of each column's dictionary of texts; 0 where it has none.

    Raises:
        PagesError: they decode to more, or their pages make no sense.
        OSError: the file cannot be read.
    """
    total, named = 0, []
    for chunk in chunks:
        decoded, dictionary = _decoded(read, chunk)
        total += decoded
        named.append(dictionary)
        if total > most:
            raise PagesError(f"decodes to more than {most >> 20:,} MiB, far more than its size")
    return named


def _decoded(read: Read, chunk: pq.ColumnChunkMetaData) -> tuple[int, int]:
    """Return the bytes of a column, and of its dictionary of texts."""
    kind = chunk.physical_type
    at, total, values, width, named = _start(chunk), 0, 0, _WIDTHS.get(kind, 0), 0
    end, rows = at + chunk.total_compressed_size, chunk.num_values
    while values < rows and 0 <= at < end:
        length, page, decoded, stored, held, encoding = _page(read, at)
        at += length + stored
        total += decoded
        if page == _DICTIONARY:
            if kind == "BYTE_ARRAY":
                named += decoded
            elif not width:  # of values of a fixed length
                width = decoded // max(1, held) + 1
        elif page in (_DATA, _DATA_V2):
            values += held
            if encoding == _PREFIXED:
                total += decoded * held
    if values != rows or at > end:
        raise PagesError(f"has pages of column {chunk.path_in_schema} that do not fit its footer")
    return total + values * width, named


def _start(chunk: pq.ColumnChunkMetaData) -> int:
    """Return where Arrow begins to read a column."""
    first, dictionary = int(chunk.data_page_offset), chunk.dictionary_page_offset
    return min(first, int(dictionary)) if dictionary else first


@contextmanager
def opened(source: Path | IO[bytes]) -> Iterator[Read]:
    """Open a file so that a read of some bytes anywhere is cheap."""
    if isinstance(source, Path):
        with source.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
            yield lambda at, size: mapped[at : at + size]
    else:
        yield partial(_read, source)


def _read(source: IO[bytes], at: int, size: int) -> bytes:
    source.seek(at)
    return source.read(size)


def _page(read: Read, at: int) -> _Page:
    for ahead in _AHEAD:
        data = read(at, ahead)
        try:
            return _usual(data) or _placed(*_structure(data, 0))
        except IndexError:  # the header is longer
            continue
    raise PagesError("has a page without an end of its header")


def _usual(data: bytes) -> _Page | None:
    """Read a header that is as most writers write it."""
    kind = data[1] >> 1
    found = _USUAL[kind].match(data) if kind in _USUAL else None
    if not found:
        return None
    length = found.end()
    if data[length - 1]:
        length = _after_statistics(data, length)
        if data[length] or data[length + 1]:
            return None
        length += 2
    decoded, stored, values, encoding = found.groups()
    return length, kind, _unsigned(decoded), _unsigned(stored), _unsigned(values), _unsigned(encoding)


def _after_statistics(data: bytes, start: int) -> int:
    """Return where a structure ends, by steps over its short numbers, bytes and truths if it has no others."""
    at = start
    while head := data[at]:
        kind, size = head & 15, data[at + 1]
        if kind == 8 and size < 128 and head > 15:
            at += size + 2
        elif kind == 6 and size < 128 and head > 15:
            at += 2
        elif kind in (1, 2) and head > 15:
            at += 1
        else:
            return _structure(data, start)[1]
    return at + 1


@lru_cache(1 << 12)
def _unsigned(data: bytes) -> int:
    """Return a number of Thrift's compact protocol that is not negative."""
    value = 0
    for byte in reversed(data):
        value = value << 7 | byte & 127
    if value & 1:
        raise PagesError(_SENSELESS)
    return value >> 1


def _placed(fields: dict[int, Any], length: int) -> _Page:
    kind, decoded, stored = (fields.get(number) for number in (1, 2, 3))
    inner = fields.get({_DATA: 5, _DICTIONARY: 7, _DATA_V2: 8}.get(kind if isinstance(kind, int) else -1, 0), {})
    values = inner.get(1, 0) if isinstance(inner, dict) else 0
    encoding = inner.get(4 if kind == _DATA_V2 else 2, 0) if isinstance(inner, dict) else 0
    found = (kind, decoded, stored, values, encoding)
    numbers = [one for one in found if isinstance(one, int) and one >= 0]
    if len(numbers) < len(found):
        raise PagesError(_SENSELESS)
    kind, decoded, stored, values, encoding = numbers
    return length, kind, decoded, stored, values, encoding


def _structure(data: bytes, at: int, depth: int = 0) -> tuple[dict[int, Any], int]:
    """Return one structure of Thrift's compact protocol, its numbers and structures by field, and where it ends.

    An IndexError says that the bytes end before it does. It is one loop, since it runs for every page.
    """
    if depth > _DEEPEST:
        raise PagesError("has a page whose header is nested too deep")
    found: dict[int, Any] = {}
    field = 0
    while head := data[at]:
        at += 1
        if head >> 4:
            field += head >> 4
        else:
            field, at = _number(data, at)
        kind = head & 15
        if kind == 5 and data[at] < 128:  # most are numbers of one byte
            found[field] = data[at] >> 1 ^ -(data[at] & 1)
            at += 1
        elif 4 <= kind <= 6:
            found[field], at = _number(data, at)
        elif kind == 12:
            found[field], at = _structure(data, at, depth + 1)
        elif kind == 8:
            size, at = _count(data, at)
            at += size
        elif kind in (3, 7):
            at += 1 if kind == 3 else 8
        elif kind not in (1, 2):
            raise PagesError("has a page whose header holds what no page has")
    return found, at + 1


def _number(data: bytes, at: int) -> tuple[int, int]:
    count, at = _count(data, at)
    return count >> 1 ^ -(count & 1), at


def _count(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while (byte := data[at]) >= 128:
        value |= (byte & 127) << shift
        shift += 7
        at += 1
        if shift > 63:
            raise PagesError(_SENSELESS)
    return value | byte << shift, at + 1
