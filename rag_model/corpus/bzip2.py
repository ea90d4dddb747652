"""Decode bzip2 streams in half the time of libbz2; decoding is most of the work of reading a dump.

Three steps differ from libbz2. A table decodes Huffman codes of up to 11 bits in one look-up. The
first 16 symbols of the move-to-front list are packed into two integers, so that a few shifts move a
symbol to the front. The inverse Burrows-Wheeler transform follows a chain of positions through a
megabyte, where each step waits for memory; this module follows eight segments of the chain at the
same time. Segments start at many positions of the block, and each segment ends where another one
starts.

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
_MAX_DECODED = 1 << 20  # maximum bytes of a decoded block; more would be a decompression bomb
_PADDING = bytes(512)  # follows the data; reads may pass the end before the position is checked
_TABLE_BITS = 11  # maximum bits of a code in the look-up table; longer codes are rare
_MAX_CODE_BITS, _MAX_SYMBOLS, _MAX_TABLES = 20, 258, 6
_GROUP_SYMBOLS = 50  # number of consecutive symbols with the same Huffman table
_PARALLEL_SEGMENTS = 8  # number of segments that are followed at the same time
_BLOCK_SEGMENTS = 512  # segments of a block; fewer, longer ones would end at more different times
_MIN_SEGMENTED_BYTES = 4_096  # smaller blocks fit in the L1 cache and have one segment
_STARTS_SEGMENT = np.uint32(1 << 31)  # bit of a chain entry; set if a segment starts there
_REVERSED_BITS = bytes(int(f"{byte:08b}"[::-1], 2) for byte in range(256))


class UnusualStreamError(Exception):
    """A stream is damaged, or has a property that only libbz2 decodes."""


def decode_streams(data: bytes) -> Iterator[bytes]:
    """Yield the decoded blocks of concatenated bzip2 streams.

    Raises:
        UnusualStreamError: The rest of the data must be decoded by libbz2.
    """
    words = np.frombuffer(data + _PADDING[len(data) % 4 :], ">u4").astype(np.uint32)
    n_bits, bit_pos, workspace = 8 * len(data), 0, _get_workspace()
    while bit_pos < n_bits:
        stream_header = data[bit_pos // 8 : bit_pos // 8 + 4]
        if stream_header[:3] != b"BZh" or stream_header[3:] not in _LEVELS:
            raise UnusualStreamError
        bit_pos, checksum, max_bytes = bit_pos + 32, 0, 100_000 * int(stream_header[3:])
        while _read_bits(words, bit_pos, 48) == _BLOCK_MAGIC and bit_pos < n_bits:
            block_checksum, bit_pos = _read_bits(words, bit_pos + 48, 32), bit_pos + 80
            bit_pos, block_bytes = _decode_block(words, n_bits, bit_pos, max_bytes, workspace)
            block = workspace[-1][: max(block_bytes, 0)].tobytes()
            if bit_pos < 0 or block_bytes < 0 or _compute_checksum(block) != block_checksum:
                raise UnusualStreamError
            checksum = (checksum << 1 & 0xFFFF_FFFF | checksum >> 31) ^ block_checksum
            yield block
        if _read_bits(words, bit_pos, 48) != _END_MAGIC or _read_bits(words, bit_pos + 48, 32) != checksum:
            raise UnusualStreamError
        bit_pos = (bit_pos + 80 + 7) // 8 * 8
    if bit_pos > n_bits:
        raise UnusualStreamError


_LEVELS = {b"%d" % level for level in range(1, 10)}
_local = threading.local()


def _get_workspace() -> tuple[Any, ...]:
    """Return this thread's arrays for decoding; a block of 400 kB uses 3 MB of them."""
    if not hasattr(_local, "workspace"):
        _local.workspace = (
            np.empty(_MAX_BLOCK, np.uint8),  # the last column of the sorted rotations
            # For each position: the next position in bits 8 to 27, and the symbol in bits 0 to 7.
            np.empty(_MAX_BLOCK, np.uint32),
            np.empty((_PARALLEL_SEGMENTS, _MAX_BLOCK), np.uint8),  # symbols of each segment
            np.empty(_MAX_DECODED, np.uint8),  # the block
        )
    workspace: tuple[Any, ...] = _local.workspace
    return workspace


def _read_bits(words: Any, bit_pos: int, n_bits: int) -> int:
    """Return `n_bits` bits (at most 64) as a number; bits after the padding are read as 0."""
    first_word_index = bit_pos // 32
    word_bits = int.from_bytes(words[first_word_index : first_word_index + 3].astype(">u4").tobytes().ljust(12, b"\0"))
    return word_bits >> (96 - bit_pos % 32 - n_bits) & ((1 << n_bits) - 1)


def _compute_checksum(block: bytes) -> int:
    """Return bzip2's CRC of a block.

    It is zlib's CRC of the block with the bits of each byte reversed; the bits of the result are
    reversed, too.
    """
    return int(f"{zlib.crc32(block.translate(_REVERSED_BITS)):032b}"[::-1], 2)


@compiled
def _peek_bits(words: Any, bit_pos: Any, n_bits: Any) -> Any:
    """Return the next `n_bits` (1 to 32) bits as an int64."""
    word_index = np.uint64(bit_pos >> 5)
    bits = np.uint64(words[word_index]) << np.uint64(32) | np.uint64(words[word_index + np.uint64(1)])
    return np.int64((bits << np.uint64(bit_pos & 31)) >> np.uint64(64 - n_bits))


@compiled
def _decode_block(words: Any, n_bits: Any, bit_pos: Any, max_bytes: Any, workspace: Any) -> Any:
    """Decode a block into the workspace; return the next bit's position and the number of bytes.

    Both are -1 if the block is damaged or unusual.

    Args:
        words: (w,) uint32, big-endian, with the padding.
        n_bits: number of bits before the padding.
        bit_pos: position of the first bit after the block's checksum.
        max_bytes: maximum bytes of a block at this compression level.
        workspace: the arrays of `_get_workspace`.
    """
    symbols, chain_entries, segment_symbols, block = workspace
    failure = (np.int64(-1), np.int64(-1))
    if bit_pos > n_bits or _peek_bits(words, bit_pos, 1):  # this bit marks blocks of an old bzip2
        return failure
    origin_row, used_ranges = _peek_bits(words, bit_pos + 1, 24), _peek_bits(words, bit_pos + 25, 16)
    bit_pos += 41
    move_to_front_table, n_used_bytes = np.zeros(256, np.uint8), 0
    for high_nibble in range(16):
        if used_ranges >> (15 - high_nibble) & 1:
            used_bits = _peek_bits(words, bit_pos, 16)
            bit_pos += 16
            for low_nibble in range(16):
                if used_bits >> (15 - low_nibble) & 1:
                    move_to_front_table[n_used_bytes] = 16 * high_nibble + low_nibble
                    n_used_bytes += 1
    n_tables, n_groups = _peek_bits(words, bit_pos, 3), _peek_bits(words, bit_pos + 3, 15)
    bit_pos += 18
    if not n_used_bytes or not 2 <= n_tables <= _MAX_TABLES or not n_groups:
        return failure
    table_of_group = np.empty(n_groups, np.uint8)
    bit_pos = _read_group_tables(words, n_bits, bit_pos, n_tables, table_of_group)
    # An entry has a symbol in bits 0 to 8 and its code length above; it is 0 if the code is longer.
    lookup_tables = np.zeros(_MAX_TABLES << _TABLE_BITS, np.uint16)
    # For each code length: the end of its codes, and the offset from a code to the symbol's rank.
    code_ends, rank_offsets = np.zeros((2, _MAX_TABLES, _MAX_CODE_BITS + 1), np.int64)
    symbol_by_rank = np.zeros((_MAX_TABLES, _MAX_SYMBOLS), np.uint16)
    for table_number in range(n_tables):
        if bit_pos >= 0:
            entries = lookup_tables[table_number << _TABLE_BITS : (table_number + 1) << _TABLE_BITS]
            code_table = (entries, code_ends[table_number], rank_offsets[table_number], symbol_by_rank[table_number])
            bit_pos = _read_code_table(words, n_bits, bit_pos, n_used_bytes + 2, code_table)
    if bit_pos < 0:
        return failure
    code_tables = (table_of_group, lookup_tables, code_ends, rank_offsets, symbol_by_rank)
    symbol_counts = np.zeros(256, np.int64)
    alphabet, symbols = (move_to_front_table, n_used_bytes + 1), symbols[:max_bytes]
    bit_pos, n_symbols = _read_symbols(words, n_bits, bit_pos, alphabet, code_tables, symbols, symbol_counts)
    if origin_row >= n_symbols:
        return failure
    n_smaller = 0
    for i in range(256):
        symbol_counts[i], n_smaller = n_smaller, n_smaller + symbol_counts[i]
    for i in range(n_symbols):
        sorted_row = symbol_counts[symbols[i]]
        symbol_counts[symbols[i]] += 1
        chain_entries[sorted_row] = np.uint32(i) << np.uint32(8) | np.uint32(symbols[sorted_row])
    first_position = np.int64(chain_entries[origin_row] >> np.uint32(8))
    return bit_pos, _follow_segments(chain_entries, n_symbols, first_position, segment_symbols, block)


@compiled
def _read_group_tables(words: Any, n_bits: Any, bit_pos: Any, n_tables: Any, table_of_group: Any) -> Any:
    """Read each group's Huffman table number; return the next bit's position, or -1 on an error."""
    table_order = np.arange(_MAX_TABLES).astype(np.uint8)
    for group in range(table_of_group.size):
        table_rank = 0
        while _peek_bits(words, bit_pos, 1):
            table_rank, bit_pos = table_rank + 1, bit_pos + 1
            if table_rank == n_tables:
                return -1
        bit_pos += 1
        if bit_pos > n_bits:
            return -1
        table_number = table_order[table_rank]
        for i in range(table_rank, 0, -1):
            table_order[i] = table_order[i - 1]
        table_of_group[group] = table_order[0] = table_number
    return bit_pos


@compiled
def _read_code_table(words: Any, n_bits: Any, bit_pos: Any, n_symbols: Any, code_table: Any) -> Any:
    """Read the codes of one Huffman table; return the next bit's position, or -1 on an error."""
    lookup_table, code_ends, rank_offsets, symbol_by_rank = code_table
    length_of_symbol, code_length = np.empty(_MAX_SYMBOLS, np.int64), _peek_bits(words, bit_pos, 5)
    bit_pos += 5
    for symbol in range(n_symbols):
        while True:
            if not 1 <= code_length <= _MAX_CODE_BITS or bit_pos > n_bits:
                return -1
            if not _peek_bits(words, bit_pos, 1):
                break
            code_length += 1 - 2 * _peek_bits(words, bit_pos + 1, 1)
            bit_pos += 2
        bit_pos += 1
        length_of_symbol[symbol] = code_length
    code = rank = 0
    for code_length in range(1, _MAX_CODE_BITS + 1):
        rank_offsets[code_length] = rank - code
        for symbol in range(n_symbols):
            if length_of_symbol[symbol] == code_length:
                if code >> code_length:  # there are more codes than this length can have
                    return -1
                if code_length <= _TABLE_BITS:
                    shift = _TABLE_BITS - code_length
                    lookup_table[code << shift : (code + 1) << shift] = symbol | code_length << 9
                symbol_by_rank[rank] = symbol
                code, rank = code + 1, rank + 1
        code_ends[code_length] = code
        code <<= 1
    return bit_pos


@compiled
def _read_symbols(
    words: Any, n_bits: Any, bit_pos: Any, alphabet: Any, code_tables: Any, symbols: Any, symbol_counts: Any
) -> Any:
    """Decode symbols; return the next bit's position and the number of symbols, or (-1, -1)."""
    failure = (np.int64(-1), np.int64(-1))
    move_to_front_table, end_symbol = alphabet
    table_of_group, lookup_table, code_ends, rank_offsets, symbol_by_rank = code_tables
    # These are unsigned because compiled code tests whether a signed index is negative.
    one, eight, byte_mask, last_shift = np.uint64(1), np.uint64(8), np.uint64(255), np.uint64(56)
    # In each integer of the move-to-front list, the first of eight symbols is the lowest byte.
    first_eight, second_eight, other_symbols = np.uint64(0), np.uint64(0), move_to_front_table[16:].copy()
    for i in range(8):
        first_eight |= np.uint64(move_to_front_table[i]) << np.uint64(8 * i)
        second_eight |= np.uint64(move_to_front_table[i + 8]) << np.uint64(8 * i)
    n_symbols, run_length, digit_weight = np.int64(0), np.int64(0), np.int64(1)
    table_number, table_start, bit_position = np.int64(0), np.uint64(0), np.uint64(bit_pos)
    group = n_left_in_group = 0
    while True:
        if not n_left_in_group:
            if group == table_of_group.size or np.int64(bit_position) > n_bits:
                return failure
            table_number, n_left_in_group = np.int64(table_of_group[group]), _GROUP_SYMBOLS
            table_start, group = np.uint64(table_number << _TABLE_BITS), group + 1
        n_left_in_group -= 1
        word_index = bit_position >> np.uint64(5)
        bits = np.uint64(words[word_index]) << np.uint64(32) | np.uint64(words[word_index + one])
        bits <<= bit_position & np.uint64(31)
        table_entry = np.uint64(lookup_table[table_start | bits >> np.uint64(64 - _TABLE_BITS)])
        if table_entry:
            bit_position += table_entry >> np.uint64(9)
            symbol = table_entry & np.uint64(511)
        else:
            code_length = _TABLE_BITS + 1
            while code_length <= _MAX_CODE_BITS:
                code = np.int64(bits >> np.uint64(64 - code_length))
                if code < code_ends[table_number, code_length]:
                    break
                code_length += 1
            if code_length > _MAX_CODE_BITS:
                return failure
            rank = code + rank_offsets[table_number, code_length]
            if not 0 <= rank <= end_symbol:
                return failure
            bit_position += np.uint64(code_length)
            symbol = np.uint64(symbol_by_rank[table_number, rank])
        if symbol <= one:  # symbols 0 and 1 are digits of a run length
            run_length += digit_weight << np.int64(symbol)
            digit_weight <<= 1
            if n_symbols + run_length > symbols.size:
                return failure
            continue
        if run_length:
            symbols[n_symbols : n_symbols + run_length] = np.uint8(first_eight & byte_mask)
            symbol_counts[first_eight & byte_mask] += run_length
            n_symbols, run_length, digit_weight = n_symbols + run_length, np.int64(0), np.int64(1)
        if symbol == np.uint64(end_symbol):
            break
        if n_symbols == symbols.size:
            return failure
        list_index = symbol - one
        if list_index < eight:
            shift = list_index << np.uint64(3)
            decoded_symbol, symbols_before = first_eight >> shift & byte_mask, first_eight & ((one << shift) - one)
            first_eight ^= symbols_before ^ decoded_symbol << shift
            first_eight |= symbols_before << eight | decoded_symbol
        elif list_index < np.uint64(16):
            shift = (list_index - eight) << np.uint64(3)
            decoded_symbol, symbols_before = second_eight >> shift & byte_mask, second_eight & ((one << shift) - one)
            second_eight ^= symbols_before ^ decoded_symbol << shift
            second_eight |= symbols_before << eight | first_eight >> last_shift
            first_eight = first_eight << eight | decoded_symbol
        else:
            list_index -= np.uint64(16)
            decoded_symbol = np.uint64(other_symbols[list_index])
            while list_index > np.uint64(0):
                other_symbols[list_index] = other_symbols[list_index - one]
                list_index -= one
            other_symbols[0] = second_eight >> last_shift
            second_eight = second_eight << eight | first_eight >> last_shift
            first_eight = first_eight << eight | decoded_symbol
        symbol_counts[decoded_symbol] += 1
        symbols[np.uint64(n_symbols)] = decoded_symbol
        n_symbols += 1
    return np.int64(bit_position), n_symbols


@compiled
def _follow_segments(chain_entries: Any, n_symbols: Any, first_position: Any, segment_symbols: Any, block: Any) -> Any:
    """Follow the chain from `first_position`, and write its symbols to `block` with runs expanded.

    Return the number of bytes, or -1 if `block` is full. `chain_entries` is a permutation of
    `n_symbols` positions, so each position is in one segment, and a row of `segment_symbols` is
    long enough for all positions.
    """
    n_segments = _BLOCK_SEGMENTS if n_symbols >= _MIN_SEGMENTED_BYTES else 1
    segment_step = n_symbols // n_segments
    start_positions = np.empty(n_segments + 1, np.int64)
    for start_number in range(n_segments):
        start_positions[start_number] = start_number * segment_step
        chain_entries[start_number * segment_step] |= _STARTS_SEGMENT
    start_positions[n_segments], first_segment = first_position, first_position // segment_step
    if not chain_entries[first_position] & _STARTS_SEGMENT:
        chain_entries[first_position] |= _STARTS_SEGMENT
        n_segments, first_segment = n_segments + 1, n_segments
    row_of_segment, begin_columns, end_columns, next_segment = np.empty((4, n_segments), np.int64)
    row_positions, row_sizes, segment_of_row = np.zeros((3, _PARALLEL_SEGMENTS), np.int64)
    n_rows = n_begun_segments = min(_PARALLEL_SEGMENTS, n_segments)
    for row in range(n_rows):
        chain_entry = chain_entries[start_positions[row]]
        segment_symbols[row, 0] = chain_entry & np.uint32(255)
        row_positions[row], row_sizes[row] = chain_entry >> np.uint32(8) & np.uint32(0xF_FFFF), 1
        segment_of_row[row] = row_of_segment[row] = row
        begin_columns[row] = 0
    n_active_rows = n_rows
    while n_active_rows:
        for row in range(n_rows):
            if segment_of_row[row] < 0:
                continue
            chain_entry = chain_entries[row_positions[row]]
            if chain_entry & _STARTS_SEGMENT:
                start_number = min(row_positions[row] // segment_step, start_positions.size - 1)
                if start_positions[start_number] != row_positions[row]:
                    start_number = start_positions.size - 1
                segment = segment_of_row[row]
                end_columns[segment], next_segment[segment] = row_sizes[row], start_number
                if n_begun_segments == n_segments:
                    segment_of_row[row] = -1
                    n_active_rows -= 1
                    continue
                segment, n_begun_segments = n_begun_segments, n_begun_segments + 1
                segment_of_row[row], row_of_segment[segment] = segment, row
                begin_columns[segment] = row_sizes[row]
                chain_entry = chain_entries[start_positions[segment]]
            segment_symbols[row, row_sizes[row]] = chain_entry & np.uint32(255)
            row_sizes[row] += 1
            row_positions[row] = chain_entry >> np.uint32(8) & np.uint32(0xF_FFFF)
    n_written, run_length, previous_symbol, segment = np.int64(0), 0, np.int64(-1), first_segment
    while n_symbols > 0:
        row, begin_column = row_of_segment[segment], begin_columns[segment]
        end_column = min(end_columns[segment], begin_column + n_symbols)
        n_symbols -= end_column - begin_column
        for i in range(begin_column, end_column):
            symbol = np.int64(segment_symbols[row, i])
            if run_length == 4:  # four equal symbols precede the number of further repetitions
                if n_written + symbol > block.size:
                    return -1
                block[n_written : n_written + symbol] = previous_symbol
                n_written, run_length, previous_symbol = n_written + symbol, 0, np.int64(-1)
                continue
            if n_written == block.size:
                return -1
            run_length = run_length + 1 if symbol == previous_symbol else 1
            block[n_written], previous_symbol, n_written = symbol, symbol, n_written + 1
        segment = next_segment[segment]
    return n_written
