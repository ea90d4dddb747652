"""The vectors of a corpus: the parts' `.npy` files, in row order, as one matrix on disk.

Files are memory-mapped and read block by block, so a stage that reads the corpus once needs bounded
memory. Every row is checked when it is read: a NaN is never found by a search and disturbs its
neighbours.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from rag_model.arrays import Partition, map_npy
from rag_model.errors import InputError, UsageError
from rag_model.index.files.engine import Rows, Vectors

BLOCK_BYTES = 32 << 20  # float32 bytes per block: enough for BLAS, small compared with any index


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


def _check_rows(vectors: Vectors, path: Path, rows: Rows) -> None:
    not_finite = np.flatnonzero(~np.isfinite(vectors).all(axis=1))
    if len(not_finite):
        suffix = f" and {len(not_finite) - 1} more near it" if len(not_finite) > 1 else ""
        raise InputError(
            f"row {rows[not_finite[0]]} of {path}{suffix} holds a NaN or an infinity: encode the part again"
        )
