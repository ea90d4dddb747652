"""Blocks of postings as bytes: patched frame of reference (PFOR), compiled by numba.

Zukowski et al. 2006, "Super-Scalar RAM-CPU Cache Compression": most of a block's values are packed with b bits each,
and the few that are larger keep their higher bits apart. A block holds up to 128 postings (row, weight):

* a byte: the width b of gaps, + 128 if gaps have exceptions
* a byte: the width c of weights, + 128 if weights have exceptions
* row gaps - 1, b bits each, from the lowest bit on, up to a whole byte
* weights - 1, c bits each, up to a whole byte
* exceptions of the gaps, then of the weights: a byte with their number, then for each its place (one byte) and its
  higher bits (a varint)

Widths are those with the fewest bytes, so equal postings give equal bytes. A decoder never reads outside of the bytes
that it was given, and returns -1 for bytes that are no block.
"""

import numpy as np

from rag_model.index.postings.compiled import bare, inlined
from rag_model.index.postings.machine import bit_length, load64, store64

BLOCK = 128  # postings
PADDING = 8  # bytes behind the last block at least, so that whole words can be read
_EXCEPTIONS = 128  # flag of a width byte
_MOST_BITS = 32
SIZES = BLOCK  # numbers that `encode` needs for its own use


@inlined
def put_varint(out, at, value):
    """Write a whole number >= 0 at out[at:], seven bits a byte, the lowest first; return the place behind it."""
    while value >= 128:
        out[at] = (value & 127) | 128
        value >>= 7
        at += 1
    out[at] = value
    return at + 1


@inlined
def get_varint(data, at, end):
    """Read what `put_varint` wrote; return the value and the place behind it, or (-1, end) if it is not whole."""
    value, shift = np.int64(0), 0
    while at < end and shift < 63:
        byte = np.int64(data[at])
        at += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, at
        shift += 7
    return -1, end


@inlined
def _width(values, count, larger):
    """Return the width with the fewest bytes, and how many values are larger.

    From the largest value's width down, `larger[b]` of the values have more than b bits. It ends at the smallest
    value's width, or where each exception's place and one byte more are too many: a width below all values' is never
    best, for with seven bits more each exception has a byte less, or is none.
    """
    held, smallest = np.uint32(0), values[0]
    for i in range(count):
        held |= values[i]
        smallest = min(smallest, values[i])
    most, least = bit_length(np.int64(held)), bit_length(np.int64(smallest))
    best, width, exceptions = (count * most + 7) // 8, most, np.int64(0)
    spent = (count * least + 7) // 8 + 1
    larger[most] = 0
    for bits in range(most - 1, least - 1, -1):
        limit, more = np.uint32((np.int64(1) << bits) - 1), np.int32(0)
        for i in range(count):
            more = np.int32(more + (values[i] > limit))
        if spent + 2 * more > best:
            break
        larger[bits] = more
        cost = (count * bits + 7) // 8 + 1 + more
        above = bits
        while above < most:  # an exception's place is a byte, and so are 7 higher bits each
            cost += larger[above]
            above += 7
        if cost <= best:
            best, width, exceptions = cost, bits, np.int64(more)
    return width, exceptions


@inlined
def _pack(values, count, width, out, at):
    """Write the lowest `width` bits of values; return the place behind."""
    end = at + (count * width + 7) // 8
    for i in range(count, (count + 3) // 4 * 4):
        values[i] = 0
    w, mask = np.uint64(width), np.uint64((np.int64(1) << width) - 1)
    held, bits, i = np.uint64(0), np.uint64(0), 0
    if width == 0:
        return end
    step = 4 if width <= 14 else 1  # with up to seven bits that are left, in one word
    while i < count:
        some = np.uint64(values[i]) & mask
        if step == 4:
            some |= (np.uint64(values[i + 1]) & mask) << w
            more = (np.uint64(values[i + 2]) & mask) | ((np.uint64(values[i + 3]) & mask) << w)
            some |= more << (w + w)
        held |= some << bits
        store64(out, at, held)
        bits += w * np.uint64(step)
        at += np.int64(bits >> np.uint64(3))
        held >>= bits & np.uint64(56)
        bits &= np.uint64(7)
        i += step
    return end


@inlined
def _put_exceptions(values, count, width, larger, places, out, at):
    if larger == 0:
        return at
    out[at] = larger
    at += 1
    limit, found = np.uint32((np.int64(1) << width) - 1), 0
    for i in range(count):  # without a branch: which values are larger cannot be foretold
        places[found] = i
        found += values[i] > limit
    for j in range(larger):
        i = places[j]
        out[at] = i
        at = put_varint(out, at + 1, np.int64(values[i]) >> width)
    return at


@inlined
def encode(gaps, weights, count, sizes, out, at):
    """Write a block; return the place behind it.

    Args:
        gaps: (128,) uint32, each row minus the row before it minus 1.
        weights: (128,) uint32, each weight minus 1, below 2^16. Of both, up to three values behind the last become 0.
        count: postings, 1 ... 128.
        sizes: (SIZES,) int64, for its own use.
        out: uint8, with room for 16 bytes a posting, and 8 more.
        at: where the block begins.
    """
    b, more_gaps = _width(gaps, count, sizes)
    c, more_weights = _width(weights, count, sizes)
    out[at] = b | (_EXCEPTIONS if more_gaps else 0)
    out[at + 1] = c | (_EXCEPTIONS if more_weights else 0)
    at = _pack(gaps, count, b, out, at + 2)
    at = _pack(weights, count, c, out, at)
    at = _put_exceptions(gaps, count, b, more_gaps, sizes, out, at)
    return _put_exceptions(weights, count, c, more_weights, sizes, out, at)


@inlined
def _unpack(data, at, width, count, out):
    """Read `count` numbers of `width` bits, from byte `at` on, into `out`."""
    mask, bit = (np.uint64(1) << np.uint64(width)) - np.uint64(1), 0
    for i in range(count):
        out[i] = np.int64((load64(data, at + (bit >> 3)) >> np.uint64(bit & 7)) & mask)
        bit += width


@inlined
def _patch(data, at, end, width, count, out):
    """Add the higher bits of exceptions; return the place behind them, or -1."""
    if at >= end:
        return -1
    more = np.int64(data[at])
    at += 1
    for _ in range(more):
        if at >= end:
            return -1
        place = np.int64(data[at])
        high, at = get_varint(data, at + 1, end)
        if place >= count or high < 0 or high >> (_MOST_BITS - width):
            return -1
        out[place] |= high << width
    return at


@inlined
def unpack(data, at, end, count, gaps, less):
    """Read a block as `encode` takes it; see `decode`.

    Args:
        gaps: filled with the gaps of `count` rows.
        less: filled with their weights minus 1.

    Returns:
        The place behind the block; -1 if the bytes are no block.
    """
    if at + 2 > end:
        return -1
    b, c = np.int64(data[at]), np.int64(data[at + 1])
    more_gaps, more_weights = b >= _EXCEPTIONS, c >= _EXCEPTIONS
    b, c = b & 127, c & 127
    if b > _MOST_BITS or c > _MOST_BITS:
        return -1
    at += 2
    behind_gaps = at + (count * b + 7) // 8
    behind = behind_gaps + (count * c + 7) // 8
    if behind > end:
        return -1
    _unpack(data, at, b, count, gaps)
    _unpack(data, behind_gaps, c, count, less)
    at = behind
    if more_gaps:
        at = _patch(data, at, end, b, count, gaps)
        if at < 0:
            return -1
    if more_weights:
        at = _patch(data, at, end, c, count, less)
    return at


@bare
def decode(data, at, end, before, count, rows, weights):
    """Read a block from data[at:end], which is followed by `PADDING` bytes.

    Args:
        data: uint8.
        at: where the block begins.
        end: where its bytes, or those of the whole list, end.
        before: the row before the block; -1 at the beginning of a list.
        count: postings, 1 ... 128.
        rows: (128,) int64, filled with the rows, ascending.
        weights: (128,) int64, filled with the weights, at least 1.

    Returns:
        The place behind the block; -1 if the bytes are no block.
    """
    at = unpack(data, at, end, count, rows, weights)
    if at < 0:
        return -1
    row = before
    for i in range(count):
        row += rows[i] + 1
        rows[i] = row
        weights[i] += 1
    return at
