"""Switch all workers of a service to a new snapshot at once; see `rag_model.serving.workers`.

The leader has a `LeadingSlot`: before it serves a snapshot that its follower opened, every other
worker has opened it. These have a `SharedSlot` and a `LedFollower`, which opens what the leader
says. The switch is a number in shared memory, which each request reads: no request that begins
after it is answered from the old snapshot, in any worker.
"""

import queue
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

from rag_model.errors import (
    BookwheelError,
    GoneError,
    NotFoundError,
    NotReadyError,
    ResourceError,
    error_from_dict,
    error_to_dict,
)
from rag_model.retrieve.models import PairScorerCache
from rag_model.serving.answering.loaded_snapshot import LoadedSnapshot, ServedRef
from rag_model.serving.answering.served_model import ServedModel
from rag_model.serving.following.follower import FolderFollower, FollowedRef, PulledFolder, RefFollower
from rag_model.serving.following.pins import PinnedSnapshots
from rag_model.serving.following.snapshot_slot import FollowerStoppedError, SnapshotSlot
from rag_model.serving.monitoring.observer import Observer, Refusal, notify
from rag_model.serving.runtime import SupervisedThread
from rag_model.serving.settings import ServiceSettings
from rag_model.serving.workers import Message, WorkerLink
from rag_model.store.store import Store
from rag_model.store.versions.snapshot import Snapshot

_POLL_SECONDS = 0.2


class SharedSlot(SnapshotSlot):
    """The slot of a worker, which changes to a prepared snapshot when the shared number says so."""

    def __init__(self, on_freed: Callable[[str], None], link: WorkerLink) -> None:
        """Create an empty slot."""
        super().__init__(on_freed)
        self._link = link
        self._number = 0  # of the switch to the current snapshot
        self._next: tuple[int, LoadedSnapshot] | None = None  # opened, not served yet

    @property
    def served_ref(self) -> ServedRef | None:
        """The ref of the current snapshot; None if the others serve a newer one."""
        self.switch_if_due()
        return super().served_ref if self._number >= self._link.switch_number else None

    def hold_current(self) -> LoadedSnapshot:
        """Return the current snapshot, held open.

        Raises:
            NotReadyError: No snapshot is loaded, or the others serve a newer one.
        """
        self.switch_if_due()
        if self._number < self._link.switch_number:
            raise NotReadyError("this worker opens the snapshot that the others serve: ask again in a moment")
        return super().hold_current()

    def put_next(self, loaded: LoadedSnapshot, number: int) -> None:
        """Keep an open snapshot ready for the switch with this number."""
        self.drop_next()
        with self._lock:
            self._next = number, loaded

    def drop_next(self, number: int | None = None) -> None:
        """Close a snapshot that will not be served; None: whatever its number is."""
        with self._lock:
            if self._next is None or number not in (None, self._next[0]):
                return
            loaded, self._next = self._next[1], None
            is_served = loaded is self._current
        if not is_served:
            loaded.close()

    def is_missing(self, number: int) -> bool:
        """Whether the snapshot of a switch is neither served nor prepared."""
        with self._lock:
            return self._number < number and (self._next is None or self._next[0] != number)

    def switch_if_due(self) -> None:
        """Serve the prepared snapshot if the switch to it has happened."""
        with self._lock:
            if self._next is None or self._next[0] > self._link.switch_number:
                return
            (self._number, loaded), self._next = self._next, None
            is_served = loaded is self._current
        if not is_served:
            super().swap(loaded)

    def close(self) -> None:
        """Remove the current and the prepared snapshot."""
        self.drop_next()
        super().close()


class LeadingSlot(SharedSlot):
    """The slot of the worker that follows the ref for all."""

    def prepare(self, loaded: LoadedSnapshot) -> None:
        """Let every other worker open the snapshot.

        Raises:
            BookwheelError: One of them cannot; `loaded` is closed.
            FollowerStoppedError: The service shuts down.
        """
        self._link.send("open", **describe_snapshot(loaded))
        try:
            self._opening = self._wait_for_others()
        except BaseException:
            loaded.close()
            raise

    def _wait_for_others(self) -> Message:
        while not self._link.stop_signals:
            with suppress(queue.Empty):
                reply = self._link.replies.get(timeout=_POLL_SECONDS)
                if reply["error"] is not None:
                    raise error_from_dict(**reply["error"])
                return dict(reply["opening"])
        raise FollowerStoppedError("the service shuts down")

    def swap(self, loaded: LoadedSnapshot) -> None:
        """Switch all workers to the prepared snapshot."""
        number = self._opening["number"]
        self.put_next(loaded, number)
        self._link.switch_number = number
        self.switch_if_due()
        self._link.send("switch", opening=self._opening)

    def update_ref(self, served_ref: ServedRef) -> None:
        """Record in all workers that the ref moved and names the current snapshot again."""
        super().update_ref(served_ref)
        self._link.send("ref", ref=asdict(served_ref))

    def withdraw(self) -> None:
        """Let no worker serve the current snapshot any more."""
        self._link.send("withdraw")
        super().withdraw()


def describe_snapshot(loaded: LoadedSnapshot) -> Message:
    """Return what another worker needs to open the same snapshot."""
    return {
        "folder": None if loaded.is_ranged else str(loaded.snapshot.location),
        "ref": asdict(loaded.served_ref),
        "model": loaded.model and loaded.model.id,
        # chosen once, because they depend on the free memory
        "retrievers": loaded.retrievers,
        "notes": loaded.notes,
    }


class LeaderState:
    """Tells the other workers what the leader's follower knows, and opens what they are asked for."""

    def __init__(
        self, link: WorkerLink, slot: SnapshotSlot, follower: RefFollower | FolderFollower, pins: PinnedSnapshots
    ) -> None:
        """Prepare to share; `tick` does it."""
        self._link, self._slot, self._follower, self._pins = link, slot, follower, pins
        self._shared_state: Message = {}
        self._pin_requests: list[Message] = []

    def tick(self) -> None:
        """Send changes of the state, and reply to the workers that wait for a pinned snapshot."""
        refusal = self._follower.refusal
        state = {
            "refusal": refusal and asdict(refusal),
            "problem": self._follower.problem,
            "taken_down": sorted(self._follower.taken_down),
        }
        if state != self._shared_state:
            self._shared_state = state
            self._link.send("state", **state)
        with suppress(queue.Empty):
            while True:
                self._pin_requests.append(self._link.inbox.get_nowait())
        self._pin_requests = [request for request in self._pin_requests if not self._reply_to_pin(request)]

    def _reply_to_pin(self, request: Message) -> bool:
        """Pin a snapshot here, and say where it is; return False if it is being opened."""
        name, reply = request["name"], {"to": request["sender"], "name": request["name"]}
        try:
            loaded = self._pins.hold(name)
        except BookwheelError as error:
            if self._pins.is_opening(name):
                return False
            self._link.send("pin", error=error_to_dict(error), **reply)
        else:
            self._link.send("pin", error=None, opening=describe_snapshot(loaded), **reply)
            self._slot.release(loaded)
        return True


class LedFollower:
    """Opens the snapshots that the leader serves, in its own thread."""

    def __init__(
        self,
        target: FollowedRef | PulledFolder,
        slot: SharedSlot,
        settings: ServiceSettings,
        observer: Observer,
        pins: PinnedSnapshots,
        link: WorkerLink,
    ) -> None:
        """Prepare to follow the leader."""
        self._target, self._slot, self._settings, self._observer = target, slot, settings, observer
        self._pins, self._link = pins, link
        self._scorers = PairScorerCache(target.url) if isinstance(target, FollowedRef) else None
        self._announced: LoadedSnapshot | None = None  # the last one that the observer knows
        self._asked_pins: set[str] = set()
        self._pin_replies: dict[str, Message] = {}
        self._stop_event = threading.Event()
        self.thread = SupervisedThread("follower", self._run, partial(notify, observer.on_thread_death))
        self.refusal: Refusal | None = None  # of the leader, as the next two
        self.problem = ""
        self.taken_down: frozenset[str] = frozenset()

    def start(self) -> None:
        """Begin to follow."""
        self.thread.start()

    def stop(self) -> None:
        """Stop following."""
        self._stop_event.set()
        self.thread.join()

    def _run(self) -> None:
        while not self._stop_event.is_set():
            with suppress(queue.Empty):
                self._handle(self._link.inbox.get(timeout=_POLL_SECONDS))
            self._slot.switch_if_due()
            current = self._slot.current
            if current is not None and current is not self._announced:
                notify(self._observer.on_swap, current, 0.0)
            self._announced = current
            self._pins.update(self._open_pinned, self.taken_down)

    def _handle(self, message: Message) -> None:
        match message["kind"]:
            case "open":
                self._prepare(message)
            case "switch" if self._slot.is_missing(message["opening"]["number"]):
                self._prepare(message["opening"])
            case "drop":
                self._slot.drop_next(message["number"])
            case "withdraw":
                self._slot.withdraw()
            case "ref":
                self._slot.update_ref(ServedRef(**message["ref"]))
                if (current := self._slot.current) is not None:
                    notify(self._observer.on_ref_moved, current, current.served_ref)
            case "pin":
                self._pin_replies[message["name"]] = message
            case "state":
                self.refusal = Refusal(**message["refusal"]) if message["refusal"] else None
                self.problem, self.taken_down = message["problem"], frozenset(message["taken_down"])

    def _prepare(self, opening: Message) -> None:
        """Open a snapshot, keep it ready for the switch, and tell the supervisor."""
        error: BookwheelError | None = None
        try:
            loaded = self._open(opening)
        except BookwheelError as failure:
            error = failure
        except BaseException as failure:  # a panic of a native library is no Exception
            error = ResourceError(f"unexpected {type(failure).__name__}: {failure}")
        else:
            loaded.served_ref = ServedRef(**opening["ref"])
            self._slot.put_next(loaded, opening["number"])
        self._link.send("opened", number=opening["number"], error=error and error_to_dict(error))

    def _open(self, opening: Message) -> LoadedSnapshot:
        """Open a snapshot and warm it up, or return the current one if it is the same."""
        current, served_ref, folder = self._slot.current, ServedRef(**opening["ref"]), opening["folder"]
        if current is not None and current.id == served_ref.snapshot:
            description = describe_snapshot(current)
            if (description["folder"], description["model"]) == (folder, opening["model"]):
                return current
        settings = replace(self._settings, retrievers=tuple(opening["retrievers"]))
        if folder is None:
            loaded = self._open_ranged(served_ref, settings, current)
        else:
            model = self._load_model(opening["model"], current)
            loaded = LoadedSnapshot.open(Path(folder), served_ref, settings, model, current, self._scorers)
        loaded.notes = tuple(opening["notes"])
        try:
            loaded.warm_up()
        except BaseException:
            loaded.close()
            raise
        return loaded

    def _open_ranged(
        self, served_ref: ServedRef, settings: ServiceSettings, current: LoadedSnapshot | None
    ) -> LoadedSnapshot:
        store = Store.open(self._get_ref().url)
        snapshot = Snapshot.from_manifest(
            store, store.snapshots.get(served_ref.snapshot), by_ranges=True, cache_bytes=self._settings.cache_bytes
        )
        return LoadedSnapshot.open_ranged(snapshot, served_ref, settings, current, self._scorers)

    def _load_model(self, model_id: str | None, current: LoadedSnapshot | None) -> ServedModel | None:
        """Return the current model, or load another one, which the leader has tried."""
        if model_id is None or (current is not None and current.model is not None and current.model.id == model_id):
            return current.model if current is not None and model_id is not None else None
        target = self._get_ref()
        store = None if target.is_model_local else Store.open(target.url)
        return ServedModel.load(
            store, model_id, target.reader_settings, target.passage_encoder, self._settings.batch_answers
        )

    def _get_ref(self) -> FollowedRef:
        assert isinstance(self._target, FollowedRef)
        return self._target

    def _open_pinned(self, name: str) -> LoadedSnapshot | None:
        """Open a pinned snapshot that the leader has pulled; None: it has not yet."""
        reply = self._pin_replies.pop(name, None)
        if reply is None:
            if name not in self._asked_pins:
                self._asked_pins.add(name)
                self._link.send("pin", name=name)
            return None
        self._asked_pins.discard(name)
        if reply["error"] is not None:
            error = error_from_dict(**reply["error"])
            raise NotFoundError(str(error)) if isinstance(error, GoneError) else error
        return self._slot.hold(self._open(reply["opening"]))
