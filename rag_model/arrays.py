"""Read untrusted `.npy` files, assign row numbers to parts, and locate lists of rows in files.

numpy parses a `.npy` header as Python literals, so a damaged header can raise any error of Python's
tokenizer and parser; each becomes a `ValueError`. Python 3.11's parser is not thread-safe if
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


# struct of the header's length, by format version
_LENGTH_STRUCTS = {(1, 0): struct.Struct("<H")}
_LATER_LENGTH_STRUCT = struct.Struct("<I")
_MAX_HEADER_BYTES = 10_000  # numpy rejects longer headers
_PARSER_LOCK = threading.Lock()


def read_npy_header(file: BinaryIO) -> tuple[tuple[int, ...], bool, np.dtype[Any], int]:
    """Read the header of the `.npy` array that starts at the current position of `file`.

    Returns (shape, is_fortran_order, dtype, offset after the array); the file is left at the first
    byte of the array's data.

    Raises:
        ValueError: The header is damaged or the array contains objects.
        OSError: The file cannot be read.
    """
    with _convert_to_value_error():
        version = npy.read_magic(file)
        parse_header = npy.read_array_header_1_0 if version == (1, 0) else npy.read_array_header_2_0
        length_struct = _LENGTH_STRUCTS.get(version, _LATER_LENGTH_STRUCT)
        if len(header := file.read(length_struct.size)) == length_struct.size:
            (header_bytes,) = length_struct.unpack(header)
            if header_bytes > _MAX_HEADER_BYTES:
                raise ValueError(f"Header info length ({header_bytes:,}) is more than {_MAX_HEADER_BYTES:,} bytes")
            header += file.read(header_bytes)
        with _PARSER_LOCK:  # parse from memory: the file may be remote, and the lock must be short
            shape, is_fortran_order, dtype = parse_header(io.BytesIO(header))
        if dtype.hasobject or min(shape, default=0) < 0:
            raise ValueError(f"it contains {dtype}, not plain values")
        return shape, is_fortran_order, dtype, file.tell() + dtype.itemsize * math.prod(shape)


def map_npy(path: Path) -> npt.NDArray[Any]:
    """Memory-map a `.npy` file.

    Raises:
        ValueError: The file is not a complete `.npy` file.
        OSError: The file cannot be read.
    """
    with _convert_to_value_error(), _PARSER_LOCK:
        array: npt.NDArray[Any] = np.load(path, mmap_mode="r", allow_pickle=False)
        return array


@contextmanager
def _convert_to_value_error() -> Iterator[None]:
    try:
        yield
    except _PARSE_ERRORS as error:
        raise ValueError(f"not a .npy file ({type(error).__name__})") from error
    except ValueError as error:
        # The other lines of numpy's message are advice on pickles, which does not apply.
        raise ValueError(str(error).partition("\n")[0]) from error


Rows = NDArray[np.int64]


class RowPartition:
    """The division of the rows 0 … n-1 into consecutive parts of given lengths."""

    def __init__(self, lengths: Iterable[int]) -> None:
        # the first row of each part, and after them the number of all rows
        self.starts = [0, *accumulate(lengths)]
        self.n = self.starts[-1]
        self._boundaries = np.array(self.starts)

    def split(self, rows: Rows) -> Iterator[tuple[int, slice, Rows]]:
        """Yield (part number, slice of `rows`, row numbers in the part) for each part with rows.

        `rows` are ascending and in [0, n). Costs one binary search per part for any number of rows.
        """
        edges = np.searchsorted(rows, self._boundaries)
        for part_number in np.flatnonzero(np.diff(edges)).tolist():
            part_slice = slice(int(edges[part_number]), int(edges[part_number + 1]))
            yield part_number, part_slice, rows[part_slice] - self.starts[part_number]


def view_windows(array: NDArray[Any], width: int) -> NDArray[np.void]:
    """Return a view of a contiguous array whose item i has the bytes of items i … i + width - 1.

    Gathering runs of items through this view takes a tenth of the time of gathering single items.
    """
    return np.ndarray((max(0, len(array) - width + 1),), f"V{width * array.itemsize}", array, 0, array.strides)


def gather_windows(array: NDArray[Any], starts: Rows, width: int) -> NDArray[Any]:
    """Return an (m, width) copy; row j has the `width` items of a contiguous array from starts[j]
    on.
    """
    return view_windows(array, width)[starts].view(array.dtype).reshape(-1, width)


def concatenate_ranges(counts: Rows) -> Rows:
    """Return the numbers 0 … c-1 for each count c, concatenated."""
    ends = np.cumsum(counts)
    return np.arange(ends[-1] if len(ends) else 0) - np.repeat(ends - counts, counts)


def mask_unordered(rows: Rows) -> Rows:
    """Return an (n,) copy of `rows` with -1 for each number that is not above all earlier ones."""
    return np.where(np.diff(np.maximum.accumulate(rows), prepend=-1) > 0, rows, -1)


def match_digests(old: NDArray[np.uint64], new: NDArray[np.uint64]) -> Rows:
    """Return the (n,) position in `old` of each digest in `new`, or -1 if the digest is not there.

    If a digest occurs several times, its i-th occurrence in `new` is matched with that in `old`.
    """
    if not len(old):
        return np.full(len(new), -1)
    old_order, new_order = (np.argsort(digests, kind="stable") for digests in (old, new))
    old_sorted, new_sorted = old[old_order], new[new_order]
    # (n,) how many equal digests precede each digest of `new_sorted`
    duplicate_ranks = np.arange(len(new)) - np.searchsorted(new_sorted, new_sorted)
    sorted_positions = np.searchsorted(old_sorted, new_sorted) + duplicate_ranks
    is_match = sorted_positions < len(old)
    is_match[is_match] = old_sorted[sorted_positions[is_match]] == new_sorted[is_match]
    positions = np.full(len(new), -1)
    positions[new_order[is_match]] = old_order[sorted_positions[is_match]]
    return positions


def find_runs(rows: Rows) -> tuple[Rows, Rows]:
    """Return the start and the length of each run in which rows ascend by one, or all are -1."""
    n_rows = len(rows)
    # (n,) a number that is the same for all rows of a run
    shifts = np.where(rows < 0, -n_rows - 1, rows - np.arange(n_rows))
    run_starts = np.flatnonzero(np.diff(shifts, prepend=-n_rows - 2))
    return run_starts, np.diff(run_starts, append=n_rows)


@dataclass(frozen=True)
class RowLists:
    """The location of consecutive lists of row numbers in a file, such as the links of a graph."""

    start: int  # offset of the first list in bytes
    dtype: str  # numpy type of a row number; the number -1 marks an empty slot
    # bytes of each slot's code (its quantized vector); a list's codes come before its row numbers
    code_bytes: int
    by_row: bool  # whether list i belongs to row i
    lengths: Rows  # (m,) number of slots of each list
    gaps: Rows  # (m,) bytes between the end of each list and the next list

    @classmethod
    def empty(cls) -> Self:
        """Return an empty location, for a file that has no lists of row numbers."""
        return cls(0, "<i4", 0, False, np.zeros(0, np.int64), np.zeros(0, np.int64))

    @property
    def slot_bytes(self) -> int:
        """Bytes per slot: its code and its row number."""
        return self.code_bytes + np.dtype(self.dtype).itemsize

    @cached_property
    def starts(self) -> Rows:
        """(m + 1,) offsets of the lists, and of the first byte after the last list."""
        return self.start + np.concatenate(
            [np.zeros(1, np.int64), np.cumsum(self.lengths * self.slot_bytes + self.gaps)]
        )

    @property
    def end(self) -> int:
        """Offset of the first byte after the last list."""
        return int(self.starts[-1])
