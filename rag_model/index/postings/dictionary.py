"""The term dictionary: sorted terms, front-coded in groups of 16, with the size of their posting
lists.

A group begins with a complete term; each of the other terms is stored without the prefix that it
shares with the term before. Each term is

* a varint: bytes shared with the term before (0 for the first of a group)
* a varint: bytes that follow, then these bytes
* a varint: postings
* a varint: bytes of the list

The array `groups` has two int64 per group: the offset of the group in the dictionary, and the
offset of the first term's list in the lists.
"""

import numpy as np
import numpy.typing as npt

from rag_model.compiled import bare, bit_length, compiled, inlined, load64, store64
from rag_model.index.postings.packing import read_varint, write_varint

GROUP_TERMS = 16  # number of terms in a group
Bytes = npt.NDArray[np.uint8]
Ints = npt.NDArray[np.int64]
_MAX_NUMBER_BYTES = 4 * 10  # maximum bytes of a term's four varints


class DictionaryWriter:
    """Encodes terms, which must be added in ascending order."""

    def __init__(self) -> None:
        """Start without terms."""
        self.n_terms = 0
        self._previous_term = np.empty(0, np.uint8)
        self._bytes = np.zeros(2, np.int64)  # bytes of all terms, and of all lists, so far

    def write_terms(self, text: Bytes, ends: Ints, postings: Ints, sizes: Ints) -> tuple[bytes, bytes]:
        """Encode the next terms; return their bytes, and the bytes of the groups that they begin.

        Args:
            text: the terms, concatenated.
            ends: (t,) end of each term in `text`.
            postings: (t,) number of postings of each term.
            sizes: (t,) bytes of each term's list; the lists are contiguous.
        """
        if not len(ends):
            return b"", b""
        out = np.empty(int(ends[-1]) + _MAX_NUMBER_BYTES * len(ends), np.uint8)
        groups = np.empty((len(ends) // GROUP_TERMS + 1, 2), np.int64)
        n_bytes, n_groups = _write_terms(
            text, ends, postings, sizes, self.n_terms, self._previous_term, self._bytes, out, groups
        )
        self.n_terms += len(ends)
        self._previous_term = text[ends[-2] if len(ends) > 1 else 0 : ends[-1]].copy()
        return out[:n_bytes].tobytes(), groups[:n_groups].astype("<i8").tobytes()


@inlined
def count_shared_bytes(left, left_begin, right, right_begin, limit):
    """Return the length of the common prefix of left[left_begin:] and right[right_begin:], up to
    `limit` bytes.
    """
    prefix = 0
    while prefix < limit and left_begin + prefix + 8 <= len(left) and right_begin + prefix + 8 <= len(right):
        difference = load64(left, left_begin + prefix) ^ load64(right, right_begin + prefix)
        if difference != 0:
            lowest_bit = bit_length(np.int64(difference & (~difference + np.uint64(1)))) - 1
            return min(limit, prefix + (lowest_bit >> 3))
        prefix += 8
    while prefix < limit and left[left_begin + prefix] == right[right_begin + prefix]:
        prefix += 1
    return min(limit, prefix)


@bare
def _write_terms(text, ends, postings, sizes, first_number, previous_term, totals, out, groups):
    """Write terms numbered from `first_number`; return the number of bytes and of groups written.

    `totals` has the bytes of all earlier terms, and of their lists; it is updated.
    """
    offset, n_groups, begin, previous_begin = 0, 0, 0, 0
    for term in range(len(ends)):
        size, prefix = ends[term] - begin, 0
        if (first_number + term) % GROUP_TERMS == 0:
            groups[n_groups, 0], groups[n_groups, 1] = totals[0] + offset, totals[1]
            n_groups += 1
        elif term == 0:
            prefix = count_shared_bytes(text, 0, previous_term, 0, min(size, len(previous_term)))
        else:
            prefix = count_shared_bytes(text, begin, text, previous_begin, min(size, begin - previous_begin))
        offset = write_varint(out, write_varint(out, offset, prefix), size - prefix)
        if begin + size + 8 <= len(text):  # copies of 8 bytes do not read beyond the text
            for i in range(prefix, size, 8):
                store64(out, offset + i - prefix, load64(text, begin + i))
        else:
            for i in range(prefix, size):
                out[offset + i - prefix] = text[begin + i]
        offset = write_varint(out, write_varint(out, offset + size - prefix, postings[term]), sizes[term])
        totals[1] += sizes[term]
        previous_begin, begin = begin, ends[term]
    totals[0] += offset
    return offset, n_groups


@bare
def _compare_term(term, data, begin, size):
    """Compare `term` with data[begin:begin + size]: -1, 0 or 1."""
    for i in range(min(len(term), size)):
        if term[i] != data[begin + i]:
            return -1 if term[i] < data[begin + i] else 1
    if len(term) == size:
        return 0
    return -1 if len(term) < size else 1


@bare
def _look_up_term(term, data, groups, n_terms):
    """Return a term's number of postings, and the start and the end of its list.

    The number of postings is 0 if the term is unknown, and -1 if the file is damaged.
    """
    data_end = len(data)
    low, high = 0, len(groups)
    while low < high:  # find the last group whose first term is not after `term`
        middle = (low + high) // 2
        offset = groups[middle, 0]
        if offset < 0 or offset >= data_end:
            return -1, 0, 0
        prefix, offset = read_varint(data, offset, data_end)
        term_bytes, offset = read_varint(data, offset, data_end)
        if prefix != 0 or term_bytes < 0 or term_bytes > data_end - offset:
            return -1, 0, 0
        if _compare_term(term, data, offset, term_bytes) < 0:
            high = middle
        else:
            low = middle + 1
    if low == 0:
        return 0, 0, 0
    group_number = low - 1
    offset, list_begin = groups[group_number, 0], groups[group_number, 1]
    # The term before shares `matched_bytes` with `term`. A term that shares more or fewer bytes
    # with the term before needs no comparison.
    matched_bytes = 0
    for _ in range(min(GROUP_TERMS, n_terms - group_number * GROUP_TERMS)):
        prefix, offset = read_varint(data, offset, data_end)
        term_bytes, offset = read_varint(data, offset, data_end)
        if prefix < 0 or term_bytes < 0 or term_bytes > data_end - offset:
            return -1, 0, 0
        is_match = False
        if prefix == matched_bytes:
            n_matched = 0
            while (
                n_matched < term_bytes
                and matched_bytes + n_matched < len(term)
                and term[matched_bytes + n_matched] == data[offset + n_matched]
            ):
                n_matched += 1
            matched_bytes += n_matched
            is_match = n_matched == term_bytes and matched_bytes == len(term)
        elif prefix < matched_bytes:
            matched_bytes = prefix
        offset += term_bytes
        n_postings, offset = read_varint(data, offset, data_end)
        term_bytes, offset = read_varint(data, offset, data_end)
        if n_postings < 1 or term_bytes < 1:
            return -1, 0, 0
        if is_match:
            return n_postings, list_begin, list_begin + term_bytes
        list_begin += term_bytes
    return 0, 0, 0


@compiled
def look_up_terms(text, ends, data, groups, n_terms, entries):
    """Look up several terms.

    Args:
        text: uint8, the terms, concatenated.
        ends: (t,) int64 end of each term in `text`.
        data: uint8, the dictionary.
        groups: (g, 2) int64, see the module.
        n_terms: number of terms in the dictionary.
        entries: (t, 3) int64, filled with the number of postings, the start and the end of each
            list; 0 postings if the term is unknown, -1 if the dictionary is damaged.
    """
    term_begin = 0
    for term in range(len(ends)):
        entries[term, 0], entries[term, 1], entries[term, 2] = _look_up_term(
            text[term_begin : ends[term]], data, groups, n_terms
        )
        term_begin = ends[term]


def read_first_term(data: npt.NDArray[np.uint8], offset: int) -> bytes:
    """Return the first term of the group at an offset of the dictionary."""
    _, offset = read_varint(data, offset, len(data))  # a first term shares no bytes
    term_bytes, offset = read_varint(data, offset, len(data))
    return data[offset : offset + term_bytes].tobytes()


def find_terms(
    terms: list[bytes], data: npt.NDArray[np.uint8], groups: npt.NDArray[np.int64], n_terms: int
) -> npt.NDArray[np.int64]:
    """Return (t, 3) int64: the number of postings, and the start and the end of the list, of each
    term.

    See `look_up_terms`.
    """
    text = np.frombuffer(b"".join(terms), np.uint8)
    term_ends = np.cumsum([len(term) for term in terms], dtype=np.int64)
    list_entries = np.zeros((len(terms), 3), np.int64)
    look_up_terms(text, term_ends, data, groups, n_terms, list_entries)
    return list_entries
