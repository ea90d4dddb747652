"""numpy's `.npy` files of others: whatever is wrong with one is a `ValueError`.

numpy parses a header as Python's literals, so a damaged one raises whatever Python's tokenizer and parser raise.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tokenize import TokenError
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt
from numpy.lib import format as npy

_BROKEN = (EOFError, SyntaxError, TokenError, RecursionError, MemoryError, OverflowError, TypeError, AttributeError)


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
        shape, fortran, dtype = read(file)
        if dtype.hasobject or min(shape, default=0) < 0:
            raise ValueError(f"it holds {dtype}, and not plain values")
        return shape, fortran, dtype, file.tell() + dtype.itemsize * math.prod(shape)


def map_array(path: Path) -> npt.NDArray[Any]:
    """Map a file.

    Raises:
        ValueError: it is no complete `.npy` file.
        OSError: it cannot be read.
    """
    with _as_value_error():
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
