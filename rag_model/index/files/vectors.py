"""The vectors of a corpus: the parts' `.npy` files, in row order, as one matrix on disk.

Files are memory-mapped and read block by block, so a stage that reads the corpus once needs bounded
memory. A stage that needs a sample reads only the byte ranges of its rows from an object store.
Every row is checked when it is read, because a search never finds a vector with a NaN, and may miss
vectors near it.
"""

import io
import mmap
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Generic, Protocol, Self, TypeVar, overload

import numpy as np
import numpy.typing as npt

from rag_model.arrays import RowPartition, map_npy, read_npy_header
from rag_model.errors import InputError, UsageError
from rag_model.index.files.engine import Rows, Vectors

if TYPE_CHECKING:
    import pyarrow as pa

BLOCK_BYTES = 32 << 20  # float32 bytes per block: enough for BLAS, small compared with any index
_HEADER_BYTES = 4 << 10  # bytes to read at the beginning of a remote file; numpy's headers take 128
_CONCURRENT_FILES = 32  # maximum number of remote files that are read at a time
_MAX_GAP_BYTES = 64 << 10  # maximum gap between rows that are read by one request
_MAX_RANGE_BYTES = 4 << 20  # maximum bytes of one request
NameT = TypeVar("NameT")
FileT = TypeVar("FileT")
# An item of `RowPartition.split`: the part number, the positions of the part's rows among the
# requested rows, and the rows within the part.
PartRows = tuple[int, slice, Rows]


@dataclass(frozen=True, slots=True)
class RemoteRowFiles(Sequence[Path], Generic[NameT]):
    """The row files of a representation in an object store, in row order.

    `files[i]` fetches a file and returns the path of the local copy. `open_vectors` and
    `open_row_files` read a few rows without copying the files.
    """

    names: Sequence[NameT]
    fetch: Callable[[NameT], Path]
    # returns the bytes [start, end) of a file, or fewer at its end; verified only if `are_verified`
    read_range: Callable[[NameT, int, int], bytes]
    open: Callable[[NameT], IO[bytes]]  # opens a file for reads of byte ranges
    # Takes (name, (m,) starts, length) for each file; returns the verified bytes of these ranges,
    # (m, length), which are fetched by concurrent requests.
    read_ranges: Callable[[Sequence[tuple[NameT, Rows, int]]], Sequence[npt.NDArray[np.uint8]]] = lambda ranges: ()
    # (rows, bytes) of each file; if they are known, opening a file reads nothing
    sizes: Sequence[tuple[int, int]] = ()
    # the result of `build_row_outline` for each file; unless it is None, no header is read
    outlines: Sequence[Any] = ()

    @property
    def are_verified(self) -> bool:
        """Whether `read_range` verifies what it reads, and `read_ranges` can be called."""
        return bool(self.sizes)

    def __len__(self) -> int:
        """Return the number of files."""
        return len(self.names)

    @overload
    def __getitem__(self, number: int) -> Path: ...
    @overload
    def __getitem__(self, number: slice) -> Sequence[Path]: ...
    def __getitem__(self, number: int | slice) -> Path | Sequence[Path]:
        """Return the path of a local copy, or the files of a slice."""
        if isinstance(number, slice):
            return replace(self, names=self.names[number], sizes=self.sizes[number], outlines=self.outlines[number])
        return self.fetch(self.names[number])


def open_row_files(row_files: Sequence[Path], open_file: Callable[[Any], FileT]) -> list[FileT]:
    """Open the row files of all parts in order; of remote files, only byte ranges are read."""
    if not isinstance(row_files, RemoteRowFiles):
        return [*map(open_file, row_files)]

    def open_remote(name: Any) -> FileT:
        file = row_files.open(name)
        # The raw file is used, because a buffered file reads a megabyte at a time.
        return open_file(file.detach() if isinstance(file, io.BufferedReader) else file)

    with ThreadPoolExecutor(_CONCURRENT_FILES) as executor:
        return [*executor.map(open_remote, row_files.names)]


def map_parts(function: Callable[[PartRows], FileT], parts: Iterable[PartRows]) -> list[FileT]:
    """Call `function` with each of the `parts`, in several threads; return the results in order."""
    with ThreadPoolExecutor(_CONCURRENT_FILES) as executor:
        return [*executor.map(function, parts)]


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


def open_vectors(row_files: Sequence[Path], n: int | None = None, dim: int | None = None) -> VectorRows:
    """Open the vectors of all parts to read a few rows; of remote files, only byte ranges are read.

    Args:
        row_files: the files of the parts.
        n: the number of rows that a plan requires.
        dim: the dimension that the plan requires.

    Raises:
        UsageError: no file is given.
        InputError: a file is missing, damaged or of another type or dimension, or the number of
            rows or dimensions differs from the plan's.
    """
    files = RemoteVectorFiles(row_files, dim) if isinstance(row_files, RemoteRowFiles) else VectorFiles(row_files)
    _check_shape(files, row_files, n, dim)
    return files


def sample_vectors(row_files: Sequence[Path], n: int, dim: int, n_samples: int, seed: int) -> Vectors:
    """Return (min(n_samples, n), d) float32 in row order, drawn by `seed` from the n vectors of a
    plan.

    Raises:
        InputError: for the same reasons as `open_vectors` and `VectorRows.read_rows`.
    """
    return open_vectors(row_files, n, dim).read_rows(draw_rows(n, n_samples, seed))


def draw_rows(n: int, n_samples: int, seed: int) -> Rows:
    """Return min(n_samples, n) of the rows 0 … n-1, ascending, drawn by `seed`."""
    if n_samples >= n:
        return np.arange(n)
    return np.sort(np.random.default_rng(seed).choice(n, n_samples, replace=False, shuffle=False))


class VectorFiles:
    """The parts' vectors as one (n, d) matrix, in the order of the files."""

    def __init__(self, paths: Sequence[Path]) -> None:
        """Map `.npy` files of (rows, d) float16 or float32, in the order of the parts.

        Raises:
            UsageError: no file is given.
            InputError: a file is missing or damaged, or the files differ in type or dimension.
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
        self._partition = RowPartition(map(len, self._arrays))
        self.n = self._partition.n

    def blocks(self, max_rows: int | None = None) -> Iterator[tuple[int, Vectors]]:
        """Yield (first row, (m, d) float32, m >= 1) in row order; no block spans two files.

        Args:
            max_rows: maximum rows per block; None allows as many as fit into 32 MiB.

        Raises:
            InputError: a row holds a NaN or an infinity; the message names it.
        """
        block_rows = max_rows or max(1, BLOCK_BYTES // (4 * self.dim))
        for path, file_start, array in zip(self.paths, self._partition.starts, self._arrays, strict=False):
            for row in range(0, len(array), block_rows):
                yield file_start + row, _convert_finite(array[row : row + block_rows], path, row)

    def read_rows(self, rows: Rows) -> Vectors:
        """Return (len(rows), d) float32: the vectors of `rows`, ascending global rows in [0, n).

        Raises:
            InputError: a row holds a NaN or an infinity; the message names it.
        """
        vectors, parts = np.empty((len(rows), self.dim), np.float32), [*self._partition.split(rows)]
        for file_number, _, local_rows in parts:
            _prefetch_rows(self._arrays[file_number], local_rows)
        for file_number, positions, local_rows in parts:
            vectors[positions] = self._arrays[file_number][local_rows]
            _check_rows(vectors[positions], self.paths[file_number], local_rows)
        return vectors

    def read_all(self) -> Vectors:
        """Return the complete (n, d) float32 matrix, in memory."""
        return self.read_rows(np.arange(self.n))

    @classmethod
    def open_checked(cls, paths: Sequence[Path], n: int, dim: int) -> Self:
        """Map `paths` and check that they hold the (n, dim) vectors of a plan.

        Raises:
            InputError: the number of rows or dimensions differs from the plan's.
        """
        vector_files = cls(paths)
        _check_shape(vector_files, paths, n, dim)
        return vector_files


class RemoteVectorFiles:
    """The parts' vectors in an object store: `VectorRows` that reads only the requested rows.

    A worker that measures an index reads a thousand rows. Fetching all files would take 32 GB
    for 21 million passages. The rows are verified if `files` verifies what it reads.
    """

    def __init__(self, files: RemoteRowFiles[Any], dim: int | None = None) -> None:
        """Read the headers; if `sizes` and `dim` are known, they are read with the first rows.

        Raises:
            UsageError: no file is given.
            InputError: a file is damaged, or the files differ in type or dimension.
        """
        if not files:
            raise UsageError("there are no vectors to index: give at least one .npy file")
        self._files = files
        self._unchecked_files = set[int]()  # files whose headers are derived from their sizes
        if dim and files.sizes:
            self._headers = [
                _derive_header(name, n_rows, dim, n_bytes)
                for name, (n_rows, n_bytes) in zip(files.names, files.sizes, strict=True)
            ]
            outlines = files.outlines or [None] * len(files)
            self._unchecked_files.update(
                i for i, header in enumerate(self._headers) if outlines[i] != _pack_header(header)
            )
        else:
            with ThreadPoolExecutor(_CONCURRENT_FILES) as executor:
                self._headers = [*executor.map(self._read_header, files.names)]
        self.dim = self._headers[0][1]
        for name, (_, file_dim, _, _) in zip(files.names, self._headers, strict=True):
            if file_dim != self.dim:
                raise InputError(f"{name} has {file_dim} dimensions, not {self.dim}: encode all parts with one encoder")
        self._partition = RowPartition(n_rows for n_rows, *_ in self._headers)
        self.n = self._partition.n

    def read_rows(self, rows: Rows) -> Vectors:
        """Return (len(rows), d) float32: the vectors of `rows`, ascending global rows in [0, n).

        Raises:
            InputError: a file is damaged, or a row holds a NaN or an infinity.
        """
        vectors = np.empty((len(rows), self.dim), np.float32)
        parts = [*self._partition.split(rows)]
        vectors_of_parts = self._read_verified(parts) if self._files.are_verified else map_parts(self._read_part, parts)
        for (_, positions, _), part_vectors in zip(parts, vectors_of_parts, strict=True):
            vectors[positions] = part_vectors
        if not np.isfinite(vectors).all():
            for i, positions, local_rows in parts:
                _check_rows(vectors[positions], str(self._files.names[i]), local_rows)
        return vectors

    def _read_header(self, name: Any) -> tuple[int, int, np.dtype[Any], int]:
        """Return the number of rows, the dimension, the type, and the offset of the first row."""
        return _parse_header(name, self._files.read_range(name, 0, _HEADER_BYTES))

    def _read_verified(self, parts: Sequence[PartRows]) -> list[npt.NDArray[Any]]:
        """Return the vectors of each part, unchecked; all are read in one round of requests."""
        names, unchecked_files = self._files.names, [i for i, *_ in parts if i in self._unchecked_files]
        ranges = [(names[i], np.zeros(1, np.int64), self._headers[i][3]) for i in unchecked_files]
        for i, _, local_rows in parts:
            _, dim, dtype, offset = self._headers[i]
            ranges.append((names[i], offset + local_rows * (dim * dtype.itemsize), dim * dtype.itemsize))
        range_bytes = self._files.read_ranges(ranges)
        for i, header in zip(unchecked_files, range_bytes, strict=False):
            if _parse_header(names[i], header.tobytes()) != self._headers[i]:
                raise _create_incomplete_error(names[i])
            self._unchecked_files.discard(i)
        return [
            vectors.view(self._headers[i][2])
            for (i, *_), vectors in zip(parts, range_bytes[len(unchecked_files) :], strict=True)
        ]

    def _read_part(self, part_rows: PartRows) -> npt.NDArray[Any]:
        i, _, local_rows = part_rows
        name, (_, dim, dtype, offset) = self._files.names[i], self._headers[i]
        row_bytes, vectors = dim * dtype.itemsize, list[npt.NDArray[Any]]()
        row_starts = offset + local_rows * row_bytes
        has_gap = (np.diff(row_starts) > row_bytes + _MAX_GAP_BYTES) | (np.diff(row_starts // _MAX_RANGE_BYTES) > 0)
        for rows in np.split(local_rows, np.flatnonzero(has_gap) + 1):
            n_bytes = int(rows[-1] + 1 - rows[0]) * row_bytes
            start_byte = offset + int(rows[0]) * row_bytes
            range_bytes = self._files.read_range(name, start_byte, start_byte + n_bytes)
            if len(range_bytes) != n_bytes:
                raise _create_incomplete_error(name)
            vectors.append(np.frombuffer(range_bytes, dtype).reshape(-1, dim)[rows - rows[0]])
        return np.concatenate(vectors)


def build_row_outline(path: Path) -> dict[str, Any] | None:
    """Return the shape, the type and the offset of a file's rows.

    With them, some of the rows can be read without the header.

    Return None for a file that `RemoteVectorFiles` does not read.
    """
    with suppress(InputError), path.open("rb") as file:
        return _pack_header(_parse_header(path, file.read(_HEADER_BYTES)))
    return None


def _pack_header(header: tuple[int, int, np.dtype[Any], int]) -> dict[str, Any]:
    n_rows, dim, dtype, offset = header
    return {"rows": n_rows, "dim": dim, "dtype": dtype.name, "offset": offset}


def _parse_header(name: Any, header_bytes: bytes) -> tuple[int, int, np.dtype[Any], int]:
    try:
        shape, is_fortran, dtype, header_end = read_npy_header(io.BytesIO(header_bytes))
    except ValueError as error:
        raise _create_incomplete_error(name) from error
    if len(shape) != 2 or shape[1] == 0 or is_fortran or dtype not in (np.float16, np.float32):
        raise _create_incomplete_error(name)
    return *shape, dtype, header_end - shape[0] * shape[1] * dtype.itemsize


def _derive_header(name: Any, n_rows: int, dim: int, file_bytes: int) -> tuple[int, int, np.dtype[Any], int]:
    """Derive a file's header from its size: rows, dimension, type and offset of the first row."""
    dtype = np.dtype(np.float32 if file_bytes >= 4 * n_rows * dim else np.float16)
    offset = file_bytes - n_rows * dim * dtype.itemsize
    if not 0 < offset <= _HEADER_BYTES:
        raise _create_incomplete_error(name)
    return n_rows, dim, dtype, offset


def _create_incomplete_error(name: Any) -> InputError:
    return InputError(f"{name} is not a complete .npy file of (rows, d) float16 or float32: encode its part again")


def _check_shape(files: VectorRows, row_files: Sequence[Path], n: int | None, dim: int | None) -> None:
    if n not in (None, files.n) or dim not in (None, files.dim):
        name = row_files.names[0] if isinstance(row_files, RemoteRowFiles) else row_files[0]
        raise InputError(
            f"the vectors from {name} on are {files.n} x {files.dim}, not the plan's {n} x {dim}: plan the index again"
        )


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


def _prefetch_rows(array: npt.NDArray[Any], rows: Rows) -> None:
    """Ask the kernel to read ascending rows of a mapped file ahead, in the order of the file.

    Without prefetching, a query waits for one row after the other, and each page fault reads as
    much as the disk's read-ahead: 8 MB on some machines, so that 200 rows read half a gigabyte.
    Rows that are near each other are requested as one range.
    """
    memory_map: Any = array.base
    if not (isinstance(array, np.memmap) and isinstance(memory_map, mmap.mmap) and hasattr(memory_map, "madvise")):
        return
    row_bytes = array.shape[1] * array.itemsize
    row_starts = array.offset % mmap.ALLOCATIONGRANULARITY + rows * row_bytes
    has_gap = np.diff(row_starts) > row_bytes + _MAX_GAP_BYTES
    range_starts = row_starts[np.append(True, has_gap)] // mmap.PAGESIZE * mmap.PAGESIZE
    range_ends = row_starts[np.append(has_gap, True)] + row_bytes
    for range_start, range_bytes in zip(range_starts.tolist(), (range_ends - range_starts).tolist(), strict=True):
        memory_map.madvise(mmap.MADV_WILLNEED, range_start, range_bytes)


def _convert_finite(block: npt.NDArray[Any], path: Path, first_row: int) -> Vectors:
    vectors = np.ascontiguousarray(block, dtype=np.float32)
    _check_rows(vectors, path, np.arange(first_row, first_row + len(vectors)))
    return vectors


def _check_rows(vectors: Vectors, path: Path | str, rows: Rows) -> None:
    bad_rows = np.flatnonzero(~np.isfinite(vectors).all(axis=1))
    if len(bad_rows):
        suffix = f" and {len(bad_rows) - 1} more near it" if len(bad_rows) > 1 else ""
        raise InputError(f"row {rows[bad_rows[0]]} of {path}{suffix} holds a NaN or an infinity: encode the part again")


def find_equal_rows(path: Path, previous_path: Path) -> Rows:
    """Return (m,) int64: the first row of `previous_path` that equals each row of `path`, or -1.

    Rows are equal if all their bytes are; matrices of different dtype or width have no equal rows.

    Raises:
        InputError: a file is missing or damaged.
    """
    import pyarrow.compute as pc  # noqa: PLC0415 - readers of vectors do not need it

    vectors, previous_vectors = map_vectors(path), map_vectors(previous_path)
    if vectors.dtype != previous_vectors.dtype or vectors.shape[1:] != previous_vectors.shape[1:]:
        return np.full(len(vectors), -1)
    previous_positions: Rows = (
        pc.index_in(_convert_rows_to_binary(vectors), value_set=_convert_rows_to_binary(previous_vectors))
        .fill_null(-1)
        .to_numpy()
        .astype(np.int64)
    )
    return previous_positions


def _convert_rows_to_binary(matrix: npt.NDArray[Any]) -> "pa.Array":
    """Return each row of a matrix as one binary value."""
    import pyarrow as pa  # noqa: PLC0415 - as above

    row_bytes = matrix.shape[1] * matrix.dtype.itemsize
    buffer = pa.py_buffer(np.ascontiguousarray(matrix))
    return pa.FixedSizeBinaryArray.from_buffers(pa.binary(row_bytes), len(matrix), [None, buffer])
