"""The k best passages of a question by its terms' postings, exactly, without reading those that cannot be among them.

MaxScore (Turtle and Flood 1995) over windows of rows, with bounds of blocks (Ding and Suel 2011): in each window the
terms whose bounds together do not reach the k-th best score so far are not *essential*. A passage that has none of the
essential terms cannot be among the best; so these are added up row by row, and only promising rows are looked up in the
lists of the others.

Scores are whole numbers, units of 2^-32: sums of integers do not depend on their order. So what is skipped changes
nothing, not even among equal scores, which are ordered by row.
"""

import numpy as np

from rag_model.index.postings.lists import HEADER, MOST_WEIGHT, last_row, two_bytes
from rag_model.index.postings.packing import BLOCK, compiled, decode, get_varint

UNIT = float(1 << 32)
WINDOW = 4_096  # rows
_SCANNED = 2_048  # blocks of a list whose headers are read for the bound of the whole list
_SAMPLED = 4_096  # postings of a list that are read for a first threshold
# Columns of a cursor
_DF, _BEGIN, _END, _BLOCKS, _BLOCK, _DATA, _BEFORE, _LAST, _HELD, _COUNT, _AT, _SPARE = range(12)
DAMAGED = -1


@compiled
def _part(weight, length, factor, fixed, slope):
    """Return a posting's part of a score: BM25's with `fixed` >= 0, else factor * weight (see `search`)."""
    if fixed < 0:
        return np.int64(factor * weight)
    return np.int64(factor * (weight / (weight + fixed + slope * length)))


@compiled
def _bound(weight, length, factor, fixed, slope):
    """Return at least `_part` of each posting up to `weight` in passages of `length` or more; a unit for rounding."""
    if weight >= MOST_WEIGHT and fixed >= 0:
        return np.int64(factor) + 1
    return _part(weight, length, factor, fixed, slope) + 1


@compiled
def _header(cursor, block):
    return cursor[_BEGIN] + HEADER * block


@compiled
def _start(cursor, data, words, lists, rows, weights):
    """Set a cursor to the first block of its list; return whether the list's bytes make sense."""
    begin, end = cursor[_BEGIN], cursor[_END]
    if begin < 0 or end > lists or begin >= end or cursor[_DF] < 1:
        return False
    blocks = (cursor[_DF] + BLOCK - 1) // BLOCK
    cursor[_BLOCKS], cursor[_BLOCK], cursor[_BEFORE], cursor[_AT], cursor[_HELD] = blocks, 0, -1, 0, -1
    if cursor[_DF] == 1:
        value, at = get_varint(data, begin, end)
        if value < 0:
            return False
        rows[0], weights[0] = value >> 1, 1
        if value & 1:
            more, at = get_varint(data, at, end)
            if more < 0:
                return False
            weights[0] = more + 2
        cursor[_LAST], cursor[_HELD], cursor[_COUNT] = rows[0], 0, 1
        return True
    if blocks == 1:
        cursor[_COUNT] = cursor[_DF]
        if decode(data, words, begin, end, -1, cursor[_DF], rows, weights) < 0:
            return False
        cursor[_LAST], cursor[_HELD] = rows[cursor[_DF] - 1], 0
        return True
    cursor[_DATA] = begin + HEADER * blocks
    if cursor[_DATA] > end:
        return False
    cursor[_LAST] = last_row(data, begin)
    return True


@compiled
def _next_block(cursor, data):
    """Move a cursor to its next block; behind the last one its `_LAST` is beyond every row."""
    header = _header(cursor, cursor[_BLOCK])
    if cursor[_BLOCKS] > 1:
        cursor[_DATA] += two_bytes(data, header + 4)
    cursor[_BLOCK] += 1
    cursor[_AT] = 0
    if cursor[_BLOCK] >= cursor[_BLOCKS]:
        cursor[_LAST] = np.int64(1) << 40
        cursor[_BEFORE] = cursor[_LAST]
    else:
        cursor[_BEFORE] = cursor[_LAST]
        cursor[_LAST] = last_row(data, header + HEADER)


@compiled
def _read(cursor, data, words, rows, weights):
    """Decode the cursor's block, if it is not; return whether its bytes make sense."""
    if cursor[_HELD] == cursor[_BLOCK]:
        return True
    block = cursor[_BLOCK]
    count = BLOCK if block + 1 < cursor[_BLOCKS] else cursor[_DF] - BLOCK * block
    if decode(data, words, cursor[_DATA], cursor[_END], cursor[_BEFORE], count, rows, weights) < 0:
        return False
    if rows[count - 1] != cursor[_LAST]:
        return False
    cursor[_HELD], cursor[_COUNT] = block, count
    return True


@compiled
def _list_bound(cursor, data, weights, rows, lengths, factor, fixed, slope):
    """Return a bound of all postings of a list."""
    most = np.int64(0)
    if cursor[_BLOCKS] == 1:
        for i in range(cursor[_COUNT]):
            most = max(most, _part(weights[i], lengths[rows[i]], factor, fixed, slope))
        return most
    if cursor[_BLOCKS] > _SCANNED:
        return _bound(MOST_WEIGHT, 0, factor, fixed, slope)
    for block in range(cursor[_BLOCKS]):
        at = _header(cursor, block)
        most = max(most, _bound(np.int64(data[at + 6]), two_bytes(data, at + 7), factor, fixed, slope))
    return most


@compiled
def _window_bound(cursor, data, rows, first, behind, whole, factor, fixed, slope):
    """Return a bound of a list's postings with rows in [first, behind); moves the cursor to `first`."""
    while cursor[_LAST] < first:
        _next_block(cursor, data)
    if cursor[_BLOCKS] == 1 and cursor[_BLOCK] == 0:
        while rows[cursor[_AT]] < first:
            cursor[_AT] += 1
        cursor[_BEFORE] = rows[cursor[_AT]] - 1
    block = cursor[_BLOCK]
    if block >= cursor[_BLOCKS] or cursor[_BEFORE] >= behind - 1:
        return np.int64(0)
    if cursor[_BLOCKS] == 1:
        return whole
    most = np.int64(0)
    while True:
        at = _header(cursor, block)
        most = max(most, _bound(np.int64(data[at + 6]), two_bytes(data, at + 7), factor, fixed, slope))
        block += 1
        if block >= cursor[_BLOCKS] or last_row(data, at) >= behind - 1:
            return min(most, whole)


@compiled
def _add(cursor, data, words, rows, weights, first, behind, lengths, factor, fixed, slope, sums):
    """Add a list's postings with rows in [first, behind) to their sums; return whether its bytes make sense."""
    while cursor[_BLOCK] < cursor[_BLOCKS] and cursor[_BEFORE] < behind - 1:
        if not _read(cursor, data, words, rows, weights):
            return False
        at, count = cursor[_AT], cursor[_COUNT]
        while at < count and rows[at] < first:
            at += 1
        while at < count and rows[at] < behind:
            sums[rows[at] - first] += _part(weights[at], lengths[rows[at]], factor, fixed, slope)
            at += 1
        cursor[_AT] = at
        if at < count:
            return True
        _next_block(cursor, data)
    return True


@compiled
def _probe(cursor, data, words, rows, weights, row, lengths, factor, fixed, slope):
    """Return a row's part by a list, 0 without a posting, or `DAMAGED`; rows are asked for in ascending order."""
    while cursor[_LAST] < row:
        _next_block(cursor, data)
    if cursor[_BLOCK] >= cursor[_BLOCKS] or cursor[_BEFORE] >= row:
        return np.int64(0)
    if not _read(cursor, data, words, rows, weights):
        return np.int64(DAMAGED)
    low, high = cursor[_AT], cursor[_COUNT]
    while low < high:
        middle = (low + high) >> 1
        if rows[middle] < row:
            low = middle + 1
        else:
            high = middle
    cursor[_AT] = low
    if low < cursor[_COUNT] and rows[low] == row:
        return _part(weights[low], lengths[row], factor, fixed, slope)
    return np.int64(0)


@compiled
def _worse(scores, rows, a, b):
    return scores[a] < scores[b] or (scores[a] == scores[b] and rows[a] > rows[b])


@compiled
def _sink(scores, rows, at, size):
    while True:
        child = 2 * at + 1
        if child >= size:
            return
        if child + 1 < size and _worse(scores, rows, child + 1, child):
            child += 1
        if not _worse(scores, rows, child, at):
            return
        scores[at], scores[child] = scores[child], scores[at]
        rows[at], rows[child] = rows[child], rows[at]
        at = child


@compiled
def _push(scores, rows, size, k, score, row):
    """Add to a heap of the k best, the worst on top; return its size."""
    if size < k:
        scores[size], rows[size] = score, row
        at = size
        while at and _worse(scores, rows, at, (at - 1) >> 1):
            above = (at - 1) >> 1
            scores[at], scores[above] = scores[above], scores[at]
            rows[at], rows[above] = rows[above], rows[at]
            at = above
        return size + 1
    scores[0], rows[0] = score, row
    _sink(scores, rows, 0, k)
    return size


@compiled
def _sort(scores, rows, size):
    """Turn a heap into a list, best first."""
    for last in range(size - 1, 0, -1):
        scores[0], scores[last] = scores[last], scores[0]
        rows[0], rows[last] = rows[last], rows[0]
        _sink(scores, rows, 0, last)


@compiled
def _first_threshold(cursors, t, data, words, rows, weights, lengths, factor, fixed, slope, k):
    """Return the k-th best part of a list that has k postings: no passage below it is among the k best."""
    best, ids, size = np.empty(k, np.int64), np.empty(k, np.int64), 0
    cursor = cursors[t].copy()
    while cursor[_BLOCK] < cursor[_BLOCKS]:
        if not _read(cursor, data, words, rows, weights):
            return np.int64(DAMAGED)
        for i in range(cursor[_COUNT]):
            if rows[i] >= len(lengths):
                return np.int64(DAMAGED)
            score = _part(weights[i], lengths[rows[i]], factor, fixed, slope)
            if size < k or score > best[0]:
                size = _push(best, ids, size, k, score, rows[i])
        _next_block(cursor, data)
    cursors[t, _HELD] = -1 if cursor[_BLOCKS] > 1 else 0
    return best[0]


@compiled
def search(data, words, lists, lengths, found, factors, fixed, slope, k, skip, scores, rows):
    """Find the k best rows of a question.

    Args:
        data: uint8, the lists, padded.
        words: the same bytes as uint64.
        lists: bytes of all lists.
        lengths: (n,) uint16.
        found: (t, 3) int64 of each known term: postings, begin and end of its list.
        factors: (t,) float64, above 0, in units: of BM25 idf times how often the question has the term; else the
            question's weight of the term.
        fixed: k1 (1 - b); below 0: a score is the sum of products of weights, without BM25's saturation.
        slope: k1 b / mean length of a passage.
        k: at least 1.
        skip: False reads every posting.
        scores: (k,) int64, filled with scores in units, best first.
        rows: (k,) int64, filled with their rows; equal scores in the order of rows.

    Returns:
        How many were found; `DAMAGED` if the lists' bytes make no sense.
    """
    n, t = len(lengths), len(found)
    cursors = np.zeros((t, 12), np.int64)
    held_rows, held_weights = np.empty((t, BLOCK), np.int64), np.empty((t, BLOCK), np.int64)
    wholes, bounds = np.empty(t, np.int64), np.empty(t, np.int64)
    threshold = np.int64(0)
    for i in range(t):
        cursors[i, _DF], cursors[i, _BEGIN], cursors[i, _END] = found[i, 0], found[i, 1], found[i, 2]
        if not _start(cursors[i], data, words, lists, held_rows[i], held_weights[i]):
            return DAMAGED
        if cursors[i, _BLOCKS] == 1 and cursors[i, _LAST] >= n:
            return DAMAGED
        wholes[i] = _list_bound(cursors[i], data, held_weights[i], held_rows[i], lengths, factors[i], fixed, slope)
        if skip and k <= found[i, 0] <= _SAMPLED and wholes[i] > threshold:
            first = _first_threshold(
                cursors, i, data, words, held_rows[i], held_weights[i], lengths, factors[i], fixed, slope, k
            )
            if first == DAMAGED:
                return DAMAGED
            threshold = max(threshold, first - 1)
    order, reach = np.arange(t), np.zeros(t + 1, np.int64)
    sums = np.zeros(WINDOW, np.int64)
    size, first = 0, 0
    while first < n:
        behind = min(first + WINDOW, n)
        for i in range(t):
            bounds[i] = _window_bound(
                cursors[i], data, held_rows[i], first, behind, wholes[i], factors[i], fixed, slope
            )
        for i in range(1, t):  # by bound, ascending
            one, at = order[i], i
            while at and bounds[order[at - 1]] > bounds[one]:
                order[at] = order[at - 1]
                at -= 1
            order[at] = one
        optional = 0
        for i in range(t):
            reach[i + 1] = reach[i] + bounds[order[i]]
            if (skip and reach[i + 1] <= threshold) or bounds[order[i]] == 0:
                optional = i + 1
        if optional == t:
            ahead = behind
            if reach[t] == 0:  # nothing here: go on where the next block begins
                ahead = n
                for i in range(t):
                    if cursors[i, _BLOCK] < cursors[i, _BLOCKS]:
                        ahead = min(ahead, max(behind, cursors[i, _BEFORE] + 1))
            first = ahead
            continue
        for i in range(optional, t):
            j = order[i]
            if not _add(
                cursors[j],
                data,
                words,
                held_rows[j],
                held_weights[j],
                first,
                behind,
                lengths,
                factors[j],
                fixed,
                slope,
                sums,
            ):
                return DAMAGED
        for place in range(behind - first):
            score = sums[place]
            if score == 0:
                continue
            sums[place] = 0
            i = optional
            while i and score + reach[i] > threshold:
                i -= 1
                j = order[i]
                if bounds[j] == 0:
                    i = 0
                    break
                more = _probe(
                    cursors[j],
                    data,
                    words,
                    held_rows[j],
                    held_weights[j],
                    first + place,
                    lengths,
                    factors[j],
                    fixed,
                    slope,
                )
                if more == DAMAGED:
                    return DAMAGED
                score += more
            if i == 0 and score > threshold:
                size = _push(scores, rows, size, k, score, first + place)
                if size == k:
                    threshold = max(threshold, scores[0])
        first = behind
    _sort(scores, rows, size)
    return size
