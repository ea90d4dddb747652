"""The only interface to faiss, on CPU and GPU: other modules see arrays, paths and our errors.

faiss's type stubs cover only a part of its C++ classes, so it is imported here, once, as an untyped
name. A faiss error is a paragraph that names a C++ source line. `translate_errors` turns it into a
sentence about the file or the request; no other package catches a faiss exception.

If faiss sees a GPU, three steps run there: k-means, nearest centroids, and the graph of a cell. The
first two compare vectors with all centroids, which is most of the work of training and adding.
Codes are still computed on the CPU, so every factory works and any machine can read the file. A
cell's graph is built with CAGRA, converted to HNSW, and stitched like any other graph. No setting
controls the use of GPUs: with a faiss built for GPUs (`faiss-gpu`; `faiss-gpu-cuvs` for graphs as
well), a process uses the GPU that it claims, and one local worker runs for each GPU. On a GPU,
float32 sums differ in their last bits. So two machines with a GPU write the same index bytes, and
so do two machines without one, but a machine with a GPU and one without do not.

Sources: https://github.com/facebookresearch/faiss/wiki/Faiss-on-the-GPU; Ootomo et al. CAGRA:
highly parallel graph construction and approximate nearest neighbor search for GPUs. ICDE 2024.
"""

import io
import os
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any, BinaryIO, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from rag_model.errors import BookwheelError, InputError, ResourceError
from rag_model.extras import check_single_faiss
from rag_model.index.files.layout import UnsupportedIndexError, check_layout
from rag_model.process import claim_gpu

check_single_faiss()
faiss: Any = import_module("faiss")
# If the number of vectors times dimensions is at least this, faiss compares them by matrix
# products. faiss's default is 128,000 in 1.15 and 20 vectors in earlier versions, but products are
# faster from 8 vectors on: 4 times for 128 vectors of 64 dimensions, 10 times at 384 dimensions.
MIN_BLAS_SIZE = 3_072
faiss.cvar.distance_compute_blas_threshold = MIN_BLAS_SIZE
FaissIndex: TypeAlias = Any  # any of faiss's index classes
Metric = Literal["ip", "l2"]
Vectors = npt.NDArray[np.float32]
Rows = npt.NDArray[np.int64]

# header of every index file: fourcc, d, n, two unused fields, is_trained, metric
HEADER = struct.Struct("<4siqqq?i")
UNUSED = 1 << 20  # faiss's value of the unused fields

# Exceptions raised by faiss and its wrapper.
_FAISS_ERRORS = (RuntimeError, AssertionError, ValueError, TypeError, OverflowError)
_UNSUPPORTED = "which bookwheel cannot search: build HNSW, IVF or Flat"
_LIMIT_LOCK = threading.Lock()  # faiss applies its limits to the whole process
_METRICS: dict[Metric, int] = {"ip": faiss.METRIC_INNER_PRODUCT, "l2": faiss.METRIC_L2}
_UNIT_TOLERANCE = 0.01  # largest distance of a squared length from 1; float16 causes less
# Smaller graphs are built on the CPU. faiss's conversion of 3 or 4 vectors never ends (issue 4260).
_MIN_CAGRA_VECTORS = 1_024


@contextmanager
def use_threads(count: int) -> Iterator[None]:
    """Let faiss use `count` threads inside a `with` block.

    The result of the work must not depend on the number of threads.
    """
    previous_count = faiss.omp_get_max_threads()
    faiss.omp_set_num_threads(count)
    try:
        yield
    finally:
        faiss.omp_set_num_threads(previous_count)


class translate_errors:  # noqa: N801 - used like a statement; a generator would cost a query 1 us
    """Raise `error_class(message)` from any faiss exception that is raised inside the block.

    Raises:
        ResourceError: memory ran out inside the block.
    """

    __slots__ = ("_error_class", "_message")

    def __init__(self, error_class: type[BookwheelError], message: str) -> None:
        """Raise `error_class` with `message` if faiss fails."""
        self._error_class, self._message = error_class, message

    def __enter__(self) -> None:
        """Enter the block."""

    def __exit__(self, kind: type[BaseException] | None, cause: BaseException | None, traceback: object) -> None:
        """Turn a faiss exception into the error."""
        if isinstance(cause, MemoryError):
            raise ResourceError(f"memory ran out ({self._message}): use a smaller factory or more memory") from cause
        if isinstance(cause, _FAISS_ERRORS):
            raise self._error_class(self._message) from cause


def to_faiss_metric(metric: Metric) -> int:
    """Return faiss's constant for a metric."""
    return _METRICS[metric]


def get_metric(index: FaissIndex) -> Metric:
    """Return the metric of an open index.

    Raises:
        InputError: the metric is neither inner product nor L2.
    """
    for name, metric_code in _METRICS.items():
        if index.metric_type == metric_code:
            return name
    raise InputError(f"the index uses faiss metric {index.metric_type}: only inner product and L2 can be searched")


def read_index(path: Path, *, mmap: bool = False) -> FaissIndex:
    """Read an index file; with `mmap`, its arrays are mapped read-only instead of loaded.

    `IO_FLAG_MMAP_IFC` is the flag that maps; `IO_FLAG_MMAP` still loads most structures. Adding to
    mapped storage aborts the process, so only search maps files. The file may be hostile: faiss
    opens it only after `check_layout`.

    Raises:
        InputError: the file is missing, truncated, not a faiss index, or of an unsupported type.
    """
    if not path.is_file():
        raise InputError(f"there is no index file {path}: build it first")
    file_bytes = path.stat().st_size
    with path.open("rb") as file, translate_errors(InputError, _describe_damage(path)):
        _check_bytes(file, file_bytes, path)
        with _LIMIT_LOCK:
            # A file cannot have more lists or transforms than bytes.
            faiss.set_deserialization_loop_limit(max(1, file_bytes))
            return faiss.read_index(str(path), faiss.IO_FLAG_MMAP_IFC if mmap else 0)


def parse_index(data: npt.NDArray[np.uint8], name: str) -> FaissIndex:
    """Read an index from the bytes of a file; `name` names the file in errors.

    Raises:
        InputError: for the same reasons as `read_index`.
    """
    with translate_errors(InputError, _describe_damage(name)):
        _check_bytes(io.BytesIO(data.tobytes()), len(data), name)
        return faiss.deserialize_index(data)


def _check_bytes(file: BinaryIO, file_bytes: int, name: object) -> None:
    try:
        check_layout(file, file_bytes)
    except UnsupportedIndexError as error:
        raise InputError(f"{name} holds faiss's {error}, {_UNSUPPORTED}") from error
    except struct.error as error:
        raise InputError(_describe_damage(name)) from error


def _describe_damage(name: object) -> str:
    return f"{name} is not a complete faiss index: fetch or build it again"


def write_index(index: FaissIndex, path: Path) -> None:
    """Write an index file that plain `faiss.read_index` opens.

    Raises:
        ResourceError: the file cannot be written.
    """
    with translate_errors(ResourceError, f"cannot write {path}: the disk is full or the folder is not writable"):
        faiss.write_index(index, str(path))


def search_bottom_level(graph: FaissIndex, vectors: Vectors, k: int, parameters: Any) -> tuple[Vectors, Rows]:
    """Search only the bottom level of an HNSW index, beginning at its entry point.

    In a graph that `link_unreachable_nodes` has repaired, links of the bottom level lead from the
    entry point to every node. A descent through the upper levels may instead end at a node from
    which few nodes can be reached.

    Returns:
        (q, k) distances or inner products, as `graph.search` returns them, and (q, k) rows.
    """
    entry_node = int(graph.hnsw.entry_point)
    entry_vector = faiss.downcast_index(graph.storage).reconstruct(entry_node)  # (d,)
    uses_inner_product = get_metric(graph) == "ip"
    distances = -(vectors @ entry_vector) if uses_inner_product else np.square(vectors - entry_vector).sum(axis=1)
    start_nodes, start_distances = np.full(len(vectors), entry_node, np.int32), distances.astype(np.float32)
    scores, rows = np.empty((len(vectors), k), np.float32), np.empty((len(vectors), k), np.int64)
    graph.search_level_0(
        len(vectors),
        faiss.swig_ptr(np.ascontiguousarray(vectors)),
        k,
        faiss.swig_ptr(start_nodes),
        faiss.swig_ptr(start_distances),
        faiss.swig_ptr(scores),
        faiss.swig_ptr(rows),
        1,  # start nodes per query
        1,  # one search for each start node
        parameters,
    )
    return scores, rows


def copy_array(vector: Any) -> npt.NDArray[Any]:
    """Return a copy of a C++ vector."""
    array: npt.NDArray[Any] = faiss.vector_to_array(vector)
    return array


def view_array(vector: Any) -> npt.NDArray[Any]:
    """Return a writable view of a C++ vector, valid only while the index that owns it exists."""
    if vector.size() == 0:
        return np.empty(0, np.int32)
    view: npt.NDArray[Any] = faiss.rev_swig_ptr(vector.data(), vector.size())
    return view


def count_gpus() -> int:
    """Return the number of GPUs that this faiss can use."""
    return int(faiss.get_num_gpus()) if hasattr(faiss, "StandardGpuResources") else 0


def has_gpu() -> bool:
    """Return whether this faiss supports GPUs and finds one."""
    return count_gpus() > 0


@cache
def _get_gpu(process_id: int) -> tuple[Any, int]:
    """Return faiss's resources on the GPU of a process, and the device number of the GPU.

    The resources reserve memory of the GPU, so a process creates them once, on one GPU.
    """
    return faiss.StandardGpuResources(), claim_gpu(count_gpus())


def train_kmeans_on_gpu(ivf_index: FaissIndex) -> list[Any]:
    """Make `ivf_index.train` run k-means on the GPU; return objects that must live until training
    ends.
    """
    if not has_gpu():
        return []
    ivf_index.clustering_index = create_flat_index(ivf_index)
    return [ivf_index.clustering_index]


def create_flat_index(ivf_index: FaissIndex) -> FaissIndex:
    """Return an empty flat index for k-means with the metric of the lists, on the GPU if
    possible.
    """
    flat_index = faiss.IndexFlat(ivf_index.d, ivf_index.metric_type)
    if not has_gpu():
        return flat_index
    resources, gpu_number = _get_gpu(os.getpid())
    return faiss.index_cpu_to_gpu(resources, gpu_number, flat_index)


class ListAssigner:
    """Assigns vectors to lists: by the index's quantizer, or on a GPU by comparing all
    centroids.
    """

    def __init__(self, ivf_index: FaissIndex) -> None:
        """Copy the centroids to the GPU, if there is one."""
        self._quantizer = ivf_index.quantizer
        if has_gpu():
            self._quantizer = create_flat_index(ivf_index)
            self._quantizer.add(ivf_index.quantizer.reconstruct_n(0, ivf_index.nlist))

    def __call__(self, vectors: Vectors) -> Rows:
        """Return (m,) int64: the lists of transformed vectors, (m, d) float32."""
        list_numbers: Rows = self._quantizer.search(vectors, 1)[1].ravel()  # (m, 1) -> (m,)
        return list_numbers


def can_build_graph(vectors: Vectors, metric: Metric) -> bool:
    """Return whether the graph of these vectors is built on a GPU, which needs cuVS.

    For inner product, the vectors must have unit length: with different lengths, CAGRA would link
    most nodes to the longest vectors. Such a graph is built by insertion on the CPU.
    """
    if not (has_gpu() and hasattr(faiss, "GpuIndexCagra") and len(vectors) >= _MIN_CAGRA_VECTORS):
        return False
    squared_norms = np.einsum("nd,nd->n", vectors, vectors)
    return metric != "ip" or bool(np.allclose(squared_norms, 1.0, atol=_UNIT_TOLERANCE))


def build_cagra_graph(vectors: Vectors, n_links: int, metric: Metric) -> FaissIndex:
    """Return an in-memory HNSW index over (m, d) float32, with the links of a CAGRA graph.

    The index has only the bottom level, because the merge of the cells builds the upper levels. The
    upper levels of a cell would only speed up searches for links across its border, and the CPU
    would have to build them.
    """
    resources, gpu_number = _get_gpu(os.getpid())
    config = faiss.GpuIndexCagraConfig()
    config.device = gpu_number
    config.graph_degree, config.intermediate_graph_degree = 2 * n_links, 4 * n_links
    cagra_index = faiss.GpuIndexCagra(resources, vectors.shape[1], to_faiss_metric(metric), config)
    cagra_index.train(vectors)
    graph = faiss.IndexHNSWCagra()
    graph.base_level_only = True
    cagra_index.copyTo(graph)
    return graph
