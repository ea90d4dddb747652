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
_NONE, _ONE, _FOUR, _EIGHT = map(np.uint64, (0, 1, 4, 8))  # of no sign: indices that are vectors
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
def _width(values, count, bits_of_all, larger):
    """Return the width with the fewest bytes, and how many values are larger.

    From the largest value's width down, `larger[b]` of the values have more than b bits. It ends where each exception's
    place and one byte more are too many: a width below all values' is never best, for with seven bits more each
    exception has a byte less, or is none.
    """
    most = bit_length(bits_of_all)
    best, width, exceptions = (count * most + 7) // 8, most, np.int64(0)
    larger[most] = 0
    for bits in range(most - 1, -1, -1):
        limit, more = np.uint32((np.int64(1) << bits) - 1), np.int32(0)
        for i in range(count):
            more = np.int32(more + (values[i] > limit))
        if 1 + 2 * more > best:
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
    """Write the lowest `width` bits of values, which are followed by zeros up to a multiple of 8.

    Returns:
        The place behind. Up to 16 bytes behind it are written to.
    """
    end = at + (count * width + 7) // 8
    w, mask = np.uint64(width), np.uint64((np.int64(1) << width) - 1)
    if width == 0:
        return end
    if width <= 8:  # eight values are `width` bytes: no group waits for the one before
        for i in range(_NONE, np.uint64(count), _EIGHT):
            word = _NONE
            for j in range(_EIGHT):
                word |= (np.uint64(values[i + j]) & mask) << (j * w)
            store64(out, at, word)
            at += width
    elif width < 16:
        half = w * _FOUR
        for i in range(_NONE, np.uint64(count), _EIGHT):
            low, high = _NONE, _NONE
            for j in range(_FOUR):
                low |= (np.uint64(values[i + j]) & mask) << (j * w)
                high |= (np.uint64(values[i + j + _FOUR]) & mask) << (j * w)
            store64(out, at, low | (high << half))
            store64(out, at + 8, high >> (np.uint64(64) - half))
            at += width
    else:
        held, bits = _NONE, _NONE
        for i in range(np.uint64(count)):
            held |= (np.uint64(values[i]) & mask) << bits
            store64(out, at, held)
            bits += w
            at += np.int64(bits >> np.uint64(3))
            held >>= bits & np.uint64(56)
            bits &= np.uint64(7)
    return end


@inlined
def _larger(values, first, last, limit):
    """Return a word with a bit for each of values[first:last], at most 64 of them: whether it is above a limit."""
    found = _NONE
    for i in range(np.uint64(last - first)):
        found |= np.uint64(values[np.uint64(first) + i] > limit) << i
    return found


@inlined
def _put_exceptions(values, count, width, larger, out, at):
    if larger == 0:
        return at
    out[at] = larger
    at += 1
    limit, half, base = np.uint32((np.int64(1) << width) - 1), min(64, count), 0
    found, others = _larger(values, 0, half, limit), _larger(values, half, count, limit)
    for _ in range(larger):
        if found == 0:
            found, base = others, 64
        i = base + bit_length(np.int64(found & (~found + _ONE))) - 1  # the place of the lowest bit
        found &= found - _ONE
        out[at] = i
        at = put_varint(out, at + 1, np.int64(values[i]) >> width)
    return at


@inlined
def encode(gaps, weights, count, all_gaps, all_weights, sizes, out, at):
    """Write a block; return the place behind it.

    Args:
        gaps: (128,) uint32, each row minus the row before it minus 1.
        weights: (128,) uint32, each weight minus 1, below 2^16. Of both, up to seven values behind the last become 0.
        count: postings, 1 ... 128.
        all_gaps: the bits that any of the gaps has.
        all_weights: those that any of the weights has.
        sizes: (SIZES,) int64, for its own use.
        out: uint8, with room for 16 bytes a posting, and 8 more.
        at: where the block begins.
    """
    b, more_gaps = _width(gaps, count, all_gaps, sizes)
    c, more_weights = _width(weights, count, all_weights, sizes)
    for i in range(count, (count + 7) // 8 * 8):
        gaps[i], weights[i] = 0, 0
    out[at] = b | (_EXCEPTIONS if more_gaps else 0)
    out[at + 1] = c | (_EXCEPTIONS if more_weights else 0)
    at = _pack(gaps, count, b, out, at + 2)
    at = _pack(weights, count, c, out, at)
    at = _put_exceptions(gaps, count, b, more_gaps, out, at)
    return _put_exceptions(weights, count, c, more_weights, out, at)


@inlined
def _unpack(data, at, width, count, out):
    """Read `count` numbers of `width` bits, from byte `at` on, into `out`; up to seven more are written."""
    w, mask = np.uint64(width), (_ONE << np.uint64(width)) - _ONE
    if width <= 8:  # as in `_pack`
        for i in range(_NONE, np.uint64(count), _EIGHT):
            word = load64(data, at)
            for j in range(_EIGHT):
                out[i + j] = np.int64((word >> (j * w)) & mask)
            at += width
    elif width < 16:
        more, half = width >> 1, np.uint64(4 * (width & 1))
        for i in range(_NONE, np.uint64(count), _EIGHT):
            word = load64(data, at)
            for j in range(_FOUR):
                out[i + j] = np.int64((word >> (j * w)) & mask)
            if i + _FOUR < np.uint64(count):  # else it may lie behind the padding
                word = load64(data, at + more) >> half
                for j in range(_FOUR):
                    out[i + _FOUR + j] = np.int64((word >> (j * w)) & mask)
            at += width
    else:
        bit = 0
        for i in range(np.uint64(count)):
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
def unpack_gaps(data, at, end, count, gaps):
    """Read the gaps of a block as `encode` takes them; see `decode`.

    Returns:
        The place behind the gaps' exceptions; -1 if the bytes are no block.
    """
    if at + 2 > end:
        return -1
    b, c = np.int64(data[at]), np.int64(data[at + 1]) & 127
    more, b = b >= _EXCEPTIONS, b & 127
    behind = at + 2 + (count * b + 7) // 8 + (count * c + 7) // 8
    if b > _MOST_BITS or c > _MOST_BITS or behind > end:
        return -1
    _unpack(data, at + 2, b, count, gaps)
    return _patch(data, behind, end, b, count, gaps) if more else behind


@inlined
def unpack(data, at, end, count, gaps, less):
    """Read a block as `encode` takes it; see `decode`.

    Args:
        gaps: filled with the gaps of `count` rows.
        less: filled with their weights minus 1.

    Returns:
        The place behind the block; -1 if the bytes are no block.
    """
    behind = unpack_gaps(data, at, end, count, gaps)
    if behind < 0:
        return -1
    b, c = np.int64(data[at]) & 127, np.int64(data[at + 1])
    more, c = c >= _EXCEPTIONS, c & 127
    _unpack(data, at + 2 + (count * b + 7) // 8, c, count, less)
    return _patch(data, behind, end, c, count, less) if more else behind


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
