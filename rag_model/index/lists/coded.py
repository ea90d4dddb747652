"""The codes of one part, sorted by list, so that the merge reads only its slice of every part.

Within a list rows ascend, so reading the parts in order gives a list's rows in order.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from rag_model.errors import InputError
from rag_model.index.files.engine import Rows
from rag_model.index.files.pieces import Opener, Piece, stamp_of, write_piece
from rag_model.index.recipe import VectorPlan

Codes = npt.NDArray[np.uint8]  # (m, bytes per code)
ListNumbers = npt.NDArray[np.uint32]
_LISTS, _ENTRIES, _COUNT = range(3)  # the arrays of a piece: the list of each vector; its row in the part and its code


def write_coded(plan: VectorPlan, trained: Path, number: int, lists: Rows, codes: Codes, out: Path) -> None:
    """Sort a part's codes by list and write them.

    Args:
        plan: of the index.
        trained: what `train` wrote.
        number: of the part.
        lists: (rows,) int64, the list of each row.
        codes: (rows, bytes per code).
        out: the piece.

    Raises:
        ResourceError: the file cannot be written.
    """
    order = np.argsort(lists, kind="stable")  # (rows,)
    entries = np.empty(len(lists), _entry(codes.shape[1]))
    entries["row"], entries["code"] = order, codes[order]
    write_piece(out, _stamp(plan, trained, number), [lists[order].astype("<u4"), entries])


def read_coded(
    plan: VectorPlan, trained: Path, opener: Opener, number: int, rows: int, size: int
) -> tuple[Rows, Codes]:
    """Return what `write_coded` was given for a part of `rows` rows: the list and the code, of `size` bytes, of each.

    Raises:
        InputError: the piece is missing, damaged, of another build, or holds other rows or codes.
    """
    with Piece.open(opener, _stamp(plan, trained, number), _COUNT, _name(number)) as piece:
        in_order, entries = piece.read(_LISTS), piece.read(_ENTRIES)
    whole = len(in_order) == len(entries) == rows and entries.dtype == np.dtype(_entry(size))
    if not whole or not (np.sort(entries["row"]) == np.arange(rows)).all():
        raise InputError(f"{_name(number)} does not hold each of the part's {rows} rows once: build it again")
    lists, codes = np.empty(rows, np.int64), np.empty_like(entries["code"])
    lists[entries["row"]], codes[entries["row"]] = in_order, entries["code"]
    return lists, codes


@dataclass(frozen=True, slots=True)
class Coded:
    """The pieces of all parts, in order, opened one after the other: there may be more than the limit of open files."""

    plan: VectorPlan
    trained: Path
    openers: Sequence[Opener]
    starts: Sequence[int]  # the first row of each part, then the total number of rows

    def sizes(self, lists: int) -> Rows:
        """Return (lists,) int64: the number of vectors of each list in all parts.

        Raises:
            InputError: a piece is missing, truncated, of another build, or holds another number of rows than its part.
        """
        sizes = np.zeros(lists, np.int64)
        for number, piece in self._pieces():
            held, rows = piece.rows(_LISTS), self.starts[number + 1] - self.starts[number]
            if held != rows:
                raise InputError(f"{_name(number)} holds {held} vectors and the part has {rows}: build it again")
            sizes += np.bincount(piece.read(_LISTS), minlength=lists)
        return sizes

    def cuts(self, borders: Rows) -> Rows:
        """Return (parts, len(borders)) int64: the position in each piece where the list at each border begins."""
        # parts times (borders,) -> (parts, borders)
        return np.stack([np.searchsorted(piece.read(_LISTS), borders) for _, piece in self._pieces()])

    def block(self, cuts: Rows, width: int) -> tuple[ListNumbers, Rows, Codes]:
        """Return all that `slices` yields between two cuts, (parts, 2), in one array each; a code has `width` bytes."""
        count, first = int((cuts[:, 1] - cuts[:, 0]).sum()), 0
        lists, rows, codes = np.empty(count, np.uint32), np.empty(count, np.int64), np.empty((count, width), np.uint8)
        for part_lists, part_rows, part_codes in self.slices(cuts, max(1, count)):
            here = slice(first, first + len(part_lists))
            lists[here], rows[here], codes[here] = part_lists, part_rows, part_codes
            first = here.stop
        return lists, rows, codes

    def slices(self, cuts: Rows, rows: int) -> Iterator[tuple[ListNumbers, Rows, Codes]]:
        """Yield (lists, rows in the corpus, codes) between two cuts, (parts, 2), at most `rows` vectors at once."""
        for number, piece in self._pieces(np.flatnonzero(cuts[:, 1] > cuts[:, 0]).tolist()):
            low, high = cuts[number].tolist()
            for first in range(low, high, rows):
                last = min(high, first + rows)
                entries = piece.read(_ENTRIES, first, last)
                ids = entries["row"].astype(np.int64) + self.starts[number]
                yield piece.read(_LISTS, first, last), ids, entries["code"]

    def _pieces(self, numbers: Sequence[int] | None = None) -> Iterator[tuple[int, Piece]]:
        for number in range(len(self.openers)) if numbers is None else numbers:
            stamp = _stamp(self.plan, self.trained, number)
            with Piece.open(self.openers[number], stamp, _COUNT, _name(number)) as piece:
                yield number, piece


def _stamp(plan: VectorPlan, trained: Path, number: int) -> str:
    return stamp_of(plan, trained, "scattered", number)


def _name(number: int) -> str:
    return f"the scattered piece of part {number}"


def _entry(size: int) -> npt.DTypeLike:
    return [("row", "<u4"), ("code", "u1", (size,))]
