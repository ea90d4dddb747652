"""Carry the posting lists of a previous index file over to a new one, with the new rows of its
passages.

Lists are read and written in the order of their terms, and the postings of new passages are merged
into them. Carrying over a posting takes about six nanoseconds; counting it from text takes
hundreds. A list of up to 128 postings is copied if its passages remain and their rows have moved by
the same number. Blocks of longer lists are never copied: after the first added or removed passage
every block of 128 begins with another posting.

While blocks are rewritten, a posting is a word of eight bytes: 30 bits of the new row, 16 of the
passage's length, 16 of the weight. So words ascend as their rows do, and one memory access per
previous row reads all that a block needs.
"""

from typing import Any

import numpy as np
import numpy.typing as npt

from rag_model.compiled import bare, bit_length, inlined, load64, store64
from rag_model.index.postings.lists import (
    BLOCK_OFFSET,
    GAP_BITS,
    HEADER_BYTES,
    MAX_LENGTH,
    MAX_POSTING_BYTES,
    MAX_WEIGHT,
    MIN_LENGTH,
    OPEN_COUNT,
    PREVIOUS_ROW,
    WEIGHT_BITS,
    WRITER_SIZE,
    begin_list,
    end_block,
    write_single,
)
from rag_model.index.postings.packing import BLOCK, PADDING, SCRATCH_SIZE, read_varint, unpack_block, unpack_gaps

ROW_SHIFT, LENGTH_SHIFT = 32, 16  # bit offsets of the row and of the length in a word
MAX_ROWS = 1 << 30
WEIGHT_MASK = (1 << LENGTH_SHIFT) - 1
# Replaces the word of a removed row. It uses the two highest bits, which are 0 in all words, so
# that it stays negative when a weight is added.
REMOVED = np.int64(-1 << 62)
NO_COMMON_SHIFT = np.int64(1) << 40  # larger than any difference of rows
_ONE = np.uint64(1)
Ints = npt.NDArray[np.int64]
DONE, FULL, DAMAGED = range(3)  # status of `carry_over`
# Elements of a state. They are the offset of the next term in the previous dictionary, and the
# number of terms after it; of the term that was read last, its bytes, its number of postings, the
# start and the end of its list, and whether it must still be written; and the index of the next new
# term.
NEXT_TERM, TERMS_LEFT, TERM_BYTES, DF, LIST_BEGIN, LIST_END, TERM_LOADED, NEXT_NEW = range(8)
STATE_SIZE = 8


@inlined
def move_block(gaps, weights_less_one, count, row_before, row_words, new_words, next_new, end_new, words, n_buffered):
    """Append a block's remaining postings to `words`, merged with the new postings that precede
    them.

    Args:
        gaps: (count,) uint32 gaps of the block's rows, see `packing.encode_block`.
        weights_less_one: (count,) uint32 weights minus 1.
        count: postings of the block.
        row_before: the row before the block; -1 at the beginning of a list.
        row_words: (previous rows,) the word of each row's new row, without a weight, ascending;
            `REMOVED` for a removed row.
        new_words: words of the new postings, ascending.
        next_new: index of the first new posting that has not been merged.
        end_new: end of the term's new postings.
        words: buffer, large enough for all these postings.
        n_buffered: number of words in the buffer.

    Returns:
        The new `n_buffered` and `next_new`, and the last row of the block; the row is -1 if the
        block is damaged: a row does not exist, or a weight is too large.
    """
    last_row, weights = row_before + count, np.uint32(0)
    for i in range(np.uint64(count)):
        last_row += np.int64(gaps[i])
        weights |= weights_less_one[i]
    if last_row >= len(row_words) or weights > WEIGHT_MASK:
        return n_buffered, next_new, -1
    row, target_begin, removed_flags = np.uint64(row_before + 1), np.uint64(n_buffered), np.int64(0)
    for i in range(np.uint64(count)):
        row += np.uint64(gaps[i])
        posting_word = row_words[row]
        words[target_begin + i] = posting_word + np.int64(weights_less_one[i]) + 1
        removed_flags |= posting_word
        row += _ONE
    # A second loop is faster than a write position in the first one, which has few registers left.
    if removed_flags < 0:
        target_position = target_begin
        for i in range(np.uint64(count)):
            posting_word = words[target_begin + i]
            words[target_position] = posting_word
            # The addition avoids a branch that the processor could not predict.
            target_position += np.uint64(posting_word >= 0)
        count = np.int64(target_position) - n_buffered
    n_buffered += count
    if next_new < end_new and count:
        next_new, n_buffered = _merge_new(new_words, next_new, end_new, words, n_buffered - count, n_buffered)
    return n_buffered, next_new, last_row


@inlined
def _merge_new(new_words, next_new, end_new, words, begin, end):
    """Merge into words[begin:end] the new words that are smaller than the last word of this range.

    Returns:
        The new `next_new`, and the end of the words.
    """
    end_merged = next_new
    while end_merged < end_new and new_words[end_merged] < words[end - 1]:
        end_merged += 1
    search_begin, word_end = np.uint64(begin), np.uint64(end)
    for new_index in range(end_merged - 1, next_new - 1, -1):
        posting_word, shift, position = new_words[new_index], np.uint64(new_index + 1 - next_new), search_begin
        # Counting all smaller words is faster than a search, because the loop is vectorized.
        for i in range(search_begin, word_end):
            position += np.uint64(words[i] < posting_word)
        while word_end > position:
            word_end -= _ONE
            words[word_end + shift] = words[word_end]
        words[position + shift - _ONE] = posting_word
    return end_merged, end + end_merged - next_new


@inlined
def write_block(words, begin, count, writer, gaps, weights_less_one, sizes, out):
    """Write words[begin:begin + count] as the next block of the open list.

    Args:
        words: int64.
        begin: index of the block's first word.
        count: 1 ... 128.
        writer: state of the list, see `lists.begin_list`; its open block is empty.
        gaps: (128,) uint32, filled with the block's gaps.
        weights_less_one: (128,) uint32, filled with its weights minus 1.
        sizes: (SCRATCH_SIZE,) int64, for `encode_block`.
        out: uint8, receives blocks and headers.

    Returns:
        Whether rows ascend and weights are at least 1; otherwise nothing is written.
    """
    previous_row, first_word = writer[PREVIOUS_ROW], np.uint64(begin)
    gap_bits, weight_bits, max_weight, min_length = np.int64(0), np.int64(0), np.int64(0), np.int64(MAX_LENGTH)
    for i in range(np.uint64(count)):
        posting_word = words[first_word + i]
        row, weight = posting_word >> ROW_SHIFT, posting_word & WEIGHT_MASK
        gap, weight_less_one = row - previous_row - 1, weight - 1
        gaps[i], weights_less_one[i] = gap, weight_less_one
        gap_bits |= gap
        weight_bits |= weight_less_one
        max_weight, min_length = max(max_weight, weight), min(min_length, (posting_word >> LENGTH_SHIFT) & MAX_LENGTH)
        previous_row = row
    if gap_bits | weight_bits < 0:
        return False
    writer[OPEN_COUNT], writer[PREVIOUS_ROW], writer[MAX_WEIGHT], writer[MIN_LENGTH] = (
        count,
        previous_row,
        max_weight,
        min_length,
    )
    writer[GAP_BITS], writer[WEIGHT_BITS] = gap_bits, weight_bits
    end_block(writer, gaps, weights_less_one, sizes, out, out)
    return True


@inlined
def find_common_shift(gaps, count, row_words):
    """Return the number by which all rows of a single-block list move, or `NO_COMMON_SHIFT`.

    Args:
        gaps: (count,) uint32 gaps of the rows, which may be damaged.
        count: at least 1.
        row_words: see `move_block`.
    """
    row, shift, difference_bits = np.uint64(0), np.int64(0), np.int64(0)
    for i in range(np.uint64(count)):
        row += np.uint64(gaps[i])
        if row >= np.uint64(len(row_words)):
            return NO_COMMON_SHIFT
        posting_word = row_words[row]
        row_increase = (posting_word >> ROW_SHIFT) - np.int64(row)
        if i == 0:
            shift = row_increase
        difference_bits |= (row_increase ^ shift) | (posting_word & REMOVED)
        row += _ONE
    return shift if difference_bits == 0 else NO_COMMON_SHIFT


@inlined
def copy_block(data, begin, end, count, row, new_row, out, offset):
    """Copy the only block of a list, data[begin:end], with another first row and the same gaps.

    Copying is possible only if the new first row has as many bits as the old one, and the old one
    is not stored as an exception (see `packing`). Then the same widths take the fewest bytes, and
    only the bits of the first row change.

    Args:
        data: uint8, followed by `PADDING` bytes.
        begin: offset of the block in `data`.
        end: end of the block in `data`.
        count: number of the block's postings, at least 2.
        row: its first row, which is the first gap.
        new_row: the row that replaces it.
        out: uint8, at least `MAX_POSTING_BYTES` per posting.
        offset: offset of the copy in `out`.

    Returns:
        The end of the block in `out`; -1 if it was not copied.
    """
    width = np.int64(data[begin]) & 127
    bits = bit_length(row)
    if new_row < 0 or bit_length(new_row) != bits or bits > width or end - begin > MAX_POSTING_BYTES * count - PADDING:
        return -1
    for i in range(0, end - begin, 8):
        store64(out, offset + i, load64(data, begin + i))
    # The first gap follows the two bytes of the widths.
    other_bits = load64(data, begin + 2) >> np.uint64(width) << np.uint64(width)
    store64(out, offset + 2, other_bits | np.uint64(new_row))
    return offset + end - begin


def allocate_scratch(n_new_postings: int) -> tuple[npt.NDArray[Any], ...]:
    """Allocate the buffers for writing lists.

    Returns:
        The state of the open list; the scratch array of `encode_block`; the gaps of a block; the
        weights minus 1 of a block; and words for two blocks and `n_new_postings` more postings.
    """
    block_buffers = (np.empty(BLOCK, np.uint32) for _ in range(2))
    return (
        np.zeros(WRITER_SIZE, np.int64),
        np.zeros(SCRATCH_SIZE, np.int64),
        *block_buffers,
        np.empty(2 * BLOCK + n_new_postings, np.int64),
    )


@inlined
def _load_term(dictionary, lists_bytes, n_rows, state, term):
    """Read the next term of the previous dictionary; return whether its bytes are valid."""
    prefix, offset = read_varint(dictionary, state[NEXT_TERM], len(dictionary))
    suffix, offset = read_varint(dictionary, offset, len(dictionary))
    if not 0 <= prefix <= state[TERM_BYTES] or not 0 <= suffix <= min(
        len(dictionary) - offset, len(term) - PADDING - prefix
    ):
        return False
    if suffix <= 8 and offset + 8 <= len(dictionary):
        store64(term, prefix, load64(dictionary, offset))
    else:
        for i in range(suffix):
            term[prefix + i] = dictionary[offset + i]
    df, offset = read_varint(dictionary, offset + suffix, len(dictionary))
    list_bytes, offset = read_varint(dictionary, offset, len(dictionary))
    begin = state[LIST_END]
    if prefix + suffix < 1 or not 1 <= df <= n_rows or not 1 <= list_bytes <= lists_bytes - begin:
        return False
    state[NEXT_TERM], state[TERM_BYTES], state[DF], state[LIST_BEGIN], state[LIST_END] = (
        offset,
        prefix + suffix,
        df,
        begin,
        begin + list_bytes,
    )
    state[TERMS_LEFT] -= 1
    state[TERM_LOADED] = 1
    return True


@inlined
def _compare_terms(state, term, text, term_ends):
    """Compare the previous term with the next new term; return a number below, equal to or above
    0.
    """
    next_new = state[NEXT_NEW]
    if next_new == len(term_ends):
        return -1
    if state[TERM_LOADED] == 0:
        return 1
    term_begin = term_ends[next_new - 1] if next_new else 0
    term_bytes = term_ends[next_new] - term_begin
    for i in range(min(term_bytes, state[TERM_BYTES])):
        if term[i] != text[term_begin + i]:
            return np.int64(term[i]) - np.int64(text[term_begin + i])
    return state[TERM_BYTES] - term_bytes


@inlined
def _read_single(data, begin, end):
    """Read a list of one posting; return its row, or -1 if it is damaged, and its weight."""
    coded_row, begin = read_varint(data, begin, end)
    if coded_row & 1 == 0 or coded_row < 0:
        return coded_row >> 1, 1
    extra_weight, begin = read_varint(data, begin, end)
    return (coded_row >> 1 if extra_weight >= 0 else -1), extra_weight + 2


@inlined
def _copy_list(data, begin, end, count, row_words, gaps, out, offset):
    """Copy a list of one block whose rows all move by the same number.

    Return the end of the copy, or -1 if the rows move by different numbers.
    """
    if unpack_gaps(data, begin, end, count, gaps) < 0:
        return -1
    shift, row = find_common_shift(gaps, count, row_words), np.int64(gaps[0])
    return copy_block(data, begin, end, count, row, row + shift, out, offset) if shift != NO_COMMON_SHIFT else -1


@inlined
def _read_block(data, begin, end, df, count, n_rows, gaps, weights_less_one):
    """Read a block of a list of `df` postings; return its end, or -1 if it is damaged."""
    if df > 1:
        return unpack_block(data, begin, end, count, gaps, weights_less_one)
    row, weight = _read_single(data, begin, end)
    gaps[0], weights_less_one[0] = row, weight - 1
    return end if 0 <= row < n_rows else -1


@inlined
def _write_full_blocks(words, n_buffered, writer, gaps, weights_less_one, sizes, out):
    """Write all full blocks; return the number of their postings, or -1 if a posting is damaged."""
    n_done_postings = 0
    while n_buffered - n_done_postings >= BLOCK:
        if not write_block(words, n_done_postings, BLOCK, writer, gaps, weights_less_one, sizes, out):
            return -1
        n_done_postings += BLOCK
    if n_done_postings:
        for i in range(np.uint64(n_buffered - n_done_postings)):
            words[i] = words[i + np.uint64(n_done_postings)]
    return n_done_postings


@inlined
def _write_blocks(
    data, begin, end, df, row_words, new_words, first, last, writer, sizes, gaps, weights_less_one, words, out
):
    """Write the blocks of the open list.

    Return the number of postings, or -1 if the previous list is damaged.
    """
    n_total, last_row, n_buffered, n_unread = 0, np.int64(-1), 0, df
    if df > BLOCK:
        begin += HEADER_BYTES * ((df + BLOCK - 1) // BLOCK)
    while n_unread or first < last:
        if n_unread:
            count = min(BLOCK, n_unread)
            begin = _read_block(data, begin, end, df, count, len(row_words), gaps, weights_less_one)
            if begin < 0:
                return -1
            n_buffered, first, last_row = move_block(
                gaps, weights_less_one, count, last_row, row_words, new_words, first, last, words, n_buffered
            )
            if last_row < 0:
                return -1
            n_unread -= count
        while first < last and n_unread == 0:
            words[n_buffered] = new_words[first]
            n_buffered, first = n_buffered + 1, first + 1
        block_postings = _write_full_blocks(words, n_buffered, writer, gaps, weights_less_one, sizes, out)
        if block_postings < 0:
            return -1
        n_buffered, n_total = n_buffered - block_postings, n_total + block_postings
    n_total += n_buffered
    if n_total == 1:  # a list of one posting has no block
        return 1 if words[0] & WEIGHT_MASK else -1
    return (
        n_total
        if n_buffered == 0 or write_block(words, 0, n_buffered, writer, gaps, weights_less_one, sizes, out)
        else -1
    )


@inlined
def _write_list(
    data, begin, end, df, row_words, new_words, first, last, writer, sizes, gaps, weights_less_one, words, out, offset
):
    """Write the list of a term.

    Return the end of the list, -1 if the previous list is damaged; and its number of postings.

    Args:
        data: uint8, the previous lists, followed by `PADDING` bytes.
        begin: offset of the term's list in `data`.
        end: end of that list.
        df: number of the list's postings; 0 if the term is new.
        row_words: (previous rows,) the word of each row's new row, without a weight, ascending;
            `REMOVED` for a removed row.
        new_words: words of the new postings, ascending within a term.
        first: index of the term's first new posting.
        last: end of its new postings.
        writer: a scratch array of `allocate_scratch`, as are the next four arguments.
        sizes: scratch array of `encode_block`.
        gaps: buffer for the gaps of a block.
        weights_less_one: buffer for the weights of a block.
        words: buffer for the words of a block and of new postings.
        out: uint8, at least `MAX_POSTING_BYTES` per posting.
        offset: offset of the list in `out`.
    """
    if df == 1 and first == last:
        row, weight = _read_single(data, begin, end)
        if not 0 <= row < len(row_words):
            return -1, 0
        posting_word = row_words[row]
        return (write_single(posting_word >> ROW_SHIFT, weight, out, offset), 1) if posting_word >= 0 else (offset, 0)
    if df <= BLOCK and first == last:
        end_offset = _copy_list(data, begin, end, df, row_words, gaps, out, offset)
        if end_offset >= 0:
            return end_offset, df
    # An upper bound, because passages may have been removed.
    max_blocks = (df + last - first + BLOCK - 1) // BLOCK
    blocks_offset = offset + HEADER_BYTES * max_blocks if max_blocks > 1 else offset
    begin_list(writer, blocks_offset, offset if max_blocks > 1 else -1)
    n_postings = _write_blocks(
        data, begin, end, df, row_words, new_words, first, last, writer, sizes, gaps, weights_less_one, words, out
    )
    if n_postings == 1:
        return write_single(words[0] >> ROW_SHIFT, words[0] & WEIGHT_MASK, out, offset), n_postings
    n_blocks = (n_postings + BLOCK - 1) // BLOCK
    n_unused_bytes = blocks_offset - (offset + HEADER_BYTES * n_blocks if n_blocks > 1 else offset)
    if n_unused_bytes and n_postings > 0:
        # A header is longer than a word, so no byte is read after it was overwritten.
        for i in range(blocks_offset, writer[BLOCK_OFFSET], 8):
            store64(out, i - n_unused_bytes, load64(out, i))
    return (writer[BLOCK_OFFSET] - n_unused_bytes if n_postings >= 0 else -1), n_postings


@inlined
def _copy_term(text, begin, size, are_padded, out, offset):
    """Copy the term text[begin:begin + size], eight bytes at once if both arrays `are_padded`."""
    if are_padded:
        for i in range(0, size, 8):
            store64(out, offset + i, load64(text, begin + i))
    else:
        for i in range(size):
            out[offset + i] = text[begin + i]


@bare
def carry_over(
    dictionary,
    data,
    lists_bytes,
    row_words,
    text,
    term_ends,
    ends,
    new_words,
    state,
    term,
    writer,
    sizes,
    gaps,
    weights_less_one,
    words,
    out_text,
    out_term_ends,
    out_counts,
    out_sizes,
    out,
):
    """Write lists until all are written or the batch is full.

    Args:
        dictionary: uint8, the dictionary of the previous file.
        data: uint8, the lists of the previous file, followed by `PADDING` bytes.
        lists_bytes: bytes of the lists.
        row_words: (previous rows,) int64: the word of each row's new row, without a weight,
            ascending; `REMOVED` for a removed row.
        text: uint8, the terms of the new passages, concatenated in ascending order.
        term_ends: (t,) end of each term in `text`.
        ends: (t,) end of each term's postings in `new_words`.
        new_words: (p,) int64 words of the new postings, ascending within a term.
        state: (STATE_SIZE,) int64, zeros except for `TERMS_LEFT`; updated.
        term: uint8, at least the bytes of the longest term and `PADDING` more.
        writer: a scratch array of `allocate_scratch`, as are the next four arguments.
        sizes: scratch array of `encode_block`.
        gaps: buffer for the gaps of a block.
        weights_less_one: buffer for the weights of a block.
        words: buffer for the words of a block and of new postings.
        out_text: uint8, filled with the batch's terms, concatenated; needs `PADDING` bytes more.
        out_term_ends: int64, filled with the end of each term.
        out_counts: int64, filled with the postings of each term.
        out_sizes: int64, filled with the bytes of each term's list.
        out: uint8, filled with the lists.

    Returns:
        `DONE`, `FULL` or `DAMAGED`; and the number of terms and the bytes of lists in the batch.
    """
    n_terms, used_text, offset = 0, 0, 0
    while True:
        if (
            state[TERM_LOADED] == 0
            and state[TERMS_LEFT]
            and not _load_term(dictionary, lists_bytes, len(row_words), state, term)
        ):
            return DAMAGED, n_terms, offset
        if state[TERM_LOADED] == 0 and state[NEXT_NEW] == len(term_ends):
            return DONE, n_terms, offset
        comparison, next_new = _compare_terms(state, term, text, term_ends), state[NEXT_NEW]
        df, first_word, end_word, text_begin, term_bytes = state[DF], 0, 0, 0, state[TERM_BYTES]
        if comparison >= 0:
            first_word, end_word = ends[next_new - 1] if next_new else 0, ends[next_new]
            text_begin = term_ends[next_new - 1] if next_new else 0
            term_bytes, df = term_ends[next_new] - text_begin, df if comparison == 0 else 0
        if (
            n_terms == len(out_term_ends)
            or term_bytes > len(out_text) - PADDING - used_text
            or df + end_word - first_word > (len(out) - offset) // MAX_POSTING_BYTES
        ):
            return FULL, n_terms, offset
        end_offset, n_postings = _write_list(
            data,
            state[LIST_BEGIN],
            state[LIST_END],
            df,
            row_words,
            new_words,
            first_word,
            end_word,
            writer,
            sizes,
            gaps,
            weights_less_one,
            words,
            out,
            offset,
        )
        if end_offset < 0:
            return DAMAGED, n_terms, offset
        if n_postings:
            if comparison > 0:
                _copy_term(text, text_begin, term_bytes, False, out_text, used_text)
            else:
                _copy_term(term, 0, term_bytes, True, out_text, used_text)
            used_text += term_bytes
            out_term_ends[n_terms], out_counts[n_terms], out_sizes[n_terms] = used_text, n_postings, end_offset - offset
            n_terms, offset = n_terms + 1, end_offset
        if comparison <= 0:
            state[TERM_LOADED] = 0
        if comparison >= 0:
            state[NEXT_NEW] += 1
