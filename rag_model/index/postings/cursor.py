"""A reader of one term's list, block by block: where search stands in it, as a row of numbers.

A block is decoded only if its postings are wanted; a search that skips a block reads its header alone.
"""

import numpy as np

from rag_model.index.postings.compiled import compiled
from rag_model.index.postings.lists import HEADER, last_row, two_bytes
from rag_model.index.postings.packing import BLOCK, decode, get_varint

# The numbers of a cursor: postings, begin, end and blocks of the list; the block where it stands, where that begins,
# the row before it and its last row; the block that is decoded, its postings, and the place in it.
DF, BEGIN, END, BLOCKS, AT_BLOCK, DATA, BEFORE, LAST, HELD, COUNT, AT = range(11)
NUMBERS = 11
BEYOND = np.int64(1) << 40  # more than any row
_MOST = (np.int64(1) << 32) - 1  # a row or a weight, in arrays of four bytes


@compiled
def part_of(weight, length, weighting):
    """Return what a posting adds to a score for each unit of a question's factor; see `weighting.Weighting`."""
    return np.float32(weight / (weighting.saturation * weight + weighting.fixed + weighting.slope * length))


@compiled
def units(factor, part):
    """Return a posting's part of a score in units: at least one, so that every passage with the term is found."""
    return max(np.int64(1), np.int64(factor * part))


@compiled
def header_of(cursor, block):
    """Return where the header of a block is."""
    return cursor[BEGIN] + HEADER * block


@compiled
def start(cursor, data, lists, rows, weights):
    """Set a cursor to the first block of its list; return whether the list's bytes make sense."""
    begin, end = cursor[BEGIN], cursor[END]
    if begin < 0 or end > lists or begin >= end or cursor[DF] < 1:
        return False
    blocks = (cursor[DF] + BLOCK - 1) // BLOCK
    cursor[BLOCKS], cursor[AT_BLOCK], cursor[BEFORE], cursor[AT], cursor[HELD] = blocks, 0, -1, 0, -1
    if cursor[DF] == 1:
        value, at = get_varint(data, begin, end)
        if value < 0:
            return False
        rows[0], weights[0] = value >> 1, 1
        if value & 1:
            more, at = get_varint(data, at, end)
            if not 0 <= more < _MOST:
                return False
            weights[0] = more + 2
        cursor[LAST], cursor[HELD], cursor[COUNT] = rows[0], 0, 1
        return True
    if blocks == 1:
        cursor[COUNT] = cursor[DF]
        if decode(data, begin, end, -1, cursor[DF], rows, weights) < 0:
            return False
        cursor[LAST], cursor[HELD] = rows[cursor[DF] - 1], 0
        return True
    cursor[DATA] = begin + HEADER * blocks
    if cursor[DATA] > end:
        return False
    cursor[LAST] = last_row(data, begin)
    return True


@compiled
def next_block(cursor, data):
    """Move a cursor to its next block; behind the last one its `LAST` is beyond every row."""
    header = header_of(cursor, cursor[AT_BLOCK])
    if cursor[BLOCKS] > 1:
        cursor[DATA] += two_bytes(data, header + 4)
    cursor[AT_BLOCK] += 1
    cursor[AT] = 0
    if cursor[AT_BLOCK] >= cursor[BLOCKS]:
        cursor[LAST] = BEYOND
        cursor[BEFORE] = cursor[LAST]
    else:
        cursor[BEFORE] = cursor[LAST]
        cursor[LAST] = last_row(data, header + HEADER)


@compiled
def read_block(cursor, data, rows, weights):
    """Decode the cursor's block, if it is not; return whether its bytes make sense."""
    if cursor[HELD] == cursor[AT_BLOCK]:
        return True
    block = cursor[AT_BLOCK]
    count = BLOCK if block + 1 < cursor[BLOCKS] else cursor[DF] - BLOCK * block
    if decode(data, cursor[DATA], cursor[END], cursor[BEFORE], count, rows, weights) < 0:
        return False
    if rows[count - 1] != cursor[LAST]:
        return False
    cursor[HELD], cursor[COUNT] = block, count
    return True


@compiled
def read_list(data, lists, found, rows, weights):
    """Decode a whole list.

    Args:
        data: uint8, the lists, padded.
        lists: bytes of all lists.
        found: (3,) postings, begin and end of the list.
        rows: (postings,) filled with rows, ascending.
        weights: (postings,) int64, filled with weights.

    Returns:
        Whether the list's bytes make sense.
    """
    cursor, at = np.zeros(NUMBERS, np.int64), 0
    cursor[DF], cursor[BEGIN], cursor[END] = found[0], found[1], found[2]
    held_rows, held_weights = np.empty(BLOCK, np.int64), np.empty(BLOCK, np.int64)
    if not start(cursor, data, lists, held_rows, held_weights):
        return False
    while cursor[AT_BLOCK] < cursor[BLOCKS]:
        if not read_block(cursor, data, held_rows, held_weights) or cursor[LAST] > _MOST:  # rows may hold four bytes
            return False
        for i in range(cursor[COUNT]):
            rows[at + i], weights[at + i] = held_rows[i], held_weights[i]
        at += cursor[COUNT]
        next_block(cursor, data)
    return True
