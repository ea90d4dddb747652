"""Takedowns: which pages must be in no snapshot, and which snapshots replace those that contained one.

```
takedowns/00000003.json      one takedown: the wiki, the pages, who ordered it, when and why
takedowns/<snapshot id>.json the replacement of a snapshot that was retired
```
Both are created exclusively and kept for good: `gc` and `expire` do not delete them. Once the record is written, no
build puts such a page into a passage, and no snapshot that contains one can be published. A ref's move that names a
retired snapshot is read as its replacement. The id of a retired snapshot is not resolved: the error names the
replacement.
"""

import re
import secrets
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import Any

from rag_model.errors import StoreError, UsageError
from rag_model.store.objects.files import Files, json_bytes
from rag_model.terminal import check_printable

FOLDER = "takedowns"
_FORMAT = 1
_RECORD = re.compile(r"(\d{8})\.json")
_PLACE = re.compile(r"([0-9a-f]{64})\.json")
_SNAPSHOT = re.compile(r"[0-9a-f]{64}")
_LAST = 99_999_999  # what a file's eight digits can name


@dataclass(frozen=True, slots=True)
class Takedown:
    """One record: pages that must be in no snapshot of a wiki."""

    number: int  # 1, 2, 3, …
    wiki: str  # the dump's dbname, since page ids are per wiki; empty for documents and passages
    pages: tuple[str, ...]  # page ids as in passages; titles for ready-made passages
    reason: str
    by: str  # who ordered it
    created_at: str  # ISO 8601, UTC, by the writer's clock: for people only
    nonce: str  # tells a retried write from another writer's


class Takedowns:
    """The takedowns of one store."""

    def __init__(self, files: Files) -> None:
        """Read the takedowns of the store at the URL of `files`."""
        self._files = files

    def records(self) -> list[Takedown]:
        """Return all records, oldest first.

        Raises:
            StoreError: a record is damaged or of a newer format, so its pages are unknown.
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
            StoreError: the store cannot be written, or its numbers are used up.
            UsageError: a text holds a control character, or a page half of a character.
        """
        for text, what in ((wiki, "the wiki"), (reason, "the reason"), (by, "who ordered it")):
            check_printable(text, what)
        pages = tuple(pages)  # any characters that a title has
        if any("\ud800" <= one <= "\udfff" for page in pages for one in page):
            raise UsageError("a page's id holds half of a character: give it as UTF-8")
        now = datetime.now(UTC).isoformat(timespec="seconds")
        while True:
            number = max(self._numbers(), default=0) + 1
            if number > _LAST:
                raise StoreError(
                    f"{self._files.url_of(_path(str(_LAST)))} is the last takedown that can be written: bookwheel did "
                    "not write it, so look at it and delete it"
                )
            record = Takedown(number, wiki, tuple(sorted({*pages})), reason, by, now, secrets.token_hex(16))
            if self._files.create(_path(f"{number:08d}"), json_bytes({"format": _FORMAT, **asdict(record)})):
                return record

    def replaced(self) -> frozenset[str]:
        """Return the ids of the snapshots that were replaced, by another one or by nothing."""
        names = self._files.names(FOLDER)
        return frozenset(found[1] for found in map(_PLACE.fullmatch, names) if found)

    def in_place_of(self, snapshot: str) -> str | None:
        """Return the id of a snapshot's replacement; "" if there is none, since all its pages were taken down.

        None for a snapshot that was not replaced. If the replacement was replaced too, the last one is returned.

        Raises:
            StoreError: a record is damaged or of a newer format, or records replace one another in a circle.
        """
        place, seen = self._place(snapshot), {snapshot}
        while place and (later := self._place(place)) is not None:
            if place in seen:
                raise self._damaged(_path(place))
            seen.add(place)
            place = later
        return place

    def replace(self, snapshot: str, by: str) -> None:
        """Record the replacement `by` of a snapshot ("": none); an earlier record of the snapshot is kept.

        Raises:
            StoreError: the store cannot be written.
        """
        value = {"format": _FORMAT, "snapshot": snapshot, "by": by, "nonce": secrets.token_hex(16)}
        self._files.create(_path(snapshot), json_bytes(value))

    def _numbers(self) -> list[int]:
        return sorted(int(found[1]) for found in map(_RECORD.fullmatch, self._files.names(FOLDER)) if found)

    def _record(self, number: int) -> Takedown:
        path = _path(f"{number:08d}")
        fields = self._read(path) or {}
        pages = fields.pop("pages", None)
        texts = [value for name, value in fields.items() if name != "number"]
        if not isinstance(pages, list) or not all(isinstance(text, str) for text in [*pages, *texts]):
            raise self._damaged(path)
        try:
            record = Takedown(pages=tuple(pages), **fields)
        except TypeError as broken:
            raise self._damaged(path) from broken
        if type(record.number) is not int or record.number != number:
            raise self._damaged(path)
        return record

    def _place(self, snapshot: str) -> str | None:
        value = self._read(_path(snapshot))
        if value is None:
            return None
        by = value.get("by")
        if not isinstance(by, str) or (by and not _SNAPSHOT.fullmatch(by)) or value.get("snapshot") != snapshot:
            raise self._damaged(_path(snapshot))
        return by

    def _read(self, path: str) -> dict[str, Any] | None:
        value = self._files.read_json(path)
        if value is not None and value.pop("format", None) != _FORMAT:
            raise StoreError(f"{self._files.url_of(path)} is of another format: upgrade bookwheel")
        return value

    def _damaged(self, path: str) -> StoreError:
        return StoreError(f"{self._files.url_of(path)} is damaged: restore it from a copy of the store")


def _path(name: str) -> str:
    return f"{FOLDER}/{name}.json"
