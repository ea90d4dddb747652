"""The desk holds the current edition and counts its readers; the last reader of an old edition frees it."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rag_model.allocator import give_back
from rag_model.errors import BookwheelError
from rag_model.serving.answering.edition import Edition, ServedRef


class NotReadyError(BookwheelError):
    """There is no edition to answer from yet."""


class Desk:
    """Holds the current edition. Safe among threads."""

    def __init__(self, freed: Callable[[str], None] = lambda snapshot: None) -> None:
        """Begin with no edition; `freed` is called with the snapshot of each edition that is freed."""
        self._freed = freed
        self._changed = threading.Condition()
        self._current: Edition | None = None
        self._readers: dict[int, int] = {}  # of each edition that is not freed, by its identity

    @property
    def current(self) -> Edition | None:
        """The current edition, for the thread that calls `put`; others use `edition`, which keeps it open."""
        return self._current

    @property
    def named(self) -> ServedRef | None:
        """What the current edition is served as; None: there is none yet."""
        current = self._current
        return None if current is None else current.named

    @property
    def held(self) -> int:
        """How many editions are in memory: one, or more while old ones are drained."""
        return len(self._readers)

    @contextmanager
    def edition(self) -> Iterator[Edition]:
        """Read from the current edition; until the block ends it stays open, whatever is put on the desk.

        Raises:
            NotReadyError: there is none yet.
        """
        with self._changed:
            edition = self._current
            if edition is None:
                raise NotReadyError("no snapshot is open yet: ask again in a moment")
            self._readers[id(edition)] += 1
        try:
            yield edition
        finally:
            self._leave(edition)

    def put(self, edition: Edition) -> None:
        """Make `edition` the current one; the one before is freed when its last reader has left."""
        with self._changed:
            before, self._current = self._current, edition
            self._readers[id(edition)] = 1  # the desk itself reads it
        if before is not None:
            self._leave(before)

    def rename(self, named: ServedRef) -> None:
        """Record that the ref moved and names the current edition's snapshot again."""
        with self._changed:
            if self._current is not None and self._current.id == named.snapshot:
                self._current.named = named

    def drained(self, timeout: float) -> bool:
        """Wait until only the current edition is held; False if that took longer than `timeout` seconds."""
        with self._changed:
            return self._changed.wait_for(lambda: len(self._readers) <= 1, timeout)

    def close(self) -> None:
        """Remove the current edition; it is freed when its last reader has left."""
        with self._changed:
            before, self._current = self._current, None
        if before is not None:
            self._leave(before)

    def _leave(self, edition: Edition) -> None:
        with self._changed:
            self._readers[id(edition)] -= 1
            if self._readers[id(edition)]:
                return
        edition.close()
        give_back()
        with self._changed:
            del self._readers[id(edition)]
            self._changed.notify_all()
        self._freed(edition.id)
