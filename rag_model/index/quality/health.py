"""Inspect a finished index file: links and reachability of graphs, list sizes, quantisation error.

They explain the recall of an index. Everything is read from the memory-mapped file, so any file
that faiss wrote can be inspected, with a few bytes of memory per node.
"""

from pathlib import Path

import numpy as np
import numpy.typing as npt

from rag_model.errors import InputError
from rag_model.index.files.engine import FaissIndex, Rows, Vectors, faiss
from rag_model.index.files.vectors import VectorRows
from rag_model.index.graphs.graph import BLOCK
from rag_model.index.graphs.graph_file import GraphFile
from rag_model.index.graphs.reach import ReachabilityTree
from rag_model.index.quality.fit import relative_error
from rag_model.index.quality.results import (
    GraphStats,
    IndexHealth,
    ListStats,
)
from rag_model.index.search import open_index

_SAMPLE_ROWS = 1_000  # decoded rows: the mean error is then exact to a few percent


def compute_graph_stats(path: Path) -> GraphStats:
    """Compute statistics of the graph in an HNSW file; holds 9 bytes per node.

    Raises:
        InputError: the file is not an HNSW index.
    """
    graph = GraphFile.open(path)
    degrees = np.zeros(graph.width + 1, np.int64)
    linked = np.zeros(graph.n, bool)
    for first in range(0, graph.n, BLOCK):
        nodes = np.arange(first, min(first + BLOCK, graph.n))
        links = graph.bottom(nodes)
        # (m, 2M) -> (m,) -> (2M + 1,)
        degrees += np.bincount((links >= 0).sum(axis=1), minlength=len(degrees))
        linked[links[(links >= 0) & (links != nodes[:, None])]] = True
    unreachable = len(ReachabilityTree(graph).find_unreachable()) if graph.n else 0
    return GraphStats(tuple(degrees.tolist()), int(graph.n - linked.sum()), unreachable)


def compute_list_stats(index: FaissIndex) -> ListStats:
    """Compute statistics of the inverted lists of an open index; holds 8 bytes per list."""
    sizes = _list_sizes(faiss.extract_index_ivf(index))
    buckets = np.bincount([int(size).bit_length() for size in sizes])
    imbalance = len(sizes) * float(np.square(sizes, dtype=np.float64).sum()) / max(1, int(sizes.sum())) ** 2
    return ListStats(len(sizes), tuple(buckets.tolist()), int(sizes.max()), imbalance)


def measure_quantization_error(index: FaissIndex, vectors: VectorRows, seed: int = 0) -> float | None:
    """Return the mean of |x - decode(code of x)|^2 / |x|^2 over a sample of nonzero rows x.

    It is 0 for vectors stored unquantised, and None for codes that do not decode to vectors:
    RaBitQ's only estimate inner products.

    Args:
        index: an open index, possibly mapped; its ids are rows of `vectors`.
        vectors: the vectors that the index was built from.
        seed: the seed of the sample of 1,000 rows.

    Raises:
        InputError: an id is not a row of `vectors`, or the vectors hold a NaN or an infinity.
    """
    count = int(index.ntotal)
    if count == 0:
        return None
    lists = faiss.try_extract_index_ivf(index)
    positions = np.sort(
        np.random.default_rng(seed).choice(count, min(_SAMPLE_ROWS, count), replace=False, shuffle=False)
    )
    if lists is None:
        rows, decoded = positions, index.reconstruct_batch(positions)
    elif isinstance(faiss.downcast_index(lists), faiss.IndexIVFRaBitQ | faiss.IndexIVFRaBitQFastScan):
        return None
    else:
        rows, decoded = _decode_at(index, lists, positions)
    if int(rows.max()) >= vectors.n:
        raise InputError(
            f"the index holds id {rows.max()} and there are {vectors.n} vectors: give those it was built from"
        )
    order = np.argsort(rows)
    true = vectors.read_rows(rows[order])
    return relative_error(true, decoded[order])  # both (m, d)


def _decode_at(index: FaissIndex, lists: FaissIndex, positions: Rows) -> tuple[Rows, Vectors]:
    """Return the ids and the decoded vectors at `positions`, (m,), in the concatenated lists."""
    sizes = _list_sizes(lists)
    ends = np.cumsum(sizes)
    numbers = np.searchsorted(ends, positions, side="right")
    offsets = positions - (ends - sizes)[numbers]
    decoded = np.empty((len(positions), int(lists.d)), np.float32)
    rows = np.empty(len(positions), np.int64)
    for row_number, (number, offset) in enumerate(zip(numbers.tolist(), offsets.tolist(), strict=True)):
        rows[row_number] = lists.invlists.get_single_id(number, offset)
        lists.reconstruct_from_offset(number, offset, faiss.swig_ptr(decoded[row_number]))
    return rows, _reverse_transforms(index, decoded)


def _reverse_transforms(index: FaissIndex, decoded: Vectors) -> Vectors:
    index = faiss.downcast_index(index.base_index) if isinstance(index, faiss.IndexRefine) else index
    if isinstance(index, faiss.IndexPreTransform):
        for step in reversed(range(index.chain.size())):
            decoded = index.chain.at(step).reverse_transform(decoded)
    return decoded


def _list_sizes(lists: FaissIndex) -> npt.NDArray[np.int64]:
    return np.array([lists.invlists.list_size(number) for number in range(lists.nlist)], np.int64)


def inspect_index(path: Path, vectors: VectorRows | None = None) -> IndexHealth:
    """Inspect any faiss file of a graph, of inverted lists or of plain vectors, memory-mapped.

    Args:
        path: the index file.
        vectors: the vectors that it was built from; needed for the quantisation error.

    Raises:
        InputError: the file is damaged or of another type, or was not built from `vectors`.
    """
    file = open_index(path)
    kind, n = file.structure, file.n
    if vectors is not None and (vectors.n, vectors.dim) != (n, file.dim):
        raise InputError(f"{path} holds {n} x {file.dim} vectors, not {vectors.n} x {vectors.dim}: build it again")
    error = None if vectors is None else measure_quantization_error(file.faiss_index, vectors)
    lists = compute_list_stats(file.faiss_index) if kind == "ivf" else None
    del file  # an open graph holds 12 bytes per node, and its statistics are read from the file
    return IndexHealth(kind, n, compute_graph_stats(path) if kind == "hnsw" else None, lists, error)
