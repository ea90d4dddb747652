"""The k best passages of questions by lists that are decoded, exactly: MaxScore over windows of rows.

It is the search of `maxscore` where a posting's part is known. In each window the lists whose largest parts there do
not reach the k-th best score so far find nothing new: the others are added up row by row, and the rows that can still
be among the best go through the lists that are left, the heaviest first. All of a window's sums stay in the first
cache, and no loop over postings or rows branches on what it finds: a processor would foresee half of that wrong.

A first threshold is what k postings of one list count: no passage with less is among the k best.
"""

import numpy as np

from rag_model.index.postings.compiled import compiled
from rag_model.index.postings.cursor import units
from rag_model.index.postings.decoded import BEGIN, BITS, END, SHIFT, TOPS, WINDOW, WINDOWS
from rag_model.index.postings.heap import push, sort

_FEW = 64  # terms that are sorted by insertion
_M1, _M2, _M4 = np.uint64(0x5555555555555555), np.uint64(0x3333333333333333), np.uint64(0x0F0F0F0F0F0F0F0F)
_TIMES = np.uint64(0x0101010101010101)
_1, _2, _4, _56, _63 = (np.uint64(one) for one in (1, 2, 4, 56, 63))


@compiled
def _ones(word):
    """Return how many bits of a word are set."""
    word -= (word >> _1) & _M1
    word = (word & _M2) + ((word >> _2) & _M2)
    return np.int64((((word + (word >> _4)) & _M4) * _TIMES) >> _56)


@compiled
def _sort(bounds, order, t):
    """Put lists in order by bound, ascending; a few are mostly in the order of the window before."""
    if t > _FEW:
        order[:t] = np.argsort(bounds[:t])
        return
    for i in range(1, t):
        one, at = order[i], i
        while at and bounds[order[at - 1]] > bounds[one]:
            order[at] = order[at - 1]
            at -= 1
        order[at] = one


@compiled
def _add(rows, parts, first, last, begin, factor, sums, touched, count):
    """Add postings of a window that begins at row `begin` to its sums; return how many rows are touched now."""
    for at in range(first, last):
        row = np.int64(rows[at]) - begin
        held = sums[row]
        touched[count] = row
        count += held == 0
        sums[row] = held + units(factor, parts[at])
    return count


@compiled
def _promising(sums, touched, count, above, ids, scores):
    """Write the touched rows with a sum above `above`, and their sums; return how many. All sums become 0."""
    kept = 0
    for i in range(count):
        row = np.int64(touched[i])
        score = sums[row]
        sums[row] = 0
        ids[kept], scores[kept] = row, score
        kept += score > above
    return kept


@compiled
def _look_up(parts, bits, ranks, words, last, factor, above, ids, scores, count):
    """Add the postings of some rows, found by a list's bits; keep the rows above `above`, return how many."""
    kept = 0
    for i in range(count):
        row = np.int64(ids[i])
        word, bit = bits[words + (row >> 6)], _1 << np.uint64(row & 63)
        at = np.int64(ranks[words + (row >> 6)]) + _ones(word & (bit - _1))
        more = units(factor, parts[min(at, last)])
        score = scores[i] + (more if word & bit else np.int64(0))
        ids[kept], scores[kept] = row, score
        kept += score > above
    return kept


@compiled
def _spread(rows, parts, first, last, begin, factor, sums):
    """Add postings of a window that begins at row `begin` to its sums."""
    for at in range(first, last):
        sums[np.int64(rows[at]) - begin] += units(factor, parts[at])


@compiled
def _join(sums, above, ids, scores, count):
    """Add the window's sums to the scores of some rows; keep the rows above `above`, return how many."""
    kept = 0
    for i in range(count):
        row = np.int64(ids[i])
        score = scores[i] + sums[row]
        ids[kept], scores[kept] = row, score
        kept += score > above
    return kept


@compiled
def _clear(rows, first, last, begin, sums):
    """Set the sums of a window's postings to 0."""
    for at in range(first, last):
        sums[np.int64(rows[at]) - begin] = 0


@compiled
def _first_threshold(tops, known, factors, k):
    """Return a score below that of k passages."""
    grade, threshold = 0, np.int64(0)
    while 1 << grade < k:
        grade += 1
    if grade < TOPS:
        for i in range(len(known)):
            threshold = max(threshold, np.int64(factors[i] * tops[known[i], grade]) - 1)
    return threshold


@compiled
def _bound(lists, known, factors, window, firsts, lasts, bounds):
    """Find where the postings of each list in a window are, and the most that one of them counts there."""
    for i in range(len(known)):
        at, peak = lists.places[known[i], WINDOWS], np.float32(0)
        if at >= 0:
            firsts[i], lasts[i] = lists.starts[at + window], lists.starts[at + window + 1]
            peak = lists.peaks[at + window]
        else:  # a few postings: those behind the window before
            here, end = lasts[i], lists.places[known[i], END]
            firsts[i] = here
            while here < end and lists.rows[here] >> SHIFT == window:
                peak = max(peak, lists.parts[here])
                here += 1
            lasts[i] = here
        bounds[i] = units(factors[i], peak) if peak > 0 else np.int64(0)


@compiled
def _split(bounds, order, reach, threshold):
    """Sum up the bounds of lists; return how many are not essential: together they do not pass the threshold."""
    optional = 0
    for i in range(len(order)):
        reach[i + 1] = reach[i] + bounds[order[i]]
        if reach[i + 1] <= threshold or bounds[order[i]] == 0:
            optional = i + 1
    return optional


@compiled
def _complete(lists, known, factors, begin, optional, threshold, count, scratch):
    """Add the lists that are not essential to the rows that can be among the best; return how many are left."""
    rows, parts, places, _, _, _, bits, ranks = lists
    sums, _, ids, scores, order, bounds, reach, firsts, lasts = scratch
    i = optional
    while i and count and bounds[order[i - 1]]:
        j = order[i - 1]
        words = places[known[j], BITS]
        if words >= 0 and count < lasts[j] - firsts[j]:
            i -= 1
            words += begin >> 6
            last, above = places[known[j], END] - 1, threshold - reach[i]
            count = _look_up(parts, bits, ranks, words, last, factors[j], above, ids, scores, count)
            continue
        behind, read = i, 0
        while i and read < count and bounds[order[i - 1]]:  # short lists go together
            j = order[i - 1]
            postings = lasts[j] - firsts[j]
            if places[known[j], BITS] >= 0 and count < postings:
                break
            _spread(rows, parts, firsts[j], lasts[j], begin, factors[j], sums)
            i, read = i - 1, read + postings
        count = _join(sums, threshold - reach[i], ids, scores, count)
        for at in range(i, behind):
            _clear(rows, firsts[order[at]], lasts[order[at]], begin, sums)
    return count


@compiled
def _search(lists, known, factors, n, best, best_rows, scratch):
    """Find the best rows of one question; return how many. A score must be above the threshold."""
    sums, touched, ids, scores, order, bounds, reach, firsts, lasts = scratch
    k, t, size = len(best), len(known), 0
    threshold = _first_threshold(lists.tops, known, factors, k)
    for i in range(t):
        order[i], lasts[i] = i, lists.places[known[i], BEGIN]
    for window in range((n + WINDOW - 1) >> SHIFT):
        begin, count = window << SHIFT, 0
        _bound(lists, known, factors, window, firsts, lasts, bounds)
        _sort(bounds, order, t)
        optional = _split(bounds, order[:t], reach, threshold)
        for i in range(optional, t):
            j = order[i]
            count = _add(lists.rows, lists.parts, firsts[j], lasts[j], begin, factors[j], sums, touched, count)
        count = _promising(sums, touched, count, threshold - reach[optional], ids, scores)
        count = _complete(lists, known, factors, begin, optional, threshold, count, scratch)
        for i in range(count):
            score, row = scores[i], begin + np.int64(ids[i])
            if score > threshold and (size < k or score > best[0] or (score == best[0] and row < best_rows[0])):
                size = push(best, best_rows, size, k, score, row)
        if size == k:
            threshold = max(threshold, best[0])  # rows ascend from window to window: an equal one is behind
    sort(best, best_rows, size)
    return size


@compiled
def search_all(lists, known, factors, ends, n, best, best_rows, sizes):
    """Find the best rows of several questions.

    Args:
        lists: `decoded.Decoded`.
        known: (t,) lists of all questions' terms.
        factors: (t,) of each term, in units.
        ends: (q,) where the terms of each question end.
        n: passages.
        best: (q, k) int64, filled with scores in units, best first.
        best_rows: (q, k) int64, filled with their rows; equal scores in the order of rows.
        sizes: (q,) int64, filled with how many were found.
    """
    first, most = 0, 0
    for question in range(len(ends)):
        most, first = max(most, ends[question] - first), ends[question]
    sums, touched = np.zeros(WINDOW, np.int64), np.empty(WINDOW + 1, np.uint32)
    ids, scores = np.empty(WINDOW + 1, np.uint32), np.empty(WINDOW + 1, np.int64)
    order, bounds, reach = np.empty(most, np.int64), np.empty(most, np.int64), np.zeros(most + 1, np.int64)
    firsts, lasts = np.zeros(most, np.int64), np.zeros(most, np.int64)
    scratch = sums, touched, ids, scores, order, bounds, reach, firsts, lasts
    first = 0
    for question in range(len(ends)):
        last = ends[question]
        sizes[question] = _search(
            lists, known[first:last], factors[first:last], n, best[question], best_rows[question], scratch
        )
        first = last
