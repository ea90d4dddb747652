"""The files that one build stage passes to the next: arrays end to end, with a stamp of the build.

A piece is a sequence of `.npy` images in one file, the stamp first. It is read in ranges of rows, from a disk or from
object storage. A piece that is truncated or belongs to another build is detected before any of its numbers is used.
Behind the piece of a kind with shards there is what each shard reads (`slices`).
"""

import math
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, BinaryIO, Self

import numpy as np
import numpy.typing as npt

from rag_model.digest import digest_file, digest_json
from rag_model.errors import InputError, ResourceError
from rag_model.index.plan import IndexPlan
from rag_model.npy import read_header

Opener = Callable[[], BinaryIO]  # opens a piece for reading at any offset: `path.open` bound to "rb", or a blob's
Array = npt.NDArray[Any]


def opener(path: Path) -> Opener:
    """Return a function that opens a local piece."""
    return partial(_open, path)


def _open(path: Path) -> BinaryIO:
    return path.open("rb")


def stamp_of(plan: IndexPlan, trained: Path, role: str, number: int) -> str:
    """Return the stamp of a piece: the digest of its plan, the trained file, its role and its number."""
    facts = trained.stat()
    return digest_json([plan.shared(), _digest(trained, facts.st_size, facts.st_mtime_ns), role, number])


@lru_cache(maxsize=16)
def _digest(trained: Path, size: int, changed: int) -> str:
    """Digest a trained file once for its thousands of pieces; `size` and `changed` distinguish it from a later one."""
    return digest_file(trained)


def write_piece(path: Path, stamp: str, arrays: Sequence[Array]) -> None:
    """Write `arrays` under a stamp.

    Raises:
        ResourceError: the file cannot be written.
    """
    try:
        with path.open("wb") as file:
            for array in (np.frombuffer(stamp.encode(), np.uint8), *arrays):
                np.save(file, array, allow_pickle=False)
    except OSError as failed:
        raise ResourceError(f"cannot write {path}: {failed.strerror or failed}") from failed


class Piece:
    """A piece that is open for reading; its arrays are numbered from 0, as they were written."""

    def __init__(self, file: BinaryIO, stamp: str, count: int, name: str) -> None:
        """Read the arrays' headers; `name` names the piece in errors.

        Raises:
            InputError: it is not a complete piece of `count` arrays, or has another stamp.
        """
        self._file, self._name = file, name
        broken = InputError(f"{name} is truncated or damaged: build it again")
        try:
            headers = [self._header() for _ in range(count + 1)]
            whole = file.seek(0, 2) == self._end
        except (OSError, ValueError) as damage:
            raise broken from damage
        if not whole:
            raise broken
        self._headers = headers[1:]
        (size,), dtype, offset = headers[0]
        if dtype != np.uint8 or self._read(offset, size) != stamp.encode():
            raise InputError(f"{name} is a piece of another build: build it again")

    @classmethod
    def open(cls, opener: Opener, stamp: str, count: int, name: str) -> Self:
        """Open a piece; close it with the `with` statement or `close`.

        Raises:
            InputError: as the constructor, or it cannot be opened.
        """
        try:
            file = opener()
        except OSError as failed:
            raise InputError(f"cannot open {name} ({failed.strerror}): build it again") from failed
        try:
            return cls(file, stamp, count, name)
        except BaseException:
            file.close()
            raise

    def rows(self, array: int) -> int:
        """Return the length of an array."""
        return int(self._headers[array][0][0])

    def read(self, array: int, first: int = 0, last: int | None = None) -> Array:
        """Return rows [first, last) of an array, in memory; by default all of them."""
        shape, dtype, offset = self._headers[array]
        last = shape[0] if last is None else last
        width = dtype.itemsize * math.prod(shape[1:])
        data = self._read(offset + first * width, (last - first) * width)
        return np.frombuffer(data, dtype).reshape(last - first, *shape[1:])  # flat -> (last - first, ...)

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def __enter__(self) -> Self:
        """Return itself."""
        return self

    def __exit__(self, *raised: object) -> None:
        """Close the file."""
        self.close()

    _end = 0  # where the data of the last header end

    def _header(self) -> tuple[tuple[int, ...], np.dtype[Any], int]:
        self._file.seek(self._end)
        shape, fortran, dtype, self._end = read_header(self._file)
        if fortran or not shape:
            raise ValueError("an array that is not part of a piece")
        return shape, dtype, self._file.tell()

    def _read(self, offset: int, size: int) -> bytes:
        self._file.seek(offset)
        data = self._file.read(size)
        if len(data) != size:
            raise InputError(f"{self._name} is truncated: build it again")
        return data
