"""Lists that were asked for lately, decoded, and search in them: what a service does with a corpus of some millions.

Terms are added up one after another, the heaviest first, until those that are left cannot make a passage one of the k
best that none of the former has (Turtle and Flood 1995, "term at a time"). Then only passages that can still be among
the best are looked up in the lists that are left, which are the long ones. Scores are those of `maxscore`, exactly.
"""

from threading import Lock, local

import numpy as np
import numpy.typing as npt

from rag_model.index.postings.compiled import compiled
from rag_model.index.postings.cursor import part_of, read_list, units
from rag_model.index.postings.file import PostingsFile
from rag_model.index.postings.heap import push, sort
from rag_model.index.postings.maxscore import DAMAGED
from rag_model.index.postings.weighting import IMPACT, Weighting

MOST_ROWS = 1 << 22  # passages of an index that is searched like this: a thread needs eight bytes for each
MOST_POSTINGS = 1 << 25  # held at once, ten bytes each with their buckets: 340 MB at most, less for a smaller file
_STEPS = 1_024  # in which scores are told apart for a threshold, half of them at least
_LOOKED_UP = 3  # a look-up costs as much as so many additions
_BUCKETS = 64  # postings of a list that is divided into buckets at least
_STARTS = 0.54  # buckets a posting at most
_NOWHERE = -1  # the place of a list without postings
Ints = npt.NDArray[np.int64]


@compiled
def _decode(data, words, lists, lengths, found, weighting, rows, parts):
    """Decode a list; return its largest part, or `DAMAGED`."""
    weights = np.empty(len(rows), np.int64)
    if not read_list(data, words, lists, found, rows, weights) or rows[len(rows) - 1] >= len(lengths):
        return float(DAMAGED)
    most = np.float32(0)
    for i in range(len(rows)):
        parts[i] = part_of(weights[i], lengths[rows[i]], weighting)
        most = max(most, parts[i])
    return float(most)


@compiled
def _put_starts(rows, first, last, shift, starts):
    """Write where the postings of each bucket of 2^shift rows begin, and behind the last one where all end."""
    at = first
    for bucket in range(len(starts)):
        while at < last and rows[at] < bucket << shift:
            at += 1
        starts[bucket] = at


@compiled
def _at_least(sums, touched, count, k, most, counts):
    """Return a sum that k touched rows have at least, 0 if there are fewer; told apart in steps of a power of two."""
    if count < k:
        return np.int64(0)
    shift = 0
    while most >> shift >= _STEPS:
        shift += 1
    step = most >> shift
    counts[: step + 1] = 0
    for i in range(count):
        counts[sums[touched[i]] >> shift] += 1
    above = counts[step]
    while above < k:
        step -= 1
        above += counts[step]
    return step << shift


@compiled
def _promising(sums, touched, count, least):
    """Keep the touched rows whose sum is at least `least`; return their number. The others become 0."""
    kept = 0
    for i in range(count):
        row = touched[i]
        held = sums[row] >= least
        touched[kept] = row
        kept += held
        sums[row] = sums[row] if held else 0
    return kept


@compiled
def _add(rows, parts, first, last, factor, sums, touched, count):
    """Add a list to the sums; return how many rows are touched now. No branch: half of them would be foreseen wrong."""
    for at in range(first, last):
        row = rows[at]
        held = sums[row]
        touched[count] = row
        count += held == 0
        sums[row] = held + units(factor, parts[at])
    return count


@compiled
def _add_promising(rows, parts, starts, place, factor, sums, touched, count):
    """Add a list to the sums of the touched rows."""
    first, last, buckets, shift = place[0], place[1], place[2], place[3]
    if buckets >= 0 and count * _LOOKED_UP < last - first:
        for i in range(count):
            row = np.int64(touched[i])
            bucket = buckets + (row >> shift)
            here, end = np.int64(starts[bucket]), np.int64(starts[bucket + 1])
            while here < end and rows[here] < row:
                here += 1
            if here < end and rows[here] == row:
                sums[row] += units(factor, parts[here])
        return
    for at in range(first, last):
        if sums[rows[at]]:
            sums[rows[at]] += units(factor, parts[at])


@compiled
def _search(rows, parts, starts, places, mosts, known, factors, k, sums, touched, best, ids):
    """Find the k best rows of the lists `known`; `sums` are 0 before and after."""
    t = len(known)
    bounds, order = np.empty(t, np.int64), np.empty(t, np.int64)
    for i in range(t):
        bounds[i] = units(factors[i], mosts[known[i]])
        order[i] = i
    for i in range(1, t):  # by bound, descending
        one, at = order[i], i
        while at and bounds[order[at - 1]] < bounds[one]:
            order[at] = order[at - 1]
            at -= 1
        order[at] = one
    left = np.zeros(t + 1, np.int64)  # what the lists from here on can add
    for i in range(t - 1, -1, -1):
        left[i] = left[i + 1] + bounds[order[i]]
    counts = np.empty(_STEPS, np.int64)
    count, read, open_to_all = 0, 0, True
    threshold = np.int64(0)
    for i in range(t):
        place, factor = places[known[order[i]]], factors[order[i]]
        postings = place[1] - place[0]
        read += postings  # since the touched rows were last gone through
        if postings > count and left[0] - left[i] > left[i]:  # the best may be good enough to leave lists out
            threshold = max(threshold, _at_least(sums, touched, count, k, left[0] - left[i], counts))
        open_to_all = open_to_all and left[i] >= threshold
        if open_to_all:
            count = _add(rows, parts, place[0], place[1], factor, sums, touched, count)
        else:
            if read > count:
                count, read = _promising(sums, touched, count, threshold - left[i]), 0
            _add_promising(rows, parts, starts, place, factor, sums, touched, count)
    size = 0
    for i in range(count):
        row = touched[i]
        score = sums[row]
        sums[row] = 0
        if score and (size < k or score > best[0] or (score == best[0] and row < ids[0])):
            size = push(best, ids, size, k, score, row)
    sort(best, ids, size)
    return size


@compiled
def _search_all(rows, parts, starts, places, mosts, known, factors, ends, sums, touched, best, ids, sizes):
    """Answer several questions; the terms of each end at its `ends`."""
    first, k = 0, best.shape[1]
    for question in range(len(ends)):
        last = ends[question]
        lists, weights = known[first:last], factors[first:last]
        sizes[question] = _search(
            rows, parts, starts, places, mosts, lists, weights, k, sums, touched, best[question], ids[question]
        )
        first = last


class _Lists:
    """Decoded lists end to end, for one weighting; list 0 is empty."""

    def __init__(self, weighting: Weighting, room: int) -> None:
        self.weighting = weighting
        self.rows, self.parts = np.empty(room, np.uint32), np.empty(room, np.float32)
        self.starts = np.empty(int(room * _STARTS) + 1, np.uint32)  # of buckets, list after list
        self.used, self.used_starts = 0, 0
        self.numbers = {_NOWHERE: 0}  # of lists, by their place in the file
        self.places = np.full((1, 4), -1)  # begin and end; where the buckets are, -1: there are none; their shift
        self.places[0, :2] = 0
        self.mosts = np.zeros(1)  # largest part of each

    def add(self, file: PostingsFile, found: Ints) -> bool:
        """Decode a list; return whether its bytes make sense."""
        first, last, number = self.used, self.used + int(found[0]), len(self.numbers)
        rows, parts = self.rows[first:last], self.parts[first:last]
        most = _decode(
            file.lists, file.words, file.layout.lists, file.lengths, found, self.weighting, rows, parts
        )  # fmt: skip
        if most < 0:
            return False
        if number == len(self.places):  # searches under way keep the former arrays
            self.places, self.mosts = (np.concatenate([one, np.empty_like(one)]) for one in (self.places, self.mosts))
        self.places[number], self.mosts[number] = (first, last, -1, 0), most
        if len(rows) >= _BUCKETS:
            self._put_buckets(file.layout.n, number, first, last)
        self.used, self.numbers[int(found[1])] = last, number
        return True

    def _put_buckets(self, n: int, number: int, first: int, last: int) -> None:
        """Divide the rows into buckets of four to eight postings in the mean."""
        shift = max(0, (4 * n // (last - first)).bit_length())
        begin, end = self.used_starts, self.used_starts + (n >> shift) + 2
        _put_starts(self.rows, first, last, shift, self.starts[begin:end])
        self.places[number, 2:], self.used_starts = (begin, shift), end


class HeldLists:
    """The decoded lists of one file; safe among threads."""

    def __init__(self, file: PostingsFile) -> None:
        """Hold nothing yet."""
        self._file, self._lock, self._own = file, Lock(), local()
        self._room = min(file.layout.postings, MOST_POSTINGS)
        self._lists = _Lists(IMPACT, 0)

    def suit(self, found: Ints) -> bool:
        """Whether lists, (t, 3) as `find` gives them, fit here together."""
        if self._file.layout.n > MOST_ROWS:
            return False
        counts = found[:, 0]
        return int(counts.sum()) <= self._room or int(counts[_distinct(found)].sum()) <= self._room

    def search(
        self,
        found: Ints,
        factors: npt.NDArray[np.float64],
        ends: Ints,
        weighting: Weighting,
        scores: Ints,
        rows: Ints,
    ) -> Ints | None:
        """Find the best rows of several questions, whose lists `suit`; see `maxscore.search`.

        Args:
            found: (t, 3) lists of all questions' terms; those without postings add nothing.
            factors: (t,) of each term.
            ends: (q,) where the terms of each question end.
            weighting: of the postings.
            scores: (q, k) int64, filled.
            rows: (q, k) int64, filled.

        Returns:
            How many were found of each question, (q,); None if a list is damaged.
        """
        with self._lock:
            lists = self._holding(found, weighting)
            if lists is None:
                return None
            arrays = lists.rows, lists.parts, lists.starts, lists.places, lists.mosts
            places = np.where(found[:, 0] > 0, found[:, 1], _NOWHERE).tolist()
            known = np.fromiter(map(lists.numbers.__getitem__, places), np.int64, len(places))
        sizes = np.empty(len(ends), np.int64)
        _search_all(*arrays, known, factors, ends, *self._scratch(), scores, rows, sizes)
        return sizes

    def _holding(self, found: Ints, weighting: Weighting) -> _Lists | None:
        """Return lists among which all asked ones are, decoded now if they are new; None if one is damaged."""
        lists = self._lists
        asked = found[_distinct(found)]
        new = [one for one in asked if int(one[1]) not in lists.numbers]
        if weighting != lists.weighting or lists.used + sum(int(one[0]) for one in new) > len(lists.rows):
            lists, new = _Lists(weighting, self._room), list(asked)  # searches under way keep the former ones
        if not all(lists.add(self._file, one) for one in new):
            return None
        self._lists = lists
        return lists

    def _scratch(self) -> tuple[Ints, npt.NDArray[np.uint32]]:
        """Return this thread's sums, all 0, and room for touched rows."""
        if not hasattr(self._own, "sums"):
            n = self._file.layout.n
            self._own.sums, self._own.touched = np.zeros(n, np.int64), np.empty(n + 1, np.uint32)
        return self._own.sums, self._own.touched


def _distinct(found: Ints) -> Ints:
    """Return where each list with postings stands first."""
    firsts = np.unique(found[:, 1] * 2 + (found[:, 0] > 0), return_index=True)[1]
    chosen: Ints = firsts[found[firsts, 0] > 0]
    return chosen
