"""Derive an inverted index from a previous index file, instead of building or downloading it.

The file depends only on the passages' terms. So the postings of passages that the previous snapshot
has too are carried over to their new rows, and the postings of all other passages are computed from
text or weighted terms. The result equals a full build byte for byte.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

import numpy as np
import numpy.typing as npt

from rag_model.compiled import bare, compiled
from rag_model.errors import InputError
from rag_model.index.files.engine import Rows
from rag_model.index.files.pieces import Array
from rag_model.index.plan import IndexStats
from rag_model.index.postings.carry import (
    DAMAGED,
    DF,
    FULL,
    LENGTH_SHIFT,
    MAX_ROWS,
    REMOVED,
    ROW_SHIFT,
    STATE_SIZE,
    TERMS_LEFT,
    allocate_scratch,
    carry_over,
)
from rag_model.index.postings.file import PostingsFile, TermBatch, write_index
from rag_model.index.postings.lists import MAX_POSTING_BYTES
from rag_model.index.postings.part import PartPostings

# Smallest share of passages to reuse. Below it, building or fetching the whole index is faster.
_MIN_REUSED_SHARE = 0.5
_BATCH_TERMS = 1 << 14
_BATCH_TEXT_BYTES = 1 << 21  # bytes of all terms of a batch; no analyzer returns a longer term
_BATCH_LIST_BYTES = 1 << 22  # initial capacity for the lists of a batch


def derive_index(
    previous_path: Path,
    previous_rows: Rows,
    build_postings: Callable[[Rows], PartPostings],
    out: Path,
    max_new: int,
) -> IndexStats | None:
    """Write the index file of passages, most of which a previous file has.

    Args:
        previous_path: the previous file.
        previous_rows: (n,) row of each passage in the previous snapshot, -1 for new ones. Passages
            whose order has changed count as new passages.
        build_postings: returns the postings of the passages at ascending rows, numbered from 0.
        out: path to write.
        max_new: largest number of new passages; with more, a full build is faster.

    Returns:
        The statistics of the file; None if it was not written, because too many passages are new.

    Raises:
        InputError: the previous file is damaged, or the number of rows differs from the number of
            new passages.
        ResourceError: `out` cannot be written.
    """
    previous_file = PostingsFile(previous_path)
    n = previous_file.layout.n
    is_carried = find_longest_rising_subsequence(np.where(previous_rows < n, previous_rows, -1))
    new_rows = np.flatnonzero(~is_carried)
    if max(n, len(previous_rows)) > MAX_ROWS or len(new_rows) > min(
        (1 - _MIN_REUSED_SHARE) * len(previous_rows), max_new
    ):
        return None
    new_postings = build_postings(new_rows)
    if len(new_postings.lengths) != len(new_rows):
        raise InputError(
            f"there are postings of {len(new_postings.lengths)} passages, but {len(new_rows)} "
            f"passages are new: pull or build the index again"
        )
    lengths, row_words = np.empty(len(previous_rows), "<u2"), np.full(n, REMOVED)
    new_words = np.empty(len(new_rows), np.int64)
    _assign_rows(previous_rows, is_carried, previous_file.lengths, new_postings.lengths, lengths, row_words, new_words)
    posting_words = new_words[new_postings.rows] | new_postings.weights if len(new_rows) else new_words

    def write_lists(_: Array, out_file: IO[bytes]) -> Iterator[TermBatch]:
        return _write_lists(previous_file, row_words, new_postings, posting_words, out_file)

    return write_index(out, [lengths], write_lists, previous_file.layout.scale)


def _write_lists(
    file: PostingsFile, row_words: Array, new_postings: PartPostings, posting_words: Array, out: IO[bytes]
) -> Iterator[TermBatch]:
    """Write all lists to a file; yield the terms batch by batch."""
    previous_arguments = file.dictionary, file.lists, file.layout.lists_bytes, row_words
    new_arguments = new_postings.text, new_postings.term_ends, new_postings.ends, posting_words
    state, term, scratch, status = (
        np.zeros(STATE_SIZE, np.int64),
        np.empty(_BATCH_TEXT_BYTES, np.uint8),
        allocate_scratch(int(np.diff(new_postings.ends, prepend=0).max(initial=0))),
        FULL,
    )
    state[TERMS_LEFT] = file.layout.n_terms
    text, term_columns, list_buffer = (
        np.empty(_BATCH_TEXT_BYTES, np.uint8),
        np.empty((3, _BATCH_TERMS), np.int64),
        np.empty(_BATCH_LIST_BYTES, np.uint8),
    )
    while status == FULL:
        status, n_terms, n_bytes = carry_over(
            *previous_arguments, *new_arguments, state, term, *scratch, text, *term_columns, list_buffer
        )
        max_bytes = MAX_POSTING_BYTES * (int(state[DF]) + len(posting_words))
        if status == DAMAGED or (status == FULL and n_terms == 0 and max_bytes <= len(list_buffer)):
            raise file.create_damage_error()
        out.write(list_buffer[:n_bytes].data)
        yield text, term_columns[0, :n_terms], term_columns[1, :n_terms], term_columns[2, :n_terms]
        if n_terms == 0:
            list_buffer = np.empty(max_bytes, np.uint8)


@bare
def _assign_rows(previous_rows, is_carried, previous_lengths, new_lengths, lengths, row_words, new_words):
    """Compute the lengths of all passages, and the words (see `carry`) of previous and new rows,
    without weights.

    Args:
        previous_rows: (n,) row of each passage in the previous snapshot.
        is_carried: (n,) whether the passage's postings are carried over; all other passages are the
        new passages, in order.
        previous_lengths: (previous rows,) uint16.
        new_lengths: (f,) uint16, of the new passages.
        lengths: (n,) uint16, filled with the lengths of all passages.
        row_words: (previous rows,) int64, filled for the passages that are carried over.
        new_words: (f,) int64, filled with the words of the new passages.
    """
    next_new = 0
    for row in range(len(previous_rows)):
        if is_carried[row]:
            lengths[row] = previous_lengths[previous_rows[row]]
            row_words[previous_rows[row]] = np.int64(row) << ROW_SHIFT | np.int64(lengths[row]) << LENGTH_SHIFT
        else:
            lengths[row] = new_lengths[next_new]
            new_words[next_new] = np.int64(row) << ROW_SHIFT | np.int64(lengths[row]) << LENGTH_SHIFT
            next_new += 1


@bare
def _is_rising(rows):
    """Return whether (n,) rows ascend strictly; negative ones are ignored."""
    last_row, is_rising = np.int64(-1), True
    for row in rows:
        is_rising = is_rising and (row < 0 or row > last_row)
        last_row = max(last_row, row)
    return is_rising


def find_longest_rising_subsequence(rows: Rows) -> npt.NDArray[np.bool_]:
    """Return an (n,) mask of a longest strictly ascending subsequence of `rows`; -1 is ignored."""
    if _is_rising(rows):
        return rows >= 0
    kept_positions, is_chosen = np.flatnonzero(rows >= 0), np.zeros(len(rows), np.bool_)
    is_chosen[kept_positions[_find_longest_rising(rows[kept_positions])]] = True
    return is_chosen


@compiled
def _find_longest_rising(rows):
    """Return the positions of a longest ascending subsequence, by patience sorting (Schensted
    1961).
    """
    ends, predecessors, length = np.empty(len(rows), np.int64), np.empty(len(rows), np.int64), 0
    for i in range(len(rows)):
        low, high = 0, length
        while low < high:  # find the shortest subsequence that ends at this row or above
            middle = (low + high) // 2
            if rows[ends[middle]] < rows[i]:
                low = middle + 1
            else:
                high = middle
        predecessors[i] = ends[low - 1] if low else -1
        ends[low] = i
        length = max(length, low + 1)
    chosen_positions, position = np.empty(length, np.int64), ends[length - 1]
    for rank in range(length - 1, -1, -1):
        chosen_positions[rank] = position
        position = predecessors[position]
    return chosen_positions
