"""Statistics of a finished index file: graph links, list sizes, quantisation error.

Everything is read from the memory-mapped file, so any file that faiss wrote can be examined, and memory is
a few bytes per node.
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from rag_model.errors import InputError
from rag_model.index.files.engine import FaissIndex, Rows, Vectors, faiss
from rag_model.index.files.vectors import VectorFiles
from rag_model.index.graphs.graph import BLOCK
from rag_model.index.graphs.graph_file import GraphFile
from rag_model.index.graphs.reach import Reach
from rag_model.index.quality.losses import relative_error

_SAMPLE = 1_000  # rows decoded: gives the mean error to within a few percent


@dataclass(frozen=True, slots=True)
class GraphAnatomy:
    """The bottom level of a graph, which holds every node."""

    degrees: tuple[int, ...]  # nodes with 0, 1, … 2M links
    unlinked: int  # nodes to which no other node links
    unreachable: int  # nodes that no walk from the entry point reaches: passages that no query finds

    @property
    def degree(self) -> float:
        """The mean number of links of a node."""
        nodes = sum(self.degrees)
        return sum(links * count for links, count in enumerate(self.degrees)) / nodes if nodes else 0.0


@dataclass(frozen=True, slots=True)
class ListAnatomy:
    """How evenly the vectors are spread over the inverted lists."""

    lists: int
    sizes: tuple[int, ...]  # lists of size 0, 1, 2-3, 4-7, …: bucket i > 0 holds [2^(i-1), 2^i)
    largest: int
    imbalance: float  # L sum(size^2) / n^2: 1 if all L lists are equal; a search reads this factor more


def graph_anatomy(path: Path) -> GraphAnatomy:
    """Examine the graph of an HNSW file; holds nine bytes per node.

    Raises:
        InputError: the file is not an HNSW index.
    """
    graph = GraphFile.open(path)
    degrees = np.zeros(graph.width + 1, np.int64)
    linked = np.zeros(graph.n, bool)
    for first in range(0, graph.n, BLOCK):
        nodes = np.arange(first, min(first + BLOCK, graph.n))
        links = graph.bottom(nodes)
        degrees += np.bincount((links >= 0).sum(axis=1), minlength=len(degrees))  # (m, 2M) -> (m,) -> (2M + 1,)
        linked[links[(links >= 0) & (links != nodes[:, None])]] = True
    unreachable = len(Reach(graph).missing()) if graph.n else 0
    return GraphAnatomy(tuple(degrees.tolist()), int(graph.n - linked.sum()), unreachable)


def list_anatomy(index: FaissIndex) -> ListAnatomy:
    """Examine the inverted lists of an open index; holds eight bytes per list."""
    sizes = _sizes(faiss.extract_index_ivf(index))
    buckets = np.bincount([int(size).bit_length() for size in sizes])
    imbalance = len(sizes) * float(np.square(sizes, dtype=np.float64).sum()) / max(1, int(sizes.sum())) ** 2
    return ListAnatomy(len(sizes), tuple(buckets.tolist()), int(sizes.max()), imbalance)


def quantization_error(index: FaissIndex, vectors: VectorFiles, seed: int = 0) -> float | None:
    """Return the mean of |x - decode(code of x)|^2 / |x|^2 over a sample of rows: 0 if vectors are stored unquantised.

    Rows of zeros are left out. None if codes do not decode to vectors: RaBitQ's only estimate inner products.

    Args:
        index: open, possibly mapped; its ids are row numbers of `vectors`.
        vectors: those that the index was built from.
        seed: of the sample, a thousand rows.

    Raises:
        InputError: an id is not a row of `vectors`, or the vectors hold a NaN or an infinity.
    """
    count = int(index.ntotal)
    if count == 0:
        return None
    lists = faiss.try_extract_index_ivf(index)
    places = np.sort(np.random.default_rng(seed).choice(count, min(_SAMPLE, count), replace=False, shuffle=False))
    if lists is None:
        rows, decoded = places, index.reconstruct_batch(places)
    elif isinstance(faiss.downcast_index(lists), faiss.IndexIVFRaBitQ | faiss.IndexIVFRaBitQFastScan):
        return None
    else:
        rows, decoded = _decoded(index, lists, places)
    if int(rows.max()) >= vectors.n:
        raise InputError(
            f"the index holds id {rows.max()} and there are {vectors.n} vectors: give those it was built from"
        )
    order = np.argsort(rows)
    true = vectors.take(rows[order])
    return relative_error(true, decoded[order])  # both (m, d)


def _decoded(index: FaissIndex, lists: FaissIndex, places: Rows) -> tuple[Rows, Vectors]:
    """Return the ids and the decoded vectors at `places`, (m,) positions in all lists end to end."""
    sizes = _sizes(lists)
    ends = np.cumsum(sizes)
    numbers = np.searchsorted(ends, places, side="right")
    offsets = places - (ends - sizes)[numbers]
    decoded = np.empty((len(places), int(lists.d)), np.float32)
    rows = np.empty(len(places), np.int64)
    for place, (number, offset) in enumerate(zip(numbers.tolist(), offsets.tolist(), strict=True)):
        rows[place] = lists.invlists.get_single_id(number, offset)
        lists.reconstruct_from_offset(number, offset, faiss.swig_ptr(decoded[place]))
    return rows, _rotated_back(index, decoded)


def _rotated_back(index: FaissIndex, decoded: Vectors) -> Vectors:
    index = faiss.downcast_index(index.base_index) if isinstance(index, faiss.IndexRefine) else index
    if isinstance(index, faiss.IndexPreTransform):
        for step in reversed(range(index.chain.size())):
            decoded = index.chain.at(step).reverse_transform(decoded)
    return decoded


def _sizes(lists: FaissIndex) -> npt.NDArray[np.int64]:
    return np.array([lists.invlists.list_size(number) for number in range(lists.nlist)], np.int64)
