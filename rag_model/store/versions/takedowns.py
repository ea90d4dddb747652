"""Takedowns: which pages must be in no snapshot, and what took the place of the snapshots that held one.

```
takedowns/00000003.json      one takedown: the pages, of which wiki, who, when and why
takedowns/<snapshot id>.json what stands in the place of a snapshot that is gone
```
Both are created exclusively, and kept for good: `gc` and `expire` leave them alone. From the record on no build lets a
page into a passage and no publication gets past it. A ref's move that names a snapshot which is gone means what stands
in its place; the snapshot's own id means nothing else, so whoever asks by id is told the other's.
"""

import re
import secrets
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import Any

from rag_model.errors import StoreError
from rag_model.store.objects.files import Files, json_bytes

FOLDER = "takedowns"
_FORMAT = 1
_RECORD = re.compile(r"(\d{8})\.json")
_PLACE = re.compile(r"([0-9a-f]{64})\.json")


@dataclass(frozen=True, slots=True)
class Takedown:
    """One record: pages that must be in no snapshot of a wiki."""

    number: int  # 1, 2, 3, …
    wiki: str  # the dump's dbname, since ids mean nothing in another wiki; empty for documents and passages
    pages: tuple[str, ...]  # page ids as passages have them; of ready passages their titles
    reason: str
    by: str  # who ordered it
    created_at: str  # ISO 8601, UTC, by the writer's clock: for people only
    nonce: str  # tells a retried write from another writer's


class Takedowns:
    """The takedowns of one store."""

    def __init__(self, files: Files) -> None:
        """Look at the takedowns of the store that `files` reaches."""
        self._files = files

    def records(self) -> list[Takedown]:
        """Return all records, oldest first.

        Raises:
            StoreError: one is damaged or of a newer format: what it forbids cannot be known.
        """
        numbers = self._numbers()
        return [self._record(number) for number in numbers]

    def pages(self, wiki: str) -> frozenset[str]:
        """Return the ids of all pages of a wiki that were taken down.

        Raises:
            StoreError: as `records`.
        """
        return frozenset(page for record in self.records() if record.wiki == wiki for page in record.pages)

    def add(self, wiki: str, pages: Iterable[str], reason: str, by: str) -> Takedown:
        """Write the next record.

        Raises:
            StoreError: the store cannot be written.
        """
        now = datetime.now(UTC).isoformat(timespec="seconds")
        while True:
            number = max(self._numbers(), default=0) + 1
            record = Takedown(number, wiki, tuple(sorted({*pages})), reason, by, now, secrets.token_hex(16))
            if self._files.create(_path(f"{number:08d}"), json_bytes({"format": _FORMAT, **asdict(record)})):
                return record

    def replaced(self) -> frozenset[str]:
        """Return the ids of the snapshots in whose place another stands, or nothing."""
        names = self._files.names(FOLDER)
        return frozenset(found[1] for found in map(_PLACE.fullmatch, names) if found)

    def in_place_of(self, snapshot: str) -> str | None:
        """Return what stands in the place of a snapshot: an id; "" for nothing, as all of it was taken down.

        None for a snapshot that was not replaced. Another that was replaced in its turn is followed to the last.

        Raises:
            StoreError: a file is damaged or of a newer format.
        """
        place = self._place(snapshot)
        while place and (later := self._place(place)) is not None:
            place = later
        return place

    def replace(self, snapshot: str, by: str) -> None:
        """Write down what stands in the place of a snapshot ("": nothing); what was written before stands.

        Raises:
            StoreError: the store cannot be written.
        """
        value = {"format": _FORMAT, "snapshot": snapshot, "by": by, "nonce": secrets.token_hex(16)}
        self._files.create(_path(snapshot), json_bytes(value))

    def _numbers(self) -> list[int]:
        return sorted(int(found[1]) for found in map(_RECORD.fullmatch, self._files.names(FOLDER)) if found)

    def _record(self, number: int) -> Takedown:
        fields = self._read(_path(f"{number:08d}")) or {}
        try:
            return Takedown(**{**fields, "pages": tuple(map(str, fields["pages"]))})
        except (KeyError, TypeError) as broken:
            raise self._damaged(_path(f"{number:08d}")) from broken

    def _place(self, snapshot: str) -> str | None:
        value = self._read(_path(snapshot))
        if value is None:
            return None
        if not isinstance(value.get("by"), str) or value.get("snapshot") != snapshot:
            raise self._damaged(_path(snapshot))
        return str(value["by"])

    def _read(self, path: str) -> dict[str, Any] | None:
        value = self._files.read_json(path)
        if value is not None and value.pop("format", None) != _FORMAT:
            raise StoreError(f"{self._files.url_of(path)} is of another format: upgrade bookwheel")
        return value

    def _damaged(self, path: str) -> StoreError:
        return StoreError(f"{self._files.url_of(path)} is damaged: restore it from a copy of the store")


def _path(name: str) -> str:
    return f"{FOLDER}/{name}.json"
