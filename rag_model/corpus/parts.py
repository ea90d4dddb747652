"""Parts: ranges of page ids of about equal weight, and the slices that each has to read.

The start of a part depends on the dump and on the parent snapshot, never on the machine, because row order, and
with it the snapshot id, depends on it. A later build keeps the parent's ranges, so that an article stays in its part
from dump to dump and a part without a changed article stays the same file. New pages fill the last part, and
then new parts.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from rag_model.corpus.records import Part, Slice, SourceKind

SMALLEST, LARGEST = 256 << 10, 32 << 20  # compressed bytes of a part, unless set otherwise
PARTS = 16  # the number of parts of a dump whose parts are between those sizes


@dataclass(frozen=True, slots=True)
class Piece:
    """The smallest unit that can be read on its own: one stream of a dump."""

    slice: Slice
    weight: int  # compressed bytes, or an estimate of them that is the same on every machine
    ordered: bool  # page ids strictly increase inside


@dataclass(frozen=True, slots=True)
class Fences:
    """The first pages of the parts of an earlier snapshot, and the end of its last part."""

    kind: SourceKind
    dbname: str  # page ids are per wiki
    starts: tuple[int, ...]  # first page of each part, ascending; the first is 0
    end: int  # the page after the last


def part_weight(total: int) -> int:
    """Return the weight that a part of a dump of `total` compressed bytes should have."""
    return min(max(total // PARTS, SMALLEST), LARGEST)


def boundaries(pieces: Sequence[Piece], target: int | None = None, fences: Fences | None = None) -> list[int]:
    """Return the first page id of each part; the first is 0. `pieces` are sorted by first page.

    With `fences` the earlier parts are kept, except that new pages fill the last one up to `target`.
    """
    total = sum(piece.weight for piece in pieces)
    weight = target or part_weight(total)
    if fences is not None:
        return _appended(pieces, weight, fences)
    count = max(1, round(total / weight))
    starts, done = [0], 0
    for piece in pieces:
        if done * count >= total * len(starts) and piece.slice.first_page > starts[-1]:
            starts.append(piece.slice.first_page)
        done += piece.weight
    return starts


def _appended(pieces: Sequence[Piece], weight: int, fences: Fences) -> list[int]:
    starts, held = list(fences.starts), 0
    for piece in pieces:
        first = piece.slice.first_page
        if first < starts[-1]:
            continue
        if first >= fences.end and first > starts[-1] and held >= weight:
            starts.append(first)
            held = 0
        held += piece.weight
    return starts


def assemble(kind: SourceKind, pieces: Sequence[Piece], starts: Sequence[int], last: int) -> tuple[Part, ...]:
    """Return the parts that begin at `starts` and cover the ids up to `last`, each with the slices it overlaps.

    `pieces` are sorted by first page; a start beyond `last` makes no part. Streams that follow each other in a file
    are joined to one slice.
    """
    starts = [start for start in starts if start <= last] or [0]
    ends = [start - 1 for start in starts[1:]] + [last]
    parts = []
    waiting, reaching = iter(pieces), list[Piece]()
    upcoming = next(waiting, None)
    for i, (start, end) in enumerate(zip(starts, ends, strict=True)):
        reaching = [piece for piece in reaching if piece.slice.last_page >= start]
        while upcoming is not None and upcoming.slice.first_page <= end:
            reaching.append(upcoming)
            upcoming = next(waiting, None)
        slices = tuple(_joined(piece.slice for piece in reaching))
        parts.append(Part(f"part-{i:05d}", kind, start, end, slices, in_order(reaching)))
    return tuple(parts)


def in_order(pieces: Sequence[Piece]) -> bool:
    """Return whether page ids strictly increase through all pieces, so that no id is repeated."""
    follows = (before.slice.last_page < after.slice.first_page for before, after in pairwise(pieces))
    return all(piece.ordered for piece in pieces) and all(follows)


def _joined(slices: Iterator[Slice]) -> Iterator[Slice]:
    run: Slice | None = None
    for piece in slices:
        if run is not None and _continues(run, piece):
            run = Slice(run.url, run.offset, run.length + piece.length, run.codec, run.first_page, piece.last_page)
            continue
        if run is not None:
            yield run
        run = piece
    if run is not None:
        yield run


def _continues(run: Slice, piece: Slice) -> bool:
    touches = run.url == piece.url and run.offset + run.length == piece.offset
    return touches and run.last_page < piece.first_page
