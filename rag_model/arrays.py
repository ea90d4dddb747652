"""Read untrusted `.npy` files, and split row numbers among consecutive parts.

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
from itertools import accumulate
from pathlib import Path
from tokenize import TokenError
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt
from numpy.lib import format as npy
from numpy.typing import NDArray

_PARSE_ERRORS = (
    EOFError,
    SyntaxError,
    TokenError,
    RecursionError,
    MemoryError,
    OverflowError,
    TypeError,
    AttributeError,
)


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
