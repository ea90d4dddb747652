"""Carry the lists of an index file over to a later one: postings of passages that stayed get their new rows.

Lists are read and written one after another, in the order of their terms, with the postings of new passages among
them. A posting takes some twenty nanoseconds, where counting it from text takes hundreds. No block is copied: from the
first passage of a list on that came or went, each block of 128 begins with another posting.
"""

import numpy as np
import numpy.typing as npt

from rag_model.index.postings.compiled import bare
from rag_model.index.postings.lists import (
    AT_OUT,
    BEFORE,
    HEADER,
    HEAVIEST,
    NUMBERS,
    ROOM,
    SHORTEST,
    begin_list,
    end_block,
    put_postings,
    put_single,
)
from rag_model.index.postings.lists import HELD as OPEN
from rag_model.index.postings.packing import BLOCK, SIZES, decode, get_varint

Ints = npt.NDArray[np.int64]
DONE, FULL, DAMAGED = range(3)  # why `carry` ends
# The numbers of a state: where the earlier dictionary's next term is, and how many are left of it; of the term that was
# read last its bytes, its postings, where its list begins and ends, and whether it is still to be written; the next new
# one.
AT, LEFT, SIZE, DF, BEGIN, END, HELD, FRESH = range(8)
STATE = 8
_BEYOND = np.int64(1) << 40  # more than any row


def no_scratch() -> tuple[Ints, ...]:
    """Return what lists are written in: the open list, the sizes of `encode`, its open block, and an earlier block."""
    return (np.zeros(NUMBERS, np.int64), np.zeros(SIZES, np.int64), *(np.empty(BLOCK, np.int64) for _ in range(4)))


@bare
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


@bare
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


@bare
def _single(data, begin, end):
    """Read a list of one posting; return row and weight, or -1."""
    value, begin = get_varint(data, begin, end)
    if value & 1 == 0 or value < 0:
        return value >> 1, 1
    more, begin = get_varint(data, begin, end)
    return (value >> 1 if more >= 0 else -1), more + 2


@bare
def _put_block(
    rows, weights, count, moved, new_rows, new_weights, first, last, lengths, writer, gaps, less, sizes, out
):
    """Add the postings of a block that stayed, and the new ones [first, last) that come before one of them.

    Returns:
        The first of the new ones that is left, and how many were added.
    """
    held, before, heaviest, shortest = writer[OPEN], writer[BEFORE], writer[HEAVIEST], writer[SHORTEST]
    new, added, i = new_rows[first] if first < last else _BEYOND, 0, 0
    while i < count:
        row, weight = np.int64(moved[rows[i]]), weights[i]
        if row < 0:
            i += 1
            continue
        if new < row:
            row, weight = new, new_weights[first]
            first += 1
            new = new_rows[first] if first < last else _BEYOND
        else:
            i += 1
        gaps[held], less[held] = row - before - 1, weight - 1
        heaviest, shortest = max(heaviest, weight), min(shortest, np.int64(lengths[row]))
        before = row
        held += 1
        added += 1
        if held == BLOCK:
            writer[OPEN], writer[BEFORE], writer[HEAVIEST], writer[SHORTEST] = held, before, heaviest, shortest
            end_block(writer, gaps, less, sizes, out, out)
            held, heaviest, shortest = writer[OPEN], writer[HEAVIEST], writer[SHORTEST]
    writer[OPEN], writer[BEFORE], writer[HEAVIEST], writer[SHORTEST] = held, before, heaviest, shortest
    return first, added


@bare
def _put_list(
    data,
    words,
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
    rows,
    weights,
    out,
    at,
):
    """Write the list of a term; return the place behind it, and its postings; -1 of an earlier list that is damaged.

    Args:
        data: uint8, the earlier lists, padded.
        words: the same bytes as uint64.
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
        rows: see above.
        weights: see above.
        out: uint8 with `ROOM` bytes a posting.
        at: where the list goes.
    """
    most = (left + last - first + BLOCK - 1) // BLOCK  # blocks: there will be fewer if passages went
    blocks_at = at + HEADER * most if most > 1 else at
    begin_list(writer, blocks_at, at if most > 1 else -1)
    kept, before = 0, np.int64(-1)
    if left > BLOCK:
        begin += HEADER * ((left + BLOCK - 1) // BLOCK)
    while left:
        count = min(BLOCK, left)
        if left == 1 and before < 0:
            rows[0], weights[0] = _single(data, begin, end)
        else:
            begin = decode(data, words, begin, end, before, count, rows, weights)
        before = rows[count - 1]
        if begin < 0 or not 0 <= before < len(moved):
            return -1, 0
        left -= count
        first, added = _put_block(
            rows, weights, count, moved, new_rows, new_weights, first, last, lengths, writer, gaps, less, sizes, out
        )
        kept += added
    kept += last - first
    if first < last and not put_postings(
        new_rows, new_weights, first, last, 0, lengths, writer, gaps, less, sizes, out, out
    ):
        return -1, 0
    if kept == 1:
        return put_single(gaps[0], less[0] + 1, out, at), kept
    end_block(writer, gaps, less, sizes, out, out)
    blocks = (kept + BLOCK - 1) // BLOCK
    spare = blocks_at - (at + HEADER * blocks if blocks > 1 else at)
    if spare:
        for i in range(blocks_at, writer[AT_OUT]):
            out[i - spare] = out[i]
    return writer[AT_OUT] - spare, kept


@bare
def carry(
    dictionary,
    data,
    words,
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
        words: the same bytes as uint64.
        lists: bytes of all of them.
        moved: (earlier rows,) int32: the row of each now, rising; -1: it went.
        text: uint8, the terms of new passages one after another, ascending.
        cuts: (t,) where each ends.
        ends: (t,) where the postings of each end.
        new_rows: (p,) int64: rows now, ascending within a term.
        new_weights: (p,) int64.
        lengths: (n,) uint16 lengths of all passages now.
        state: (STATE,) int64, of 0 but for `LEFT`; moved.
        term: uint8, with room for the longest term.
        writer: here and below, see `no_scratch`.
        sizes: see above.
        gaps: see above.
        less: see above.
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
            words,
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
