"""faiss opens only files whose every header and count makes sense: what bookwheel builds, whole, and nothing else."""

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


def made(factory: str, metric: int = faiss.METRIC_INNER_PRODUCT) -> tuple[bytes, bytes]:
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
    empty, data = made(factory, metric)
    check(empty)
    check(data)
    for wrong in (data + b"\0", data[:-1], data[: len(data) // 2], data[:30], b""):
        with pytest.raises(ValueError, match="invalid bytes"):
            check(wrong)


@pytest.mark.parametrize("factory", ["LSH", "IDMap,Flat", "HNSW8_PQ4x4np", "IVF8,PQ4x4fs", "ITQ8,LSHt", "PQ4x4np"])
def test_unsupported_faiss_index_is_named(factory: str) -> None:
    index = faiss.index_factory(D, factory)
    index.train(VECTORS)
    with pytest.raises(UnsupportedIndexError):
        check(faiss.serialize_index(index).tobytes())
    with pytest.raises(UnsupportedIndexError, match="metric 2"):
        check(made("Flat", faiss.METRIC_L1)[1])


def on_disk(named: Path, *, inside: bool = False) -> Any:
    """Return an index whose lists, or those of its quantizer, are in another file."""
    index = faiss.IndexIVFFlat(faiss.IndexFlatIP(D), D, 8, faiss.METRIC_INNER_PRODUCT)
    index.train(VECTORS)
    lists = faiss.OnDiskInvertedLists(8, index.code_size, str(named))
    index.replace_invlists(lists)
    index.add(VECTORS[:8])
    if not inside:
        return index, lists
    outer = faiss.IndexIVFFlat(index, D, 8, faiss.METRIC_INNER_PRODUCT)
    outer.is_trained = True
    return outer, (index, lists)


@pytest.mark.parametrize("mmap", [True, False])
@pytest.mark.parametrize("inside", [True, False])
def test_on_disk_lists_are_refused(tmp_path: Path, mmap: bool, inside: bool) -> None:
    index, kept = on_disk(tmp_path / "lists", inside=inside)
    faiss.write_index(index, str(tmp_path / "index.faiss"))
    del kept
    (tmp_path / "lists").write_bytes(b"short")  # to read from it would end the process
    with pytest.raises(InputError, match="which bookwheel cannot search"):
        open_index(tmp_path / "index.faiss", mmap=mmap)


def patched(data: bytes, at: int, layout: str, value: Any) -> bytes:
    size = struct.calcsize(layout)
    return data[:at] + struct.pack(layout, value) + data[at + size :]


def test_false_number_of_lists_is_refused(tmp_path: Path) -> None:
    """1.2 KB that claim 60,000,000 lists took faiss ten gigabytes."""
    data = made("IVF8,Flat")[0]
    at_lists, at_array = 37, data.index(b"ilar") + 4
    assert struct.unpack_from("<Q", data, at_lists) == struct.unpack_from("<Q", data, at_array) == (8,)
    path = tmp_path / "index.faiss"
    path.write_bytes(patched(patched(data, at_lists, "<Q", 60_000_000), at_array, "<Q", 60_000_000))
    with pytest.raises(InputError, match="not a complete faiss index"):
        open_index(path)


def in_lists(data: bytes) -> bytes:
    at = len(data) - 8  # the last id of the last list
    return patched(data, at, "<q", 10**9)


def in_graph(data: bytes) -> bytes:
    """Point the first link to a node that there is not."""
    at = 37
    for size in (8, 4, 4, 8):  # probabilities, slots, levels, offsets
        at += 8 + size * struct.unpack_from("<Q", data, at)[0]
    return patched(data, at + 8, "<i", 10**9)


@pytest.mark.parametrize(("factory", "damage"), [("IVF8,Flat", in_lists), ("HNSW8", in_graph)])
@pytest.mark.parametrize("mmap", [True, False])
def test_ids_out_of_range_are_damage(
    tmp_path: Path, mmap: bool, factory: str, damage: Callable[[bytes], bytes]
) -> None:
    path = tmp_path / "index.faiss"
    path.write_bytes(damage(made(factory)[1]))
    with pytest.raises(InputError, match="fetch or build it again"):
        open_index(path, mmap=mmap).search(VECTORS[:50], 100)


@pytest.mark.parametrize(("factory", "name"), [("HNSW8", "efSearch"), ("IVF8,Flat", "nprobe")])
def test_search_parameters_are_clipped(tmp_path: Path, factory: str, name: str) -> None:
    """`efSearch` of 500,000,000 took four gigabytes a search."""
    (tmp_path / "index.faiss").write_bytes(made(factory)[1])
    whole = open_index(tmp_path / "index.faiss", defaults={name: 600})
    far = open_index(tmp_path / "index.faiss", defaults={name: 500_000_000})
    assert far.search(VECTORS[:5], 9)[1].tolist() == whole.search(VECTORS[:5], 9)[1].tolist()
    assert far.search(VECTORS[:5], 9, **{name: 2_000_000_000})[1].tolist() == whole.search(VECTORS[:5], 9)[1].tolist()


class Graph:
    """The arrays of an HNSW file, as views that change its bytes."""

    def __init__(self, data: bytes) -> None:
        self.data, at = bytearray(data), struct.calcsize("<4siqqq?i")
        found = []
        for dtype in ("<f8", "<i4", "<i4", "<i8", "<i4"):
            (count,) = struct.unpack_from("<Q", self.data, at)
            found.append(np.frombuffer(self.data, dtype, count, at + 8))
            at += 8 + found[-1].nbytes
        _, self.slots, self.levels, self.offsets, self.links = found
        self.tail = np.frombuffer(self.data, "<i4", 2, at)  # entry point, top level

    def above(self, level: int) -> np.ndarray[Any, Any]:
        return np.flatnonzero(self.levels > level)

    def point_up(self) -> None:
        """Let the last node that is above the bottom name, there, one that is not."""
        node = self.above(1)[-1]
        self.links[self.offsets[node] + self.slots[1]] = np.flatnonzero(self.levels == 1)[0]


@pytest.mark.parametrize("mmap", [True, False])
@pytest.mark.parametrize("factory", ["HNSW8", "HNSW8_SQ8", "IVF8_HNSW2,Flat"])
def test_link_to_a_node_below_its_level_is_refused(tmp_path: Path, factory: str, mmap: bool) -> None:
    """Only a question that comes there would read behind the node's lists: no trial with a few finds it."""
    _, data = made(factory)
    start = data.index(b"IHNf" if "IVF" in factory else data[:4])
    graph = Graph(data[start:])
    graph.point_up()
    path = tmp_path / "index.faiss"
    path.write_bytes(data[:start] + bytes(graph.data))
    with pytest.raises(InputError, match="not a complete faiss index"):
        open_index(path, mmap=mmap)


HOSTILE: dict[str, Callable[[Graph], None]] = {
    "a top level above the entry point": lambda graph: graph.tail.__setitem__(1, graph.levels.max()),
    "an entry point below the top level": lambda graph: graph.tail.__setitem__(0, np.argmin(graph.levels)),
    "a level that there is not": lambda graph: graph.levels.__setitem__(3, 1_000),
    "no level": lambda graph: graph.levels.__setitem__(3, 0),
    "a level more than slots": lambda graph: graph.levels.__setitem__(np.argmin(graph.levels), 2),
    "lists that begin elsewhere": lambda graph: graph.offsets.__setitem__(slice(100, None), 1 << 40),
    "lists that go back": lambda graph: graph.offsets.__setitem__(5, 0),
    "lists behind the end": lambda graph: graph.offsets.__setitem__(-1, len(graph.links) + 16),
    "slots without end": lambda graph: graph.slots.__setitem__(slice(1, None), 2**31 - 1),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_false_levels_are_refused(tmp_path: Path, name: str) -> None:
    graph = Graph(made("HNSW8")[1])
    HOSTILE[name](graph)
    path = tmp_path / "index.faiss"
    path.write_bytes(graph.data)
    for opened in (open_index, GraphFile.open):
        with pytest.raises(InputError, match="is not a complete"):
            opened(path)


def test_node_outside_the_graph_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "index.faiss"
    path.write_bytes(made("HNSW8")[1])
    graph = GraphFile.open(path)
    for node in (600, -1):
        with pytest.raises(InputError, match=f"node {node} is not in a graph of 600 nodes"):
            graph.read_links(np.array([0, node]))
