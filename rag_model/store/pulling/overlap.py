"""Find the vectors of a snapshot that a puller has already: those of passages that an earlier snapshot has too.

A month's edits change nearly every file, but few of its rows. For a file that ends in vectors (`store.pulling.tables`)
a `Patch` fetches the header and the rows of new passages by range, and copies the other rows from this disk. Passages
are joined by hash within one encoder space. Only the digest of the complete file shows that the vectors are equal to
the bit; a patched file with another digest is fetched whole.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from threading import Lock
from typing import NamedTuple, Self

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from rag_model.errors import BookwheelError, StoreError
from rag_model.partition import Partition, Rows
from rag_model.store.objects.blobs import BlobRef
from rag_model.store.objects.ranges import read_ahead
from rag_model.store.pulling.tables import Table, Vectors, convertible, tables_of
from rag_model.store.versions.manifest import Content, PartEntry
from rag_model.store.versions.page_ranges import PageRanges
from rag_model.store.versions.paths import passages_path
from rag_model.store.versions.snapshot import Snapshot

_NEAR = 32 << 10  # bytes; a shorter gap between two fetched ranges is fetched too: cheaper than another request
_PIECE = 4 << 20  # bytes; `_AHEAD` of them are in memory at once
_AHEAD = 16  # requests at once: ranges are short, so latency dominates


class Piece(NamedTuple):
    """A range of a file's bytes, and its source."""

    start: int
    end: int
    rows: Rows | None  # rows of the earlier snapshot to copy; None: fetch the bytes


@dataclass(frozen=True, slots=True)
class Patch:
    """A file of which some rows are on this disk."""

    table: Table
    kept: Rows  # (rows,) int32 or int64: for each row the earlier snapshot's row with its vector; -1: none

    @property
    def fetched_bytes(self) -> int:
        """The number of bytes that have to be fetched."""
        return sum(piece.end - piece.start for piece in self.pieces() if piece.rows is None)

    def chunks(self, vectors: Vectors, read: Callable[[int, int], bytes], start: int) -> Iterator[bytes]:
        """Yield the file's bytes from `start` on, in order; `read(start, end)` fetches a range."""

        def made(piece: Piece) -> bytes:
            skipped = max(0, start - piece.start)
            if piece.rows is None:
                return read(piece.start + skipped, piece.end)
            return vectors.take(piece.rows, self.table.width)[skipped:]

        return read_ahead(made, [piece for piece in self.pieces() if piece.end > start], _AHEAD)

    def pieces(self) -> Iterator[Piece]:
        """Yield the pieces of the file in order, none longer than 4 MiB or a row."""
        yield from _fetched(0, self.table.head)
        step = max(1, _PIECE // self.table.width)
        for first, end, here in _stretches(self.kept, _NEAR // self.table.width):
            start = self.table.head + first * self.table.width
            if not here:
                yield from _fetched(start, start + (end - first) * self.table.width)
                continue
            for row in range(first, end, step):
                rows = self.kept[row : min(row + step, end)]
                start = self.table.head + row * self.table.width
                yield Piece(start, start + len(rows) * self.table.width, rows)


class Overlap:
    """The vectors that a later snapshot has in common with an earlier one. Thread-safe."""

    def __init__(self, before: Snapshot, after: Snapshot, over: tuple[str, ...]) -> None:
        """Compare the representations `over`, which have equal spaces in both; call `of`, which finds them."""
        self.over = over
        self._before, self._after = before, after
        self._tables = {path: one for path, one in tables_of(after.manifest.content).items() if one.over in over}
        self._widths = {(table.over, table.width) for table in tables_of(before.manifest.content).values()}
        self._kept: dict[str, Rows] = {}
        self._locks = {part.name: Lock() for part in after.parts}  # one a part: others are joined meanwhile
        self._ranges = PageRanges(before.parts)
        self._starts = Partition(part.rows for part in before.parts).starts
        self._of_row = np.dtype(np.int32 if self._starts[-1] <= np.iinfo(np.int32).max else np.int64)

    @classmethod
    def of(cls, before: Snapshot, after: Snapshot) -> Self | None:
        """Return the overlap of two snapshots; None if they are the same one, or have no encoder space in common."""
        old, new = before.manifest.content, after.manifest.content
        digests = {name: _digest(new, name) for name in new.representations}
        same = tuple(name for name, digest in digests.items() if digest is not None and digest == _digest(old, name))
        return cls(before, after, same) if same and before.id != after.id else None

    def patch(self, path: str) -> Patch | None:
        """Return the patch for a file of the later snapshot; None if it has no row here, or passages cannot be read.

        Reads the hashes of the passages that the file has vectors of, and of the earlier parts that may contain them;
        4 bytes per passage stay in memory.
        """
        table = self._tables.get(path)
        if table is None:
            return None
        if not any(over == table.over and convertible(width, table.width) for over, width in self._widths):
            return None
        try:
            kept = np.concatenate([*self._joins(table.parts)])
        except BookwheelError:  # passages that were not pulled, or are damaged
            return None
        return Patch(table, kept) if (kept >= 0).any() else None

    def kept(self) -> Rows:
        """Return the earlier row of each passage of the later snapshot, (n,); -1: none.

        Raises:
            BookwheelError: passages were not pulled, or are damaged.
        """
        return np.concatenate([np.empty(0, np.int64), *self._joins(self._after.parts)])

    def _joins(self, parts: Sequence[PartEntry]) -> Iterator[Rows]:
        return read_ahead(self._kept_of, parts, min(_AHEAD, max(self._before.at_once, self._after.at_once)))

    def _kept_of(self, part: PartEntry) -> Rows:
        with self._locks[part.name]:
            if part.name not in self._kept:
                self._kept[part.name] = self._joined(part).astype(self._of_row)
            return self._kept[part.name]

    def _joined(self, part: PartEntry) -> Rows:
        """Join a part with the earlier parts that had its pages; return the earlier row of each passage, or -1.

        A part whose file is the same as before is not read: most are, and all of a large library would be.
        """
        for number, entry in self._ranges.within(part.first_page, part.last_page):
            if entry.rows == part.rows and self._file(self._before, entry) == self._file(self._after, part):
                return np.arange(part.rows) + self._starts[number]
        hashes, kept = self._hashes(self._after, part), np.full(part.rows, -1, np.int64)
        for number, entry in self._ranges.within(part.first_page, part.last_page):
            found = pc.index_in(hashes, value_set=self._hashes(self._before, entry)).fill_null(-1).to_numpy()
            kept = np.where(found < 0, kept, found + self._starts[number])
        return kept

    @staticmethod
    def _file(snapshot: Snapshot, part: PartEntry) -> BlobRef | None:
        return snapshot.manifest.content.files.get(passages_path(part.name))

    @staticmethod
    def _hashes(snapshot: Snapshot, part: PartEntry) -> pa.ChunkedArray:
        hashes = snapshot.columns(part.name, ["hash"])["hash"]
        if len(hashes) != part.rows:
            raise StoreError(f"the passages of {part.name} in {snapshot.where} are damaged: {len(hashes)} rows")
        return hashes


def _digest(content: Content, representation: str) -> str | None:
    digest: str | None = (content.space_of(representation) or {}).get("digest")
    return digest


def _fetched(start: int, end: int) -> Iterator[Piece]:
    for at in range(start, end, _PIECE):
        yield Piece(at, min(at + _PIECE, end), None)


def _stretches(kept: Rows, near: int) -> Iterator[tuple[int, int, bool]]:
    """Yield start, end and whether to copy (not fetch) for each run of rows; short runs on this disk are fetched."""
    here = kept >= 0
    for first, end, its in _runs(here):
        if its and end - first < near and end - first < len(kept):
            here[first:end] = False
    yield from _runs(here)


def _runs(flags: NDArray[np.bool_]) -> list[tuple[int, int, bool]]:
    edges = [0, *(np.flatnonzero(np.diff(flags)) + 1).tolist(), len(flags)]
    return [(first, end, bool(flags[first])) for first, end in pairwise(edges) if end > first]
