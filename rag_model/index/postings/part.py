"""The postings of one part: its passages' terms, counted and sorted. What a worker makes, and a merge reads in ranges.

A part's piece does not depend on other parts: rows are counted from the part's first row, and no statistic of the
corpus is in it. So the piece of an unchanged part is used again whatever else has changed.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Self

import numpy as np

from rag_model.index.files.pieces import Array, Opener, Piece, write_piece
from rag_model.index.plan import Facts

COUNT = 6  # arrays in a piece
MOST = 65_535  # of a passage's length, and of a weight: two bytes; more is counted as this
_LENGTHS, _TEXT, _CUTS, _ENDS, _ROWS, _WEIGHTS = range(COUNT)
MOST_ROWS = 1 << 24  # of a part


@dataclass(frozen=True, slots=True)
class PartPostings:
    """All postings of a part, by term."""

    lengths: Array  # (n,) uint16: terms of each passage
    text: Array  # uint8: the terms one after another, ascending as bytes
    cuts: Array  # (t,) int64: where each term ends in it
    ends: Array  # (t,) int64: where the postings of each term end
    rows: Array  # (p,) of the part, ascending within a term
    weights: Array  # (p,) at least 1

    @classmethod
    def weighted(cls, terms: Array, weights: Array, offsets: Array) -> Self:
        """Sort the weighted terms of passages, given in row order.

        Args:
            terms: (p,) numbers below 2^24, none twice in a passage.
            weights: (p,) from 1 to 65,535.
            offsets: (n + 1,) where the terms of each passage begin, and the last ones end.
        """
        lengths = np.diff(offsets)
        keys = terms.astype(np.int64) * MOST_ROWS + np.repeat(np.arange(len(lengths)), lengths)  # term, then row
        order = np.argsort(keys)
        known, counts = np.unique(terms, return_counts=True)
        return cls(
            np.minimum(lengths, MOST).astype("<u2"),
            *joined(numbered(known)),
            np.cumsum(counts).astype("<i8"),
            narrow(keys[order] % MOST_ROWS, len(lengths)),
            narrow(weights[order], int(weights.max(initial=0)) + 1),
        )

    @property
    def terms(self) -> list[bytes]:
        """The (t,) terms."""
        places = [0, *self.cuts.tolist()]
        text = self.text.tobytes()
        return [text[first:last] for first, last in pairwise(places)]

    def write(self, path: Path, stamp: str) -> Facts:
        """Write the piece; return how many rows, terms and postings it has.

        Raises:
            ResourceError: the file cannot be written.
        """
        write_piece(path, stamp, [self.lengths, self.text, self.cuts, self.ends, self.rows, self.weights])
        return {"rows": len(self.lengths), "terms": len(self.ends), "postings": len(self.rows)}


def joined(terms: Sequence[bytes]) -> tuple[Array, Array]:
    """Return terms as one array of bytes, and where each ends in it."""
    return np.frombuffer(b"".join(terms), np.uint8), np.cumsum(
        np.fromiter(map(len, terms), "<i8", len(terms)), dtype="<i8"
    )


def narrow(values: Array, above: int) -> Array:
    """Return numbers below `above` in the smallest type that holds them."""
    return values.astype("u1" if above <= 1 << 8 else "<u2" if above <= 1 << 16 else "<u4")


def numbered(terms: Array) -> list[bytes]:
    """Return the terms that numbers below 2^24 are: three bytes, the highest first, so that they ascend as numbers."""
    text = terms.astype(">u4").tobytes()
    return [text[at + 1 : at + 4] for at in range(0, len(text), 4)]


class PartReader:
    """A piece that is read in ranges of terms and of postings."""

    def __init__(self, opener: Opener, stamp: str, name: str) -> None:
        """Open a piece; close it after use.

        Raises:
            InputError: it is missing, damaged or of another build.
        """
        self._piece, self._name = Piece.open(opener, stamp, COUNT, name), name
        self.n, self.terms = self._piece.rows(_LENGTHS), self._piece.rows(_CUTS)
        self.postings_in_all = self._piece.rows(_ROWS)

    def lengths(self) -> Array:
        """Return the (n,) lengths of the part's passages."""
        return self._piece.read(_LENGTHS)

    def dictionary(self, first: int, last: int) -> tuple[Array, Array, Array]:
        """Return the terms [first, last) as bytes, where each ends in them, and how many postings each has."""
        cuts = self._from(_CUTS, first, last)
        text = self._piece.read(_TEXT, int(cuts[0]), int(cuts[-1]))
        return text, cuts[1:] - cuts[0], np.diff(self._from(_ENDS, first, last))

    def postings(self, first: int, last: int) -> tuple[Array, Array]:
        """Return rows of the part and weights of the postings [first, last), terms in order."""
        return self._piece.read(_ROWS, first, last), self._piece.read(_WEIGHTS, first, last)

    def close(self) -> None:
        """Close the piece."""
        self._piece.close()

    def _from(self, array: int, first: int, last: int) -> Array:
        """Return the ends of items [first, last), with the end of the item before them in front."""
        ends = self._piece.read(array, max(first - 1, 0), last)
        return ends if first else np.concatenate([np.zeros(1, ends.dtype), ends])
