"""Decoded lists and what search in them must know: the largest posting in each window of rows, and which rows have one.

A list with a few postings for each window keeps where those of each window begin, and the largest part there. A list of
many postings also keeps a bit for each row, and how many postings are before each 64 of them: so a row's posting is
found without a search.
"""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from rag_model.index.postings.compiled import compiled
from rag_model.index.postings.cursor import part_of, read_list
from rag_model.index.postings.file import PostingsFile
from rag_model.index.postings.maxscore import DAMAGED
from rag_model.index.postings.weighting import Weighting

SHIFT = 13
WINDOW = 1 << SHIFT  # rows: their sums stay in a processor's first cache
TOPS = 11  # the best parts that are kept of a list: the first, second, fourth ... 1,024th
BEGIN, END, WINDOWS, BITS = range(4)  # the numbers of a list: its postings, its windows and its bits, -1: it has none
_IN_WINDOWS = 4  # postings for each window, at least, of a list with windows
_IN_BITS = 64  # rows for each posting, at most, of a list with bits
_WORDS = 0.25  # words of bits for each posting that is held, at most: then lists go without
_STEPS = 1 << 10  # in which parts are told apart for the best of them
_NOWHERE = -1  # the place of a list without postings
Ints = npt.NDArray[np.int64]


class Decoded(NamedTuple):
    """Lists end to end; list 0 is empty. Compiled code takes it as it is."""

    rows: npt.NDArray[np.uint32]
    parts: npt.NDArray[np.float32]  # what each posting counts
    places: Ints  # (lists, 4), see `BEGIN`
    tops: npt.NDArray[np.float32]  # (lists, 11): so many postings, 2^j, count this much or more; 0 of a shorter list
    starts: npt.NDArray[np.uint32]  # where the postings of each window begin, and those of the last one end
    peaks: npt.NDArray[np.float32]  # the largest part in each window, beside its start
    bits: npt.NDArray[np.uint64]  # of 64 rows each
    ranks: npt.NDArray[np.uint32]  # the first posting of each 64 rows, or of those behind


@compiled
def _decode(data, lists, lengths, found, weighting, rows, parts):
    """Decode a list; return its largest part, or `DAMAGED`."""
    weights = np.empty(len(rows), np.int64)
    if not read_list(data, lists, found, rows, weights) or rows[len(rows) - 1] >= len(lengths):
        return float(DAMAGED)
    most = np.float32(0)
    for i in range(len(rows)):
        parts[i] = part_of(weights[i], lengths[rows[i]], weighting)
        most = max(most, parts[i])
    return float(most)


@compiled
def _put_tops(parts, most, tops):
    """Write bounds of the best parts: the least part of the step in which each is."""
    counts, least = np.zeros(_STEPS, np.int64), np.full(_STEPS, np.float32(np.inf))
    for i in range(len(parts)):
        step = np.int64(parts[i] / most * (_STEPS - 1))
        counts[step] += 1
        least[step] = min(least[step], parts[i])
    found, at = 0, _STEPS
    for i in range(TOPS):
        tops[i] = 0
        if 1 << i <= len(parts):
            while found < 1 << i:
                at -= 1
                found += counts[at]
            tops[i] = least[at]


@compiled
def _put_windows(rows, parts, first, starts, peaks):
    """Write where the postings of each window begin, and their largest part; `first` is the place of the first one."""
    at = 0
    for window in range(len(starts)):
        starts[window], peaks[window] = first + at, 0
        while at < len(rows) and rows[at] >> SHIFT == window:
            peaks[window] = max(peaks[window], parts[at])
            at += 1


@compiled
def _put_bits(rows, first, bits, ranks):
    """Write the bits of a list's rows, and the place of the first posting of each word's rows or of those behind."""
    at = 0
    for word in range(len(bits)):
        bits[word], ranks[word] = 0, first + at
        while at < len(rows) and rows[at] >> 6 == word:
            bits[word] |= np.uint64(1) << np.uint64(rows[at] & 63)
            at += 1


class DecodedLists:
    """Lists of a file that are decoded one after another, for one weighting."""

    def __init__(self, weighting: Weighting, room: int) -> None:
        """Make room for so many postings; what is not used takes no memory."""
        self.weighting, self.room = weighting, room
        self._used = [0, 0, 0]  # postings, windows and words of bits
        self._numbers = {_NOWHERE: 0}  # of lists, by their place in the file
        words, windows = int(room * _WORDS), room // 2 + 1  # a list has a window more than it needs
        self.arrays = Decoded(
            np.empty(room, np.uint32),
            np.empty(room, np.float32),
            np.array([[0, 0, -1, -1]]),
            np.zeros((1, TOPS), np.float32),
            np.empty(windows, np.uint32),
            np.empty(windows, np.float32),
            np.empty(words, np.uint64),
            np.empty(words, np.uint32),
        )

    def __contains__(self, place: int) -> bool:
        """Whether the list at a place in the file is held."""
        return place in self._numbers

    def fit(self, postings: int) -> bool:
        """Whether there is room for so many postings more."""
        return self._used[0] + postings <= self.room

    def numbers(self, found: Ints) -> Ints:
        """Return the numbers of lists, (t, 3) as `find` gives them, which are all held; 0: no postings."""
        places = np.where(found[:, 0] > 0, found[:, 1], _NOWHERE).tolist()
        return np.fromiter(map(self._numbers.__getitem__, places), np.int64, len(places))

    def add(self, file: PostingsFile, found: Ints) -> bool:
        """Decode a list; return whether its bytes make sense."""
        first, number = self._used[0], len(self._numbers)
        last = first + int(found[0])
        rows, parts = self.arrays.rows[first:last], self.arrays.parts[first:last]
        most = _decode(
            file.lists, file.layout.lists, file.lengths, found, self.weighting, rows, parts
        )  # fmt: skip
        if most < 0:
            return False
        if number == len(self.arrays.places):  # searches under way keep the former arrays
            places, tops = (np.concatenate([one, np.empty_like(one)]) for one in self.arrays[2:4])
            self.arrays = self.arrays._replace(places=places, tops=tops)
        _put_tops(parts, most, self.arrays.tops[number])
        n = file.layout.n
        self.arrays.places[number] = first, last, self._put_windows(n, rows, parts), self._put_bits(n, rows)
        self._used[0], self._numbers[int(found[1])] = last, number
        return True

    def _put_windows(self, n: int, rows: npt.NDArray[np.uint32], parts: npt.NDArray[np.float32]) -> int:
        """Write a list's windows; return where they are, -1: it has too few postings."""
        windows = (n + WINDOW - 1) >> SHIFT
        if len(rows) < _IN_WINDOWS * windows:
            return -1
        begin, end = self._used[1], self._used[1] + windows + 1
        _put_windows(rows, parts, self._used[0], self.arrays.starts[begin:end], self.arrays.peaks[begin:end])
        self._used[1] = end
        return begin

    def _put_bits(self, n: int, rows: npt.NDArray[np.uint32]) -> int:
        """Write a list's bits; return where they are, -1: it has too few postings, or there is no room."""
        begin, end = self._used[2], self._used[2] + (n + 63) // 64
        if len(rows) * _IN_BITS < n or end > len(self.arrays.bits):
            return -1
        _put_bits(rows, self._used[0], self.arrays.bits[begin:end], self.arrays.ranks[begin:end])
        self._used[2] = end
        return begin
