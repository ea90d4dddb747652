"""The terms of an index in order, front-coded in groups of 16, with the number and the place of their postings.

A group begins with a whole term; the others leave out what they share with the term before. Each term is

* a varint: bytes shared with the term before (0 for the first of a group)
* a varint: bytes that follow, then these bytes
* a varint: postings
* a varint: bytes of the list

and an array tells where each group begins, here and among the lists (two int64).
"""

import numpy as np
import numpy.typing as npt

from rag_model.index.postings.compiled import bare, compiled, inlined
from rag_model.index.postings.machine import bit_length, load64, store64
from rag_model.index.postings.packing import get_varint, put_varint

GROUP = 16  # terms
Bytes = npt.NDArray[np.uint8]
Ints = npt.NDArray[np.int64]
_MOST = 4 * 10  # bytes of a term's numbers at most


class DictionaryWriter:
    """Writes terms, given in ascending order, as bytes."""

    def __init__(self) -> None:
        """Begin without terms."""
        self.terms = 0
        self._before = np.empty(0, np.uint8)
        self._ends = np.zeros(2, np.int64)  # bytes of all terms, and of all lists, so far

    def put(self, text: Bytes, ends: Ints, postings: Ints, sizes: Ints) -> tuple[bytes, bytes]:
        """Return the bytes of some terms, and of the groups that begin with one of them.

        Args:
            text: the terms one after another.
            ends: (t,) where each ends.
            postings: (t,) of each.
            sizes: (t,) bytes of each term's list; it follows the list before.
        """
        if not len(ends):
            return b"", b""
        out = np.empty(int(ends[-1]) + _MOST * len(ends), np.uint8)
        groups = np.empty((len(ends) // GROUP + 1, 2), np.int64)
        size, begun = _put_terms(text, ends, postings, sizes, self.terms, self._before, self._ends, out, groups)
        self.terms += len(ends)
        self._before = text[ends[-2] if len(ends) > 1 else 0 : ends[-1]].copy()
        return out[:size].tobytes(), groups[:begun].astype("<i8").tobytes()


@inlined
def shared_bytes(one, first, other, second, most):
    """Return how many bytes of one[first:] and other[second:] are the same, up to `most`; both have so many."""
    same = 0
    while same < most and first + same + 8 <= len(one) and second + same + 8 <= len(other):
        differ = load64(one, first + same) ^ load64(other, second + same)
        if differ != 0:
            lowest = bit_length(np.int64(differ & (~differ + np.uint64(1)))) - 1
            return min(most, same + (lowest >> 3))
        same += 8
    while same < most and one[first + same] == other[second + same]:
        same += 1
    return min(most, same)


@bare
def _put_terms(text, ends, postings, sizes, number, before, totals, out, groups):
    """Write terms, the first of which has this `number`; return the bytes written, and the groups begun."""
    at, begun, first, former = 0, 0, 0, 0
    for term in range(len(ends)):
        size, shared = ends[term] - first, 0
        if (number + term) % GROUP == 0:
            groups[begun, 0], groups[begun, 1] = totals[0] + at, totals[1]
            begun += 1
        elif term == 0:
            shared = shared_bytes(text, 0, before, 0, min(size, len(before)))
        else:
            shared = shared_bytes(text, first, text, former, min(size, first - former))
        at = put_varint(out, put_varint(out, at, shared), size - shared)
        if first + size + 8 <= len(text):  # else words may end behind the text
            for i in range(shared, size, 8):
                store64(out, at + i - shared, load64(text, first + i))
        else:
            for i in range(shared, size):
                out[at + i - shared] = text[first + i]
        at = put_varint(out, put_varint(out, at + size - shared, postings[term]), sizes[term])
        totals[1] += sizes[term]
        former, first = first, ends[term]
    totals[0] += at
    return at, begun


@bare
def _compare(asked, data, at, size):
    """Return -1, 0 or 1 as `asked` is before, equal to or behind data[at:at + size]."""
    for i in range(min(len(asked), size)):
        if asked[i] != data[at + i]:
            return -1 if asked[i] < data[at + i] else 1
    if len(asked) == size:
        return 0
    return -1 if len(asked) < size else 1


@bare
def _look_up(asked, data, groups, terms):
    """Return a term's postings, and begin and end of its list; 0 postings if it is unknown, -1 of a damaged file."""
    end = len(data)
    low, high = 0, len(groups)
    while low < high:  # the last group whose first term is not behind `asked`
        middle = (low + high) // 2
        at = groups[middle, 0]
        if at < 0 or at >= end:
            return -1, 0, 0
        shared, at = get_varint(data, at, end)
        size, at = get_varint(data, at, end)
        if shared != 0 or size < 0 or size > end - at:
            return -1, 0, 0
        if _compare(asked, data, at, size) < 0:
            high = middle
        else:
            low = middle + 1
    if low == 0:
        return 0, 0, 0
    group = low - 1
    at, begin = groups[group, 0], groups[group, 1]
    # `same` bytes of `asked` are those of the term before: a term that shares more or fewer needs no comparison.
    same = 0
    for _ in range(min(GROUP, terms - group * GROUP)):
        shared, at = get_varint(data, at, end)
        size, at = get_varint(data, at, end)
        if shared < 0 or size < 0 or size > end - at:
            return -1, 0, 0
        found = False
        if shared == same:
            matched = 0
            while matched < size and same + matched < len(asked) and asked[same + matched] == data[at + matched]:
                matched += 1
            same += matched
            found = matched == size and same == len(asked)
        elif shared < same:
            same = shared
        at += size
        postings, at = get_varint(data, at, end)
        size, at = get_varint(data, at, end)
        if postings < 1 or size < 1:
            return -1, 0, 0
        if found:
            return postings, begin, begin + size
        begin += size
    return 0, 0, 0


@compiled
def look_up(asked, ends, data, groups, terms, found):
    """Find several terms.

    Args:
        asked: uint8, the terms one after another.
        ends: (t,) int64: where each ends.
        data: uint8, the dictionary.
        groups: (g, 2) int64, see the module.
        terms: in the dictionary.
        found: (t, 3) int64, filled with postings, begin and end of the list; 0 postings: the term is unknown; -1: the
            dictionary is damaged.
    """
    first = 0
    for term in range(len(ends)):
        found[term, 0], found[term, 1], found[term, 2] = _look_up(asked[first : ends[term]], data, groups, terms)
        first = ends[term]


def find(
    terms: list[bytes], data: npt.NDArray[np.uint8], groups: npt.NDArray[np.int64], count: int
) -> npt.NDArray[np.int64]:
    """Return what `look_up` finds of `terms`: (t, 3) int64."""
    asked = np.frombuffer(b"".join(terms), np.uint8)
    ends = np.cumsum([len(term) for term in terms], dtype=np.int64)
    found = np.zeros((len(terms), 3), np.int64)
    look_up(asked, ends, data, groups, count, found)
    return found
