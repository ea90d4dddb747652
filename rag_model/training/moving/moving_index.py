"""The index of a training whose passage encoder learns: it is rebuilt every n steps, and the trainer moves to it.

A task owns a `MovingIndex` and delegates `asked`, `move` and `ask` to it (`AskingTask`). When n steps are done, the
encoders of that step are kept in the training's folder, and a rebuild of the snapshot's passages begins beside the
trainer. At a step's boundary the trainer then opens the new snapshot beside the one it asks, and moves to it. Unlike a
service's follower it pulls nothing, tries no index in a child process, since the rebuild has just measured them in its
own, and warms nothing up, since only a step waits.

* synchronous: the trainer waits. What it asks is a function of the step, so a run that was killed resumes to the same
  losses. A rebuild that was killed is started again.
* asynchronous: the trainer goes on with the snapshot that it has. A run that was killed asks the snapshot of its
  checkpoint again, and finishes the rebuild that was under way. One that is due while another runs begins after it.

With several processes the first one orders the rebuilds, and all move at the same step: to the snapshot that it names,
or, if one of them cannot open it, none.

A rebuild that fails, or whose snapshot the gate refuses, is logged and counted, and the trainer goes on with the
snapshot that it has. That snapshot is kept from `expire` and `gc` (`Lease`) until the trainer has moved on.
"""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from accelerate.state import PartialState
from accelerate.utils import broadcast_object_list, gather_object

from rag_model.errors import BookwheelError, GateRefusedError, ResourceError, UsageError
from rag_model.store.store import Store
from rag_model.store.versions.lease import Lease
from rag_model.store.versions.snapshot import Snapshot
from rag_model.training.loop.task import Measures
from rag_model.training.moving.moving_settings import MovingSettings
from rag_model.training.moving.rebuild import Order, Rebuild, Rebuilt, Running
from rag_model.training.moving.refreshes import Refreshes

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Learner:
    """What a moving index needs of its task."""

    save: Callable[[Path], Any]  # writes the encoders as they are to the folders `passage` and `question` of a folder
    turn_to: Callable[[Snapshot], None]  # asks a snapshot from now on; on an error it keeps the one before


class MovingIndex:
    """The snapshots that one training asks, one after another."""

    def __init__(
        self,
        store: Store,
        snapshot: Snapshot,
        settings: MovingSettings,
        rebuild: Rebuild | None,
        work: Path,
        learner: Learner,
    ) -> None:
        """Begin with `snapshot`, which the task asks already; `work` is the training's folder.

        Raises:
            StoreError: the snapshot is no longer in the store.
            UsageError: the settings want rebuilds, and there is nothing that makes them.
        """
        if settings.every and rebuild is None:
            raise UsageError("nothing here rebuilds an index: train with `bookwheel finetune`, or set every = 0")
        self._store, self._settings, self._rebuild, self._learner = store, settings, rebuild, learner
        self._first, self._asked = snapshot.id, snapshot.id
        self._refreshes = Refreshes(work, snapshot.id)
        self._made: Rebuilt | None = None  # the rebuild that gave the asked snapshot; None: of the first one
        self._running: tuple[Order, Running] | None = None
        self._overdue = self._resumed = False
        self._failed, self._swap_seconds = 0, 0.0
        self._lease = Lease(store)
        self._lease.move(snapshot.id)

    @property
    def asked(self) -> str:
        """The id of the snapshot that is currently asked."""
        return self._asked

    def ask(self, snapshot: str) -> None:
        """Ask the snapshot of a checkpoint again; as `AskingTask.ask`.

        Raises:
            BookwheelError: it no longer exists, or cannot be searched.
        """
        self._resumed = True
        if snapshot != self._asked:
            self._turn_to(snapshot)
        self._made = self._refreshes.of(snapshot)

    def move(self, step: int) -> Measures:
        """Begin a rebuild if one is due, and move to one that is finished; as `AskingTask.move`.

        Returns `snapshot_age`, the steps that the weights have done since those of the asked snapshot's encoder;
        `encoding_seconds` and `rebuild_seconds` of its rebuild, and `swap_seconds` of the move to it, 0 for the first
        snapshot; `waited_seconds` of this call; and `refreshes_failed` so far.
        """
        began, done = time.perf_counter(), step - 1
        first = PartialState().is_main_process
        told = [(self._next(done), self._failed) if first else None]
        made, self._failed = broadcast_object_list(told)[0]
        if made is not None:
            self._move_to(made)
        return {
            "snapshot_age": float(done - (self._made.step if self._made else 0)),
            "encoding_seconds": self._made.encoding_seconds if self._made else 0.0,
            "rebuild_seconds": self._made.seconds if self._made else 0.0,
            "swap_seconds": self._swap_seconds,
            "waited_seconds": time.perf_counter() - began,
            "refreshes_failed": float(self._failed),
        }

    def _next(self, done: int) -> Rebuilt | None:
        """Return the rebuild to move to now, or None."""
        due = self._settings.due(done)
        if self._settings.mode == "synchronous":
            if due:
                self._begin(done)
            return self._finished() if due else None
        found, self._resumed = self._continued(done) if self._resumed else None, False
        due &= found is None or found.step < done  # that of this step was begun before
        finished = found if isinstance(found, Rebuilt) else None
        if finished is None and self._running is not None and self._running[1].done():
            finished = self._finished()
        self._overdue |= due
        if self._overdue and self._running is None:
            self._overdue = False
            self._begin(done)
        return finished

    def _continued(self, done: int) -> Order | Rebuilt | None:
        """Return the rebuild that an earlier run finished and had not moved to, or left unfinished: that is started."""
        found = self._refreshes.begun_between(self._made.step if self._made else 0, done)
        if isinstance(found, Order):
            self._start(found)
        return found

    def _begin(self, done: int) -> None:
        try:
            order = self._refreshes.order(done, self._learner.save)
        except (ResourceError, OSError) as full:
            self._fail(done, f"its encoders cannot be kept ({full})")
        else:
            self._start(order)

    def _start(self, order: Order) -> None:
        assert self._rebuild is not None  # as checked at the start
        try:
            self._running = order, self._rebuild.start(order)
        except BookwheelError as failed:
            self._fail(order.step, str(failed))

    def _finished(self) -> Rebuilt | None:
        """Wait for the rebuild that runs; return None if there is none or it failed."""
        if self._running is None:
            return None
        (order, running), self._running = self._running, None
        try:
            made = running.result()
            self._refreshes.record(made)
        except GateRefusedError as refused:
            self._fail(order.step, str(refused), "was refused by the gate")
        except BookwheelError as failed:
            self._fail(order.step, str(failed))
        except OSError as full:
            self._fail(order.step, f"it cannot be recorded ({full})")
        else:
            return made
        return None

    def _move_to(self, made: Rebuilt) -> None:
        began, before = time.perf_counter(), self._asked
        why = self._refused(made.snapshot)
        if told := next(filter(None, gather_object([why])), ""):  # of any process: all ask the same snapshot
            if not why:
                self._turn_to(before)
            self._fail(made.step, told)
            return
        self._made, self._swap_seconds = made, time.perf_counter() - began
        if PartialState().is_main_process:
            self._refreshes.forget(made.step)

    def _refused(self, snapshot: str) -> str:
        """Ask a snapshot; return why this process cannot, or nothing."""
        try:
            self._turn_to(snapshot)
        except BookwheelError as failed:
            return str(failed)
        return ""

    def _turn_to(self, snapshot: str) -> None:
        before = self._asked
        self._lease.move(snapshot)
        try:
            self._learner.turn_to(Snapshot.from_store(self._store, snapshot))
        except BookwheelError:
            self._lease.move(before)
            raise
        self._asked = snapshot

    def _fail(self, step: int, why: str, how: str = "failed") -> None:
        self._failed += 1
        if PartialState().is_main_process:
            self._refreshes.forget(step)
        _log.warning("the rebuild of step %d %s, and snapshot %s is asked on: %s", step, how, self._asked[:12], why)
