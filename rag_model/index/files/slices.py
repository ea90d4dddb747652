"""Slices: what one shard reads of one part's piece. There are shards x parts of them, so each has to cost little.

A piece of a kind with shards ends in a table of where each shard's slice is. With it a shard's worker reads a slice by
one request, and opens no piece. A slice is verified by its digest, which also says whether it is an earlier build's.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple, Self

import numpy as np
import numpy.typing as npt

from rag_model.digest import digest_bytes
from rag_model.errors import InputError
from rag_model.index.files.pieces import Array, append_array, write_piece

Table = npt.NDArray[np.void]  # of `RECORD`
Reader = Callable[[int, int], bytes]  # returns the bytes of a piece from `start` to `end`, or less where it is shorter

RECORD = np.dtype([("start", "<i8"), ("size", "<i8"), ("rows", "<i8"), ("digest", "V16")])
_HEX = 32  # digits of a digest that are kept: 128 bits


class Slice(NamedTuple):
    """Where a slice is in its piece, how many rows it is the shard's own share of, and the digest of its bytes."""

    start: int
    size: int  # bytes; 0: the shard reads nothing of this piece
    rows: int
    digest: bytes

    @property
    def end(self) -> int:
        """The first byte behind it."""
        return self.start + self.size

    def holds(self, data: bytes) -> bool:
        """Whether `data` are its bytes."""
        return len(data) == self.size and _digest(data) == self.digest

    @classmethod
    def all_of(cls, table: Table) -> list[Self]:
        """Return the records of a table, (n,)."""
        return [cls(*record) for record in table.tolist()]


def write_sliced(path: Path, stamp: str, arrays: Sequence[Array], slices: Sequence[bytes], rows: Sequence[int]) -> None:
    """Write a piece of `arrays`, the slices of all shards, and their table.

    Args:
        path: the file.
        stamp: of the piece (`pieces.stamp_of`).
        arrays: what the merge reads: it opens a piece of these and `SLICED` more.
        slices: a shard's bytes; empty: it reads nothing of this piece.
        rows: of each slice, those that are counted as the shard's.

    Raises:
        ResourceError: the file cannot be written.
    """
    joined = np.frombuffer(b"".join(slices), np.uint8)
    write_piece(path, stamp, [*arrays, joined])
    table = np.zeros(len(slices), RECORD)
    table["size"], table["rows"] = [len(data) for data in slices], rows
    table["start"] = path.stat().st_size - len(joined) + np.cumsum(table["size"]) - table["size"]
    table["digest"] = np.frombuffer(b"".join(map(_digest, slices)), "V16")
    append_array(path, table.view(np.uint8))


SLICED = 2  # arrays of a piece behind those that the merge reads: the slices, and their table


def read_table(read: Reader, size: int, shards: int, name: str) -> Table:
    """Return the table of a piece of `size` bytes, (shards,); `name` names the piece in errors.

    Raises:
        InputError: the piece is truncated or damaged.
    """
    length = shards * RECORD.itemsize
    data = read(size - length, size) if length <= size else b""
    table = np.frombuffer(data, RECORD) if len(data) == length else np.zeros(0, RECORD)
    start, end = table["start"], table["start"] + table["size"]
    if len(table) != shards or np.any((start < 0) | (end < start) | (end > size) | (table["rows"] < 0)):
        raise InputError(f"{name} is truncated or damaged: build it again")
    return table


def identity(column: Table) -> str:
    """Return a digest of a shard's slices, (parts,), in order; parts of which it reads nothing are left out."""
    return digest_bytes(column["digest"][column["size"] > 0].tobytes())


def _digest(data: bytes) -> bytes:
    return bytes.fromhex(digest_bytes(data)[-_HEX:])
