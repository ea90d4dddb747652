"""The vectors of a corpus: the parts' `.npy` files, in row order, as one matrix on disk.

Files are memory-mapped and read block by block, so a stage that reads the corpus once needs bounded
memory. Every row is checked when it is read: a NaN is never found by a search and disturbs its
neighbours.
"""

import io
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol, Self

import numpy as np
import numpy.typing as npt

from rag_model.arrays import Partition, map_npy, read_npy_header
from rag_model.errors import InputError, UsageError
from rag_model.index.files.engine import Rows, Vectors

BLOCK_BYTES = 32 << 20  # float32 bytes per block: enough for BLAS, small compared with any index
_HEADER_BYTES = 4 << 10  # read at the beginning of a remote file; numpy's headers have 128
_CONCURRENT_FILES = 32  # remote files that are read at a time


class VectorRows(Protocol):
    """The vectors of a corpus, read by row."""

    n: int  # number of vectors
    dim: int

    def read_rows(self, rows: Rows) -> Vectors:
        """Return (len(rows), d) float32: the vectors of `rows`, ascending global rows in [0, n).

        Raises:
            InputError: a file is damaged, or a row holds a NaN or an infinity.
        """
        ...


class VectorFiles:
    """The parts' vectors as one (n, d) matrix, in the order of the files."""

    def __init__(self, paths: Sequence[Path]) -> None:
        """Map `.npy` files of (rows, d) float16 or float32, in the order of the parts.

        Raises:
            UsageError: no file is given.
            InputError: a file is missing, damaged, of another type or of another dimension.
        """
        if not paths:
            raise UsageError("there are no vectors to index: give at least one .npy file")
        self.paths = tuple(paths)
        self._arrays = [map_vectors(path) for path in self.paths]
        self.dim: int = self._arrays[0].shape[1]
        self.dtype: np.dtype[Any] = np.result_type(*self._arrays)  # float16 if all files are
        for path, array in zip(self.paths, self._arrays, strict=True):
            if array.shape[1] != self.dim:
                raise InputError(
                    f"{path} has {array.shape[1]} dimensions and {self.paths[0]} has {self.dim}: "
                    "encode all parts with one encoder"
                )
        self._partition = Partition(map(len, self._arrays))
        self.n = self._partition.n

    def blocks(self, rows: int | None = None) -> Iterator[tuple[int, Vectors]]:
        """Yield (first row, (m, d) float32, m >= 1) in row order; no block spans two files.

        Args:
            rows: maximum rows per block; None: as many as 32 MiB hold.

        Raises:
            InputError: a row holds a NaN or an infinity; the message names it.
        """
        size = rows or max(1, BLOCK_BYTES // (4 * self.dim))
        for path, start, array in zip(self.paths, self._partition.starts, self._arrays, strict=False):
            for first in range(0, len(array), size):
                yield start + first, _read_finite(array[first : first + size], path, first)

    def read_rows(self, rows: Rows) -> Vectors:
        """Return (len(rows), d) float32: the vectors of `rows`, ascending global rows in [0, n).

        Raises:
            InputError: a row holds a NaN or an infinity; the message names it.
        """
        vectors = np.empty((len(rows), self.dim), np.float32)
        for number, span, local in self._partition.split(rows):
            vectors[span] = self._arrays[number][local]
            _check_rows(vectors[span], self.paths[number], local)
        return vectors

    def read_all(self) -> Vectors:
        """Return the complete (n, d) float32 matrix, in memory."""
        return self.read_rows(np.arange(self.n))

    def sample(self, count: int, seed: int) -> Vectors:
        """Return (min(count, n), d) float32 in row order, drawn by `seed` without replacement."""
        if count >= self.n:
            return self.read_all()
        sampled_rows = np.random.default_rng(seed).choice(self.n, count, replace=False, shuffle=False)
        return self.read_rows(np.sort(sampled_rows))

    @classmethod
    def open_checked(cls, paths: Sequence[Path], n: int, dim: int) -> Self:
        """Map `paths` and check that they hold the (n, dim) vectors of a plan.

        Raises:
            InputError: the number of rows or dimensions differs from the plan's.
        """
        files = cls(paths)
        if (files.n, files.dim) != (n, dim):
            raise InputError(
                f"the vectors from {paths[0]} on are {files.n} x {files.dim}, not the plan's {n} x "
                f"{dim}: plan the index again"
            )
        return files


class RemoteVectorFiles:
    """The parts' vectors in an object store: `VectorRows` that reads only the requested rows.

    A worker that measures an index reads a thousand rows of it. Fetching all files would take 32 GB
    for 21 million passages.
    """

    def __init__(
        self, names: Sequence[str], lengths: Sequence[int], dim: int, read: Callable[[str, int, int], bytes]
    ) -> None:
        """Set the files of (rows, d) in the order of the parts, and their numbers of rows.

        `read(name, start, end)` returns a range of a file, and all bytes of a shorter one.
        """
        self.dim, self._names, self._read = dim, names, read
        self._partition = Partition(lengths)
        self.n = self._partition.n

    def read_rows(self, rows: Rows) -> Vectors:
        """Return (len(rows), d) float32: the vectors of `rows`, ascending global rows in [0, n).

        Raises:
            InputError: a file is damaged, or a row holds a NaN or an infinity.
        """
        vectors = np.empty((len(rows), self.dim), np.float32)
        with ThreadPoolExecutor(_CONCURRENT_FILES) as threads:
            parts = [*self._partition.split(rows)]
            for (_, span, _), part_vectors in zip(parts, threads.map(self._read_part, parts), strict=True):
                vectors[span] = part_vectors
        return vectors

    def _read_part(self, part: tuple[int, slice, Rows]) -> Vectors:
        number, _, local = part
        name, length = self._names[number], self._partition.starts[number + 1] - self._partition.starts[number]
        incomplete = InputError(f"{name} is not a complete .npy file of {length} x {self.dim}: encode its part again")
        try:
            shape, fortran, dtype, end = read_npy_header(io.BytesIO(self._read(name, 0, _HEADER_BYTES)))
        except ValueError as error:
            raise incomplete from error
        if shape != (length, self.dim) or fortran or dtype not in (np.float16, np.float32):
            raise incomplete
        row_bytes = self.dim * dtype.itemsize
        starts = [end - (length - row) * row_bytes for row in local.tolist()]
        data = b"".join(self._read(name, start, start + row_bytes) for start in starts)
        if len(data) != len(local) * row_bytes:
            raise incomplete
        vectors: Vectors = np.frombuffer(data, dtype).reshape(len(local), self.dim).astype(np.float32)
        _check_rows(vectors, name, local)
        return vectors


def map_vectors(path: Path) -> npt.NDArray[Any]:
    """Map one file of vectors, (rows, d) float16 or float32.

    Raises:
        InputError: the file is missing, damaged or of another type.
    """
    try:
        array: npt.NDArray[Any] = map_npy(path)
    except FileNotFoundError as error:
        raise InputError(f"there is no vector file {path}: encode its part first") from error
    except (OSError, ValueError) as error:
        raise InputError(f"{path} is not a complete .npy file: encode its part again") from error
    if array.ndim != 2 or array.shape[1] == 0 or array.dtype not in (np.float16, np.float32):
        raise InputError(f"{path} holds {array.dtype} of shape {array.shape}: vectors are (rows, d) float16 or float32")
    return array


def _read_finite(block: npt.NDArray[Any], path: Path, first: int) -> Vectors:
    vectors = np.ascontiguousarray(block, dtype=np.float32)
    _check_rows(vectors, path, np.arange(first, first + len(vectors)))
    return vectors


def _check_rows(vectors: Vectors, path: Path | str, rows: Rows) -> None:
    not_finite = np.flatnonzero(~np.isfinite(vectors).all(axis=1))
    if len(not_finite):
        suffix = f" and {len(not_finite) - 1} more near it" if len(not_finite) > 1 else ""
        raise InputError(
            f"row {rows[not_finite[0]]} of {path}{suffix} holds a NaN or an infinity: encode the part again"
        )
