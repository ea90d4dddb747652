"""The byte format of a posting list: blocks of postings, with headers that let a search skip
blocks.

A list of one posting is a varint of 2 * row, plus 1 if the weight is above 1, and in this case a
varint of the weight minus 2. A list of up to 128 postings is one block. A longer one begins with
the headers of all its blocks:

* 4 bytes: the block's last row
* 2 bytes: its size in bytes
* 1 byte: its largest weight, up to 255
* 2 bytes: the length of its shortest passage

A posting's contribution to a BM25 score grows with the weight and falls with the length, whatever
k1, b, the number of passages and their mean length are. So an upper bound by the largest weight and
the shortest length stays valid when lists of other parts are appended (Mackenzie et al. 2020 store
such pairs for the same reason).
"""

import numpy as np

from rag_model.compiled import bare, compiled, inlined
from rag_model.index.postings.packing import BLOCK, SCRATCH_SIZE, encode_block, write_varint

HEADER_BYTES = 9  # bytes of a block's header
MAX_HEADER_WEIGHT = 255  # larger weights are stored as this value
MAX_LENGTH = 65_535  # maximum recorded length of a passage
MAX_POSTING_BYTES = 20  # upper bound of the bytes of a posting, with headers and exceptions
# Elements of a writer, the state of a list that is being written: the number of postings in the
# open block; the row before the next posting; the largest weight and the shortest passage of the
# open block; the OR of its gaps, and of its weights minus 1; the offsets of the next block and of
# the next header.
OPEN_COUNT, PREVIOUS_ROW, MAX_WEIGHT, MIN_LENGTH, GAP_BITS, WEIGHT_BITS, BLOCK_OFFSET, HEADER_OFFSET = range(8)
WRITER_SIZE = 8


@inlined
def _write_header(out, offset, last_row, block_bytes, max_weight, min_length):
    """Write the header of a block at `offset`."""
    for byte_index in range(4):
        out[offset + byte_index] = (last_row >> (8 * byte_index)) & 255
    out[offset + 4], out[offset + 5] = block_bytes & 255, block_bytes >> 8
    out[offset + 6] = min(max_weight, MAX_HEADER_WEIGHT)
    out[offset + 7], out[offset + 8] = min_length & 255, min_length >> 8


@bare
def read_last_row(data, offset):
    """Return the last row of the block whose header is at `offset`."""
    return (
        np.int64(data[offset])
        | (np.int64(data[offset + 1]) << 8)
        | (np.int64(data[offset + 2]) << 16)
        | (np.int64(data[offset + 3]) << 24)
    )


@bare
def read_uint16(data, offset):
    """Return the little-endian number in data[offset:offset + 2]."""
    return np.int64(data[offset]) | (np.int64(data[offset + 1]) << 8)


@bare
def begin_list(writer, block_offset, header_offset):
    """Start a list with its blocks at `block_offset` and its headers at `header_offset` (-1:
    without headers).
    """
    writer[OPEN_COUNT], writer[PREVIOUS_ROW], writer[MAX_WEIGHT], writer[MIN_LENGTH] = 0, -1, 0, MAX_LENGTH
    writer[GAP_BITS], writer[WEIGHT_BITS] = 0, 0
    writer[BLOCK_OFFSET], writer[HEADER_OFFSET] = block_offset, header_offset


@bare
def end_block(writer, gaps, weights_less_one, sizes, out, headers):
    """Write the open block and its header, unless the block is empty."""
    if writer[OPEN_COUNT] == 0:
        return
    end_offset = encode_block(
        gaps,
        weights_less_one,
        writer[OPEN_COUNT],
        writer[GAP_BITS],
        writer[WEIGHT_BITS],
        sizes,
        out,
        writer[BLOCK_OFFSET],
    )
    if writer[HEADER_OFFSET] >= 0:
        block_bytes = end_offset - writer[BLOCK_OFFSET]
        _write_header(
            headers, writer[HEADER_OFFSET], writer[PREVIOUS_ROW], block_bytes, writer[MAX_WEIGHT], writer[MIN_LENGTH]
        )
        writer[HEADER_OFFSET] += HEADER_BYTES
    writer[BLOCK_OFFSET], writer[OPEN_COUNT], writer[MAX_WEIGHT], writer[MIN_LENGTH] = end_offset, 0, 0, MAX_LENGTH
    writer[GAP_BITS], writer[WEIGHT_BITS] = 0, 0


@inlined
def add_postings(rows, weights, first, end, first_row, lengths, writer, gaps, weights_less_one, sizes, out, headers):
    """Add the postings [first, end) to the open list.

    Args:
        rows: (p,) ascending, relative to `first_row`.
        weights: (p,) at least 1.
        first: index of the first posting.
        end: index after the last posting.
        first_row: global row number of a 0 in `rows`.
        lengths: (n,) uint16 lengths of all passages.
        writer: state of the list, see `begin_list`.
        gaps: (128,) uint32, of the open block.
        weights_less_one: (128,) uint32 weights minus 1, of the open block.
        sizes: (SCRATCH_SIZE,) int64, for `encode_block`.
        out: uint8, at least `MAX_POSTING_BYTES` per posting; receives blocks.
        headers: uint8, receives headers.

    Returns:
        Whether the rows ascend and exist, and all weights are at least 1.
    """
    while first < end:
        n_open, previous_row = writer[OPEN_COUNT], writer[PREVIOUS_ROW]
        n_postings = min(end - first, BLOCK - n_open)
        gap_bits, weight_bits, max_weight = np.int64(0), np.int64(0), np.int64(0)
        # Unsigned indices need no check for negative ones, so that the loop is vectorised.
        source, target = np.uint64(first), np.uint64(n_open)
        for i in range(np.uint64(n_postings)):
            row, weight = np.int64(rows[source + i]) + first_row, np.int64(weights[source + i])
            gap, weight_less_one = row - previous_row - 1, weight - 1
            gaps[target + i], weights_less_one[target + i] = gap, weight_less_one
            gap_bits |= gap
            weight_bits |= weight_less_one
            max_weight = max(max_weight, weight)
            previous_row = row
        if gap_bits | weight_bits < 0 or previous_row >= len(lengths):
            return False
        writer[OPEN_COUNT], writer[PREVIOUS_ROW], writer[MAX_WEIGHT] = (
            n_open + n_postings,
            previous_row,
            max(max_weight, writer[MAX_WEIGHT]),
        )
        writer[GAP_BITS] |= gap_bits
        writer[WEIGHT_BITS] |= weight_bits
        if writer[HEADER_OFFSET] >= 0:
            min_length = np.int64(lengths[previous_row])
            for i in range(np.uint64(n_postings)):
                min_length = min(min_length, np.int64(lengths[np.uint64(np.int64(rows[source + i]) + first_row)]))
            writer[MIN_LENGTH] = min(writer[MIN_LENGTH], min_length)
        if n_open + n_postings == BLOCK:
            end_block(writer, gaps, weights_less_one, sizes, out, headers)
        first += n_postings
    return True


@inlined
def write_single(row, weight, out, offset):
    """Write a list of one posting at `offset`; return its end."""
    offset = write_varint(out, offset, 2 * row + (1 if weight > 1 else 0))
    return write_varint(out, offset, weight - 2) if weight > 1 else offset


@compiled
def write_lists(shares, counts, ends, parts, first_rows, next_postings, rows, weights, lengths, out, sizes):
    """Write the lists of several terms one after another.

    Args:
        shares: (s,) number of postings of each share. A share is the postings of one term in one
            part; shares are in the order of terms, and of parts within a term.
        counts: (t,) postings of each term.
        ends: (t,) offset in `shares` of the end of each term's shares.
        parts: (s,) part of each share.
        first_rows: (parts,) first global row of each part.
        next_postings: (parts,) index of each part's next posting; updated.
        rows: (p,) rows within the part, ascending in each share.
        weights: (p,) at least 1.
        lengths: (n,) uint16 lengths of all passages.
        out: uint8, at least `MAX_POSTING_BYTES` per posting.
        sizes: (t,) int64, filled with the bytes of each list.

    Returns:
        The number of bytes written; -1 if the postings are damaged.
    """
    offset, share_index = 0, 0
    writer = np.zeros(WRITER_SIZE, np.int64)
    gaps, weights_less_one, scratch = (
        np.empty(BLOCK, np.uint32),
        np.empty(BLOCK, np.uint32),
        np.zeros(SCRATCH_SIZE, np.int64),
    )
    for term in range(len(ends)):
        list_begin = offset
        if counts[term] == 1:
            part = parts[share_index]
            row, weight = np.int64(rows[next_postings[part]]) + first_rows[part], np.int64(weights[next_postings[part]])
            if row >= len(lengths) or weight < 1:
                return -1
            offset = write_single(row, weight, out, offset)
            next_postings[part] += 1
            share_index += 1
        else:
            blocks = (counts[term] + BLOCK - 1) // BLOCK
            begin_list(writer, offset + HEADER_BYTES * blocks if blocks > 1 else offset, offset if blocks > 1 else -1)
            while share_index < ends[term]:
                part, first_posting = parts[share_index], next_postings[parts[share_index]]
                end_posting = first_posting + shares[share_index]
                next_postings[part] = end_posting
                share_index += 1
                if not add_postings(
                    rows,
                    weights,
                    first_posting,
                    end_posting,
                    first_rows[part],
                    lengths,
                    writer,
                    gaps,
                    weights_less_one,
                    scratch,
                    out,
                    out,
                ):
                    return -1
            end_block(writer, gaps, weights_less_one, scratch, out, out)
            offset = writer[BLOCK_OFFSET]
        sizes[term] = offset - list_begin
    return offset
