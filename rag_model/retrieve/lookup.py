"""Look up a passage by its id, which unlike its row stays the same in all snapshots."""

from collections.abc import Callable
from dataclasses import dataclass

import pyarrow.compute as pc

from rag_model.corpus.records import Passage, hash_id
from rag_model.errors import NotFoundError
from rag_model.store.versions.manifest import PartEntry
from rag_model.store.versions.snapshot import Snapshot

_MAX_PAGE_DIGITS = 20  # a longer number is not a page id
_MAX_QUOTED = 80  # characters of an id that an error message repeats


@dataclass(frozen=True, slots=True)
class LocatedPassage:
    """A passage with the ids of its neighbours on the page, so that a reader can go on from it."""

    row: int  # global row
    passage: Passage
    previous: str | None  # id; None: the passage is the first of its page
    next: str | None  # id; None: the passage is the last of its page


def locate_passage(snapshot: Snapshot, passage_id: str) -> LocatedPassage:
    """Return the passage with an id.

    The ids of a part are read only if the part may hold the page or document. Imported snapshots
    are not sorted by id, so all of their parts are read.

    Raises:
        NotFoundError: the snapshot has no such passage.
        StoreError: a passage file is missing or damaged.
    """
    row = _find_row(snapshot, passage_id) if _is_text(passage_id) else None
    if row is None:
        raise NotFoundError(
            f"snapshot {snapshot.id[:12]} has no passage {passage_id[:_MAX_QUOTED]!r}: use an id "
            "from a search of this snapshot"
        )
    rows = [near_row for near_row in (row - 1, row, row + 1) if 0 <= near_row < snapshot.n]
    neighbours = dict(zip(rows, snapshot.passages(rows), strict=True))
    page = neighbours[row].page_id
    previous_id, next_id = (
        neighbour.id if (neighbour := neighbours.get(row + step)) and neighbour.page_id == page else None
        for step in (-1, 1)
    )
    return LocatedPassage(row, neighbours[row], previous_id, next_id)


def _is_text(passage_id: str) -> bool:
    """Whether an id can be encoded as UTF-8; an id with a lone surrogate belongs to no passage."""
    try:
        passage_id.encode()
    except UnicodeEncodeError:
        return False
    return True


def _find_row(snapshot: Snapshot, passage_id: str) -> int | None:
    row, may_hold = 0, _part_filter(snapshot, passage_id)
    for part in snapshot.parts:
        part_row = _find_row_in_part(snapshot, part.name, passage_id) if may_hold(part) else None
        if part_row is not None:
            return row + part_row
        row += part.rows
    return None


def _find_row_in_part(snapshot: Snapshot, part: str, passage_id: str) -> int | None:
    row = 0
    for batch in snapshot.batches(part, ["id"]):
        position = int(pc.index(batch["id"], passage_id).as_py())
        if position >= 0:
            return row + position
        row += batch.num_rows
    return None


def _part_filter(snapshot: Snapshot, passage_id: str) -> Callable[[PartEntry], bool]:
    """Return a predicate: whether a part may hold the passage, by its range of page numbers or
    hashed ids.
    """
    kind, (page, colon, _) = snapshot.manifest.content.corpus.get("kind"), passage_id.rpartition(":")
    if kind == "wiki" and colon and page.isdecimal() and len(page) < _MAX_PAGE_DIGITS:
        page_number = int(page)
    elif kind == "documents" and colon:
        page_number = hash_id(page)
    elif kind == "passages":
        page_number = hash_id(passage_id)
    else:
        return lambda part: True
    return lambda part: part.first_page <= page_number <= part.last_page
