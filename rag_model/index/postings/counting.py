"""Count the terms of a part's passages, which gives its postings.

Compiled loops split texts into tokens and number them, so that each distinct token is analyzed only
once. Counting takes little more time than reading the text. The terms are the same as those of
`Analyzer.terms`.

A run is a sequence of characters without white space. In a run of ASCII characters, each word of
letters and digits, in lower case, is a token. Any other run is one token, unchanged; for an
analyzer with `whole_runs`, every run is one token. Analyzing the tokens one by one gives the terms
of the whole text, because no rule of the analyzer looks beyond ASCII white space, and a run of
ASCII characters has no words besides those of letters and digits.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator
from itertools import count
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from rag_model.compiled import bare
from rag_model.corpus.passages import PassageFile
from rag_model.errors import UsageError
from rag_model.index.files.pieces import Array
from rag_model.index.postings.analyzer import Analyzer
from rag_model.index.postings.part import MAX_PART_ROWS, MAX_UINT16, PartPostings, join_terms, to_smallest_dtype

_APOSTROPHE, _UNDERSCORE, _S, _LINE_FEED, _ASCII = ord("'"), ord("_"), ord("s"), ord("\n"), 128
# for each byte that is an ASCII letter or digit, the letter in lower case or the digit; else 0
_LOWERCASE = np.array(
    [ord(chr(byte).lower()) if byte < 128 and chr(byte).isalnum() else 0 for byte in range(256)], np.uint8
)
_IS_WHITESPACE = np.array([byte in b" \t\n\r" for byte in range(256)])
_BASIS, _PRIME = np.uint64(0xCBF29CE484222325), np.uint64(0x100000001B3)  # of the hash FNV-1a
_HALF_HASH_BITS, _ONE = np.uint64(32), np.uint64(1)
_MIN_CAPACITY = 1 << 12
_MIN_BATCH_ROWS = 1 << 10
Ints = npt.NDArray[np.int64]


class TokenTable(NamedTuple):
    """A hash table that numbers distinct tokens."""

    # token number in each slot, -1 if the slot is free; the length is a power of two
    slots: npt.NDArray[np.int32]
    hashes: npt.NDArray[np.uint64]  # hash of each token
    ends: npt.NDArray[np.int64]  # 0, and the end of each token in `text`, including its line feed
    text: npt.NDArray[np.uint8]  # tokens, each followed by a line feed, which no token contains
    token_count: npt.NDArray[np.int64]  # (1,)


def create_token_table() -> TokenTable:
    """Return an empty table."""
    return _allocate_table(_MIN_CAPACITY, _MIN_CAPACITY, np.zeros(1, np.int64))


def grow_token_table(tokens: TokenTable, size: int) -> TokenTable:
    """Return the table, or a larger copy if it has no space for tokens of `size` more bytes,
    including line feeds.
    """
    n_tokens = int(tokens.token_count[0])
    min_capacity, text_bytes = n_tokens + size // 2 + 2, int(tokens.ends[n_tokens])
    if min_capacity <= len(tokens.hashes) and text_bytes + size <= len(tokens.text):
        return tokens
    larger_table = _allocate_table(
        max(min_capacity, 2 * n_tokens), max(text_bytes + size, 2 * text_bytes), tokens.token_count
    )
    larger_table.hashes[:n_tokens] = tokens.hashes[:n_tokens]
    larger_table.ends[: n_tokens + 1] = tokens.ends[: n_tokens + 1]
    larger_table.text[:text_bytes] = tokens.text[:text_bytes]
    _fill_slots(larger_table)
    return larger_table


def _allocate_table(capacity: int, size: int, count: npt.NDArray[np.int64]) -> TokenTable:
    slots = np.full(1 << (2 * capacity - 1).bit_length(), -1, np.int32)
    return TokenTable(
        slots, np.empty(capacity, np.uint64), np.zeros(capacity + 1, np.int64), np.empty(max(size, 1), np.uint8), count
    )


@bare
def _fill_slots(tokens):
    """Insert all tokens into empty slots."""
    slot_mask = np.uint64(len(tokens.slots) - 1)
    for token_number in range(tokens.token_count[0]):
        slot = tokens.hashes[token_number] & slot_mask
        while tokens.slots[slot] >= 0:
            slot = (slot + np.uint64(1)) & slot_mask
        tokens.slots[slot] = token_number


@bare
def _number_token(slots, hashes, ends, text, count_array, token_bytes, token_hash):
    """Return the token number of the bytes that follow the last token of the table.

    A new token is inserted.
    """
    token_hash ^= token_hash >> _HALF_HASH_BITS
    n_tokens = count_array[0]
    slot_mask, text_begin = np.uint64(len(slots) - 1), ends[n_tokens]
    slot = token_hash & slot_mask
    while True:
        number = slots[slot]
        if number < 0:
            slots[slot], hashes[n_tokens], ends[n_tokens + 1] = n_tokens, token_hash, text_begin + token_bytes + 1
            text[text_begin + token_bytes] = _LINE_FEED
            count_array[0] = n_tokens + 1
            return n_tokens
        if hashes[number] == token_hash and ends[number + 1] - ends[number] == token_bytes + 1:
            token_begin, i = ends[number], 0
            while i < token_bytes and text[token_begin + i] == text[text_begin + i]:
                i += 1
            if i == token_bytes:
                return np.int64(number)
        slot = (slot + _ONE) & slot_mask


@bare
def _scan_ascii(data, first, end, slots, hashes, ends, text, count_array, out, position):
    """Append the token numbers of the words of ASCII text data[first:end] to `out`.

    Return the new end of `out`.
    """
    while first < end:
        byte = _LOWERCASE[data[first]]
        if byte == 0:
            first += 1
            if data[first - 1] == _APOSTROPHE and first < end and _LOWERCASE[data[first]] == _S:
                next_byte = data[first + 1] if first + 1 < end else np.uint8(0)
                if _LOWERCASE[next_byte] == 0 and next_byte != _UNDERSCORE:  # a possessive
                    first += 1
            continue
        token_begin, size, token_hash = ends[count_array[0]], 0, _BASIS
        while byte != 0:
            text[token_begin + size] = byte
            size += 1
            token_hash = (token_hash ^ np.uint64(byte)) * _PRIME
            first += 1
            if first == end:
                break
            byte = _LOWERCASE[data[first]]
        out[position] = _number_token(slots, hashes, ends, text, count_array, size, token_hash)
        position += 1
    return position


@bare
def _scan_runs(data, first, end, slots, hashes, ends, text, count_array, out, position, whole_runs):
    """Scan any text like `_scan_ascii`.

    Runs with a character beyond ASCII are tokens as a whole, and with `whole_runs` all runs.
    """
    while first < end:
        run_end, is_ascii = first, not whole_runs
        while run_end < end and not _IS_WHITESPACE[data[run_end]]:
            is_ascii = is_ascii and data[run_end] < _ASCII
            run_end += 1
        if run_end == first:
            pass
        elif is_ascii:
            position = _scan_ascii(data, first, run_end, slots, hashes, ends, text, count_array, out, position)
        else:
            token_begin, token_hash = ends[count_array[0]], _BASIS
            for i in range(first, run_end):
                text[token_begin + i - first] = data[i]
                token_hash = (token_hash ^ np.uint64(data[i])) * _PRIME
            out[position] = _number_token(slots, hashes, ends, text, count_array, run_end - first, token_hash)
            position += 1
        first = run_end + 1
    return position


@bare
def _scan_texts(data, offsets, slots, hashes, ends, text, count_array, out, out_ends, whole_runs):
    """Number the tokens of texts; `number_tokens` describes the arguments."""
    position = 0
    for text_number in range(len(out_ends)):
        begin, end, byte_union = np.int64(offsets[text_number]), np.int64(offsets[text_number + 1]), np.uint8(0)
        for i in range(begin, end):
            byte_union |= data[i]
        if byte_union < _ASCII and not whole_runs:
            position = _scan_ascii(data, begin, end, slots, hashes, ends, text, count_array, out, position)
        else:
            position = _scan_runs(data, begin, end, slots, hashes, ends, text, count_array, out, position, whole_runs)
        out_ends[text_number] = position


def number_tokens(
    data: Array, offsets: Array, tokens: TokenTable, out: Array, ends: Array, *, whole_runs: bool = False
) -> None:
    """Number the tokens of texts.

    Args:
        data: uint8, the texts in UTF-8, concatenated.
        offsets: (n + 1,) start of each text, and the end of the last one.
        tokens: a table with space for all bytes, and one more byte for each text.
        out: int32, of at least that length; filled with the token numbers, text after text.
        ends: (n,) int64, filled with the end of each text's tokens in `out`.
        whole_runs: runs of ASCII characters are tokens too, instead of their words.
    """
    # Passing the arrays one by one takes a third less time than passing a record.
    _scan_texts(data, offsets, *tokens, out, ends, whole_runs)


def count_passages(path: Path, analyzer: Analyzer) -> PartPostings:
    """Return the postings of a part's passages, including titles; weights are term frequencies.

    Raises:
        InputError: the file is damaged.
        UsageError: the part has too many passages.
    """
    with PassageFile(path) as file:
        if file.n_rows >= MAX_PART_ROWS:
            raise UsageError(f"{path} has {file.n_rows:,} passages: a part may have up to {MAX_PART_ROWS - 1:,}")
        return count_texts(iter_texts(file.iter_batches(["title", "text"])), analyzer)


def iter_texts(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.Array]:
    """Yield the texts of each batch's passages, with their titles in front."""
    for batch in batches:
        yield pc.binary_join_element_wise(batch["title"], batch["text"], " ")


def gather_batches(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Merge small batches, which take longer per row, into batches of `_MIN_BATCH_ROWS` or more.

    The last batch may be smaller.
    """
    pending_batches, n_rows = list[pa.RecordBatch](), 0
    for batch in batches:
        pending_batches.append(batch)
        n_rows += len(batch)
        if n_rows >= _MIN_BATCH_ROWS:
            yield from pa.Table.from_batches(pending_batches).combine_chunks().to_batches()
            pending_batches, n_rows = [], 0
    if pending_batches:
        yield from pa.Table.from_batches(pending_batches).combine_chunks().to_batches()


def count_texts(batches: Iterable[pa.Array], analyzer: Analyzer) -> PartPostings:
    """Return the postings of texts, which are given as arrays of strings in row order."""
    counter = _PostingsCounter(analyzer)
    for text_array in batches:
        counter.add(text_array)
    return counter.sort_postings()


@bare
def _count_terms(numbers, ends, starts, terms, positions, text_terms, weights, counts, lengths):
    """Count the terms of texts.

    Args:
        numbers: token numbers, text after text.
        ends: (n,) end of each text's tokens.
        starts: start of each token's terms in `terms`, and the end of the last token's terms.
        terms: term numbers of all tokens.
        positions: (t,) int64, filled with -1; last posting of each term.
        text_terms: int32, filled with the distinct terms of each text.
        weights: uint16, filled with their frequencies.
        counts: (n,) int64, filled with the number of distinct terms of each text.
        lengths: (n,) int64, filled with the number of terms of each text.

    Returns:
        The number of postings.
    """
    first_token, next_posting = 0, 0
    for text_number in range(len(ends)):
        text_begin, length = next_posting, 0
        for i in range(first_token, ends[text_number]):
            for j in range(starts[numbers[i]], starts[numbers[i] + 1]):
                term = terms[j]
                length += 1
                if positions[term] >= text_begin:
                    weights[positions[term]] = min(weights[positions[term]] + 1, MAX_UINT16)
                else:
                    positions[term] = next_posting
                    text_terms[next_posting], weights[next_posting] = term, 1
                    next_posting += 1
        counts[text_number], lengths[text_number], first_token = next_posting - text_begin, length, ends[text_number]
    return next_posting


@bare
def _sort_postings(terms, weights, counts, term_starts, rows, sorted_weights):
    """Sort postings by term.

    `counts` has the number of postings of each row. `term_starts` has the start of each term in the
    sorted arrays, and is overwritten.
    """
    posting = 0
    for row in range(len(counts)):
        for _ in range(counts[row]):
            position = term_starts[terms[posting]]
            term_starts[terms[posting]] = position + 1
            rows[position], sorted_weights[position] = row, weights[posting]
            posting += 1


class _PostingsCounter:
    """Collects postings row after row.

    Terms are numbered in the order of their first occurrence.
    """

    def __init__(self, analyzer: Analyzer) -> None:
        self._analyzer, self._tokens = analyzer, create_token_table()
        # term -> number; looking up a new term gives it the next number
        self._term_ids: dict[bytes, int] = defaultdict(count().__next__)
        self._terms = np.empty(0, np.int32)  # term numbers of all tokens, concatenated
        # start of each token's terms in `_terms`, and the end of the last token's terms
        self._starts = np.zeros(1, np.int64)
        self._batches: list[tuple[Array, Array, Array, Array]] = []  # see `_count_terms`

    def add(self, texts: pa.Array) -> None:
        """Count the terms of the next texts."""
        numbers, ends = self._scan(texts.cast(pa.string()))
        max_postings = int(np.diff(self._starts)[numbers].sum())
        text_terms, weights = np.empty(max_postings, np.int32), np.empty(max_postings, np.uint16)
        counts, lengths = np.empty(len(texts), np.int64), np.empty(len(texts), np.int64)
        positions = np.full(len(self._term_ids), -1)
        count = _count_terms(numbers, ends, self._starts, self._terms, positions, text_terms, weights, counts, lengths)
        self._batches.append((text_terms[:count].copy(), weights[:count].copy(), counts, lengths))

    def sort_postings(self) -> PartPostings:
        """Return all postings, sorted by term."""
        empty_arrays = np.empty(0, np.int32), np.empty(0, np.uint16), np.empty(0, np.int64), np.empty(0, np.int64)
        text_terms, weights, counts, lengths = map(np.concatenate, zip(empty_arrays, *self._batches, strict=True))
        terms = sorted(self._term_ids)
        rank_of_number = np.empty(len(terms), np.int64)  # term's number -> its rank in sorted order
        rank_of_number[np.fromiter(map(self._term_ids.__getitem__, terms), np.int64, len(terms))] = np.arange(
            len(terms)
        )
        term_numbers = rank_of_number[text_terms]
        term_sizes = np.bincount(term_numbers, minlength=len(terms))
        term_ends = np.cumsum(term_sizes)
        rows, sorted_weights = np.empty(len(text_terms), np.uint32), np.empty(len(text_terms), np.uint16)
        _sort_postings(term_numbers, weights, counts, term_ends - term_sizes, rows, sorted_weights)
        max_weight = int(weights.max(initial=0)) + 1
        return PartPostings(
            np.minimum(lengths, MAX_UINT16).astype("<u2"),
            *join_terms(terms),
            term_ends.astype("<i8"),
            to_smallest_dtype(rows, len(counts)),
            to_smallest_dtype(sorted_weights, max_weight),
        )

    def _scan(self, texts: pa.Array) -> tuple[Array, Ints]:
        """Number all tokens, and analyze new ones; return the numbers, and the end of each text."""
        _, offsets, data = texts.buffers()
        text_offsets = np.frombuffer(offsets, np.int32, len(texts) + 1, 4 * texts.offset)
        n_bytes, n_known = int(text_offsets[-1] - text_offsets[0]), int(self._tokens.token_count[0])
        self._tokens = grow_token_table(self._tokens, n_bytes + len(texts))
        numbers, ends = np.empty(n_bytes, np.int32), np.empty(len(texts), np.int64)
        text_bytes, whole_runs = np.frombuffer(data or b"", np.uint8), self._analyzer.whole_runs
        number_tokens(text_bytes, text_offsets, self._tokens, numbers, ends, whole_runs=whole_runs)
        self._analyze_tokens(n_known)
        return numbers[: ends[-1] if len(ends) else 0], ends

    def _analyze_tokens(self, first_new: int) -> None:
        """Compute the terms of the tokens from number `first_new` on."""
        tokens = self._tokens
        begin, end = tokens.ends[first_new], tokens.ends[int(tokens.token_count[0])]
        token_terms, term_counts = self._analyzer.analyze_tokens(tokens.text[begin:end].tobytes().split(b"\n")[:-1])
        terms = np.fromiter(map(self._term_ids.__getitem__, token_terms), np.int32, len(token_terms))
        self._terms = np.concatenate([self._terms, terms])
        self._starts = np.concatenate([self._starts, self._starts[-1] + np.cumsum(term_counts, dtype=np.int64)])
