"""Find the vectors of a snapshot that a puller already has from a previous snapshot.

The edits of a month change nearly every file, but only a few rows of each file. For a file that
ends in vectors, a `RowPatch` fetches the header and the rows of new passages by range, and copies
the other rows from the local disk. Passages are matched by their hashes, if both snapshots have the
same encoder space. Only the digest of the complete file proves that the copied vectors are
identical; a patched file with another digest is fetched whole.

```
embeddings/part-00042.npy    a header, then the vectors of the part
index/hnsw.faiss             a graph, then the vectors of all parts (float16 if `SQfp16`)
index/exact.faiss            a header, then the vectors of all parts
```
The offsets of the rows follow from the manifest, because the rows are the last bytes of the file.
The manifest entry of such an index states the bytes of a row as `row_bytes`; in manifests of format
1 they follow from the factory string.
"""

import re
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import accumulate, pairwise
from threading import Lock
from typing import Any, NamedTuple, Self

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from rag_model.arrays import RowPartition, Rows
from rag_model.errors import BookwheelError, StoreError
from rag_model.store.objects.blobs import BlobRef
from rag_model.store.objects.files import read_ahead
from rag_model.store.versions.manifest import (
    EMBEDDINGS,
    Content,
    PartEntry,
    embeddings_path,
    file_kind,
    passages_path,
)
from rag_model.store.versions.snapshot import Snapshot

_NPY_HEADER_BYTES = 128  # size to which numpy pads the header of a two-dimensional array
# factory strings of the faiss indexes whose files end in vectors
_ENDS_IN_VECTORS = re.compile(r"Flat|HNSW\d+(?:[_,](?:Flat|(SQfp16)))?")
_MAX_DIM = 1 << 20  # maximum number of components of a vector
# If the gap between two ranges has fewer bytes, one request for both and the gap is cheaper.
_MIN_GAP_BYTES = 32 << 10
_PIECE_BYTES = 4 << 20  # maximum bytes of a piece; `_MAX_AHEAD` pieces are in memory at a time
# maximum number of concurrent requests: many, because the time of a short range is mostly latency
_MAX_AHEAD = 16


@dataclass(frozen=True, slots=True)
class VectorTable:
    """The location of the vectors at the end of a file."""

    representation: str  # name of the representation that has these vectors
    head_bytes: int  # bytes before the first row
    row_bytes: int  # bytes of a row
    parts: tuple[PartEntry, ...]  # the parts whose passages have these vectors, in row order

    @property
    def rows(self) -> int:
        """The number of rows."""
        return sum(part.rows for part in self.parts)


def is_convertible(source_bytes: int, target_bytes: int) -> bool:
    """Return whether rows of `source_bytes` bytes can be copied to rows of `target_bytes` bytes:
    without conversion, or from float16 to float32 or back.
    """
    return target_bytes in _list_lossless_sizes(source_bytes) or source_bytes == 2 * target_bytes


def _list_lossless_sizes(source_bytes: int) -> tuple[int, int]:
    """Return the sizes to which a row can be copied exactly: its own, and twice its own."""
    return source_bytes, 2 * source_bytes


def find_vector_tables(content: Content) -> dict[str, VectorTable]:
    """Return the table of each file that ends in vectors, by path; embeddings come first, in row
    order.
    """
    tables = {}
    for representation in dict.fromkeys([EMBEDDINGS, *content.representations]):
        for part in content.parts:
            path = embeddings_path(part.name, representation)
            if path in content.files and part.rows:
                row_bytes, remainder = divmod(content.files[path].size - _NPY_HEADER_BYTES, part.rows)
                if row_bytes > 0 and not remainder:
                    tables[path] = VectorTable(representation, _NPY_HEADER_BYTES, row_bytes, (part,))
    for name, index_entry in content.indexes.items():
        path = content.index_file(name)
        if path in content.files and (row_bytes := _get_row_bytes(index_entry)):
            file_head_bytes = content.files[path].size - content.n * row_bytes
            if file_head_bytes > 0:
                tables[path] = VectorTable(content.representation_of(name), file_head_bytes, row_bytes, content.parts)
    return tables


def list_embedded_files(content: Content) -> dict[str, VectorTable]:
    """Return, by path, the table of each index file that ends in vectors of the embeddings."""
    tables = find_vector_tables(content)
    row_bytes_by_representation = {
        table.representation: table.row_bytes for path, table in tables.items() if _is_embeddings(path)
    }
    return {
        path: table
        for path, table in tables.items()
        if not _is_embeddings(path)
        and table.row_bytes in _list_lossless_sizes(row_bytes_by_representation.get(table.representation, 0))
        and all(embeddings_path(part.name, table.representation) in tables for part in table.parts if part.rows)
    }


def _is_embeddings(path: str) -> bool:
    return file_kind(path) == EMBEDDINGS


def _get_row_bytes(index_entry: Mapping[str, Any]) -> int:
    """Return the bytes of a vector at the end of an index file; 0 if there are none."""
    if "kind" in index_entry:
        row_bytes = index_entry.get("row_bytes", 0)
        return row_bytes if type(row_bytes) is int and 0 < row_bytes <= 4 * _MAX_DIM else 0
    factory_match, dim = _ENDS_IN_VECTORS.fullmatch(str(index_entry.get("factory"))), index_entry.get("d")
    if factory_match is None or type(dim) is not int or not 0 < dim < _MAX_DIM:
        return 0
    return (2 if factory_match[1] else 4) * dim


class PulledVectors:
    """The vectors of a pulled snapshot by row, from its embeddings or from an index."""

    def __init__(self, arrays: list[NDArray[np.uint8]]) -> None:
        """Read rows from (m, row_bytes) arrays, in the order of the arrays."""
        self._arrays = arrays
        self._partition = RowPartition(map(len, arrays))
        self.row_bytes = arrays[0].shape[1]

    @classmethod
    def open(cls, snapshot: Snapshot, representation: str = EMBEDDINGS) -> Self | None:
        """Memory-map the vectors of a representation; return None if any is missing or damaged."""
        content = snapshot.manifest.content
        tables = {
            path: table for path, table in find_vector_tables(content).items() if table.representation == representation
        }
        embedding_paths = [embeddings_path(part.name, representation) for part in content.parts if part.rows]
        for paths in (embedding_paths, *([content.index_file(name)] for name in content.indexes)):
            with suppress(StoreError, OSError):
                if paths and set(paths) <= set(tables) and len({tables[path].row_bytes for path in paths}) == 1:
                    return cls([_map_table(snapshot, path, tables[path]) for path in paths])
        return None

    def take_rows(self, rows: Rows, row_bytes: int) -> bytes:
        """Return the bytes of rows, converted between float16 and float32 if needed."""
        row_data = np.empty((len(rows), self.row_bytes), np.uint8)
        sorted_positions = np.argsort(rows, kind="stable")
        for array_number, row_slice, local_rows in self._partition.split(rows[sorted_positions]):
            row_data[sorted_positions[row_slice]] = self._arrays[array_number][local_rows]
        if row_bytes == self.row_bytes:
            return row_data.tobytes()
        source_type, target_type = ("<f2", "<f4") if row_bytes > self.row_bytes else ("<f4", "<f2")
        return row_data.view(source_type).astype(target_type).tobytes()


def _map_table(snapshot: Snapshot, path: str, table: VectorTable) -> NDArray[np.uint8]:
    return np.memmap(snapshot.path(path), np.uint8, "r", table.head_bytes, (table.rows, table.row_bytes))


class PageRanges:
    """Finds the parts of a snapshot that overlap a page range, in logarithmic time if the parts are
    in page order.
    """

    def __init__(self, parts: Sequence[PartEntry]) -> None:
        """Index parts, which may overlap, in any order."""
        self._parts = parts
        # Item i of the first list is the maximum last page of parts[: i + 1]; item i of the second
        # list is the minimum first page of parts[i:].
        self._max_last_pages = list(accumulate((part.last_page for part in parts), max))
        self._min_first_pages = list(accumulate((part.first_page for part in reversed(parts)), min))[::-1]

    def find_overlapping(self, first_page: int, last_page: int) -> Iterator[tuple[int, PartEntry]]:
        """Yield the part number and the entry of each part that overlaps the pages [first_page,
        last_page].
        """
        start = bisect_left(self._max_last_pages, first_page)
        end = bisect_right(self._min_first_pages, last_page)
        for part_number in range(start, end):
            part = self._parts[part_number]
            if part.first_page <= last_page and first_page <= part.last_page:
                yield part_number, part


class PatchPiece(NamedTuple):
    """A byte range of a file, and the source of its bytes."""

    start: int
    end: int
    rows: Rows | None  # rows of the previous snapshot to copy; None if the bytes are fetched


@dataclass(frozen=True, slots=True)
class RowPatch:
    """Assembles a file of which some rows are on the local disk."""

    table: VectorTable
    # (n,) int32 or int64: the previous snapshot's row of each row, or -1 if it is not there
    previous_rows: Rows

    @property
    def fetched_bytes(self) -> int:
        """The number of bytes to fetch."""
        return sum(piece.end - piece.start for piece in self.iter_pieces() if piece.rows is None)

    def iter_chunks(self, vectors: PulledVectors, read: Callable[[int, int], bytes], start: int) -> Iterator[bytes]:
        """Yield the file's bytes from `start` on, in order; `read(start, end)` fetches a range."""

        def read_piece(piece: PatchPiece) -> bytes:
            skipped_bytes = max(0, start - piece.start)
            if piece.rows is None:
                return read(piece.start + skipped_bytes, piece.end)
            return vectors.take_rows(piece.rows, self.table.row_bytes)[skipped_bytes:]

        return read_ahead(read_piece, [piece for piece in self.iter_pieces() if piece.end > start], _MAX_AHEAD)

    def iter_pieces(self) -> Iterator[PatchPiece]:
        """Yield the pieces of the file in order; each has at most 4 MiB, or a single row."""
        yield from _iter_fetched_pieces(0, self.table.head_bytes)
        piece_rows = max(1, _PIECE_BYTES // self.table.row_bytes)
        for first, end, is_local in _iter_stretches(self.previous_rows, _MIN_GAP_BYTES // self.table.row_bytes):
            offset = self.table.head_bytes + first * self.table.row_bytes
            if not is_local:
                yield from _iter_fetched_pieces(offset, offset + (end - first) * self.table.row_bytes)
                continue
            for first_row in range(first, end, piece_rows):
                rows = self.previous_rows[first_row : min(first_row + piece_rows, end)]
                offset = self.table.head_bytes + first_row * self.table.row_bytes
                yield PatchPiece(offset, offset + len(rows) * self.table.row_bytes, rows)


class RowOverlap:
    """Compares a snapshot with a previous one to find the vectors that both have. Thread-safe."""

    def __init__(self, previous: Snapshot, target: Snapshot, representations: tuple[str, ...]) -> None:
        """Compare the given representations, which have equal encoder spaces; `between` finds
        them.
        """
        self.representations = representations
        self._previous, self._target = previous, target
        self._tables = {
            path: vector_table
            for path, vector_table in find_vector_tables(target.manifest.content).items()
            if vector_table.representation in representations
        }
        self._previous_row_sizes = {
            (table.representation, table.row_bytes) for table in find_vector_tables(previous.manifest.content).values()
        }
        self._previous_rows: dict[str, Rows] = {}
        # one lock per part, so that parts are matched concurrently
        self._lock_by_part = {part.name: Lock() for part in target.parts}
        self._ranges = PageRanges(previous.parts)
        self._starts = RowPartition(part.rows for part in previous.parts).starts
        self._row_type = np.dtype(np.int32 if self._starts[-1] <= np.iinfo(np.int32).max else np.int64)

    @classmethod
    def between(cls, previous: Snapshot, target: Snapshot) -> Self | None:
        """Return the overlap of two snapshots; None if they are equal or share no encoder space."""
        previous_content, target_content = previous.manifest.content, target.manifest.content
        representations = tuple(
            name for name in target_content.representations if target_content.shares_space(previous_content, name)
        )
        return cls(previous, target, representations) if representations and previous.id != target.id else None

    def find_patch(self, path: str) -> RowPatch | None:
        """Return the patch for a file; None if no row is local, or passages cannot be read.

        Reads the passage hashes of the file's parts, and of the previous snapshot's parts that may
        contain them; 4 bytes per passage stay in memory.
        """
        table = self._tables.get(path)
        if table is None:
            return None
        if not any(
            representation == table.representation and is_convertible(row_bytes, table.row_bytes)
            for representation, row_bytes in self._previous_row_sizes
        ):
            return None
        try:
            previous_rows = np.concatenate([*self._match_parts(table.parts)])
        except BookwheelError:  # the passages were not pulled, or are damaged
            return None
        return RowPatch(table, previous_rows) if (previous_rows >= 0).any() else None

    def find_previous_rows(self) -> Rows:
        """Return the (n,) row of each passage in the previous snapshot, or -1 if it is not there.

        Raises:
            BookwheelError: passages were not pulled, or are damaged.
        """
        return np.concatenate([np.empty(0, np.int64), *self._match_parts(self._target.parts)])

    def _match_parts(self, parts: Sequence[PartEntry]) -> Iterator[Rows]:
        return read_ahead(
            self._get_previous_rows,
            parts,
            min(_MAX_AHEAD, max(self._previous.concurrency, self._target.concurrency)),
        )

    def _get_previous_rows(self, part: PartEntry) -> Rows:
        with self._lock_by_part[part.name]:
            if part.name not in self._previous_rows:
                self._previous_rows[part.name] = self._match_part(part).astype(self._row_type)
            return self._previous_rows[part.name]

    def _match_part(self, part: PartEntry) -> Rows:
        """Match a part's passages with the previous snapshot's parts of the same pages; return each
        passage's row in that snapshot, or -1.

        A part with an unchanged file is not read; in most updates, most parts are unchanged.
        """
        for part_number, previous_part in self._ranges.find_overlapping(part.first_page, part.last_page):
            if previous_part.rows == part.rows and self._get_passage_file(
                self._previous, previous_part
            ) == self._get_passage_file(self._target, part):
                return np.arange(part.rows) + self._starts[part_number]
        hashes = self._read_hashes(self._target, part)
        previous_rows = np.full(part.rows, -1, np.int64)
        for part_number, previous_part in self._ranges.find_overlapping(part.first_page, part.last_page):
            positions = (
                pc.index_in(hashes, value_set=self._read_hashes(self._previous, previous_part)).fill_null(-1).to_numpy()
            )
            previous_rows = np.where(positions < 0, previous_rows, positions + self._starts[part_number])
        return previous_rows

    @staticmethod
    def _get_passage_file(snapshot: Snapshot, part: PartEntry) -> BlobRef | None:
        return snapshot.manifest.content.files.get(passages_path(part.name))

    @staticmethod
    def _read_hashes(snapshot: Snapshot, part: PartEntry) -> pa.ChunkedArray:
        hashes = snapshot.columns(part.name, ["hash"])["hash"]
        if len(hashes) != part.rows:
            raise StoreError(f"the passages of {part.name} in {snapshot.location} are damaged: {len(hashes)} rows")
        return hashes


def _iter_fetched_pieces(start_byte: int, end_byte: int) -> Iterator[PatchPiece]:
    for offset in range(start_byte, end_byte, _PIECE_BYTES):
        yield PatchPiece(offset, min(offset + _PIECE_BYTES, end_byte), None)


def _iter_stretches(previous_rows: Rows, min_rows: int) -> Iterator[tuple[int, int, bool]]:
    """Yield (start, end, is_local) of each run of rows to copy from the local disk or to fetch.

    Short runs on the local disk are fetched together with the runs next to them.
    """
    is_local = previous_rows >= 0
    for first, end, is_run_local in _find_flag_runs(is_local):
        if is_run_local and end - first < min_rows and end - first < len(previous_rows):
            is_local[first:end] = False
    yield from _find_flag_runs(is_local)


def _find_flag_runs(flags: NDArray[np.bool_]) -> list[tuple[int, int, bool]]:
    edges = [0, *(np.flatnonzero(np.diff(flags)) + 1).tolist(), len(flags)]
    return [(first, end, bool(flags[first])) for first, end in pairwise(edges) if end > first]
