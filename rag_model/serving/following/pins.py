"""Keep snapshots open that requests name, besides the snapshot that the ref names now.

For example, a training run searches the same snapshot from its first to its last step, while the
ref moves on. A snapshot is pinned by the first request that names it. It stays open until no
request has named it for `pin_seconds`. The follower opens it; until it is open, requests get an
error that asks to try again.
"""

import logging
import re
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from rag_model.errors import BookwheelError, GoneError, NotFoundError, NotReadyError, UsageError
from rag_model.secrets import mask_secrets
from rag_model.serving.answering.loaded_snapshot import LoadedSnapshot
from rag_model.serving.following.snapshot_slot import FollowerStoppedError, SnapshotSlot
from rag_model.serving.settings import ServiceSettings
from rag_model.store.versions.checks import FULL_ID

_LOG = logging.getLogger(__name__)
_RETRY_SECONDS = 30.0  # seconds until opening a snapshot is tried again after a failure
_MOVE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}@[0-9]{1,8}")
_MAX_QUOTED = 80  # characters of a name in an error message


@dataclass(frozen=True, slots=True)
class _Failure:
    """The reason why a snapshot cannot be opened, and the time at which this was noticed."""

    error: BookwheelError
    time: float


@dataclass(slots=True)
class _Pin:
    """A snapshot that requests name; its times are those of the monotonic clock."""

    last_request_time: float
    state: LoadedSnapshot | _Failure | None  # None until the follower has opened it


class SnapshotOpeningError(NotReadyError):
    """The snapshot is being opened, or looked up in the store."""


class PinnedSnapshots:
    """The snapshots that requests name. Thread-safe."""

    def __init__(self, slot: SnapshotSlot, settings: ServiceSettings) -> None:
        """Pin nothing yet."""
        self._slot, self._settings = slot, settings
        self._lock = threading.Lock()
        self._pins: dict[str, _Pin] = {}  # by the snapshot's name in requests
        # called when a snapshot must be opened
        self.on_request: Callable[[], None] = lambda: None

    def hold(self, name: str | None) -> LoadedSnapshot:
        """Return the snapshot `name` (an id or `ref@number`), or the current one, held open.

        Call `SnapshotSlot.release` afterwards.

        Raises:
            UsageError: The name is a ref, which may move to another snapshot.
            SnapshotOpeningError: The snapshot is not open yet.
            NotReadyError: Too many other snapshots are pinned.
            NotFoundError: The store has no such snapshot.
            GoneError: The snapshot expired, or was taken down.
        """
        if name is None:
            return self._slot.hold_current()
        with self._lock:
            pin, is_new = self._pins.get(name), name not in self._pins
            if pin is None:
                _check_name(name)
                self._check_limit()
                pin = self._pins[name] = _Pin(time.monotonic(), self._hold_current(name))
            pin.last_request_time = time.monotonic()
            match pin.state:
                case LoadedSnapshot() as loaded_snapshot:
                    return self._slot.hold(loaded_snapshot)
                case _Failure(error):
                    raise error
        if is_new:
            self.on_request()
        raise SnapshotOpeningError(f"snapshot {name} is being opened: ask again in a moment")

    def update(self, open_snapshot: Callable[[str], LoadedSnapshot | None], taken_down: frozenset[str]) -> None:
        """Open the snapshots that requests wait for; release snapshots that are not requested.

        Args:
            open_snapshot: Returns a snapshot by its name, held open; None: it cannot be opened yet.
            taken_down: Ids of the snapshots that were taken down.
        """
        for name, pin in list(self._pins.items()):
            now = time.monotonic()
            if now - pin.last_request_time > self._settings.pin_seconds:
                self._drop(name)
                continue
            match pin.state:
                case None:
                    self._open(name, pin, open_snapshot)
                case LoadedSnapshot(id=identity) if identity in taken_down:
                    self._drop(name, GoneError(f"snapshot {name} was taken down: ask for another one"))
                case _Failure(time=failed_at) if now - failed_at > _RETRY_SECONDS:
                    self._drop(name)

    def close(self) -> None:
        """Release all snapshots."""
        for name in list(self._pins):
            self._drop(name)

    def _open(self, name: str, pin: _Pin, open_snapshot: Callable[[str], LoadedSnapshot | None]) -> None:
        try:
            loaded_snapshot = open_snapshot(name)
        except NotFoundError as error:
            _LOG.warning("a request names snapshot %s, which cannot be opened: %s", name, error)
            reason = "it expired, was taken down, or never existed"
            self._record_failure(pin, GoneError(f"there is no snapshot {name}: {reason}"))
        except FollowerStoppedError:
            raise
        except BaseException as error:  # a panic of a native library is not an Exception
            if isinstance(error, BookwheelError):
                _LOG.error("a request names snapshot %s, which cannot be opened: %s", name, mask_secrets(str(error)))
            else:
                _LOG.exception("a request names snapshot %s, which cannot be opened", name)
            self._record_failure(
                pin, NotReadyError(f"snapshot {name} cannot be opened now: the service's log says why")
            )
        else:
            with self._lock:
                pin.state = loaded_snapshot

    def _record_failure(self, pin: _Pin, error: BookwheelError) -> None:
        with self._lock:
            pin.state = _Failure(error, time.monotonic())

    def _hold_current(self, name: str) -> LoadedSnapshot | None:
        """Return the current snapshot, held open, if `name` names it."""
        if self._slot.served_ref is None:
            return None
        loaded_snapshot = self._slot.hold_current()
        served_ref = loaded_snapshot.served_ref
        if name in (loaded_snapshot.id, f"{served_ref.ref}@{served_ref.number}"):
            return loaded_snapshot
        self._slot.release(loaded_snapshot)
        return None

    def _drop(self, name: str, error: BookwheelError | None = None) -> None:
        with self._lock:
            pin = self._pins.pop(name)
            if error is not None:
                self._pins[name] = _Pin(pin.last_request_time, _Failure(error, time.monotonic()))
        if isinstance(pin.state, LoadedSnapshot):
            self._slot.release(pin.state)

    def _check_limit(self) -> None:
        """Raise an error if too many snapshots are open or about to be opened.

        Snapshots that could not be opened do not count, nor does the current snapshot.
        """
        served_ref = self._slot.served_ref
        current_id = served_ref.snapshot if served_ref else ""
        names = [
            name
            for name, pin in self._pins.items()
            if pin.state is None or (isinstance(pin.state, LoadedSnapshot) and pin.state.id != current_id)
        ]
        if len(names) >= self._settings.pinned_snapshots:
            raise NotReadyError(
                f"the service keeps at most {self._settings.pinned_snapshots} snapshots open for "
                f"requests, now {', '.join(sorted(names))}: name one of them, or try again later"
            )


def _check_name(name: str) -> None:
    if not FULL_ID.fullmatch(name) and not _MOVE_NAME.fullmatch(name):
        raise UsageError(
            f"snapshot {name[:_MAX_QUOTED]!r} is neither a full id nor ref@number, such as "
            "latest@3: GET /snapshot shows both"
        )
