"""Hold the current snapshot and count its readers; the last reader frees a replaced snapshot."""

import threading
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from functools import partial

from rag_model.errors import BookwheelError, NotReadyError
from rag_model.process import trim_memory
from rag_model.serving.answering.loaded_snapshot import LoadedSnapshot, ServedRef


class FollowerStoppedError(BookwheelError):
    """The service is shutting down, so pulling or opening a version was interrupted."""


class SnapshotSlot:
    """Holds the current `LoadedSnapshot`. Thread-safe."""

    def __init__(
        self,
        on_freed: Callable[[str], None] = lambda snapshot: None,
        on_loaded: Callable[[str], None] = lambda snapshot: None,
    ) -> None:
        """Create an empty slot.

        `on_loaded` receives the id of each snapshot that is held for the first time, and `on_freed`
        the id of each snapshot that is freed.
        """
        self._on_freed, self._on_loaded = on_freed, on_loaded
        self._lock = threading.RLock()
        self._current: LoadedSnapshot | None = None
        self._has_served = False
        self._not_ready_reason = "no snapshot is open yet: ask again in a moment"
        # number of readers of each snapshot in memory, by `id(loaded_snapshot)`
        self._reader_counts: dict[int, int] = {}

    @property
    def current(self) -> LoadedSnapshot | None:
        """The current snapshot; only for the thread that calls `swap`, others use `acquire`."""
        return self._current

    @property
    def has_served(self) -> bool:
        """Whether the service, with all its workers, has served any snapshot since its start."""
        return self._has_served

    @property
    def served_ref(self) -> ServedRef | None:
        """The ref of the current snapshot; None if none is loaded."""
        current = self._current
        return None if current is None else current.served_ref

    @property
    def loaded_count(self) -> int:
        """The number of snapshots in memory; more than one while requests use an old snapshot."""
        return len(self._reader_counts)

    @contextmanager
    def acquire(self) -> Iterator[LoadedSnapshot]:
        """Yield the current snapshot and keep it open until the block ends, also during a swap.

        Raises:
            NotReadyError: No snapshot is loaded.
        """
        loaded_snapshot = self.hold_current()
        try:
            yield loaded_snapshot
        finally:
            self.release(loaded_snapshot)

    def hold_current(self) -> LoadedSnapshot:
        """Return the current snapshot, and keep it open until `release` is called.

        Raises:
            NotReadyError: No snapshot is loaded.
        """
        with self._lock:
            if self._current is None:
                raise NotReadyError(self._not_ready_reason)
            return self.hold(self._current)

    def hold(self, loaded_snapshot: LoadedSnapshot) -> LoadedSnapshot:
        """Return `loaded_snapshot`, and keep it open until `release` is called.

        `loaded_snapshot` is the current snapshot, a snapshot that the caller holds already, or a
        new one.
        """
        with self._lock:
            n_readers = self._reader_counts.get(id(loaded_snapshot), 0)
            self._reader_counts[id(loaded_snapshot)] = n_readers + 1
        if not n_readers:
            self._on_loaded(loaded_snapshot.id)
        return loaded_snapshot

    def prepare(self, loaded_snapshot: LoadedSnapshot) -> None:
        """Prepare the swap to `loaded_snapshot`; wait until all workers have opened it.

        Raises:
            BookwheelError: Another worker cannot open it; `loaded_snapshot` is closed.
        """

    def withdraw(self, taken_down: Collection[str]) -> str | None:
        """Stop serving the current snapshot until the next swap if it was taken down.

        Return its id; None if it was not taken down.
        """
        current = self._current
        if current is None or current.id not in taken_down:
            return None
        self._not_ready_reason = "the snapshot was taken down, and no other one is open: publish one, and ask again"
        self.close()
        return current.id

    def swap(self, loaded_snapshot: LoadedSnapshot) -> None:
        """Make `loaded_snapshot` the current snapshot; the previous one is freed after its last reader."""
        with self._lock:
            # The slot itself counts as a reader.
            previous_snapshot, self._current = self._current, self.hold(loaded_snapshot)
            self._has_served = True
        if previous_snapshot is not None:
            self.release(previous_snapshot)

    def update_ref(self, served_ref: ServedRef) -> None:
        """Record that the ref moved and names the current snapshot again."""
        with self._lock:
            if self._current is not None and self._current.id == served_ref.snapshot:
                self._current.served_ref = served_ref

    def close(self) -> None:
        """Remove the current snapshot; it is freed after its last reader."""
        with self._lock:
            previous_snapshot, self._current = self._current, None
        if previous_snapshot is not None:
            self.release(previous_snapshot)

    def release(
        self, loaded_snapshot: LoadedSnapshot, run: Callable[[Callable[[], None]], object] = lambda free: free()
    ) -> None:
        """Release a snapshot that was held; the last release calls `run` with a function that frees
        it, for example in another thread.
        """
        with self._lock:
            self._reader_counts[id(loaded_snapshot)] -= 1
            if self._reader_counts[id(loaded_snapshot)]:
                return
        run(partial(self._free, loaded_snapshot))

    def _free(self, loaded_snapshot: LoadedSnapshot) -> None:
        loaded_snapshot.close()
        trim_memory()
        with self._lock:
            del self._reader_counts[id(loaded_snapshot)]
        self._on_freed(loaded_snapshot.id)
