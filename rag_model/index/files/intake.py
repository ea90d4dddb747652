"""Input vectors: inspect `.npy`, Parquet and faiss Flat files, and split them into parts of bounded
size.

`inspect_vectors` reads only headers, so unusable input is refused before any work.
`split_into_parts` reads the rows once, in bounded memory, and detects those that hold a NaN or an
infinity.
"""

import os
import struct
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Literal, Self

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from rag_model.arrays import map_npy, read_npy_header
from rag_model.digest import digest_file
from rag_model.errors import InputError, UsageError, format_error
from rag_model.index.files.engine import Metric, Rows
from rag_model.index.files.layout import FLAT_FOURCCS, MAX_DIM, UnsupportedIndexError, check_layout
from rag_model.parquet_pages import ParquetError, check_row_groups, iter_row_range, open_parquet

Block = npt.NDArray[Any]

_FLOAT_TYPES = {pa.float16(): np.float16, pa.float32(): np.float32, pa.float64(): np.float64}
_FAISS_VECTORS_OFFSET = 45  # bytes before the vectors: type, header, number of floats
InvalidRowPolicy = Literal["refuse", "drop"]
# float32 bytes per part; a scatter worker needs about four times as much memory
PART_BYTES = 256 << 20
_BLOCK_BYTES = 4 << 20  # float32 bytes per block


@dataclass(frozen=True, slots=True)
class NpySource:
    """A `.npy` file."""

    path: Path
    n: int
    d: int
    dtype: np.dtype[Any]

    @classmethod
    def open(cls, path: Path) -> Self:
        """Read the header.

        Raises:
            InputError: the file is truncated, not `.npy`, or holds no (rows, d) array of floats.
        """
        try:
            with path.open("rb") as file:
                shape, _, dtype, expected_bytes = read_npy_header(file)
        except OSError as error:
            raise InputError(f"cannot read {path}: {error.strerror}") from error
        except ValueError as error:
            raise InputError(
                f"{path} is not a complete .npy file of numbers ({error}): save it again with numpy.save"
            ) from error
        if len(shape) != 2 or not 0 < shape[1] <= MAX_DIM or dtype.kind != "f" or dtype.itemsize not in (2, 4, 8):
            raise InputError(
                f"{path} holds {dtype} of shape {shape}: vectors are (rows, d) of float16, float32 or float64"
            )
        if path.stat().st_size < expected_bytes:
            raise InputError(f"{path} is truncated: {path.stat().st_size:,} bytes of {expected_bytes:,}; copy it again")
        return cls(path, shape[0], shape[1], dtype)

    def blocks(self, max_rows: int, first: int = 0, end: int | None = None) -> Iterator[Block]:
        """Yield blocks of at most `max_rows` rows, (m, d), in order."""
        yield from _slice_rows(map_npy(self.path), max_rows, first, end)

    def iter_ids(self, first: int, end: int) -> None:
        """Return None, because the file has no ids."""


@dataclass(frozen=True, slots=True)
class FaissFlatSource:
    """A faiss index of uncompressed vectors, which is read as an array, without faiss.

    If a file `docid` is in the same folder, its lines are the ids of the rows, as in Pyserini's
    indexes.
    """

    path: Path
    n: int
    d: int
    metric: Metric
    dtype: np.dtype[Any]

    @classmethod
    def open(cls, path: Path) -> Self:
        """Read the header, and count the ids.

        Raises:
            InputError: the file is truncated, has an unsupported layout, or does not have one id
                per row.
        """
        try:
            with path.open("rb") as file:
                check_layout(file, path.stat().st_size)
                file.seek(0)
                header = file.read(_FAISS_VECTORS_OFFSET)
        except UnsupportedIndexError as error:
            raise InputError(f"{path} is a faiss index of the type {error}: vectors are read from Flat") from error
        except ValueError as error:
            raise InputError(f"{path} is not a complete faiss index ({error}): copy it again") from error
        fourcc, d, n = struct.unpack_from("<4siq", header)
        if fourcc not in FLAT_FOURCCS or not 0 < d <= MAX_DIM:
            raise InputError(f"{path} is a faiss index of another type than Flat: give a Flat index, or the vectors")
        source = cls(path, n, d, "l2" if fourcc == b"IxF2" else "ip", np.dtype("<f4"))
        if source.id_file.exists():
            with source.id_file.open("rb") as file:
                n_ids = sum(1 for _ in file)
            if n_ids != n:
                raise InputError(f"{source.id_file} has {n_ids:,} ids for {n:,} vectors: take both from one index")
        return source

    @property
    def id_file(self) -> Path:
        """The path of the file of ids, which may be missing."""
        return self.path.with_name("docid")

    def blocks(self, max_rows: int, first: int = 0, end: int | None = None) -> Iterator[Block]:
        """Yield blocks of at most `max_rows` rows, (m, d), in order."""
        vectors = np.memmap(self.path, self.dtype, "r", _FAISS_VECTORS_OFFSET, (self.n, self.d))
        yield from _slice_rows(vectors, max_rows, first, end)

    def iter_ids(self, first: int, end: int) -> Iterator[str] | None:
        """Return the lines of `docid`; None without such a file."""
        return self._iter_lines(first, end) if self.id_file.exists() else None

    def _iter_lines(self, first_row: int, end_row: int) -> Iterator[str]:
        with self.id_file.open(encoding="utf-8", errors="replace", newline="\n") as file:
            yield from (line.rstrip("\r\n") for line in islice(file, first_row, end_row))


def _slice_rows(array: Block, n_rows: int, first_row: int, end_row: int | None) -> Iterator[Block]:
    end_row = len(array) if end_row is None else end_row
    for start_row in range(first_row, end_row, n_rows):
        yield array[start_row : min(start_row + n_rows, end_row)]


@dataclass(frozen=True, slots=True)
class ParquetSource:
    """A column of a Parquet file with a list of floats per row."""

    path: Path
    column: str
    n: int
    d: int
    dtype: np.dtype[Any]

    @classmethod
    def open(cls, path: Path, column: str | None) -> Self:
        """Read the footer; of lists of variable size, also the first row, which has the dimension.

        `blocks` checks the other pages.

        Raises:
            InputError: the file is damaged, or has no such column.
            UsageError: the file has several vector columns and `column` is None.
        """
        try:
            with open_parquet(path) as file:
                name = _choose_column(path, file.schema_arrow, column)
                check_row_groups(path, file, [name], path.stat().st_size, end=1)
                data_type = file.schema_arrow.field(name).type
                n = file.metadata.num_rows
                d = data_type.list_size if pa.types.is_fixed_size_list(data_type) else _read_first_length(file, name)
        except ParquetError as error:
            raise InputError(f"{path} {error}: write it again") from error
        except OSError as error:
            reason = error.strerror or format_error(error)
            raise InputError(f"cannot read {path}: {reason}") from error
        except (pa.ArrowException, UnicodeDecodeError) as error:
            raise InputError(f"{path} is not a complete Parquet file: copy it again") from error
        if d > MAX_DIM:
            raise InputError(f"{path} holds vectors of {d:,} dimensions: give at most {MAX_DIM:,}")
        if n and d == 0:
            raise InputError(f"row 0 of column {name} in {path} is empty: every row needs a vector")
        return cls(path, name, n, d, np.dtype(_FLOAT_TYPES[data_type.value_type]))

    def blocks(self, max_rows: int, first: int = 0, end: int | None = None) -> Iterator[Block]:
        """Yield blocks of at most `max_rows` rows, (m, d), in order, reading only their row
        groups.
        """
        file_row = first
        try:
            with open_parquet(self.path) as file:
                check_row_groups(self.path, file, [self.column], self.path.stat().st_size, first, end)
                for batch in iter_row_range(file, min(max_rows, 1 << 16), [self.column], first, end):
                    yield self._to_matrix(batch.column(0), file_row)
                    file_row += len(batch)
        except ParquetError as error:
            raise InputError(f"{self.path} {error}: write it again") from error
        except (pa.ArrowException, OSError) as error:
            message = f"{self.path} cannot be read from row {file_row} on ({format_error(error)}): write it again"
            raise InputError(message) from error

    def iter_ids(self, first: int, end: int) -> Iterator[str] | None:
        """Return the values of the column `id`, `_id` or `docid`, as strings; None without one.

        Raises:
            InputError: the column is damaged.
        """
        column_names = pq.read_schema(self.path).names
        id_column = next((name for name in ("id", "_id", "docid") if name in column_names), None)
        return None if id_column is None else self._iter_column(id_column, first, end)

    def _iter_column(self, column: str, first: int, end: int) -> Iterator[str]:
        try:
            with open_parquet(self.path) as file:
                check_row_groups(self.path, file, [column], self.path.stat().st_size, first, end)
                for batch in iter_row_range(file, 1 << 12, [column], first, end):
                    for id_value in batch.column(0).to_pylist():
                        yield id_value.decode() if isinstance(id_value, bytes) else str(id_value)
        except (pa.ArrowException, OSError, ValueError) as error:
            message = f"the column {column} of {self.path} cannot be read ({format_error(error)}): write it again"
            raise InputError(message) from error

    def _to_matrix(self, list_array: Any, first_row: int) -> Block:
        lengths = list_array.value_lengths().to_numpy(zero_copy_only=False)  # NaN for a missing row
        bad_rows = np.flatnonzero(lengths != self.d)
        if len(bad_rows):
            length = lengths[bad_rows[0]]
            problem = "is missing" if np.isnan(length) else f"has {int(length)} dimensions where others have {self.d}"
            raise InputError(
                f"row {first_row + bad_rows[0]} of {self.path} {problem}: correct it, or remove it from the file"
            )
        components = list_array.flatten()
        # (rows d,) -> (rows, d)
        block: Block = components.to_numpy(zero_copy_only=False).astype(self.dtype, copy=False).reshape(-1, self.d)
        return block


# An inspected file with `n` rows of `d` dimensions; `dtype` is float16, float32 or float64.
VectorSource = NpySource | FaissFlatSource | ParquetSource


def _choose_column(path: Path, schema: pa.Schema, column: str | None) -> str:
    vector_columns = [field.name for field in schema if _holds_vectors(field.type)]
    column_names = ", ".join(vector_columns)
    if column is not None:
        if column not in vector_columns:
            raise InputError(f"{path} has no column {column!r} of float lists: it has {column_names or 'none'}")
        return column
    if not vector_columns:
        raise InputError(f"{path} has no column with a list of floats per row: give a file that has one")
    if len(vector_columns) > 1:
        raise UsageError(
            f"{path} has several columns of vectors ({column_names}): give a file with one, "
            "or for `bookwheel index` name it with --column"
        )
    return str(vector_columns[0])


def _holds_vectors(dtype: pa.DataType) -> bool:
    types = pa.types
    is_list = types.is_fixed_size_list(dtype) or types.is_list(dtype) or types.is_large_list(dtype)
    return bool(is_list and dtype.value_type in _FLOAT_TYPES)


def _read_first_length(file: pq.ParquetFile, column: str) -> int:
    for batch in iter_row_range(file, 1, [column], 0, 1):
        return len(batch.column(0)[0].as_py() or ())
    return 0


@dataclass(frozen=True, slots=True)
class VectorInput:
    """The inspected vectors of all files: n rows of d dimensions, in the order of the files."""

    files: tuple[VectorSource, ...]

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

    def split_rows(self, first: int, end: int) -> Iterator[tuple[VectorSource, int, int]]:
        """Yield each file that has rows in [first, end), and their range within the file."""
        file_start = 0
        for file in self.files:
            if first < file_start + file.n and file_start < end:
                yield file, max(first - file_start, 0), min(end - file_start, file.n)
            file_start += file.n

    def count_part_rows(self, part_bytes: int = PART_BYTES) -> int:
        """Return the rows per part, so that parts are about equal and take at most `part_bytes` as
        float32.
        """
        max_rows = max(1, part_bytes // (4 * self.d))
        return -(-self.n // -(-self.n // max_rows))

    def identify_files(self) -> dict[Path, list[Any]]:
        """Return JSON values that identify the content of each file; reads all files once."""
        id_file_by_path = {
            file.path: file.id_file
            for file in self.files
            if isinstance(file, FaissFlatSource) and file.id_file.exists()
        }
        digests = digest_files([*(file.path for file in self.files), *id_file_by_path.values()])
        return {
            file.path: [
                digests[file.path],
                getattr(file, "column", None),
                digests[id_file_by_path[file.path]] if file.path in id_file_by_path else None,
            ]
            for file in self.files
        }


def digest_files(paths: Sequence[Path]) -> dict[Path, str]:
    """Return the digest of each file; several threads read the files.

    Raises:
        InputError: a file cannot be read.
    """
    try:
        with ThreadPoolExecutor(min(len(paths), os.cpu_count() or 1) or 1) as pool:
            return dict(zip(paths, pool.map(digest_file, paths), strict=True))
    except OSError as error:
        raise InputError(f"cannot read {error.filename}: {error.strerror or format_error(error)}") from error


def inspect_vectors(paths: Sequence[Path], column: str | None = None) -> VectorInput:
    """Inspect vector files and folders of them, sorted by name.

    Args:
        paths: `.npy` and Parquet files, or folders of them.
        column: the vector column of Parquet files; None uses the only column of float lists.

    Raises:
        InputError: a file is missing or damaged, has no vectors, or differs from the first in
            dimension; or all files are empty.
        UsageError: no path is given, or a file has several columns of vectors and `column` is None.
    """
    files = [_open_source(path, column) for input_path in paths for path in _list_files(input_path)]
    if not files:
        raise UsageError("there are no vectors to index: give a .npy file, a Parquet file, or a folder of them")
    nonempty_files = [file for file in files if file.n]
    if not nonempty_files:
        raise InputError(f"{files[0].path} holds no vectors: an index needs at least one")
    for file in nonempty_files:
        if file.d != nonempty_files[0].d:
            raise InputError(
                f"{file.path} has {file.d} dimensions and {nonempty_files[0].path} has "
                f"{nonempty_files[0].d}: "
                "give vectors of one encoder"
            )
    return VectorInput(tuple(nonempty_files))


def split_into_parts(
    vectors: VectorInput, write_part: Callable[[Block], None], invalid: InvalidRowPolicy, part_bytes: int = PART_BYTES
) -> Rows | None:
    """Split vectors into parts and pass each to `write_part`: (m, d) float16 or float32.

    `write_part` must not keep the array. Memory holds one part and one block.

    Args:
        vectors: the inspected vectors.
        write_part: stores a part.
        invalid: `refuse` vectors that hold a NaN or an infinity, or `drop` these rows.
        part_bytes: float32 bytes per part.

    Returns:
        (n,) the ascending input rows that the parts contain; None with `refuse`, because then no
        row is dropped.

    Raises:
        InputError: a row is refused (the message names it), no row is left, or a file is damaged.
    """
    part, n_filled = np.empty((vectors.count_part_rows(part_bytes), vectors.d), vectors.dtype), 0
    kept_rows: list[Rows] = []
    for block_rows, block in iter_finite_rows(vectors, invalid):
        kept_rows.append(block_rows)
        for chunk in np.split(block, np.arange(len(part) - n_filled, len(block), len(part))):
            part[n_filled : n_filled + len(chunk)] = chunk
            n_filled += len(chunk)
            if n_filled == len(part):
                write_part(part)
                n_filled = 0
    if n_filled:
        write_part(part[:n_filled])
    valid_rows = np.concatenate(kept_rows)
    if not len(valid_rows):
        raise InputError(f"every row of {vectors.files[0].path} holds a NaN or an infinity: there is nothing to index")
    return valid_rows if invalid == "drop" else None


def iter_finite_rows(
    vectors: VectorInput,
    invalid: InvalidRowPolicy,
    first: int = 0,
    end: int | None = None,
    advice: str = "correct the file, or drop such rows with --invalid drop",
) -> Iterator[tuple[Rows, Block]]:
    """Yield blocks of the finite rows in [first, end): row numbers, counted through all files, and
    values.

    `advice` ends the error message about a row that is not finite.

    Raises:
        InputError: a row holds a NaN or an infinity, and `invalid` is `refuse`; or a file is
            damaged.
    """
    global_row = first
    for file, file_first, file_end in vectors.split_rows(first, vectors.n if end is None else end):
        file_row = file_first
        for raw_block in file.blocks(max(1, _BLOCK_BYTES // (4 * vectors.d)), file_first, file_end):
            # an overflowing float64 becomes an infinity, detected below
            with np.errstate(over="ignore"):
                block = np.ascontiguousarray(raw_block, dtype=vectors.dtype)
            bad_rows = _find_non_finite_rows(block)
            if len(bad_rows) and invalid == "refuse":
                raise InputError(
                    f"row {file_row + bad_rows[0]} of {file.path} holds a NaN or an infinity"
                    + (f", and so do {len(bad_rows) - 1} more near it" if len(bad_rows) > 1 else "")
                    + f": {advice}"
                )
            finite_rows = np.delete(np.arange(len(block)), bad_rows)
            yield finite_rows + global_row, block[finite_rows] if len(bad_rows) else block
            file_row += len(block)
            global_row += len(block)


def _find_non_finite_rows(block: Block) -> Rows:
    """Return the rows, ascending, that hold a NaN or an infinity."""
    # A row's sum is finite only if all its values are, and a sum costs a tenth of a check of each
    # value. A sum may overflow, so the values of the suspect rows are checked.
    with np.errstate(over="ignore", invalid="ignore"):
        # (m, d) -> (m,) -> rows
        suspect_rows = np.flatnonzero(~np.isfinite(block.sum(axis=1, dtype=np.float32)))
    return suspect_rows[~np.isfinite(block[suspect_rows]).all(axis=1)]


def _list_files(path: Path) -> list[Path]:
    if not path.is_dir():
        return [path]
    vector_files = sorted(file for file in path.iterdir() if file.suffix in (".npy", ".parquet") and file.is_file())
    if not vector_files and (path / "index").is_file():
        return [path / "index"]  # a folder of Pyserini, with `docid` beside the index
    if not vector_files:
        raise InputError(f"the folder {path} holds no .npy and no .parquet file: give another folder")
    if len({file.suffix for file in vector_files}) > 1:
        raise InputError(f"the folder {path} holds both .npy and .parquet files: give a folder with one of the two")
    return vector_files


def _open_source(path: Path, column: str | None) -> VectorSource:
    if not path.exists():
        raise InputError(f"there is no file {path}: check the name")
    if path.suffix == ".npy":
        return NpySource.open(path)
    if path.suffix in (".parquet", ".pq"):
        return ParquetSource.open(path, column)
    with path.open("rb") as file:
        if file.read(1) == b"I":
            return FaissFlatSource.open(path)
    raise InputError(f"{path} is neither .npy nor .parquet nor a faiss index: save the vectors as one of them")
