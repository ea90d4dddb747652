"""Vectors from outside: files and folders are first inspected, then cut into parts of bounded size.

Inspection reads only headers, so vectors that cannot be indexed are refused before any work. Cutting reads
the rows once, in bounded memory, and finds those that hold a NaN or an infinity.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from rag_model.errors import InputError, UsageError
from rag_model.index.files.arrays import Block, NpyFile, ParquetFile, VectorFile
from rag_model.index.files.engine import Rows

Invalid = Literal["refuse", "drop"]

PART_BYTES = 256 << 20  # float32 bytes per part: a scattering worker holds it about four times
_BLOCK_BYTES = 16 << 20  # float32 bytes per block


@dataclass(frozen=True, slots=True)
class Intake:
    """Inspected vectors: (n, d) in all, the rows of the files in order."""

    files: tuple[VectorFile, ...]

    @property
    def n(self) -> int:
        """Return the number of rows of all files."""
        return sum(file.n for file in self.files)

    @property
    def d(self) -> int:
        """Return the number of dimensions."""
        return self.files[0].d

    @property
    def dtype(self) -> np.dtype[Any]:
        """Return the dtype of the parts: float16 if all files are float16, else float32."""
        return np.dtype(np.float16 if all(file.dtype == np.float16 for file in self.files) else np.float32)

    def part_rows(self, part_bytes: int = PART_BYTES) -> int:
        """Return the rows per part: at most `part_bytes` in float32, the parts about equal."""
        most = max(1, part_bytes // (4 * self.d))
        return -(-self.n // -(-self.n // most))

    def identity(self) -> list[Any]:
        """Return what identifies these files, as JSON values: paths, columns, sizes and modification times."""
        stats = [file.path.stat() for file in self.files]
        columns = [getattr(file, "column", None) for file in self.files]
        return [
            [str(file.path.resolve()), column, stat.st_size, stat.st_mtime_ns]
            for file, column, stat in zip(self.files, columns, stats, strict=True)
        ]


def look(paths: Sequence[Path], column: str | None = None) -> Intake:
    """Inspect vector files, and those in folders, sorted by name.

    Args:
        paths: `.npy` and Parquet files, or folders of them.
        column: of Parquet files; None: the only one that holds lists of floats.

    Raises:
        InputError: a file is missing, damaged, of another dimension, or holds no vectors; or all are empty.
        UsageError: no path is given, or a file has several columns of vectors and none is named.
    """
    files = [_opened(path, column) for given in paths for path in _expanded(given)]
    if not files:
        raise UsageError("there are no vectors to index: give a .npy file, a Parquet file, or a folder of them")
    filled = [file for file in files if file.n]
    if not filled:
        raise InputError(f"{files[0].path} holds no vectors: an index needs at least one")
    for file in filled:
        if file.d != filled[0].d:
            raise InputError(
                f"{file.path} has {file.d} dimensions and {filled[0].path} has {filled[0].d}: "
                "give vectors of one encoder"
            )
    return Intake(tuple(filled))


def cut(intake: Intake, put: Callable[[Block], None], invalid: Invalid, part_bytes: int = PART_BYTES) -> Rows | None:
    """Cut vectors into parts and pass each to `put`: (m, d) float16 or float32, which `put` must not keep.

    Holds one part and one block in memory.

    Args:
        intake: the vectors.
        put: stores a part.
        invalid: what to do with rows that hold a NaN or an infinity: `refuse` the vectors, or `drop` the rows.
        part_bytes: float32 bytes per part.

    Returns:
        (n,) the kept rows, ascending; None with `refuse`, which keeps all.

    Raises:
        InputError: a row is refused (the message names it), no row is left, or a file is damaged.
    """
    part, filled = np.empty((intake.part_rows(part_bytes), intake.d), intake.dtype), 0
    kept: list[Rows] = []
    for row, block in _checked(intake, invalid):
        kept.append(row)
        for chunk in np.split(block, np.arange(len(part) - filled, len(block), len(part))):
            part[filled : filled + len(chunk)] = chunk
            filled += len(chunk)
            if filled == len(part):
                put(part)
                filled = 0
    if filled:
        put(part[:filled])
    rows = np.concatenate(kept)
    if not len(rows):
        raise InputError(f"every row of {intake.files[0].path} holds a NaN or an infinity: there is nothing to index")
    return rows if invalid == "drop" else None


def _checked(intake: Intake, invalid: Invalid) -> Iterator[tuple[Rows, Block]]:
    """Yield blocks of finite rows, and their row numbers over all files."""
    start = 0
    for file in intake.files:
        first = 0
        for raw in file.blocks(max(1, _BLOCK_BYTES // (4 * intake.d))):
            with np.errstate(over="ignore"):  # a float64 out of range becomes an infinity, which the check below finds
                block = np.ascontiguousarray(raw, dtype=intake.dtype)
            good = np.flatnonzero(np.isfinite(block).all(axis=1))  # (m, d) -> (m,) -> indices
            if len(good) < len(block) and invalid == "refuse":
                bad = np.setdiff1d(np.arange(len(block)), good)
                raise InputError(
                    f"row {first + bad[0]} of {file.path} holds a NaN or an infinity"
                    + (f", and so do {len(bad) - 1} more near it" if len(bad) > 1 else "")
                    + ": correct the file, or drop such rows with --invalid drop"
                )
            yield good + (start + first), block[good] if len(good) < len(block) else block
            first += len(block)
        start += first


def _expanded(path: Path) -> list[Path]:
    if not path.is_dir():
        return [path]
    found = sorted(inner for inner in path.iterdir() if inner.suffix in (".npy", ".parquet") and inner.is_file())
    if not found:
        raise InputError(f"the folder {path} holds no .npy and no .parquet file: give another folder")
    if len({inner.suffix for inner in found}) > 1:
        raise InputError(f"the folder {path} holds both .npy and .parquet files: give a folder with one of the two")
    return found


def _opened(path: Path, column: str | None) -> VectorFile:
    if not path.exists():
        raise InputError(f"there is no file {path}: check the name")
    if path.suffix == ".npy":
        return NpyFile.open(path)
    if path.suffix in (".parquet", ".pq"):
        return ParquetFile.open(path, column)
    raise InputError(f"{path} is neither .npy nor .parquet: save the vectors as one of them")
