"""Count the terms of a part's passages: its postings, as a function of the passages alone.

Tokens are found and counted by compiled loops; the analyzer sees a distinct token once. So it takes little more than
reading the text, and the terms are those of `Analyzer.terms`.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator
from itertools import count
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from rag_model.corpus.passages import PassageFile
from rag_model.errors import UsageError
from rag_model.index.files.pieces import Array
from rag_model.index.postings.analyzer import Analyzer
from rag_model.index.postings.compiled import bare
from rag_model.index.postings.part import MOST, MOST_ROWS, PartPostings, joined, narrow
from rag_model.index.postings.tokens import no_tokens, scan, with_room

_GATHERED = 1 << 10
Ints = npt.NDArray[np.int64]


def counted(passages: Path, analyzer: Analyzer) -> PartPostings:
    """Return the postings of a part's passages, titles included; a weight is how often a passage holds a term.

    Raises:
        InputError: the file is damaged.
        UsageError: the part has more rows than a piece can number.
    """
    with PassageFile(passages) as file:
        if file.n_rows >= MOST_ROWS:
            raise UsageError(f"{passages} has {file.n_rows:,} passages: a part may have up to {MOST_ROWS - 1:,}")
        return counted_texts(texts_of(file.iter_batches(["title", "text"])), analyzer)


def texts_of(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.Array]:
    """Yield title and text of each batch's passages, as one string."""
    for batch in batches:
        yield pc.binary_join_element_wise(batch["title"], batch["text"], " ")


def gathered(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Yield rows in batches of `_GATHERED` and more, but for the last: many small ones take longer."""
    held, rows = list[pa.RecordBatch](), 0
    for batch in batches:
        held.append(batch)
        rows += len(batch)
        if rows >= _GATHERED:
            yield from pa.Table.from_batches(held).combine_chunks().to_batches()
            held, rows = [], 0
    if held:
        yield from pa.Table.from_batches(held).combine_chunks().to_batches()


def counted_texts(batches: Iterable[pa.Array], analyzer: Analyzer) -> PartPostings:
    """Return the postings of texts, given as arrays of strings in row order."""
    counter = _Counter(analyzer)
    for texts in batches:
        counter.add(texts)
    return counter.postings()


@bare
def _count(numbers, ends, starts, terms, at_terms, found, weights, counts, lengths):
    """Count the terms of some texts.

    Args:
        numbers: tokens, text after text.
        ends: (n,) where those of each text end.
        starts: where the terms of each token begin in `terms`, and where the last ones end.
        terms: numbers of terms.
        at_terms: (t,) int64, filled with -1.
        found: int32, filled with the terms of each text, each once.
        weights: uint16, filled with how often the text holds it.
        counts: (n,) int64, filled with the number of different terms of each text.
        lengths: (n,) int64, filled with the number of terms of each text.

    Returns:
        How many were found.
    """
    first, at = 0, 0
    for text in range(len(ends)):
        begin, length = at, 0
        for i in range(first, ends[text]):
            for j in range(starts[numbers[i]], starts[numbers[i] + 1]):
                term = terms[j]
                length += 1
                if at_terms[term] >= begin:
                    weights[at_terms[term]] = min(weights[at_terms[term]] + 1, MOST)
                else:
                    at_terms[term] = at
                    found[at], weights[at] = term, 1
                    at += 1
        counts[text], lengths[text], first = at - begin, length, ends[text]
    return at


@bare
def _sort(terms, weights, counts, begins, rows, sorted_weights):
    """Sort postings by term; `counts` are those of each row, `begins` the place of each term's first one."""
    at = 0
    for row in range(len(counts)):
        for _ in range(counts[row]):
            place = begins[terms[at]]
            begins[terms[at]] = place + 1
            rows[place], sorted_weights[place] = row, weights[at]
            at += 1


class _Counter:
    """Postings of the texts so far, row after row; terms are numbered in the order in which they are met."""

    def __init__(self, analyzer: Analyzer) -> None:
        self._analyzer, self._tokens = analyzer, no_tokens()
        self._numbers: dict[bytes, int] = defaultdict(count().__next__)  # of terms; a new one has the next
        self._terms = np.empty(0, np.int32)  # of the tokens, one after another
        self._starts = np.zeros(1, np.int64)  # where those of each token begin
        self._found: list[tuple[Array, Array, Array, Array]] = []  # see `_count`

    def add(self, texts: pa.Array) -> None:
        """Count some more texts."""
        numbers, ends = self._scan(texts.cast(pa.string()))
        most = int(np.diff(self._starts)[numbers].sum())
        found, weights = np.empty(most, np.int32), np.empty(most, np.uint16)
        counts, lengths = np.empty(len(texts), np.int64), np.empty(len(texts), np.int64)
        at_terms = np.full(len(self._numbers), -1)
        size = _count(numbers, ends, self._starts, self._terms, at_terms, found, weights, counts, lengths)
        self._found.append((found[:size].copy(), weights[:size].copy(), counts, lengths))

    def postings(self) -> PartPostings:
        """Return the postings by term."""
        none = np.empty(0, np.int32), np.empty(0, np.uint16), np.empty(0, np.int64), np.empty(0, np.int64)
        found, weights, counts, lengths = map(np.concatenate, zip(none, *self._found, strict=True))
        order = sorted(self._numbers)
        places = np.empty(len(order), np.int64)  # number -> place in the order
        places[np.fromiter(map(self._numbers.__getitem__, order), np.int64, len(order))] = np.arange(len(order))
        numbers = places[found]
        sizes = np.bincount(numbers, minlength=len(order))
        ends = np.cumsum(sizes)
        rows, sorted_weights = np.empty(len(found), np.uint32), np.empty(len(found), np.uint16)
        _sort(numbers, weights, counts, ends - sizes, rows, sorted_weights)
        most = int(weights.max(initial=0)) + 1
        return PartPostings(
            np.minimum(lengths, MOST).astype("<u2"),
            *joined(order),
            ends.astype("<i8"),
            narrow(rows, len(counts)),
            narrow(sorted_weights, most),
        )

    def _scan(self, texts: pa.Array) -> tuple[Array, Ints]:
        """Return the numbers of the texts' tokens, and where those of each text end; all are analysed."""
        _, offsets, data = texts.buffers()
        places = np.frombuffer(offsets, np.int32, len(texts) + 1, 4 * texts.offset)
        size, known = int(places[-1] - places[0]), int(self._tokens.known[0])
        self._tokens = with_room(self._tokens, size + len(texts))
        numbers, ends = np.empty(size, np.int32), np.empty(len(texts), np.int64)
        scan(np.frombuffer(data or b"", np.uint8), places, self._tokens, numbers, ends)
        self._analyse(known)
        return numbers[: ends[-1] if len(ends) else 0], ends

    def _analyse(self, known: int) -> None:
        """Give the tokens from number `known` on their terms."""
        tokens = self._tokens
        first, last = tokens.ends[known], tokens.ends[int(tokens.known[0])]
        made, sizes = self._analyzer.terms_of_tokens(tokens.text[first:last].tobytes().split(b"\n")[:-1])
        terms = np.fromiter(map(self._numbers.__getitem__, made), np.int32, len(made))
        self._terms = np.concatenate([self._terms, terms])
        self._starts = np.concatenate([self._starts, self._starts[-1] + np.cumsum(sizes, dtype=np.int64)])
