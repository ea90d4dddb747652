"""Exact top-k search over decoded posting lists, which are cached: for services with up to four
million passages.

The search works like `maxscore`, with the same scores, but knows the contribution of each posting.
In each window of rows, the lists whose largest contributions do not reach the k-th best score so
far add no candidates. The other lists are added up row by row, and the rows that can still be among
the best are looked up in the remaining lists, the heaviest first. The sums of a window stay in the
processor's first cache, and no loop over postings or rows branches on data, which a processor would
mispredict half the time.

A list with a few postings per window also has the first posting and the largest contribution of
each window. A list of many postings has a bit for each row, and the number of postings before each
64 rows, so that the posting of a row is found without a search. The initial threshold is a score
that k postings of one list reach: no passage with a lower score is among the k best.
"""

from threading import Lock
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from rag_model.compiled import compiled
from rag_model.index.postings.base_kind import MAX_CACHED_POSTINGS, MAX_CACHED_ROWS
from rag_model.index.postings.file import PostingsFile
from rag_model.index.postings.maxscore import (
    DAMAGED,
    IMPACT,
    Weighting,
    compute_contribution,
    push_hit,
    read_list,
    sort_hits,
    to_score_units,
)

WINDOW_SHIFT = 13
WINDOW_ROWS = 1 << WINDOW_SHIFT  # rows per window; their sums fit into a processor's first cache
# Number of lower bounds per list: of the 1st, 2nd, 4th, ... 1,024th largest contribution.
N_TOP_BOUNDS = 11
# Columns of `Decoded.offsets`; the last two are -1 for a list without windows or bits.
POSTINGS_BEGIN, POSTINGS_END, WINDOWS_BEGIN, BITS_BEGIN = range(4)
_MIN_POSTINGS_PER_WINDOW = 4  # a shorter list gets no windows
_MAX_ROWS_PER_POSTING = 64  # a sparser list gets no bits
_MAX_WORDS_PER_POSTING = 0.25  # words of `Decoded.bits` to allocate per posting of the capacity
_HISTOGRAM_BINS = 1 << 10  # number of bins of the histogram of contributions
_EMPTY_LIST = -1  # replaces the offset of a list without postings
Ints = npt.NDArray[np.int64]
_MAX_INSERTION_SORT = 64  # maximum terms that are sorted by insertion
# constants of `_count_bits`
_M1, _M2, _M4 = np.uint64(0x5555555555555555), np.uint64(0x3333333333333333), np.uint64(0x0F0F0F0F0F0F0F0F)
_ONE_PER_BYTE = np.uint64(0x0101010101010101)
_1, _2, _4, _56, _63 = (np.uint64(i) for i in (1, 2, 4, 56, 63))


class Decoded(NamedTuple):
    """Decoded lists, concatenated; list 0 is empty. This tuple is passed to compiled code."""

    rows: npt.NDArray[np.uint32]
    contributions: npt.NDArray[np.float32]  # contribution of each posting
    offsets: Ints  # (lists, 4), see `POSTINGS_BEGIN`
    # (lists, 11): lower bound of the 2^j-th largest contribution; 0 if the list is shorter.
    top_bounds: npt.NDArray[np.float32]
    starts: npt.NDArray[np.uint32]  # first posting of each window, and the end of the last one
    peaks: npt.NDArray[np.float32]  # largest contribution in each window, parallel to `starts`
    bits: npt.NDArray[np.uint64]  # one bit per row: whether it has a posting
    ranks: npt.NDArray[np.uint32]  # first posting at or after the rows of each word of `bits`


class _Scratch(NamedTuple):
    """Arrays that all queries of a call reuse: for the rows of a window, and for the terms of a
    query.
    """

    sums: Ints  # sum of each row's scores in the window so far; reset to 0 after each window
    touched_rows: npt.NDArray[np.uint32]  # rows of the window with a sum above 0
    window_rows: npt.NDArray[np.uint32]  # candidates, by their position in the window
    scores: Ints  # score of each candidate so far
    order: Ints  # terms by ascending bound
    bounds: Ints  # largest score in the window of each term
    bound_sums: Ints  # item i: sum of the i lowest bounds; these terms cannot score more
    begins: Ints  # first posting of each term in the window
    ends: Ints  # end of each term's postings in the window


@compiled
def _decode_list(data, lists, lengths, entry, weighting, rows, contributions):
    """Decode a list; return its largest contribution, or `DAMAGED`."""
    weights = np.empty(len(rows), np.int64)
    if not read_list(data, lists, entry, rows, weights) or rows[len(rows) - 1] >= len(lengths):
        return float(DAMAGED)
    max_contribution = np.float32(0)
    for i in range(len(rows)):
        contributions[i] = compute_contribution(weights[i], lengths[rows[i]], weighting)
        max_contribution = max(max_contribution, contributions[i])
    return float(max_contribution)


@compiled
def _write_top_bounds(contributions, max_contribution, top_bounds):
    """Store a lower bound for the 1st, 2nd, 4th, ... largest contribution, read from a
    histogram.
    """
    bin_counts, bin_minimum = np.zeros(_HISTOGRAM_BINS, np.int64), np.full(_HISTOGRAM_BINS, np.float32(np.inf))
    for i in range(len(contributions)):
        bin_number = np.int64(contributions[i] / max_contribution * (_HISTOGRAM_BINS - 1))
        bin_counts[bin_number] += 1
        bin_minimum[bin_number] = min(bin_minimum[bin_number], contributions[i])
    postings_above, bin_index = 0, _HISTOGRAM_BINS
    for i in range(N_TOP_BOUNDS):
        top_bounds[i] = 0
        if 1 << i <= len(contributions):
            while postings_above < 1 << i:
                bin_index -= 1
                postings_above += bin_counts[bin_index]
            top_bounds[i] = bin_minimum[bin_index]


@compiled
def _write_windows(rows, contributions, list_begin, starts, peaks):
    """Store the first posting of each window and its largest contribution.

    The list begins at `list_begin`.
    """
    posting = 0
    for window in range(len(starts)):
        starts[window], peaks[window] = list_begin + posting, 0
        while posting < len(rows) and rows[posting] >> WINDOW_SHIFT == window:
            peaks[window] = max(peaks[window], contributions[posting])
            posting += 1


@compiled
def _write_bits(rows, list_begin, bits, ranks):
    """Store the bits of a list's rows, and for each word of bits the first posting of its rows.

    The list begins at `list_begin`.
    """
    posting = 0
    for word_index in range(len(bits)):
        bits[word_index], ranks[word_index] = 0, list_begin + posting
        while posting < len(rows) and rows[posting] >> 6 == word_index:
            bits[word_index] |= np.uint64(1) << np.uint64(rows[posting] & 63)
            posting += 1


class DecodedLists:
    """The decoded lists of a file, for one weighting; lists are added and never removed."""

    def __init__(self, weighting: Weighting, capacity: int) -> None:
        """Reserve address space for `capacity` postings; memory is used as lists are added."""
        self.weighting, self.capacity = weighting, capacity
        self._used = [0, 0, 0]  # numbers of stored postings, windows and words of bits
        self._number_by_offset = {_EMPTY_LIST: 0}  # list numbers by offset in the file
        # Each list needs one more window, which stores the end of the last window.
        n_words, n_windows = int(capacity * _MAX_WORDS_PER_POSTING), capacity // 2 + 1
        self.arrays = Decoded(
            np.empty(capacity, np.uint32),
            np.empty(capacity, np.float32),
            np.array([[0, 0, -1, -1]]),
            np.zeros((1, N_TOP_BOUNDS), np.float32),
            np.empty(n_windows, np.uint32),
            np.empty(n_windows, np.float32),
            np.empty(n_words, np.uint64),
            np.empty(n_words, np.uint32),
        )

    def __contains__(self, offset: int) -> bool:
        """Return whether the list at an offset of the file is decoded."""
        return offset in self._number_by_offset

    def has_capacity(self, n_postings: int) -> bool:
        """Return whether the arrays have space for `n_postings` more postings."""
        return self._used[0] + n_postings <= self.capacity

    def list_numbers(self, entries: Ints) -> Ints:
        """Return the numbers of decoded lists, given their (t, 3) entries as `find_terms` returns
        them.

        The number of a list without postings is 0.
        """
        offsets = np.where(entries[:, 0] > 0, entries[:, 1], _EMPTY_LIST).tolist()
        return np.fromiter(map(self._number_by_offset.__getitem__, offsets), np.int64, len(offsets))

    def decode_list(self, file: PostingsFile, entry: Ints) -> bool:
        """Decode a list of a file; return whether it is valid."""
        begin, number = self._used[0], len(self._number_by_offset)
        end = begin + int(entry[0])
        rows, contributions = self.arrays.rows[begin:end], self.arrays.contributions[begin:end]
        max_contribution = _decode_list(
            file.lists, file.layout.lists_bytes, file.lengths, entry, self.weighting, rows, contributions
        )
        if max_contribution < 0:
            return False
        if number == len(self.arrays.offsets):  # copied, since running searches use these arrays
            offsets, top_bounds = (np.concatenate([array, np.empty_like(array)]) for array in self.arrays[2:4])
            self.arrays = self.arrays._replace(offsets=offsets, top_bounds=top_bounds)
        _write_top_bounds(contributions, max_contribution, self.arrays.top_bounds[number])
        n = file.layout.n
        self.arrays.offsets[number] = begin, end, self._add_windows(n, rows, contributions), self._add_bits(n, rows)
        self._used[0], self._number_by_offset[int(entry[1])] = end, number
        return True

    def _add_windows(self, n: int, rows: npt.NDArray[np.uint32], contributions: npt.NDArray[np.float32]) -> int:
        """Store a list's windows; return their offset, or -1 if it has too few postings."""
        n_windows = (n + WINDOW_ROWS - 1) >> WINDOW_SHIFT
        if len(rows) < _MIN_POSTINGS_PER_WINDOW * n_windows:
            return -1
        begin, end = self._used[1], self._used[1] + n_windows + 1
        _write_windows(rows, contributions, self._used[0], self.arrays.starts[begin:end], self.arrays.peaks[begin:end])
        self._used[1] = end
        return begin

    def _add_bits(self, n: int, rows: npt.NDArray[np.uint32]) -> int:
        """Store a list's bits.

        Return their offset, or -1 if it has too few postings or the capacity is used up.
        """
        begin, end = self._used[2], self._used[2] + (n + 63) // 64
        if len(rows) * _MAX_ROWS_PER_POSTING < n or end > len(self.arrays.bits):
            return -1
        _write_bits(rows, self._used[0], self.arrays.bits[begin:end], self.arrays.ranks[begin:end])
        self._used[2] = end
        return begin


@compiled
def _count_bits(word):
    """Return the number of bits that are set."""
    word -= (word >> _1) & _M1
    word = (word & _M2) + ((word >> _2) & _M2)
    return np.int64((((word + (word >> _4)) & _M4) * _ONE_PER_BYTE) >> _56)


@compiled
def _sort_by_bound(bounds, order, n_lists):
    """Sort lists by bound, ascending.

    Short queries are sorted by insertion, starting from the almost sorted order of the last window.
    """
    if n_lists > _MAX_INSERTION_SORT:
        order[:n_lists] = np.argsort(bounds[:n_lists])
        return
    for i in range(1, n_lists):
        list_number, position = order[i], i
        while position and bounds[order[position - 1]] > bounds[list_number]:
            order[position] = order[position - 1]
            position -= 1
        order[position] = list_number


@compiled
def _add_and_track(rows, contributions, begin, end, first_row, factor, sums, touched_rows, n_touched):
    """Add the postings [begin, end) of a window, whose first row is `first_row`, to its sums.

    Return the number of touched rows.
    """
    for posting in range(begin, end):
        row = np.int64(rows[posting]) - first_row
        previous_sum = sums[row]
        touched_rows[n_touched] = row
        n_touched += previous_sum == 0
        sums[row] = previous_sum + to_score_units(factor, contributions[posting])
    return n_touched


@compiled
def _take_promising(sums, touched_rows, n_touched, threshold, window_rows, scores):
    """Store the touched rows with a sum above `threshold`, and reset all sums.

    Return the number of stored rows.
    """
    n_above = 0
    for i in range(n_touched):
        row = np.int64(touched_rows[i])
        score = sums[row]
        sums[row] = 0
        window_rows[n_above], scores[n_above] = row, score
        n_above += score > threshold
    return n_above


@compiled
def _add_list_bits(
    contributions, bits, ranks, first_word, last_posting, factor, threshold, window_rows, scores, n_candidates
):
    """Add a list, by its bits, to the scores of the candidates.

    Keep the candidates above `threshold` and return their number.
    """
    n_above = 0
    for i in range(n_candidates):
        row = np.int64(window_rows[i])
        bit_word, row_bit = bits[first_word + (row >> 6)], _1 << np.uint64(row & 63)
        posting = np.int64(ranks[first_word + (row >> 6)]) + _count_bits(bit_word & (row_bit - _1))
        added_units = to_score_units(factor, contributions[min(posting, last_posting)])
        score = scores[i] + (added_units if bit_word & row_bit else np.int64(0))
        window_rows[n_above], scores[n_above] = row, score
        n_above += score > threshold
    return n_above


@compiled
def _add_to_sums(rows, contributions, begin, end, first_row, factor, sums):
    """Add the postings [begin, end) of a window, whose first row is `first_row`, to its sums."""
    for posting in range(begin, end):
        sums[np.int64(rows[posting]) - first_row] += to_score_units(factor, contributions[posting])


@compiled
def _add_sums(sums, threshold, window_rows, scores, n_candidates):
    """Add the window's sums to the scores of the candidates.

    Keep the candidates above `threshold` and return their number.
    """
    n_above = 0
    for i in range(n_candidates):
        row = np.int64(window_rows[i])
        score = scores[i] + sums[row]
        window_rows[n_above], scores[n_above] = row, score
        n_above += score > threshold
    return n_above


@compiled
def _clear_sums(rows, begin, end, first_row, sums):
    """Reset the sums of the postings [begin, end) of a window, whose first row is `first_row`."""
    for posting in range(begin, end):
        sums[np.int64(rows[posting]) - first_row] = 0


@compiled
def _compute_first_threshold(top_bounds, list_numbers, factors, k):
    """Return a score that at least k passages exceed."""
    column, threshold = 0, np.int64(0)  # column of `top_bounds`
    while 1 << column < k:
        column += 1
    if column < N_TOP_BOUNDS:
        for i in range(len(list_numbers)):
            bound = np.int64(factors[i] * top_bounds[list_numbers[i], column])
            threshold = max(threshold, bound - 1)
    return threshold


@compiled
def _bound_lists(lists, list_numbers, factors, window, begins, ends, bounds):
    """Find the postings of each list in a window, and the upper bound of their scores."""
    for i in range(len(list_numbers)):
        window_offset, window_peak = lists.offsets[list_numbers[i], WINDOWS_BEGIN], np.float32(0)
        if window_offset >= 0:
            begins[i] = lists.starts[window_offset + window]
            ends[i] = lists.starts[window_offset + window + 1]
            window_peak = lists.peaks[window_offset + window]
        else:  # a short list: continue after the last window
            posting, list_end = ends[i], lists.offsets[list_numbers[i], POSTINGS_END]
            begins[i] = posting
            while posting < list_end and lists.rows[posting] >> WINDOW_SHIFT == window:
                window_peak = max(window_peak, lists.contributions[posting])
                posting += 1
            ends[i] = posting
        bounds[i] = to_score_units(factors[i], window_peak) if window_peak > 0 else np.int64(0)


@compiled
def _count_optional(bounds, order, bound_sums, threshold):
    """Accumulate the bounds of lists in `bound_sums`.

    Return the number of non-essential lists, whose bounds add up to at most `threshold`.
    """
    n_optional = 0
    for i in range(len(order)):
        bound_sums[i + 1] = bound_sums[i] + bounds[order[i]]
        if bound_sums[i + 1] <= threshold or bounds[order[i]] == 0:
            n_optional = i + 1
    return n_optional


@compiled
def _complete_scores(lists, list_numbers, factors, first_row, n_optional, threshold, n_candidates, scratch):
    """Add the non-essential lists to the scores of the candidates.

    Return the number of candidates left.
    """
    order, bounds, bound_sums = scratch.order, scratch.bounds, scratch.bound_sums
    begins, ends = scratch.begins, scratch.ends
    sums, window_rows, scores = scratch.sums, scratch.window_rows, scratch.scores
    rows, contributions, offsets, bits, ranks = lists.rows, lists.contributions, lists.offsets, lists.bits, lists.ranks
    n_remaining = n_optional
    while n_remaining and n_candidates and bounds[order[n_remaining - 1]]:
        i = order[n_remaining - 1]
        first_word = offsets[list_numbers[i], BITS_BEGIN]
        if first_word >= 0 and n_candidates < ends[i] - begins[i]:
            n_remaining -= 1
            first_word += first_row >> 6
            last_posting = offsets[list_numbers[i], POSTINGS_END] - 1
            min_score = threshold - bound_sums[n_remaining]
            n_candidates = _add_list_bits(
                contributions, bits, ranks, first_word, last_posting, factors[i], min_score, window_rows, scores,
                n_candidates,
            )  # fmt: skip
            continue
        group_end, n_read = n_remaining, 0
        # Short lists are added together.
        while n_remaining and n_read < n_candidates and bounds[order[n_remaining - 1]]:
            i = order[n_remaining - 1]
            n_postings = ends[i] - begins[i]
            if offsets[list_numbers[i], BITS_BEGIN] >= 0 and n_candidates < n_postings:
                break
            _add_to_sums(rows, contributions, begins[i], ends[i], first_row, factors[i], sums)
            n_remaining, n_read = n_remaining - 1, n_read + n_postings
        n_candidates = _add_sums(sums, threshold - bound_sums[n_remaining], window_rows, scores, n_candidates)
        for position in range(n_remaining, group_end):
            _clear_sums(rows, begins[order[position]], ends[order[position]], first_row, sums)
    return n_candidates


@compiled
def _search_query(lists, list_numbers, factors, n, best_scores, best_rows, scratch):
    """Find the best rows of a query; return their number."""
    order, bounds, bound_sums = scratch.order, scratch.bounds, scratch.bound_sums
    begins, ends = scratch.begins, scratch.ends
    sums, touched_rows, window_rows, scores = scratch.sums, scratch.touched_rows, scratch.window_rows, scratch.scores
    rows, contributions = lists.rows, lists.contributions
    k, t, n_hits = len(best_scores), len(list_numbers), 0
    threshold = _compute_first_threshold(lists.top_bounds, list_numbers, factors, k)
    for i in range(t):
        order[i], ends[i] = i, lists.offsets[list_numbers[i], POSTINGS_BEGIN]
    for window in range((n + WINDOW_ROWS - 1) >> WINDOW_SHIFT):
        first_row, n_touched = window << WINDOW_SHIFT, 0
        _bound_lists(lists, list_numbers, factors, window, begins, ends, bounds)
        _sort_by_bound(bounds, order, t)
        n_optional = _count_optional(bounds, order[:t], bound_sums, threshold)
        for position in range(n_optional, t):
            i = order[position]
            n_touched = _add_and_track(
                rows, contributions, begins[i], ends[i], first_row, factors[i], sums, touched_rows, n_touched
            )
        min_sum = threshold - bound_sums[n_optional]
        n_candidates = _take_promising(sums, touched_rows, n_touched, min_sum, window_rows, scores)
        n_candidates = _complete_scores(
            lists, list_numbers, factors, first_row, n_optional, threshold, n_candidates, scratch
        )
        for i in range(n_candidates):
            score, row = scores[i], first_row + np.int64(window_rows[i])
            if score > threshold and (
                n_hits < k or score > best_scores[0] or (score == best_scores[0] and row < best_rows[0])
            ):
                n_hits = push_hit(best_scores, best_rows, n_hits, k, score, row)
        if n_hits == k:
            # Rows ascend from window to window, so an equal score ranks lower.
            threshold = max(threshold, best_scores[0])
    sort_hits(best_scores, best_rows, n_hits)
    return n_hits


@compiled
def search_all(lists, list_numbers, factors, ends, n, best_scores, best_rows, sizes):
    """Find the best rows of several queries.

    Args:
        lists: `Decoded`.
        list_numbers: (t,) numbers of the lists of all queries' terms.
        factors: (t,) factor of each term, in score units.
        ends: (q,) end of each query's terms.
        n: number of passages.
        best_scores: (q, k) int64, filled with the scores in score units, best first.
        best_rows: (q, k) int64, filled with the rows; equal scores are ordered by row.
        sizes: (q,) int64, filled with the number of hits.
    """
    begin, max_terms = 0, 0
    for query in range(len(ends)):
        max_terms, begin = max(max_terms, ends[query] - begin), ends[query]
    scratch = _Scratch(
        np.zeros(WINDOW_ROWS, np.int64),
        np.empty(WINDOW_ROWS + 1, np.uint32),
        np.empty(WINDOW_ROWS + 1, np.uint32),
        np.empty(WINDOW_ROWS + 1, np.int64),
        np.empty(max_terms, np.int64),
        np.empty(max_terms, np.int64),
        np.zeros(max_terms + 1, np.int64),
        np.zeros(max_terms, np.int64),
        np.zeros(max_terms, np.int64),
    )
    begin = 0
    for query in range(len(ends)):
        end = ends[query]
        sizes[query] = _search_query(
            lists, list_numbers[begin:end], factors[begin:end], n, best_scores[query], best_rows[query], scratch
        )
        begin = end


class DecodedListCache:
    """Caches the decoded lists of one file, and searches them. Thread-safe."""

    def __init__(self, file: PostingsFile, capacity: int | None = None) -> None:
        """Create an empty cache for up to `capacity` postings, by default `MAX_CACHED_POSTINGS`."""
        self._file, self._lock = file, Lock()
        self._capacity = min(file.layout.n_postings, MAX_CACHED_POSTINGS if capacity is None else capacity)
        self._lists = DecodedLists(IMPACT, 0)

    def has_capacity(self, entries: Ints) -> bool:
        """Return whether all lists of (t, 3) entries, as `find_terms` returns them, fit into the
        cache together.
        """
        if self._file.layout.n > MAX_CACHED_ROWS:
            return False
        counts = entries[:, 0]
        return int(counts.sum()) <= self._capacity or int(counts[_find_distinct_lists(entries)].sum()) <= self._capacity

    def search(
        self,
        entries: Ints,
        factors: npt.NDArray[np.float64],
        ends: Ints,
        weighting: Weighting,
        scores: Ints,
        rows: Ints,
        *,
        may_decode: bool = True,
    ) -> Ints | None:
        """Find the best rows of several queries, as `maxscore.search` does.

        The cache must have capacity for the queries' lists (`has_capacity`).

        Args:
            entries: (t, 3) lists of all queries' terms; those without postings add nothing.
            factors: (t,) factor of each term, in score units.
            ends: (q,) end of each query's terms.
            weighting: the weighting of the postings.
            scores: (q, k) int64, filled with the scores in score units, best first.
            rows: (q, k) int64, filled with the rows.
            may_decode: False only searches lists that are decoded already, and reads no file.

        Returns:
            The number of hits of each query, (q,); None if a list is damaged, or if it is not
            decoded and `may_decode` is False.
        """
        with self._lock:
            if not may_decode and not self._are_decoded(entries, weighting):
                return None
            decoded_lists = self._load_lists(entries, weighting)
            if decoded_lists is None:
                return None
            arrays, list_numbers = decoded_lists.arrays, decoded_lists.list_numbers(entries)
        sizes = np.empty(len(ends), np.int64)
        search_all(arrays, list_numbers, factors, ends, self._file.layout.n, scores, rows, sizes)
        return sizes

    def _are_decoded(self, list_entries: Ints, weighting: Weighting) -> bool:
        offsets = list_entries[list_entries[:, 0] > 0, 1].tolist()
        return weighting == self._lists.weighting and all(map(self._lists.__contains__, offsets))

    def _load_lists(self, list_entries: Ints, weighting: Weighting) -> DecodedLists | None:
        """Return decoded lists that include `list_entries`, decoding new ones.

        The result is None if a list is damaged.
        """
        lists = self._lists
        required_entries = list_entries[_find_distinct_lists(list_entries)]
        new_entries = [entry for entry in required_entries if int(entry[1]) not in lists]
        if weighting != lists.weighting or not lists.has_capacity(sum(int(entry[0]) for entry in new_entries)):
            lists, new_entries = DecodedLists(weighting, self._capacity), list(required_entries)
            # The former lists are released at once, so that their memory is free before the new
            # ones fill.
            self._lists = lists
        return lists if all(lists.decode_list(self._file, entry) for entry in new_entries) else None


def _find_distinct_lists(entries: Ints) -> Ints:
    """Return the index of the first occurrence of each list that has postings."""
    first_positions = np.unique(entries[:, 1] * 2 + (entries[:, 0] > 0), return_index=True)[1]
    list_positions: Ints = first_positions[entries[first_positions, 0] > 0]
    return list_positions
