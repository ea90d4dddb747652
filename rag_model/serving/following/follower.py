"""Follow a ref of a store, or a pulled folder; switch to each new version after checking it.

A new version is pulled, opened while the current version is served, checked, and only then served
instead. If anything is wrong with it (an unreadable ref record, an invalid manifest, a missing or
damaged file, an index that finds nothing, an encoder of another vector space, too little memory),
it is refused and reported, and the current version is still served. A refused version is tried
again when the ref moves; after a temporary error, such as one of the store, it is also retried at
growing intervals. A store that cannot be reached is reported and polled again.

A snapshot that was taken down is served until its replacement is open. If the replacement is
refused or does not exist, nothing is served. The files of the snapshot are deleted as soon as the
last request that reads them has finished.
"""

import logging
import math
import os
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

from rag_model.encoders.files import ENDPOINT_PREFIX
from rag_model.errors import (
    BookwheelError,
    InputError,
    MissingExtraError,
    NotFoundError,
    RefusedError,
    StoreError,
    UsageError,
)
from rag_model.reading.model import find_model_folder, resolve_model_id
from rag_model.reading.settings import ReaderSettings
from rag_model.retrieve.indexes import derive_index_file
from rag_model.retrieve.models import PairScorerCache
from rag_model.secrets import mask_secrets
from rag_model.serving.answering.available_retrievers import AvailableRetrievers, check_memory
from rag_model.serving.answering.loaded_snapshot import LoadedSnapshot, ServedModel, ServedRef
from rag_model.serving.following.pins import PinnedSnapshots
from rag_model.serving.following.snapshot_slot import FollowerStoppedError, SnapshotSlot
from rag_model.serving.following.trials import try_model, try_snapshot
from rag_model.serving.monitoring.observer import Observer, Refusal, notify
from rag_model.serving.runtime import SupervisedThread
from rag_model.serving.settings import ServiceSettings
from rag_model.store.objects.files import Files
from rag_model.store.pulling.folder import CURRENT, MANIFEST, find_ref_folder, record_ref, remove_taken_down
from rag_model.store.pulling.pull import pull
from rag_model.store.store import Store
from rag_model.store.versions.manifest import Content, Manifest, select_files
from rag_model.store.versions.ranges import delete_cached_ranges
from rag_model.store.versions.snapshot import Snapshot, SnapshotLease, resolve_pulled_folder

_LOG = logging.getLogger(__name__)
_PERMANENT_ERRORS = (InputError, MissingExtraError, RefusedError, UsageError)  # a retry cannot help
_RELEASE_SECONDS = 3.0  # maximum time to release the lease when the service stops
_FOLLOWER_NICENESS = 10  # requests have priority over a pull, and over threads that it starts


@dataclass(frozen=True, slots=True)
class FollowedRef:
    """A ref of a store to serve, and the folder for its pulled snapshots."""

    url: str  # URL of the store
    ref: str  # a ref; or an id or ref@number, whose snapshot never changes
    dest: Path  # folder of the pulled snapshots
    model: str | None = None  # a model of the store, a folder, or `openai:MODEL`
    # passage encoder that belongs to the model's question encoder, if the model does not record it
    passage_encoder: str | None = None
    reader_settings: ReaderSettings = field(default_factory=ReaderSettings)

    @property
    def is_model_local(self) -> bool:
        """Whether the model can be loaded without the store."""
        return self.model is None or self.model.startswith(ENDPOINT_PREFIX) or Path(self.model).is_dir()

    @property
    def uses_inner_products(self) -> bool:
        """Whether the reader weighs passages by inner products of the retriever."""
        return self.model is not None and self.reader_settings.reader_for(self.model) == "marginal"

    def find_last_pulled(self) -> Path | None:
        """Return the folder of the last snapshot that was pulled for this ref, if any.

        Raises:
            BookwheelError: The store's URL is invalid.
        """
        return find_ref_folder(self.dest, Files(self.url).url, self.ref)

    def check(self, check_stop: Callable[[], None] | None = None) -> None:
        """Check that the snapshot and the model exist; for a pulled snapshot no store is needed.

        An error that `check_stop` raises interrupts reading from the store.

        Raises:
            StoreError: The store does not have the snapshot or the model, or it is unreachable and
                no snapshot of this ref was pulled before.
        """
        if self.find_last_pulled() is None:
            store = Store.open(self.url, check=check_stop)
            store.snapshots.resolve_trusted(self.ref)
            if self.model is not None:
                resolve_model_id(store, self.model)


@dataclass(frozen=True, slots=True)
class _TargetVersion:
    served_ref: ServedRef
    model: str | None  # full id of the model that answers; None: no answers


class _PullInterruptedError(BookwheelError):
    """The store has changed during a pull, so the follower stops the pull and polls again."""


class FollowerThread(ABC):
    """Base class of followers; its thread runs `_run` until it is stopped."""

    def __init__(
        self, slot: SnapshotSlot, settings: ServiceSettings, observer: Observer, pins: PinnedSnapshots | None
    ) -> None:
        """Prepare the thread; `observer.on_thread_death` is called if the thread dies."""
        self._slot, self._settings, self._observer = slot, settings, observer
        self._pins = pins or PinnedSnapshots(slot, settings)
        self._stop_event = threading.Event()
        self.thread = SupervisedThread("follower", self._run, partial(notify, observer.on_thread_death))

    def start(self) -> None:
        """Begin to follow."""
        self.thread.start()

    def stop(self) -> None:
        """Stop following."""
        self._stop_event.set()
        self.thread.join()

    @abstractmethod
    def _run(self) -> None:
        """Follow until `_stop_event` is set."""

    def _check_stop(self) -> None:
        """If the service stops, raise an error, which interrupts reading from the store.

        Raises:
            FollowerStoppedError: The service is shutting down.
        """
        if self._stop_event.is_set():
            raise FollowerStoppedError("the service is shutting down")

    def _compute_retry_time(self, tries: int, *, is_final: bool) -> float:
        """Return when to retry a refused version; the pauses grow up to `retry_seconds`. Monotonic clock."""
        pause = self._settings.poll_seconds * 2.0 ** min(tries, 30)
        return math.inf if is_final else time.monotonic() + min(pause, self._settings.retry_seconds)


class RefFollower(FollowerThread):
    """Polls a ref at regular intervals in its own thread, and switches to each new version."""

    def __init__(
        self,
        target_ref: FollowedRef,
        slot: SnapshotSlot,
        settings: ServiceSettings,
        observer: Observer,
        on_fatal: Callable[[BookwheelError], None] = lambda error: None,
        pins: PinnedSnapshots | None = None,
    ) -> None:
        """Prepare to follow; `on_fatal` gets the error if the first version cannot be served."""
        super().__init__(slot, settings, observer, pins)
        self._pins.on_request = self._wake
        self._wake_event = threading.Event()  # set to poll before the interval has passed
        self._target_ref, self._on_fatal = target_ref, on_fatal
        self._scorers = PairScorerCache(target_ref.url)
        self._store: Store | None = None
        # keeps the store from deleting files of the snapshot that is served from it
        self._lease: ExitStack | SnapshotLease = ExitStack()
        # ids of the snapshots that were taken down, as of the last poll
        self.taken_down: frozenset[str] = frozenset()
        # a version and its refusal; the version is None if the ref's record is unreadable
        self._refused_version: tuple[_TargetVersion | None, Refusal] | None = None
        self._thread_id: int | None = None  # id of the follower's own thread; None until it runs
        self._release_deadline = math.inf  # end of the wait for the release of the lease; monotonic clock
        self._retry_time = 0.0  # when to retry the refused version; monotonic clock
        # when a running pull checks the store again; monotonic clock
        self._next_check_time = 0.0
        self.problem = ""  # why the last poll of the store failed; empty: it succeeded

    @property
    def refusal(self) -> Refusal | None:
        """Why the version that the ref names is not served; None if it is, or was not tried yet."""
        return None if self._refused_version is None else self._refused_version[1]

    def stop(self) -> None:
        """Stop following; the next pull continues an interrupted pull."""
        self._release_deadline = time.monotonic() + _RELEASE_SECONDS
        self._stop_event.set()
        self._wake()
        super().stop()
        self._lease.close()

    def poll(self) -> None:
        """Poll the ref once, serve a new version, and withdraw snapshots that were taken down."""
        try:
            if self._store is None:
                self._store = Store.open(self._target_ref.url, check=self._check_stop)
            store = self._store
            self.taken_down = store.takedowns.list_replaced()
            target = self._resolve_target(store)
        except FollowerStoppedError:
            raise
        except BookwheelError as error:
            self._handle_poll_error(error)
        else:
            self._record_poll("")
            # Remove pinned snapshots that were taken down before the pull, which may take hours.
            self._pins.update(lambda name: None, self.taken_down)
            self._delete_taken_down()
            self._update_to(store, target)
            self._pins.update(partial(self._open_pinned, store), self.taken_down)
        self._withdraw_taken_down()
        self._delete_taken_down()

    def _wake(self) -> None:
        self._wake_event.set()

    def _open_pinned(self, store: Store, name: str) -> LoadedSnapshot | None:
        """Open a snapshot that requests name; return it held open, or None if interrupted."""
        current, snapshot_id = self._slot.current, store.snapshots.resolve_trusted(name)
        if snapshot_id in self.taken_down:
            raise NotFoundError(f"snapshot {name} was taken down: ask for another one")
        if store.files.get_size(store.snapshots.manifest_path(snapshot_id)) is None:
            raise NotFoundError(f"snapshot {name} is not in the store any more: ask for another one")
        if current is not None and current.id == snapshot_id:
            return self._slot.hold(current)
        start_time, served_ref = time.monotonic(), ServedRef(name, 0, snapshot_id, "")
        if self._settings.pull:
            try:
                folder, _ = self._pull_and_load_model(store, _TargetVersion(served_ref, None), current)
            except _PullInterruptedError as reason:
                _LOG.info("the pull of snapshot %s is interrupted: %s", name, reason)
                self._wake()
                return None
            loaded_snapshot = self._open_warm(folder, served_ref, None, current)
        else:
            loaded_snapshot = self._open_ranged(store, served_ref, current)
        _LOG.info("%s is open for the requests that name it, after %.1f s", name, time.monotonic() - start_time)
        return self._slot.hold(loaded_snapshot)

    def _update_to(self, store: Store, target: _TargetVersion) -> None:
        """Load a version, unless it is served, or was refused and must not be retried yet."""
        current = self._slot.current
        is_pulled = current is not None and not (current.is_ranged and self._settings.pull)
        if (
            current is not None
            and is_pulled
            and (current.id, current.model and current.model.id) == (target.served_ref.snapshot, target.model)
        ):
            self._refused_version = None
            self._update_ref(current, target.served_ref)
        elif (
            self._refused_version is None or self._refused_version[0] != target or time.monotonic() >= self._retry_time
        ):
            self._load_and_swap(store, target, current)

    def _withdraw_taken_down(self) -> None:
        """Stop serving the current snapshot if it was taken down."""
        snapshot_id = self._slot.withdraw(self.taken_down)
        if snapshot_id is not None:
            _LOG.error("snapshot %s was taken down and is not served any more", snapshot_id[:12])
            self._lease.close()
            notify(self._observer.on_withdrawn, snapshot_id)

    def _delete_taken_down(self) -> None:
        """Delete the files and the cached ranges of snapshots that were taken down."""
        for delete_files in (self._delete_pulled, delete_cached_ranges):
            try:
                delete_files(self.taken_down)
            except OSError as error:  # go on and delete the other files
                _LOG.error("cannot delete snapshots that were taken down: %s", error)

    def _delete_pulled(self, taken_down: frozenset[str]) -> None:
        for snapshot_id in remove_taken_down(self._target_ref.dest, taken_down, Manifest.from_bytes):
            _LOG.info("snapshot %s was taken down: its files are deleted", snapshot_id[:12])

    def _run(self) -> None:
        self._thread_id = threading.get_native_id()
        while True:
            try:
                self.poll()
            except FollowerStoppedError:
                return
            # Also catch a Rust panic of a native library, since the next poll may succeed.
            except BaseException as failure:
                self._record_poll(f"unexpected {type(failure).__name__}: {failure}")
            self._wake_event.wait(self._settings.poll_seconds)
            self._wake_event.clear()
            if self._stop_event.is_set():
                return

    def _resolve_target(self, store: Store) -> _TargetVersion:
        target_ref = self._target_ref
        move = None if "@" in target_ref.ref else store.refs.find_current(target_ref.ref)
        if move is not None:
            served_ref = ServedRef(target_ref.ref, move.number, move.snapshot, move.created_at)
        else:
            served_ref = ServedRef(target_ref.ref, 0, store.snapshots.resolve(target_ref.ref), "")
        return _TargetVersion(
            served_ref,
            None if target_ref.model is None else resolve_model_id(store, target_ref.model),
        )

    def _handle_poll_error(self, error: BookwheelError) -> None:
        """Handle an unreachable store, an unusable ref record, or a missing ref."""
        is_missing = isinstance(error, NotFoundError)
        if is_missing and not self._slot.has_served:
            self._on_fatal(error)
        try:
            move_numbers = [] if self._store is None else self._store.refs.list_numbers(self._target_ref.ref)
        except FollowerStoppedError:
            raise
        except BookwheelError:
            move_numbers = []
        if move_numbers:
            self._record_poll("")
            self._refuse(None, ServedRef(self._target_ref.ref, move_numbers[-1], "", ""), error, is_final=False)
        else:
            self._record_poll(str(error))
            if not self._slot.has_served and isinstance(error, _PERMANENT_ERRORS):
                self._on_fatal(error)
            elif self._slot.current is None and not is_missing:
                self._serve_last_pulled()

    def _serve_last_pulled(self) -> None:
        """If no model needs the store, serve the last pulled snapshot until the store answers."""
        target_ref, folder = self._target_ref, self._target_ref.find_last_pulled()
        if folder is None or not target_ref.is_model_local:
            return
        snapshot_id = folder.name
        if snapshot_id in self.taken_down:
            return
        try:
            model = None if target_ref.model is None else self._load_model(None, target_ref.model)
            with Snapshot.from_folder(folder) as snapshot:
                available = AvailableRetrievers.plan(
                    snapshot,
                    self._settings,
                    uses_inner_products=self._target_ref.uses_inner_products,
                )
                self._run_trials(folder, snapshot.manifest.content, available.indexes)
            start_time, served_ref = time.monotonic(), ServedRef(target_ref.ref, 0, snapshot_id, "")
            self._swap_in(self._open_warm(folder, served_ref, model, None), start_time)
        except BookwheelError as error:
            _LOG.error("snapshot %s on the disk can't be served: %s", snapshot_id[:12], error)

    def _record_poll(self, problem: str) -> None:
        problem = mask_secrets(problem)
        if problem != self.problem:
            _LOG.warning("%s", problem or f"the store answers again: {self._target_ref.ref} is followed")
        self.problem = problem
        notify(self._observer.on_poll, problem)

    def _update_ref(self, current: LoadedSnapshot, served_ref: ServedRef) -> None:
        if current.served_ref != served_ref:
            self._slot.update_ref(served_ref)
            _LOG.info(
                "%s@%d names snapshot %s, which is served already",
                served_ref.ref,
                served_ref.number,
                served_ref.snapshot[:12],
            )
            notify(self._observer.on_same_snapshot_named, current, served_ref)

    def _load_and_swap(self, store: Store, target: _TargetVersion, current: LoadedSnapshot | None) -> None:
        start_time, served_ref = time.monotonic(), target.served_ref
        try:
            if self._settings.from_store and (current is None or current.is_ranged or not self._settings.pull):
                if current is None or current.id != served_ref.snapshot:
                    current = self._serve_from_store(store, target, current)
                if not self._settings.pull:
                    return
            folder, model = self._pull_and_load_model(store, target, current)
            self._swap_in(self._open_warm(folder, served_ref, model, current), start_time)
            self._lease.close()
            self._record_last_served(store, served_ref)
        except FollowerStoppedError:
            raise
        except _PullInterruptedError as reason:
            _LOG.info("the pull of snapshot %s is interrupted: %s", served_ref.snapshot[:12], reason)
            self._wake()
        except BookwheelError as error:
            self._refuse(target, served_ref, error, is_final=isinstance(error, _PERMANENT_ERRORS))
        except BaseException as error:  # a panic of a native library is not an Exception
            _LOG.exception("snapshot %s can't be opened", served_ref.snapshot[:12])
            self._refuse(target, served_ref, error, is_final=False)

    def _serve_from_store(
        self, store: Store, target: _TargetVersion, current: LoadedSnapshot | None
    ) -> LoadedSnapshot | None:
        """Serve a snapshot by reading byte ranges of the store's files; return the loaded snapshot.

        Raises:
            BookwheelError: The snapshot cannot be served by byte ranges, and the settings allow no
                pull.
        """
        start_time, served_ref = time.monotonic(), target.served_ref
        name = f"{served_ref.ref}@{served_ref.number}" if served_ref.number else served_ref.ref
        try:
            if target.model is not None:
                raise UsageError("a model needs pulled passages: leave out --from-store or --model")
            store.snapshots.resolve_trusted(name)
            loaded_snapshot = self._open_ranged(store, served_ref, current)
        except BookwheelError as error:
            if not self._settings.pull:
                raise
            _LOG.warning("%s is served when it is pulled, not by ranges: %s", name, error)
            return current
        self._swap_in(loaded_snapshot, start_time)
        lease = SnapshotLease(store.make_interruptible(self._check_release))
        with suppress(StoreError):  # without the right to write, no lease can be held
            lease.hold(loaded_snapshot.id)
        self._lease.close()
        self._lease = lease
        return loaded_snapshot

    def _open_ranged(self, store: Store, served_ref: ServedRef, current: LoadedSnapshot | None) -> LoadedSnapshot:
        """Open a snapshot whose files are read from the store by byte ranges, and warm it up."""
        loaded_snapshot = LoadedSnapshot.open_ranged(store, served_ref, self._settings, current, self._scorers)
        return loaded_snapshot.warm_up()

    def _pull_and_load_model(
        self, store: Store, target: _TargetVersion, current: LoadedSnapshot | None
    ) -> tuple[Path, ServedModel | None]:
        """Pull a snapshot while the current one is served; load its model unless it is in use."""
        ref, ref_number = target.served_ref.ref, target.served_ref.number
        store.snapshots.resolve_trusted(f"{ref}@{ref_number}" if ref_number else ref)
        snapshot = Snapshot.from_manifest(store, store.snapshots.get(target.served_ref.snapshot))
        content = snapshot.manifest.content
        available = AvailableRetrievers.plan(
            snapshot, self._settings, uses_inner_products=self._target_ref.uses_inner_products
        )
        check_memory(content, available.indexes, self._settings)
        model = current.model if current is not None else None
        if target.model is not None and (model is None or model.id != target.model):
            model = self._load_model(store, target.model)
        pull_report = pull(
            store,
            target.served_ref.snapshot,
            self._target_ref.dest,
            select=select_files(content, indexes=available.indexes, embeddings=available.needs_embeddings),
            keep_snapshots=self._settings.keep,
            derive_index=derive_index_file,
            accept=lambda folder: self._run_trials(folder, content, available.indexes),
            on_progress=lambda done, total: self._check_pull(store, target, current),
        )
        return pull_report.path, model

    def _run_trials(self, folder: Path, content: Content, indexes: Sequence[str]) -> None:
        if self._settings.run_trials:
            try_snapshot(folder, content, indexes)

    def _load_model(self, store: Store | None, model_id: str) -> ServedModel:
        """Load a reading model after it was tried in a child process."""
        target_ref, folder = self._target_ref, find_model_folder(store, model_id)
        if self._settings.run_trials and folder is not None:
            try_model(target_ref.dest, folder, target_ref.reader_settings.reader_for(model_id))
        return ServedModel.load(
            store,
            model_id,
            target_ref.reader_settings,
            target_ref.passage_encoder,
            self._settings.batch_answers,
        )

    def _swap_in(self, loaded_snapshot: LoadedSnapshot, start_time: float) -> None:
        seconds = time.monotonic() - start_time
        self._slot.prepare(loaded_snapshot)
        for note in loaded_snapshot.notes:
            _LOG.warning("%s", note)
        self._refused_version, served_ref = None, loaded_snapshot.served_ref
        _LOG.info(
            "%s@%d: snapshot %s is served%s, after %.1f s",
            served_ref.ref,
            served_ref.number,
            loaded_snapshot.id[:12],
            " from the store" if loaded_snapshot.is_ranged else "",
            seconds,
        )
        notify(self._observer.on_swap, loaded_snapshot, seconds)
        self._slot.swap(loaded_snapshot)
        # Before the first swap there is no request to yield to, and at a lower priority the
        # compilation of the first search, 10 s of CPU time, would take minutes on a busy machine.
        if self._thread_id == threading.get_native_id():
            with suppress(OSError, AttributeError):  # not every system has priorities for threads
                os.setpriority(os.PRIO_PROCESS, self._thread_id, _FOLLOWER_NICENESS)

    def _open_warm(
        self, folder: Path, served_ref: ServedRef, model: ServedModel | None, current: LoadedSnapshot | None
    ) -> LoadedSnapshot:
        """Open a pulled snapshot, and warm it up."""
        loaded_snapshot = LoadedSnapshot.open(folder, served_ref, self._settings, model, current, self._scorers)
        return loaded_snapshot.warm_up()

    def _record_last_served(self, store: Store, served_ref: ServedRef) -> None:
        """Record which snapshot the ref names, so that a restart needs no store."""
        try:
            record_ref(self._target_ref.dest, store.url, served_ref.ref, served_ref.snapshot)
        except OSError as error:
            _LOG.error(
                "cannot record in %s which snapshot %s names: %s",
                self._target_ref.dest,
                served_ref.ref,
                error,
            )

    def _check_release(self) -> None:
        """Interrupt a release of the lease that takes too long; the lease then expires by itself.

        Raises:
            StoreError: `stop` was called more than `_RELEASE_SECONDS` ago.
        """
        if time.monotonic() > self._release_deadline:
            raise StoreError("the store does not answer, and the service is shutting down")

    def _check_pull(self, store: Store, target: _TargetVersion, current: LoadedSnapshot | None) -> None:
        """Interrupt a pull if the service stops or if snapshots were taken down.

        While a snapshot is served by byte ranges, also interrupt the pull if the ref moves, because
        the next snapshot can be served by byte ranges at once.
        """
        self._check_stop()
        if time.monotonic() < self._next_check_time:
            return
        self._next_check_time = time.monotonic() + self._settings.poll_seconds
        with suppress(StoreError):  # if the store does not answer, the pull itself fails
            if store.takedowns.list_replaced() != self.taken_down:
                raise _PullInterruptedError("snapshots were taken down")
            is_followed = current is not None and current.is_ranged and target.served_ref.ref == self._target_ref.ref
            if is_followed and self._resolve_target(store).served_ref.snapshot != target.served_ref.snapshot:
                raise _PullInterruptedError(f"{target.served_ref.ref} has moved")

    def _refuse(
        self,
        target: _TargetVersion | None,
        served_ref: ServedRef,
        error: BaseException,
        *,
        is_final: bool,
    ) -> None:
        previous_version = self._refused_version
        tries = previous_version[1].tries + 1 if previous_version is not None and previous_version[0] == target else 1
        reason = str(error) if isinstance(error, BookwheelError) else f"{type(error).__name__}: {error}"
        reason = " ".join(reason.split())
        refused_at = datetime.now(UTC).isoformat(timespec="seconds")
        refusal = Refusal(
            served_ref.ref,
            served_ref.number,
            served_ref.snapshot,
            mask_secrets(reason),
            refused_at,
            tries,
            is_final,
        )
        self._retry_time = self._compute_retry_time(tries, is_final=is_final)
        if previous_version is None or previous_version[1].reason != refusal.reason:
            _LOG.error("%s@%d is refused: %s", served_ref.ref, served_ref.number, refusal.reason)
        self._refused_version = target, refusal
        notify(self._observer.on_refused, refusal)
        if is_final and not self._slot.has_served and isinstance(error, BookwheelError):
            self._on_fatal(error)


@dataclass(frozen=True, slots=True)
class PulledFolder:
    """A folder to serve, which `bookwheel pull` has written."""

    folder: Path
    model: None = None  # passages only

    def check(self, check_stop: Callable[[], None] | None = None) -> None:
        """Check that the folder contains a snapshot; this is quick, so `check_stop` is not used.

        Raises:
            StoreError: Nothing was pulled there, or the manifest is damaged.
        """
        Snapshot.from_folder(self.folder).close()


@dataclass(frozen=True, slots=True)
class _FolderVersion:
    """A snapshot's folder and the state of its manifest, by which another snapshot is noticed."""

    folder: Path
    inode: int = 0  # of the manifest; 0 if there is none
    modified_ns: int = 0


def _read_folder_version(pulled_folder: Path) -> _FolderVersion:
    folder = resolve_pulled_folder(pulled_folder)
    with suppress(OSError):
        manifest_stat = (folder / MANIFEST).stat()
        return _FolderVersion(folder, manifest_stat.st_ino, manifest_stat.st_mtime_ns)
    return _FolderVersion(folder)


def _refuse_pin(name: str) -> LoadedSnapshot:
    raise NotFoundError(f"snapshot {name} is not served, since this service serves a pulled folder")


class FolderFollower(FollowerThread):
    """Polls the folder of pulled snapshots in a thread, and switches to the snapshot of each pull.

    It never contacts a store. If the new snapshot is faulty, the current snapshot is still served;
    after a temporary error, such as too little memory, the new snapshot is retried at growing intervals.
    """

    refusal: Refusal | None = None  # a folder has no ref; `problem` reports faults
    taken_down: frozenset[str] = frozenset()

    def __init__(
        self,
        target: PulledFolder,
        slot: SnapshotSlot,
        settings: ServiceSettings,
        observer: Observer,
        on_fatal: Callable[[BookwheelError], None] = lambda error: None,
        pins: PinnedSnapshots | None = None,
    ) -> None:
        """Prepare to follow; `on_fatal` gets the error if the first snapshot cannot be served."""
        super().__init__(slot, settings, observer, pins)
        self._folder, self._on_fatal = target.folder, on_fatal
        self._served_version: _FolderVersion | None = None
        self._rejected_version: _FolderVersion | None = None  # the version that was refused last
        self._tries, self._retry_time = 0, 0.0  # of the rejected version; monotonic clock
        self.problem = ""  # why the folder's snapshot is not served; empty: it is served

    def poll(self) -> None:
        """Poll the folder once, and switch to a new snapshot."""
        self._pins.update(_refuse_pin, frozenset())
        version, current = _read_folder_version(self._folder), self._slot.current
        if current is not None and version == self._served_version:
            self._rejected_version, self.problem = None, ""
            return
        if version == self._rejected_version and time.monotonic() < self._retry_time:
            return
        try:
            loaded_snapshot = self._open_snapshot(version.folder, current)
            self._slot.swap(loaded_snapshot)
            _LOG.info("snapshot %s of %s is served", loaded_snapshot.id[:12], version.folder)
            self._served_version, self._rejected_version, self.problem = version, None, ""
        except FollowerStoppedError:
            raise
        except BookwheelError as error:
            problem = mask_secrets(str(error))
            if (version, problem) != (self._rejected_version, self.problem):
                still_served = f"; snapshot {current.id[:12]} is still served" if current else ""
                _LOG.error("%s is not served: %s%s", version.folder, problem, still_served)
            self._tries = self._tries + 1 if version == self._rejected_version else 1
            self._retry_time = self._compute_retry_time(self._tries, is_final=isinstance(error, _PERMANENT_ERRORS))
            self._rejected_version, self.problem = version, problem
            if not self._slot.has_served:
                self._on_fatal(error)

    def _open_snapshot(self, folder: Path, current: LoadedSnapshot | None) -> LoadedSnapshot:
        with closing(Snapshot.from_folder(folder)) as snapshot:
            content, snapshot_id = snapshot.manifest.content, snapshot.id
            available = AvailableRetrievers.plan(snapshot, self._settings, uses_inner_products=False)
            check_memory(content, available.indexes, self._settings)
            if self._settings.run_trials:
                try_snapshot(folder, content, available.indexes)
        served_ref = ServedRef(CURRENT, 0, snapshot_id, "")
        loaded_snapshot = LoadedSnapshot.open(folder, served_ref, self._settings, None, current).warm_up()
        self._slot.prepare(loaded_snapshot)
        notify(self._observer.on_swap, loaded_snapshot, 0.0)
        return loaded_snapshot

    def _run(self) -> None:
        while True:
            with suppress(FollowerStoppedError):
                self.poll()
            if self._stop_event.wait(self._settings.poll_seconds):
                return
