"""The next terms of each part, side by side, and the one that comes first among them: what a merge looks at.

A heap of the parts whose next term is known gives terms in order, and of each term the parts that hold it in order.
"""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from rag_model.index.postings.compiled import bare, compiled

Bytes = npt.NDArray[np.uint8]
Ints = npt.NDArray[np.int64]
_KEY = 8  # bytes
DONE, FULL, EMPTY = range(3)  # why a batch ends: no term is left; it is full; a part's next terms must be read
_IN_HEAP, _USED, _TERMS, _SHARES, _POSTINGS = range(5)  # places in `numbers`


class Windows(NamedTuple):
    """Terms of each part that are in memory."""

    text: Bytes  # (parts, bytes)
    cuts: npt.NDArray[np.int32]  # (parts, terms + 1): where each term begins and ends in `text`
    counts: npt.NDArray[np.int32]  # (parts, terms): postings of each
    at: Ints  # (parts,): the next term
    sizes: Ints  # (parts,): terms
    heap: Ints  # (parts,): parts by their next term
    keys: npt.NDArray[np.uint64]  # (parts,): the first eight bytes of the next term, as a number; missing ones are 0
    lengths: Ints  # (parts,): bytes of the next term
    waiting: npt.NDArray[np.bool_]  # (parts,): not in the heap, because no next term was known


class Batch(NamedTuple):
    """Consecutive terms of all parts, and which part holds how many postings of each."""

    text: Bytes  # of the terms, one after another
    cuts: Ints  # (most terms,): where each ends
    counts: Ints  # (most terms,): postings of each
    ends: Ints  # (most terms,): where the shares of each end
    parts: Ints  # (most shares,): whose share it is
    shares: Ints  # (most shares,): postings of each
    numbers: Ints  # parts in the heap; bytes of text, terms, shares and postings of the batch


def no_windows(parts: int, terms: int) -> Windows:
    """Return empty windows of up to `terms` terms."""
    return Windows(
        np.empty((parts, 1), np.uint8),
        np.zeros((parts, terms + 1), np.int32),
        np.zeros((parts, terms), np.int32),
        np.zeros(parts, np.int64),
        np.zeros(parts, np.int64),
        np.zeros(parts, np.int64),
        np.zeros(parts, np.uint64),
        np.zeros(parts, np.int64),
        np.ones(parts, np.bool_),
    )


def filled(windows: Windows, part: int, text: Bytes, ends: Ints, counts: Ints) -> Windows:
    """Return the windows with a part's next terms, which end at `ends` in `text`: the same arrays, or larger ones."""
    if len(text) > windows.text.shape[1]:
        wider = np.empty((len(windows.text), 2 * len(text)), np.uint8)
        wider[:, : windows.text.shape[1]] = windows.text
        windows = windows._replace(text=wider)
    windows.text[part, : len(text)] = text
    windows.cuts[part, 1 : len(ends) + 1] = ends
    windows.counts[part, : len(counts)] = counts
    windows.at[part], windows.sizes[part] = 0, len(counts)
    return windows


def no_batch(terms: int, shares: int, size: int) -> Batch:
    """Return room for a batch: its terms, its shares, and the bytes of its terms."""
    cuts, counts, ends = (np.empty(terms, np.int64) for _ in range(3))
    return Batch(
        np.empty(size, np.uint8),
        cuts,
        counts,
        ends,
        np.empty(shares, np.int64),
        np.empty(shares, np.int64),
        np.zeros(5, np.int64),
    )


def clear(batch: Batch) -> None:
    """Forget the batch's terms."""
    batch.numbers[_USED:] = 0


def terms_in(batch: Batch) -> int:
    """Return the number of terms of a batch."""
    return int(batch.numbers[_TERMS])


@bare
def _order(windows, a, b):
    """Return below, equal to or above 0: the next term of part `a` is before, equal to or behind that of `b`."""
    if windows.keys[a] != windows.keys[b]:
        return -1 if windows.keys[a] < windows.keys[b] else 1
    size, others = windows.lengths[a], windows.lengths[b]
    if min(size, others) > _KEY:
        begin, other = windows.cuts[a, windows.at[a]], windows.cuts[b, windows.at[b]]
        for i in range(_KEY, min(size, others)):
            if windows.text[a, begin + i] != windows.text[b, other + i]:
                return np.int64(windows.text[a, begin + i]) - np.int64(windows.text[b, other + i])
    return size - others


@bare
def _before(windows, a, b):
    """Whether part `a` comes before part `b`: by their next terms, then by number."""
    order = _order(windows, a, b)
    return order < 0 or (order == 0 and a < b)


@bare
def _set_key(windows, part):
    begin, end = windows.cuts[part, windows.at[part]], windows.cuts[part, windows.at[part] + 1]
    key = np.uint64(0)
    for i in range(begin, begin + _KEY):
        key = (key << np.uint64(8)) | (np.uint64(windows.text[part, i]) if i < end else np.uint64(0))
    windows.keys[part], windows.lengths[part] = key, end - begin


@bare
def _push(windows, numbers, part):
    heap, at = windows.heap, numbers[_IN_HEAP]
    numbers[_IN_HEAP] += 1
    while at and _before(windows, part, heap[(at - 1) >> 1]):
        heap[at] = heap[(at - 1) >> 1]
        at = (at - 1) >> 1
    heap[at] = part


@bare
def _pop(windows, numbers):
    heap = windows.heap
    top = heap[0]
    numbers[_IN_HEAP] -= 1
    size, part, at = numbers[_IN_HEAP], heap[numbers[_IN_HEAP]], 0
    while True:
        child = 2 * at + 1
        if child >= size:
            break
        if child + 1 < size and _before(windows, heap[child + 1], heap[child]):
            child += 1
        if not _before(windows, heap[child], part):
            break
        heap[at] = heap[child]
        at = child
    heap[at] = part
    return top


@bare
def _add(windows, batch, same, found, postings):
    """Add the next term of the parts same[:found] to a batch."""
    numbers, part = batch.numbers, same[0]
    term, share, used = numbers[_TERMS], numbers[_SHARES], numbers[_USED]
    begin, end = windows.cuts[part, windows.at[part]], windows.cuts[part, windows.at[part] + 1]
    for i in range(begin, end):
        batch.text[used] = windows.text[part, i]
        used += 1
    for i in range(found):
        batch.parts[share], batch.shares[share] = same[i], windows.counts[same[i], windows.at[same[i]]]
        share += 1
    batch.cuts[term], batch.counts[term], batch.ends[term] = used, postings, share
    numbers[_TERMS], numbers[_SHARES], numbers[_USED] = term + 1, share, used
    numbers[_POSTINGS] += postings


@compiled
def take(windows, batch, most):
    """Move terms from the windows to a batch, until it is full, or a part's next term is not known.

    Args:
        windows: of all parts.
        batch: is added to.
        most: postings of a batch; a term with more is a batch of its own.

    Returns:
        `DONE`, `FULL`, or `EMPTY`: the parts that are `waiting` want to be filled; those without a term are at an end.
    """
    numbers, k = batch.numbers, len(windows.at)
    for part in range(k):
        if windows.waiting[part] and windows.at[part] < windows.sizes[part]:
            windows.waiting[part] = False
            _set_key(windows, part)
            _push(windows, numbers, part)
    same = np.empty(k, np.int64)
    while numbers[_IN_HEAP]:
        found, postings = 0, 0
        while numbers[_IN_HEAP] and (found == 0 or _order(windows, same[0], windows.heap[0]) == 0):
            same[found] = _pop(windows, numbers)
            postings += windows.counts[same[found], windows.at[same[found]]]
            found += 1
        part, at = same[0], windows.at[same[0]]
        size = windows.cuts[part, at + 1] - windows.cuts[part, at]
        if (
            numbers[_TERMS] + 1 > len(batch.cuts)
            or numbers[_SHARES] + found > len(batch.parts)
            or numbers[_USED] + size > len(batch.text)
            or (numbers[_TERMS] and numbers[_POSTINGS] + postings > most)
        ):
            for i in range(found):
                _push(windows, numbers, same[i])
            return FULL
        _add(windows, batch, same, found, postings)
        empty = False
        for i in range(found):
            windows.at[same[i]] += 1
            if windows.at[same[i]] < windows.sizes[same[i]]:
                _set_key(windows, same[i])
                _push(windows, numbers, same[i])
            else:
                windows.waiting[same[i]] = empty = True
        if empty:
            return EMPTY
    return DONE
