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
_FEW = 64  # lists that are as soon looked up one by one as told apart
_NOTHING = (0, 0, 0.0)  # place and largest part of a term without postings
_LOOKED_UP = 8  # a look-up costs as much as so many additions
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
def _look_up(rows, first, last, row, n):
    """Return where `row` is among the ascending rows[first:last], or -1; begins where it would be if they were even."""
    low, high = first, last
    guess = first + (last - first) * row // n
    step = 1
    if rows[guess] < row:
        low = guess + 1
        while low + step < high and rows[low + step] < row:
            low += step
            step *= 2
        high = min(high, low + step + 1)
    else:
        high = guess + 1
        while high - step > low and rows[high - step] >= row:
            high -= step
            step *= 2
        low = max(low, high - step)
    while low < high:
        middle = (low + high) >> 1
        if rows[middle] < row:
            low = middle + 1
        else:
            high = middle
    return low if low < last and rows[low] == row else -1


@compiled
def _at_least(sums, touched, count, k, most, counts):
    """Return a sum that k touched rows have at least, 0 if there are fewer; counted in `_STEPS` steps up to `most`."""
    if count < k:
        return np.int64(0)
    counts[:] = 0
    scale = _STEPS / (most + 1)
    for i in range(count):
        counts[np.int64(sums[touched[i]] * scale)] += 1
    step, above = _STEPS, 0
    while above < k:
        step -= 1
        above += counts[step]
    return np.int64(step / scale) - 1  # one unit for rounding


@compiled
def _promising(sums, touched, count, least):
    """Keep the touched rows whose sum is at least `least`; return their number. The others become 0."""
    kept = 0
    for i in range(count):
        row = touched[i]
        if sums[row] >= least:
            touched[kept] = row
            kept += 1
        else:
            sums[row] = 0
    return kept


@compiled
def _search(rows, parts, places, factors, mosts, n, k, sums, touched, best, ids):
    """Find the k best rows of the lists rows[places[t, 0]:places[t, 1]]; `sums` are 0 before and after."""
    t = len(places)
    bounds, order = np.empty(t, np.int64), np.empty(t, np.int64)
    for i in range(t):
        bounds[i] = units(factors[i], mosts[i])
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
    count, threshold, open_to_all, read = 0, np.int64(0), True, 0
    for i in range(t):
        one = order[i]
        first, last, factor = places[one, 0], places[one, 1], factors[one]
        read += last - first  # postings since the touched rows were last gone through
        again = read > count
        if again:  # worth knowing how good the best are
            threshold, read = max(threshold, _at_least(sums, touched, count, k, left[0], counts)), 0
        if open_to_all and left[i] < threshold:
            open_to_all = False
        if open_to_all:
            for at in range(first, last):
                row = rows[at]
                if sums[row] == 0:
                    touched[count] = row
                    count += 1
                sums[row] += units(factor, parts[at])
            continue
        if again:
            count = _promising(sums, touched, count, threshold - left[i])
        if count * _LOOKED_UP < last - first:
            for j in range(count):
                at = _look_up(rows, first, last, touched[j], n)
                if at >= 0:
                    sums[touched[j]] += units(factor, parts[at])
        else:
            for at in range(first, last):
                if sums[rows[at]]:
                    sums[rows[at]] += units(factor, parts[at])
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
def _search_all(rows, parts, places, factors, mosts, ends, n, sums, touched, best, ids, sizes):
    """Answer several questions; the terms of each end at its `ends`."""
    first = 0
    for question in range(len(ends)):
        last = ends[question]
        sizes[question] = _search(
            rows,
            parts,
            places[first:last],
            factors[first:last],
            mosts[first:last],
            n,
            best.shape[1],
            sums,
            touched,
            best[question],
            ids[question],
        )
        first = last


class _Lists:
    """Decoded lists end to end, for one weighting."""

    def __init__(self, weighting: Weighting, room: int) -> None:
        self.weighting = weighting
        self.rows, self.parts = np.empty(room, np.uint32), np.empty(room, np.float32)
        self.used = 0
        self.places: dict[int, tuple[int, int, float]] = {}  # begin and end here and largest part, by place in the file


class HeldLists:
    """The decoded lists of one file; safe among threads."""

    def __init__(self, file: PostingsFile) -> None:
        """Hold nothing yet."""
        self._file, self._lock, self._own = file, Lock(), local()
        self._room = min(file.layout.postings, MOST_POSTINGS)
        self._lists = _Lists(IMPACT, 0)

    def suit(self, found: Ints) -> bool:
        """Whether lists, (t, 3) as `find` gives them, fit here together."""
        every = _each(found)[0]
        return self._file.layout.n <= MOST_ROWS and int(every[:, 0].sum()) <= self._room

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
        every, back = _each(found)
        lists, known = self._known(every, weighting)
        if lists is None:
            return None
        places, mosts = known[back, :2].astype(np.int64), known[back, 2]  # (t, 2), (t,)
        sums, touched = self._scratch()
        sizes = np.empty(len(ends), np.int64)
        n = self._file.layout.n
        _search_all(lists.rows, lists.parts, places, factors, mosts, ends, n, sums, touched, scores, rows, sizes)
        return sizes

    def _known(self, every: Ints, weighting: Weighting) -> tuple[_Lists | None, npt.NDArray[np.float64]]:
        """Return the lists and where each asked one is, decoded now if it is new; None if one is damaged.

        Of (m, 3) lists the answer is (m, 3): begin, end and largest part.
        """
        with self._lock:
            lists, file = self._lists, self._file
            asked = list(dict.fromkeys((df, begin, end) for df, begin, end in every.tolist() if df))
            new = [one for one in asked if one[1] not in lists.places]
            if weighting != lists.weighting or lists.used + sum(one[0] for one in new) > len(lists.rows):
                lists, new = _Lists(weighting, self._room), asked  # searches under way keep the former ones
            for one in new:
                first, last = lists.used, lists.used + one[0]
                most = _decode(
                    file.lists, file.words, file.layout.lists, file.lengths, np.array(one), weighting,
                    lists.rows[first:last], lists.parts[first:last],
                )  # fmt: skip
                if most < 0:
                    return None, np.empty((0, 3))
                lists.places[one[1]] = first, last, most
                lists.used = last
            self._lists = lists
            known = [lists.places[begin] if df else _NOTHING for df, begin, _ in every.tolist()]
            return lists, np.array(known, np.float64).reshape(-1, 3)

    def _scratch(self) -> tuple[Ints, Ints]:
        """Return this thread's sums, all 0, and room for touched rows."""
        if not hasattr(self._own, "sums"):
            n = self._file.layout.n
            self._own.sums, self._own.touched = np.zeros(n, np.int64), np.empty(n, np.uint32)
        return self._own.sums, self._own.touched


def _each(found: Ints) -> tuple[Ints, Ints]:
    """Return the different lists among (t, 3), and which of them each one is, (t,); of few lists all of them."""
    if len(found) <= _FEW:
        return found, np.arange(len(found))
    begins = np.where(found[:, 0] > 0, found[:, 1], -1)  # a list is told by its place; -1: no postings
    _, first, back = np.unique(begins, return_index=True, return_inverse=True)
    return found[first], back
