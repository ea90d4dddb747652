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
from rag_model.index.files.skeleton import ForeignError, check_skeleton
from rag_model.index.search import open_index

D = 16
VECTORS = np.random.default_rng(3).standard_normal((600, D)).astype(np.float32)
FACTORIES = [
    *("Flat", "HNSW8", "HNSW8_SQ8", "HNSW8_SQfp16"),
    *("IVF8,Flat", "IVF8_HNSW8,Flat", "IVF8,SQ4", "IVF8,SQ6", "IVF8,SQ8", "IVF8,SQfp16", "IVF8,SQbf16"),
    *("IVF8,PQ4x4np", "IVF8,PQ4x6np", "IVF8,RaBitQ", "IVF8,RaBitQ4", "OPQ4,IVF8,PQ4x4np", "OPQ4_8,IVF8,PQ4x4np"),
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
    check_skeleton(io.BytesIO(data), len(data))


@pytest.mark.parametrize("factory", FACTORIES)
def test_what_faiss_writes_is_whole_and_nothing_shorter_or_longer(factory: str) -> None:
    metric = faiss.METRIC_L2 if "SQ8" in factory else faiss.METRIC_INNER_PRODUCT
    empty, data = made(factory, metric)
    check(empty)
    check(data)
    for wrong in (data + b"\0", data[:-1], data[: len(data) // 2], data[:30], b""):
        with pytest.raises(ValueError, match="bytes that make no sense"):
            check(wrong)


@pytest.mark.parametrize("factory", ["LSH", "IDMap,Flat", "HNSW8_PQ4x4np", "IVF8,PQ4x4fs", "ITQ8,LSHt", "PQ4x4np"])
def test_other_kinds_of_faiss_are_named(factory: str) -> None:
    index = faiss.index_factory(D, factory)
    index.train(VECTORS)
    with pytest.raises(ForeignError):
        check(faiss.serialize_index(index).tobytes())
    with pytest.raises(ForeignError, match="metric 2"):
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
def test_no_other_file_is_opened(tmp_path: Path, mmap: bool, inside: bool) -> None:
    index, kept = on_disk(tmp_path / "lists", inside=inside)
    faiss.write_index(index, str(tmp_path / "index.faiss"))
    del kept
    (tmp_path / "lists").write_bytes(b"short")  # to read from it would end the process
    with pytest.raises(InputError, match="which bookwheel cannot search"):
        open_index(tmp_path / "index.faiss", mmap=mmap)


def patched(data: bytes, at: int, layout: str, value: Any) -> bytes:
    size = struct.calcsize(layout)
    return data[:at] + struct.pack(layout, value) + data[at + size :]


def test_a_number_of_lists_is_not_believed(tmp_path: Path) -> None:
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
def test_rows_that_there_are_not_are_damage(
    tmp_path: Path, mmap: bool, factory: str, damage: Callable[[bytes], bytes]
) -> None:
    path = tmp_path / "index.faiss"
    path.write_bytes(damage(made(factory)[1]))
    with pytest.raises(InputError, match="fetch or build it again"):
        open_index(path, mmap=mmap).search(VECTORS[:50], 100)


@pytest.mark.parametrize(("factory", "name"), [("HNSW8", "efSearch"), ("IVF8,Flat", "nprobe")])
def test_a_search_asks_for_no_more_than_there_is(tmp_path: Path, factory: str, name: str) -> None:
    """`efSearch` of 500,000,000 took four gigabytes a search."""
    (tmp_path / "index.faiss").write_bytes(made(factory)[1])
    whole = open_index(tmp_path / "index.faiss", defaults={name: 600})
    far = open_index(tmp_path / "index.faiss", defaults={name: 500_000_000})
    assert far.search(VECTORS[:5], 9)[1].tolist() == whole.search(VECTORS[:5], 9)[1].tolist()
    assert far.search(VECTORS[:5], 9, **{name: 2_000_000_000})[1].tolist() == whole.search(VECTORS[:5], 9)[1].tolist()
