"""Join the parts' postings into one file, as a stream: terms in order, and of each the parts' postings in row order.

The result is a function of the passages' terms alone: however rows are divided into parts, the bytes are the same. A
batch of terms with up to a million postings is in memory, and of each part a window of its terms; a term with more
postings goes through in steps of that size.
"""

import mmap
import shutil
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO

import numpy as np
import numpy.typing as npt

from rag_model.errors import InputError, ResourceError
from rag_model.index.files.pieces import Array
from rag_model.index.plan import Facts
from rag_model.index.postings.dictionary import DictionaryWriter
from rag_model.index.postings.file import AT_LENGTHS, Layout
from rag_model.index.postings.lists import HEADER, ROOM, put_blocks, put_lists
from rag_model.index.postings.packing import BLOCK, PADDING
from rag_model.index.postings.part import PartReader

_TERMS = 2_048  # of a part, in memory at once
_POSTINGS = 1 << 20  # of a batch


def merge(parts: Sequence[PartReader], out: Path, scale: int = 0) -> Facts:
    """Write the index file of parts that are given in row order; `scale` as of `file.Layout`.

    Raises:
        InputError: a part is damaged.
        ResourceError: the file cannot be written.
    """
    try:
        with out.open("w+b") as file:
            layout = replace(_written(parts, file), scale=scale)
            file.seek(0)
            file.write(layout.pack())
    except OSError as failed:
        raise ResourceError(f"cannot write {out}: {failed.strerror}") from failed
    return {"rows": layout.n, "terms": layout.terms, "postings": layout.postings, "bytes": layout.size}


def _written(parts: Sequence[PartReader], file: IO[bytes]) -> Layout:
    file.seek(AT_LENGTHS)
    total = 0
    for part in parts:
        lengths = part.lengths()
        total += int(lengths.sum(dtype=np.int64))
        file.write(lengths.tobytes())
    n, lists, postings = sum(part.n for part in parts), 0, 0
    _pad(file)
    file.flush()
    words = DictionaryWriter()
    with ExitStack() as stack:
        mapped = stack.enter_context(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
        dictionary = stack.enter_context(TemporaryFile(dir=Path(file.name).parent))
        every = np.frombuffer(mapped, "<u2", n, AT_LENGTHS)
        try:
            for batch in _batches(parts):
                for term, count, data in _lists(batch, every):
                    file.write(data)
                    words.add(term, count, len(data))
                    lists, postings = lists + len(data), postings + count
                dictionary.write(words.take())
        finally:
            del every  # the map cannot be closed while an array looks into it
        file.write(bytes(PADDING))
        _pad(file)
        size = dictionary.tell()
        dictionary.seek(0)
        shutil.copyfileobj(dictionary, file)
    layout = Layout(n, words.terms, postings, total, lists, size, len(words.groups) // 16)
    _pad(file)
    file.write(words.groups)
    return layout


def _pad(file: IO[bytes]) -> None:
    file.write(bytes(-file.tell() % 8))


@dataclass(frozen=True, slots=True)
class _Share:
    """What one part has of a batch of terms."""

    part: PartReader
    first_row: int
    first: int  # posting of the part
    last: int
    owners: npt.NDArray[np.int64]  # number in the batch of each of its terms
    counts: npt.NDArray[np.int64]  # postings of each

    def read(self, first: int, last: int) -> tuple[Array, Array]:
        """Return rows of the corpus, and weights, of postings [first, last) of the share."""
        rows, weights = self.part.postings(self.first + first, self.first + last)
        return rows.astype(np.int64) + self.first_row, weights.astype(np.int64)


@dataclass(frozen=True, slots=True)
class _Batch:
    """Consecutive terms, and the shares of the parts that hold one of them, in row order."""

    terms: Sequence[bytes]
    shares: Sequence[_Share]

    @property
    def counts(self) -> npt.NDArray[np.int64]:
        """Postings of each term, (t,)."""
        found = np.zeros(len(self.terms), np.int64)
        for share in self.shares:
            found[share.owners] += share.counts
        return found


class _Head:
    """Where the merge stands in one part: some terms ahead, and how many postings each has."""

    def __init__(self, part: PartReader, first_row: int) -> None:
        self.part, self.first_row = part, first_row
        self.terms: list[bytes] = []
        self.counts = np.empty(0, np.int64)
        self._term = self._posting = 0
        self.fill()

    def fill(self) -> None:
        """Read more terms, if none is left."""
        if not self.terms:
            last = min(self._term + _TERMS, self.part.terms)
            self.terms, self.counts = self.part.dictionary(self._term, last)
            self._term = last

    @property
    def horizon(self) -> bytes | None:
        """The last term that is known; None: it is the part's last one."""
        return None if self._term == self.part.terms else self.terms[-1]

    def take(self, count: int, places: dict[bytes, int]) -> _Share:
        """Take the next `count` terms."""
        owners = np.fromiter(map(places.__getitem__, self.terms[:count]), np.int64, count)
        counts = self.counts[:count]
        first, self._posting = self._posting, self._posting + int(counts.sum())
        self.terms, self.counts = self.terms[count:], self.counts[count:]
        return _Share(self.part, self.first_row, first, self._posting, owners, counts)


def _batches(parts: Sequence[PartReader]) -> Iterator[_Batch]:
    """Yield all terms in order, in batches of up to `_POSTINGS` postings, or of one term."""
    first_rows = np.cumsum([0, *(part.n for part in parts)]).tolist()
    heads = [_Head(part, first) for part, first in zip(parts, first_rows, strict=False)]
    while heads := [head for head in heads if head.terms]:
        ends = [head.horizon for head in heads]
        known = [end for end in ends if end is not None]
        most = min(known) if known else None  # terms up to here are known in every part
        yield from _cut(heads, most)
        for head in heads:
            head.fill()


def _cut(heads: Sequence[_Head], most: bytes | None) -> Iterator[_Batch]:
    """Yield the terms up to `most`, or all, in batches."""
    counts: dict[bytes, int] = {}
    for head in heads:
        for term, count in zip(head.terms, head.counts.tolist(), strict=True):
            if most is not None and term > most:
                break
            counts[term] = counts.get(term, 0) + count
    held: list[bytes] = []
    postings = 0
    for term in sorted(counts):
        if held and postings + counts[term] > _POSTINGS:
            yield _batch(held, heads)
            held, postings = [], 0
        held.append(term)
        postings += counts[term]
    if held:
        yield _batch(held, heads)


def _batch(terms: Sequence[bytes], heads: Sequence[_Head]) -> _Batch:
    places = {term: place for place, term in enumerate(terms)}
    shares = []
    for head in heads:
        count = _leading(head.terms, terms[-1])
        if count:
            shares.append(head.take(count, places))
    return _Batch(terms, shares)


def _leading(terms: Sequence[bytes], last: bytes) -> int:
    """Return how many of ascending terms are not behind `last`."""
    low, high = 0, len(terms)
    while low < high:
        middle = (low + high) // 2
        low, high = (middle + 1, high) if terms[middle] <= last else (low, middle)
    return low


def _lists(batch: _Batch, lengths: Array) -> Iterator[tuple[bytes, int, bytes]]:
    """Yield each term of a batch with its number of postings and its list."""
    counts = batch.counts
    if len(batch.terms) == 1 and counts[0] > _POSTINGS:
        yield batch.terms[0], int(counts[0]), _long_list(batch.shares, int(counts[0]), lengths)
        return
    read = [share.read(0, share.last - share.first) for share in batch.shares]
    owners = np.concatenate([np.repeat(share.owners, share.counts) for share in batch.shares])
    order = np.argsort(owners, kind="stable")  # by term; within a term parts, and so rows, stay in order
    rows, weights = (np.concatenate(columns)[order] for columns in zip(*read, strict=True))
    _check(rows, weights, lengths)
    out, sizes = np.empty(ROOM * (len(rows) + len(counts)), np.uint8), np.empty(len(counts), np.int64)
    written = put_lists(rows, weights, np.cumsum(counts), lengths, out, sizes)
    data, at = out[:written].tobytes(), 0
    for term, count, size in zip(batch.terms, counts.tolist(), sizes.tolist(), strict=True):
        yield term, count, data[at : at + size]
        at += size


def _long_list(shares: Sequence[_Share], count: int, lengths: Array) -> bytes:
    """Return the list of one frequent term, made step by step in whole blocks."""
    headers = np.empty(HEADER * (-(-count // BLOCK)), np.uint8)
    held_rows, held_weights = np.empty(0, np.int64), np.empty(0, np.int64)
    before, place, blocks = -1, 0, bytearray()

    def put(rows: Array, weights: Array) -> None:
        nonlocal before, place
        if not len(rows):
            return
        _check(rows, weights, lengths)
        out = np.empty(ROOM * len(rows) + BLOCK, np.uint8)
        end = put_blocks(rows, weights, lengths, before, out, 0, headers, place)
        blocks.extend(out[:end].tobytes())
        before, place = int(rows[-1]), place + HEADER * (-(-len(rows) // BLOCK))

    for share in shares:
        for first in range(0, share.last - share.first, _POSTINGS):
            rows, weights = share.read(first, min(first + _POSTINGS, share.last - share.first))
            held_rows, held_weights = np.concatenate([held_rows, rows]), np.concatenate([held_weights, weights])
            whole = len(held_rows) // BLOCK * BLOCK
            put(held_rows[:whole], held_weights[:whole])
            held_rows, held_weights = held_rows[whole:], held_weights[whole:]
    put(held_rows, held_weights)
    return headers.tobytes() + bytes(blocks)


def _check(rows: Array, weights: Array, lengths: Array) -> None:
    """Check that a damaged piece makes no block that cannot be written."""
    if len(rows) and not (rows.min() >= 0 and rows.max() < len(lengths) and weights.min() >= 1):
        raise InputError("a part's postings are damaged: build them again")
