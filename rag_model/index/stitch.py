"""Stitching: what the cells' graphs say of a block of rows, as candidates for their bottom lists."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from rag_model.errors import InputError
from rag_model.index.crossings import IN, OUT, Crossings
from rag_model.index.engine import Rows
from rag_model.index.graph import NO_LINK, Keys, Links, links_of
from rag_model.index.pieces import Opener, Piece, stamp_of, write_piece
from rag_model.index.recipe import IndexPlan

_LISTS, _OUT, _BEGINS, _INTO = range(4)  # the arrays of a shard
_NEARNESS = np.uint64(0xFFFF_FFFF_0000_0000)  # the half of a key that is no node


def write_shard(plan: IndexPlan, trained: Path, number: int, lists: Keys, crossings: Crossings, out: Path) -> None:
    """Write a cell's shard: `lists` (m, 2M) of its members, numbered within the cell, and its crossings.

    Raises:
        ResourceError: the file cannot be written.
    """
    arrays = [lists, crossings.out, crossings.begins, crossings.into]
    write_piece(out, stamp_of(plan, trained, "shard", number), arrays)


@dataclass(frozen=True, slots=True)
class Shard:
    """A cell's graph, open for reading, and the rows that its numbers stand for."""

    piece: Piece
    members: Links  # (m,) global rows, ascending
    sources: Links  # (s,) global rows of the vectors linked into the cell, ascending

    @classmethod
    def open(
        cls, plan: IndexPlan, trained: Path, opener: Opener, number: int, members: Links, sources: Links
    ) -> "Shard":
        """Open shard `number`.

        Raises:
            InputError: it is missing, truncated, of another build, or of other rows.
        """
        name = f"shard {number} of {plan.factory}"
        piece = Piece.open(opener, stamp_of(plan, trained, "shard", number), 4, name)
        if (piece.rows(_LISTS), piece.rows(_OUT)) != (len(members), len(sources)):
            piece.close()
            raise InputError(f"{name} is of other vectors than were scattered: build it again")
        return cls(piece, members, sources)

    def put(self, block: "Block") -> None:
        """Add to a block what this cell says of its rows."""
        low, high = np.searchsorted(self.members, (block.first, block.last))
        if low < high:
            rows = self.members[low:high] - block.first
            lists = self.piece.read(_LISTS, low, high)
            block.add(rows, _named(lists, self.members))
            begins = self.piece.read(_BEGINS, low, high + 1)
            into = self.piece.read(_INTO, int(begins[0]), int(begins[-1]))
            block.add_ragged(rows, _named(into, self.sources), np.diff(begins))
        low, high = np.searchsorted(self.sources, (block.first, block.last))
        if low < high:
            out = self.piece.read(_OUT, low, high)
            block.add(self.sources[low:high] - block.first, _named(out, self.members))


class Block:
    """The candidates of rows [first, last): filled by shards, each row from the left."""

    def __init__(self, first: int, last: int, width: int) -> None:
        """Make room: a row is in one or two cells' lists of `width`, or in one and linked into another."""
        self.first, self.last = first, last
        self.keys: Keys = np.full((last - first, width + max(width, OUT) + 2 * IN), NO_LINK)
        self._filled: Rows = np.zeros(last - first, np.int64)

    def add(self, rows: npt.NDArray[np.integer], keys: Keys) -> None:
        """Add (r, w) keys to rows, numbered from the block's first."""
        self.keys[rows[:, None], self._filled[rows][:, None] + np.arange(keys.shape[1])] = keys
        self._filled[rows] += keys.shape[1]

    def add_ragged(self, rows: npt.NDArray[np.integer], keys: Keys, counts: Rows) -> None:
        """Add keys that stand end to end, `counts` of them to each row."""
        before = np.cumsum(counts) - counts
        column = np.repeat(self._filled[rows] - before, counts) + np.arange(len(keys))
        self.keys[np.repeat(rows, counts), column] = keys
        self._filled[rows] += counts


def candidates(shards: Sequence[Shard], first: int, last: int, width: int) -> Keys:
    """Return (last - first, c) keys of global rows: all that the shards say of rows [first, last)."""
    block = Block(first, last, width)
    for shard in shards:
        shard.put(block)
    return block.keys


def _named(keys: Keys, rows: Links) -> Keys:
    """Replace a cell's numbers by global rows."""
    if not keys.size:
        return keys
    named = (keys & _NEARNESS) | rows[np.maximum(links_of(keys), 0)].astype(np.uint64)
    return np.where(keys == NO_LINK, NO_LINK, named)
