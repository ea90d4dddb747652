"""Pieces of sorted codes, and faiss's file layout of inverted lists, written as a stream.

A piece holds the codes of one part sorted by list, so the merge reads one slice of it for each
list. Within a list rows ascend, so reading the parts in order gives a list's rows in order.

The layout of an index file:

    IxRF and a header                       only with a refinement (`Refine`)
      transform, centroids, codec           as in the trained index, with the number of vectors
      ilar, lists, bytes per code           the lists:
      full and all sizes, or sprs and (list, size) of non-empty lists
      codes, ids                            of each list in turn
      the storage of the refinement         a separate index, whose codes come last
      k_factor

Source: `faiss/impl/index_write.cpp`, `write_InvertedLists`. A test checks that faiss, given all
vectors at once, still writes the same bytes.
"""

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np
import numpy.typing as npt

from rag_model.errors import InputError, ResourceError
from rag_model.index.files.engine import HEADER, UNUSED, FaissIndex, Rows, faiss
from rag_model.index.files.pieces import Opener, PieceReader, compute_stamp, write_piece
from rag_model.index.recipe import VectorPlan

# end of a file of empty lists: ilar, number of lists, bytes per code, sprs, 0 sizes
_EMPTY_LISTS = struct.Struct("<4sQQ4sQ")
BLOCK_BYTES = 32 << 20  # bytes of lists that are written at once


def write_refine_head(file: BinaryIO, refine_index: FaissIndex, n: int) -> None:
    """Write the header of an index with a refinement over `n` vectors."""
    file.write(
        HEADER.pack(b"IxRF", refine_index.d, n, UNUSED, UNUSED, refine_index.is_trained, refine_index.metric_type)
    )


def write_lists_head(file: BinaryIO, index: FaissIndex, sizes: Rows) -> None:
    """Write everything before the first list's codes.

    Args:
        file: positioned at the index.
        index: trained inverted lists without vectors, maybe with a transform; `ntotal` is set.
        sizes: (lists,) int64, the number of vectors in each list.

    Raises:
        ResourceError: this faiss uses another layout.
    """
    ivf = faiss.downcast_index(faiss.extract_index_ivf(index))
    for faiss_index in (index, ivf):
        faiss_index.ntotal = int(sizes.sum())
    index_bytes: npt.NDArray[np.uint8] = faiss.serialize_index(index)
    if index_bytes[-_EMPTY_LISTS.size :].tobytes() != _EMPTY_LISTS.pack(b"ilar", ivf.nlist, ivf.code_size, b"sprs", 0):
        raise ResourceError(f"faiss {faiss.__version__} uses another layout of lists: install another faiss-cpu")
    file.write(index_bytes[: -_EMPTY_LISTS.size].data)
    file.write(struct.pack("<4sQQ", b"ilar", ivf.nlist, ivf.code_size) + _pack_sizes(sizes))


def write_list_block(file: BinaryIO, lists: npt.NDArray[np.uint32], ids: Rows, codes: npt.NDArray[np.uint8]) -> None:
    """Write complete lists: the codes of each list, then its ids, both in the given order.

    Args:
        file: positioned after the previous lists.
        lists: (m,) the list of each vector, m >= 1.
        ids: (m,) int64.
        codes: (m, bytes per code).
    """
    sorted_positions = np.argsort(lists, kind="stable")
    list_ends = np.flatnonzero(np.diff(lists[sorted_positions])) + 1
    # One list at a time is copied, so that memory does not hold a second copy of the block.
    for positions in np.split(sorted_positions, list_ends):
        file.write(codes[positions].data)
        file.write(ids[positions].data)


def write_refine_tail(file: BinaryIO, refine_index: FaissIndex) -> None:
    """Write the end of the refinement: `k_factor`, the ratio of candidates to k."""
    file.write(struct.pack("<f", refine_index.k_factor))


def _pack_sizes(list_sizes: Rows) -> bytes:
    filled_lists = np.flatnonzero(list_sizes)
    if len(filled_lists) > len(list_sizes) // 2:
        return struct.pack("<4sQ", b"full", len(list_sizes)) + list_sizes.astype("<u8").tobytes()
    size_pairs = np.stack([filled_lists, list_sizes[filled_lists]], axis=1)
    return struct.pack("<4sQ", b"sprs", size_pairs.size) + size_pairs.astype("<u8").tobytes()


Codes = npt.NDArray[np.uint8]  # (m, bytes per code)
ListNumbers = npt.NDArray[np.uint32]
# Positions of a piece's arrays: list numbers; rows and codes. Then the number of arrays.
_LISTS, _ENTRIES, _N_ARRAYS = range(3)


def write_codes(plan: VectorPlan, trained: Path, part_number: int, lists: Rows, codes: Codes, out: Path) -> None:
    """Sort a part's codes by list and write them.

    Args:
        plan: the plan of the index.
        trained: the trained file.
        part_number: number of the part.
        lists: (rows,) int64, the list of each row.
        codes: (rows, bytes per code).
        out: the piece to write.

    Raises:
        ResourceError: the file cannot be written.
    """
    sorted_positions = np.argsort(lists, kind="stable")  # (rows,)
    code_entries = np.empty(len(lists), _get_entry_dtype(codes.shape[1]))
    code_entries["row"], code_entries["code"] = sorted_positions, codes[sorted_positions]
    stamp = compute_stamp(plan, trained, "scattered", part_number)
    write_piece(out, stamp, [lists[sorted_positions].astype("<u4"), code_entries])


def read_codes(
    plan: VectorPlan, trained: Path, opener: Opener, part_number: int, n_rows: int, width: int
) -> tuple[Rows, Codes]:
    """Return the list numbers and the codes, `width` bytes each, of a part's rows, in row order.

    Raises:
        InputError: the piece is missing, damaged or of another build, or does not hold these rows
            and codes.
    """
    stamp = compute_stamp(plan, trained, "scattered", part_number)
    with PieceReader.open(opener, stamp, _N_ARRAYS, _name_piece(part_number)) as piece:
        sorted_lists, entries = piece.read(_LISTS), piece.read(_ENTRIES)
    has_all_rows = len(sorted_lists) == len(entries) == n_rows and entries.dtype == np.dtype(_get_entry_dtype(width))
    if not has_all_rows or not (np.sort(entries["row"]) == np.arange(n_rows)).all():
        raise InputError(
            f"{_name_piece(part_number)} does not hold each of the part's {n_rows} rows once: build it again"
        )
    list_numbers, codes = np.empty(n_rows, np.int64), np.empty_like(entries["code"])
    list_numbers[entries["row"]], codes[entries["row"]] = sorted_lists, entries["code"]
    return list_numbers, codes


@dataclass(frozen=True, slots=True)
class CodePieces:
    """The pieces of all parts, in order; opened one at a time, because there may be many."""

    plan: VectorPlan
    trained: Path
    openers: Sequence[Opener]
    part_starts: Sequence[int]  # the first row of each part, then the number of all rows

    def count_list_sizes(self, n_lists: int) -> Rows:
        """Return (lists,) int64: the number of vectors in each list, over all parts.

        Raises:
            InputError: a piece is missing, truncated, of another build, or has another number of
                rows than its part.
        """
        list_sizes = np.zeros(n_lists, np.int64)
        for i, piece in self._iter_pieces():
            n_stored, n_rows = piece.count_rows(_LISTS), self.part_starts[i + 1] - self.part_starts[i]
            if n_stored != n_rows:
                raise InputError(f"{_name_piece(i)} holds {n_stored} vectors and the part has {n_rows}: build it again")
            list_sizes += np.bincount(piece.read(_LISTS), minlength=n_lists)
        return list_sizes

    def find_list_starts(self, list_numbers: Rows) -> Rows:
        """Return (parts, len(list_numbers)) int64: the entry at which each list begins in the piece
        of each part.
        """
        # parts times (lists,) -> (parts, lists)
        return np.stack([np.searchsorted(piece.read(_LISTS), list_numbers) for _, piece in self._iter_pieces()])

    def read_block(self, entry_ranges: Rows, width: int) -> tuple[ListNumbers, Rows, Codes]:
        """Return the lists, the corpus rows and the codes, `width` bytes each, of some entries.

        `entry_ranges`, (parts, 2), has the first entry and the end of the entries of each part.
        """
        count, n_read = int((entry_ranges[:, 1] - entry_ranges[:, 0]).sum()), 0
        lists, rows, codes = np.empty(count, np.uint32), np.empty(count, np.int64), np.empty((count, width), np.uint8)
        for part_lists, part_rows, part_codes in self.iter_slices(entry_ranges, max(1, count)):
            target = slice(n_read, n_read + len(part_lists))
            lists[target], rows[target], codes[target] = part_lists, part_rows, part_codes
            n_read = target.stop
        return lists, rows, codes

    def iter_slices(self, entry_ranges: Rows, n_rows: int) -> Iterator[tuple[ListNumbers, Rows, Codes]]:
        """Yield what `read_block` returns, in slices of at most `n_rows` entries of one part."""
        for i, piece in self._iter_pieces(np.flatnonzero(entry_ranges[:, 1] > entry_ranges[:, 0]).tolist()):
            first_entry, end_entry = entry_ranges[i].tolist()
            for start in range(first_entry, end_entry, n_rows):
                end = min(end_entry, start + n_rows)
                code_entries = piece.read(_ENTRIES, start, end)
                corpus_rows = code_entries["row"].astype(np.int64) + self.part_starts[i]
                yield piece.read(_LISTS, start, end), corpus_rows, code_entries["code"]

    def _iter_pieces(self, part_numbers: Sequence[int] | None = None) -> Iterator[tuple[int, PieceReader]]:
        for part_number in range(len(self.openers)) if part_numbers is None else part_numbers:
            stamp = compute_stamp(self.plan, self.trained, "scattered", part_number)
            with PieceReader.open(self.openers[part_number], stamp, _N_ARRAYS, _name_piece(part_number)) as piece:
                yield part_number, piece


def _name_piece(part_number: int) -> str:
    return f"the scattered piece of part {part_number}"


def _get_entry_dtype(code_bytes: int) -> npt.DTypeLike:
    return [("row", "<u4"), ("code", "u1", (code_bytes,))]
