"""The k best passages of a question by its terms' postings, exactly, without reading those that cannot be among them.

MaxScore (Turtle and Flood 1995) over windows of rows, with bounds of blocks (Ding and Suel 2011): in each window the
terms whose bounds together do not reach the k-th best score so far are not *essential*. A passage that has none of the
essential terms cannot be among the best; so these are added up row by row, and only promising rows are looked up in the
lists of the others.

Scores are whole numbers (for BM25 units of 2^-32): sums of integers do not depend on their order. So what is skipped
changes nothing, not even among equal scores, which are ordered by row.
"""

import numpy as np

from rag_model.index.postings.compiled import compiled
from rag_model.index.postings.cursor import (
    AT,
    AT_BLOCK,
    BEFORE,
    BEGIN,
    BLOCKS,
    COUNT,
    DF,
    END,
    HELD,
    LAST,
    NUMBERS,
    header_of,
    next_block,
    part_of,
    read_block,
    start,
    units,
)
from rag_model.index.postings.heap import push, sort
from rag_model.index.postings.lists import MOST_WEIGHT, last_row, two_bytes
from rag_model.index.postings.packing import BLOCK

WINDOW = 4_096  # rows
_SCANNED = 2_048  # blocks of a list whose headers are read for the bound of the whole list
_SAMPLED = 4_096  # postings of a list that are read for a first threshold
DAMAGED = -1


@compiled
def _part(weight, length, factor, weighting):
    return units(factor, part_of(weight, length, weighting))


@compiled
def _bound(weight, length, factor, weighting):
    """Return at least `_part` of each posting up to `weight` in passages of `length` or more; a unit for rounding."""
    if weight >= MOST_WEIGHT:
        return np.int64(factor * weighting.limit) + 1
    return _part(weight, length, factor, weighting) + 1


@compiled
def _list_bound(cursor, data, weights, rows, lengths, factor, weighting):
    """Return a bound of all postings of a list."""
    most = np.int64(0)
    if cursor[BLOCKS] == 1:
        for i in range(cursor[COUNT]):
            most = max(most, _part(weights[i], lengths[rows[i]], factor, weighting))
        return most
    if cursor[BLOCKS] > _SCANNED:
        return _bound(MOST_WEIGHT, 0, factor, weighting)
    for block in range(cursor[BLOCKS]):
        at = header_of(cursor, block)
        most = max(most, _bound(np.int64(data[at + 6]), two_bytes(data, at + 7), factor, weighting))
    return most


@compiled
def _window_bound(cursor, data, rows, first, behind, whole, factor, weighting):
    """Return a bound of a list's postings with rows in [first, behind); moves the cursor to `first`."""
    while cursor[LAST] < first:
        next_block(cursor, data)
    if cursor[BLOCKS] == 1 and cursor[AT_BLOCK] == 0:
        while rows[cursor[AT]] < first:
            cursor[AT] += 1
        cursor[BEFORE] = rows[cursor[AT]] - 1
    block = cursor[AT_BLOCK]
    if block >= cursor[BLOCKS] or cursor[BEFORE] >= behind - 1:
        return np.int64(0)
    if cursor[BLOCKS] == 1:
        return whole
    most = np.int64(0)
    while True:
        at = header_of(cursor, block)
        most = max(most, _bound(np.int64(data[at + 6]), two_bytes(data, at + 7), factor, weighting))
        block += 1
        if block >= cursor[BLOCKS] or last_row(data, at) >= behind - 1:
            return min(most, whole)


@compiled
def _add(cursor, data, rows, weights, first, behind, lengths, factor, weighting, sums):
    """Add a list's postings with rows in [first, behind) to their sums; return whether its bytes make sense."""
    while cursor[AT_BLOCK] < cursor[BLOCKS] and cursor[BEFORE] < behind - 1:
        if not read_block(cursor, data, rows, weights):
            return False
        at, count = cursor[AT], cursor[COUNT]
        while at < count and rows[at] < first:
            at += 1
        while at < count and rows[at] < behind:
            sums[rows[at] - first] += _part(weights[at], lengths[rows[at]], factor, weighting)
            at += 1
        cursor[AT] = at
        if at < count:
            return True
        next_block(cursor, data)
    return True


@compiled
def _probe(cursor, data, rows, weights, row, lengths, factor, weighting):
    """Return a row's part by a list, 0 without a posting, or `DAMAGED`; rows are asked for in ascending order."""
    while cursor[LAST] < row:
        next_block(cursor, data)
    if cursor[AT_BLOCK] >= cursor[BLOCKS] or cursor[BEFORE] >= row:
        return np.int64(0)
    if not read_block(cursor, data, rows, weights):
        return np.int64(DAMAGED)
    low, high = cursor[AT], cursor[COUNT]
    while low < high:
        middle = (low + high) >> 1
        if rows[middle] < row:
            low = middle + 1
        else:
            high = middle
    cursor[AT] = low
    if low < cursor[COUNT] and rows[low] == row:
        return _part(weights[low], lengths[row], factor, weighting)
    return np.int64(0)


@compiled
def _first_threshold(cursors, t, data, rows, weights, lengths, factor, weighting, k):
    """Return the k-th best part of a list that has k postings: no passage below it is among the k best."""
    best, ids, size = np.empty(k, np.int64), np.empty(k, np.int64), 0
    cursor = cursors[t].copy()
    while cursor[AT_BLOCK] < cursor[BLOCKS]:
        if not read_block(cursor, data, rows, weights):
            return np.int64(DAMAGED)
        for i in range(cursor[COUNT]):
            if rows[i] >= len(lengths):
                return np.int64(DAMAGED)
            score = _part(weights[i], lengths[rows[i]], factor, weighting)
            if size < k or score > best[0]:
                size = push(best, ids, size, k, score, rows[i])
        next_block(cursor, data)
    cursors[t, HELD] = -1 if cursor[BLOCKS] > 1 else 0
    return best[0]


@compiled
def search(data, lists, lengths, found, factors, weighting, k, skip, scores, rows):
    """Find the k best rows of a question.

    Args:
        data: uint8, the lists, padded.
        lists: bytes of all lists.
        lengths: (n,) uint16.
        found: (t, 3) int64 of each known term: postings, begin and end of its list.
        factors: (t,) float64, above 0, in units: for BM25 idf times how often the question has the term.
        weighting: what a posting's weight and its passage's length make of a factor (`weighting`).
        k: at least 1.
        skip: False reads every posting.
        scores: (k,) int64, filled with scores in units, best first.
        rows: (k,) int64, filled with their rows; equal scores in the order of rows.

    Returns:
        How many were found; `DAMAGED` if the lists' bytes make no sense.
    """
    n, t = len(lengths), len(found)
    cursors = np.zeros((t, NUMBERS), np.int64)
    held_rows, held_weights = np.empty((t, BLOCK), np.int64), np.empty((t, BLOCK), np.int64)
    wholes, bounds = np.empty(t, np.int64), np.empty(t, np.int64)
    threshold = np.int64(0)
    for i in range(t):
        cursors[i, DF], cursors[i, BEGIN], cursors[i, END] = found[i, 0], found[i, 1], found[i, 2]
        if not start(cursors[i], data, lists, held_rows[i], held_weights[i]):
            return DAMAGED
        if cursors[i, BLOCKS] == 1 and cursors[i, LAST] >= n:
            return DAMAGED
        wholes[i] = _list_bound(cursors[i], data, held_weights[i], held_rows[i], lengths, factors[i], weighting)
        if skip and k <= found[i, 0] <= _SAMPLED and wholes[i] > threshold:
            first = _first_threshold(cursors, i, data, held_rows[i], held_weights[i], lengths, factors[i], weighting, k)
            if first == DAMAGED:
                return DAMAGED
            threshold = max(threshold, first - 1)
    order, reach = np.arange(t), np.zeros(t + 1, np.int64)
    sums = np.zeros(WINDOW, np.int64)
    size, first = 0, 0
    while first < n:
        behind = min(first + WINDOW, n)
        for i in range(t):
            bounds[i] = _window_bound(cursors[i], data, held_rows[i], first, behind, wholes[i], factors[i], weighting)
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
                    if cursors[i, AT_BLOCK] < cursors[i, BLOCKS]:
                        ahead = min(ahead, max(behind, cursors[i, BEFORE] + 1))
            first = ahead
            continue
        for i in range(optional, t):
            j = order[i]
            if not _add(
                cursors[j],
                data,
                held_rows[j],
                held_weights[j],
                first,
                behind,
                lengths,
                factors[j],
                weighting,
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
                    held_rows[j],
                    held_weights[j],
                    first + place,
                    lengths,
                    factors[j],
                    weighting,
                )
                if more == DAMAGED:
                    return DAMAGED
                score += more
            if i == 0 and score > threshold:
                size = push(scores, rows, size, k, score, first + place)
                if size == k:
                    threshold = max(threshold, scores[0])
        first = behind
    sort(scores, rows, size)
    return size
