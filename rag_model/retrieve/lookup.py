"""Find a passage by its id, which unlike its row stays the same in all snapshots."""

from collections.abc import Callable
from dataclasses import dataclass

import pyarrow.compute as pc

from rag_model.corpus.documents import place_of
from rag_model.corpus.records import Passage
from rag_model.errors import NotFoundError
from rag_model.store.versions.manifest import PartEntry
from rag_model.store.versions.snapshot import Snapshot

_LONGEST = 20  # digits of a page id; what has more is none
_SHOWN = 80  # characters of an id that are repeated


@dataclass(frozen=True, slots=True)
class Located:
    """A passage, and those beside it on its page, for who wants to read on."""

    row: int  # global row
    passage: Passage
    previous: str | None  # id; None: it is the first of its page
    next: str | None  # id; None: it is the last of its page


def locate(snapshot: Snapshot, identity: str) -> Located:
    """Return the passage with an id.

    Ids are read in the part that the page or document belongs to; of an imported snapshot in all parts.

    Raises:
        NotFoundError: the snapshot has no such passage.
        StoreError: a passage file is missing or damaged.
    """
    row = _row(snapshot, identity) if _is_text(identity) else None
    if row is None:
        raise NotFoundError(
            f"snapshot {snapshot.id[:12]} has no passage {identity[:_SHOWN]!r}: give an id that a search of it gave"
        )
    rows = [near for near in (row - 1, row, row + 1) if 0 <= near < snapshot.n]
    near = dict(zip(rows, snapshot.passages(rows), strict=True))
    page = near[row].page_id
    before, after = (one.id if (one := near.get(row + step)) and one.page_id == page else None for step in (-1, 1))
    return Located(row, near[row], before, after)


def _is_text(identity: str) -> bool:
    """Return whether an id is UTF-8 text: half of a character is not, and no passage has it."""
    try:
        identity.encode()
    except UnicodeEncodeError:
        return False
    return True


def _row(snapshot: Snapshot, identity: str) -> int | None:
    row, belongs = 0, _belongs(snapshot, identity)
    for part in snapshot.parts:
        found = _place(snapshot, part.name, identity) if belongs(part) else None
        if found is not None:
            return row + found
        row += part.rows
    return None


def _place(snapshot: Snapshot, part: str, identity: str) -> int | None:
    row = 0
    for batch in snapshot.batches(part, ["id"]):
        found = int(pc.index(batch["id"], identity).as_py())
        if found >= 0:
            return row + found
        row += batch.num_rows
    return None


def _belongs(snapshot: Snapshot, identity: str) -> Callable[[PartEntry], bool]:
    """Return whether a part may hold a passage, by the range that the parts of this kind of source have."""
    kind, (page, colon, _) = snapshot.manifest.content.corpus.get("kind"), identity.rpartition(":")
    if kind == "wiki" and colon and page.isdecimal() and len(page) < _LONGEST:
        place = int(page)
    elif kind == "documents" and colon:
        place = place_of(page)
    elif kind == "passages":
        place = place_of(identity)
    else:
        return lambda part: True
    return lambda part: part.first_page <= place <= part.last_page
