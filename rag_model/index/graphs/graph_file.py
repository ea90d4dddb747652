"""faiss's file layout of an HNSW index: written as a stream, and read without loading it.

    fourcc, d, n, …, metric                     the index's header
    probabilities, slots a level, levels, offsets, links    the graph: each array is a count and its values
    entry point, top level, efConstruction, efSearch, 1
    the storage: a separate index, whose codes come last

Source: `faiss/impl/index_write.cpp`, `write_HNSW`. A test checks that it still holds: faiss reads the file and writes
the same bytes.
"""

import struct
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Self

import numpy as np
import numpy.typing as npt

from rag_model.errors import InputError
from rag_model.index.files import engine
from rag_model.index.files.engine import HEADER, FaissIndex, Rows, faiss
from rag_model.index.files.skeleton import check_skeleton
from rag_model.index.graphs.graph import Links, Upper, blocks, slots_of

_TAIL = struct.Struct("<iiiii")  # entry point, top level, efConstruction, efSearch, one
_COUNT = struct.Struct("<Q")


def write_head(file: BinaryIO, empty: FaissIndex, levels: Links) -> None:
    """Write everything before the links.

    Args:
        file: positioned at its beginning.
        empty: an HNSW index without vectors, with trained storage.
        levels: (n,) int32, from 1.
    """
    links, n = int(empty.hnsw.nb_neighbors(1)), len(levels)
    fourcc, d, _, unused, too, trained, metric = HEADER.unpack(_serialised(empty)[: HEADER.size])
    file.write(HEADER.pack(fourcc, d, n, unused, too, trained, metric))
    for values in (engine.array_of(empty.hnsw.assign_probas), engine.array_of(empty.hnsw.cum_nneighbor_per_level)):
        file.write(_COUNT.pack(len(values)) + values.tobytes())
    file.write(_COUNT.pack(n) + levels.tobytes())
    file.write(_COUNT.pack(n + 1) + bytes(8))
    total = 0
    for first, last in blocks(n):  # block by block: all offsets would take 8 bytes per node
        ends = total + np.cumsum(slots_of(levels[first:last], links))
        file.write(ends.astype("<u8").tobytes())
        total = int(ends[-1])
    file.write(_COUNT.pack(total))


def write_tail(file: BinaryIO, empty: FaissIndex, upper: Upper, ef_search: int) -> None:
    """Write the part between the links and the storage."""
    file.write(_TAIL.pack(upper.entry, upper.top, empty.hnsw.efConstruction, ef_search, 1))


def write_storage(file: BinaryIO, storage: FaissIndex, n: int, vectors: Iterable[npt.NDArray[np.float32]]) -> None:
    """Write a flat or scalar-quantised storage over `n` vectors, block by block.

    Args:
        file: positioned at the storage.
        storage: trained, without vectors.
        n: vectors in all.
        vectors: blocks of (m, d) float32, in row order.
    """
    head = bytearray(_serialised(storage)[: -_COUNT.size])  # without the count of codes, which is 0
    head[8:16] = struct.pack("<q", n)
    file.write(head)
    values = int(storage.d) if isinstance(storage, faiss.IndexFlat) else int(storage.sa_code_size())  # floats, bytes
    file.write(_COUNT.pack(n * values))
    for block in vectors:
        file.write(storage.sa_encode(block).data)


def _serialised(index: FaissIndex) -> bytes:
    data: npt.NDArray[np.uint8] = faiss.serialize_index(index)
    return data.tobytes()


@dataclass(frozen=True, slots=True)
class GraphFile:
    """The graph of an HNSW index file, memory-mapped."""

    n: int
    width: int  # slots of a bottom list: 2M
    entry: int
    offsets: Rows  # (n + 1,) start of each node's slots in `links`
    links: Links  # of every node and level, -1 where empty
    tail: int  # offset of the entry point in the file; efSearch is three numbers after it

    @classmethod
    def open(cls, path: Path, *, writable: bool = False) -> Self:
        """Map the graph of an index file; `writable` lets links be changed in place.

        Raises:
            InputError: it is missing, truncated, or not an HNSW index.
        """
        try:
            with path.open("rb") as file:
                check_skeleton(file, path.stat().st_size)  # so that the slots of each node are in `links`
                file.seek(0)
                return cls._mapped(file, path, "r+" if writable else "r")
        except (OSError, ValueError, struct.error) as broken:
            raise InputError(f"{path} is not a complete HNSW index: build or fetch it again") from broken

    @classmethod
    def _mapped(cls, file: BinaryIO, path: Path, mode: Any) -> Self:
        fourcc, _, n, *_ = HEADER.unpack(file.read(HEADER.size))
        if fourcc[:3] != b"IHN":
            raise ValueError(f"{fourcc} is not the fourcc of an HNSW index")
        _skip(file, 8)
        (count,) = _COUNT.unpack(file.read(8))
        slots = np.frombuffer(file.read(4 * count), "<i4")
        _skip(file, 4)
        offsets = _map(file, path, "<i8", "r")
        links = _map(file, path, "<i4", mode)
        tail = file.tell()
        entry, *_ = _TAIL.unpack(file.read(_TAIL.size))
        if len(offsets) != n + 1 or not 0 <= entry < max(1, n):
            raise ValueError("the graph's arrays do not fit each other")
        return cls(n, int(slots[1]), entry, offsets, links, tail)

    def bottom(self, nodes: Rows | Links) -> Links:
        """Return a copy of the nodes' bottom lists: (m, 2M) int32, -1 where empty.

        Raises:
            InputError: a node lies outside the graph, as where another index or a link of a damaged file names it.
        """
        if len(wrong := nodes[(nodes < 0) | (nodes >= self.n)]):
            raise InputError(f"node {wrong[0]} is not in a graph of {self.n:,} nodes: build or fetch the index again")
        links: Links = self.links[self._slots(nodes)]
        return links

    def set_bottom(self, nodes: Rows, links: Links) -> None:
        """Write the nodes' bottom lists, (m, 2M) int32, into the file."""
        self.links[self._slots(nodes)] = links

    def _slots(self, nodes: Rows | Links) -> Rows:
        slots: Rows = self.offsets[nodes][:, None] + np.arange(self.width)  # (m, 1) + (2M,) -> (m, 2M)
        return slots


def _skip(file: BinaryIO, size: int) -> None:
    (count,) = _COUNT.unpack(file.read(8))
    file.seek(count * size, 1)


def _map(file: BinaryIO, path: Path, dtype: str, mode: Any) -> npt.NDArray[Any]:
    (count,) = _COUNT.unpack(file.read(8))
    offset = file.tell()
    mapped: npt.NDArray[Any] = np.memmap(path, dtype, mode, offset, (count,))
    file.seek(offset + count * mapped.dtype.itemsize)
    return mapped
