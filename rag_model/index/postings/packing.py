"""The byte format of a block of postings: patched frame of reference (PFOR), compiled by numba.

Zukowski et al. 2006, "Super-Scalar RAM-CPU Cache Compression": most values of a block are packed
with b bits each, and the few larger ones, the exceptions, store their higher bits separately. A
block holds up to 128 postings (row, weight):

* a byte: the width b of gaps, + 128 if gaps have exceptions
* a byte: the width c of weights, + 128 if weights have exceptions
* row gaps - 1, b bits each, starting at the lowest bit, padded to a whole byte
* weights - 1, c bits each, padded to a whole byte
* exceptions of the gaps, then of the weights: a byte with their number, and for each its position
  (one byte) and its higher bits (a varint)

The widths are those with the fewest bytes, so equal postings give equal bytes. A decoder never
reads outside of the given bytes, and returns -1 for bytes that are not a block.
"""

import numpy as np

from rag_model.compiled import bare, bit_length, inlined, load64, store64

BLOCK = 128  # postings of a full block
PADDING = 8  # bytes after the last block, so that whole words can be read
_EXCEPTIONS = 128  # flag in a width byte, set if the block has exceptions
_MAX_BITS = 32
# Unsigned, because loops over unsigned indices are vectorized.
_ZERO, _ONE, _FOUR, _EIGHT = map(np.uint64, (0, 1, 4, 8))
SCRATCH_SIZE = BLOCK  # elements of the scratch array of `encode_block`


@inlined
def write_varint(out, offset, value):
    """Write an integer >= 0 at `offset`, seven bits per byte, the lowest first; return its end."""
    while value >= 128:
        out[offset] = (value & 127) | 128
        value >>= 7
        offset += 1
    out[offset] = value
    return offset + 1


@inlined
def read_varint(data, offset, end):
    """Read a varint at `offset`; return the value and its end, or (-1, end) if it is incomplete."""
    value, shift = np.int64(0), 0
    while offset < end and shift < 63:
        byte = np.int64(data[offset])
        offset += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, offset
        shift += 7
    return -1, end


@inlined
def _choose_width(values, n_values, bits_of_all, counts_above):
    """Return the width that takes the fewest bytes, and the number of exceptions.

    Widths are tried downwards from the width of the largest value; `counts_above[b]` is filled with
    the number of values of more than b bits. The loop ends when the exceptions alone, two bytes
    each, take more than the best width so far. A width below the widths of all values is never the
    best: with seven bits more, every exception takes a byte less, or none.
    """
    max_bits = bit_length(bits_of_all)
    best_bytes, bit_width, n_exceptions = (n_values * max_bits + 7) // 8, max_bits, np.int64(0)
    counts_above[max_bits] = 0
    for bits in range(max_bits - 1, -1, -1):
        max_value, n_exceeding = np.uint32((np.int64(1) << bits) - 1), np.int32(0)
        for i in range(n_values):
            n_exceeding = np.int32(n_exceeding + (values[i] > max_value))
        if 1 + 2 * n_exceeding > best_bytes:
            break
        counts_above[bits] = n_exceeding
        n_bytes = (n_values * bits + 7) // 8 + 1 + n_exceeding
        extra_bits = bits
        while extra_bits < max_bits:  # an exception takes 1 byte, plus 1 for each 7 higher bits
            n_bytes += counts_above[extra_bits]
            extra_bits += 7
        if n_bytes <= best_bytes:
            best_bytes, bit_width, n_exceptions = n_bytes, bits, np.int64(n_exceeding)
    return bit_width, n_exceptions


@inlined
def _pack_values(values, n_values, width, out, offset):
    """Write the lowest `width` bits of values, which must be padded with zeros to a multiple of 8.

    Returns:
        The end of the packed values. Up to 16 bytes after this end are overwritten.
    """
    end_byte = offset + (n_values * width + 7) // 8
    w, mask = np.uint64(width), np.uint64((np.int64(1) << width) - 1)
    if width == 0:
        return end_byte
    if width <= 8:  # eight values take `width` bytes, so each group of eight is packed alone
        for i in range(_ZERO, np.uint64(n_values), _EIGHT):
            packed_word = _ZERO
            for j in range(_EIGHT):
                packed_word |= (np.uint64(values[i + j]) & mask) << (j * w)
            store64(out, offset, packed_word)
            offset += width
    elif width < 16:
        half_bits = w * _FOUR
        for i in range(_ZERO, np.uint64(n_values), _EIGHT):
            low_word, high_word = _ZERO, _ZERO
            for j in range(_FOUR):
                low_word |= (np.uint64(values[i + j]) & mask) << (j * w)
                high_word |= (np.uint64(values[i + j + _FOUR]) & mask) << (j * w)
            store64(out, offset, low_word | (high_word << half_bits))
            store64(out, offset + 8, high_word >> (np.uint64(64) - half_bits))
            offset += width
    else:
        pending_bits, n_pending = _ZERO, _ZERO
        for i in range(np.uint64(n_values)):
            pending_bits |= (np.uint64(values[i]) & mask) << n_pending
            store64(out, offset, pending_bits)
            n_pending += w
            offset += np.int64(n_pending >> np.uint64(3))
            pending_bits >>= n_pending & np.uint64(56)
            n_pending &= np.uint64(7)
    return end_byte


@inlined
def _mask_larger_values(values, first, end, limit):
    """Return a bit mask of the values above `limit` among the at most 64 values[first:end]."""
    mask = _ZERO
    for i in range(np.uint64(end - first)):
        mask |= np.uint64(values[np.uint64(first) + i] > limit) << i
    return mask


@inlined
def _write_exceptions(values, n_values, width, n_exceptions, out, offset):
    if n_exceptions == 0:
        return offset
    out[offset] = n_exceptions
    offset += 1
    limit, half, base = np.uint32((np.int64(1) << width) - 1), min(64, n_values), 0
    mask, upper_mask = _mask_larger_values(values, 0, half, limit), _mask_larger_values(values, half, n_values, limit)
    for _ in range(n_exceptions):
        if mask == 0:
            mask, base = upper_mask, 64
        i = base + bit_length(np.int64(mask & (~mask + _ONE))) - 1  # the position of the lowest bit
        mask &= mask - _ONE
        out[offset] = i
        offset = write_varint(out, offset + 1, np.int64(values[i]) >> width)
    return offset


@inlined
def encode_block(gaps, weights, count, gap_bits, weight_bits, scratch, out, offset):
    """Write a block; return its end.

    Args:
        gaps: (128,) uint32, each row minus the row before it minus 1.
        weights: (128,) uint32, each weight minus 1, below 2^16. In both arrays up to seven values
            after the last are set to 0.
        count: number of postings, 1 ... 128.
        gap_bits: the OR of all gaps.
        weight_bits: the OR of all weights minus 1.
        scratch: (SCRATCH_SIZE,) int64, overwritten.
        out: uint8, at least 16 bytes per posting, and 8 more.
        offset: offset of the block in `out`.
    """
    gap_width, n_gap_exceptions = _choose_width(gaps, count, gap_bits, scratch)
    weight_width, n_weight_exceptions = _choose_width(weights, count, weight_bits, scratch)
    for i in range(count, (count + 7) // 8 * 8):
        gaps[i], weights[i] = 0, 0
    out[offset] = gap_width | (_EXCEPTIONS if n_gap_exceptions else 0)
    out[offset + 1] = weight_width | (_EXCEPTIONS if n_weight_exceptions else 0)
    offset = _pack_values(gaps, count, gap_width, out, offset + 2)
    offset = _pack_values(weights, count, weight_width, out, offset)
    offset = _write_exceptions(gaps, count, gap_width, n_gap_exceptions, out, offset)
    return _write_exceptions(weights, count, weight_width, n_weight_exceptions, out, offset)


@inlined
def _unpack_values(data, offset, width, n_values, out):
    """Read `n_values` numbers of `width` bits at `offset` into `out`.

    Up to seven elements more are overwritten.
    """
    w, mask = np.uint64(width), (_ONE << np.uint64(width)) - _ONE
    if width <= 8:  # as in `_pack_values`
        for i in range(_ZERO, np.uint64(n_values), _EIGHT):
            packed_word = load64(data, offset)
            for j in range(_EIGHT):
                out[i + j] = np.int64((packed_word >> (j * w)) & mask)
            offset += width
    elif width < 16:
        half_bytes, half_bits = width >> 1, np.uint64(4 * (width & 1))
        for i in range(_ZERO, np.uint64(n_values), _EIGHT):
            packed_word = load64(data, offset)
            for j in range(_FOUR):
                out[i + j] = np.int64((packed_word >> (j * w)) & mask)
            if i + _FOUR < np.uint64(n_values):  # otherwise the word may end after the padding
                packed_word = load64(data, offset + half_bytes) >> half_bits
                for j in range(_FOUR):
                    out[i + _FOUR + j] = np.int64((packed_word >> (j * w)) & mask)
            offset += width
    else:
        bit = 0
        for i in range(np.uint64(n_values)):
            out[i] = np.int64((load64(data, offset + (bit >> 3)) >> np.uint64(bit & 7)) & mask)
            bit += width


@inlined
def _apply_exceptions(data, offset, end, width, n_values, out):
    """Add the exceptions' higher bits to the values in `out`.

    Return the end of the exceptions, or -1 if they are damaged.
    """
    if offset >= end:
        return -1
    n_exceptions = np.int64(data[offset])
    offset += 1
    for _ in range(n_exceptions):
        if offset >= end:
            return -1
        position = np.int64(data[offset])
        high_bits, offset = read_varint(data, offset + 1, end)
        if position >= n_values or high_bits < 0 or high_bits >> (_MAX_BITS - width):
            return -1
        out[position] |= high_bits << width
    return offset


@inlined
def unpack_gaps(data, offset, end, count, gaps):
    """Read the gaps of a block, in the form that `encode_block` expects; see `decode_block`.

    Returns:
        The end of the gaps' exceptions; -1 if the bytes are not a block.
    """
    if offset + 2 > end:
        return -1
    gap_width, weight_width = np.int64(data[offset]), np.int64(data[offset + 1]) & 127
    has_exceptions, gap_width = gap_width >= _EXCEPTIONS, gap_width & 127
    end_offset = offset + 2 + (count * gap_width + 7) // 8 + (count * weight_width + 7) // 8
    if gap_width > _MAX_BITS or weight_width > _MAX_BITS or end_offset > end:
        return -1
    _unpack_values(data, offset + 2, gap_width, count, gaps)
    return _apply_exceptions(data, end_offset, end, gap_width, count, gaps) if has_exceptions else end_offset


@inlined
def unpack_block(data, offset, end, count, gaps, weights_less_one):
    """Read a block as gaps and weights minus 1, in the form that `encode_block` expects; see
    `decode_block`.

    Returns:
        The end of the block; -1 if the bytes are not a block.
    """
    end_offset = unpack_gaps(data, offset, end, count, gaps)
    if end_offset < 0:
        return -1
    gap_width, weight_width = np.int64(data[offset]) & 127, np.int64(data[offset + 1])
    has_exceptions, weight_width = weight_width >= _EXCEPTIONS, weight_width & 127
    _unpack_values(data, offset + 2 + (count * gap_width + 7) // 8, weight_width, count, weights_less_one)
    return (
        _apply_exceptions(data, end_offset, end, weight_width, count, weights_less_one)
        if has_exceptions
        else end_offset
    )


@bare
def decode_block(data, offset, end, row_before, count, rows, weights):
    """Decode the block at `offset`.

    Args:
        data: uint8, with `PADDING` bytes after `end`.
        offset: offset of the block in `data`.
        end: end of the block, or of the list that it belongs to.
        row_before: the row before the block; -1 at the beginning of a list.
        count: number of postings, 1 ... 128.
        rows: (128,) int64, filled with the rows, ascending.
        weights: (128,) int64, filled with the weights, at least 1.

    Returns:
        The end of the block; -1 if the bytes are not a block.
    """
    offset = unpack_block(data, offset, end, count, rows, weights)
    if offset < 0:
        return -1
    row = row_before
    for i in range(count):
        row += rows[i] + 1
        rows[i] = row
        weights[i] += 1
    return offset
