"""Read single passages of a remote file from parts of its row groups, without its footer.

Nine tenths of a row group are one page: the dictionary of its texts, in the order in which
rows use them first. Zstandard can decompress the beginning of this page alone. A *cut* of a row
group is a number of rows from its start, and the end of the bytes that contain the texts of these
rows. A file has cuts if `PassageWriter` wrote it and the texts of each row group fit one dictionary
page, which they do up to an average of about 1,000 bytes per passage.
"""

import io
import struct
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from rag_model.corpus.passages import DATE, FULL_SCHEMA, DecodedCache
from rag_model.corpus.records import Passage, check_seconds
from rag_model.errors import InputError, format_error
from rag_model.parquet_pages import (
    DATA_PAGE,
    DICTIONARY_PAGE,
    ParquetError,
    open_random_access,
    parse_varint,
    read_page_header,
)
from rag_model.ranges import CachedFile

# Minimum decompressed bytes between two cuts; the maximum size of a Zstandard block.
_MIN_CUT_BYTES = 128 << 10
_MAX_CUTS = 8  # maximum cuts of a row group
_MAX_PAGE_BYTES = 16 << 20  # decompressed; 512 KiB are usual for 100-word texts
_MAX_ROWS = 1 << 16  # maximum rows of a row group
_LENGTH = struct.Struct("<I")
# Encodings that a page of each type may have: PLAIN is 0, RLE_DICTIONARY is 8, and
# PLAIN_DICTIONARY, an old name of both, is 2.
_ENCODINGS = {DICTIONARY_PAGE: (0, 2), DATA_PAGE: (2, 8)}
_DTYPES = {pa.int32(): "<i4", pa.int64(): "<i8", pa.timestamp("ms", tz="UTC"): "<i8"}
_Indices = npt.NDArray[np.int64]
# Number of rows, and the end of their texts in bytes from the start of the row group.
Cut = tuple[int, int]
# Errors that decoding raises if bytes are damaged or the outline belongs to another file.
_DECODING_ERRORS = (ParquetError, pa.ArrowException, OSError, ValueError, LookupError, TypeError, struct.error)


@dataclass(frozen=True, slots=True)
class _Page:
    """A compressed page: its byte range in a row group, decompressed size and number of values."""

    start: int
    end: int
    decoded_bytes: int
    n_values: int


@dataclass(frozen=True, slots=True)
class _Column:
    """A dictionary-encoded column, as in Arrow."""

    values: "Sequence[int] | _TextDictionary"  # the dictionary
    indices: _Indices  # (rows,) the dictionary index of each row, -1 for null

    def get_value(self, row: int) -> Any:
        dictionary_index = int(self.indices[row])
        return None if dictionary_index < 0 else self.values[dictionary_index]


class _TextDictionary:
    """The texts of a dictionary page, each after its length (4 bytes); the last may be incomplete.

    A page has about a thousand texts, of which a search reads a few, so a text is located only when
    it is read.
    """

    def __init__(self, data: bytes) -> None:
        self._data, self._ends = data, [0]

    def __getitem__(self, text_number: int) -> str:
        """Return a text, or raise `IndexError` if the page does not have it as a whole."""
        data, text_ends, parse_length = self._data, self._ends, _LENGTH.unpack_from
        text_end = text_ends[-1]
        for _ in range(len(text_ends), text_number + 2):
            text_end += _LENGTH.size + parse_length(data, text_end)[0]
            text_ends.append(text_end)
        if text_ends[text_number + 1] > len(data):
            raise IndexError(f"text {text_number} is incomplete")
        return data[text_ends[text_number] + _LENGTH.size : text_ends[text_number + 1]].decode()


@dataclass(frozen=True, slots=True)
class _DecodedGroup:
    columns: Mapping[str, _Column]
    n_complete_rows: int  # number of rows from the start whose texts are decoded
    nbytes: int

    def build_passage(self, row: int) -> Passage:
        row_values = {name: column.get_value(row) for name, column in self.columns.items()}
        if row_values.get(DATE) is not None:
            row_values[DATE], milliseconds = divmod(row_values[DATE], 1000)
            check_seconds(row_values[DATE])
            if milliseconds:
                raise ValueError("a date is not a whole second")
        return Passage(**row_values)


class RangedPassages:
    """Reads passages of a remote file by row, as `PassageFile` does; not thread-safe."""

    def __init__(self, file: CachedFile, outline: Mapping[str, Any], n_rows: int, cache: DecodedCache) -> None:
        """Use a file of `n_rows` passages with an outline that has cuts; reads nothing yet.

        Raises:
            InputError: the outline has another number of rows.
        """
        self._file, self._cache, self.n_rows = file, cache, n_rows
        with self._translate_errors():
            self._group_rows, self._columns = int(outline["rows"]), list(outline["columns"])
            self._bounds, self._cuts = outline["ranges"], outline["cuts"]
            if not 0 < self._group_rows <= _MAX_ROWS or len(self._cuts) != -(-n_rows // self._group_rows):
                raise ParquetError(f"has an outline that does not fit its {n_rows:,} rows")

    def list_ranges(self, rows: Sequence[int]) -> list[tuple[int, int]]:
        """Return the byte ranges of the file that `read_rows` will read for these rows."""
        with self._translate_errors():
            return [
                byte_range
                for group, row in self._find_last_rows(rows).items()
                if self._find_decoded_group(group, row) is None
                for byte_range in self._list_group_ranges(group, self._find_cut(group, row))
            ]

    def read_rows(self, rows: Sequence[int]) -> list[Passage]:
        """Return the passages of these rows (0 <= row < n_rows), in the given order.

        Raises:
            InputError: the file or its outline is damaged.
            StoreError: a range cannot be read, or does not match its digest.
        """
        with self._translate_errors():
            decoded_group_by_number = {
                group: self._find_decoded_group(group, row) or self._read_group(group, self._find_cut(group, row))
                for group, row in self._find_last_rows(rows).items()
            }
            return [
                decoded_group_by_number[row // self._group_rows].build_passage(row % self._group_rows) for row in rows
            ]

    def close(self) -> None:
        """Do nothing, because the snapshot closes the file."""

    def _find_last_rows(self, row_numbers: Sequence[int]) -> dict[int, int]:
        """Return the highest requested row of each row group, counted from the group's start."""
        last_row_by_group = dict[int, int]()
        for row in row_numbers:
            group, row_in_group = divmod(row, self._group_rows)
            last_row_by_group[group] = max(last_row_by_group.get(group, 0), row_in_group)
        return last_row_by_group

    def _find_decoded_group(self, group: int, row: int) -> _DecodedGroup | None:
        """Return a row group from the cache; None if it has not decoded the text of the row."""
        decoded_group: _DecodedGroup | None = self._cache.find((self._file.name, group))
        return decoded_group if decoded_group is not None and row < decoded_group.n_complete_rows else None

    def _find_cut(self, group: int, row: int) -> int:
        """Return the position of the first cut that includes the text of a row."""
        return [row < n_rows for n_rows, _ in self._cuts[group]].index(True)

    def _list_group_ranges(self, group: int, cut: int) -> list[tuple[int, int]]:
        """Return the byte ranges before and after the texts that a cut leaves out."""
        (group_start, group_end), cuts = self._bounds[group], self._cuts[group]
        return [(group_start, group_start + cuts[cut][1]), (group_start + cuts[-1][1], group_end)]

    def _read_group(self, group: int, cut: int) -> _DecodedGroup:
        start, end = self._bounds[group]
        with self._file.cache.hold():
            self._file.load(*zip(*self._list_group_ranges(group, cut), strict=True))
            data = self._file.read_loaded(start, end)  # bytes that the cut leaves out may be zeros
        n_complete_rows, text_end = self._cuts[group][cut]
        has_all_texts = cut == len(self._cuts[group]) - 1
        text_cut = None if has_all_texts else (cut, text_end)
        decoded_group = _decode_group(data, self._columns, n_complete_rows, text_cut)
        self._cache.add((self._file.name, group), decoded_group, decoded_group.nbytes)
        return decoded_group

    @contextmanager
    def _translate_errors(self) -> Iterator[None]:
        try:
            yield
        except _DECODING_ERRORS as error:
            raise InputError(
                f"{self._file.name} cannot be read by ranges ({format_error(error)}): pull the snapshot"
            ) from error


def has_cuts(outline: Any) -> bool:
    """Return whether `RangedPassages` can read a passage file with this outline."""
    return isinstance(outline, dict) and "cuts" in outline


def list_cuts(path: Path, columns: Sequence[str], groups: Sequence[tuple[int, int]]) -> list[list[Cut]]:
    """Return the cuts of each row group of a file; an empty list if its pages have another layout.

    Args:
        path: the file.
        columns: all columns of the file, in order.
        groups: byte offsets of the start and end of each row group.
    """
    with suppress(*_DECODING_ERRORS), open_random_access(path) as read_range:
        return [_list_group_cuts(read_range(start, end - start), columns) for start, end in groups]
    return []


def _list_group_cuts(data: bytes, columns: Sequence[str]) -> list[Cut]:
    text_page, data_page = _find_pages(data, columns)["text"]
    indices = _decode_column_indices(data, data_page, "text")
    file = _BlockwiseFile(data[: text_page.end], text_page.start, _list_block_ends(data, text_page))
    stream, texts, cuts = pa.CompressedInputStream(file, "zstd"), b"", list[Cut]()
    n_texts = offset = 0
    for cut_bytes in _list_cut_sizes(text_page):
        texts += stream.read(cut_bytes - len(texts))
        text_ends = _list_text_ends(texts, offset)
        n_texts, offset = n_texts + len(text_ends), text_ends[-1] if text_ends else offset
        cuts.append((int(np.append(indices >= n_texts, True).argmax()), file.block_end))
    return [*cuts, (len(indices), text_page.end)]


class _BlockwiseFile(io.BytesIO):
    """A Zstandard frame that is read block by block, so that `block_end` is exact."""

    def __init__(self, data: bytes, start: int, block_ends: Sequence[int]) -> None:
        super().__init__(data)
        self.seek(start)
        self._block_ends = block_ends

    @property
    def block_end(self) -> int:
        """The end of the last block that the decompressor has begun to read."""
        return self._block_ends[bisect_left(self._block_ends, self.tell())]

    def read(self, size: int | None = -1) -> bytes:
        """Return at most `size` bytes of the next block."""
        offset = self.tell()
        next_ends = self._block_ends[bisect_right(self._block_ends, offset) :]
        bytes_left = next_ends[0] - offset if next_ends else 0
        return super().read(bytes_left if size is None or size < 0 else min(size, bytes_left))


def _list_cut_sizes(page: _Page) -> range:
    """Return the decompressed bytes of the dictionary page before each cut except the last one."""
    step = max(_MIN_CUT_BYTES, -(-page.decoded_bytes // _MAX_CUTS))
    return range(step, page.decoded_bytes, step)


def _list_block_ends(group_bytes: bytes, page: _Page) -> list[int]:
    """Return the ends of the blocks of a page's Zstandard frame (RFC 8878, section 3.1.1)."""
    descriptor = group_bytes[page.start + 4]
    is_single_segment, size_code = descriptor >> 5 & 1, descriptor >> 6
    offset = page.start + 5 + (not is_single_segment) + (0, 1, 2, 4)[descriptor & 3]
    offset += (is_single_segment, 2, 4, 8)[size_code]
    block_ends, is_last = list[int](), False
    while not is_last:
        header = int.from_bytes(group_bytes[offset : offset + 3], "little")
        is_last, is_repeated_byte = bool(header & 1), header >> 1 & 3 == 1
        offset += 3 + (1 if is_repeated_byte else header >> 3)
        block_ends.append(offset)
        if offset > page.end:
            raise ParquetError("has a page that is not a Zstandard frame")
    return block_ends


def _decompress_prefix(compressed: bytes, n_bytes: int) -> bytes | None:
    """Return the first `n_bytes` decompressed bytes; None if they need more compressed bytes."""
    with suppress(OSError):
        data: bytes = pa.CompressedInputStream(pa.BufferReader(compressed), "zstd").read(n_bytes)
        return data if len(data) == n_bytes else None
    return None


def _find_pages(group_bytes: bytes, columns: Sequence[str]) -> dict[str, tuple[_Page, _Page]]:
    """Return the dictionary page and the data page of each column of a row group.

    Raises:
        ParquetError: a column has other pages or encodings, or a page is too large.
    """
    offset, pages = 0, dict[str, list[_Page]]()
    for name in columns:
        for expected_kind, encodings in _ENCODINGS.items():
            header = read_page_header(lambda start, size: group_bytes[start : start + size], offset)
            header_bytes, page_kind, decoded_bytes, stored_bytes, n_values, encoding = header
            page_end = offset + header_bytes + stored_bytes
            is_small = decoded_bytes <= _MAX_PAGE_BYTES and n_values <= _MAX_ROWS
            if page_kind != expected_kind or encoding not in encodings or not is_small or page_end > len(group_bytes):
                raise ParquetError(f"has unexpected pages in its column {name}")
            pages.setdefault(name, []).append(_Page(offset + header_bytes, page_end, decoded_bytes, n_values))
            offset = page_end
    return {name: (dictionary_page, data_page) for name, (dictionary_page, data_page) in pages.items()}


def _decode_group(
    data: bytes, columns: Sequence[str], n_complete_rows: int, text_cut: tuple[int, int] | None = None
) -> _DecodedGroup:
    """Decode a row group.

    Args:
        data: bytes of the row group.
        columns: names of its columns, in order.
        n_complete_rows: number of rows from the start whose texts are in `data`.
        text_cut: position of the cut, and the end of its texts in `data`; None if all are there.
    """
    decoded_columns, nbytes = dict[str, _Column](), 0
    for name, (dictionary_page, data_page) in _find_pages(data, columns).items():
        if name == "text" and text_cut is not None:
            cut, end = text_cut
            cut_bytes = _list_cut_sizes(dictionary_page)[cut]
            dictionary = _decompress_prefix(data[dictionary_page.start : end], cut_bytes) or b""
        else:
            dictionary = _decompress(data, dictionary_page)
        dtype = _DTYPES.get(FULL_SCHEMA.field(name).type)
        values = _TextDictionary(dictionary) if dtype is None else np.frombuffer(dictionary, dtype).tolist()
        indices = _decode_column_indices(data, data_page, name)
        decoded_columns[name] = _Column(values, indices)
        nbytes += len(dictionary) + indices.nbytes
    return _DecodedGroup(decoded_columns, n_complete_rows, nbytes)


def _decompress(group_bytes: bytes, page: _Page) -> bytes:
    compressed, zstd = group_bytes[page.start : page.end], pa.Codec("zstd")
    page_data: bytes = zstd.decompress(compressed, page.decoded_bytes, asbytes=True)
    return page_data


def _list_text_ends(texts: bytes, start: int = 0) -> list[int]:
    """Return the ends of the complete texts from `start` on; each follows its 4-byte length."""
    text_ends, n_bytes, read_length = list[int](), len(texts), _LENGTH.unpack_from
    while start + 4 <= n_bytes:
        start += 4 + read_length(texts, start)[0]
        if start > n_bytes:
            break
        text_ends.append(start)
    return text_ends


def _decode_column_indices(group_bytes: bytes, page: _Page, name: str) -> _Indices:
    """Decode the data page of a column in the bytes of a row group: return (rows,), -1 for null."""
    is_nullable = FULL_SCHEMA.field(name).nullable
    return _decode_indices(_decompress(group_bytes, page), page.n_values, is_nullable=is_nullable)


def _decode_indices(data: bytes, n_rows: int, *, is_nullable: bool) -> _Indices:
    """Decode a data page: return the dictionary index of each row, (rows,), -1 for null."""
    if not is_nullable:
        return _decode_hybrid(data, 1, data[0], n_rows)
    is_present = _decode_hybrid(data, _LENGTH.size, 1, n_rows) == 1
    offset, indices = _LENGTH.size + _LENGTH.unpack_from(data)[0], np.full(n_rows, -1)
    indices[is_present] = _decode_hybrid(data, offset + 1, data[offset], int(is_present.sum()))
    return indices


def _decode_hybrid(data: bytes, offset: int, bit_width: int, n_numbers: int) -> _Indices:
    """Decode numbers of `bit_width` bits in Parquet's "RLE/Bit-Packing Hybrid".

    Source: `Encodings.md` of parquet-format.
    """
    numbers, n_read = np.zeros(n_numbers, np.int64), 0
    while bit_width and n_read < n_numbers:
        header, offset = parse_varint(data, offset)
        if header & 1:  # a run of bit-packed numbers, in groups of eight
            size = (header >> 1) * bit_width
            bits = np.unpackbits(np.frombuffer(data, np.uint8, size, offset), bitorder="little")
            run = bits.reshape(-1, bit_width)[: n_numbers - n_read] @ (1 << np.arange(bit_width))
        else:
            size = (bit_width + 7) // 8
            run = np.full(min(header >> 1, n_numbers - n_read), int.from_bytes(data[offset : offset + size], "little"))
        numbers[n_read : n_read + len(run)] = run
        n_read, offset = n_read + len(run), offset + size
    return numbers
