"""What the pages of a Parquet file decode to, read from their headers before any is decoded.

A footer may lie, and a page of a kilobyte can decode to two gigabytes: Arrow makes room for what a page's own header
says. So the headers are read first, some forty bytes each, and what they say is bounded. A child process with little
memory would also do, but handing batches over costs as much as reading them; reading headers costs about a fiftieth.

Source: github.com/apache/parquet-format, `parquet.thrift`; Thrift's compact protocol.
"""

import mmap
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

_AHEAD = (256, 1 << 14, 1 << 20)  # bytes that are read to find the end of a header: statistics may make it long
_DATA, _DICTIONARY, _DATA_V2 = 0, 2, 3  # types of pages
_PREFIXED = 7  # DELTA_BYTE_ARRAY: a value may repeat the whole one before it
_WIDTHS = {"BOOLEAN": 1, "INT32": 4, "INT64": 8, "INT96": 12, "FLOAT": 4, "DOUBLE": 8, "BYTE_ARRAY": 8}
FREE = 256 << 20  # bytes that a row group of any file may decode to
EXPANDS = 100  # times the size of the whole file, beyond that
_DEEPEST = 8  # structures within one another; a page's header has three


class PagesError(ValueError):
    """The pages of a column make no sense, or decode to too much; the message says so, without a full stop."""


@dataclass(frozen=True, slots=True)
class _Page:
    length: int  # bytes of the header
    kind: int
    decoded: int  # bytes
    stored: int
    values: int
    encoding: int


def leaves_of(metadata: pq.FileMetaData, columns: Collection[str]) -> list[int]:
    """Return the numbers of the leaves of these columns, of which a nested one has several."""
    schema = metadata.schema
    return [place for place in range(len(schema)) if schema.column(place).path.partition(".")[0] in columns]


def texts_of(metadata: pq.FileMetaData, columns: Collection[str]) -> list[str]:
    """Return the paths of the texts in these columns, which Arrow can read as dictionaries."""
    leaves = [metadata.schema.column(place) for place in leaves_of(metadata, columns)]
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


def check_groups(source: Path | IO[bytes], file: pq.ParquetFile, columns: Collection[str], size: int) -> None:
    """Check columns of all row groups of a file of `size` bytes, as `check_pages`.

    Raises:
        PagesError: as `check_pages`.
    """
    leaves = leaves_of(file.metadata, columns)
    for group in range(file.num_row_groups):
        read = file.metadata.row_group(group)
        check_pages(source, [read.column(leaf) for leaf in leaves], FREE + EXPANDS * size)


def check_pages(source: Path | IO[bytes], chunks: Iterable[pq.ColumnChunkMetaData], most: int) -> None:
    """Check that columns of a row group decode to at most `most` bytes together, each value counted once.

    Texts that a dictionary names more than once are counted once: read them as dictionaries.

    Raises:
        PagesError: they decode to more, or their pages make no sense.
        OSError: the file cannot be read.
    """
    total = 0
    with _opened(source) as file:
        for chunk in chunks:
            total += _decoded(file, chunk)
            if total > most:
                raise PagesError(f"decodes to more than {most >> 20:,} MiB, far more than its size")


def _decoded(file: IO[bytes], chunk: pq.ColumnChunkMetaData) -> int:
    at, total, values, width = _start(chunk), 0, 0, _WIDTHS.get(chunk.physical_type, 0)
    end = at + chunk.total_compressed_size
    while values < chunk.num_values and at < end:
        page = _page(file, at)
        at += page.length + page.stored
        total += page.decoded
        if page.kind == _DICTIONARY and not width:  # of values of a fixed length
            width = page.decoded // max(1, page.values) + 1
        if page.kind in (_DATA, _DATA_V2):
            values += page.values
            if page.encoding == _PREFIXED:
                total += page.decoded * page.values
    if values != chunk.num_values or at > end:
        raise PagesError(f"has pages of column {chunk.path_in_schema} that do not fit its footer")
    return total + values * width


def _start(chunk: pq.ColumnChunkMetaData) -> int:
    """Return where Arrow begins to read a column."""
    first, dictionary = int(chunk.data_page_offset), chunk.dictionary_page_offset
    return min(first, int(dictionary)) if dictionary else first


@contextmanager
def _opened(source: Path | IO[bytes]) -> Iterator[Any]:
    """Open a file so that a read of some bytes anywhere is cheap."""
    if isinstance(source, Path):
        with source.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
            yield mapped
    else:
        yield source


def _page(file: IO[bytes], at: int) -> _Page:
    for ahead in _AHEAD:
        file.seek(at)
        try:
            return _placed(*_structure(file.read(ahead), 0))
        except IndexError:  # the header is longer
            continue
    raise PagesError("has a page without an end of its header")


def _placed(fields: dict[int, Any], length: int) -> _Page:
    kind, decoded, stored = (fields.get(number) for number in (1, 2, 3))
    inner = fields.get({_DATA: 5, _DICTIONARY: 7, _DATA_V2: 8}.get(kind if isinstance(kind, int) else -1, 0), {})
    values = inner.get(1, 0) if isinstance(inner, dict) else 0
    encoding = inner.get(4 if kind == _DATA_V2 else 2, 0) if isinstance(inner, dict) else 0
    found = (kind, decoded, stored, values, encoding)
    numbers = [one for one in found if isinstance(one, int) and one >= 0]
    if len(numbers) < len(found):
        raise PagesError("has a page whose header makes no sense")
    return _Page(length, *numbers)


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
            raise PagesError("has a page whose header makes no sense")
    return value | byte << shift, at + 1
