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

from rag_model.index.postings.compiled import compiled
from rag_model.index.postings.packing import BLOCK, encode, put_varint

HEADER = 9  # bytes of a block's header
MOST_WEIGHT = 255  # in a header
ROOM = 20  # bytes that a posting takes at most, headers and exceptions included


@compiled
def put_header(out, at, last, size, weight, shortest):
    """Write the header of a block at out[at:]."""
    for byte in range(4):
        out[at + byte] = (last >> (8 * byte)) & 255
    out[at + 4], out[at + 5] = size & 255, size >> 8
    out[at + 6] = min(weight, MOST_WEIGHT)
    out[at + 7], out[at + 8] = shortest & 255, shortest >> 8


@compiled
def last_row(data, at):
    """Return the last row of the block whose header is at data[at:]."""
    return (
        np.int64(data[at])
        | (np.int64(data[at + 1]) << 8)
        | (np.int64(data[at + 2]) << 16)
        | (np.int64(data[at + 3]) << 24)
    )


@compiled
def two_bytes(data, at):
    """Return the number in data[at:at + 2]."""
    return np.int64(data[at]) | (np.int64(data[at + 1]) << 8)


@compiled
def put_blocks(rows, weights, lengths, before, out, at, headers, place):
    """Write postings as blocks of 128, the last one shorter, with their headers; return the place behind.

    Args:
        rows: (p,) ascending.
        weights: (p,) at least 1.
        lengths: (n,) uint16 lengths of all passages.
        before: the row before the first; -1 at the beginning of a list.
        out: uint8 with `ROOM` bytes a posting behind `at`.
        at: where blocks go.
        headers: uint8, where headers go from `place` on; without room for any, none are written.
        place: see `headers`.
    """
    gaps, less = np.empty(BLOCK, np.int64), np.empty(BLOCK, np.int64)
    for start in range(0, len(rows), BLOCK):
        count = min(BLOCK, len(rows) - start)
        heaviest, shortest = np.int64(0), np.int64(65535)
        for i in range(count):
            row, weight = np.int64(rows[start + i]), np.int64(weights[start + i])
            gaps[i], less[i] = row - before - 1, weight - 1
            heaviest, shortest = max(heaviest, weight), min(shortest, np.int64(lengths[row]))
            before = row
        behind = encode(gaps, less, count, out, at)
        if len(headers):
            put_header(headers, place, before, behind - at, heaviest, shortest)
            place += HEADER
        at = behind
    return at


@compiled
def put_lists(rows, weights, ends, lengths, out, sizes):
    """Write the lists of several terms one after another; return the bytes written.

    Args:
        rows: (p,) int64 of all terms; ascending within each.
        weights: (p,) int64.
        ends: (t,) int64: where each term's postings end.
        lengths: (n,) uint16 lengths of all passages.
        out: uint8 with `ROOM` bytes a posting.
        sizes: (t,) int64, filled with the bytes of each list.
    """
    at, first = 0, 0
    none = np.empty(0, np.uint8)
    for term in range(len(ends)):
        last, start = ends[term], at
        count = last - first
        if count == 1:
            at = put_varint(out, at, 2 * rows[first] + (1 if weights[first] > 1 else 0))
            if weights[first] > 1:
                at = put_varint(out, at, weights[first] - 2)
        elif count <= BLOCK:
            at = put_blocks(rows[first:last], weights[first:last], lengths, -1, out, at, none, 0)
        else:
            blocks = at + HEADER * ((count + BLOCK - 1) // BLOCK)
            at = put_blocks(rows[first:last], weights[first:last], lengths, -1, out, blocks, out, at)
        sizes[term] = at - start
        first = last
    return at
