"""numpy's `.npy` files of others: whatever is wrong with one is a `ValueError`.

numpy parses a header as Python's literals, so a damaged one raises whatever Python's tokenizer and parser raise. Python
3.11's parser fails where two threads use it and a callback of garbage collection, as prometheus-client's, lets them
take turns (`SystemError: AST constructor recursion depth mismatch`), so headers are parsed one after the other.
"""

import io
import math
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tokenize import TokenError
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt
from numpy.lib import format as npy

_BROKEN = (EOFError, SyntaxError, TokenError, RecursionError, MemoryError, OverflowError, TypeError, AttributeError)


_SIZES = {(1, 0): struct.Struct("<H")}  # the size of a header, by version; of later ones:
_LATER = struct.Struct("<I")
_LONGEST = 10_000  # bytes of a header that numpy reads
_PARSER = threading.Lock()


def read_header(file: BinaryIO) -> tuple[tuple[int, ...], bool, np.dtype[Any], int]:
    """Return shape, whether columns come first, dtype, and the offset behind the image that begins where `file` is.

    Leaves the file where the array's bytes begin.

    Raises:
        ValueError: it is no image of an array of plain values.
        OSError: the file cannot be read.
    """
    with _as_value_error():
        version = npy.read_magic(file)
        read = npy.read_array_header_1_0 if version == (1, 0) else npy.read_array_header_2_0
        size = _SIZES.get(version, _LATER)
        if len(data := file.read(size.size)) == size.size:
            (length,) = size.unpack(data)
            if length > _LONGEST:
                raise ValueError(f"Header info length ({length:,}) is more than {_LONGEST:,} bytes")
            data += file.read(length)
        with _PARSER:  # of bytes that are here: a file may be far away
            shape, fortran, dtype = read(io.BytesIO(data))
        if dtype.hasobject or min(shape, default=0) < 0:
            raise ValueError(f"it holds {dtype}, and not plain values")
        return shape, fortran, dtype, file.tell() + dtype.itemsize * math.prod(shape)


def map_array(path: Path) -> npt.NDArray[Any]:
    """Map a file.

    Raises:
        ValueError: it is no complete `.npy` file.
        OSError: it cannot be read.
    """
    with _as_value_error(), _PARSER:
        array: npt.NDArray[Any] = np.load(path, mmap_mode="r", allow_pickle=False)
        return array


@contextmanager
def _as_value_error() -> Iterator[None]:
    try:
        yield
    except _BROKEN as broken:
        raise ValueError(f"no .npy file ({type(broken).__name__})") from broken
    except ValueError as broken:
        raise ValueError(str(broken).partition("\n")[0]) from broken  # what follows is advice on pickles
