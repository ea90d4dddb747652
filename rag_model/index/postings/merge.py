"""Merge the postings of all parts into one file, as a stream: terms in order, rows in order within
a term.

The bytes of the file depend only on the passages' terms, and not on the division into parts. Memory
holds a batch of terms with up to a million postings, and for each part a window of its terms and of
its postings. A term with more than a million postings is written in several steps. With thousands
of parts, batches and windows grow with the number of parts: otherwise the number of requests
(batches x parts) and of reads (windows x parts) would grow with the square of the number of parts.

A heap of the parts, ordered by their next terms, gives the terms in order, and for each term its
parts in order.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, NamedTuple

import numpy as np
import numpy.typing as npt

from rag_model.compiled import bare, compiled
from rag_model.errors import InputError
from rag_model.index.files.pieces import Array
from rag_model.index.plan import IndexStats
from rag_model.index.postings.file import TermBatch, write_index
from rag_model.index.postings.lists import (
    BLOCK_OFFSET,
    HEADER_BYTES,
    MAX_POSTING_BYTES,
    WRITER_SIZE,
    add_postings,
    begin_list,
    end_block,
    write_lists,
)
from rag_model.index.postings.packing import BLOCK, SCRATCH_SIZE
from rag_model.index.postings.part import PartReader

Bytes = npt.NDArray[np.uint8]
Ints = npt.NDArray[np.int64]
_KEY_BYTES = 8
# Status of `take_terms`: no term is left, the batch is full, or a window is empty.
DONE, FULL, EMPTY = range(3)
# Elements of `Batch.numbers`.
_HEAP_SIZE, _TEXT_SIZE, _TERM_COUNT, _SHARE_COUNT, _POSTING_COUNT = range(5)
_WINDOW_TERMS = 2_048  # maximum terms in the window of a part
# Maximum terms in all windows together; with many parts, `_MIN_WINDOW_TERMS` per part if more.
_MAX_WINDOW_TERMS = 1 << 20
_MIN_WINDOW_TERMS = 1_024
# Maximum postings of a batch; with many parts, `_BATCH_POSTINGS_PER_PART` per part if more.
_BATCH_POSTINGS = 1 << 20
_BATCH_POSTINGS_PER_PART = 1 << 11
# Maximum postings that are read ahead; with many parts, `_MIN_READ_AHEAD` per part if more.
_READ_AHEAD = 1 << 23
_MIN_READ_AHEAD = 1 << 12
_BATCH_TERMS = 1 << 16
_FULL_TERMS_PER_BATCH = 1 << 8  # a batch has space for this many terms with postings in all parts
_FITTING_TERM_BYTES = 1 << 12  # a term of up to this length always fits into an empty batch
_MAX_WINDOW_BYTES = (1 << 31) - 1  # maximum bytes of the terms of a window


class Windows(NamedTuple):
    """The next terms of each part, in memory."""

    text: Bytes  # (parts, bytes)
    term_ends: npt.NDArray[np.int32]  # (parts, terms + 1) 0, and the end of each term in `text`
    counts: npt.NDArray[np.int32]  # (parts, terms) postings of each term
    next_term: Ints  # (parts,) index of the next term
    sizes: Ints  # (parts,) number of terms
    heap: Ints  # (parts,) heap of the parts, ordered by their next terms
    # (parts,) first eight bytes of the next term as a number, padded with 0
    keys: npt.NDArray[np.uint64]
    lengths: Ints  # (parts,) bytes of the next term
    # (parts,) whether the window is used up; then the part is not in the heap
    needs_terms: npt.NDArray[np.bool_]


class Batch(NamedTuple):
    """Consecutive terms of all parts, and their shares: the postings of a term in one part."""

    text: Bytes  # concatenated terms
    term_ends: Ints  # (capacity,) offset in `text` of the end of each term
    counts: Ints  # (capacity,) postings of each term
    ends: Ints  # (capacity,) offset in `shares` of the end of each term's shares
    parts: Ints  # (capacity,) part of each share
    shares: Ints  # (capacity,) postings of each share
    # See `_HEAP_SIZE`: sizes of the heap, and of the batch's text, terms, shares and postings.
    numbers: Ints


def create_windows(n_parts: int, n_terms: int) -> Windows:
    """Return empty windows with a capacity of `n_terms` terms per part."""
    return Windows(
        np.empty((n_parts, 1), np.uint8),
        np.zeros((n_parts, n_terms + 1), np.int32),
        np.zeros((n_parts, n_terms), np.int32),
        np.zeros(n_parts, np.int64),
        np.zeros(n_parts, np.int64),
        np.zeros(n_parts, np.int64),
        np.zeros(n_parts, np.uint64),
        np.zeros(n_parts, np.int64),
        np.ones(n_parts, np.bool_),
    )


def set_window(windows: Windows, part: int, text: Bytes, ends: Ints, counts: Ints) -> Windows:
    """Store a part's next terms, which end at `ends` in `text`.

    Return the windows, enlarged if necessary.
    """
    if len(text) > windows.text.shape[1]:
        wider_buffer = np.empty((len(windows.text), 2 * len(text)), np.uint8)
        wider_buffer[:, : windows.text.shape[1]] = windows.text
        windows = windows._replace(text=wider_buffer)
    windows.text[part, : len(text)] = text
    windows.term_ends[part, 1 : len(ends) + 1] = ends
    windows.counts[part, : len(counts)] = counts
    windows.next_term[part], windows.sizes[part] = 0, len(counts)
    return windows


def create_batch(n_terms: int, n_shares: int, size: int) -> Batch:
    """Return an empty batch with a capacity in terms, in shares, and in bytes of terms."""
    term_ends, posting_counts, share_ends = (np.empty(n_terms, np.int64) for _ in range(3))
    return Batch(
        np.empty(size, np.uint8),
        term_ends,
        posting_counts,
        share_ends,
        np.empty(n_shares, np.int64),
        np.empty(n_shares, np.int64),
        np.zeros(5, np.int64),
    )


def clear_batch(batch: Batch) -> None:
    """Remove all terms from a batch."""
    batch.numbers[_TEXT_SIZE:] = 0


def count_terms(batch: Batch) -> int:
    """Return the number of terms of a batch."""
    return int(batch.numbers[_TERM_COUNT])


@bare
def _compare_parts(windows, a, b):
    """Compare the next terms of parts `a` and `b`; return a number below, equal to or above 0."""
    if windows.keys[a] != windows.keys[b]:
        return -1 if windows.keys[a] < windows.keys[b] else 1
    length_a, length_b = windows.lengths[a], windows.lengths[b]
    if min(length_a, length_b) > _KEY_BYTES:
        begin_a, begin_b = windows.term_ends[a, windows.next_term[a]], windows.term_ends[b, windows.next_term[b]]
        for i in range(_KEY_BYTES, min(length_a, length_b)):
            if windows.text[a, begin_a + i] != windows.text[b, begin_b + i]:
                return np.int64(windows.text[a, begin_a + i]) - np.int64(windows.text[b, begin_b + i])
    return length_a - length_b


@bare
def _precedes(windows, a, b):
    """Return whether part `a` precedes part `b`, by their next terms, then by part number."""
    comparison = _compare_parts(windows, a, b)
    return comparison < 0 or (comparison == 0 and a < b)


@bare
def _set_key(windows, part):
    """Store the key and the length of a part's next term."""
    begin, end = windows.term_ends[part, windows.next_term[part]], windows.term_ends[part, windows.next_term[part] + 1]
    prefix_key = np.uint64(0)
    for i in range(begin, begin + _KEY_BYTES):
        prefix_key = (prefix_key << np.uint64(8)) | (np.uint64(windows.text[part, i]) if i < end else np.uint64(0))
    windows.keys[part], windows.lengths[part] = prefix_key, end - begin


@bare
def _push_part(windows, numbers, part):
    heap, heap_position = windows.heap, numbers[_HEAP_SIZE]
    numbers[_HEAP_SIZE] += 1
    while heap_position and _precedes(windows, part, heap[(heap_position - 1) >> 1]):
        heap[heap_position] = heap[(heap_position - 1) >> 1]
        heap_position = (heap_position - 1) >> 1
    heap[heap_position] = part


@bare
def _pop_part(windows, numbers):
    heap = windows.heap
    top_part = heap[0]
    numbers[_HEAP_SIZE] -= 1
    heap_size, last_part, heap_position = numbers[_HEAP_SIZE], heap[numbers[_HEAP_SIZE]], 0
    while True:
        child = 2 * heap_position + 1
        if child >= heap_size:
            break
        if child + 1 < heap_size and _precedes(windows, heap[child + 1], heap[child]):
            child += 1
        if not _precedes(windows, heap[child], last_part):
            break
        heap[heap_position] = heap[child]
        heap_position = child
    heap[heap_position] = last_part
    return top_part


@bare
def _add_term(windows, batch, term_parts, part_count, postings):
    """Add to a batch the next term of term_parts[:part_count], which is the same in these parts."""
    numbers, part = batch.numbers, term_parts[0]
    term, share, text_size = numbers[_TERM_COUNT], numbers[_SHARE_COUNT], numbers[_TEXT_SIZE]
    begin, end = windows.term_ends[part, windows.next_term[part]], windows.term_ends[part, windows.next_term[part] + 1]
    for i in range(begin, end):
        batch.text[text_size] = windows.text[part, i]
        text_size += 1
    for i in range(part_count):
        batch.parts[share], batch.shares[share] = (
            term_parts[i],
            windows.counts[term_parts[i], windows.next_term[term_parts[i]]],
        )
        share += 1
    batch.term_ends[term], batch.counts[term], batch.ends[term] = text_size, postings, share
    numbers[_TERM_COUNT], numbers[_SHARE_COUNT], numbers[_TEXT_SIZE] = term + 1, share, text_size
    numbers[_POSTING_COUNT] += postings


@compiled
def take_terms(windows, batch, max_postings):
    """Move terms from the windows to a batch, until it is full or a window is used up.

    Args:
        windows: the windows of all parts.
        batch: the batch to append to.
        max_postings: maximum postings of a batch; a term with more postings gets its own batch.

    Returns:
        `DONE`; `FULL`; or `EMPTY` if the windows of the parts with `needs_terms` must be filled. A
        part that has no more terms is ignored from then on.
    """
    numbers, n_parts = batch.numbers, len(windows.next_term)
    for part in range(n_parts):
        if windows.needs_terms[part] and windows.next_term[part] < windows.sizes[part]:
            windows.needs_terms[part] = False
            _set_key(windows, part)
            _push_part(windows, numbers, part)
    term_parts = np.empty(n_parts, np.int64)
    while numbers[_HEAP_SIZE]:
        part_count, n_postings = 0, 0
        while numbers[_HEAP_SIZE] and (part_count == 0 or _compare_parts(windows, term_parts[0], windows.heap[0]) == 0):
            term_parts[part_count] = _pop_part(windows, numbers)
            n_postings += windows.counts[term_parts[part_count], windows.next_term[term_parts[part_count]]]
            part_count += 1
        part, next_term = term_parts[0], windows.next_term[term_parts[0]]
        term_bytes = windows.term_ends[part, next_term + 1] - windows.term_ends[part, next_term]
        if (
            numbers[_TERM_COUNT] + 1 > len(batch.term_ends)
            or numbers[_SHARE_COUNT] + part_count > len(batch.parts)
            or numbers[_TEXT_SIZE] + term_bytes > len(batch.text)
            or (numbers[_TERM_COUNT] and numbers[_POSTING_COUNT] + n_postings > max_postings)
        ):
            for i in range(part_count):
                _push_part(windows, numbers, term_parts[i])
            return FULL
        _add_term(windows, batch, term_parts, part_count, n_postings)
        has_empty_window = False
        for i in range(part_count):
            windows.next_term[term_parts[i]] += 1
            if windows.next_term[term_parts[i]] < windows.sizes[term_parts[i]]:
                _set_key(windows, term_parts[i])
                _push_part(windows, numbers, term_parts[i])
            else:
                windows.needs_terms[term_parts[i]] = has_empty_window = True
        if has_empty_window:
            return EMPTY
    return DONE


def merge_parts(parts: Sequence[PartReader], out: Path, scale: int = 0) -> IndexStats:
    """Write the index file of parts, which are given in row order.

    `scale` has the meaning of `PostingsLayout.scale`.

    Raises:
        InputError: a part is damaged.
        ResourceError: the file cannot be written.
    """

    def write_lists(lengths: Array, file: IO[bytes]) -> Iterator[TermBatch]:
        for batch, list_sizes in _ListMerger(parts, lengths, file).iter_batches():
            n_terms = count_terms(batch)
            yield batch.text, batch.term_ends[:n_terms], batch.counts[:n_terms], list_sizes

    return write_index(out, (part.read_lengths() for part in parts), write_lists, scale)


class _ListMerger:
    """Writes the lists of all terms to a file, batch by batch."""

    def __init__(self, parts: Sequence[PartReader], lengths: Array, file: IO[bytes]) -> None:
        self.lengths = lengths
        self._parts, self._file = parts, file
        self._first_rows = np.cumsum([0, *(part.n for part in parts)], dtype=np.int64)[:-1]
        self._postings_read = np.zeros(len(parts), np.int64)  # postings read so far, by part
        # Rows and weights of each part that have been read but not yet written.
        self._buffers = [part.read_postings(0, 0) for part in parts]
        self._terms_read, self._term_counts = np.zeros(len(parts), np.int64), np.array([part.n_terms for part in parts])
        self._window = min(_WINDOW_TERMS, max(_MIN_WINDOW_TERMS, _MAX_WINDOW_TERMS // max(1, len(parts))))
        self._read_ahead = max(_MIN_READ_AHEAD, _READ_AHEAD // max(1, len(parts)))
        self._max_batch_postings = max(_BATCH_POSTINGS, _BATCH_POSTINGS_PER_PART * len(parts))
        self._windows = create_windows(len(parts), self._window)

    def iter_batches(self) -> Iterator[tuple[Batch, Array]]:
        """Write all lists.

        Yield batches of terms in order, with the size of each term's list in bytes.
        """
        for part in np.flatnonzero(self._term_counts).tolist():
            self._fill_window(part)
        max_shares = max(_BATCH_TERMS, _FULL_TERMS_PER_BATCH * len(self._parts))
        batch = create_batch(_BATCH_TERMS, max_shares, 16 * (_FITTING_TERM_BYTES + _BATCH_TERMS))
        window_status = EMPTY
        while window_status != DONE:
            window_status = take_terms(self._windows, batch, self._max_batch_postings)
            if window_status == EMPTY:
                for part in np.flatnonzero(self._windows.needs_terms & (self._terms_read < self._term_counts)).tolist():
                    self._fill_window(part)
            elif count_terms(batch):
                yield batch, self._write_batch(batch)
                clear_batch(batch)
            elif window_status != DONE:  # even an empty batch has no space for the next term
                raise _create_damage_error()

    def _fill_window(self, part_number: int) -> None:
        """Read the next terms of a part."""
        part_reader, first_term = self._parts[part_number], int(self._terms_read[part_number])
        end_term = min(first_term + self._window, part_reader.n_terms)
        term_text, term_ends, posting_counts = part_reader.read_terms(first_term, end_term)
        if (
            posting_counts.min() < 1
            or posting_counts.max() > part_reader.n
            or term_ends[0] < 1
            or (term_ends[1:] <= term_ends[:-1]).any()
            or term_ends[-1] > _MAX_WINDOW_BYTES
        ):
            raise _create_damage_error()
        self._windows = set_window(self._windows, part_number, term_text, term_ends, posting_counts)
        self._terms_read[part_number] = end_term

    def _write_batch(self, batch: Batch) -> Array:
        """Write the lists of a batch; return their sizes in bytes."""
        n_terms = count_terms(batch)
        if n_terms == 1 and batch.counts[0] > self._max_batch_postings:
            return np.array([self._write_long_list(batch)])
        n_shares = int(batch.ends[n_terms - 1])
        sizes_of_parts = np.bincount(batch.parts[:n_shares], batch.shares[:n_shares], len(self._parts)).astype(np.int64)
        postings_of_parts = [self._read_postings(part, int(size)) for part, size in enumerate(sizes_of_parts) if size]
        rows, weights = _concatenate(postings_of_parts)
        out, list_sizes = np.empty(MAX_POSTING_BYTES * (len(rows) + n_terms), np.uint8), np.empty(n_terms, np.int64)
        bytes_written = write_lists(
            batch.shares,
            batch.counts,
            batch.ends[:n_terms],
            batch.parts,
            self._first_rows,
            np.cumsum(sizes_of_parts) - sizes_of_parts,
            rows,
            weights,
            self.lengths,
            out,
            list_sizes,
        )
        if bytes_written < 0:
            raise _create_damage_error()
        self._file.write(out[:bytes_written].data)
        return list_sizes

    def _write_long_list(self, batch: Batch) -> int:
        """Write the list of one frequent term in steps; return its size in bytes."""
        list_begin, n_postings = self._file.tell(), int(batch.counts[0])
        header_buffer = np.empty(HEADER_BYTES * (-(-n_postings // BLOCK)), np.uint8)
        writer, scratch = np.zeros(WRITER_SIZE, np.int64), np.zeros(SCRATCH_SIZE, np.int64)
        gaps, weights_less_one = np.empty(BLOCK, np.uint32), np.empty(BLOCK, np.uint32)
        out = np.empty(MAX_POSTING_BYTES * (_BATCH_POSTINGS + BLOCK), np.uint8)
        begin_list(writer, 0, 0)
        self._file.seek(list_begin + len(header_buffer))
        for share in range(int(batch.ends[0])):
            part, n_unread = int(batch.parts[share]), int(batch.shares[share])
            while n_unread:
                rows, weights = _concatenate([self._read_postings(part, min(n_unread, _BATCH_POSTINGS))])
                n_unread -= len(rows)
                part_postings = rows, weights, 0, len(rows), self._first_rows[part], self.lengths
                if not add_postings(*part_postings, writer, gaps, weights_less_one, scratch, out, header_buffer):
                    raise _create_damage_error()
                self._file.write(out[: writer[BLOCK_OFFSET]].data)
                writer[BLOCK_OFFSET] = 0
        end_block(writer, gaps, weights_less_one, scratch, out, header_buffer)
        self._file.write(out[: writer[BLOCK_OFFSET]].data)
        list_end = self._file.tell()
        self._file.seek(list_begin)
        self._file.write(header_buffer.data)
        self._file.seek(list_end)
        return list_end - list_begin

    def _read_postings(self, part_number: int, n_postings: int) -> tuple[Array, Array]:
        """Return the rows, within the part, and the weights of a part's next postings."""
        rows, weights = self._buffers[part_number]
        if n_postings > len(rows):
            part_reader, first = self._parts[part_number], int(self._postings_read[part_number])
            end = max(first + n_postings - len(rows), min(first + self._read_ahead, part_reader.n_postings))
            next_postings = part_reader.read_postings(first, end)
            rows, weights = np.concatenate([rows, next_postings[0]]), np.concatenate([weights, next_postings[1]])
            self._postings_read[part_number] = end
        self._buffers[part_number] = rows[n_postings:], weights[n_postings:]
        return rows[:n_postings], weights[:n_postings]


def _concatenate(parts: Sequence[tuple[Array, Array]]) -> tuple[Array, Array]:
    """Concatenate the rows and weights of several parts, as uint32 and uint16."""
    rows, weights = (np.concatenate(part_columns) for part_columns in zip(*parts, strict=True))
    return rows.astype(np.uint32, copy=False), weights.astype(np.uint16, copy=False)


def _create_damage_error() -> InputError:
    return InputError("a part's postings are damaged: build them again")
