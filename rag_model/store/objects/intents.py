"""Intents: who is writing, so that nothing a writer relies on is deleted under its hands. Nothing is locked.

```
intents/<name>.json   a build, a publication or a move of a ref: since when, and what it relies on
sweeps/<name>.json    an `expire` or a `gc`: what it is deleting just now, and which intents it knows of
```
A writer writes its intent and *then* reads the sweeps; a sweep writes what it condemns and *then* reads the intents.
So of the two at least one sees the other, on any store whose listings show what was written:

* a sweep that meets an intent it does not know of deletes nothing, and plans anew with it;
* a writer that meets a sweep which does not know of it waits as long as what it relies on is condemned: one batch;
* a blob is written and *then* the sweeps are read, and it is written again as long as one condemns it; a sweep writes
  what it condemns and *then* looks at each file once more, and leaves what was written meanwhile.

Whoever dies leaves its file. An intent counts for an hour after it was last written, a sweep for two minutes, and the
living write theirs again in between. Times are those of the store's own files, never of a writer's clock, so clocks
that disagree lose nothing. A writer that slept for longer than its intent counts is safe all the same: `publish`,
`tag` and `rollback` hold an intent of their own, and look whether all is there before a ref moves.
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
SWEEP_COUNTS = 120.0  # the same of a sweep, which writes its own before every batch
_AGAIN = 300.0  # seconds between two writings of an intent
_PAUSE = 0.2  # seconds between two looks at the sweeps
_FORMAT = 1
_FILE = re.compile(r"(?:intents|sweeps)/([A-Za-z0-9][A-Za-z0-9._-]{0,199})\.json")


@dataclass(frozen=True, slots=True)
class Intent:
    """One writer at work."""

    name: str
    started: float  # seconds by the store's clock
    needs: frozenset[str] | None  # paths in the store; None: a build, which may reuse whatever it finds


@dataclass(frozen=True, slots=True)
class Intents:
    """Those who write to one store, and those who delete from it."""

    files: Files

    @contextmanager
    def held(self, name: str, needs: Iterable[str] | None = None) -> Iterator[None]:
        """Say, as long as the block runs, that a writer is at work; wait first for what is just being deleted.

        `name` is unique among writers. `needs` are the paths in the store that the writer relies on; None: it may
        reuse whatever it finds there.

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
            with suppress(StoreError):  # what it was about is done, or has failed already; and it lapses by itself
                self.files.remove(path)

    def live(self, now: float) -> list[Intent]:
        """Return the intents that count at `now`, a time by the store's clock.

        Raises:
            StoreError: an intent is damaged or of a newer format, so what it relies on cannot be known.
        """
        return [
            Intent(name, value["started"] or written, None if value["needs"] is None else frozenset(value["needs"]))
            for name, written, value in self._counting("intents", now - INTENT_COUNTS)
        ]

    def stamp(self, path: str, value: dict[str, Any]) -> float:
        """Write a small file and return when: the time by the store's clock.

        Raises:
            StoreError: the store cannot be written.
        """
        self.files.put(path, json_bytes(value))
        found = self.files.find(path)
        if found is None:
            raise StoreError(f"{self.files.url_of(path)} was deleted just after it was written: run it again")
        return found.written

    def write(self, path: str, put: Callable[[], None]) -> None:
        """Write a file, again if a sweep may have deleted it meanwhile, so that it is there afterwards.

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
        """Whether a sweep that does not know of an intent may be deleting what it relies on."""
        marks = [mark for _, _, mark in self._counting("sweeps", now - SWEEP_COUNTS) if name not in mark["knows"]]
        return any(mark["condemned"] if needs is None else {*needs} & {*mark["condemned"]} for mark in marks)

    def _counting(self, folder: str, since: float) -> Iterator[tuple[str, float, dict[str, Any]]]:
        for file in self.files.tree(folder):
            named = _FILE.fullmatch(file.path)
            value = self.files.read_json(file.path) if named and file.written >= since else None
            if named is None or value is None:
                continue  # a leftover, one that lapsed, or one that ended since it was listed
            if value.get("format") != _FORMAT:
                raise StoreError(f"{self.files.url_of(file.path)} is of another format: upgrade bookwheel")
            yield named[1], file.written, value

    @contextmanager
    def _beating(self, path: str, data: bytes) -> Iterator[None]:
        """Write a file again and again, so that it does not lapse."""
        over = threading.Event()

        def beat() -> None:
            while not over.wait(_AGAIN):
                with suppress(StoreError):  # the next one may get through
                    self.files.put(path, data)

        thread = threading.Thread(target=beat, daemon=True, name="intent")
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()
