"""Input vector files: a `.npy` array, or a Parquet column of lists. Opening reads only headers."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, Self

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from rag_model.errors import InputError, UsageError, reason
from rag_model.npy import map_array, read_header
from rag_model.parquet_pages import PagesError, check_groups

Block = npt.NDArray[Any]

_FLOATS = {pa.float16(): np.float16, pa.float32(): np.float32, pa.float64(): np.float64}


MOST_DIM = 1 << 20  # of a vector: faiss reads no more


class VectorFile(Protocol):
    """An opened file: `n` rows of `d` dimensions of `dtype`, float16, float32 or float64."""

    @property
    def path(self) -> Path:
        """Return the path."""
        ...

    @property
    def n(self) -> int:
        """Return the number of rows."""
        ...

    @property
    def d(self) -> int:
        """Return the number of dimensions."""
        ...

    @property
    def dtype(self) -> np.dtype[Any]:
        """Return the dtype of the components."""
        ...

    def blocks(self, rows: int) -> Iterator[Block]:
        """Yield (m <= rows, d) in order, of the file's dtype.

        Raises:
            InputError: a row is not a vector of `d` dimensions; the message names it.
        """
        ...


@dataclass(frozen=True, slots=True)
class NpyFile:
    """A `.npy` file."""

    path: Path
    n: int
    d: int
    dtype: np.dtype[Any]

    @classmethod
    def open(cls, path: Path) -> Self:
        """Read the header.

        Raises:
            InputError: it is truncated, not a `.npy` file, or holds no (rows, d) array of floats.
        """
        try:
            with path.open("rb") as file:
                shape, _, dtype, expected = read_header(file)
        except OSError as unreadable:
            raise InputError(f"cannot read {path}: {unreadable.strerror}") from unreadable
        except ValueError as broken:
            raise InputError(
                f"{path} is not a complete .npy file of numbers ({broken}): save it again with numpy.save"
            ) from broken
        if len(shape) != 2 or not 0 < shape[1] <= MOST_DIM or dtype.kind != "f" or dtype.itemsize not in (2, 4, 8):
            raise InputError(
                f"{path} holds {dtype} of shape {shape}: vectors are (rows, d) of float16, float32 or float64"
            )
        if path.stat().st_size < expected:
            raise InputError(f"{path} is truncated: {path.stat().st_size:,} bytes of {expected:,}; copy it again")
        return cls(path, shape[0], shape[1], dtype)

    def blocks(self, rows: int) -> Iterator[Block]:
        """Yield (m <= rows, d) in order."""
        array = map_array(self.path)
        for first in range(0, self.n, rows):
            yield array[first : first + rows]


@dataclass(frozen=True, slots=True)
class ParquetFile:
    """A column of a Parquet file with a list of floats per row."""

    path: Path
    column: str
    n: int
    d: int
    dtype: np.dtype[Any]

    @classmethod
    def open(cls, path: Path, column: str | None) -> Self:
        """Read the footer, and for lists of variable size the first row.

        Raises:
            InputError: it is damaged, or has no such column.
            UsageError: it has several vector columns and none is named.
        """
        try:
            with pq.ParquetFile(path) as file:
                name = _column(path, file.schema_arrow, column)
                check_groups(path, file, [name], path.stat().st_size)
                kind = file.schema_arrow.field(name).type
                n = file.metadata.num_rows
                d = kind.list_size if pa.types.is_fixed_size_list(kind) else _first_length(file, name)
        except PagesError as hostile:
            raise InputError(f"{path} {hostile}: write it again") from hostile
        except OSError as unreadable:
            why = unreadable.strerror or reason(unreadable)
            raise InputError(f"cannot read {path}: {why}") from unreadable
        except (pa.ArrowException, UnicodeDecodeError) as broken:
            raise InputError(f"{path} is not a complete Parquet file: copy it again") from broken
        if d > MOST_DIM:
            raise InputError(f"{path} holds vectors of {d:,} dimensions: give at most {MOST_DIM:,}")
        if n and d == 0:
            raise InputError(f"row 0 of column {name} in {path} is empty: every row needs a vector")
        return cls(path, name, n, d, np.dtype(_FLOATS[kind.value_type]))

    def blocks(self, rows: int) -> Iterator[Block]:
        """Yield (m <= rows, d) in order."""
        first = 0
        try:
            with pq.ParquetFile(self.path) as file:
                for batch in file.iter_batches(min(rows, 1 << 16), columns=[self.column]):
                    yield self._matrix(batch.column(0), first)
                    first += len(batch)
        except (pa.ArrowException, OSError) as broken:
            sentence = f"{self.path} cannot be read from row {first} on ({reason(broken)}): write it again"
            raise InputError(sentence) from broken

    def _matrix(self, lists: Any, first: int) -> Block:
        lengths = lists.value_lengths().to_numpy(zero_copy_only=False)  # NaN for a missing row
        wrong = np.flatnonzero(lengths != self.d)
        if len(wrong):
            length = lengths[wrong[0]]
            what = "is missing" if np.isnan(length) else f"has {int(length)} dimensions where others have {self.d}"
            raise InputError(f"row {first + wrong[0]} of {self.path} {what}: correct it, or remove it from the file")
        values = lists.flatten()
        # (rows d,) -> (rows, d)
        block: Block = values.to_numpy(zero_copy_only=False).astype(self.dtype, copy=False).reshape(-1, self.d)
        return block


def _column(path: Path, schema: pa.Schema, column: str | None) -> str:
    known = [field.name for field in schema if _holds_vectors(field.type)]
    listed = ", ".join(known)
    if column is not None:
        if column not in known:
            raise InputError(f"{path} has no column {column!r} of float lists: it has {listed or 'none'}")
        return column
    if not known:
        raise InputError(f"{path} has no column with a list of floats per row: give a file that has one")
    if len(known) > 1:
        raise UsageError(f"{path} has several columns of vectors ({listed}): name one with --column")
    return str(known[0])


def _holds_vectors(kind: pa.DataType) -> bool:
    types = pa.types
    lists = types.is_fixed_size_list(kind) or types.is_list(kind) or types.is_large_list(kind)
    return bool(lists and kind.value_type in _FLOATS)


def _first_length(file: pq.ParquetFile, column: str) -> int:
    for batch in file.iter_batches(1, columns=[column]):
        return len(batch.column(0)[0].as_py() or ())
    return 0
