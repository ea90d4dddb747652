"""The list of one term as bytes: its postings in blocks, and what search must know of a block to skip it.

A list of one posting is a varint of 2 * row, + 1 if its weight is above 1; then a varint of the weight minus 2. A list
of up to 128 is one block. A longer one begins with a header for each block, all headers first:

* 4 bytes: the block's last row
* 2 bytes: its size in bytes
* 1 byte: its largest weight; 255: that, or more
* 2 bytes: the length of its shortest passage

BM25's part of a posting rises with the weight and falls with the length, whatever k1, b, the number of passages and
their mean length are. So a bound by the largest weight and the shortest length stays valid when lists of other parts
are merged behind it (Mackenzie et al. 2020 keep such pairs for the same reason).
"""

import numpy as np

from rag_model.index.postings.compiled import bare, compiled, inlined
from rag_model.index.postings.packing import BLOCK, SIZES, encode, put_varint

HEADER = 9  # bytes of a block's header
MOST_WEIGHT = 255  # in a header
MOST_LENGTH = 65_535  # of a passage
ROOM = 20  # bytes that a posting takes at most, headers and exceptions included


@inlined
def put_header(out, at, last, size, weight, shortest):
    """Write the header of a block at out[at:]."""
    for byte in range(4):
        out[at + byte] = (last >> (8 * byte)) & 255
    out[at + 4], out[at + 5] = size & 255, size >> 8
    out[at + 6] = min(weight, MOST_WEIGHT)
    out[at + 7], out[at + 8] = shortest & 255, shortest >> 8


@bare
def last_row(data, at):
    """Return the last row of the block whose header is at data[at:]."""
    return (
        np.int64(data[at])
        | (np.int64(data[at + 1]) << 8)
        | (np.int64(data[at + 2]) << 16)
        | (np.int64(data[at + 3]) << 24)
    )


@bare
def two_bytes(data, at):
    """Return the number in data[at:at + 2]."""
    return np.int64(data[at]) | (np.int64(data[at + 1]) << 8)


# The numbers of a list that is being written: postings in the open block, the row before the next posting, the largest
# weight and the shortest passage of the open block; the bits of its gaps, and of its weights minus 1; where the next
# block and the next header go.
HELD, BEFORE, HEAVIEST, SHORTEST, GAPS, WEIGHTS, AT_OUT, PLACE = range(8)
NUMBERS = 8


@bare
def begin_list(writer, at, place):
    """Begin a list whose blocks go to `at`, and headers to `place`; -1: it has none."""
    writer[HELD], writer[BEFORE], writer[HEAVIEST], writer[SHORTEST] = 0, -1, 0, MOST_LENGTH
    writer[GAPS], writer[WEIGHTS] = 0, 0
    writer[AT_OUT], writer[PLACE] = at, place


@bare
def end_block(writer, gaps, less, sizes, out, headers):
    """Write the open block, if it has postings."""
    if writer[HELD] == 0:
        return
    behind = encode(gaps, less, writer[HELD], writer[GAPS], writer[WEIGHTS], sizes, out, writer[AT_OUT])
    if writer[PLACE] >= 0:
        size = behind - writer[AT_OUT]
        put_header(headers, writer[PLACE], writer[BEFORE], size, writer[HEAVIEST], writer[SHORTEST])
        writer[PLACE] += HEADER
    writer[AT_OUT], writer[HELD], writer[HEAVIEST], writer[SHORTEST] = behind, 0, 0, MOST_LENGTH
    writer[GAPS], writer[WEIGHTS] = 0, 0


@inlined
def put_postings(rows, weights, first, last, first_row, lengths, writer, gaps, less, sizes, out, headers):
    """Add postings [first, last) to the open list.

    Args:
        rows: (p,) ascending, counted from `first_row`.
        weights: (p,) at least 1.
        first: see above.
        last: see above.
        first_row: see `rows`.
        lengths: (n,) uint16 lengths of all passages.
        writer: see `begin_list`.
        gaps: (128,) uint32, of the open block.
        less: (128,) uint32: weights minus 1, of the open block.
        sizes: (SIZES,) int64, for `encode`.
        out: uint8 with `ROOM` bytes a posting, where blocks go.
        headers: uint8, where headers go.

    Returns:
        Whether rows are ascending and in the corpus, and weights at least 1.
    """
    while first < last:
        held, before = writer[HELD], writer[BEFORE]
        some = min(last - first, BLOCK - held)
        all_gaps, all_weights, heaviest = np.int64(0), np.int64(0), np.int64(0)
        at, to = np.uint64(first), np.uint64(held)  # indices that have no sign need no look at it, and are vectors
        for i in range(np.uint64(some)):
            row, weight = np.int64(rows[at + i]) + first_row, np.int64(weights[at + i])
            gap, more = row - before - 1, weight - 1
            gaps[to + i], less[to + i] = gap, more
            all_gaps |= gap
            all_weights |= more
            heaviest = max(heaviest, weight)
            before = row
        if all_gaps | all_weights < 0 or before >= len(lengths):
            return False
        writer[HELD], writer[BEFORE], writer[HEAVIEST] = held + some, before, max(heaviest, writer[HEAVIEST])
        writer[GAPS] |= all_gaps
        writer[WEIGHTS] |= all_weights
        if writer[PLACE] >= 0:
            shortest = np.int64(lengths[before])
            for i in range(np.uint64(some)):
                shortest = min(shortest, np.int64(lengths[np.uint64(np.int64(rows[at + i]) + first_row)]))
            writer[SHORTEST] = min(writer[SHORTEST], shortest)
        if held + some == BLOCK:
            end_block(writer, gaps, less, sizes, out, headers)
        first += some
    return True


@inlined
def put_single(row, weight, out, at):
    """Write a list of one posting at out[at:]; return the place behind it."""
    at = put_varint(out, at, 2 * row + (1 if weight > 1 else 0))
    return put_varint(out, at, weight - 2) if weight > 1 else at


@compiled
def put_lists(shares, counts, ends, parts, first_rows, places, rows, weights, lengths, out, sizes):
    """Write the lists of several terms one after another.

    Args:
        shares: (s,) postings of each share of a term: what one part has of it; terms, and their parts, in order.
        counts: (t,) postings of each term.
        ends: (t,) where the shares of each term end.
        parts: (s,) the part of each share.
        first_rows: (parts,) where the rows of each part begin.
        places: (parts,) where each part's next posting is; moved.
        rows: (p,) of the part; ascending within each share.
        weights: (p,)
        lengths: (n,) uint16 lengths of all passages.
        out: uint8 with `ROOM` bytes a posting.
        sizes: (t,) int64, filled with the bytes of each list.

    Returns:
        The bytes written; -1: postings are damaged.
    """
    at, share = 0, 0
    writer = np.zeros(NUMBERS, np.int64)
    gaps, less, scratch = np.empty(BLOCK, np.uint32), np.empty(BLOCK, np.uint32), np.zeros(SIZES, np.int64)
    for term in range(len(ends)):
        begin = at
        if counts[term] == 1:
            part = parts[share]
            row, weight = np.int64(rows[places[part]]) + first_rows[part], np.int64(weights[places[part]])
            if row >= len(lengths) or weight < 1:
                return -1
            at = put_single(row, weight, out, at)
            places[part] += 1
            share += 1
        else:
            blocks = (counts[term] + BLOCK - 1) // BLOCK
            begin_list(writer, at + HEADER * blocks if blocks > 1 else at, at if blocks > 1 else -1)
            while share < ends[term]:
                part, first = parts[share], places[parts[share]]
                last = first + shares[share]
                places[part] = last
                share += 1
                if not put_postings(
                    rows, weights, first, last, first_rows[part], lengths, writer, gaps, less, scratch, out, out
                ):
                    return -1
            end_block(writer, gaps, less, scratch, out, out)
            at = writer[AT_OUT]
        sizes[term] = at - begin
    return at
