"""Read untrusted `.npy` files, split row numbers among consecutive parts, locate lists of them.

numpy parses a `.npy` header as Python literals, so a damaged header can raise any error of Python's
tokenizer and parser; all of them become a `ValueError`. Python 3.11's parser is not thread-safe if
a garbage collection callback (such as prometheus-client's) switches threads (`SystemError: AST
constructor recursion depth mismatch`), so a lock serialises the parsing.
"""

import io
import math
import struct
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from tokenize import TokenError
from typing import Any, BinaryIO, Self

import numpy as np
import numpy.typing as npt
from numpy.lib import format as npy
from numpy.typing import NDArray

_PARSE_ERRORS = (
    EOFError, SyntaxError, TokenError, RecursionError, MemoryError, OverflowError, TypeError,
    AttributeError,
)  # fmt: skip


_HEADER_SIZES = {(1, 0): struct.Struct("<H")}  # length field of a header, by format version
_LATER_HEADER_SIZE = struct.Struct("<I")
_MAX_HEADER_BYTES = 10_000  # bytes; numpy rejects longer headers
_PARSER_LOCK = threading.Lock()


def read_npy_header(file: BinaryIO) -> tuple[tuple[int, ...], bool, np.dtype[Any], int]:
    """Read the header of the `.npy` array that starts at the position of `file`.

    Returns (shape, is_fortran_order, dtype, offset after the array); the file is left at the first
    byte of the array's data.

    Raises:
        ValueError: The header is damaged or the array contains objects.
        OSError: The file cannot be read.
    """
    with _raise_value_error():
        version = npy.read_magic(file)
        parse_header = npy.read_array_header_1_0 if version == (1, 0) else npy.read_array_header_2_0
        length_field = _HEADER_SIZES.get(version, _LATER_HEADER_SIZE)
        if len(data := file.read(length_field.size)) == length_field.size:
            (length,) = length_field.unpack(data)
            if length > _MAX_HEADER_BYTES:
                raise ValueError(f"Header info length ({length:,}) is more than {_MAX_HEADER_BYTES:,} bytes")
            data += file.read(length)
        with _PARSER_LOCK:  # parse from memory: the file may be remote, and the lock must be short
            shape, fortran, dtype = parse_header(io.BytesIO(data))
        if dtype.hasobject or min(shape, default=0) < 0:
            raise ValueError(f"it contains {dtype}, not plain values")
        return shape, fortran, dtype, file.tell() + dtype.itemsize * math.prod(shape)


def map_npy(path: Path) -> npt.NDArray[Any]:
    """Memory-map a `.npy` file.

    Raises:
        ValueError: The file is not a complete `.npy` file.
        OSError: The file cannot be read.
    """
    with _raise_value_error(), _PARSER_LOCK:
        array: npt.NDArray[Any] = np.load(path, mmap_mode="r", allow_pickle=False)
        return array


@contextmanager
def _raise_value_error() -> Iterator[None]:
    try:
        yield
    except _PARSE_ERRORS as error:
        raise ValueError(f"not a .npy file ({type(error).__name__})") from error
    except ValueError as error:
        # The following lines are advice on pickles.
        raise ValueError(str(error).partition("\n")[0]) from error


Rows = NDArray[np.int64]


class Partition:
    """Consecutive parts of given lengths: row = rows of earlier parts + row within the part."""

    def __init__(self, lengths: Iterable[int]) -> None:
        self.starts = [0, *accumulate(lengths)]  # first row of each part, then the end
        self.n = self.starts[-1]
        self._boundaries = np.array(self.starts)

    def split(self, rows: Rows) -> Iterator[tuple[int, slice, Rows]]:
        """Yield (part, slice of `rows`, rows within the part) for each part with rows.

        `rows` are ascending and in [0, n). Costs one binary search per part for any number of rows.
        """
        edges = np.searchsorted(rows, self._boundaries)
        for part in np.flatnonzero(np.diff(edges)).tolist():
            span = slice(int(edges[part]), int(edges[part + 1]))
            yield part, span, rows[span] - self.starts[part]


def concatenated_ranges(counts: Rows) -> Rows:
    """Return 0 … c-1 for each count c, concatenated."""
    ends = np.cumsum(counts)
    return np.arange(ends[-1] if len(ends) else 0) - np.repeat(ends - counts, counts)


def keep_ascending(rows: Rows) -> Rows:
    """Return (n,) the rows that are higher than all before them, and otherwise -1."""
    return np.where(np.diff(np.maximum.accumulate(rows), prepend=-1) > 0, rows, -1)


def match_digests(old: NDArray[np.uint64], new: NDArray[np.uint64]) -> Rows:
    """Return (n,) the position in `old` of each of `new`, -1 if there is none.

    Of equal digests, the first of `new` is the first of `old`, and so on, so that each position is
    there once.
    """
    if not len(old):
        return np.full(len(new), -1)
    old_order, new_order = (np.argsort(digests, kind="stable") for digests in (old, new))
    old_sorted, new_sorted = old[old_order], new[new_order]
    rank = np.arange(len(new)) - np.searchsorted(new_sorted, new_sorted)  # among equal ones
    places = np.searchsorted(old_sorted, new_sorted) + rank
    is_found = places < len(old)
    is_found[is_found] = old_sorted[places[is_found]] == new_sorted[is_found]
    positions = np.full(len(new), -1)
    positions[new_order[is_found]] = old_order[places[is_found]]
    return positions


def find_runs(rows: Rows) -> tuple[Rows, Rows]:
    """Return the position and the length of each run of rows that ascend by one, or are all -1."""
    count = len(rows)
    shifts = np.where(rows < 0, -count - 1, rows - np.arange(count))  # equal within a run
    starts = np.flatnonzero(np.diff(shifts, prepend=-count - 2))
    return starts, np.diff(starts, append=count)


@dataclass(frozen=True)
class RowLists:
    """The location of consecutive lists of row numbers in a file, such as the links of a graph."""

    start: int  # offset of the first list
    dtype: str  # of a number; -1 is an empty slot
    code_bytes: int  # of each slot; all codes of a list come before its numbers
    by_row: bool  # whether list i belongs to row i
    lengths: Rows  # (m,) slots of each list
    gaps: Rows  # (m,) other bytes after each list

    @classmethod
    def empty(cls) -> Self:
        """Return the lists of a file without any."""
        return cls(0, "<i4", 0, False, np.zeros(0, np.int64), np.zeros(0, np.int64))

    @property
    def slot_bytes(self) -> int:
        """The bytes of a slot, with its code."""
        return self.code_bytes + np.dtype(self.dtype).itemsize

    @cached_property
    def starts(self) -> Rows:
        """The offset of each list, and of the first byte after the last one: (m + 1,)."""
        return self.start + np.concatenate(
            [np.zeros(1, np.int64), np.cumsum(self.lengths * self.slot_bytes + self.gaps)]
        )

    @property
    def end(self) -> int:
        """The offset after the last list."""
        return int(self.starts[-1])
