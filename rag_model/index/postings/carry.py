"""Carry the lists of an index file over to a later one: postings of passages that stayed get their new rows.

Lists are read and written one after another, in the order of their terms, with the postings of new passages among
them. A posting takes some fifteen nanoseconds, where counting it from text takes hundreds. No block is copied: from the
first passage of a list on that came or went, each block of 128 begins with another posting.
"""

from typing import Any

import numpy as np
import numpy.typing as npt

from rag_model.index.postings.compiled import bare, inlined
from rag_model.index.postings.lists import (
    AT_OUT,
    HEADER,
    NUMBERS,
    ROOM,
    begin_list,
    end_block,
    put_postings,
    put_single,
)
from rag_model.index.postings.machine import load64, store64
from rag_model.index.postings.packing import BLOCK, SIZES, get_varint, unpack

Ints = npt.NDArray[np.int64]
DONE, FULL, DAMAGED = range(3)  # why `carry` ends
# The numbers of a state: where the earlier dictionary's next term is, and how many are left of it; of the term that was
# read last its bytes, its postings, where its list begins and ends, and whether it is still to be written; the next new
# one.
AT, LEFT, SIZE, DF, BEGIN, END, HELD, FRESH = range(8)
STATE = 8
_BEYOND = np.int64(1) << 40  # more than any row


def no_scratch(new: int) -> tuple[npt.NDArray[Any], ...]:
    """Return what lists are written in.

    The open list, the sizes of `encode`, gaps and weights minus 1 of the open block, those of an earlier block, and
    rows and weights of its postings and up to `new` more.
    """
    blocks = (np.empty(BLOCK, np.uint32) for _ in range(4))
    rows = np.empty(BLOCK + new, np.uint32), np.empty(BLOCK + new, np.uint16)
    return np.zeros(NUMBERS, np.int64), np.zeros(SIZES, np.int64), *blocks, *rows


@inlined
def _load(dictionary, lists, rows, state, term):
    """Read the earlier dictionary's next term; return whether its bytes make sense."""
    shared, at = get_varint(dictionary, state[AT], len(dictionary))
    more, at = get_varint(dictionary, at, len(dictionary))
    if shared < 0 or shared > state[SIZE] or more < 0 or more > min(len(dictionary) - at, len(term) - shared):
        return False
    for i in range(more):
        term[shared + i] = dictionary[at + i]
    df, at = get_varint(dictionary, at + more, len(dictionary))
    size, at = get_varint(dictionary, at, len(dictionary))
    begin = state[END]
    if shared + more < 1 or not 1 <= df <= rows or not 1 <= size <= lists - begin:
        return False
    state[AT], state[SIZE], state[DF], state[BEGIN], state[END] = at, shared + more, df, begin, begin + size
    state[LEFT] -= 1
    state[HELD] = 1
    return True


@inlined
def _order(state, term, text, cuts):
    """Return below, equal to or above 0: the earlier term is before, equal to or behind the next new one."""
    new = state[FRESH]
    if new == len(cuts):
        return -1
    if state[HELD] == 0:
        return 1
    begin = cuts[new - 1] if new else 0
    size = cuts[new] - begin
    for i in range(min(size, state[SIZE])):
        if term[i] != text[begin + i]:
            return np.int64(term[i]) - np.int64(text[begin + i])
    return state[SIZE] - size


@inlined
def _single(data, begin, end):
    """Read a list of one posting; return row and weight, or -1."""
    value, begin = get_varint(data, begin, end)
    if value & 1 == 0 or value < 0:
        return value >> 1, 1
    more, begin = get_varint(data, begin, end)
    return (value >> 1 if more >= 0 else -1), more + 2


@inlined
def _move(gaps, less, count, before, moved, new_rows, new_weights, first, last, rows, weights):
    """Fill in a block's postings that stayed, and the new ones [first, last) that come before one of them.

    Returns:
        How many these are, the first of the new ones that is left, and the last row before; -1: there is no such
        passage.
    """
    end = before + count
    for i in range(count):
        end += np.int64(gaps[i])
    if end >= len(moved):
        return 0, first, -1
    row, kept, new = before, np.int64(0), np.int64(new_rows[first]) if first < last else _BEYOND
    for i in range(count):
        row += np.int64(gaps[i]) + 1
        now = np.int64(moved[row])
        while new < now:
            rows[kept], weights[kept] = new, new_weights[first]
            kept, first = kept + 1, first + 1
            new = np.int64(new_rows[first]) if first < last else _BEYOND
        rows[kept], weights[kept] = now, less[i] + 1
        kept += now >= 0  # no branch: which passages stayed cannot be foretold
    return kept, first, end


@inlined
def _put_list(
    data,
    begin,
    end,
    left,
    moved,
    new_rows,
    new_weights,
    first,
    last,
    lengths,
    writer,
    sizes,
    gaps,
    less,
    old_gaps,
    old_less,
    rows,
    weights,
    out,
    at,
):
    """Write the list of a term; return the place behind it, and its postings; -1 of an earlier list that is damaged.

    Args:
        data: uint8, the earlier lists, padded.
        begin: where the term's list begins in them.
        end: where it ends.
        left: its postings; 0: there is no such list.
        moved: (earlier rows,) the row of each now, rising, or -1.
        new_rows: rows of new postings, ascending within a term.
        new_weights: their weights.
        first: the term's first one.
        last: the place behind its last one.
        lengths: (n,) uint16 lengths of all passages.
        writer: here and below, see `no_scratch`.
        sizes: see above.
        gaps: see above.
        less: see above.
        old_gaps: see above.
        old_less: see above.
        rows: see above.
        weights: see above.
        out: uint8 with `ROOM` bytes a posting.
        at: where the list goes.
    """
    if left == 1 and first == last:
        row, weight = _single(data, begin, end)
        if not 0 <= row < len(moved):
            return -1, 0
        now = np.int64(moved[row])
        return (put_single(now, weight, out, at), 1) if now >= 0 else (at, 0)
    most = (left + last - first + BLOCK - 1) // BLOCK  # blocks: there will be fewer if passages went
    blocks_at = at + HEADER * most if most > 1 else at
    begin_list(writer, blocks_at, at if most > 1 else -1)
    total, before = 0, np.int64(-1)
    if left > BLOCK:
        begin += HEADER * ((left + BLOCK - 1) // BLOCK)
    single = left == 1
    while left or first < last:
        count = min(BLOCK, left)
        if single:
            row, weight = _single(data, begin, end)
            old_gaps[0], old_less[0], begin = row, weight - 1, min(row, len(moved) - 1 - row)
        elif left:
            begin = unpack(data, begin, end, count, old_gaps, old_less)
        kept, first, before = _move(
            old_gaps, old_less, count, before, moved, new_rows, new_weights, first, last, rows, weights
        )
        if begin < 0 or before < 0 <= left - 1:
            return -1, 0
        left -= count
        while first < last and left == 0:
            rows[kept], weights[kept] = new_rows[first], new_weights[first]
            kept, first = kept + 1, first + 1
        if not put_postings(rows, weights, 0, kept, 0, lengths, writer, gaps, less, sizes, out, out):
            return -1, 0
        total += kept
    if total == 1:
        return put_single(gaps[0], less[0] + 1, out, at), total
    end_block(writer, gaps, less, sizes, out, out)
    blocks = (total + BLOCK - 1) // BLOCK
    spare = blocks_at - (at + HEADER * blocks if blocks > 1 else at)
    if spare:
        for i in range(
            blocks_at, writer[AT_OUT], 8
        ):  # a header is longer than a word: none is read after it was written
            store64(out, i - spare, load64(out, i))
    return writer[AT_OUT] - spare, total


@bare
def carry(
    dictionary,
    data,
    lists,
    moved,
    text,
    cuts,
    ends,
    new_rows,
    new_weights,
    lengths,
    state,
    term,
    writer,
    sizes,
    gaps,
    less,
    old_gaps,
    old_less,
    rows,
    weights,
    out_text,
    out_cuts,
    out_counts,
    out_sizes,
    out,
):
    """Write lists until all are written, or a batch is full.

    Args:
        dictionary: uint8, of the earlier file.
        data: uint8, its lists, padded.
        lists: bytes of all of them.
        moved: (earlier rows,) int32: the row of each now, rising; -1: it went.
        text: uint8, the terms of new passages one after another, ascending.
        cuts: (t,) where each ends.
        ends: (t,) where the postings of each end.
        new_rows: (p,) uint32: rows now, ascending within a term.
        new_weights: (p,) uint16.
        lengths: (n,) uint16 lengths of all passages now.
        state: (STATE,) int64, of 0 but for `LEFT`; moved.
        term: uint8, with room for the longest term.
        writer: here and below, see `no_scratch`.
        sizes: see above.
        gaps: see above.
        less: see above.
        old_gaps: see above.
        old_less: see above.
        rows: see above.
        weights: see above.
        out_text: uint8, filled with the terms of the batch, one after another.
        out_cuts: int64, filled with the place where each ends.
        out_counts: int64, filled with the postings of each.
        out_sizes: int64, filled with the bytes of each one's list.
        out: uint8, filled with the lists.

    Returns:
        `DONE`, `FULL` or `DAMAGED`, and the terms and the bytes of lists in the batch.
    """
    count, used, at = 0, 0, 0
    while True:
        if state[HELD] == 0 and state[LEFT] and not _load(dictionary, lists, len(moved), state, term):
            return DAMAGED, count, at
        if state[HELD] == 0 and state[FRESH] == len(cuts):
            return DONE, count, at
        order, new = _order(state, term, text, cuts), state[FRESH]
        df, first, last, at_text, size = state[DF], 0, 0, 0, state[SIZE]
        if order >= 0:
            first, last = ends[new - 1] if new else 0, ends[new]
            at_text = cuts[new - 1] if new else 0
            size, df = cuts[new] - at_text, df if order == 0 else 0
        if count == len(out_cuts) or size > len(out_text) - used or df + last - first > (len(out) - at) // ROOM:
            return FULL, count, at
        behind, kept = _put_list(
            data,
            state[BEGIN],
            state[END],
            df,
            moved,
            new_rows,
            new_weights,
            first,
            last,
            lengths,
            writer,
            sizes,
            gaps,
            less,
            old_gaps,
            old_less,
            rows,
            weights,
            out,
            at,
        )
        if behind < 0:
            return DAMAGED, count, at
        if kept:
            for i in range(size):
                out_text[used + i] = text[at_text + i] if order > 0 else term[i]
            used += size
            out_cuts[count], out_counts[count], out_sizes[count] = used, kept, behind - at
            count, at = count + 1, behind
        if order <= 0:
            state[HELD] = 0
        if order >= 0:
            state[FRESH] += 1
