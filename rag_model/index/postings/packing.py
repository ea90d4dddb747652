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

from rag_model.index.postings.compiled import bare

BLOCK = 128  # postings
PADDING = 8  # bytes behind the last block at least, so that whole words can be read
_EXCEPTIONS = 128  # flag of a width byte
_MOST_BITS = 32
_WIDTHS = _MOST_BITS + 1  # from 0 on
SIZES = 2 * _WIDTHS  # numbers that `encode` needs for its own use


@bare
def put_varint(out, at, value):
    """Write a whole number >= 0 at out[at:], seven bits a byte, the lowest first; return the place behind it."""
    while value >= 128:
        out[at] = (value & 127) | 128
        value >>= 7
        at += 1
    out[at] = value
    return at + 1


@bare
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


_BITS = np.array([value.bit_length() for value in range(1 << 12)], np.uint8)


@bare
def _bits(value):
    """Return how many bits a number from 0 to 2^32 - 1 has."""
    if value < 1 << 12:
        return np.int64(_BITS[value])
    if value < 1 << 24:
        return np.int64(_BITS[value >> 12]) + 12
    return np.int64(_BITS[value >> 24]) + 24


@bare
def _width(sizes, first, count):
    """Return the width with the fewest bytes, and the number of values that are larger.

    `sizes[first + b]` of `count` values have b bits; they are 0 after. A width below all values' is never best: with
    seven bits more each exception has a byte less, or is none.
    """
    least, most = first, first + _MOST_BITS
    while sizes[least] == 0:
        least += 1
    while sizes[most] == 0:
        most -= 1
    best, width, larger, above = count * 16, 0, 0, 0
    for at in range(most, least - 1, -1):  # `sizes` becomes how many have more bits
        sizes[at], above = above, above + sizes[at]
        cost = (count * (at - first) + 7) // 8 + (1 if sizes[at] else 0)
        for bits in range(at, most, 7):  # an exception's place is a byte, and so are 7 higher bits each
            cost += sizes[bits] * (2 if bits == at else 1)
        if cost <= best:
            best, width, larger = cost, at - first, sizes[at]
    for at in range(least, most + 1):
        sizes[at] = 0
    return width, larger


@bare
def _pack(values, count, width, out, at):
    held, bits = np.int64(0), 0
    mask = (np.int64(1) << width) - 1
    for i in range(count):
        held |= (np.int64(values[i]) & mask) << bits
        bits += width
        if bits >= 32:
            out[at], out[at + 1] = held & 255, (held >> 8) & 255
            out[at + 2], out[at + 3] = (held >> 16) & 255, (held >> 24) & 255
            held >>= 32
            bits -= 32
            at += 4
    while bits > 0:
        out[at] = held & 255
        held >>= 8
        bits -= 8
        at += 1
    return at


@bare
def _put_exceptions(values, count, width, larger, out, at):
    if larger == 0:
        return at
    out[at] = larger
    at += 1
    for i in range(count):
        high = np.int64(values[i]) >> width
        if high:
            out[at] = i
            at = put_varint(out, at + 1, high)
    return at


@bare
def encode(gaps, weights, count, sizes, out, at):
    """Write a block; return the place behind it.

    Args:
        gaps: (>= count) int64, each row minus the row before it minus 1, below 2^32.
        weights: (>= count) int64, each weight minus 1, below 2^16.
        count: postings, 1 ... 128.
        sizes: (SIZES,) int64 of 0.
        out: uint8, with room for 16 bytes a posting.
        at: where the block begins.
    """
    for i in range(count):  # of both at once: an entry that was just written is slow to read again
        sizes[_bits(gaps[i])] += 1
        sizes[_WIDTHS + _bits(weights[i])] += 1
    b, more_gaps = _width(sizes, 0, count)
    c, more_weights = _width(sizes, _WIDTHS, count)
    out[at] = b | (_EXCEPTIONS if more_gaps else 0)
    out[at + 1] = c | (_EXCEPTIONS if more_weights else 0)
    at = _pack(gaps, count, b, out, at + 2)
    at = _pack(weights, count, c, out, at)
    at = _put_exceptions(gaps, count, b, more_gaps, out, at)
    return _put_exceptions(weights, count, c, more_weights, out, at)


@bare
def _unpack(words, at, width, count, out):
    """Read `count` numbers of `width` bits, from byte `at` on, into `out`."""
    mask = (np.uint64(1) << np.uint64(width)) - np.uint64(1)
    word, have = at >> 3, 64 - 8 * (at & 7)
    held = words[word] >> np.uint64(8 * (at & 7))
    for i in range(count):
        if have >= width:
            out[i] = np.int64(held & mask)
            held >>= np.uint64(width)
            have -= width
        else:
            word += 1
            out[i] = np.int64((held | (words[word] << np.uint64(have))) & mask)
            held = words[word] >> np.uint64(width - have)
            have += 64 - width


@bare
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


@bare
def decode(data, words, at, end, before, count, rows, weights):
    """Read a block from data[at:end], which is followed by `PADDING` bytes.

    Args:
        data: uint8.
        words: the same bytes as uint64.
        at: where the block begins.
        end: where its bytes, or those of the whole list, end.
        before: the row before the block; -1 at the beginning of a list.
        count: postings, 1 ... 128.
        rows: (128,) int64, filled with the rows, ascending.
        weights: (128,) int64, filled with the weights, at least 1.

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
    _unpack(words, at, b, count, rows)
    _unpack(words, behind_gaps, c, count, weights)
    at = behind
    if more_gaps:
        at = _patch(data, at, end, b, count, rows)
        if at < 0:
            return -1
    if more_weights:
        at = _patch(data, at, end, c, count, weights)
        if at < 0:
            return -1
    row = before
    for i in range(count):
        row += rows[i] + 1
        rows[i] = row
        weights[i] += 1
    return at
