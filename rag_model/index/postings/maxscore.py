"""Exact top-k search over encoded posting lists by MaxScore, which skips postings that cannot
matter.

MaxScore (Turtle and Flood 1995) over windows of rows, with upper bounds of blocks (Ding and Suel
2011): in each window the terms whose bounds together do not reach the k-th best score so far are
*non-essential*. A passage without an essential term cannot be among the best. So the essential
lists are added up row by row, and only rows that can still be among the best are looked up in the
non-essential lists.

A posting adds factor * contribution to a score. The factor belongs to the query's term, and

    contribution = weight / (saturation * weight + fixed + slope * length)

BM25 and impacts are two settings of this equation (`Weighting`), so one search serves both. With
every setting, a contribution grows with the weight and falls with the passage's length. So the
largest weight and the shortest length of a block give an upper bound for each setting.

Scores are integers (for BM25 in units of 2^-32), whose sums do not depend on their order. So
skipping changes nothing, not even among equal scores, which are ordered by row.
"""

from typing import NamedTuple

import numpy as np

from rag_model.compiled import compiled
from rag_model.index.postings.lists import HEADER_BYTES, MAX_HEADER_WEIGHT, read_last_row, read_uint16
from rag_model.index.postings.packing import BLOCK, decode_block, read_varint

# Elements of a cursor, the state of a reader of one list. They are the number of postings, the
# start, the end and the number of blocks of the list; the current block, the offset of its data,
# the row before it and its last row; and the decoded block, its number of postings, and the
# position in it. A block is decoded only if its postings are needed.
(
    DF,
    LIST_BEGIN,
    LIST_END,
    BLOCKS,
    BLOCK_INDEX,
    BLOCK_DATA,
    ROW_BEFORE,
    LAST_ROW,
    DECODED_BLOCK,
    BLOCK_COUNT,
    POSITION,
) = range(11)
CURSOR_SIZE = 11
BEYOND_ROWS = np.int64(1) << 40  # larger than any row
_MAX_UINT32 = (np.int64(1) << 32) - 1  # largest row or weight in an array of four-byte numbers
MAX_IMPACT = 255  # the largest weight of an impact index, in one byte
WINDOW_ROWS = 4_096  # rows per window
# For a list with more blocks, the bound for the largest possible weight is used, without a scan of
# its headers.
_MAX_SCANNED_BLOCKS = 2_048
_MAX_SAMPLED_POSTINGS = 4_096  # maximum postings of a list that is read for the initial threshold
DAMAGED = -1


@compiled
def compute_contribution(weight, length, weighting):
    """Return the amount that a posting adds to a score for a term with factor 1; see the module."""
    return np.float32(weight / (weighting.saturation * weight + weighting.fixed + weighting.slope * length))


@compiled
def to_score_units(factor, contribution):
    """Return the score units that a posting adds to a score: at least 1, so that every passage with
    the term is a hit.
    """
    return max(np.int64(1), np.int64(factor * contribution))


@compiled
def get_header_offset(cursor, block):
    """Return the offset of a block's header."""
    return cursor[LIST_BEGIN] + HEADER_BYTES * block


@compiled
def start_cursor(cursor, data, lists_bytes, rows, weights):
    """Move a cursor to the first block of its list; return whether the list is valid."""
    begin, end = cursor[LIST_BEGIN], cursor[LIST_END]
    if begin < 0 or end > lists_bytes or begin >= end or cursor[DF] < 1:
        return False
    n_blocks = (cursor[DF] + BLOCK - 1) // BLOCK
    cursor[BLOCKS], cursor[BLOCK_INDEX], cursor[ROW_BEFORE], cursor[POSITION], cursor[DECODED_BLOCK] = (
        n_blocks,
        0,
        -1,
        0,
        -1,
    )
    if cursor[DF] == 1:
        coded_row, offset = read_varint(data, begin, end)
        if coded_row < 0:
            return False
        rows[0], weights[0] = coded_row >> 1, 1
        if coded_row & 1:
            extra_weight, offset = read_varint(data, offset, end)
            if not 0 <= extra_weight < _MAX_UINT32:
                return False
            weights[0] = extra_weight + 2
        cursor[LAST_ROW], cursor[DECODED_BLOCK], cursor[BLOCK_COUNT] = rows[0], 0, 1
        return True
    if n_blocks == 1:
        cursor[BLOCK_COUNT] = cursor[DF]
        if decode_block(data, begin, end, -1, cursor[DF], rows, weights) < 0:
            return False
        cursor[LAST_ROW], cursor[DECODED_BLOCK] = rows[cursor[DF] - 1], 0
        return True
    cursor[BLOCK_DATA] = begin + HEADER_BYTES * n_blocks
    if cursor[BLOCK_DATA] > end:
        return False
    cursor[LAST_ROW] = read_last_row(data, begin)
    return True


@compiled
def next_block(cursor, data):
    """Move a cursor to its next block; after the last one `LAST_ROW` is `BEYOND_ROWS`."""
    header_offset = get_header_offset(cursor, cursor[BLOCK_INDEX])
    if cursor[BLOCKS] > 1:
        cursor[BLOCK_DATA] += read_uint16(data, header_offset + 4)
    cursor[BLOCK_INDEX] += 1
    cursor[POSITION] = 0
    if cursor[BLOCK_INDEX] >= cursor[BLOCKS]:
        cursor[LAST_ROW] = BEYOND_ROWS
        cursor[ROW_BEFORE] = cursor[LAST_ROW]
    else:
        cursor[ROW_BEFORE] = cursor[LAST_ROW]
        cursor[LAST_ROW] = read_last_row(data, header_offset + HEADER_BYTES)


@compiled
def read_block(cursor, data, rows, weights):
    """Decode the cursor's block, unless it is decoded already; return whether it is valid."""
    if cursor[DECODED_BLOCK] == cursor[BLOCK_INDEX]:
        return True
    block_index = cursor[BLOCK_INDEX]
    n_postings = BLOCK if block_index + 1 < cursor[BLOCKS] else cursor[DF] - BLOCK * block_index
    if decode_block(data, cursor[BLOCK_DATA], cursor[LIST_END], cursor[ROW_BEFORE], n_postings, rows, weights) < 0:
        return False
    if rows[n_postings - 1] != cursor[LAST_ROW]:
        return False
    cursor[DECODED_BLOCK], cursor[BLOCK_COUNT] = block_index, n_postings
    return True


@compiled
def read_list(data, lists_bytes, entry, rows, weights):
    """Decode a list.

    Args:
        data: uint8, all lists, followed by `PADDING` bytes.
        lists_bytes: bytes of all lists.
        entry: (3,) number of postings, start and end of the list.
        rows: (postings,) filled with the rows, ascending.
        weights: (postings,) int64, filled with the weights.

    Returns:
        Whether the list is valid.
    """
    cursor, position = np.zeros(CURSOR_SIZE, np.int64), 0
    cursor[DF], cursor[LIST_BEGIN], cursor[LIST_END] = entry[0], entry[1], entry[2]
    block_rows, block_weights = np.empty(BLOCK, np.int64), np.empty(BLOCK, np.int64)
    if not start_cursor(cursor, data, lists_bytes, block_rows, block_weights):
        return False
    while cursor[BLOCK_INDEX] < cursor[BLOCKS]:
        # The elements of `rows` may have four bytes.
        if not read_block(cursor, data, block_rows, block_weights) or cursor[LAST_ROW] > _MAX_UINT32:
            return False
        for i in range(cursor[BLOCK_COUNT]):
            rows[position + i], weights[position + i] = block_rows[i], block_weights[i]
        position += cursor[BLOCK_COUNT]
        next_block(cursor, data)
    return True


class Weighting(NamedTuple):
    """The parameters of the contribution of a posting (see the module); passed to compiled code."""

    limit: float  # upper bound of all contributions
    saturation: float
    fixed: float
    slope: float


IMPACT = Weighting(float(MAX_IMPACT), 0.0, 1.0, 0.0)  # a contribution is the weight itself


def create_bm25_weighting(k1: float, b: float, mean_length: float) -> Weighting:
    """Return the weighting of BM25: tf / (tf + k1 (1 - b + b * length / mean_length))."""
    return Weighting(1.0, 1.0, k1 * (1 - b), k1 * b / mean_length)


@compiled
def _sift_down(scores, rows, position, heap_size):
    """Move a hit down the heap until the heap is ordered again.

    The loop calls no function, because a call would update the arrays' reference counts.
    """
    score, row = scores[position], rows[position]
    while True:
        child = 2 * position + 1
        if child >= heap_size:
            break
        sibling = child + 1
        if sibling < heap_size and (
            scores[sibling] < scores[child] or (scores[sibling] == scores[child] and rows[sibling] > rows[child])
        ):
            child = sibling
        if not (scores[child] < score or (scores[child] == score and rows[child] > row)):
            break
        scores[position], rows[position] = scores[child], rows[child]
        position = child
    scores[position], rows[position] = score, row


@compiled
def push_hit(scores, rows, size, k, score, row):
    """Add a hit to a heap of the k best with the worst on top, or replace the worst.

    Return the heap's size.
    """
    if size == k:
        scores[0], rows[0] = score, row
        _sift_down(scores, rows, 0, k)
        return size
    position = size
    while position:
        parent = (position - 1) >> 1
        if not (score < scores[parent] or (score == scores[parent] and row > rows[parent])):
            break
        scores[position], rows[position] = scores[parent], rows[parent]
        position = parent
    scores[position], rows[position] = score, row
    return size + 1


@compiled
def sort_hits(scores, rows, size):
    """Sort the hits of a heap, best first."""
    for last_hit in range(size - 1, 0, -1):
        scores[0], scores[last_hit] = scores[last_hit], scores[0]
        rows[0], rows[last_hit] = rows[last_hit], rows[0]
        _sift_down(scores, rows, 0, last_hit)


@compiled
def _score(weight, length, factor, weighting):
    return to_score_units(factor, compute_contribution(weight, length, weighting))


@compiled
def _bound_block(weight, length, factor, weighting):
    """Return an upper bound of `_score` for weights up to `weight` and lengths from `length`.

    The bound includes 1 unit for rounding.
    """
    if weight >= MAX_HEADER_WEIGHT:
        return np.int64(factor * weighting.limit) + 1
    return _score(weight, length, factor, weighting) + 1


@compiled
def _bound_list(cursor, data, weights, rows, lengths, factor, weighting):
    """Return an upper bound of the score of all postings of a list."""
    upper_bound = np.int64(0)
    if cursor[BLOCKS] == 1:
        for i in range(cursor[BLOCK_COUNT]):
            upper_bound = max(upper_bound, _score(weights[i], lengths[rows[i]], factor, weighting))
        return upper_bound
    if cursor[BLOCKS] > _MAX_SCANNED_BLOCKS:
        return _bound_block(MAX_HEADER_WEIGHT, 0, factor, weighting)
    for block_index in range(cursor[BLOCKS]):
        header_offset = get_header_offset(cursor, block_index)
        upper_bound = max(
            upper_bound,
            _bound_block(np.int64(data[header_offset + 6]), read_uint16(data, header_offset + 7), factor, weighting),
        )
    return upper_bound


@compiled
def _compute_window_bound(cursor, data, rows, first, end, list_bound, factor, weighting):
    """Return an upper bound of a list's postings with rows in [first, end).

    Move the cursor to `first`.
    """
    while cursor[LAST_ROW] < first:
        next_block(cursor, data)
    if cursor[BLOCKS] == 1 and cursor[BLOCK_INDEX] == 0:
        while rows[cursor[POSITION]] < first:
            cursor[POSITION] += 1
        cursor[ROW_BEFORE] = rows[cursor[POSITION]] - 1
    block_index = cursor[BLOCK_INDEX]
    if block_index >= cursor[BLOCKS] or cursor[ROW_BEFORE] >= end - 1:
        return np.int64(0)
    if cursor[BLOCKS] == 1:
        return list_bound
    upper_bound = np.int64(0)
    while True:
        header_offset = get_header_offset(cursor, block_index)
        upper_bound = max(
            upper_bound,
            _bound_block(np.int64(data[header_offset + 6]), read_uint16(data, header_offset + 7), factor, weighting),
        )
        block_index += 1
        if block_index >= cursor[BLOCKS] or read_last_row(data, header_offset) >= end - 1:
            return min(upper_bound, list_bound)


@compiled
def _add_postings(cursor, data, rows, weights, first, end, lengths, factor, weighting, sums):
    """Add a list's postings with rows in [first, end) to `sums`.

    Return whether the list is valid.
    """
    while cursor[BLOCK_INDEX] < cursor[BLOCKS] and cursor[ROW_BEFORE] < end - 1:
        if not read_block(cursor, data, rows, weights):
            return False
        position, n_postings = cursor[POSITION], cursor[BLOCK_COUNT]
        while position < n_postings and rows[position] < first:
            position += 1
        while position < n_postings and rows[position] < end:
            sums[rows[position] - first] += _score(weights[position], lengths[rows[position]], factor, weighting)
            position += 1
        cursor[POSITION] = position
        if position < n_postings:
            return True
        next_block(cursor, data)
    return True


@compiled
def _probe(cursor, data, rows, weights, row, lengths, factor, weighting):
    """Return the score of a row in a list, 0 without a posting, or `DAMAGED`.

    Rows must ascend from call to call.
    """
    while cursor[LAST_ROW] < row:
        next_block(cursor, data)
    if cursor[BLOCK_INDEX] >= cursor[BLOCKS] or cursor[ROW_BEFORE] >= row:
        return np.int64(0)
    if not read_block(cursor, data, rows, weights):
        return np.int64(DAMAGED)
    low, high = cursor[POSITION], cursor[BLOCK_COUNT]
    while low < high:
        middle = (low + high) >> 1
        if rows[middle] < row:
            low = middle + 1
        else:
            high = middle
    cursor[POSITION] = low
    if low < cursor[BLOCK_COUNT] and rows[low] == row:
        return _score(weights[low], lengths[row], factor, weighting)
    return np.int64(0)


@compiled
def _compute_first_threshold(cursors, t, data, rows, weights, lengths, factor, weighting, k):
    """Return the k-th best score in a list of k or more postings, a lower bound of the k-th best
    score in all lists.
    """
    heap_scores, heap_rows, heap_size = np.empty(k, np.int64), np.empty(k, np.int64), 0
    cursor = cursors[t].copy()
    while cursor[BLOCK_INDEX] < cursor[BLOCKS]:
        if not read_block(cursor, data, rows, weights):
            return np.int64(DAMAGED)
        for i in range(cursor[BLOCK_COUNT]):
            if rows[i] >= len(lengths):
                return np.int64(DAMAGED)
            score = _score(weights[i], lengths[rows[i]], factor, weighting)
            if heap_size < k or score > heap_scores[0]:
                heap_size = push_hit(heap_scores, heap_rows, heap_size, k, score, rows[i])
        next_block(cursor, data)
    cursors[t, DECODED_BLOCK] = -1 if cursor[BLOCKS] > 1 else 0
    return heap_scores[0]


@compiled
def search(data, lists_bytes, lengths, entries, factors, weighting, k, skip, scores, rows):
    """Find the k best rows of a query.

    Args:
        data: uint8, the lists, followed by `PADDING` bytes.
        lists_bytes: bytes of all lists.
        lengths: (n,) uint16 lengths of the passages.
        entries: (t, 3) int64: number of postings, start and end of each term's list.
        factors: (t,) float64 factor of each term, above 0, in score units; for BM25 the idf times
            the term's count in the query.
        weighting: `Weighting` of the postings.
        k: number of rows to find, at least 1.
        skip: False reads every posting.
        scores: (k,) int64, filled with the scores in score units, best first.
        rows: (k,) int64, filled with the rows; equal scores are ordered by row.

    Returns:
        The number of hits; `DAMAGED` if a list is damaged.
    """
    n, t = len(lengths), len(entries)
    cursors = np.zeros((t, CURSOR_SIZE), np.int64)
    block_rows, block_weights = np.empty((t, BLOCK), np.int64), np.empty((t, BLOCK), np.int64)
    list_bounds, window_bounds = np.empty(t, np.int64), np.empty(t, np.int64)
    threshold = np.int64(0)
    for i in range(t):
        cursors[i, DF], cursors[i, LIST_BEGIN], cursors[i, LIST_END] = entries[i, 0], entries[i, 1], entries[i, 2]
        if not start_cursor(cursors[i], data, lists_bytes, block_rows[i], block_weights[i]):
            return DAMAGED
        if cursors[i, BLOCKS] == 1 and cursors[i, LAST_ROW] >= n:
            return DAMAGED
        list_bounds[i] = _bound_list(cursors[i], data, block_weights[i], block_rows[i], lengths, factors[i], weighting)
        if skip and k <= entries[i, 0] <= _MAX_SAMPLED_POSTINGS and list_bounds[i] > threshold:
            list_threshold = _compute_first_threshold(
                cursors, i, data, block_rows[i], block_weights[i], lengths, factors[i], weighting, k
            )
            if list_threshold == DAMAGED:
                return DAMAGED
            threshold = max(threshold, list_threshold - 1)
    list_order, bound_sums = np.arange(t), np.zeros(t + 1, np.int64)
    window_sums = np.zeros(WINDOW_ROWS, np.int64)
    n_hits, begin = 0, 0
    while begin < n:
        end = min(begin + WINDOW_ROWS, n)
        for i in range(t):
            window_bounds[i] = _compute_window_bound(
                cursors[i], data, block_rows[i], begin, end, list_bounds[i], factors[i], weighting
            )
        for i in range(1, t):  # insertion sort by bound, ascending
            list_number, rank = list_order[i], i
            while rank and window_bounds[list_order[rank - 1]] > window_bounds[list_number]:
                list_order[rank] = list_order[rank - 1]
                rank -= 1
            list_order[rank] = list_number
        n_optional = 0
        for i in range(t):
            bound_sums[i + 1] = bound_sums[i] + window_bounds[list_order[i]]
            if (skip and bound_sums[i + 1] <= threshold) or window_bounds[list_order[i]] == 0:
                n_optional = i + 1
        if n_optional == t:
            next_begin = end
            if bound_sums[t] == 0:  # the window is empty: continue at the next block
                next_begin = n
                for i in range(t):
                    if cursors[i, BLOCK_INDEX] < cursors[i, BLOCKS]:
                        next_begin = min(next_begin, max(end, cursors[i, ROW_BEFORE] + 1))
            begin = next_begin
            continue
        for i in range(n_optional, t):
            j = list_order[i]
            if not _add_postings(
                cursors[j],
                data,
                block_rows[j],
                block_weights[j],
                begin,
                end,
                lengths,
                factors[j],
                weighting,
                window_sums,
            ):
                return DAMAGED
        for position in range(end - begin):
            score = window_sums[position]
            if score == 0:
                continue
            window_sums[position] = 0
            i = n_optional
            while i and score + bound_sums[i] > threshold:
                i -= 1
                j = list_order[i]
                if window_bounds[j] == 0:
                    i = 0
                    break
                extra_score = _probe(
                    cursors[j],
                    data,
                    block_rows[j],
                    block_weights[j],
                    begin + position,
                    lengths,
                    factors[j],
                    weighting,
                )
                if extra_score == DAMAGED:
                    return DAMAGED
                score += extra_score
            if i == 0 and score > threshold:
                n_hits = push_hit(scores, rows, n_hits, k, score, begin + position)
                if n_hits == k:
                    threshold = max(threshold, scores[0])
        begin = end
    sort_hits(scores, rows, n_hits)
    return n_hits


@compiled
def sum_lists(data, lists_bytes, lengths, entries, factors, weighting, k, optional_bound, rows, sums):
    """Sum the scores of lists, and collect the passages that may be among the k best of a query.

    Args:
        data: uint8, the lists, followed by `PADDING` bytes.
        lists_bytes: bytes of all lists.
        lengths: (n,) uint16 lengths of the passages.
        entries: (t, 3) int64: number of postings, start and end of each list.
        factors: (t,) float64 factor of each term, above 0, in score units.
        weighting: `Weighting` of the postings.
        k: number of hits of the query, at least 1.
        optional_bound: upper bound of the score of the query's other terms.
        rows: int64, large enough for all postings, filled with ascending rows.
        sums: int64 of the same size, filled with the sums of these rows' scores in the lists.

    Returns:
        The number of rows, or `DAMAGED` if a list is damaged; and the k-th best sum, 0 if there are
        fewer than k.
    """
    n, t = len(lengths), len(entries)
    cursors = np.zeros((t, CURSOR_SIZE), np.int64)
    block_rows, block_weights = np.empty((t, BLOCK), np.int64), np.empty((t, BLOCK), np.int64)
    heap_scores, heap_rows = np.empty(k, np.int64), np.empty(k, np.int64)
    for i in range(t):
        cursors[i, DF], cursors[i, LIST_BEGIN], cursors[i, LIST_END] = entries[i, 0], entries[i, 1], entries[i, 2]
        if not start_cursor(cursors[i], data, lists_bytes, block_rows[i], block_weights[i]):
            return DAMAGED, np.int64(0)
        if cursors[i, BLOCKS] == 1 and cursors[i, LAST_ROW] >= n:
            return DAMAGED, np.int64(0)
    window_sums = np.zeros(WINDOW_ROWS, np.int64)
    n_rows, size, threshold, first_row = 0, 0, np.int64(0), 0
    while first_row < n:
        end_row = min(first_row + WINDOW_ROWS, n)
        for i in range(t):
            if not _add_postings(
                cursors[i],
                data,
                block_rows[i],
                block_weights[i],
                first_row,
                end_row,
                lengths,
                factors[i],
                weighting,
                window_sums,
            ):
                return DAMAGED, np.int64(0)
        for position in range(end_row - first_row):
            score = window_sums[position]
            if score == 0:
                continue
            window_sums[position] = 0
            if size < k or score > heap_scores[0]:
                size = push_hit(heap_scores, heap_rows, size, k, score, first_row + position)
                threshold = heap_scores[0] if size == k else np.int64(0)
            if score + optional_bound >= threshold:
                rows[n_rows], sums[n_rows] = first_row + position, score
                n_rows += 1
        first_row = end_row
    return n_rows, threshold


@compiled
def rank_rows(data, lists_bytes, lengths, entries, factors, weighting, rows, sums, scores, best_rows):
    """Find the k best of given passages; read only the blocks of the lists that may contain them.

    Args:
        data: uint8, the lists, followed by `PADDING` bytes.
        lists_bytes: bytes of all lists.
        lengths: (n,) uint16 lengths of the passages.
        entries: (t, 3) int64: number of postings, start and end of each list, which has several
            blocks.
        factors: (t,) float64 factor of each term, above 0, in score units.
        weighting: `Weighting` of the postings.
        rows: (m,) int64 rows of the given passages, ascending.
        sums: (m,) int64 scores of these rows without the scores from the lists.
        scores: (k,) int64, filled with the scores in score units, best first.
        best_rows: (k,) int64, filled with the rows; equal scores are ordered by row.

    Returns:
        The number of hits; `DAMAGED` if a list is damaged.
    """
    t, k, n_hits = len(entries), len(scores), 0
    cursors = np.zeros((t, CURSOR_SIZE), np.int64)
    block_rows, block_weights = np.empty((t, BLOCK), np.int64), np.empty((t, BLOCK), np.int64)
    for i in range(t):
        cursors[i, DF], cursors[i, LIST_BEGIN], cursors[i, LIST_END] = entries[i, 0], entries[i, 1], entries[i, 2]
        if not start_cursor(cursors[i], data, lists_bytes, block_rows[i], block_weights[i]):
            return DAMAGED
    for candidate in range(len(rows)):
        score = sums[candidate]
        for i in range(t):
            list_score = _probe(
                cursors[i], data, block_rows[i], block_weights[i], rows[candidate], lengths, factors[i], weighting
            )
            if list_score == DAMAGED:
                return DAMAGED
            score += list_score
        if n_hits < k or score > scores[0]:
            n_hits = push_hit(scores, best_rows, n_hits, k, score, rows[candidate])
    sort_hits(scores, best_rows, n_hits)
    return n_hits
