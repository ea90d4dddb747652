"""Intents are files that announce running writers, so that the files they need are not deleted.

```
intents/<name>.json   a build, a publication or a move of a ref: its start, and the files it needs
sweeps/<name>.json    an `expire` or a `gc`: the files it is deleting, and the intents it knows
```

There are no locks. A writer writes its intent and *then* reads the sweeps. A sweep writes the list
of files that it will delete and *then* reads the intents. So the sweep sees the writer, or the
writer sees the sweep, on any store whose listings show all files that were written before:

* A sweep that sees an unknown intent deletes nothing, and plans again with that intent.
* If a writer sees a sweep that does not know its intent, it waits until no file that it needs is
  listed for deletion, which takes at most one batch.
* After a writer has written a blob, it reads the sweeps and writes the blob again while a sweep
  lists it. After a sweep has written its list, it checks each file once more and keeps those that
  were written in the meantime.

If a process dies, the file of its intent or sweep remains. An intent is valid for one hour after it
was last written, a sweep for two minutes; a running process rewrites its file earlier. All times
are times of the store's files, never of a writer's clock, so clocks that disagree do no harm. A
writer that was suspended until its intent expired does no harm either: `publish`, `tag` and
`rollback` hold their own intents, and check that all files exist before a ref moves.
"""

import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

from rag_model.errors import StoreError
from rag_model.store.objects.files import Files, encode_json

INTENT_VALID_SECONDS = 3600.0  # seconds that an intent stays valid after it was last written
# seconds that a sweep stays valid after its file was last written, which is before each batch
SWEEP_VALID_SECONDS = 120.0
_RENEW_SECONDS = 300.0  # seconds between two writes of an intent
_PAUSE_SECONDS = 0.2  # seconds between two reads of the sweeps
_TURN_PREFIX = "turn-"
_TURN_VALID_SECONDS = 900.0  # seconds that a killed process's turn stays valid after its renewal
_TURN_PAUSES = 1.0, 30.0  # first and longest pause between two reads of the turns, in seconds
LEASE_PREFIX = "asked-"  # prefix of leases: intents of readers, which write nothing to the store
_FORMAT = 1
_FILE_PATH = re.compile(r"(?:intents|sweeps)/([A-Za-z0-9][A-Za-z0-9._-]{0,199})\.json")


def _is_text_list(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(text, str) for text in value)


# For each folder, a function that returns whether the content of a file in it is valid.
_VALIDATORS: dict[str, Callable[[dict[str, Any]], bool]] = {
    "intents": lambda value: (
        isinstance(value.get("started", 0), int | float | None)
        and "needs" in value
        and (value["needs"] is None or _is_text_list(value["needs"]))
    ),
    "sweeps": lambda value: _is_text_list(value.get("condemned")) and _is_text_list(value.get("knows")),
}


@dataclass(frozen=True, slots=True)
class Intent:
    """The announcement of one running writer."""

    name: str
    started: float  # start in seconds by the store's clock
    # paths in the store of the files that the writer needs; None for a build, which may need any
    needs: frozenset[str] | None

    @property
    def is_lease(self) -> bool:
        """Whether this is a reader's lease, which protects only the files that it names."""
        return self.name.startswith(LEASE_PREFIX) and self.needs is not None


@dataclass(frozen=True, slots=True)
class Intents:
    """The intents of the running writers and sweeps of one store."""

    files: Files

    @contextmanager
    def hold(self, name: str, needs: Iterable[str] | None = None) -> Iterator[float]:
        """Hold an intent while the block runs; first wait until no sweep deletes needed files.

        The block gets the intent's start, in seconds by the store's clock. `name` is unique among
        writers. `needs` are the paths in the store that the writer relies on; None means that it
        may reuse any file.

        Raises:
            StoreError: the store cannot be written.
        """
        path, needed_paths = f"intents/{name}.json", None if needs is None else sorted(needs)
        intent: dict[str, Any] = {"format": _FORMAT, "started": None, "needs": needed_paths}
        intent["started"] = start_time = store_time = self.write_timed(path, intent)
        try:
            while self._is_endangered(name, needed_paths, store_time):
                time.sleep(_PAUSE_SECONDS)
                store_time = self.write_timed(path, intent)
            with self._renew_periodically(path, encode_json(intent)):
                yield start_time
        finally:
            with suppress(StoreError):  # if the file stays, the intent expires
                self.files.remove(path)

    @contextmanager
    def hold_turn(self, name: str, on_wait: Callable[[str], None]) -> Iterator[None]:
        """Wait until all earlier turns, whatever their names, have ended; then hold this turn while
        the block runs.

        With turns, only one of several writers works at a time, even if different schedulers
        started them, or if a scheduler considers a running writer as failed. A turn ends with its
        block, or 15 minutes after its process was killed. Turns only avoid useless work, because
        two writers at once do not damage a store.

        Args:
            name: the turn's name, unique in the store.
            on_wait: called with the name of the turn to wait for, each time that this name changes.

        Raises:
            StoreError: the store cannot be written, or an intent is damaged.
        """
        own_name, path, awaited_name = f"{_TURN_PREFIX}{name}", f"intents/{_TURN_PREFIX}{name}.json", ""
        pause_seconds, max_pause_seconds = _TURN_PAUSES
        with self.hold(own_name, needs=()) as start_time:
            while earlier_name := self._find_earlier_turn(own_name, path, start_time):
                if earlier_name != awaited_name:
                    awaited_name = earlier_name
                    on_wait(earlier_name.removeprefix(_TURN_PREFIX))
                time.sleep(pause_seconds)
                pause_seconds = min(2 * pause_seconds, max_pause_seconds)
            yield

    def _find_earlier_turn(self, own_name: str, path: str, start_time: float) -> str | None:
        """Return the name of the oldest valid turn, or None if that is `own_name`.

        The own turn is written again with its start. Without the start, its last write would count,
        so turns that wait would wait for each other.
        """
        intent = self.files.read_json(path)
        if intent is None:
            raise StoreError(f"{self.files.url_of(path)} was deleted while it was valid: run it again")
        store_time = self.write_timed(path, {**intent, "started": start_time})
        starts_with_names = [
            (turn["started"] or modified_time, name)
            for name, modified_time, turn in self._iter_valid("intents", store_time - _TURN_VALID_SECONDS)
            if name.startswith(_TURN_PREFIX)
        ]
        oldest_turn_name = min(starts_with_names)[1]
        return None if oldest_turn_name == own_name else oldest_turn_name

    def list_live_intents(self, store_time: float) -> list[Intent]:
        """Return the intents that are valid at `store_time`, in seconds by the store's clock.

        Raises:
            StoreError: an intent is damaged or of a newer format, so the files it needs are
                unknown.
        """
        return [
            Intent(
                name,
                intent.get("started") or modified_time,
                None if intent["needs"] is None else frozenset(intent["needs"]),
            )
            for name, modified_time, intent in self._iter_valid("intents", store_time - INTENT_VALID_SECONDS)
        ]

    def write_timed(self, path: str, value: dict[str, Any]) -> float:
        """Write a small file and return the time of the write by the store's clock.

        Raises:
            StoreError: the store cannot be written.
        """
        self.files.write(path, encode_json(value))
        file = self.files.find(path)
        if file is None:
            raise StoreError(f"{self.files.url_of(path)} was deleted just after it was written: run it again")
        return file.modified

    def write_despite_sweeps(self, path: str, put: Callable[[], None]) -> None:
        """Write a file, and write it again as long as a sweep may delete it.

        Raises:
            StoreError: the store cannot be written.
        """
        put()
        while (file := self.files.find(path)) is None or self._is_listed_for_deletion(path, file.modified):
            time.sleep(_PAUSE_SECONDS)
            put()

    def _is_listed_for_deletion(self, path: str, store_time: float) -> bool:
        return any(
            path in sweep_record["condemned"]
            for _, _, sweep_record in self._iter_valid("sweeps", store_time - SWEEP_VALID_SECONDS)
        )

    def _is_endangered(self, name: str, needs: list[str] | None, store_time: float) -> bool:
        """Return whether a sweep that does not know this intent may delete files that the intent
        needs.
        """
        unaware_sweeps = [
            sweep_record
            for _, _, sweep_record in self._iter_valid("sweeps", store_time - SWEEP_VALID_SECONDS)
            if name not in sweep_record["knows"]
        ]
        return any(
            sweep["condemned"] if needs is None else {*needs} & {*sweep["condemned"]} for sweep in unaware_sweeps
        )

    def _iter_valid(self, folder: str, since: float) -> Iterator[tuple[str, float, dict[str, Any]]]:
        """Yield (name, time of last write, content) of the files that were last written at or after
        the time `since` by the store's clock; `folder` is `intents` or `sweeps`.
        """
        for file in self.files.iter_tree(folder):
            match = _FILE_PATH.fullmatch(file.path)
            content = self.files.read_json(file.path) if match and file.modified >= since else None
            if match is None or content is None:
                continue  # a leftover or expired file, or one that was removed after the listing
            if content.get("format") != _FORMAT:
                raise StoreError(f"{self.files.url_of(file.path)} has another format: upgrade bookwheel")
            if not _VALIDATORS[folder](content):
                raise StoreError(f"{self.files.url_of(file.path)} is damaged: delete it if no build or gc is running")
            yield match[1], file.modified, content

    @contextmanager
    def _renew_periodically(self, path: str, data: bytes) -> Iterator[None]:
        """Write an intent repeatedly while the block runs, so that it does not expire."""
        stop_event = threading.Event()

        def renew() -> None:
            while not stop_event.wait(_RENEW_SECONDS):
                with suppress(StoreError):  # the next write may succeed
                    self.files.write(path, data)

        renewal_thread = threading.Thread(target=renew, daemon=True, name="intent")
        renewal_thread.start()
        try:
            yield
        finally:
            stop_event.set()
            renewal_thread.join()
