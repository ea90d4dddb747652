"""faiss's file layout of inverted lists, written as a stream.

    IxRF and a header                       only with a refinement (`Refine`)
      transform, centroids, codec           as faiss serialises the trained index, with the number of vectors set
      ilar, lists, bytes per code           the lists:
      full and all sizes, or sprs and (list, size) of those that are not empty
      codes, ids                            of each list in turn
      the storage of the refinement         a separate index, whose codes come last
      k_factor

Source: `faiss/impl/index_write.cpp`, `write_InvertedLists`. A test checks that it still holds: faiss, given all vectors
at once, writes the same bytes.
"""

import struct
from typing import BinaryIO

import numpy as np
import numpy.typing as npt

from rag_model.errors import ResourceError
from rag_model.index.files.engine import HEADER, UNUSED, FaissIndex, Rows, faiss

_EMPTY = struct.Struct("<4sQQ4sQ")  # ilar, lists, bytes per code, sprs, no sizes: the end of lists without vectors


def write_refine_head(file: BinaryIO, refine: FaissIndex, n: int) -> None:
    """Write the header of an index with a refinement over `n` vectors."""
    file.write(HEADER.pack(b"IxRF", refine.d, n, UNUSED, UNUSED, refine.is_trained, refine.metric_type))


def write_lists_head(file: BinaryIO, index: FaissIndex, sizes: Rows) -> None:
    """Write everything before the first list's codes.

    Args:
        file: positioned at the index.
        index: inverted lists, trained and without vectors, possibly with a transform; this sets its `ntotal`.
        sizes: (lists,) int64, the vectors of each list.

    Raises:
        ResourceError: this faiss uses another layout.
    """
    lists = faiss.downcast_index(faiss.extract_index_ivf(index))
    for part in (index, lists):
        part.ntotal = int(sizes.sum())
    data: npt.NDArray[np.uint8] = faiss.serialize_index(index)
    if data[-_EMPTY.size :].tobytes() != _EMPTY.pack(b"ilar", lists.nlist, lists.code_size, b"sprs", 0):
        raise ResourceError(f"faiss {faiss.__version__} uses another layout of lists: install another faiss-cpu")
    file.write(data[: -_EMPTY.size].data)
    file.write(struct.pack("<4sQQ", b"ilar", lists.nlist, lists.code_size) + _sizes(sizes))


def write_list_block(file: BinaryIO, lists: npt.NDArray[np.uint32], ids: Rows, codes: npt.NDArray[np.uint8]) -> None:
    """Write whole lists: the codes of each, then its ids, both in the order given.

    Args:
        file: positioned after the lists before.
        lists: (m,) the list of each vector, m >= 1.
        ids: (m,) int64.
        codes: (m, bytes per code).
    """
    order = np.argsort(lists, kind="stable")
    ends = np.flatnonzero(np.diff(lists[order])) + 1
    for members in np.split(order, ends):  # list by list, so that the block is not held twice
        file.write(codes[members].data)
        file.write(ids[members].data)


def write_refine_tail(file: BinaryIO, refine: FaissIndex) -> None:
    """Write the end of the refinement: the factor by which it ranks more than k candidates."""
    file.write(struct.pack("<f", refine.k_factor))


def _sizes(sizes: Rows) -> bytes:
    filled = np.flatnonzero(sizes)
    if len(filled) > len(sizes) // 2:
        return struct.pack("<4sQ", b"full", len(sizes)) + sizes.astype("<u8").tobytes()
    pairs = np.stack([filled, sizes[filled]], axis=1)
    return struct.pack("<4sQ", b"sprs", pairs.size) + pairs.astype("<u8").tobytes()
