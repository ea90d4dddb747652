"""The vectors that an index is built over: the parts' `.npy` files, in row order, as one matrix on disk.

Files are memory-mapped and read block by block, so a stage that reads the corpus once needs bounded memory.
Every row is checked as it is read: a NaN in an index is never found and disturbs its neighbours.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from rag_model.errors import InputError, UsageError
from rag_model.index.files.engine import Rows, Vectors
from rag_model.npy import map_array
from rag_model.partition import Partition

BLOCK_BYTES = 32 << 20  # float32 bytes per block: large enough for BLAS, small compared with any index


class VectorFiles:
    """The parts' vectors as one (n, d) matrix; row = the rows of earlier files + the row within its file."""

    def __init__(self, paths: Sequence[Path]) -> None:
        """Map `paths`: `.npy` files of (rows, d) float16 or float32, in the order of the snapshot's parts.

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
        """Yield (first row, (m, d) float32, m >= 1) in row order, each within one file.

        Args:
            rows: at most this many per block; default: as many as 32 MiB hold.

        Raises:
            InputError: a row holds a NaN or an infinity; the sentence names it.
        """
        size = rows or max(1, BLOCK_BYTES // (4 * self.dim))
        for path, start, array in zip(self.paths, self._partition.starts, self._arrays, strict=False):
            for first in range(0, len(array), size):
                yield start + first, _finite(array[first : first + size], path, first)

    def take(self, rows: Rows) -> Vectors:
        """Return (len(rows), d) float32: the vectors of `rows`, ascending global rows in [0, n).

        Raises:
            InputError: a row holds a NaN or an infinity; the sentence names it.
        """
        taken = np.empty((len(rows), self.dim), np.float32)
        for number, span, local in self._partition.split(rows):
            taken[span] = self._arrays[number][local]
            _check_rows(taken[span], self.paths[number], local)
        return taken

    def all(self) -> Vectors:
        """Return the whole (n, d) float32 matrix, in memory."""
        return self.take(np.arange(self.n))

    def sample(self, count: int, seed: int) -> Vectors:
        """Return (min(count, n), d) float32: drawn without replacement, in row order, by seed."""
        if count >= self.n:
            return self.all()
        chosen = np.random.default_rng(seed).choice(self.n, count, replace=False, shuffle=False)
        return self.take(np.sort(chosen))

    @classmethod
    def of(cls, paths: Sequence[Path], n: int, dim: int) -> Self:
        """Map `paths` and check that they hold the (n, dim) vectors of a plan.

        Raises:
            InputError: they hold another number of rows or dimensions.
        """
        files = cls(paths)
        if (files.n, files.dim) != (n, dim):
            raise InputError(
                f"the vectors from {paths[0]} on are {files.n} x {files.dim}, not the plan's {n} x {dim}: "
                "plan the index again"
            )
        return files


def map_vectors(path: Path) -> npt.NDArray[Any]:
    """Map one file of vectors, (rows, d) float16 or float32.

    Raises:
        InputError: it is missing, damaged or of another type.
    """
    try:
        array: npt.NDArray[Any] = map_array(path)
    except FileNotFoundError as missing:
        raise InputError(f"there is no vector file {path}: encode its part first") from missing
    except (OSError, ValueError) as broken:
        raise InputError(f"{path} is not a complete .npy file: encode its part again") from broken
    if array.ndim != 2 or array.shape[1] == 0 or array.dtype not in (np.float16, np.float32):
        raise InputError(f"{path} holds {array.dtype} of shape {array.shape}: vectors are (rows, d) float16 or float32")
    return array


def _finite(block: npt.NDArray[Any], path: Path, first: int) -> Vectors:
    vectors = np.ascontiguousarray(block, dtype=np.float32)
    _check_rows(vectors, path, np.arange(first, first + len(vectors)))
    return vectors


def _check_rows(vectors: Vectors, path: Path, rows: Rows) -> None:
    bad = np.flatnonzero(~np.isfinite(vectors).all(axis=1))
    if len(bad):
        more = f" and {len(bad) - 1} more near it" if len(bad) > 1 else ""
        raise InputError(f"row {rows[bad[0]]} of {path}{more} holds a NaN or an infinity: encode the part again")
