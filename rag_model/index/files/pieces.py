"""Pieces: the files that one build stage hands to the next.

A piece is a sequence of `.npy` images in one file. The first one is the piece's *stamp*, a digest
of the plan, the trained file, and the piece's role and number. A piece is read in ranges of rows,
from disk or from object storage. A truncated piece, or one of another build, is detected before any
number in it is used.

If the index kind has shards, a piece has one *slice* per shard. There are shards x parts slices, so
each must be cheap. The layout of such a piece is a head, which the merge reads; all slices; a table
of their locations; and the table's digest. Because of the table, a shard's worker can fetch a slice
by one range request, without opening the piece. Head, slices and table are verified. A shard whose
slices have the digests of a previous build is not built again.
"""

import io
import math
from collections.abc import Callable, Collection, Sequence
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, Self

import numpy as np
import numpy.typing as npt

from rag_model.arrays import read_npy_header
from rag_model.digest import digest_bytes, digest_file, digest_json
from rag_model.errors import InputError, ResourceError
from rag_model.index.plan import IndexPlan

Opener = Callable[[], BinaryIO]  # opens a local file or a blob for reading at any offset
Array = npt.NDArray[Any]
SliceTable = npt.NDArray[np.void]  # records of `SLICE_LOCATION_DTYPE`
RangeReader = Callable[[int, int], bytes]  # returns the bytes [start, end), or fewer at the end
_DIGEST_BYTES = 16  # number of bytes of a digest that are stored
SLICE_LOCATION_DTYPE = np.dtype([("start", "<i8"), ("size", "<i8"), ("rows", "<i8"), ("digest", f"V{_DIGEST_BYTES}")])


def path_opener(path: Path) -> Opener:
    """Return a function that opens a local piece."""
    return partial(_open, path)


def _open(path: Path) -> BinaryIO:
    return path.open("rb")


def compute_stamp(plan: IndexPlan, trained: Path, role: str, part_number: int) -> str:
    """Return the stamp of a piece.

    Args:
        plan: the plan of the index.
        trained: the trained file.
        role: the name that a stage gives to its files, such as `scattered`.
        part_number: the number of the part whose rows the piece has.
    """
    file_stat = trained.stat()
    return digest_json(
        [
            plan.piece_inputs(),
            _digest_trained_file(trained, file_stat.st_size, file_stat.st_mtime_ns),
            role,
            part_number,
        ]
    )


@lru_cache(maxsize=16)
def _digest_trained_file(trained: Path, size: int, mtime_ns: int) -> str:
    """Digest a trained file once for all pieces; `size` and `mtime_ns` identify it."""
    return digest_file(trained)


def write_piece(path: Path, stamp: str, arrays: Sequence[Array]) -> None:
    """Write a piece of `arrays` with a stamp.

    Raises:
        ResourceError: the file cannot be written.
    """
    try:
        with path.open("wb") as file:
            for array in (np.frombuffer(stamp.encode(), np.uint8), *arrays):
                np.save(file, array, allow_pickle=False)
    except OSError as error:
        raise ResourceError(f"cannot write {path}: {error.strerror or error}") from error


class PieceReader:
    """A piece open for reading; its arrays are numbered from 0, in the order of writing."""

    def __init__(self, file: BinaryIO, stamp: str | Collection[str], n_arrays: int, name: str) -> None:
        """Read the arrays' headers; `name` names the piece in errors.

        `stamp` is the stamp of the piece, or a collection of stamps, one of which the piece must
        have.

        Raises:
            InputError: the file is not a complete piece of `n_arrays` arrays, or has another stamp.
        """
        self._file, self._name = file, name
        damage_error = InputError(f"{name} is truncated or damaged: build it again")
        try:
            array_headers = [self._read_header() for _ in range(n_arrays + 1)]
            is_complete = file.seek(0, 2) == self._end
        except (OSError, ValueError) as error:
            raise damage_error from error
        if not is_complete:
            raise damage_error
        self._headers = array_headers[1:]
        (stamp_bytes,), dtype, offset = array_headers[0]
        stamps = {stamp} if isinstance(stamp, str) else {*stamp}
        if dtype != np.uint8 or self._read(offset, stamp_bytes) not in map(str.encode, stamps):
            raise InputError(f"{name} is a piece of another build: build it again")

    @classmethod
    def open(cls, opener: Opener, stamp: str | Collection[str], n_arrays: int, name: str) -> Self:
        """Open a piece; close it by `close` or a `with` statement.

        Raises:
            InputError: as for the constructor, or the file cannot be opened.
        """
        try:
            file = opener()
        except OSError as error:
            raise InputError(f"cannot open {name} ({error.strerror}): build it again") from error
        try:
            return cls(file, stamp, n_arrays, name)
        except BaseException:
            file.close()
            raise

    def count_rows(self, array_number: int) -> int:
        """Return the length of an array."""
        return int(self._headers[array_number][0][0])

    def read(self, array_number: int, start: int = 0, end: int | None = None) -> Array:
        """Return rows [start, end) of an array, in memory; by default all rows."""
        shape, dtype, offset = self._headers[array_number]
        end = shape[0] if end is None else end
        bytes_per_row = dtype.itemsize * math.prod(shape[1:])
        row_data = self._read(offset + start * bytes_per_row, (end - start) * bytes_per_row)
        # flat -> (end - start, ...)
        return np.frombuffer(row_data, dtype).reshape(end - start, *shape[1:])

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def __enter__(self) -> Self:
        """Return itself."""
        return self

    def __exit__(self, *raised: object) -> None:
        """Close the file."""
        self.close()

    _end = 0  # offset of the end of the array whose header was read last

    def _read_header(self) -> tuple[tuple[int, ...], np.dtype[Any], int]:
        self._file.seek(self._end)
        shape, is_fortran, dtype, self._end = read_npy_header(self._file)
        if is_fortran or not shape:
            raise ValueError("the array is in Fortran order or has no axis")
        return shape, dtype, self._file.tell()

    def _read(self, offset: int, n_bytes: int) -> bytes:
        self._file.seek(offset)
        file_bytes = self._file.read(n_bytes)
        if len(file_bytes) != n_bytes:
            raise InputError(f"{self._name} is truncated: build it again")
        return file_bytes


class SliceLocation(NamedTuple):
    """The location of a slice in its piece."""

    start: int
    size: int  # size in bytes; 0 if the shard reads nothing from this piece
    rows: int  # number of the shard's rows, not counting vectors that are only linked into a cell
    digest: bytes  # digest of the slice

    @property
    def end(self) -> int:
        """The offset of the first byte after the slice."""
        return self.start + self.size

    def matches(self, data: bytes) -> bool:
        """Return whether `data` has the slice's digest."""
        return _digest_slice(data) == self.digest

    @classmethod
    def from_table(cls, table: SliceTable) -> list[Self]:
        """Return the (n,) records of a table."""
        return [cls(*record) for record in table.tolist()]


def write_sliced_piece(
    path: Path, stamp: str, arrays: Sequence[Array], slices: Sequence[bytes], rows: Sequence[int]
) -> None:
    """Write a piece with one slice per shard.

    Args:
        path: the file.
        stamp: the piece's stamp (`compute_stamp`).
        arrays: the arrays of its head.
        slices: the bytes that each shard reads; empty if it reads nothing from this piece.
        rows: the number of rows in each slice that belong to the shard.

    Raises:
        ResourceError: the file cannot be written.
    """
    write_piece(path, stamp, arrays)
    try:
        sections = [*slices, path.read_bytes()]
        table = np.zeros(len(sections), SLICE_LOCATION_DTYPE)
        table["size"] = [len(slice_bytes) for slice_bytes in sections]
        table["rows"][:-1] = rows
        table["start"][:-1] = len(sections[-1]) + np.cumsum(table["size"][:-1]) - table["size"][:-1]
        table["digest"] = np.frombuffer(b"".join(map(_digest_slice, sections)), f"V{_DIGEST_BYTES}")
        with path.open("ab") as file:
            file.writelines([*slices, table.tobytes(), _digest_slice(table.tobytes())])
    except OSError as error:
        raise ResourceError(f"cannot write {path}: {error.strerror or error}") from error


def read_slice_table(read_range: RangeReader, size: int, n_shards: int, name: str) -> SliceTable:
    """Return the slice table of a piece of `size` bytes, (shards + 1,); the head comes last.

    `name` names the piece in errors.

    Raises:
        InputError: the piece is truncated or damaged.
    """
    table_bytes = (n_shards + 1) * SLICE_LOCATION_DTYPE.itemsize
    tail = read_range(size - table_bytes - _DIGEST_BYTES, size) if table_bytes + _DIGEST_BYTES <= size else b""
    if len(tail) != table_bytes + _DIGEST_BYTES or _digest_slice(tail[:table_bytes]) != tail[table_bytes:]:
        raise _create_damage_error(name)
    table = np.frombuffer(tail, SLICE_LOCATION_DTYPE, n_shards + 1)
    starts, ends = table["start"], table["start"] + table["size"]
    if np.any((starts < 0) | (ends < starts) | (ends > size - len(tail)) | (table["rows"] < 0)):
        raise _create_damage_error(name)
    return table


def open_piece_head(opener: Opener, n_shards: int, stamp: str, n_arrays: int, name: str) -> PieceReader:
    """Read the head of a sliced piece and return a reader of its `n_arrays` arrays.

    Raises:
        InputError: the piece is missing, truncated, damaged, or of another build.
    """
    try:
        with opener() as file:
            full_name = f"{name}, {file.name},"

            def read(start: int, end: int) -> bytes:
                file.seek(start)
                return file.read(end - start)

            (head_location,) = SliceLocation.from_table(
                read_slice_table(read, file.seek(0, io.SEEK_END), n_shards, full_name)[-1:]
            )
            head_bytes = read(head_location.start, head_location.end)
    except OSError as error:
        raise InputError(f"cannot read {name} ({error.strerror or error}): build it again") from error
    if not head_location.matches(head_bytes):
        raise _create_damage_error(full_name)
    return PieceReader(io.BytesIO(head_bytes), stamp, n_arrays, name)


def digest_slices(locations: SliceTable) -> str:
    """Return one digest of all slices that a shard reads; `locations` has one for each part."""
    return digest_bytes(locations["digest"][locations["size"] > 0].tobytes())


def _create_damage_error(name: str) -> InputError:
    return InputError(f"{name} is truncated or damaged: delete that file and build it again")


def _digest_slice(slice_bytes: bytes) -> bytes:
    return bytes.fromhex(digest_bytes(slice_bytes)[-2 * _DIGEST_BYTES :])
