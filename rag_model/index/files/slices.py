"""Slices: what one shard reads of one part's piece. There are shards x parts of them, so each has to cost little.

A piece of a kind with shards is its head, which the merge reads; the slices of all shards; a table of the places where
they are; and the table's digest. With it a shard's worker reads a slice by one request, and opens no piece. Head,
slices and table are verified. A shard whose slices have the digests of an earlier build is not built again.
"""

import io
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple, Self

import numpy as np
import numpy.typing as npt

from rag_model.digest import digest_bytes
from rag_model.errors import InputError, ResourceError
from rag_model.index.files.pieces import Array, Opener, Piece, write_piece

Table = npt.NDArray[np.void]  # of `PLACES`
Reader = Callable[[int, int], bytes]  # returns the bytes of a piece from `start` to `end`, or less where it is shorter

_DIGEST = 16  # bytes of a digest that are kept
PLACES = np.dtype([("start", "<i8"), ("size", "<i8"), ("rows", "<i8"), ("digest", f"V{_DIGEST}")])


class Place(NamedTuple):
    """Where a slice is in its piece."""

    start: int
    size: int  # bytes; 0: the shard reads nothing of this piece
    rows: int  # those that count as the shard's: vectors that are only linked into a cell do not
    digest: bytes  # of the slice

    @property
    def end(self) -> int:
        """The first byte behind it."""
        return self.start + self.size

    def holds(self, data: bytes) -> bool:
        """Whether `data` are the slice's bytes."""
        return _digest(data) == self.digest

    @classmethod
    def all_of(cls, table: Table) -> list[Self]:
        """Return the records of a table, (n,)."""
        return [cls(*record) for record in table.tolist()]


def write_sliced(path: Path, stamp: str, arrays: Sequence[Array], slices: Sequence[bytes], rows: Sequence[int]) -> None:
    """Write a piece.

    Args:
        path: the file.
        stamp: of the piece (`pieces.stamp_of`).
        arrays: its head.
        slices: a shard's bytes; empty: it reads nothing of this piece.
        rows: of each slice, those that count as the shard's.

    Raises:
        ResourceError: the file cannot be written.
    """
    write_piece(path, stamp, arrays)
    try:
        every = [*slices, path.read_bytes()]
        table = np.zeros(len(every), PLACES)
        table["size"] = [len(data) for data in every]
        table["rows"][:-1] = rows
        table["start"][:-1] = len(every[-1]) + np.cumsum(table["size"][:-1]) - table["size"][:-1]
        table["digest"] = np.frombuffer(b"".join(map(_digest, every)), f"V{_DIGEST}")
        with path.open("ab") as file:
            file.writelines([*slices, table.tobytes(), _digest(table.tobytes())])
    except OSError as failed:
        raise ResourceError(f"cannot write {path}: {failed.strerror or failed}") from failed


def read_table(read: Reader, size: int, shards: int, name: str) -> Table:
    """Return the table of a piece of `size` bytes, (shards + 1,): the last record is the head's.

    `name` names the piece in errors.

    Raises:
        InputError: the piece is truncated or damaged.
    """
    length = (shards + 1) * PLACES.itemsize
    data = read(size - length - _DIGEST, size) if length + _DIGEST <= size else b""
    if len(data) != length + _DIGEST or _digest(data[:length]) != data[length:]:
        raise _broken(name)
    table = np.frombuffer(data, PLACES, shards + 1)
    start, end = table["start"], table["start"] + table["size"]
    if np.any((start < 0) | (end < start) | (end > size - len(data)) | (table["rows"] < 0)):
        raise _broken(name)
    return table


def open_head(opener: Opener, shards: int, stamp: str, count: int, name: str) -> Piece:
    """Return the `count` arrays of a piece's head, which is read whole.

    Raises:
        InputError: the piece is missing, truncated, damaged, or of another build.
    """
    try:
        with opener() as file:
            named = f"{name}, {file.name},"

            def read(start: int, end: int) -> bytes:
                file.seek(start)
                return file.read(end - start)

            (head,) = Place.all_of(read_table(read, file.seek(0, io.SEEK_END), shards, named)[-1:])
            data = read(head.start, head.end)
    except OSError as failed:
        raise InputError(f"cannot read {name} ({failed.strerror or failed}): build it again") from failed
    if not head.holds(data):
        raise _broken(named)
    return Piece(io.BytesIO(data), stamp, count, name)


def identity(column: Table) -> str:
    """Return a digest of a shard's slices, (parts,), in order; parts of which it reads nothing are left out."""
    return digest_bytes(column["digest"][column["size"] > 0].tobytes())


def _broken(name: str) -> InputError:
    return InputError(f"{name} is truncated or damaged: delete that file and build it again")


def _digest(data: bytes) -> bytes:
    return bytes.fromhex(digest_bytes(data)[-2 * _DIGEST :])
