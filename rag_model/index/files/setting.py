"""Where an index file keeps its search parameters, so that one can be changed without rewriting the file.

efSearch follows the graph's arrays, nprobe is in the header of the lists, and the refinement factor ends
the file. Source: `faiss/impl/index_write.cpp`.
"""

import mmap
import struct
from pathlib import Path

from rag_model.errors import InputError
from rag_model.index.files.engine import UNUSED, FaissIndex, faiss
from rag_model.index.graphs.graph_file import GraphFile

_LISTS = struct.Struct("<iqqq?iQ")  # d, n, two unused, trained, metric, lists: the bytes before nprobe


def write_setting(path: Path, index: FaissIndex, name: str, value: int) -> None:
    """Write one search parameter of an index into its file.

    Args:
        path: the file.
        index: the index in it, opened.
        name: efSearch of a graph; nprobe of lists; refine of lists with a refinement.
        value: at least 1.

    Raises:
        InputError: the file has an unknown layout.
    """
    packing = {"efSearch": "<i", "nprobe": "<Q", "refine": "<f"}[name]
    size = struct.calcsize(packing)
    with path.open("r+b") as file, mmap.mmap(file.fileno(), 0) as data:
        offset = _place(path, data, index, name)
        if offset is None or struct.unpack(packing, data[offset : offset + size])[0] != _value(index, name):
            raise InputError(f"{path} has an unknown layout: {name} cannot be set in it, so build it again")
        data[offset : offset + size] = struct.pack(packing, value)
        data.flush()


def _value(index: FaissIndex, name: str) -> float:
    if name == "efSearch":
        return int(index.hnsw.efSearch)
    return int(faiss.extract_index_ivf(index).nprobe) if name == "nprobe" else float(index.k_factor)


def _place(path: Path, data: mmap.mmap, index: FaissIndex, name: str) -> int | None:
    """Return the offset of a parameter in the file; None if it is not found."""
    if name == "efSearch":
        return GraphFile.open(path).tail + 12  # after the entry point, the top level and efConstruction
    return _nprobe(data, index) if name == "nprobe" else len(data) - struct.calcsize("<f")


def _nprobe(data: mmap.mmap, index: FaissIndex) -> int | None:
    """Search for the header of the lists: the transform before it has many forms."""
    lists = faiss.extract_index_ivf(index)
    head = _LISTS.pack(lists.d, lists.ntotal, UNUSED, UNUSED, lists.is_trained, lists.metric_type, lists.nlist)
    found = data.find(head)
    return None if found < 0 else found + len(head)
