"""Join the parts' postings into one file, as a stream: terms in order, and of each the parts' postings in row order.

The result is a function of the passages' terms alone: however rows are divided into parts, the bytes are the same. A
batch of terms with up to a million postings is in memory, and of each part a window of its terms and of its postings;
a term with more postings goes through in steps of that size. With thousands of parts batches and windows grow with
their number: every batch asks every part, and every window is a read, so both would grow with its square.
"""

from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import IO

import numpy as np

from rag_model.errors import InputError
from rag_model.index.files.pieces import Array
from rag_model.index.plan import Facts
from rag_model.index.postings.lists import AT_OUT, HEADER, NUMBERS, ROOM, begin_list, end_block, put_lists, put_postings
from rag_model.index.postings.packing import BLOCK, SIZES
from rag_model.index.postings.part import PartReader
from rag_model.index.postings.windows import DONE, EMPTY, Batch, clear, filled, no_batch, no_windows, take, terms_in
from rag_model.index.postings.writing import Written, write_index

_TERMS = 2_048  # of a part, in memory at once
_ALL_TERMS = 1 << 20  # of all parts together, but for `_FEWEST` of each
_FEWEST = 1_024
_POSTINGS = 1 << 20  # of a batch, or `_EACH` for each part if that is more
_EACH = 1 << 11
_AHEAD = 1 << 23  # postings of all parts together that are read ahead, but for `_LEAST` of each
_LEAST = 1 << 12
_BATCH = 1 << 16  # terms of a batch
_SHARES = 1 << 8  # terms of a batch that may have postings in all parts
_LONGEST = 1 << 12  # bytes of a term, at least
_TEXT = (1 << 31) - 1  # bytes of a window's terms


def merge(parts: Sequence[PartReader], out: Path, scale: int = 0) -> Facts:
    """Write the index file of parts that are given in row order; `scale` as of `file.Layout`.

    Raises:
        InputError: a part is damaged.
        ResourceError: the file cannot be written.
    """
    return write_index(out, (part.lengths() for part in parts), partial(_lists, parts), scale)


def _lists(parts: Sequence[PartReader], lengths: Array, file: IO[bytes]) -> Iterator[Written]:
    for batch, sizes in _Joined(parts, lengths, file).batches():
        count = terms_in(batch)
        yield batch.text, batch.cuts[:count], batch.counts[:count], sizes


class _Joined:
    """The lists of all terms, written to a file batch by batch."""

    def __init__(self, parts: Sequence[PartReader], lengths: Array, file: IO[bytes]) -> None:
        self.lengths = lengths
        self._parts, self._file = parts, file
        self._first_rows = np.cumsum([0, *(part.n for part in parts)], dtype=np.int64)[:-1]
        self._postings = np.zeros(len(parts), np.int64)  # of each part, that were read
        self._held = [part.postings(0, 0) for part in parts]  # those that are not in a batch yet: rows and weights
        self._terms, self._ends = np.zeros(len(parts), np.int64), np.array([part.terms for part in parts])
        self._window = min(_TERMS, max(_FEWEST, _ALL_TERMS // max(1, len(parts))))
        self._ahead = max(_LEAST, _AHEAD // max(1, len(parts)))
        self._most = max(_POSTINGS, _EACH * len(parts))
        self._windows = no_windows(len(parts), self._window)

    def batches(self) -> Iterator[tuple[Batch, Array]]:
        """Write all lists; yield the terms in order, with the bytes of each one's list."""
        for part in np.flatnonzero(self._ends).tolist():
            self._fill(part)
        batch, told = no_batch(_BATCH, max(_BATCH, _SHARES * len(self._parts)), _LONGEST * 16 + 16 * _BATCH), EMPTY
        while told != DONE:
            told = take(self._windows, batch, self._most)
            if told == EMPTY:
                for part in np.flatnonzero(self._windows.waiting & (self._terms < self._ends)).tolist():
                    self._fill(part)
            elif terms_in(batch):
                yield batch, self._put(batch)
                clear(batch)
            elif told != DONE:  # a term that no analyzer makes
                raise _damaged()

    def _fill(self, number: int) -> None:
        """Read more terms of a part."""
        part, first = self._parts[number], int(self._terms[number])
        last = min(first + self._window, part.terms)
        text, ends, counts = part.dictionary(first, last)
        if (
            counts.min() < 1
            or counts.max() > part.n
            or ends[0] < 1
            or (ends[1:] <= ends[:-1]).any()
            or ends[-1] > _TEXT
        ):
            raise _damaged()
        self._windows = filled(self._windows, number, text, ends, counts)
        self._terms[number] = last

    def _put(self, batch: Batch) -> Array:
        """Write the lists of a batch; return the bytes of each."""
        count = terms_in(batch)
        if count == 1 and batch.counts[0] > self._most:
            return np.array([self._put_long(batch)])
        shares = int(batch.ends[count - 1])
        sizes_of_parts = np.bincount(batch.parts[:shares], batch.shares[:shares], len(self._parts)).astype(np.int64)
        read = [self._read(part, int(size)) for part, size in enumerate(sizes_of_parts) if size]
        rows, weights = _end_to_end(read)
        out, sizes = np.empty(ROOM * (len(rows) + count), np.uint8), np.empty(count, np.int64)
        written = put_lists(
            batch.shares,
            batch.counts,
            batch.ends[:count],
            batch.parts,
            self._first_rows,
            np.cumsum(sizes_of_parts) - sizes_of_parts,
            rows,
            weights,
            self.lengths,
            out,
            sizes,
        )
        if written < 0:
            raise _damaged()
        self._file.write(out[:written].data)
        return sizes

    def _put_long(self, batch: Batch) -> int:
        """Write the list of one frequent term step by step; return its bytes."""
        begin, count = self._file.tell(), int(batch.counts[0])
        headers = np.empty(HEADER * (-(-count // BLOCK)), np.uint8)
        writer, sizes = np.zeros(NUMBERS, np.int64), np.zeros(SIZES, np.int64)
        gaps, less = np.empty(BLOCK, np.uint32), np.empty(BLOCK, np.uint32)
        out = np.empty(ROOM * (_POSTINGS + BLOCK), np.uint8)
        begin_list(writer, 0, 0)
        self._file.seek(begin + len(headers))
        for share in range(int(batch.ends[0])):
            part, left = int(batch.parts[share]), int(batch.shares[share])
            while left:
                rows, weights = _end_to_end([self._read(part, min(left, _POSTINGS))])
                left -= len(rows)
                own = rows, weights, 0, len(rows), self._first_rows[part], self.lengths
                if not put_postings(*own, writer, gaps, less, sizes, out, headers):
                    raise _damaged()
                self._file.write(out[: writer[AT_OUT]].data)
                writer[AT_OUT] = 0
        end_block(writer, gaps, less, sizes, out, headers)
        self._file.write(out[: writer[AT_OUT]].data)
        end = self._file.tell()
        self._file.seek(begin)
        self._file.write(headers.data)
        self._file.seek(end)
        return end - begin

    def _read(self, number: int, count: int) -> tuple[Array, Array]:
        """Return rows, counted from the part's first, and weights of the next postings of a part."""
        rows, weights = self._held[number]
        if count > len(rows):
            part, first = self._parts[number], int(self._postings[number])
            last = max(first + count - len(rows), min(first + self._ahead, part.postings_in_all))
            more = part.postings(first, last)
            rows, weights = np.concatenate([rows, more[0]]), np.concatenate([weights, more[1]])
            self._postings[number] = last
        self._held[number] = rows[count:], weights[count:]
        return rows[:count], weights[:count]


def _end_to_end(read: Sequence[tuple[Array, Array]]) -> tuple[Array, Array]:
    """Return rows, uint32, and weights, uint16, of several parts end to end."""
    rows, weights = (np.concatenate(columns) for columns in zip(*read, strict=True))
    return rows.astype(np.uint32, copy=False), weights.astype(np.uint16, copy=False)


def _damaged() -> InputError:
    return InputError("a part's postings are damaged: build them again")
