"""Decode bzip2 streams in half the time of libbz2; decoding is most of the work of reading a dump.

Three steps differ from libbz2. A table decodes Huffman codes of up to 11 bits in one look-up. The
first 16 symbols of the move-to-front list are packed into two integers, in which shifts move a
symbol without a loop. The inverse Burrows-Wheeler transform follows a chain through a megabyte, and
each step waits for memory; here eight segments of the chain are followed at the same time. Segments
start at many positions of the block, and each ends where another one starts.

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
_MAX_DECODED = 1 << 20  # maximum of a decoded block; more is rare, or a decompression bomb
_PADDING = bytes(512)  # appended to the data: more bytes than are read between two position checks
_TABLE_BITS = 11  # maximum bits of a code that the table has; longer codes are rare
_MAX_CODE_BITS, _MAX_SYMBOLS, _MAX_TABLES = 20, 258, 6
_GROUP_SYMBOLS = 50  # number of consecutive symbols with the same Huffman table
_PARALLEL_SEGMENTS = 8  # number of segments that are followed at the same time
_BLOCK_SEGMENTS = 512  # number of segments of a block; with fewer, some are much longer than others
_MIN_SEGMENTED_BYTES = 4_096  # minimum bytes of a block with segments; smaller ones fit in L1
_STARTS_SEGMENT = np.uint32(1 << 31)  # flag of an entry that starts a segment; see `_get_workspace`
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
        header = data[bit // 8 : bit // 8 + 4]
        if header[:3] != b"BZh" or header[3:] not in _LEVELS:
            raise UnusualStreamError
        bit, checksum, max_size = bit + 32, 0, 100_000 * int(header[3:])
        while _read_bits(words, bit, 48) == _BLOCK_MAGIC and bit < n_bits:
            block_checksum, bit = _read_bits(words, bit + 48, 32), bit + 80
            bit, block_bytes = _decode_block(words, n_bits, bit, max_size, workspace)
            block = workspace[-1][: max(block_bytes, 0)].tobytes()
            if bit < 0 or block_bytes < 0 or _compute_checksum(block) != block_checksum:
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
    """Return this thread's arrays; decoding a block of 400 kB touches 3 MB of them."""
    if not hasattr(_local, "workspace"):
        _local.workspace = (
            np.empty(_MAX_BLOCK, np.uint8),  # the last column of the sorted rotations
            # For each position: the next one in bits 8 to 27, and the symbol in the lowest byte.
            np.empty(_MAX_BLOCK, np.uint32),
            np.empty((_PARALLEL_SEGMENTS, _MAX_BLOCK), np.uint8),  # the symbols along the segments
            np.empty(_MAX_DECODED, np.uint8),  # the block
        )
    workspace: tuple[Any, ...] = _local.workspace
    return workspace


def _read_bits(words: Any, bit: int, n_bits: int) -> int:
    """Return `n_bits` bits (at most 64) as a number; bits after the padding are read as 0."""
    first_word = bit // 32
    word_bits = int.from_bytes(words[first_word : first_word + 3].astype(">u4").tobytes().ljust(12, b"\0"))
    return word_bits >> (96 - bit % 32 - n_bits) & ((1 << n_bits) - 1)


def _compute_checksum(block: bytes) -> int:
    """Return the CRC of a block: zlib's with the bits of each byte, and of the result, reversed."""
    return int(f"{zlib.crc32(block.translate(_REVERSED_BITS)):032b}"[::-1], 2)


@compiled
def _peek(words: Any, bit: Any, n_bits: Any) -> Any:
    """Return the next `n_bits` bits, 1 to 32, as an int64."""
    word = np.uint64(bit >> 5)
    bits = np.uint64(words[word]) << np.uint64(32) | np.uint64(words[word + np.uint64(1)])
    return np.int64((bits << np.uint64(bit & 31)) >> np.uint64(64 - n_bits))


@compiled
def _decode_block(words: Any, n_bits: Any, bit: Any, max_size: Any, workspace: Any) -> Any:
    """Decode a block into the last array; return (next bit, size), either -1 on an error.

    Args:
        words: (w,) uint32, big-endian, with the padding.
        n_bits: number of bits before the padding.
        bit: first bit after the block's checksum.
        max_size: maximum bytes of a block at this compression level.
        workspace: the arrays of `_get_workspace`.
    """
    symbols, chain, segment_symbols, out = workspace
    failure = (np.int64(-1), np.int64(-1))
    if bit > n_bits or _peek(words, bit, 1):  # a randomised block, of versions before 0.9.5
        return failure
    origin, used_ranges, bit = _peek(words, bit + 1, 24), _peek(words, bit + 25, 16), bit + 41
    front_list, n_used = np.zeros(256, np.uint8), 0
    for high in range(16):
        if used_ranges >> (15 - high) & 1:
            used_bits = _peek(words, bit, 16)
            bit += 16
            for low in range(16):
                if used_bits >> (15 - low) & 1:
                    front_list[n_used] = 16 * high + low
                    n_used += 1
    n_tables, n_groups, bit = _peek(words, bit, 3), _peek(words, bit + 3, 15), bit + 18
    if not n_used or not 2 <= n_tables <= _MAX_TABLES or not n_groups:
        return failure
    table_of_group = np.empty(n_groups, np.uint8)
    bit = _read_groups(words, n_bits, bit, n_tables, table_of_group)
    # An entry has a symbol in bits 0 to 8 and its code length above them; 0 for longer codes.
    lookup_tables = np.zeros(_MAX_TABLES << _TABLE_BITS, np.uint16)
    # For each code length: the number after its last code, and rank minus code of its symbols.
    code_ends, offsets = np.zeros((2, _MAX_TABLES, _MAX_CODE_BITS + 1), np.int64)
    symbol_by_rank = np.zeros((_MAX_TABLES, _MAX_SYMBOLS), np.uint16)
    for table_number in range(n_tables):
        if bit >= 0:
            entries = lookup_tables[table_number << _TABLE_BITS : (table_number + 1) << _TABLE_BITS]
            code_table = (entries, code_ends[table_number], offsets[table_number], symbol_by_rank[table_number])
            bit = _read_codes(words, n_bits, bit, n_used + 2, code_table)
    if bit < 0:
        return failure
    counts, code_tables = np.zeros(256, np.int64), (table_of_group, lookup_tables, code_ends, offsets, symbol_by_rank)
    alphabet, symbols = (front_list, n_used + 1), symbols[:max_size]
    bit, n_symbols = _read_symbols(words, n_bits, bit, alphabet, code_tables, symbols, counts)
    if origin >= n_symbols:
        return failure
    total = 0
    for i in range(256):
        counts[i], total = total, total + counts[i]
    for i in range(n_symbols):
        sorted_position = counts[symbols[i]]
        counts[symbols[i]] += 1
        chain[sorted_position] = np.uint32(i) << np.uint32(8) | np.uint32(symbols[sorted_position])
    return bit, _follow_segments(chain, n_symbols, np.int64(chain[origin] >> np.uint32(8)), segment_symbols, out)


@compiled
def _read_groups(words: Any, n_bits: Any, bit: Any, n_tables: Any, table_of_group: Any) -> Any:
    """Read the number of each group's Huffman table; return the next bit, or -1 on an error."""
    table_order = np.arange(_MAX_TABLES).astype(np.uint8)
    for group in range(table_of_group.size):
        position = 0
        while _peek(words, bit, 1):
            position, bit = position + 1, bit + 1
            if position == n_tables:
                return -1
        bit += 1
        if bit > n_bits:
            return -1
        table_number = table_order[position]
        for i in range(position, 0, -1):
            table_order[i] = table_order[i - 1]
        table_of_group[group] = table_order[0] = table_number
    return bit


@compiled
def _read_codes(words: Any, n_bits: Any, bit: Any, n_symbols: Any, code_table: Any) -> Any:
    """Read the codes of one Huffman table; return the next bit, or -1 on an error."""
    table, code_ends, offsets, symbol_by_rank = code_table
    length_of_symbol, length = np.empty(_MAX_SYMBOLS, np.int64), _peek(words, bit, 5)
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
        length_of_symbol[symbol] = length
    code = rank = 0
    for length in range(1, _MAX_CODE_BITS + 1):
        offsets[length] = rank - code
        for symbol in range(n_symbols):
            if length_of_symbol[symbol] == length:
                if code >> length:  # there are more codes than this length can have
                    return -1
                if length <= _TABLE_BITS:
                    shift = _TABLE_BITS - length
                    table[code << shift : (code + 1) << shift] = symbol | length << 9
                symbol_by_rank[rank] = symbol
                code, rank = code + 1, rank + 1
        code_ends[length] = code
        code <<= 1
    return bit


@compiled
def _read_symbols(words: Any, n_bits: Any, bit: Any, alphabet: Any, code_tables: Any, symbols: Any, counts: Any) -> Any:
    """Decode and count symbols; return (next bit, number of `symbols`), both -1 on an error."""
    failure = (np.int64(-1), np.int64(-1))
    (front_list, end_symbol), (table_of_group, table, code_ends, offsets, symbol_by_rank) = alphabet, code_tables
    # Unsigned, because compiled code tests whether a signed index is negative.
    one, eight, low_byte, last_shift = np.uint64(1), np.uint64(8), np.uint64(255), np.uint64(56)
    # The move-to-front list: the first of eight symbols is in the lowest byte.
    first_eight, second_eight, other_symbols = np.uint64(0), np.uint64(0), front_list[16:].copy()
    for i in range(8):
        first_eight |= np.uint64(front_list[i]) << np.uint64(8 * i)
        second_eight |= np.uint64(front_list[i + 8]) << np.uint64(8 * i)
    n_symbols, run, weight = np.int64(0), np.int64(0), np.int64(1)
    group, n_left, table_number, table_start, position = 0, 0, np.int64(0), np.uint64(0), np.uint64(bit)
    while True:
        if not n_left:
            if group == table_of_group.size or np.int64(position) > n_bits:
                return failure
            table_number, n_left = np.int64(table_of_group[group]), _GROUP_SYMBOLS
            table_start, group = np.uint64(table_number << _TABLE_BITS), group + 1
        n_left -= 1
        word = position >> np.uint64(5)
        bits = np.uint64(words[word]) << np.uint64(32) | np.uint64(words[word + one])
        bits <<= position & np.uint64(31)
        table_entry = np.uint64(table[table_start | bits >> np.uint64(64 - _TABLE_BITS)])
        if table_entry:
            position += table_entry >> np.uint64(9)
            symbol = table_entry & np.uint64(511)
        else:
            length = _TABLE_BITS + 1
            while length <= _MAX_CODE_BITS:
                code = np.int64(bits >> np.uint64(64 - length))
                if code < code_ends[table_number, length]:
                    break
                length += 1
            if length > _MAX_CODE_BITS:
                return failure
            rank = code + offsets[table_number, length]
            if not 0 <= rank <= end_symbol:
                return failure
            position += np.uint64(length)
            symbol = np.uint64(symbol_by_rank[table_number, rank])
        if symbol <= one:  # a digit of the length of a run of the first symbol
            run += weight << np.int64(symbol)
            weight <<= 1
            if n_symbols + run > symbols.size:
                return failure
            continue
        if run:
            symbols[n_symbols : n_symbols + run] = np.uint8(first_eight & low_byte)
            counts[first_eight & low_byte] += run
            n_symbols, run, weight = n_symbols + run, np.int64(0), np.int64(1)
        if symbol == np.uint64(end_symbol):
            break
        if n_symbols == symbols.size:
            return failure
        list_index = symbol - one
        if list_index < eight:
            shift = list_index << np.uint64(3)
            list_symbol, lower_symbols = first_eight >> shift & low_byte, first_eight & ((one << shift) - one)
            first_eight = (first_eight ^ lower_symbols ^ list_symbol << shift) | lower_symbols << eight | list_symbol
        elif list_index < np.uint64(16):
            shift = (list_index - eight) << np.uint64(3)
            list_symbol, lower_symbols = second_eight >> shift & low_byte, second_eight & ((one << shift) - one)
            second_eight = (
                (second_eight ^ lower_symbols ^ list_symbol << shift)
                | lower_symbols << eight
                | first_eight >> last_shift
            )
            first_eight = first_eight << eight | list_symbol
        else:
            list_index -= np.uint64(16)
            list_symbol = np.uint64(other_symbols[list_index])
            while list_index > np.uint64(0):
                other_symbols[list_index] = other_symbols[list_index - one]
                list_index -= one
            other_symbols[0] = second_eight >> last_shift
            second_eight = second_eight << eight | first_eight >> last_shift
            first_eight = first_eight << eight | list_symbol
        counts[list_symbol] += 1
        symbols[np.uint64(n_symbols)] = list_symbol
        n_symbols += 1
    return np.int64(position), n_symbols


@compiled
def _follow_segments(chain: Any, n_symbols: Any, first_position: Any, segment_symbols: Any, out: Any) -> Any:
    """Write the symbols along the chain from `first_position`, with runs expanded; return their
    number.

    Return -1 if `out` is full. `chain` is a permutation of `n_symbols` positions, so each position
    is in one segment, and a row of `segment_symbols` has room for all of them.
    """
    n_segments = _BLOCK_SEGMENTS if n_symbols >= _MIN_SEGMENTED_BYTES else 1
    segment_step = n_symbols // n_segments
    start_positions = np.empty(n_segments + 1, np.int64)
    for start_number in range(n_segments):
        start_positions[start_number] = start_number * segment_step
        chain[start_number * segment_step] |= _STARTS_SEGMENT
    start_positions[n_segments], first_segment = first_position, first_position // segment_step
    if not chain[first_position] & _STARTS_SEGMENT:
        chain[first_position] |= _STARTS_SEGMENT
        n_segments, first_segment = n_segments + 1, n_segments
    row_of, begins, end_columns, next_segment = np.empty((4, n_segments), np.int64)
    positions, row_sizes, segment_of = np.zeros((3, _PARALLEL_SEGMENTS), np.int64)
    n_rows = n_begun = min(_PARALLEL_SEGMENTS, n_segments)
    for row in range(n_rows):
        chain_entry = chain[start_positions[row]]
        segment_symbols[row, 0] = chain_entry & np.uint32(255)
        positions[row], row_sizes[row], segment_of[row] = chain_entry >> np.uint32(8) & np.uint32(0xF_FFFF), 1, row
        row_of[row], begins[row] = row, 0
    n_active = n_rows
    while n_active:
        for row in range(n_rows):
            if segment_of[row] < 0:
                continue
            chain_entry = chain[positions[row]]
            if chain_entry & _STARTS_SEGMENT:
                start_number = min(positions[row] // segment_step, start_positions.size - 1)
                if start_positions[start_number] != positions[row]:
                    start_number = start_positions.size - 1
                segment = segment_of[row]
                end_columns[segment], next_segment[segment] = row_sizes[row], start_number
                if n_begun == n_segments:
                    segment_of[row] = -1
                    n_active -= 1
                    continue
                segment_of[row], row_of[n_begun], begins[n_begun] = n_begun, row, row_sizes[row]
                chain_entry, n_begun = chain[start_positions[n_begun]], n_begun + 1
            segment_symbols[row, row_sizes[row]] = chain_entry & np.uint32(255)
            row_sizes[row] += 1
            positions[row] = chain_entry >> np.uint32(8) & np.uint32(0xF_FFFF)
    n_written, run_length, previous_symbol, segment = np.int64(0), 0, np.int64(-1), first_segment
    while n_symbols > 0:
        row, begin, end = row_of[segment], begins[segment], min(end_columns[segment], begins[segment] + n_symbols)
        n_symbols -= end - begin
        for i in range(begin, end):
            symbol = np.int64(segment_symbols[row, i])
            if run_length == 4:  # four equal symbols precede the number of further ones
                if n_written + symbol > out.size:
                    return -1
                out[n_written : n_written + symbol] = previous_symbol
                n_written, run_length, previous_symbol = n_written + symbol, 0, np.int64(-1)
                continue
            if n_written == out.size:
                return -1
            run_length = run_length + 1 if symbol == previous_symbol else 1
            out[n_written], previous_symbol, n_written = symbol, symbol, n_written + 1
        segment = next_segment[segment]
    return n_written
