"""All postings of an index file, as if its passages were one part: what a later file is made of, where no part is."""

import numpy as np

from rag_model.index.postings.compiled import compiled
from rag_model.index.postings.cursor import read_list
from rag_model.index.postings.file import PostingsFile
from rag_model.index.postings.packing import get_varint
from rag_model.index.postings.part import PartPostings, narrow


def whole(file: PostingsFile) -> PartPostings:
    """Return the postings of a file of words: ten bytes for each are in memory, and as many while they are read.

    Raises:
        InputError: the file is damaged.
    """
    layout = file.layout
    size = _measure(file.dictionary, layout.terms)
    if size < 0 or layout.postings > len(file.lists) * 128 or layout.terms > len(file.dictionary):
        raise file.damaged()
    text, cuts, ends = np.empty(size, np.uint8), np.empty(layout.terms, "<i8"), np.empty(layout.terms, "<i8")
    rows, weights = np.empty(layout.postings, np.uint32), np.empty(layout.postings, np.uint16)
    read = _read(file.dictionary, file.lists, file.words, layout.lists, text, cuts, ends, rows, weights)
    if not read or int(rows.max(initial=0)) >= max(1, layout.n) or int(weights.min(initial=1)) < 1:
        raise file.damaged()
    most = int(weights.max(initial=0)) + 1
    return PartPostings(file.lengths, text, cuts, ends, narrow(rows, layout.n), narrow(weights, most))


@compiled
def _measure(data, terms):
    """Return the bytes of all terms of a dictionary, one after another; -1: it is damaged."""
    at, end, total, former = 0, len(data), 0, 0
    for _ in range(terms):
        shared, at = get_varint(data, at, end)
        size, at = get_varint(data, at, end)
        if shared < 0 or shared > former or size < 0 or size > end - at or shared + size < 1:
            return -1
        former, at = shared + size, at + size
        total += former
        for _ in range(2):
            number, at = get_varint(data, at, end)
            if number < 1:
                return -1
    return total


@compiled
def _read(data, lists, words, size, text, cuts, ends, rows, weights):
    """Read all terms, where each ends, and their postings; return whether the bytes make sense."""
    at, end, used, former, begin, first = 0, len(data), 0, 0, 0, 0
    found = np.empty(3, np.int64)
    for term in range(len(cuts)):
        shared, at = get_varint(data, at, end)
        more, at = get_varint(data, at, end)
        for i in range(shared):
            text[used + i] = text[former + i]
        for i in range(more):
            text[used + shared + i] = data[at + i]
        former, used, at = used, used + shared + more, at + more
        postings, at = get_varint(data, at, end)
        its, at = get_varint(data, at, end)
        last = first + postings
        found[0], found[1], found[2] = postings, begin, begin + its
        if last > len(rows) or not read_list(lists, words, size, found, rows[first:last], weights[first:last]):
            return False
        cuts[term], ends[term], first, begin = used, last, last, begin + its
    return first == len(rows)
