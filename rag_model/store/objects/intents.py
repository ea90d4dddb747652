"""Intents: files that announce running writers, so that nothing they rely on is deleted. There are no locks.

```
intents/<name>.json   a build, a publication or a move of a ref: when it began, and what it relies on
sweeps/<name>.json    an `expire` or a `gc`: what it is deleting now, and which intents it knows
```
A writer writes its intent and *then* reads the sweeps. A sweep writes the list of files that it will delete and *then*
reads the intents. So at least one of them sees the other, on any store whose listings show what was written:

* a sweep that finds an intent it does not know deletes nothing, and plans again with that intent;
* a writer that finds a sweep which does not know its intent waits while files it relies on are listed for deletion: at
  most one batch;
* after a blob is written the sweeps are read, and the blob is written again while a sweep lists it; after a sweep has
  written its list it checks each file once more, and keeps those that were written meanwhile.

A process that dies leaves its file behind. An intent is valid for one hour after it was last written, a sweep for two
minutes; a running process rewrites its file before that. Times are those of the store's files, never of a writer's
clock, so clocks that disagree do no harm. A writer that was suspended for longer than its intent is valid is safe too:
`publish`, `tag` and `rollback` hold an intent of their own, and check that all files exist before a ref moves.
"""

import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

from rag_model.errors import StoreError
from rag_model.store.objects.files import Files, json_bytes

INTENT_COUNTS = 3600.0  # seconds after it was last written
SWEEP_COUNTS = 120.0  # seconds; a sweep rewrites its file before every batch
_AGAIN = 300.0  # seconds between two writes of an intent
_PAUSE = 0.2  # seconds between two reads of the sweeps
_FORMAT = 1
_FILE = re.compile(r"(?:intents|sweeps)/([A-Za-z0-9][A-Za-z0-9._-]{0,199})\.json")


def _texts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(text, str) for text in value)


_FIELDS: dict[str, Callable[[dict[str, Any]], bool]] = {  # whether a file of a folder holds what its readers need
    "intents": lambda value: (
        isinstance(value.get("started", 0), int | float | None)
        and "needs" in value
        and (value["needs"] is None or _texts(value["needs"]))
    ),
    "sweeps": lambda value: _texts(value.get("condemned")) and _texts(value.get("knows")),
}


@dataclass(frozen=True, slots=True)
class Intent:
    """One running writer."""

    name: str
    started: float  # seconds by the store's clock
    needs: frozenset[str] | None  # paths in the store; None: a build, which may reuse any file


@dataclass(frozen=True, slots=True)
class Intents:
    """The running writers and sweeps of one store."""

    files: Files

    @contextmanager
    def held(self, name: str, needs: Iterable[str] | None = None) -> Iterator[None]:
        """Hold an intent while the block runs; first wait until no sweep is deleting what the writer needs.

        `name` is unique among writers. `needs` are the paths in the store that the writer relies on; None: it may
        reuse any file there.

        Raises:
            StoreError: the store cannot be written.
        """
        path, relied = f"intents/{name}.json", None if needs is None else sorted(needs)
        value: dict[str, Any] = {"format": _FORMAT, "started": None, "needs": relied}
        value["started"] = now = self.stamp(path, value)
        try:
            while self._endangered(name, relied, now):
                time.sleep(_PAUSE)
                now = self.stamp(path, value)
            with self._beating(path, json_bytes(value)):
                yield
        finally:
            with suppress(StoreError):  # the block has succeeded or failed already, and the intent expires by itself
                self.files.remove(path)

    def live(self, now: float) -> list[Intent]:
        """Return the intents that are valid at `now`, a time by the store's clock.

        Raises:
            StoreError: an intent is damaged or of a newer format, so what it relies on cannot be known.
        """
        return [
            Intent(name, value.get("started") or written, None if value["needs"] is None else frozenset(value["needs"]))
            for name, written, value in self._counting("intents", now - INTENT_COUNTS)
        ]

    def stamp(self, path: str, value: dict[str, Any]) -> float:
        """Write a small file and return the time of that by the store's clock.

        Raises:
            StoreError: the store cannot be written.
        """
        self.files.put(path, json_bytes(value))
        found = self.files.find(path)
        if found is None:
            raise StoreError(f"{self.files.url_of(path)} was deleted just after it was written: run it again")
        return found.written

    def write(self, path: str, put: Callable[[], None]) -> None:
        """Write a file, and again if a sweep may have deleted it meanwhile, so that it exists afterwards.

        Raises:
            StoreError: the store cannot be written.
        """
        put()
        while (found := self.files.find(path)) is None or self._condemned(path, found.written):
            time.sleep(_PAUSE)
            put()

    def _condemned(self, path: str, now: float) -> bool:
        return any(path in mark["condemned"] for _, _, mark in self._counting("sweeps", now - SWEEP_COUNTS))

    def _endangered(self, name: str, needs: list[str] | None, now: float) -> bool:
        """Whether a sweep that does not know this intent may be deleting what its writer relies on."""
        marks = [mark for _, _, mark in self._counting("sweeps", now - SWEEP_COUNTS) if name not in mark["knows"]]
        return any(mark["condemned"] if needs is None else {*needs} & {*mark["condemned"]} for mark in marks)

    def _counting(self, folder: str, since: float) -> Iterator[tuple[str, float, dict[str, Any]]]:
        for file in self.files.tree(folder):
            named = _FILE.fullmatch(file.path)
            value = self.files.read_json(file.path) if named and file.written >= since else None
            if named is None or value is None:
                continue  # a leftover, an expired file, or one that was removed after it was listed
            if value.get("format") != _FORMAT:
                raise StoreError(f"{self.files.url_of(file.path)} is of another format: upgrade bookwheel")
            if not _FIELDS[folder](value):
                raise StoreError(f"{self.files.url_of(file.path)} is damaged: delete it if no build or gc is running")
            yield named[1], file.written, value

    @contextmanager
    def _beating(self, path: str, data: bytes) -> Iterator[None]:
        """Write a file repeatedly while the block runs, so that it does not expire."""
        over = threading.Event()

        def beat() -> None:
            while not over.wait(_AGAIN):
                with suppress(StoreError):  # the next write may succeed
                    self.files.put(path, data)

        thread = threading.Thread(target=beat, daemon=True, name="intent")
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()
