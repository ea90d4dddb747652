"""Takedowns: pages that no snapshot may contain, and the replacements of snapshots that contained
them.

```
takedowns/00000003.json      one takedown: the wiki, the pages, who ordered it, when and why
takedowns/<snapshot id>.json the replacement of a retired snapshot
```
Both kinds of files are created exclusively and kept forever: `gc` and `expire` do not delete them.
If the environment has a signing key, both are signed. If a trust file is given, a replacement is
valid only if a key of the file signed it, because readers delete replaced snapshots. A takedown
without such a signature still keeps its pages out of new builds, but does not remove them from
published snapshots.

After a takedown is recorded, no build writes passages of its pages, and no snapshot that contains
one of them can be published. A ref's move to a retired snapshot is read as a move to its
replacement. The id of a retired snapshot is not resolved: the error names the replacement.
"""

import logging
import re
import secrets
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import Any

from rag_model.errors import RefusedError, StoreError, UsageError
from rag_model.store.objects.files import Files
from rag_model.store.versions.checks import FULL_ID
from rag_model.store.versions.signatures import Signatures, TrustedKeys
from rag_model.untrusted_text import check_printable

_LOG = logging.getLogger(__name__)
_reported_urls: set[str] = set()  # URLs of unsigned files that this process has reported
FOLDER = "takedowns"
_FORMAT = 1
_REPLACEMENT_FILE = re.compile(r"([0-9a-f]{64})\.json")
_MAX_NUMBER = 99_999_999  # highest number of a record: the file names have eight digits


@dataclass(frozen=True, slots=True)
class Takedown:
    """The record of a takedown: pages of a wiki that no snapshot may contain."""

    number: int  # record number: 1, 2, 3, …
    wiki: str  # dbname of the wiki with these page ids; empty for documents and passages
    pages: tuple[str, ...]  # page ids, or for a dump of ready-made passages the titles
    reason: str
    by: str  # name of the person who ordered it
    created_at: str  # ISO 8601, UTC, by the writer's clock; only shown to people
    nonce: str  # distinguishes a retried write from another writer's record


class Takedowns:
    """The takedowns of one store."""

    def __init__(self, files: Files) -> None:
        """Use the takedowns of the store at the URL of `files`."""
        self._files = files
        self._trusted_paths: set[str] = set()  # paths of files that a key of the trust file signed

    def list_records(self) -> list[Takedown]:
        """Return all records, oldest first.

        Raises:
            StoreError: a record is damaged or of a newer format, so its pages are unknown.
        """
        record_numbers = self._files.list_numbers(FOLDER)
        return [self._read_record(number) for number in record_numbers]

    def list_pages(self, wiki: str, *, trusted_only: bool = False) -> frozenset[str]:
        """Return the ids of all pages of a wiki that were taken down.

        With `trusted_only` and a trust file, only records that a key of the file signed are used.

        Raises:
            StoreError: for the same reasons as `list_records`.
        """
        return frozenset(
            page
            for record in self.list_records()
            if record.wiki == wiki and (not trusted_only or self._is_trusted(_get_record_path(f"{record.number:08d}")))
            for page in record.pages
        )

    def add(self, wiki: str, page_ids: Iterable[str], reason: str, by: str) -> Takedown:
        """Write the next record, signed if the environment has a key.

        `by` is the name of the person who ordered the takedown.

        Raises:
            RefusedError: a trust file is given, and the environment has no private key for one of
                its keys.
            StoreError: the store cannot be written, or all record numbers are used.
            UsageError: a text contains a control character, or a page a lone surrogate.
        """
        for text, field_name in ((wiki, "the wiki"), (reason, "the reason"), (by, "who ordered it")):
            check_printable(text, field_name)
        page_ids = tuple(page_ids)  # a title may contain any character
        if any("\ud800" <= character <= "\udfff" for page in page_ids for character in page):
            raise UsageError("a page's id contains a lone surrogate, which is not valid Unicode: give it as UTF-8")
        if trusted_keys := TrustedKeys.from_environment():
            trusted_keys.require_signing_key("takedown")
        created_at = datetime.now(UTC).isoformat(timespec="seconds")
        while True:
            number = max(self._files.list_numbers(FOLDER), default=0) + 1
            if number > _MAX_NUMBER:
                raise StoreError(
                    f"{self._files.url_of(_get_record_path(str(_MAX_NUMBER)))} is the last "
                    "takedown that can be written: bookwheel did not write it, so inspect it and "
                    "delete it"
                )
            record = Takedown(number, wiki, tuple(sorted({*page_ids})), reason, by, created_at, secrets.token_hex(16))
            record_fields = {"format": _FORMAT, **asdict(record)}
            if Signatures(self._files).create_signed(_get_record_path(f"{number:08d}"), record_fields):
                return record

    def list_replaced(self) -> frozenset[str]:
        """Return the ids of the retired snapshots, with or without a replacement.

        With a trust file, a snapshot is returned only if a key of the file signed its replacement.
        """
        file_names = self._files.list_names(FOLDER)
        replaced_ids = (match[1] for match in map(_REPLACEMENT_FILE.fullmatch, file_names) if match)
        return frozenset(snapshot for snapshot in replaced_ids if self._is_trusted(_get_record_path(snapshot)))

    def find_replacement(self, snapshot: str) -> str | None:
        """Return the id of a snapshot's replacement; None for a snapshot that was not replaced.

        "" means that all pages of the snapshot were taken down. If the replacement was also
        replaced, the last replacement is returned. With a trust file, a replacement that no key of
        the file signed is ignored.

        Raises:
            StoreError: a record is damaged or of a newer format, or the replacements form a circle.
        """
        replacement, visited_ids = self._read_replacement(snapshot), {snapshot}
        while replacement and (next_replacement := self._read_replacement(replacement)) is not None:
            if replacement in visited_ids:
                raise self._build_damaged_error(_get_record_path(replacement))
            visited_ids.add(replacement)
            replacement = next_replacement
        return replacement

    def record_replacement(self, snapshot: str, replacement: str) -> None:
        """Record that `replacement` replaces `snapshot`; "" if no snapshot replaces it. An existing
        record is kept.

        Raises:
            StoreError: the store cannot be written.
            RefusedError: a trust file is given, and no key in it signed the existing record, or the
                environment has no private key for one of its keys to sign a new record.
        """
        path = _get_record_path(snapshot)
        if self._files.find(path) is None:
            if trusted_keys := TrustedKeys.from_environment():
                trusted_keys.require_signing_key("takedown")
            replacement_fields = {
                "format": _FORMAT,
                "snapshot": snapshot,
                "by": replacement,
                "nonce": secrets.token_hex(16),
            }
            Signatures(self._files).create_signed(path, replacement_fields)
        if not self._is_trusted(path):
            raise RefusedError(
                f"{self._files.url_of(path)} says that the snapshot was replaced, but no key of "
                "the trust file signed it: inspect this file, delete it, and run the takedown again"
            )

    def _is_trusted(self, path: str) -> bool:
        """Return whether a key of the trust file signed a file; return True without a trust file.

        A warning about an unsigned file is logged once.
        """
        trusted_keys = TrustedKeys.from_environment()
        if trusted_keys is None or path in self._trusted_paths:
            return True
        if trusted_keys.find_signer(Signatures(self._files), path, self._files.read_json(path)) is not None:
            self._trusted_paths.add(path)
            return True
        url = self._files.url_of(path)
        if url not in _reported_urls:
            _reported_urls.add(url)
            _LOG.warning(
                "takedown %s is ignored, because no key of %s signed it: run the takedown again "
                "with such a key, or delete the takedown's file if a stranger wrote it",
                url,
                trusted_keys.source,
            )
        return False

    def _read_record(self, number: int) -> Takedown:
        path = _get_record_path(f"{number:08d}")
        fields = self._read(path) or {}
        pages = fields.pop("pages", None)
        field_texts = [field_text for name, field_text in fields.items() if name != "number"]
        if not isinstance(pages, list) or not all(isinstance(text, str) for text in [*pages, *field_texts]):
            raise self._build_damaged_error(path)
        try:
            record = Takedown(pages=tuple(pages), **fields)
        except TypeError as error:
            raise self._build_damaged_error(path) from error
        if type(record.number) is not int or record.number != number:
            raise self._build_damaged_error(path)
        return record

    def _read_replacement(self, snapshot: str) -> str | None:
        record_fields = self._read(_get_record_path(snapshot))
        if record_fields is None or not self._is_trusted(_get_record_path(snapshot)):
            return None
        replacement = record_fields.get("by")
        if (
            not isinstance(replacement, str)
            or (replacement and not FULL_ID.fullmatch(replacement))
            or record_fields.get("snapshot") != snapshot
        ):
            raise self._build_damaged_error(_get_record_path(snapshot))
        return replacement

    def _read(self, path: str) -> dict[str, Any] | None:
        record_fields = self._files.read_json(path)
        if record_fields is not None and record_fields.pop("format", None) != _FORMAT:
            raise StoreError(f"{self._files.url_of(path)} has another format: upgrade bookwheel")
        return record_fields

    def _build_damaged_error(self, path: str) -> StoreError:
        return StoreError(f"{self._files.url_of(path)} is damaged: restore it from a copy of the store")


def _get_record_path(name: str) -> str:
    return f"{FOLDER}/{name}.json"
