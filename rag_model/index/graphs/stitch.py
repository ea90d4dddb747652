"""Stitching: candidates from the cells' graphs for the bottom lists of a block of rows."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from rag_model.errors import InputError
from rag_model.index.files.engine import Rows
from rag_model.index.files.pieces import Opener, Piece, stamp_of, write_piece
from rag_model.index.graphs.crossings import Crossings
from rag_model.index.graphs.graph import NO_LINK, Keys, Links, links_of
from rag_model.index.recipe import VectorPlan

_LISTS, _OUT, _BEGINS, _INTO = range(4)  # the arrays of a shard
_NEARNESS = np.uint64(0xFFFF_FFFF_0000_0000)  # the half of a key that holds the similarity


def write_shard(plan: VectorPlan, trained: Path, number: int, lists: Keys, crossings: Crossings, out: Path) -> None:
    """Write a cell's shard: `lists`, (m, 2M) keys of its members, numbered within the cell, and its crossings.

    Raises:
        ResourceError: the file cannot be written.
    """
    arrays = [lists, crossings.out, crossings.begins, crossings.into]
    write_piece(out, stamp_of(plan, trained, "shard", number), arrays)


@dataclass(frozen=True, slots=True)
class Said:
    """Candidates for some rows of a block, from one cell."""

    rows: npt.NDArray[np.int32]  # (r,) distinct, relative to the block's first row
    counts: Rows  # (r,) number of candidates of each row
    keys: Keys  # (sum of counts,) end to end


@dataclass(frozen=True, slots=True)
class Shard:
    """A cell's graph, open for reading, and the global rows of its numbers."""

    piece: Piece
    members: Links  # (m,) global rows, ascending
    sources: Links  # (s,) global rows of the vectors linked into the cell, ascending

    @classmethod
    def open(
        cls, plan: VectorPlan, trained: Path, opener: Opener, number: int, members: Links, sources: Links
    ) -> "Shard":
        """Open shard `number`.

        Raises:
            InputError: it is missing, truncated, of another build, or of other rows.
        """
        name = f"shard {number} of {plan.factory}"
        piece = Piece.open(opener, stamp_of(plan, trained, "shard", number), 4, name)
        if (piece.rows(_LISTS), piece.rows(_OUT)) != (len(members), len(sources)):
            piece.close()
            raise InputError(f"{name} does not match the scattered vectors: build it again")
        return cls(piece, members, sources)

    def say(self, first: int, last: int) -> Iterator[Said]:
        """Yield this cell's candidates for rows [first, last): lists of its members, and links to other cells."""
        low, high = np.searchsorted(self.members, (first, last))
        if low < high:
            lists, rows = self.piece.read(_LISTS, low, high), self.members[low:high] - first  # (r, 2M), (r,)
            # (r, 2M) -> (r 2M,)
            yield Said(rows, np.full(len(rows), lists.shape[1]), _named(lists, self.members).ravel())
            begins = self.piece.read(_BEGINS, low, high + 1)
            into = self.piece.read(_INTO, int(begins[0]), int(begins[-1]))
            yield Said(rows, np.diff(begins), _named(into, self.sources))
        low, high = np.searchsorted(self.sources, (first, last))
        if low < high:
            out, rows = self.piece.read(_OUT, low, high), self.sources[low:high] - first  # (r, OUT), (r,)
            # (r, OUT) -> (r OUT,)
            yield Said(rows, np.full(len(rows), out.shape[1]), _named(out, self.members).ravel())


def candidates(shards: Sequence[Shard], first: int, last: int, width: int) -> Keys:
    """Return (last - first, c >= width) keys of global rows: all candidates of the shards for rows [first, last)."""
    said = [part for shard in shards for part in shard.say(first, last)]
    filled = np.zeros(last - first, np.int64)
    for part in said:
        filled[part.rows] += part.counts
    keys: Keys = np.full((last - first, max(width, int(filled.max(initial=0)))), NO_LINK)
    filled[:] = 0
    for part in said:
        before = np.cumsum(part.counts) - part.counts
        # (r,) -> (sum of counts,)
        column = np.repeat(filled[part.rows] - before, part.counts) + np.arange(len(part.keys))
        keys[np.repeat(part.rows, part.counts), column] = part.keys
        filled[part.rows] += part.counts
    return keys


def _named(keys: Keys, rows: Links) -> Keys:
    """Replace a cell's numbers by global rows."""
    if not keys.size:
        return keys
    named = (keys & _NEARNESS) | rows[np.maximum(links_of(keys), 0)].astype(np.uint64)
    return np.where(keys == NO_LINK, NO_LINK, named)
