"""The postings of one part: written by a worker as a piece, and read in ranges by the merge.

A piece does not depend on other parts: rows are relative to the part's first row, and it contains
no corpus statistics. So the piece of an unchanged part is reused even if other parts have changed.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Self

import numpy as np

from rag_model.index.files.pieces import Array, Opener, PieceReader, write_piece
from rag_model.index.plan import IndexStats

_ARRAY_COUNT = 6  # number of arrays in a piece
MAX_UINT16 = 65_535  # larger lengths and weights are stored as this value
_LENGTHS, _TEXT, _TERM_ENDS, _ENDS, _ROWS, _WEIGHTS = range(_ARRAY_COUNT)
MAX_PART_ROWS = 1 << 24


@dataclass(frozen=True, slots=True)
class PartPostings:
    """All postings of a part, by term."""

    lengths: Array  # (n,) uint16 number of terms of each passage
    text: Array  # uint8, concatenated terms, in ascending order of their bytes
    term_ends: Array  # (t,) int64 end of each term in `text`
    ends: Array  # (t,) int64 end of each term's postings
    rows: Array  # (p,) row of each posting within the part, ascending within a term
    weights: Array  # (p,) weight of each posting, at least 1

    @classmethod
    def from_weighted_terms(cls, terms: Array, weights: Array, offsets: Array) -> Self:
        """Sort the weighted terms of passages, which are given in row order.

        Args:
            terms: (p,) term numbers below 2^24, distinct within a passage.
            weights: (p,) weights from 1 to 65,535.
            offsets: (n + 1,) start of each passage's terms, and the end of the last passage's
                terms.
        """
        lengths = np.diff(offsets)
        # Sort by term, then by row.
        keys = terms.astype(np.int64) * MAX_PART_ROWS + np.repeat(np.arange(len(lengths)), lengths)
        sorted_positions = np.argsort(keys)
        distinct_terms, posting_counts = np.unique(terms, return_counts=True)
        return cls(
            np.minimum(lengths, MAX_UINT16).astype("<u2"),
            *join_terms(encode_term_ids(distinct_terms)),
            np.cumsum(posting_counts).astype("<i8"),
            to_smallest_dtype(keys[sorted_positions] % MAX_PART_ROWS, len(lengths)),
            to_smallest_dtype(weights[sorted_positions], int(weights.max(initial=0)) + 1),
        )

    @property
    def terms(self) -> list[bytes]:
        """The (t,) terms."""
        term_bounds = [0, *self.term_ends.tolist()]
        text = self.text.tobytes()
        return [text[term_begin:term_end] for term_begin, term_end in pairwise(term_bounds)]

    def write(self, path: Path, stamp: str) -> IndexStats:
        """Write the piece; return the counts of rows, terms and postings.

        Raises:
            ResourceError: the file cannot be written.
        """
        write_piece(path, stamp, [self.lengths, self.text, self.term_ends, self.ends, self.rows, self.weights])
        return {"rows": len(self.lengths), "terms": len(self.ends), "postings": len(self.rows)}


def join_terms(terms: Sequence[bytes]) -> tuple[Array, Array]:
    """Return the concatenated terms as uint8, and the end of each."""
    return np.frombuffer(b"".join(terms), np.uint8), np.cumsum(
        np.fromiter(map(len, terms), "<i8", len(terms)), dtype="<i8"
    )


def to_smallest_dtype(values: Array, limit: int) -> Array:
    """Return integers below `limit` in the smallest unsigned type for them."""
    return values.astype("u1" if limit <= 1 << 8 else "<u2" if limit <= 1 << 16 else "<u4")


def encode_term_ids(terms: Array) -> list[bytes]:
    """Encode numbers below 2^24 as terms of three bytes, big-endian, so that they sort like the
    numbers.
    """
    encoded_ids = terms.astype(">u4").tobytes()
    return [encoded_ids[id_start + 1 : id_start + 4] for id_start in range(0, len(encoded_ids), 4)]


class PartReader:
    """Reads a piece in ranges of terms and of postings."""

    def __init__(self, opener: Opener, stamp: str, name: str) -> None:
        """Open a piece; close it after use.

        Raises:
            InputError: the piece is missing, damaged or from another build.
        """
        self._piece, self._name = PieceReader.open(opener, stamp, _ARRAY_COUNT, name), name
        self.n, self.n_terms = self._piece.count_rows(_LENGTHS), self._piece.count_rows(_TERM_ENDS)
        self.n_postings = self._piece.count_rows(_ROWS)

    def read_lengths(self) -> Array:
        """Return the (n,) lengths of the part's passages."""
        return self._piece.read(_LENGTHS)

    def read_terms(self, start: int, end: int) -> tuple[Array, Array, Array]:
        """Return the terms [start, end), concatenated; their ends; and their numbers of postings."""
        term_ends = self._read_ends(_TERM_ENDS, start, end)
        text = self._piece.read(_TEXT, int(term_ends[0]), int(term_ends[-1]))
        return text, term_ends[1:] - term_ends[0], np.diff(self._read_ends(_ENDS, start, end))

    def read_postings(self, start: int, end: int) -> tuple[Array, Array]:
        """Return the rows, within the part, and the weights of the postings [start, end) in the
        order of terms.
        """
        return self._piece.read(_ROWS, start, end), self._piece.read(_WEIGHTS, start, end)

    def close(self) -> None:
        """Close the piece."""
        self._piece.close()

    def _read_ends(self, array_number: int, first_item: int, end_item: int) -> Array:
        """Return the ends of items [first_item - 1, end_item), where the end of item -1 is 0."""
        ends = self._piece.read(array_number, max(first_item - 1, 0), end_item)
        return ends if first_item else np.concatenate([np.zeros(1, ends.dtype), ends])
