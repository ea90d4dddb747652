"""Blocks of postings on their way to a later file: which of them stayed, and at which rows.

Between blocks, a posting is a word of eight bytes: 30 bits of the row now, 16 of the passage's length, 16 of the
weight. So words ascend as their rows do, and one access to memory tells of an earlier row all that a block needs.
"""

import numpy as np

from rag_model.index.postings.compiled import inlined
from rag_model.index.postings.lists import (
    BEFORE,
    GAPS,
    HEAVIEST,
    HELD,
    MOST_LENGTH,
    ROOM,
    SHORTEST,
    WEIGHTS,
    end_block,
)
from rag_model.index.postings.machine import bit_length, load64, store64
from rag_model.index.postings.packing import PADDING

ROW, LENGTH = 32, 16  # lower bits of a word than those of the row, and of the length
MOST_ROWS = 1 << 30
WEIGHT = (1 << LENGTH) - 1  # the bits of the weight
WENT = np.int64(-1 << 62)  # in place of a word: below 0 with any weight, in two bits that no word has
APART = np.int64(1) << 40  # more than any difference of rows
_ONE = np.uint64(1)


@inlined
def move(gaps, less, count, before, moved, new, first, last, words, held):
    """Put a block's postings that stayed, and the new ones [first, last) that come before one of them, at words[held:].

    Args:
        gaps: (count,) uint32 gaps of the block's rows, see `packing.encode`.
        less: (count,) uint32 weights minus 1.
        count: postings of the block.
        before: the row before it; -1 at the beginning of a list.
        moved: (earlier rows,) the word of each now, without a weight, rising, or `WENT`.
        new: words of new postings, ascending.
        first: see above.
        last: see above.
        words: with room for all of them.
        held: how many are there already.

    Returns:
        The place behind them, the first of the new ones that is left, and the last row of the block; -1: there is no
        such passage, or a weight is more than any.
    """
    end, weights = before + count, np.uint32(0)
    for i in range(np.uint64(count)):
        end += np.int64(gaps[i])
        weights |= less[i]
    if end >= len(moved) or weights > WEIGHT:
        return held, first, -1
    row, begin, went = np.uint64(before + 1), np.uint64(held), np.int64(0)
    for i in range(np.uint64(count)):
        row += np.uint64(gaps[i])
        word = moved[row]
        words[begin + i] = word + np.int64(less[i]) + 1
        went |= word
        row += _ONE
    if went < 0:  # a second loop takes less than a place to write in the first one, which has few registers left
        to = begin
        for i in range(np.uint64(count)):
            word = words[begin + i]
            words[to] = word
            to += np.uint64(word >= 0)  # no branch: which passages stayed cannot be foretold
        count = np.int64(to) - held
    held += count
    if first < last and count:
        first, held = _merge(new, first, last, words, held - count, held)
    return held, first, end


@inlined
def _merge(new, first, last, words, begin, end):
    """Put those of new[first:last] among words[begin:end] that are below the last one of these.

    Returns:
        The first that is left, and the place behind all.
    """
    behind = first
    while behind < last and new[behind] < words[end - 1]:
        behind += 1
    at, stop = np.uint64(begin), np.uint64(end)
    for one in range(behind - 1, first - 1, -1):
        word, more, place = new[one], np.uint64(one + 1 - first), at
        for i in range(at, stop):  # counted, not looked for: so several are compared at once
            place += np.uint64(words[i] < word)
        while stop > place:
            stop -= _ONE
            words[stop + more] = words[stop]
        words[place + more - _ONE] = word
    return behind, end + behind - first


@inlined
def put_block(words, at, count, writer, gaps, less, sizes, out):
    """Write words[at:at + count] as the next block of the open list.

    Args:
        words: see above.
        at: see above.
        count: 1 ... 128.
        writer: see `lists.begin_list`; its block is empty.
        gaps: (128,) uint32, filled with the block's.
        less: (128,) uint32, filled with its weights minus 1.
        sizes: (SIZES,) int64, for `encode`.
        out: uint8, where blocks and headers go.

    Returns:
        Whether rows ascend and weights are at least 1; if not, nothing is written.
    """
    before, first = writer[BEFORE], np.uint64(at)
    all_gaps, all_weights, heaviest, shortest = np.int64(0), np.int64(0), np.int64(0), np.int64(MOST_LENGTH)
    for i in range(np.uint64(count)):
        word = words[first + i]
        row, weight = word >> ROW, word & WEIGHT
        gap, more = row - before - 1, weight - 1
        gaps[i], less[i] = gap, more
        all_gaps |= gap
        all_weights |= more
        heaviest, shortest = max(heaviest, weight), min(shortest, (word >> LENGTH) & MOST_LENGTH)
        before = row
    if all_gaps | all_weights < 0:
        return False
    writer[HELD], writer[BEFORE], writer[HEAVIEST], writer[SHORTEST] = count, before, heaviest, shortest
    writer[GAPS], writer[WEIGHTS] = all_gaps, all_weights
    end_block(writer, gaps, less, sizes, out, out)
    return True


@inlined
def shift_of(gaps, count, moved):
    """Return by how much all rows of a list's only block rise; `APART`: not all stayed, or some rise by more.

    Args:
        gaps: (count,) uint32 gaps of its rows, which may be damaged.
        count: at least 1.
        moved: see `move`.
    """
    row, shift, apart = np.uint64(0), np.int64(0), np.int64(0)
    for i in range(np.uint64(count)):
        row += np.uint64(gaps[i])
        if row >= np.uint64(len(moved)):
            return APART
        word = moved[row]
        rise = (word >> ROW) - np.int64(row)
        if i == 0:
            shift = rise
        apart |= (rise ^ shift) | (word & WENT)
        row += _ONE
    return shift if apart == 0 else APART


@inlined
def copy_block(data, begin, end, count, row, now, out, at):
    """Write a list's only block data[begin:end] again, whose first row becomes another and whose gaps stay.

    Args:
        data: uint8, followed by `PADDING` bytes.
        begin: see above.
        end: see above.
        count: its postings, at least 2.
        row: its first row, the first of its gaps.
        now: that row now.
        out: uint8 with `ROOM` bytes a posting.
        at: where it goes.

    Returns:
        The place behind it; -1, and nothing is written, unless the first row has as many bits as before and is not an
        exception. Then the widths with the fewest bytes are those of before, and only that number's bits change.
    """
    width = np.int64(data[begin]) & 127
    bits = bit_length(row)
    if now < 0 or bit_length(now) != bits or bits > width or end - begin > ROOM * count - PADDING:
        return -1
    for i in range(0, end - begin, 8):
        store64(out, at + i, load64(data, begin + i))
    others = load64(data, begin + 2) >> np.uint64(width) << np.uint64(width)  # the first gap is behind two bytes
    store64(out, at + 2, others | np.uint64(now))
    return at + end - begin
