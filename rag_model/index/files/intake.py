"""Anyone's vectors: files and folders are looked at first, and then cut into parts of bounded size.

Looking reads headers only, so that what cannot be indexed, or cannot fit, is told before any work. Cutting passes over
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

PART_BYTES = 256 << 20  # of float32 a part: a scattering worker holds it about four times
_BLOCK_BYTES = 16 << 20  # of float32 a block


@dataclass(frozen=True, slots=True)
class Intake:
    """Vectors that were looked at: (n, d) in all, row after row of the files in order."""

    files: tuple[VectorFile, ...]

    @property
    def n(self) -> int:
        """Return the rows of all files."""
        return sum(file.n for file in self.files)

    @property
    def d(self) -> int:
        """Return the dimensions."""
        return self.files[0].d

    @property
    def dtype(self) -> np.dtype[Any]:
        """Return what the parts are kept as: float16 if all files are, else float32."""
        return np.dtype(np.float16 if all(file.dtype == np.float16 for file in self.files) else np.float32)

    def part_rows(self, part_bytes: int = PART_BYTES) -> int:
        """Return the rows of a part: as many as `part_bytes` hold in float32, the parts about equal."""
        most = max(1, part_bytes // (4 * self.d))
        return -(-self.n // -(-self.n // most))

    def identity(self) -> list[Any]:
        """Return what tells these files from others, as JSON values: their names, sizes and times of change."""
        stats = [file.path.stat() for file in self.files]
        columns = [getattr(file, "column", None) for file in self.files]
        return [
            [str(file.path.resolve()), column, stat.st_size, stat.st_mtime_ns]
            for file, column, stat in zip(self.files, columns, stats, strict=True)
        ]


def look(paths: Sequence[Path], column: str | None = None) -> Intake:
    """Look at vector files, and at those in folders, which come by name.

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
    """Cut vectors into parts, each given to `put` in turn: (m, d) float16 or float32, which `put` must not keep.

    Holds one part and one block.

    Args:
        intake: the vectors.
        put: takes a part.
        invalid: what to do with rows that hold a NaN or an infinity: `refuse` the vectors, or `drop` the rows.
        part_bytes: of float32 a part.

    Returns:
        (n,) the rows that were kept, ascending; None with `refuse`, where all are.

    Raises:
        InputError: a row that is refused, named; or no row is left; or a file is damaged.
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
    """Yield blocks of finite rows, and which rows of all files they are."""
    start = 0
    for file in intake.files:
        first = 0
        for raw in file.blocks(max(1, _BLOCK_BYTES // (4 * intake.d))):
            with np.errstate(over="ignore"):  # what float32 cannot hold becomes an infinity, and is found as one
                block = np.ascontiguousarray(raw, dtype=intake.dtype)
            good = np.flatnonzero(np.isfinite(block).all(axis=1))
            if len(good) < len(block) and invalid == "refuse":
                bad = np.setdiff1d(np.arange(len(block)), good)
                raise InputError(
                    f"row {first + bad[0]} of {file.path} holds a NaN or an infinity"
                    + (f", and so do {len(bad) - 1} more near it" if len(bad) > 1 else "")
                    + ": mend the file, or leave such rows out with --invalid drop"
                )
            yield good + (start + first), block[good] if len(good) < len(block) else block
            first += len(block)
        start += first


def _expanded(path: Path) -> list[Path]:
    if not path.is_dir():
        return [path]
    found = sorted(inner for inner in path.iterdir() if inner.suffix in (".npy", ".parquet") and inner.is_file())
    if not found:
        raise InputError(f"the folder {path} holds no .npy and no .parquet file: give the one that does")
    if len({inner.suffix for inner in found}) > 1:
        raise InputError(f"the folder {path} holds both .npy and .parquet files: give it as one kind")
    return found


def _opened(path: Path, column: str | None) -> VectorFile:
    if not path.exists():
        raise InputError(f"there is no file {path}: check the name")
    if path.suffix == ".npy":
        return NpyFile.open(path)
    if path.suffix in (".parquet", ".pq"):
        return ParquetFile.open(path, column)
    raise InputError(f"{path} is neither .npy nor .parquet: save the vectors as one of them")
