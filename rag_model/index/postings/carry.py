"""Carry the lists of an index file over to a later one: postings of passages that stayed get their new rows.

Lists are read and written one after another, in the order of their terms, with the postings of new passages among
them. A posting takes some six nanoseconds, where counting it from text takes hundreds. A list of up to 128 is copied if
its passages stayed and their rows rose by the same. No block of a longer one is: from the first passage on that came or
went, each block of 128 begins with another posting.
"""

from typing import Any

import numpy as np
import numpy.typing as npt

from rag_model.index.postings.compiled import bare, inlined
from rag_model.index.postings.lists import AT_OUT, HEADER, NUMBERS, ROOM, begin_list, put_single
from rag_model.index.postings.machine import load64, store64
from rag_model.index.postings.moving import APART, ROW, WEIGHT, copy_block, move, put_block, shift_of
from rag_model.index.postings.packing import BLOCK, PADDING, SIZES, get_varint, unpack, unpack_gaps

Ints = npt.NDArray[np.int64]
DONE, FULL, DAMAGED = range(3)  # why `carry` ends
# The numbers of a state: where the earlier dictionary's next term is, and how many are left of it; of the term that was
# read last its bytes, its postings, where its list begins and ends, and whether it is still to be written; the next new
# one.
AT, LEFT, SIZE, DF, BEGIN, END, HELD, FRESH = range(8)
STATE = 8


def no_scratch(new: int) -> tuple[npt.NDArray[Any], ...]:
    """Return what lists are written in.

    The open list, the sizes of `encode`, gaps and weights minus 1 of a block, and the words of postings: of a block,
    of an earlier one, and of up to `new` more.
    """
    blocks = (np.empty(BLOCK, np.uint32) for _ in range(2))
    return np.zeros(NUMBERS, np.int64), np.zeros(SIZES, np.int64), *blocks, np.empty(2 * BLOCK + new, np.int64)


@inlined
def _load(dictionary, lists, rows, state, term):
    """Read the earlier dictionary's next term; return whether its bytes make sense."""
    shared, at = get_varint(dictionary, state[AT], len(dictionary))
    more, at = get_varint(dictionary, at, len(dictionary))
    if not 0 <= shared <= state[SIZE] or not 0 <= more <= min(len(dictionary) - at, len(term) - PADDING - shared):
        return False
    if more <= 8 and at + 8 <= len(dictionary):
        store64(term, shared, load64(dictionary, at))
    else:
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
def _copied(data, begin, end, count, moved, gaps, out, at):
    """Write a list of one block again whose rows all stayed and rose by the same; return the place behind it, or -1."""
    if unpack_gaps(data, begin, end, count, gaps) < 0:
        return -1
    shift, row = shift_of(gaps, count, moved), np.int64(gaps[0])
    return copy_block(data, begin, end, count, row, row + shift, out, at) if shift != APART else -1


@inlined
def _read_block(data, begin, end, df, count, rows, gaps, less):
    """Read a block of a list of `df` postings of `rows` passages; return the place behind it, or -1."""
    if df > 1:
        return unpack(data, begin, end, count, gaps, less)
    row, weight = _single(data, begin, end)
    gaps[0], less[0] = row, weight - 1
    return end if 0 <= row < rows else -1


@inlined
def _put_full(words, held, writer, gaps, less, sizes, out):
    """Write as many whole blocks as there are; return how many postings these have; -1: they make no sense."""
    done = 0
    while held - done >= BLOCK:
        if not put_block(words, done, BLOCK, writer, gaps, less, sizes, out):
            return -1
        done += BLOCK
    if done:
        for i in range(np.uint64(held - done)):
            words[i] = words[i + np.uint64(done)]
    return done


@inlined
def _put_blocks(data, begin, end, df, moved, new, first, last, writer, sizes, gaps, less, words, out):
    """Write the blocks of an open list; return its postings; -1 of an earlier list that is damaged."""
    total, before, held, left = 0, np.int64(-1), 0, df
    if df > BLOCK:
        begin += HEADER * ((df + BLOCK - 1) // BLOCK)
    while left or first < last:
        if left:
            count = min(BLOCK, left)
            begin = _read_block(data, begin, end, df, count, len(moved), gaps, less)
            if begin < 0:
                return -1
            held, first, before = move(gaps, less, count, before, moved, new, first, last, words, held)
            if before < 0:
                return -1
            left -= count
        while first < last and left == 0:
            words[held] = new[first]
            held, first = held + 1, first + 1
        done = _put_full(words, held, writer, gaps, less, sizes, out)
        if done < 0:
            return -1
        held, total = held - done, total + done
    total += held
    if total == 1:  # no block
        return 1 if words[0] & WEIGHT else -1
    return total if held == 0 or put_block(words, 0, held, writer, gaps, less, sizes, out) else -1


@inlined
def _put_list(data, begin, end, df, moved, new, first, last, writer, sizes, gaps, less, words, out, at):
    """Write the list of a term; return the place behind it, and its postings; -1 of an earlier list that is damaged.

    Args:
        data: uint8, the earlier lists, padded.
        begin: where the term's list begins in them.
        end: where it ends.
        df: its postings; 0: there is no such list.
        moved: (earlier rows,) the word of each now, without a weight, rising, or `WENT` (`moving`).
        new: words of new postings, ascending within a term.
        first: the term's first one.
        last: the place behind its last one.
        writer: here and below, see `no_scratch`.
        sizes: see above.
        gaps: see above.
        less: see above.
        words: see above.
        out: uint8 with `ROOM` bytes a posting.
        at: where the list goes.
    """
    if df == 1 and first == last:
        row, weight = _single(data, begin, end)
        if not 0 <= row < len(moved):
            return -1, 0
        now = moved[row]
        return (put_single(now >> ROW, weight, out, at), 1) if now >= 0 else (at, 0)
    if df <= BLOCK and first == last:
        behind = _copied(data, begin, end, df, moved, gaps, out, at)
        if behind >= 0:
            return behind, df
    most = (df + last - first + BLOCK - 1) // BLOCK  # blocks: there will be fewer if passages went
    blocks_at = at + HEADER * most if most > 1 else at
    begin_list(writer, blocks_at, at if most > 1 else -1)
    total = _put_blocks(data, begin, end, df, moved, new, first, last, writer, sizes, gaps, less, words, out)
    if total == 1:
        return put_single(words[0] >> ROW, words[0] & WEIGHT, out, at), total
    blocks = (total + BLOCK - 1) // BLOCK
    spare = blocks_at - (at + HEADER * blocks if blocks > 1 else at)
    if spare and total > 0:
        for i in range(blocks_at, writer[AT_OUT], 8):  # a header is longer than a word: none is read after a write
            store64(out, i - spare, load64(out, i))
    return (writer[AT_OUT] - spare if total >= 0 else -1), total


@inlined
def _put_term(text, begin, size, whole, out, at):
    """Copy the term text[begin:begin + size]; `whole`: both have bytes behind it, so words of eight may be copied."""
    if whole:
        for i in range(0, size, 8):
            store64(out, at + i, load64(text, begin + i))
    else:
        for i in range(size):
            out[at + i] = text[begin + i]


@bare
def carry(
    dictionary,
    data,
    lists,
    moved,
    text,
    cuts,
    ends,
    new,
    state,
    term,
    writer,
    sizes,
    gaps,
    less,
    words,
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
        moved: (earlier rows,) int64: the word of each now, without a weight, rising, or `WENT`.
        text: uint8, the terms of new passages one after another, ascending.
        cuts: (t,) where each ends.
        ends: (t,) where the postings of each end.
        new: (p,) int64: words of their postings, ascending within a term.
        state: (STATE,) int64, of 0 but for `LEFT`; moved.
        term: uint8, with room for the longest term, and `PADDING` more.
        writer: here and below, see `no_scratch`.
        sizes: see above.
        gaps: see above.
        less: see above.
        words: see above.
        out_text: uint8, filled with the terms of the batch, one after another; `PADDING` more are for its own use.
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
        order, one = _order(state, term, text, cuts), state[FRESH]
        df, first, last, at_text, size = state[DF], 0, 0, 0, state[SIZE]
        if order >= 0:
            first, last = ends[one - 1] if one else 0, ends[one]
            at_text = cuts[one - 1] if one else 0
            size, df = cuts[one] - at_text, df if order == 0 else 0
        if (
            count == len(out_cuts)
            or size > len(out_text) - PADDING - used
            or df + last - first > (len(out) - at) // ROOM
        ):
            return FULL, count, at
        behind, kept = _put_list(
            data,
            state[BEGIN],
            state[END],
            df,
            moved,
            new,
            first,
            last,
            writer,
            sizes,
            gaps,
            less,
            words,
            out,
            at,
        )
        if behind < 0:
            return DAMAGED, count, at
        if kept:
            if order > 0:
                _put_term(text, at_text, size, False, out_text, used)
            else:
                _put_term(term, 0, size, True, out_text, used)
            used += size
            out_cuts[count], out_counts[count], out_sizes[count] = used, kept, behind - at
            count, at = count + 1, behind
        if order <= 0:
            state[HELD] = 0
        if order >= 0:
            state[FRESH] += 1
