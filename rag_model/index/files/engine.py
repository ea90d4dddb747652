"""The only interface to faiss: the rest of the package sees arrays, paths and bookwheel's errors.

faiss's type stubs cover only a part of its C++ classes, so it is imported here, once, as an untyped name.

A faiss error is a paragraph that names a C++ source line. `guarded` turns it into a sentence about the file
or the request; nothing outside this package catches a faiss exception.
"""

import io
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any, BinaryIO, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from rag_model.errors import BookwheelError, InputError, ResourceError
from rag_model.extras import check_one_faiss
from rag_model.index.files.skeleton import ForeignError, check_skeleton

check_one_faiss()
faiss: Any = import_module("faiss")
# Vectors times dimensions from which faiss compares by products of matrices. faiss 1.15 has 128,000 (earlier ones: 20
# vectors). But products are quicker from 8 vectors on: for 128 of 64 dimensions 4 times, of 384 dimensions 10 times.
PRODUCTS_FROM = 3_072
faiss.cvar.distance_compute_blas_threshold = PRODUCTS_FROM
FaissIndex: TypeAlias = Any  # one of its many index classes
Metric = Literal["ip", "l2"]
Vectors = npt.NDArray[np.float32]
Rows = npt.NDArray[np.int64]

HEADER = struct.Struct("<4siqqq?i")  # fourcc, d, n, two unused, trained, metric: the header of every index file
UNUSED = 1 << 20  # faiss's value of the unused fields

_BROKEN = (RuntimeError, AssertionError, ValueError, TypeError, OverflowError)  # raised by faiss and its wrapper
_FOREIGN = "which bookwheel cannot search: build HNSW, IVF or Flat"
_LIMITED = threading.Lock()  # faiss's limits are the whole process's
_METRICS: dict[str, int] = {"ip": faiss.METRIC_INNER_PRODUCT, "l2": faiss.METRIC_L2}


@contextmanager
def threads(count: int) -> Iterator[None]:
    """Let faiss use `count` threads in the block: for what gives the same bytes with any number of them."""
    before = faiss.omp_get_max_threads()
    faiss.omp_set_num_threads(count)
    try:
        yield
    finally:
        faiss.omp_set_num_threads(before)


class guarded:  # noqa: N801 - used like a statement; a generator would cost each query a microsecond
    """Raise `error(sentence)` instead of any faiss exception inside the block; the cause stays attached.

    Raises:
        ResourceError: memory ran out inside the block.
    """

    __slots__ = ("_error", "_sentence")

    def __init__(self, error: type[BookwheelError], sentence: str) -> None:
        """Set the error to raise."""
        self._error, self._sentence = error, sentence

    def __enter__(self) -> None:
        """Enter the block."""

    def __exit__(self, kind: type[BaseException] | None, raised: BaseException | None, trace: object) -> None:
        """Replace faiss's paragraph by one sentence."""
        if isinstance(raised, MemoryError):
            raise ResourceError(f"memory ran out ({self._sentence}): use a smaller factory or more memory") from raised
        if isinstance(raised, _BROKEN):
            raise self._error(self._sentence) from raised


def metric_code(metric: Metric) -> int:
    """Return faiss's number of a metric."""
    return _METRICS[metric]


def metric_of(index: FaissIndex) -> Metric:
    """Return the metric of an open index.

    Raises:
        InputError: it is neither inner product nor L2.
    """
    for name, code in _METRICS.items():
        if index.metric_type == code:
            return "ip" if name == "ip" else "l2"
    raise InputError(f"the index uses faiss metric {index.metric_type}: only inner product and L2 can be searched")


def read(path: Path, *, mmap: bool = False) -> FaissIndex:
    """Read an index file; `mmap` maps its arrays instead of loading them, and the result is then read-only.

    `IO_FLAG_MMAP_IFC` is the flag that maps; `IO_FLAG_MMAP` still loads most structures. Adding to mapped storage
    aborts the process, so only search opens mapped files. The file may come from elsewhere: faiss opens it only after
    `check_skeleton`.

    Raises:
        InputError: the file is missing, truncated, not a faiss index, or of a kind that bookwheel does not search.
    """
    if not path.is_file():
        raise InputError(f"there is no index file {path}: build it first")
    size = path.stat().st_size
    with path.open("rb") as file, guarded(InputError, _broken(path)):
        _check(file, size, path)
        with _LIMITED:
            faiss.set_deserialization_loop_limit(max(1, size))  # a list or a transform takes at least a byte
            return faiss.read_index(str(path), faiss.IO_FLAG_MMAP_IFC if mmap else 0)


def parse(data: npt.NDArray[np.uint8], name: str) -> FaissIndex:
    """Read an index from the bytes of a file; `name` is for the error.

    Raises:
        InputError: as `read`.
    """
    with guarded(InputError, _broken(name)):
        _check(io.BytesIO(data.tobytes()), len(data), name)
        return faiss.deserialize_index(data)


def _check(file: BinaryIO, size: int, name: object) -> None:
    try:
        check_skeleton(file, size)
    except ForeignError as foreign:
        raise InputError(f"{name} holds faiss's {foreign}, {_FOREIGN}") from foreign
    except struct.error as cut:
        raise InputError(_broken(name)) from cut


def _broken(name: object) -> str:
    return f"{name} is not a complete faiss index: fetch or build it again"


def write(index: FaissIndex, path: Path) -> None:
    """Write an index file that plain `faiss.read_index` opens.

    Raises:
        ResourceError: the file cannot be written.
    """
    with guarded(ResourceError, f"cannot write {path}: the disk is full or the folder is not writable"):
        faiss.write_index(index, str(path))


def array_of(vector: Any) -> npt.NDArray[Any]:
    """Return a copy of a C++ vector."""
    copied: npt.NDArray[Any] = faiss.vector_to_array(vector)
    return copied


def view_of(vector: Any) -> npt.NDArray[Any]:
    """Return a writable view of a C++ vector; it is valid only while the index that owns it exists."""
    if vector.size() == 0:
        return np.empty(0, np.int32)
    view: npt.NDArray[Any] = faiss.rev_swig_ptr(vector.data(), vector.size())
    return view
