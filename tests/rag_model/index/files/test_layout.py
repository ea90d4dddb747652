"""faiss opens only complete files of supported indexes, whose headers and counts agree."""

import io
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rag_model.errors import InputError
from rag_model.index.files.engine import faiss
from rag_model.index.files.layout import UnsupportedIndexError, check_layout
from rag_model.index.graphs.graph_file import GraphFile
from rag_model.index.search import open_index

D = 16
VECTORS = np.random.default_rng(3).standard_normal((600, D)).astype(np.float32)
FACTORIES = [
    *("Flat", "HNSW8", "HNSW8_SQ4", "HNSW8_SQ8", "HNSW8_SQfp16"),
    *("IVF8,Flat", "IVF8_HNSW8,Flat", "IVF8,SQ4", "IVF8,SQ6", "IVF8,SQ8", "IVF8,SQfp16", "IVF8,SQbf16"),
    *("IVF8,PQ4x4np", "IVF8,PQ4x6np", "IVF8,RaBitQ", "RR8,IVF8,RaBitQ4", "OPQ4,IVF8,PQ4x4np", "OPQ4_8,IVF8,PQ4x4np"),
    *("PCA8,IVF8,SQ8", "PCAR8,IVF8,SQ8", "IVF8,PQ4x4np,Refine(Flat)", "PCA8,IVF8,SQ8,Refine(SQfp16)"),
]


def build_bytes(factory: str, metric: int = faiss.METRIC_INNER_PRODUCT) -> tuple[bytes, bytes]:
    """Return the bytes of an index, without vectors and with them."""
    index = faiss.index_factory(D, factory, metric)
    index.train(VECTORS)
    empty = faiss.serialize_index(index).tobytes()
    index.add(VECTORS)
    return empty, faiss.serialize_index(index).tobytes()


def check(data: bytes) -> None:
    check_layout(io.BytesIO(data), len(data))


@pytest.mark.parametrize("factory", FACTORIES)
def test_only_the_exact_length_of_a_faiss_file_is_accepted(factory: str) -> None:
    metric = faiss.METRIC_L2 if "SQ8" in factory else faiss.METRIC_INNER_PRODUCT
    empty, data = build_bytes(factory, metric)
    check(empty)
    check(data)
    for invalid_data in (data + b"\0", data[:-1], data[: len(data) // 2], data[:30], b""):
        with pytest.raises(ValueError, match="invalid bytes"):
            check(invalid_data)


@pytest.mark.parametrize("factory", ["LSH", "IDMap,Flat", "HNSW8_PQ4x4np", "IVF8,PQ4x4fs", "ITQ8,LSHt", "PQ4x4np"])
def test_unsupported_faiss_index_is_named(factory: str) -> None:
    index = faiss.index_factory(D, factory)
    index.train(VECTORS)
    with pytest.raises(UnsupportedIndexError):
        check(faiss.serialize_index(index).tobytes())
    with pytest.raises(UnsupportedIndexError, match="metric 2"):
        check(build_bytes("Flat", faiss.METRIC_L1)[1])


def build_on_disk_index(lists_path: Path, *, in_quantizer: bool = False) -> Any:
    """Return an index whose lists, or those of its quantizer, are in another file."""
    index = faiss.IndexIVFFlat(faiss.IndexFlatIP(D), D, 8, faiss.METRIC_INNER_PRODUCT)
    index.train(VECTORS)
    lists = faiss.OnDiskInvertedLists(8, index.code_size, str(lists_path))
    index.replace_invlists(lists)
    index.add(VECTORS[:8])
    if not in_quantizer:
        return index, lists
    outer = faiss.IndexIVFFlat(index, D, 8, faiss.METRIC_INNER_PRODUCT)
    outer.is_trained = True
    return outer, (index, lists)


@pytest.mark.parametrize("mmap", [True, False])
@pytest.mark.parametrize("in_quantizer", [True, False])
def test_on_disk_lists_are_refused(tmp_path: Path, mmap: bool, in_quantizer: bool) -> None:
    index, references = build_on_disk_index(tmp_path / "lists", in_quantizer=in_quantizer)
    faiss.write_index(index, str(tmp_path / "index.faiss"))
    del references
    (tmp_path / "lists").write_bytes(b"short")  # reading from it would end the process
    with pytest.raises(InputError, match="which bookwheel cannot search"):
        open_index(tmp_path / "index.faiss", mmap=mmap)


def patch_bytes(data: bytes, offset: int, layout: str, value: Any) -> bytes:
    size = struct.calcsize(layout)
    return data[:offset] + struct.pack(layout, value) + data[offset + size :]


def test_false_number_of_lists_is_refused(tmp_path: Path) -> None:
    """For 1.2 KB that claim 60,000,000 lists, faiss allocated ten gigabytes."""
    data = build_bytes("IVF8,Flat")[0]
    lists_offset, array_offset = 37, data.index(b"ilar") + 4
    assert struct.unpack_from("<Q", data, lists_offset) == struct.unpack_from("<Q", data, array_offset) == (8,)
    path = tmp_path / "index.faiss"
    path.write_bytes(patch_bytes(patch_bytes(data, lists_offset, "<Q", 60_000_000), array_offset, "<Q", 60_000_000))
    with pytest.raises(InputError, match="not a complete faiss index"):
        open_index(path)


def damage_last_id(data: bytes) -> bytes:
    offset = len(data) - 8  # the last id of the last list
    return patch_bytes(data, offset, "<q", 10**9)


def damage_first_link(data: bytes) -> bytes:
    """Point the first link to a node that does not exist."""
    offset = 37
    for size in (8, 4, 4, 8):  # probabilities, slots, levels, offsets
        offset += 8 + size * struct.unpack_from("<Q", data, offset)[0]
    return patch_bytes(data, offset + 8, "<i", 10**9)


@pytest.mark.parametrize(("factory", "damage"), [("IVF8,Flat", damage_last_id), ("HNSW8", damage_first_link)])
@pytest.mark.parametrize("mmap", [True, False])
def test_ids_out_of_range_are_damage(
    tmp_path: Path, mmap: bool, factory: str, damage: Callable[[bytes], bytes]
) -> None:
    path = tmp_path / "index.faiss"
    path.write_bytes(damage(build_bytes(factory)[1]))
    with pytest.raises(InputError, match="fetch or build it again"):
        open_index(path, mmap=mmap).search(VECTORS[:50], 100)


@pytest.mark.parametrize(("factory", "name"), [("HNSW8", "efSearch"), ("IVF8,Flat", "nprobe")])
def test_search_parameters_are_clipped(tmp_path: Path, factory: str, name: str) -> None:
    """With `efSearch` 500,000,000 a search took four gigabytes."""
    (tmp_path / "index.faiss").write_bytes(build_bytes(factory)[1])
    expected = open_index(tmp_path / "index.faiss", defaults={name: 600}).search(VECTORS[:5], 9)[1].tolist()
    index = open_index(tmp_path / "index.faiss", defaults={name: 500_000_000})
    assert index.search(VECTORS[:5], 9)[1].tolist() == expected
    assert index.search(VECTORS[:5], 9, **{name: 2_000_000_000})[1].tolist() == expected


class Graph:
    """The arrays of an HNSW file, as views of its bytes."""

    def __init__(self, data: bytes) -> None:
        self.data, offset = bytearray(data), struct.calcsize("<4siqqq?i")
        arrays = []
        for dtype in ("<f8", "<i4", "<i4", "<i8", "<i4"):
            (count,) = struct.unpack_from("<Q", self.data, offset)
            arrays.append(np.frombuffer(self.data, dtype, count, offset + 8))
            offset += 8 + arrays[-1].nbytes
        _, self.slots, self.levels, self.offsets, self.links = arrays
        self.tail = np.frombuffer(self.data, "<i4", 2, offset)  # entry point, top level

    def find_nodes_above(self, level: int) -> np.ndarray[Any, Any]:
        return np.flatnonzero(self.levels > level)

    def link_to_lower_node(self) -> None:
        """Link the last node of level 1, on that level, to a node that is only on the bottom level."""
        node = self.find_nodes_above(1)[-1]
        self.links[self.offsets[node] + self.slots[1]] = np.flatnonzero(self.levels == 1)[0]


@pytest.mark.parametrize("mmap", [True, False])
@pytest.mark.parametrize("factory", ["HNSW8", "HNSW8_SQ8", "IVF8_HNSW2,Flat"])
def test_link_to_a_node_below_its_level_is_refused(tmp_path: Path, factory: str, mmap: bool) -> None:
    """Only a query that reaches that node would read past its lists, so a few trial queries do not notice it."""
    _, data = build_bytes(factory)
    start = data.index(b"IHNf" if "IVF" in factory else data[:4])
    graph = Graph(data[start:])
    graph.link_to_lower_node()
    path = tmp_path / "index.faiss"
    path.write_bytes(data[:start] + bytes(graph.data))
    with pytest.raises(InputError, match="not a complete faiss index"):
        open_index(path, mmap=mmap)


INCONSISTENT_GRAPHS: dict[str, Callable[[Graph], None]] = {
    "a top level above the entry point": lambda graph: graph.tail.__setitem__(1, graph.levels.max()),
    "an entry point below the top level": lambda graph: graph.tail.__setitem__(0, np.argmin(graph.levels)),
    "a level that does not exist": lambda graph: graph.levels.__setitem__(3, 1_000),
    "no level": lambda graph: graph.levels.__setitem__(3, 0),
    "one level more than slots": lambda graph: graph.levels.__setitem__(np.argmin(graph.levels), 2),
    "offsets far beyond the links": lambda graph: graph.offsets.__setitem__(slice(100, None), 1 << 40),
    "descending offsets": lambda graph: graph.offsets.__setitem__(5, 0),
    "a last offset beyond the links": lambda graph: graph.offsets.__setitem__(-1, len(graph.links) + 16),
    "the largest number of slots": lambda graph: graph.slots.__setitem__(slice(1, None), 2**31 - 1),
}


@pytest.mark.parametrize("name", INCONSISTENT_GRAPHS)
def test_inconsistent_graph_is_refused(tmp_path: Path, name: str) -> None:
    graph = Graph(build_bytes("HNSW8")[1])
    INCONSISTENT_GRAPHS[name](graph)
    path = tmp_path / "index.faiss"
    path.write_bytes(graph.data)
    for open_file in (open_index, GraphFile.open):
        with pytest.raises(InputError, match="is not a complete"):
            open_file(path)


def test_node_outside_the_graph_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "index.faiss"
    path.write_bytes(build_bytes("HNSW8")[1])
    graph = GraphFile.open(path)
    for node in (600, -1):
        with pytest.raises(InputError, match=f"node {node} is not in a graph of 600 nodes"):
            graph.read_links(np.array([0, node]))
