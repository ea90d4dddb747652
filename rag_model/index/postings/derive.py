"""The index of words of a later snapshot, made of an earlier one's file: by a build, and by a pull in place of a fetch.

The file is a function of the passages' terms alone. So the postings of passages that the earlier snapshot has too are
carried over under their new rows, the others are counted from their text, and the result is what a whole build gives,
byte for byte.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from rag_model.errors import InputError
from rag_model.index.files.engine import Rows
from rag_model.index.files.pieces import Array
from rag_model.index.plan import Facts
from rag_model.index.postings.analyzer import Analyzer
from rag_model.index.postings.carry import DAMAGED, DF, FULL, LEFT, STATE, carry, no_scratch
from rag_model.index.postings.compiled import bare, compiled
from rag_model.index.postings.counting import counted_texts, gathered, texts_of
from rag_model.index.postings.file import PostingsFile
from rag_model.index.postings.lists import ROOM
from rag_model.index.postings.moving import LENGTH, MOST_ROWS, ROW, WENT
from rag_model.index.postings.part import PartPostings
from rag_model.index.postings.writing import Written, write_index

_KEPT = 0.5  # share of the passages that must be there already, for less it is quicker to count or fetch them all
_TERMS = 1 << 14  # of a batch
_TEXT = 1 << 21  # bytes of their terms; a longer one is of no analyzer
_LISTS = 1 << 22  # bytes of room for their lists


def derived(
    before: Path,
    kept: Rows,
    texts: Callable[[Rows], Iterator[pa.RecordBatch]],
    analyzer: Analyzer,
    out: Path,
    most: int,
) -> Facts | None:
    """Write the index file of passages, most of which an earlier file has.

    Args:
        before: the earlier file.
        kept: (n,) the earlier row of each passage; -1: it was not there. Passages that are not in their former order
            are counted from their text.
        texts: yields title and text of the passages of these rows, ascending.
        analyzer: the one that both files were built with.
        out: the later file.
        most: passages that may be new.

    Returns:
        The facts of a merge; None if it was not written: too many passages are new.

    Raises:
        InputError: the earlier file is damaged, or there are more or fewer texts than new passages.
        ResourceError: `out` cannot be written.
    """
    file = PostingsFile(before)
    n, held = file.layout.n, rising(np.where(kept < file.layout.n, kept, -1))
    fresh = np.flatnonzero(~held)
    if file.layout.scale or max(n, len(kept)) > MOST_ROWS or len(fresh) > min((1 - _KEPT) * len(kept), most):
        return None
    others = counted_texts(texts_of(gathered(texts(fresh))), analyzer)
    if len(others.lengths) != len(fresh):
        raise InputError(
            f"there are {len(others.lengths)} texts of {len(fresh)} new passages: fetch or build them again"
        )
    lengths, moved, words = np.empty(len(kept), "<u2"), np.full(n, WENT), np.empty(len(fresh), np.int64)
    _place(kept, held, file.lengths, others.lengths, lengths, moved, words)
    postings = words[others.rows] | others.weights if len(fresh) else words

    def lists(mapped: Array, written: IO[bytes]) -> Iterator[Written]:
        return _carried(file, moved, others, postings, written)

    return write_index(out, [lengths], lists)


def _carried(file: PostingsFile, moved: Array, others: PartPostings, words: Array, out: IO[bytes]) -> Iterator[Written]:
    """Write all lists to a file; yield their terms batch by batch."""
    earlier = file.dictionary, file.lists, file.layout.lists, moved
    new = others.text, others.cuts, others.ends, words
    state, term, scratch, why = (
        np.zeros(STATE, np.int64),
        np.empty(_TEXT, np.uint8),
        no_scratch(int(np.diff(others.ends, prepend=0).max(initial=0))),
        FULL,
    )
    state[LEFT] = file.layout.terms
    text, numbers, room = np.empty(_TEXT, np.uint8), np.empty((3, _TERMS), np.int64), np.empty(_LISTS, np.uint8)
    while why == FULL:
        why, count, size = carry(*earlier, *new, state, term, *scratch, text, *numbers, room)
        most = ROOM * (int(state[DF]) + len(words))
        if why == DAMAGED or (why == FULL and count == 0 and most <= len(room)):
            raise file.damaged()
        out.write(room[:size].data)
        yield text, numbers[0, :count], numbers[1, :count], numbers[2, :count]
        if count == 0:
            room = np.empty(most, np.uint8)


@bare
def _place(kept, held, before, new, lengths, moved, words):
    """Fill in lengths of all passages, and words without a weight (`moving`) of the earlier ones and of the new ones.

    Args:
        kept: (n,) the earlier row of each.
        held: (n,) whether its postings are carried over; else it is the next new one.
        before: (earlier rows,) uint16, lengths of the earlier passages.
        new: (f,) uint16, those of the new ones.
        lengths: (n,) uint16, filled in.
        moved: (earlier rows,) int64, filled in where a passage stayed.
        words: (f,) int64, filled in.
    """
    fresh = 0
    for row in range(len(kept)):
        if held[row]:
            lengths[row] = before[kept[row]]
            moved[kept[row]] = np.int64(row) << ROW | np.int64(lengths[row]) << LENGTH
        else:
            lengths[row] = new[fresh]
            words[fresh] = np.int64(row) << ROW | np.int64(lengths[row]) << LENGTH
            fresh += 1


@bare
def _rise(kept):
    """Return whether each of (n,) rows that is not below 0 is above the one before."""
    last, rise = np.int64(-1), True
    for row in kept:
        rise = rise and (row < 0 or row > last)
        last = max(last, row)
    return rise


def rising(kept: Rows) -> npt.NDArray[np.bool_]:
    """Return which of (n,) rows, -1 for none, make up the longest sequence in which each is above the one before."""
    if _rise(kept):
        return kept >= 0
    there, chosen = np.flatnonzero(kept >= 0), np.zeros(len(kept), np.bool_)
    chosen[there[_longest(kept[there])]] = True
    return chosen


@compiled
def _longest(rows):
    """Return the places of a longest rising sequence: of each length, the one that ends lowest (Schensted 1961)."""
    ends, before, size = np.empty(len(rows), np.int64), np.empty(len(rows), np.int64), 0
    for i in range(len(rows)):
        low, high = 0, size
        while low < high:  # the first that does not end below this row
            middle = (low + high) // 2
            if rows[ends[middle]] < rows[i]:
                low = middle + 1
            else:
                high = middle
        before[i] = ends[low - 1] if low else -1
        ends[low] = i
        size = max(size, low + 1)
    found, at = np.empty(size, np.int64), ends[size - 1]
    for place in range(size - 1, -1, -1):
        found[place] = at
        at = before[at]
    return found
