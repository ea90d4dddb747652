"""Inspect an index file: links and reachability of graphs, list sizes, quantization error, and fit.

The statistics explain the recall of an index. They are read from the memory-mapped file. So any
file that faiss wrote can be inspected, and takes only a few bytes of memory per node.

The *fit* says whether a trained file still fits a changed corpus. Cells, centroids and codes are
trained once on a sample and kept while a corpus grows, so that the pieces of unchanged parts stay
valid. Cells, centroids and codes are trained again if the vectors of the changed parts have more
than `drift` times the error of the training vectors, or if one cell has become too large. If lists
have a lower recall for new vectors, their centroids are adapted to the current vectors, which takes
a twentieth of the time of a training.

Vectors outside the training sample always have a slightly larger error, and the vectors of one
article on a new topic a much larger one. So the error is measured over all rows of the changed
parts, because it affects the whole index, and the recall over the new rows alone, because a mean
over all rows would hide it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from rag_model.errors import InputError
from rag_model.index.files.engine import FaissIndex, Metric, Rows, Vectors, faiss
from rag_model.index.files.vectors import VectorFiles, VectorRows, draw_rows, find_equal_rows, map_vectors, open_vectors
from rag_model.index.graphs.graph import BLOCK_NODES
from rag_model.index.graphs.graph_file import GraphFile
from rag_model.index.graphs.reach import ReachabilityTree
from rag_model.index.quality.results import GraphStats, IndexHealth, ListStats
from rag_model.index.search import open_index

FIT_VERSION = 4  # version of the fit's rules: increase it when the same vectors give another fit
SAMPLE_VECTORS = 4_096  # size of each sample: a mean is then exact to one percent
_SAMPLE_ROWS = 1_000  # number of decoded rows: the mean error is then exact to a few percent


@dataclass(frozen=True, slots=True)
class FitSample:
    """Samples of the vectors of a corpus and of the parent's corpus.

    Each sample is (m, d) float32, with m <= `SAMPLE_VECTORS`.
    """

    new_vectors: Vectors  # vectors that the parent does not have
    old_vectors: Vectors  # vectors that the parent has
    changed_vectors: Vectors  # vectors of the changed parts, new and old together


def sample_changes(
    changed_files: Sequence[tuple[Path, Sequence[Path]]], unchanged_files: Sequence[Path], seed: int
) -> FitSample:
    """Draw samples of new and old vectors by seed.

    Args:
        changed_files: at least one `.npy` file, each with the files that the parent has for the
            same range; a row that one of these has too is old.
        unchanged_files: unchanged `.npy` files, of which only the sampled rows are read.
        seed: the seed of the samples.

    Raises:
        InputError: a file is damaged, or a row holds a NaN or an infinity.
    """
    files = VectorFiles([path for path, _ in changed_files])
    is_old = np.concatenate([find_common_rows(path, previous_paths) for path, previous_paths in changed_files])
    new_rows, old_rows = np.flatnonzero(~is_old), np.flatnonzero(is_old)
    new_vectors = files.read_rows(new_rows[draw_rows(len(new_rows), SAMPLE_VECTORS, seed)])
    changed_vectors = files.read_rows(draw_rows(files.n, SAMPLE_VECTORS, seed))
    unchanged_vectors = open_vectors(unchanged_files, dim=files.dim) if unchanged_files else None
    # Old rows are numbered across the changed files first, and then across the unchanged ones.
    n_old = len(old_rows) + (unchanged_vectors.n if unchanged_vectors else 0)
    positions = draw_rows(n_old, SAMPLE_VECTORS, seed)
    changed_positions, unchanged_positions = np.split(positions, [np.searchsorted(positions, len(old_rows))])
    old_vectors = [files.read_rows(old_rows[changed_positions])]
    old_vectors += [unchanged_vectors.read_rows(unchanged_positions - len(old_rows))] if unchanged_vectors else []
    return FitSample(new_vectors, np.concatenate(old_vectors), changed_vectors)


def find_common_rows(path: Path, other_paths: Sequence[Path]) -> npt.NDArray[np.bool_]:
    """Return an (n,) mask of the rows of a `.npy` file that one of the `other_paths` also has."""
    is_common = np.zeros(len(map_vectors(path)), np.bool_)
    for other_path in other_paths:
        is_common |= find_equal_rows(path, other_path) >= 0
    return is_common


def measure_error(original_vectors: Vectors, decoded_vectors: Vectors) -> float:
    """Return the mean of |x - y|^2 / |x|^2 over nonzero rows x of `original_vectors` and y of
    `decoded_vectors`.
    """
    norms = np.square(original_vectors, dtype=np.float64).sum(axis=1)  # (m, d) -> (m,)
    errors = np.square(original_vectors - decoded_vectors, dtype=np.float64).sum(axis=1)
    return float((errors[norms > 0] / norms[norms > 0]).mean()) if norms.any() else 0.0


def compute_centroid_distance(vectors: Vectors, centroids: Vectors, metric: Metric) -> float:
    """Return the mean distance of vectors to their centroids, row by row.

    For L2 the result equals that of `measure_error`. For inner product it is 1 - cosine, because
    centroids are then directions, independent of the vectors' norms.
    """
    if metric == "l2":
        return measure_error(vectors, centroids)
    norms = np.linalg.norm(vectors, axis=1) * np.linalg.norm(centroids, axis=1)
    products = np.einsum("ij,ij->i", vectors, centroids)  # (m, d), (m, d) -> (m,)
    return float((1 - products[norms > 0] / norms[norms > 0]).mean()) if norms.any() else 0.0


def compute_graph_stats(path: Path) -> GraphStats:
    """Compute statistics of the graph in an HNSW file; memory holds 9 bytes per node.

    Raises:
        InputError: the file is not an HNSW index.
    """
    graph_file = GraphFile.open(path)
    degrees = np.zeros(graph_file.width + 1, np.int64)
    is_linked = np.zeros(graph_file.n, bool)
    for first_node in range(0, graph_file.n, BLOCK_NODES):
        nodes = np.arange(first_node, min(first_node + BLOCK_NODES, graph_file.n))
        bottom_links = graph_file.read_links(nodes)
        # (m, 2M) -> (m,) -> (2M + 1,)
        degrees += np.bincount((bottom_links >= 0).sum(axis=1), minlength=len(degrees))
        is_linked[bottom_links[(bottom_links >= 0) & (bottom_links != nodes[:, None])]] = True
    n_unreachable = len(ReachabilityTree(graph_file).find_unreachable()) if graph_file.n else 0
    return GraphStats(tuple(degrees.tolist()), int(graph_file.n - is_linked.sum()), n_unreachable)


def compute_list_stats(index: FaissIndex) -> ListStats:
    """Compute statistics of the inverted lists of an open index; memory holds 8 bytes per list."""
    sizes = _read_list_sizes(faiss.extract_index_ivf(index))
    lists_by_bucket = np.bincount([int(list_size).bit_length() for list_size in sizes])
    imbalance = len(sizes) * float(np.square(sizes, dtype=np.float64).sum()) / max(1, int(sizes.sum())) ** 2
    return ListStats(len(sizes), tuple(lists_by_bucket.tolist()), int(sizes.max()), imbalance)


def measure_quantization_error(index: FaissIndex, vectors: VectorRows) -> float | None:
    """Return the mean of |x - decode(code of x)|^2 / |x|^2 over a sample of nonzero rows x.

    The mean is 0 for vectors stored without quantization. Return None for codes that cannot be
    decoded to vectors: RaBitQ codes only estimate inner products.

    Args:
        index: an open index, possibly mapped; its ids are rows of `vectors`.
        vectors: the vectors that the index was built from.

    Raises:
        InputError: an id is not a row of `vectors`, or the vectors hold a NaN or an infinity.
    """
    n = int(index.ntotal)
    if n == 0:
        return None
    ivf_index = faiss.try_extract_index_ivf(index)
    positions = draw_rows(n, _SAMPLE_ROWS, seed=0)
    if ivf_index is None:
        vector_rows, decoded_vectors = positions, index.reconstruct_batch(positions)
    elif isinstance(faiss.downcast_index(ivf_index), faiss.IndexIVFRaBitQ | faiss.IndexIVFRaBitQFastScan):
        return None
    else:
        vector_rows, decoded_vectors = _decode_at(index, ivf_index, positions)
    if int(vector_rows.max()) >= vectors.n:
        raise InputError(
            f"the index holds id {vector_rows.max()} and there are {vectors.n} vectors: give those it was built from"
        )
    sorted_positions = np.argsort(vector_rows)
    original_vectors = vectors.read_rows(vector_rows[sorted_positions])
    return measure_error(original_vectors, decoded_vectors[sorted_positions])  # both (m, d)


def _decode_at(index: FaissIndex, ivf_index: FaissIndex, positions: Rows) -> tuple[Rows, Vectors]:
    """Return the ids and the decoded vectors at `positions`, (m,), in the concatenated lists."""
    list_sizes = _read_list_sizes(ivf_index)
    list_ends = np.cumsum(list_sizes)
    list_numbers = np.searchsorted(list_ends, positions, side="right")
    offsets = positions - (list_ends - list_sizes)[list_numbers]
    decoded_vectors = np.empty((len(positions), int(ivf_index.d)), np.float32)
    vector_rows = np.empty(len(positions), np.int64)
    for row_number, (list_number, offset) in enumerate(zip(list_numbers.tolist(), offsets.tolist(), strict=True)):
        vector_rows[row_number] = ivf_index.invlists.get_single_id(list_number, offset)
        ivf_index.reconstruct_from_offset(list_number, offset, faiss.swig_ptr(decoded_vectors[row_number]))
    return vector_rows, _reverse_transforms(index, decoded_vectors)


def _reverse_transforms(index: FaissIndex, decoded_vectors: Vectors) -> Vectors:
    index = faiss.downcast_index(index.base_index) if isinstance(index, faiss.IndexRefine) else index
    if isinstance(index, faiss.IndexPreTransform):
        for transform_number in reversed(range(index.chain.size())):
            decoded_vectors = index.chain.at(transform_number).reverse_transform(decoded_vectors)
    return decoded_vectors


def _read_list_sizes(ivf_index: FaissIndex) -> npt.NDArray[np.int64]:
    return np.array([ivf_index.invlists.list_size(list_number) for list_number in range(ivf_index.nlist)], np.int64)


def inspect_index(path: Path, vectors: VectorRows | None = None) -> IndexHealth:
    """Inspect any faiss file of a graph, of inverted lists or of plain vectors, memory-mapped.

    Args:
        path: the index file.
        vectors: the vectors that it was built from; needed for the quantization error.

    Raises:
        InputError: the file is damaged or of another type, or was not built from `vectors`.
    """
    file = open_index(path)
    kind, n = file.structure, file.n
    if vectors is not None and (vectors.n, vectors.dim) != (n, file.dim):
        raise InputError(f"{path} holds {n} x {file.dim} vectors, not {vectors.n} x {vectors.dim}: build it again")
    quantization_error = None if vectors is None else measure_quantization_error(file.faiss_index, vectors)
    list_stats = compute_list_stats(file.faiss_index) if kind == "ivf" else None
    # Free 12 bytes per node of an open graph, because the statistics are read from the file.
    del file
    return IndexHealth(kind, n, compute_graph_stats(path) if kind == "hnsw" else None, list_stats, quantization_error)
