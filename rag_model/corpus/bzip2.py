"""Decode bzip2 streams in half the time of libbz2, which takes most of the time of reading a dump.

Three steps differ from libbz2. A table gives the Huffman code of up to 11 bits at once. The first
16 symbols of the move-to-front list are two numbers, from which a symbol is moved without a branch.
The inverse Burrows-Wheeler transform follows a chain through a megabyte, and each step waits for
memory; here eight chains are followed at the same time. They start at many positions of the block,
and a chain ends where another one started.

Every index is checked, or is within its array by construction, because a dump may be hostile. A
block that is damaged or unusual raises `UnusualStreamError`; libbz2 then decodes it or reports it.

Reference: Burrows, Wheeler. A block-sorting lossless data compression algorithm. 1994. The format:
Tsai. BZIP2: format specification. 2016.
"""

import threading
import zlib
from collections.abc import Iterator
from typing import Any

import numpy as np

from rag_model.compiled import compiled

_BLOCK_MAGIC, _END_MAGIC = 0x314159265359, 0x177245385090
_MAX_BLOCK = 900_000  # bytes of a block before the run-length decoding
_MAX_DECODED = 1 << 20  # bytes of a decoded block; one with more is a bomb, or rare
_PADDING = bytes(512)  # after the data: more than is read between two checks of the position
_TABLE_BITS = 11  # of a code that is looked up; longer codes are rare
_MAX_CODE_BITS, _MAX_SYMBOLS, _MAX_TABLES = 20, 258, 6
_GROUP = 50  # symbols with the same Huffman table
_CHAINS = 8  # that are followed at the same time
_STARTS = 512  # of chains in a block; with fewer, some chains are much longer than others
_MIN_CHAINED = 4_096  # a smaller block fits in the fastest memory
_STARTS_CHAIN = np.uint32(1 << 31)  # a flag of a position; bits 8 to 27 are the next position
_REVERSED_BITS = bytes(int(f"{byte:08b}"[::-1], 2) for byte in range(256))


class UnusualStreamError(Exception):
    """A stream is damaged, or has a property that only libbz2 decodes."""


def decode_streams(data: bytes) -> Iterator[bytes]:
    """Yield the decoded blocks of concatenated bzip2 streams.

    Raises:
        UnusualStreamError: The rest of the data must be decoded by libbz2.
    """
    words = np.frombuffer(data + _PADDING[len(data) % 4 :], ">u4").astype(np.uint32)
    n_bits, bit, workspace = 8 * len(data), 0, _get_workspace()
    while bit < n_bits:
        head = data[bit // 8 : bit // 8 + 4]
        if head[:3] != b"BZh" or head[3:] not in _LEVELS:
            raise UnusualStreamError
        bit, checksum, max_size = bit + 32, 0, 100_000 * int(head[3:])
        while _read_bits(words, bit, 48) == _BLOCK_MAGIC and bit < n_bits:
            block_checksum, bit = _read_bits(words, bit + 48, 32), bit + 80
            bit, size = _decode_block(words, n_bits, bit, max_size, workspace)
            block = workspace[-1][: max(size, 0)].tobytes()
            if bit < 0 or size < 0 or _compute_checksum(block) != block_checksum:
                raise UnusualStreamError
            checksum = (checksum << 1 & 0xFFFF_FFFF | checksum >> 31) ^ block_checksum
            yield block
        if _read_bits(words, bit, 48) != _END_MAGIC or _read_bits(words, bit + 48, 32) != checksum:
            raise UnusualStreamError
        bit = (bit + 80 + 7) // 8 * 8
    if bit > n_bits:
        raise UnusualStreamError


_LEVELS = {b"%d" % level for level in range(1, 10)}
_local = threading.local()


def _get_workspace() -> tuple[Any, ...]:
    """Return this thread's arrays; a block of 400 kB uses 3 MB of them."""
    if not hasattr(_local, "workspace"):
        _local.workspace = (
            np.empty(_MAX_BLOCK, np.uint8),  # the last column of the sorted rotations
            # For each position the next one, and the symbol in the lowest byte.
            np.empty(_MAX_BLOCK, np.uint32),
            np.empty((_CHAINS, _MAX_BLOCK), np.uint8),  # the symbols along the chains
            np.empty(_MAX_DECODED, np.uint8),  # the block
        )
    workspace: tuple[Any, ...] = _local.workspace
    return workspace


def _read_bits(words: Any, bit: int, count: int) -> int:
    """Return `count` bits, at most 64; those after the padding are missing."""
    first = bit // 32
    number = int.from_bytes(words[first : first + 3].astype(">u4").tobytes().ljust(12, b"\0"))
    return number >> (96 - bit % 32 - count) & ((1 << count) - 1)


def _compute_checksum(block: bytes) -> int:
    """Return the CRC of a block: zlib's with the bits of each byte, and of the result, reversed."""
    return int(f"{zlib.crc32(block.translate(_REVERSED_BITS)):032b}"[::-1], 2)


@compiled
def _peek(words: Any, bit: Any, count: Any) -> Any:
    """Return `count` bits, from 1 to 32, as an int64."""
    word = np.uint64(bit >> 5)
    bits = np.uint64(words[word]) << np.uint64(32) | np.uint64(words[word + np.uint64(1)])
    return np.int64((bits << np.uint64(bit & 31)) >> np.uint64(64 - count))


@compiled
def _decode_block(words: Any, n_bits: Any, bit: Any, max_size: Any, workspace: Any) -> Any:
    """Decode a block; return the bit after it, and its size in the last array, or -1 on an error.

    Args:
        words: (w,) uint32, big-endian, with the padding.
        n_bits: number of bits before the padding.
        bit: first bit after the block's checksum.
        max_size: bytes of a block at this compression level.
        workspace: the arrays of `_get_workspace`.
    """
    symbols, chain, pieces, out = workspace
    failed = (np.int64(-1), np.int64(-1))
    if bit > n_bits or _peek(words, bit, 1):  # a randomised block, of versions before 0.9.5
        return failed
    origin, used_ranges, bit = _peek(words, bit + 1, 24), _peek(words, bit + 25, 16), bit + 41
    recent, n_used = np.zeros(256, np.uint8), 0
    for high in range(16):
        if used_ranges >> (15 - high) & 1:
            used = _peek(words, bit, 16)
            bit += 16
            for low in range(16):
                if used >> (15 - low) & 1:
                    recent[n_used] = 16 * high + low
                    n_used += 1
    n_tables, n_groups, bit = _peek(words, bit, 3), _peek(words, bit + 3, 15), bit + 18
    if not n_used or not 2 <= n_tables <= _MAX_TABLES or not n_groups:
        return failed
    table_of_group = np.empty(n_groups, np.uint8)
    bit = _read_groups(words, n_bits, bit, n_tables, table_of_group)
    # An entry is the symbol, and from bit 9 the length of its code; 0 for longer codes.
    table = np.zeros(_MAX_TABLES << _TABLE_BITS, np.uint16)
    # For each length: the number after its last code, and a symbol's rank less its code.
    code_ends, offsets = np.zeros((2, _MAX_TABLES, _MAX_CODE_BITS + 1), np.int64)
    ranked = np.zeros((_MAX_TABLES, _MAX_SYMBOLS), np.uint16)
    for number in range(n_tables):
        if bit >= 0:
            entries = table[number << _TABLE_BITS : (number + 1) << _TABLE_BITS]
            code_table = (entries, code_ends[number], offsets[number], ranked[number])
            bit = _read_codes(words, n_bits, bit, n_used + 2, code_table)
    if bit < 0:
        return failed
    counts, code_tables = np.zeros(256, np.int64), (table_of_group, table, code_ends, offsets, ranked)
    alphabet, symbols = (recent, n_used + 1), symbols[:max_size]
    bit, size = _read_symbols(words, n_bits, bit, alphabet, code_tables, symbols, counts)
    if origin >= size:
        return failed
    total = 0
    for i in range(256):
        counts[i], total = total, total + counts[i]
    for i in range(size):
        previous = counts[symbols[i]]
        counts[symbols[i]] += 1
        chain[previous] = np.uint32(i) << np.uint32(8) | np.uint32(symbols[previous])
    return bit, _follow_chains(chain, size, np.int64(chain[origin] >> np.uint32(8)), pieces, out)


@compiled
def _read_groups(words: Any, n_bits: Any, bit: Any, n_tables: Any, table_of_group: Any) -> Any:
    """Read the number of each group's Huffman table; return the next bit, or -1 on an error."""
    order = np.arange(_MAX_TABLES).astype(np.uint8)
    for group in range(table_of_group.size):
        position = 0
        while _peek(words, bit, 1):
            position, bit = position + 1, bit + 1
            if position == n_tables:
                return -1
        bit += 1
        if bit > n_bits:
            return -1
        number = order[position]
        for i in range(position, 0, -1):
            order[i] = order[i - 1]
        table_of_group[group] = order[0] = number
    return bit


@compiled
def _read_codes(words: Any, n_bits: Any, bit: Any, n_symbols: Any, code_table: Any) -> Any:
    """Read the codes of one Huffman table; return the next bit, or -1 on an error."""
    table, code_ends, offsets, ranked = code_table
    lengths, length = np.empty(_MAX_SYMBOLS, np.int64), _peek(words, bit, 5)
    bit += 5
    for symbol in range(n_symbols):
        while True:
            if not 1 <= length <= _MAX_CODE_BITS or bit > n_bits:
                return -1
            if not _peek(words, bit, 1):
                break
            length += 1 - 2 * _peek(words, bit + 1, 1)
            bit += 2
        bit += 1
        lengths[symbol] = length
    code = rank = 0
    for length in range(1, _MAX_CODE_BITS + 1):
        offsets[length] = rank - code
        for symbol in range(n_symbols):
            if lengths[symbol] == length:
                if code >> length:  # more codes than the length has
                    return -1
                if length <= _TABLE_BITS:
                    shift = _TABLE_BITS - length
                    table[code << shift : (code + 1) << shift] = symbol | length << 9
                ranked[rank] = symbol
                code, rank = code + 1, rank + 1
        code_ends[length] = code
        code <<= 1
    return bit


@compiled
def _read_symbols(words: Any, n_bits: Any, bit: Any, alphabet: Any, code_tables: Any, symbols: Any, counts: Any) -> Any:
    """Decode `symbols`, and count each; return the next bit, and their number; -1 on an error."""
    failed = (np.int64(-1), np.int64(-1))
    (recent, end_symbol), (table_of_group, table, code_ends, offsets, ranked) = alphabet, code_tables
    # Unsigned, because a signed index is tested for negative numbers.
    unit, eight, low_byte, last_byte = np.uint64(1), np.uint64(8), np.uint64(255), np.uint64(56)
    # The move-to-front list; the first symbol is the lowest byte.
    first_eight, second_eight, other_symbols = np.uint64(0), np.uint64(0), recent[16:].copy()
    for i in range(8):
        first_eight |= np.uint64(recent[i]) << np.uint64(8 * i)
        second_eight |= np.uint64(recent[i + 8]) << np.uint64(8 * i)
    size, run, weight = np.int64(0), np.int64(0), np.int64(1)
    group, group_rest, number, row, position = 0, 0, np.int64(0), np.uint64(0), np.uint64(bit)
    while True:
        if not group_rest:
            if group == table_of_group.size or np.int64(position) > n_bits:
                return failed
            number, group_rest = np.int64(table_of_group[group]), _GROUP
            row, group = np.uint64(number << _TABLE_BITS), group + 1
        group_rest -= 1
        word = position >> np.uint64(5)
        bits = np.uint64(words[word]) << np.uint64(32) | np.uint64(words[word + unit])
        bits <<= position & np.uint64(31)
        entry = np.uint64(table[row | bits >> np.uint64(64 - _TABLE_BITS)])
        if entry:
            position += entry >> np.uint64(9)
            symbol = entry & np.uint64(511)
        else:
            length = _TABLE_BITS + 1
            while length <= _MAX_CODE_BITS:
                code = np.int64(bits >> np.uint64(64 - length))
                if code < code_ends[number, length]:
                    break
                length += 1
            if length > _MAX_CODE_BITS:
                return failed
            rank = code + offsets[number, length]
            if not 0 <= rank <= end_symbol:
                return failed
            position += np.uint64(length)
            symbol = np.uint64(ranked[number, rank])
        if symbol <= unit:  # a digit of the length of a run of the first symbol
            run += weight << np.int64(symbol)
            weight <<= 1
            if size + run > symbols.size:
                return failed
            continue
        if run:
            symbols[size : size + run] = np.uint8(first_eight & low_byte)
            counts[first_eight & low_byte] += run
            size, run, weight = size + run, np.int64(0), np.int64(1)
        if symbol == np.uint64(end_symbol):
            break
        if size == symbols.size:
            return failed
        list_index = symbol - unit
        if list_index < eight:
            shift = list_index << np.uint64(3)
            list_symbol, lower = first_eight >> shift & low_byte, first_eight & ((unit << shift) - unit)
            first_eight = (first_eight ^ lower ^ list_symbol << shift) | lower << eight | list_symbol
        elif list_index < np.uint64(16):
            shift = (list_index - eight) << np.uint64(3)
            list_symbol, lower = second_eight >> shift & low_byte, second_eight & ((unit << shift) - unit)
            second_eight = (second_eight ^ lower ^ list_symbol << shift) | lower << eight | first_eight >> last_byte
            first_eight = first_eight << eight | list_symbol
        else:
            list_index -= np.uint64(16)
            list_symbol = np.uint64(other_symbols[list_index])
            while list_index > np.uint64(0):
                other_symbols[list_index] = other_symbols[list_index - unit]
                list_index -= unit
            other_symbols[0] = second_eight >> last_byte
            second_eight = second_eight << eight | first_eight >> last_byte
            first_eight = first_eight << eight | list_symbol
        counts[list_symbol] += 1
        symbols[np.uint64(size)] = list_symbol
        size += 1
    return np.int64(position), size


@compiled
def _follow_chains(chain: Any, size: Any, first: Any, pieces: Any, out: Any) -> Any:
    """Write the symbols along the chain from `first`; return their number, or -1 if `out` is full.

    `chain` is a permutation of `size` positions, so each is in one piece, and a row of `pieces`
    has room for all.
    """
    count = _STARTS if size >= _MIN_CHAINED else 1
    step = size // count
    starts = np.empty(count + 1, np.int64)
    for number in range(count):
        starts[number] = number * step
        chain[number * step] |= _STARTS_CHAIN
    starts[count], first_piece = first, first // step
    if not chain[first] & _STARTS_CHAIN:
        chain[first] |= _STARTS_CHAIN
        count, first_piece = count + 1, count
    row_of, begins, ends, following = np.empty((4, count), np.int64)
    current, filled, piece_of = np.zeros((3, _CHAINS), np.int64)
    n_rows = n_begun = min(_CHAINS, count)
    for row in range(n_rows):
        entry = chain[starts[row]]
        pieces[row, 0] = entry & np.uint32(255)
        current[row], filled[row], piece_of[row] = entry >> np.uint32(8) & np.uint32(0xF_FFFF), 1, row
        row_of[row], begins[row] = row, 0
    active = n_rows
    while active:
        for row in range(n_rows):
            if piece_of[row] < 0:
                continue
            entry = chain[current[row]]
            if entry & _STARTS_CHAIN:
                number = min(current[row] // step, starts.size - 1)
                if starts[number] != current[row]:
                    number = starts.size - 1
                piece = piece_of[row]
                ends[piece], following[piece] = filled[row], number
                if n_begun == count:
                    piece_of[row] = -1
                    active -= 1
                    continue
                piece_of[row], row_of[n_begun], begins[n_begun] = n_begun, row, filled[row]
                entry, n_begun = chain[starts[n_begun]], n_begun + 1
            pieces[row, filled[row]] = entry & np.uint32(255)
            filled[row] += 1
            current[row] = entry >> np.uint32(8) & np.uint32(0xF_FFFF)
    n_written, repeated, previous, piece = np.int64(0), 0, np.int64(-1), first_piece
    while size > 0:
        row, begin, end = row_of[piece], begins[piece], min(ends[piece], begins[piece] + size)
        size -= end - begin
        for i in range(begin, end):
            symbol = np.int64(pieces[row, i])
            if repeated == 4:  # four equal symbols precede the number of further ones
                if n_written + symbol > out.size:
                    return -1
                out[n_written : n_written + symbol] = previous
                n_written, repeated, previous = n_written + symbol, 0, np.int64(-1)
                continue
            if n_written == out.size:
                return -1
            repeated = repeated + 1 if symbol == previous else 1
            out[n_written], previous, n_written = symbol, symbol, n_written + 1
        piece = following[piece]
    return n_written
