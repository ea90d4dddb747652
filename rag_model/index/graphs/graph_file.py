"""faiss's file layout of an HNSW index: files are written as a stream, and read memory-mapped.

    fourcc, d, n, …, metric                              the index's header
    probabilities, slots by level, levels, offsets, links    the graph: each array after its length
    entry point, top level, efConstruction, efSearch, 1
    the storage: a separate index, whose codes come last

Source: `faiss/impl/index_write.cpp`, `write_HNSW`. A test checks that faiss still reads the file
and writes the same bytes.
"""

import struct
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Self

import numpy as np
import numpy.typing as npt

from rag_model.arrays import gather_windows, view_windows
from rag_model.errors import InputError
from rag_model.index.files import engine
from rag_model.index.files.engine import HEADER, FaissIndex, Rows, faiss
from rag_model.index.files.layout import check_layout
from rag_model.index.graphs.graph import Links, UpperLevels, count_slots, iter_ranges

_TAIL = struct.Struct("<iiiii")  # entry point, top level, efConstruction, efSearch, 1
_ARRAY_LENGTH = struct.Struct("<Q")  # precedes each array


def write_head(file: BinaryIO, empty_index: FaissIndex, levels: Links) -> None:
    """Write everything before the links.

    Args:
        file: positioned at the beginning.
        empty_index: an HNSW index without vectors, with trained storage.
        levels: (n,) int32, counted from 1.
    """
    hnsw, n = empty_index.hnsw, len(levels)
    fourcc, d, _, unused1, unused2, is_trained, metric = HEADER.unpack(_serialize(empty_index)[: HEADER.size])
    file.write(HEADER.pack(fourcc, d, n, unused1, unused2, is_trained, metric))
    for table in map(engine.copy_array, (hnsw.assign_probas, hnsw.cum_nneighbor_per_level)):
        file.write(_ARRAY_LENGTH.pack(len(table)) + table.tobytes())
    file.write(_ARRAY_LENGTH.pack(n) + levels.tobytes())
    file.write(_ARRAY_LENGTH.pack(n + 1) + bytes(8))
    n_slots = 0
    # The offsets are written in blocks, because all of them take 8 bytes per node.
    for first_node, end_node in iter_ranges(n):
        slot_ends = n_slots + np.cumsum(count_slots(levels[first_node:end_node], int(hnsw.nb_neighbors(1))))
        file.write(slot_ends.astype("<u8").tobytes())
        n_slots = int(slot_ends[-1])
    file.write(_ARRAY_LENGTH.pack(n_slots))


def write_tail(file: BinaryIO, empty_index: FaissIndex, upper_levels: UpperLevels, ef_search: int) -> None:
    """Write everything between the links and the storage."""
    ef_construction = empty_index.hnsw.efConstruction
    file.write(_TAIL.pack(upper_levels.entry_point, upper_levels.top_level, ef_construction, ef_search, 1))


def write_storage(file: BinaryIO, storage: FaissIndex, n: int, vectors: Iterable[npt.NDArray[np.float32]]) -> None:
    """Write a flat or scalar-quantised storage of `n` vectors, block by block.

    Args:
        file: positioned at the storage.
        storage: a trained index without vectors.
        n: number of vectors.
        vectors: blocks of (m, d) float32, in row order.
    """
    # The head ends before the number of codes, which is 0.
    storage_head = bytearray(_serialize(storage)[: -_ARRAY_LENGTH.size])
    storage_head[8:16] = struct.pack("<q", n)
    file.write(storage_head)
    # The length of flat storage is counted in floats, and that of codes in bytes.
    values_per_vector = int(storage.d) if isinstance(storage, faiss.IndexFlat) else int(storage.sa_code_size())
    file.write(_ARRAY_LENGTH.pack(n * values_per_vector))
    for vector_block in vectors:
        file.write(storage.sa_encode(vector_block).data)


def _serialize(index: FaissIndex) -> bytes:
    index_bytes: npt.NDArray[np.uint8] = faiss.serialize_index(index)
    return index_bytes.tobytes()


@dataclass(frozen=True, slots=True)
class GraphFile:
    """The graph of an HNSW index file, memory-mapped."""

    n: int
    width: int  # slots of a bottom list: 2M
    entry_point: int
    offsets: Rows  # (n + 1,) start of each node's slots in `links`
    links: Links  # links of every node and level, -1 where empty
    tail_offset: int  # offset of the entry point in the file; efSearch is the third number after it

    @classmethod
    def open(cls, path: Path, *, writable: bool = False) -> Self:
        """Map the graph of an index file; with `writable`, links can be changed in place.

        Raises:
            InputError: the file is missing, truncated, or not an HNSW index.
        """
        try:
            with path.open("rb") as file:
                # Then the slots of every node are in `links`.
                check_layout(file, path.stat().st_size)
                file.seek(0)
                return cls._open_mapped(file, path, "r+" if writable else "r")
        except (OSError, ValueError, struct.error) as error:
            raise InputError(f"{path} is not a complete HNSW index: build or fetch it again") from error

    @classmethod
    def _open_mapped(cls, file: BinaryIO, path: Path, mode: Any) -> Self:
        fourcc, _, n, *_ = HEADER.unpack(file.read(HEADER.size))
        if fourcc[:3] != b"IHN":
            raise ValueError(f"{fourcc} is not the fourcc of an HNSW index")
        _skip_array(file, 8)
        (n_levels,) = _ARRAY_LENGTH.unpack(file.read(8))
        level_slots = np.frombuffer(file.read(4 * n_levels), "<i4")
        _skip_array(file, 4)
        offsets = _map_array(file, path, "<i8", "r")
        links = _map_array(file, path, "<i4", mode)
        tail_offset = file.tell()
        entry_point, *_ = _TAIL.unpack(file.read(_TAIL.size))
        if len(offsets) != n + 1 or not 0 <= entry_point < max(1, n):
            raise ValueError("the graph's arrays do not fit each other")
        return cls(n, int(level_slots[1]), entry_point, offsets, links, tail_offset)

    def read_links(self, nodes: Rows | Links) -> Links:
        """Return a copy of the nodes' bottom lists: (m, 2M) int32, -1 where empty.

        Raises:
            InputError: a node is not in the graph, because its number is from another index, or the
                file is damaged.
        """
        if len(unknown_nodes := nodes[(nodes < 0) | (nodes >= self.n)]):
            raise InputError(
                f"node {unknown_nodes[0]} is not in a graph of {self.n:,} nodes: build or fetch the index again"
            )
        return gather_windows(self.links, self.offsets[nodes], self.width)

    def write_links(self, nodes: Rows, links: Links) -> None:
        """Write the nodes' bottom lists, (m, 2M) int32, into the file."""
        windows = view_windows(self.links, self.width)
        windows[self.offsets[nodes]] = np.ascontiguousarray(links, self.links.dtype).view(windows.dtype)[:, 0]


def _skip_array(file: BinaryIO, value_bytes: int) -> None:
    (n_values,) = _ARRAY_LENGTH.unpack(file.read(8))
    file.seek(n_values * value_bytes, 1)


def _map_array(file: BinaryIO, path: Path, dtype: str, mode: Any) -> npt.NDArray[Any]:
    (n_values,) = _ARRAY_LENGTH.unpack(file.read(8))
    offset = file.tell()
    # The subclass `memmap` costs microseconds at each access.
    array: npt.NDArray[Any] = np.asarray(np.memmap(path, dtype, mode, offset, (n_values,)))
    file.seek(offset + n_values * array.dtype.itemsize)
    return array
