"""Switch all workers of a service to a new snapshot at once; see `rag_model.serving.workers`.

Worker 0 is the leader. The leader's `LeaderSlot` waits until every other worker has opened a new
snapshot before it serves it. The other workers have a `WorkerSlot` and a `WorkerFollower`, which
opens the snapshots that the leader announces. To switch to a snapshot, the leader increases a
number in shared memory, which every request reads. So no worker uses the old snapshot for a request
that arrives after the switch.
"""

import queue
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import asdict, replace
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
from rag_model.serving.answering.loaded_snapshot import LoadedSnapshot, ServedModel, ServedRef
from rag_model.serving.following.follower import (
    FolderFollower,
    FollowedRef,
    FollowerThread,
    PulledFolder,
    RefFollower,
)
from rag_model.serving.following.pins import PinnedSnapshots, SnapshotOpeningError
from rag_model.serving.following.snapshot_slot import FollowerStoppedError, SnapshotSlot
from rag_model.serving.monitoring.observer import Observer, Refusal, notify
from rag_model.serving.settings import ServiceSettings
from rag_model.serving.workers import EXCHANGE_SECONDS, Message, WorkerLink
from rag_model.store.store import Store


class WorkerSlot(SnapshotSlot):
    """A slot that also holds a prepared snapshot, which is served after the next switch."""

    def __init__(
        self,
        on_freed: Callable[[str], None],
        link: WorkerLink,
        on_loaded: Callable[[str], None] = lambda snapshot: None,
    ) -> None:
        """Create an empty slot."""
        super().__init__(on_freed, on_loaded)
        self._link = link
        self._served_number = 0  # switch number of the current snapshot
        # (switch number, snapshot) of the snapshot that is open but not served yet
        self._prepared: tuple[int, LoadedSnapshot] | None = None

    @property
    def has_served(self) -> bool:
        """Whether any worker has served a snapshot, also before this worker was restarted."""
        return self._link.switch_number > 0

    @property
    def served_ref(self) -> ServedRef | None:
        """The ref of the current snapshot; None if other workers serve a newer snapshot."""
        self.switch_if_due()
        return super().served_ref if self._served_number >= self._link.switch_number else None

    def hold_current(self) -> LoadedSnapshot:
        """Return the current snapshot, held open.

        Raises:
            NotReadyError: No snapshot is loaded, or other workers serve a newer snapshot.
        """
        self.switch_if_due()
        if self._served_number < self._link.switch_number:
            raise NotReadyError("this worker is still opening the current snapshot: ask again in a moment")
        return super().hold_current()

    def set_prepared(self, loaded_snapshot: LoadedSnapshot, switch_number: int) -> None:
        """Store an open snapshot, which is served after switch `switch_number`."""
        self.discard_prepared()
        with self._lock:
            self._prepared = switch_number, loaded_snapshot

    def discard_prepared(self, switch_number: int | None = None) -> None:
        """Close the prepared snapshot; with `switch_number`, only if prepared for that switch."""
        with self._lock:
            if self._prepared is None or switch_number not in (None, self._prepared[0]):
                return
            loaded_snapshot, self._prepared = self._prepared[1], None
            is_served = loaded_snapshot is self._current
        if not is_served:
            loaded_snapshot.close()

    def needs_snapshot(self, switch_number: int) -> bool:
        """Return whether the snapshot of a switch still has to be opened."""
        with self._lock:
            is_prepared = self._prepared is not None and self._prepared[0] == switch_number
            return self._served_number < switch_number and not is_prepared

    def switch_if_due(self) -> None:
        """Serve the prepared snapshot if the leader has switched to it."""
        with self._lock:
            if self._prepared is None or self._prepared[0] > self._link.switch_number:
                return
            (self._served_number, loaded_snapshot), self._prepared = self._prepared, None
            is_served = loaded_snapshot is self._current
        if not is_served:
            super().swap(loaded_snapshot)

    def close(self) -> None:
        """Remove the current and the prepared snapshot."""
        self.discard_prepared()
        super().close()


class LeaderSlot(WorkerSlot):
    """The slot of the leader, the worker that follows the ref for all workers."""

    def prepare(self, loaded_snapshot: LoadedSnapshot) -> None:
        """Wait until every other worker has opened the snapshot.

        Raises:
            BookwheelError: A worker cannot open the snapshot; `loaded_snapshot` is closed.
            FollowerStoppedError: The service is shutting down.
        """
        self._link.send("open", **describe_snapshot(loaded_snapshot))
        try:
            self._opening = self._wait_for_others()
        except BaseException:
            loaded_snapshot.close()
            raise

    def _wait_for_others(self) -> Message:
        while not self._link.stop_signals:
            with suppress(queue.Empty):
                reply = self._link.replies.get(timeout=EXCHANGE_SECONDS)
                if reply["error"] is not None:
                    raise error_from_dict(**reply["error"])
                return dict(reply["opening"])
        raise FollowerStoppedError("the service is shutting down")

    def swap(self, loaded_snapshot: LoadedSnapshot) -> None:
        """Switch all workers to the prepared snapshot."""
        switch_number = self._opening["number"]
        self.set_prepared(loaded_snapshot, switch_number)
        self._link.switch_number = switch_number
        self.switch_if_due()
        self._link.send("switch", opening=self._opening)

    def update_ref(self, served_ref: ServedRef) -> None:
        """Record in all workers that the ref moved, but still names the current snapshot."""
        super().update_ref(served_ref)
        self._link.send("ref", ref=asdict(served_ref))

    def withdraw(self, taken_down: Collection[str]) -> str | None:
        """Stop serving snapshots that were taken down, in all workers.

        Return the id of the snapshot that this worker stopped serving; None if it served another.
        """
        # The slot of a restarted leader may be empty while the other workers serve a snapshot.
        if taken_down and (self._current is None or self._current.id in taken_down):
            self._link.send("withdraw", snapshots=sorted(taken_down))
        return super().withdraw(taken_down)


def describe_snapshot(loaded_snapshot: LoadedSnapshot) -> Message:
    """Return a message that tells another worker how to open the same snapshot."""
    return {
        "folder": None if loaded_snapshot.is_ranged else str(loaded_snapshot.snapshot.location),
        "ref": asdict(loaded_snapshot.served_ref),
        "model": loaded_snapshot.model and loaded_snapshot.model.id,
        # The leader chooses the retrievers for all workers, because the choice depends on free
        # memory.
        "retrievers": loaded_snapshot.retrievers,
        "notes": loaded_snapshot.notes,
    }


class LeaderStatePublisher:
    """Sends the leader's state to the other workers, and pins the snapshots that they request."""

    def __init__(
        self, link: WorkerLink, slot: SnapshotSlot, follower: RefFollower | FolderFollower, pins: PinnedSnapshots
    ) -> None:
        """Store the arguments; each `tick` sends the state."""
        self._link, self._slot, self._follower, self._pins = link, slot, follower, pins
        self._published_state: Message = {}

    def tick(self) -> None:
        """Send the state if it changed; reply to workers that wait for pinned snapshots."""
        refusal = self._follower.refusal
        state = {
            "refusal": refusal and asdict(refusal),
            "problem": self._follower.problem,
            "taken_down": sorted(self._follower.taken_down),
        }
        if state != self._published_state:
            self._published_state = state
            self._link.send("state", **state)
        with suppress(queue.Empty):
            while True:
                self._reply_to_pin(self._link.inbox.get_nowait())

    def _reply_to_pin(self, request: Message) -> None:
        """Pin a snapshot and reply with its location, unless it is still being opened."""
        name, reply = request["name"], {"to": request["sender"], "name": request["name"]}
        try:
            loaded_snapshot = self._pins.hold(name)
        except SnapshotOpeningError:
            return  # the worker asks again
        except BookwheelError as error:
            self._link.send("pin", error=error_to_dict(error), **reply)
        else:
            self._link.send("pin", error=None, opening=describe_snapshot(loaded_snapshot), **reply)
            self._slot.release(loaded_snapshot)


class WorkerFollower(FollowerThread):
    """Follows the leader: opens, in a separate thread, the snapshots that the leader announces."""

    _slot: WorkerSlot

    def __init__(
        self,
        followed_source: FollowedRef | PulledFolder,
        slot: WorkerSlot,
        settings: ServiceSettings,
        observer: Observer,
        pins: PinnedSnapshots,
        link: WorkerLink,
    ) -> None:
        """Store the arguments; `start` begins to follow."""
        super().__init__(slot, settings, observer, pins)
        self._followed_source, self._link = followed_source, link
        self._scorers = PairScorerCache(followed_source.url) if isinstance(followed_source, FollowedRef) else None
        self._reported_snapshot: LoadedSnapshot | None = None  # last reported to the observer
        self._pin_replies: dict[str, Message] = {}  # the leader's replies, by the name of the snapshot
        # the leader's state, as its last message reported it
        self.refusal: Refusal | None = None
        self.problem = ""
        self.taken_down: frozenset[str] = frozenset()

    def _run(self) -> None:
        while not self._stop_event.is_set():
            with suppress(queue.Empty):
                self._handle(self._link.inbox.get(timeout=EXCHANGE_SECONDS))
            self._slot.switch_if_due()
            current = self._slot.current
            if current is not None and current is not self._reported_snapshot:
                notify(self._observer.on_swap, current, 0.0)
            self._reported_snapshot = current
            self._pins.update(self._open_pinned, self.taken_down)
            self._pin_replies.clear()  # no request waits for the other replies any more

    def _handle(self, message: Message) -> None:
        match message["kind"]:
            case "open":
                self._prepare(message)
            case "switch" if self._slot.needs_snapshot(message["opening"]["number"]):
                self._prepare(message["opening"])
            case "drop":
                self._slot.discard_prepared(message["number"])
            case "withdraw":
                self._slot.withdraw(message["snapshots"])
            case "ref":
                self._slot.update_ref(ServedRef(**message["ref"]))
                if (current := self._slot.current) is not None:
                    notify(self._observer.on_same_snapshot_named, current, current.served_ref)
            case "pin":
                self._pin_replies[message["name"]] = message
            case "state":
                self.refusal = Refusal(**message["refusal"]) if message["refusal"] else None
                self.problem, self.taken_down = message["problem"], frozenset(message["taken_down"])

    def _prepare(self, opening: Message) -> None:
        """Open a snapshot, store it until its switch, and report the result to the supervisor."""
        error: BookwheelError | None = None
        try:
            loaded_snapshot = self._open(opening)
        except BookwheelError as failure:
            error = failure
        except BaseException as failure:  # a panic of a native library is not an Exception
            error = ResourceError(f"unexpected {type(failure).__name__}: {failure}")
        else:
            loaded_snapshot.served_ref = ServedRef(**opening["ref"])
            self._slot.set_prepared(loaded_snapshot, opening["number"])
        self._link.send("opened", number=opening["number"], error=error and error_to_dict(error))

    def _open(self, opening: Message) -> LoadedSnapshot:
        """Open a snapshot and warm it up; if the current one is the same snapshot, return that."""
        current, served_ref, folder = self._slot.current, ServedRef(**opening["ref"]), opening["folder"]
        if current is not None and current.id == served_ref.snapshot:
            description = describe_snapshot(current)
            if (description["folder"], description["model"]) == (folder, opening["model"]):
                return current
        settings = replace(self._settings, retrievers=tuple(opening["retrievers"]))
        if folder is None:
            store = Store.open(self._get_ref().url, check=self._check_stop)
            loaded_snapshot = LoadedSnapshot.open_ranged(store, served_ref, settings, current, self._scorers)
        else:
            model = self._load_model(opening["model"], current)
            loaded_snapshot = LoadedSnapshot.open(Path(folder), served_ref, settings, model, current, self._scorers)
        loaded_snapshot.notes = tuple(opening["notes"])
        return loaded_snapshot.warm_up()

    def _load_model(self, model_id: str | None, current: LoadedSnapshot | None) -> ServedModel | None:
        """Return the current model if it has this id, else load the model; None without an id."""
        if model_id is None or (current is not None and current.model is not None and current.model.id == model_id):
            return current.model if current is not None and model_id is not None else None
        followed_ref = self._get_ref()
        store = None if followed_ref.is_model_local else Store.open(followed_ref.url, check=self._check_stop)
        return ServedModel.load(
            store, model_id, followed_ref.reader_settings, followed_ref.passage_encoder, self._settings.batch_answers
        )

    def _get_ref(self) -> FollowedRef:
        assert isinstance(self._followed_source, FollowedRef)
        return self._followed_source

    def _open_pinned(self, name: str) -> LoadedSnapshot | None:
        """Open a pinned snapshot; return None while the leader has not pulled it."""
        reply = self._pin_replies.pop(name, None)
        if reply is None:
            # Ask each time, because a restarted leader does not know earlier requests.
            self._link.send("pin", name=name)
            return None
        if reply["error"] is not None:
            error = error_from_dict(**reply["error"])
            raise NotFoundError(str(error)) if isinstance(error, GoneError) else error
        return self._slot.hold(self._open(reply["opening"]))
