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
MOST_POSTINGS = 1 << 23  # held at once, eight bytes each
_STEPS = 512  # in which scores are told apart for a threshold
_TRIED = 2  # rows for each of the k best that are wanted, whose scores are looked up for a threshold
_LOOKED_UP = 3  # a look-up costs as much as so many additions
_FEWEST = 64  # postings of a list for which buckets, and the places of its largest parts, are kept
_TOPS = 8  # postings for each one among the largest
_RANKS = np.array([1, 10, 30, 100, 1000])  # of the parts that are known of a list
_STARTS = 0.54  # buckets a posting at most
_NOWHERE = -1  # the place of a list without postings
# Of a list: where its postings are; its buckets (-1: none), and the bits of a row that they leave out; where its
# largest parts are.
FIRST, LAST, BUCKETS, SHIFT, TOP, LAST_TOP = range(6)
PLACES = 6
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
    """Return a sum that k touched rows have at least; counted in up to `_STEPS` steps up to `most`."""
    shift = 0
    while most >> shift >= _STEPS:
        shift += 1
    last = most >> shift
    counts[: last + 1] = 0
    for i in range(count):
        counts[sums[touched[i]] >> shift] += 1
    step, above = last, counts[last]
    while above < k:
        step -= 1
        above += counts[step]
    return step << shift


@compiled
def _reached(rows, parts, starts, places, lists, factors, i, sums, touched, count, least, k, best, ids):
    """Return a score that k rows have, of the touched ones whose sum so far is at least `least`.

    Args:
        rows: see `_search`.
        parts: see `_search`.
        starts: see `_search`.
        places: see `_search`.
        lists: by bound.
        factors: of these.
        i: the first list that is not added yet.
        sums: so far.
        touched: rows with a sum.
        count: of them.
        least: k rows have it.
        k: see above.
        best: (k,), for the work.
        ids: (k,), for the work.
    """
    size, tried = 0, 0
    for one in range(count):
        row = np.int64(touched[one])
        if sums[row] < least:
            continue
        score = sums[row]
        for j in range(i, len(lists)):
            number = lists[j]
            at, end = places[number, FIRST], places[number, LAST]
            if places[number, BUCKETS] >= 0:
                bucket = places[number, BUCKETS] + (row >> places[number, SHIFT])
                at, end = np.int64(starts[bucket]), np.int64(starts[bucket + 1])
            while at < end and rows[at] < row:
                at += 1
            if at < end and rows[at] == row:
                score += units(factors[j], parts[at])
        if size < k or score > best[0]:
            size = push(best, ids, size, k, score, row)
        tried += 1
        if tried == _TRIED * k:
            break
    return best[0]


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
def _add(rows, parts, first, last, factor, need, sums, touched, count):
    """Add a list to the sums; rows that are not touched yet only if they get `need`. Return how many are touched now.

    It has no branch: half of them would be foreseen wrong.
    """
    for at in range(first, last):
        row = rows[at]
        held, own = sums[row], units(factor, parts[at])
        new, wanted = held == 0, own >= need
        touched[count] = row
        count += new & wanted
        sums[row] = 0 if new & (not wanted) else held + own
    return count


@compiled
def _add_looked_up(rows, parts, starts, places, number, factor, sums, touched, count):
    """Add a list with buckets to the sums of the touched rows, which are looked up."""
    buckets, shift = places[number, BUCKETS], places[number, SHIFT]
    for i in range(count):
        row = np.int64(touched[i])
        at, end = np.int64(starts[buckets + (row >> shift)]), np.int64(starts[buckets + (row >> shift) + 1])
        while at < end and rows[at] < row:
            at += 1
        if at < end and rows[at] == row:
            sums[row] += units(factor, parts[at])


@compiled
def _add_best(rows, parts, starts, tops, places, number, factor, need, sums, touched, count):
    """Do as `_add`, but read of the rows that are not touched yet the best only: they are among the `tops`."""
    _add_looked_up(rows, parts, starts, places, number, factor, sums, touched, count)
    for i in range(places[number, TOP], places[number, LAST_TOP]):
        own = units(factor, parts[tops[i]])
        if own < need:
            return count
        row = rows[tops[i]]
        if sums[row] == 0:
            touched[count], sums[row] = row, own
            count += 1
    return count


@compiled
def _add_promising(rows, parts, starts, places, number, factor, sums, touched, count):
    """Add a list to the sums of the touched rows."""
    first, last = places[number, FIRST], places[number, LAST]
    if places[number, BUCKETS] >= 0 and count * _LOOKED_UP < last - first:
        _add_looked_up(rows, parts, starts, places, number, factor, sums, touched, count)
        return
    for at in range(first, last):
        if sums[rows[at]]:
            sums[rows[at]] += units(factor, parts[at])


@compiled
def _sorted(known, factors, mosts):
    """Return lists and factors by bound, descending, and before each what it and those behind can add."""
    t = len(known)
    lists, weights, bounds = known.copy(), factors.copy(), np.empty(t, np.int64)
    for i in range(t):
        one, weight, bound, at = known[i], factors[i], units(factors[i], mosts[known[i], 0]), i
        while at and bounds[at - 1] < bound:
            lists[at], weights[at], bounds[at] = lists[at - 1], weights[at - 1], bounds[at - 1]
            at -= 1
        lists[at], weights[at], bounds[at] = one, weight, bound
    left = np.zeros(t + 1, np.int64)
    for i in range(t - 1, -1, -1):
        left[i] = left[i + 1] + bounds[i]
    return lists, weights, left


@compiled
def _first_threshold(lists, factors, mosts, k):
    """Return a part of a score that k rows of one list have, 0 if none is known."""
    rank, threshold = 1, np.int64(0)
    while rank < len(_RANKS) and _RANKS[rank] < k:
        rank += 1
    if rank < len(_RANKS):
        for i in range(len(lists)):
            if mosts[lists[i], rank] > 0:
                threshold = max(threshold, units(factors[i], mosts[lists[i], rank]))
    return threshold


@compiled
def _search(rows, parts, starts, tops, places, mosts, known, factors, k, sums, touched, best, ids):
    """Find the k best rows of the lists `known`; `sums` are 0 before and after."""
    t = len(known)
    lists, weights, left = _sorted(known, factors, mosts)
    threshold = _first_threshold(lists, weights, mosts, k)
    counts = np.empty(_STEPS, np.int64)
    count, open_to_all = 0, True
    for i in range(t):
        one, factor = lists[i], weights[i]
        postings = places[one, LAST] - places[one, FIRST]
        if open_to_all and k <= count and _LOOKED_UP * k * (t - i) < postings + count:
            least = _at_least(sums, touched, count, k, left[0] - left[i], counts)
            reached = _reached(
                rows, parts, starts, places, lists, weights, i, sums, touched, count, least, k, best, ids
            )
            threshold = max(threshold, reached)
        open_to_all = open_to_all and left[i] >= threshold
        if not open_to_all:
            count = _promising(sums, touched, count, threshold - left[i])
            _add_promising(rows, parts, starts, places, one, factor, sums, touched, count)
            continue
        need = threshold - left[i + 1]  # of a row that no list so far has
        last = places[one, LAST_TOP] - 1
        if count * _LOOKED_UP < postings and last >= places[one, TOP] and units(factor, parts[tops[last]]) < need:
            count = _add_best(rows, parts, starts, tops, places, one, factor, need, sums, touched, count)
        else:
            count = _add(rows, parts, places[one, FIRST], places[one, LAST], factor, need, sums, touched, count)
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
def _search_all(rows, parts, starts, tops, places, mosts, known, factors, ends, sums, touched, best, ids, sizes):
    """Answer several questions; the terms of each end at its `ends`."""
    first, k = 0, best.shape[1]
    for question in range(len(ends)):
        last = ends[question]
        lists, weights = known[first:last], factors[first:last]
        sizes[question] = _search(
            rows, parts, starts, tops, places, mosts, lists, weights, k, sums, touched, best[question], ids[question]
        )
        first = last


class _Lists:
    """Decoded lists end to end, for one weighting; list 0 is empty."""

    def __init__(self, weighting: Weighting, room: int) -> None:
        self.weighting = weighting
        self.rows, self.parts = np.empty(room, np.uint32), np.empty(room, np.float32)
        self.starts = np.empty(int(room * _STARTS) + 1, np.uint32)  # of buckets, list after list
        self.tops = np.empty(room // _TOPS + 1, np.uint32)  # where the postings with the largest parts are, best first
        self.used, self.used_starts, self.used_tops = 0, 0, 0
        self.numbers = {_NOWHERE: 0}  # of lists, by their place in the file
        self.places = np.zeros((1, PLACES), np.int64)
        self.places[0, BUCKETS] = -1
        self.mosts = np.zeros((1, len(_RANKS)))  # parts of each by rank, 0 where it has fewer

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
        self.places[number], self.mosts[number] = (first, last, -1, 0, 0, 0), 0
        self.mosts[number, 0] = most
        if len(rows) >= _FEWEST:
            self._put_buckets(file.layout.n, number, first, last)
            self._put_tops(number, first, parts)
        self.used, self.numbers[int(found[1])] = last, number
        return True

    def _put_buckets(self, n: int, number: int, first: int, last: int) -> None:
        """Divide the rows into buckets of four to eight postings in the mean."""
        shift = max(0, (4 * n // (last - first)).bit_length())
        begin, end = self.used_starts, self.used_starts + (n >> shift) + 2
        _put_starts(self.rows, first, last, shift, self.starts[begin:end])
        self.places[number, BUCKETS : SHIFT + 1], self.used_starts = (begin, shift), end

    def _put_tops(self, number: int, first: int, parts: npt.NDArray[np.float32]) -> None:
        """Keep where the largest parts are, and how large those of some ranks are."""
        size = len(parts) // _TOPS
        begin, end = self.used_tops, self.used_tops + size
        best = np.argpartition(parts, len(parts) - size)[len(parts) - size :]
        best = best[np.argsort(-parts[best], kind="stable")]
        self.tops[begin:end] = first + best
        self.places[number, TOP:], self.used_tops = (begin, end), end
        for place, rank in enumerate(_RANKS):
            self.mosts[number, place] = parts[best[rank - 1]] if rank <= size else 0


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
            arrays = lists.rows, lists.parts, lists.starts, lists.tops, lists.places, lists.mosts
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
