"""Rebuild the index every n steps while its passage encoder is trained, and switch to it.

A `MovingIndexTask` owns a `MovingIndex`. Every n steps, the current encoders are saved in the
training's folder, and a rebuild encodes the snapshot's passages with them. Between two steps, the
trainer opens the new snapshot next to the current snapshot and switches to it. A service that
follows a ref does more: it pulls the snapshot, tests its indexes in a child process and warms them
up. The trainer does none of this, because the rebuild has just measured the indexes, and only one
training step has to wait for the switch.

* synchronous: the trainer waits for the rebuild. The searched snapshot depends only on the step, so
  a run that was killed and resumed on the same CPU has the same losses. A rebuild that was killed
  is started again.
* asynchronous: the trainer goes on with the current snapshot. A run that was killed searches the
  snapshot of its checkpoint again and finishes the rebuild that was running. If a rebuild is due
  while another rebuild runs, it starts afterwards.

With several processes, the first process starts the rebuilds and names the new snapshot. All
processes switch to it at the same step; if one of them cannot open it, none switches.

If a rebuild fails or the gate refuses its snapshot, this is logged and counted, and the trainer
goes on with the current snapshot. A `SnapshotLease` protects this snapshot from `expire` and `gc`
until the trainer has switched to another snapshot.

The rebuilds of a training are recorded in its folder, so that a resumed run knows which rebuilds
were started and which are finished. `refreshes/step-<n>/` has the encoders of step n until the
training searches a snapshot of this or a later step. `refreshes/step-<n>.json` is the record of a
finished rebuild.

The caller of a training passes a `Rebuilder`. The one in `flows` runs each rebuild as a flow in a
child process, with jobs on Beam.
"""

import json
import logging
import re
import shutil
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

from accelerate.state import PartialState
from accelerate.utils import broadcast_object_list, gather_object

from rag_model.atomic_write import atomic_write
from rag_model.errors import BookwheelError, GateRefusedError, InputError, ResourceError, UsageError
from rag_model.store.store import Store
from rag_model.store.versions.snapshot import Snapshot, SnapshotLease
from rag_model.training.loop.checkpoint import atomic_folder
from rag_model.training.loop.loop_settings import check_bounds
from rag_model.training.loop.task import Measures
from rag_model.untrusted_text import parse_json

RebuildMode = Literal["synchronous", "asynchronous"]
_FOLDER_NAME = re.compile(r"step-(\d{8,})")
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class MovingSettings:
    """Settings of an index that is rebuilt during a training: table `[moving]` of the settings."""

    # number of training steps between two rebuilds of the index; 0 means no rebuilds; Siriwardhana
    # et al. 2023: 500
    every: int = 500
    # whether the training waits for a rebuild, which makes runs repeatable (`synchronous`), or goes
    # on meanwhile, as in the paper (`asynchronous`)
    mode: RebuildMode = "synchronous"
    # GPUs of this machine for the rebuild, written as in CUDA_VISIBLE_DEVICES; empty means the GPUs
    # of the training
    devices: str = ""

    def __post_init__(self) -> None:
        check_bounds(self, "[moving]", {"every": 0})

    def is_due(self, n_steps: int) -> bool:
        """Return whether a rebuild starts after `n_steps` steps."""
        return bool(self.every and n_steps) and n_steps % self.every == 0

    def count_rebuilds(self, n_steps: int) -> int:
        """Return how many rebuilds start in a training of `n_steps`; none starts at its end."""
        return max(0, n_steps - 1) // self.every if self.every else 0


@dataclass(frozen=True, slots=True)
class RebuildOrder:
    """One rebuild that is to be run."""

    step: int  # training step after which the encoders were saved
    snapshot: str  # full id of the snapshot whose passages are encoded
    folder: Path  # folder with the encoders and the files of the rebuild

    @property
    def encoders(self) -> Path:
        """Folder with the encoders `passage` and `question`."""
        return self.folder / "encoders"


@dataclass(frozen=True, slots=True)
class RebuildResult:
    """A finished rebuild, whose snapshot is published and has passed the gate."""

    step: int  # training step after which the encoders were saved
    snapshot: str  # full id of the new snapshot
    encoding_seconds: float  # seconds to encode the passages
    seconds: float  # seconds of the whole rebuild


class RunningRebuild(Protocol):
    """A rebuild that has been started."""

    def done(self) -> bool:
        """Return whether `result` would return at once."""
        ...

    def result(self) -> RebuildResult:
        """Wait until the rebuild ends, and return its result.

        Raises:
            BookwheelError: the rebuild failed, or the gate refused the snapshot; the training goes
                on with the previous snapshot.
        """
        ...


class Rebuilder(Protocol):
    """Runs rebuilds while a training goes on."""

    def start(self, order: RebuildOrder) -> RunningRebuild:
        """Start a rebuild and return at once; a rebuild that was killed resumes from its records.

        Equal encoders and passages give equal snapshots.

        Raises:
            BookwheelError: the rebuild cannot be started.
        """
        ...


class RebuildFolder:
    """The files of the started and the finished rebuilds of one training."""

    def __init__(self, work: Path, snapshot_id: str) -> None:
        """Use the training's folder `work`; `snapshot_id` names the snapshot to encode again."""
        self._root, self._snapshot = work / "refreshes", snapshot_id

    def create_order(self, step: int, save_encoders: Callable[[Path], Any]) -> RebuildOrder:
        """Store the encoders of `step` with `save_encoders`; return the order for their rebuild."""
        rebuild_order = RebuildOrder(step, self._snapshot, self._get_folder(step))
        with atomic_folder(rebuild_order.encoders) as folder:
            save_encoders(folder)
        return rebuild_order

    def record_result(self, result: RebuildResult) -> None:
        """Record a finished rebuild."""
        with atomic_write(self._get_record_path(result.step)) as temp_path:
            temp_path.write_text(json.dumps(asdict(result)) + "\n", encoding="utf-8")

    def delete_encoders(self, step: int) -> None:
        """Delete the encoders of a step and of all previous steps."""
        for started_step in self._list_started_steps():
            if started_step <= step:
                shutil.rmtree(self._get_folder(started_step), ignore_errors=True)

    def find_result(self, snapshot_id: str) -> RebuildResult | None:
        """Return the last rebuild that produced this snapshot; None for the initial snapshot.

        Raises:
            InputError: a record is corrupt.
        """
        return next((result for result in self._list_results() if result.snapshot == snapshot_id), None)

    def find_latest(self, after: int, until: int) -> RebuildOrder | RebuildResult | None:
        """Return the last finished or started rebuild with `after` < step <= `until`.

        Return None if there is no such rebuild.

        Raises:
            InputError: a record is corrupt.
        """
        orders = (RebuildOrder(step, self._snapshot, self._get_folder(step)) for step in self._list_started_steps())
        # Results come first, so that `max` returns the finished rebuild of a step, not its order.
        rebuilds: list[RebuildOrder | RebuildResult] = [*self._list_results()]
        rebuilds += [rebuild_order for rebuild_order in orders if rebuild_order.encoders.is_dir()]
        return max(
            (rebuild for rebuild in rebuilds if after < rebuild.step <= until),
            key=lambda rebuild: rebuild.step,
            default=None,
        )

    def _get_folder(self, step: int) -> Path:
        return self._root / f"step-{step:08d}"

    def _get_record_path(self, step: int) -> Path:
        return self._root / f"step-{step:08d}.json"

    def _list_started_steps(self) -> list[int]:
        return [int(match[1]) for path in self._root.glob("step-*/") if (match := _FOLDER_NAME.fullmatch(path.name))]

    def _list_results(self) -> list[RebuildResult]:
        """Return the finished rebuilds, newest first."""
        paths = [path for path in self._root.glob("step-*.json") if _FOLDER_NAME.fullmatch(path.stem)]
        return [_read_result(path) for path in sorted(paths, reverse=True)]


def _read_result(path: Path) -> RebuildResult:
    try:
        return RebuildResult(**parse_json(path.read_bytes()))
    except (OSError, ValueError, TypeError) as error:
        raise InputError(f"{path} is corrupt ({error}): delete it to rebuild again") from error


@dataclass(frozen=True, slots=True)
class MovingIndexHooks:
    """Functions of the task that a moving index calls."""

    # function that writes `passage/` and `question/` into a folder
    save_encoders: Callable[[Path], Any]
    # function that switches to a snapshot; if it fails, the current snapshot is still searched
    switch_to: Callable[[Snapshot], None]


class MovingIndex:
    """The snapshots that one training searches, one after another."""

    def __init__(
        self,
        store: Store,
        snapshot: Snapshot,
        settings: MovingSettings,
        rebuild: Rebuilder | None,
        work: Path,
        hooks: MovingIndexHooks,
    ) -> None:
        """Start with `snapshot`, which the task already searches; `work` is the training's folder.

        Raises:
            StoreError: the snapshot is no longer in the store.
            UsageError: the settings ask for rebuilds, but `rebuild` is None.
        """
        if settings.every and rebuild is None:
            raise UsageError("this training cannot rebuild an index: train with `bookwheel finetune`, or set every = 0")
        self._store, self._settings, self._rebuild, self._hooks = store, settings, rebuild, hooks
        self._snapshot_id = snapshot.id
        self._rebuild_folder = RebuildFolder(work, snapshot.id)
        # the rebuild that produced the current snapshot; None for the initial snapshot
        self._current_rebuild: RebuildResult | None = None
        self._running_rebuild: tuple[RebuildOrder, RunningRebuild] | None = None
        self._is_overdue = False  # whether a rebuild is due but waits for the running one
        self._has_resumed = False  # whether a checkpoint was loaded since the last step
        self._n_failures, self._swap_seconds = 0, 0.0
        self._lease = SnapshotLease(store)
        self._lease.hold(snapshot.id)

    @property
    def searched_snapshot(self) -> str:
        """The id of the snapshot that is searched now."""
        return self._snapshot_id

    def search_snapshot(self, snapshot: str) -> None:
        """Switch to the snapshot of a checkpoint; see `SearchingTask.search_snapshot`.

        Raises:
            BookwheelError: the snapshot no longer exists, or cannot be searched.
        """
        self._has_resumed = True
        if snapshot != self._snapshot_id:
            self._switch_to(snapshot)
        self._current_rebuild = self._rebuild_folder.find_result(snapshot)

    def move_index(self, step: int) -> Measures:
        """Start a rebuild if one is due, and switch to a finished rebuild; see `SearchingTask`.

        The result has `snapshot_age`, the number of steps since the encoders of the searched
        snapshot were saved; `encoding_seconds` and `rebuild_seconds` of its rebuild and
        `swap_seconds` of the switch to it, which are 0 for the initial snapshot; `waited_seconds`
        of this call; and `refreshes_failed`, the number of failed rebuilds so far.
        """
        start_time, n_steps = time.perf_counter(), step - 1
        is_main_process = PartialState().is_main_process
        decisions = [(self._choose_rebuild(n_steps), self._n_failures) if is_main_process else None]
        rebuild_result, self._n_failures = broadcast_object_list(decisions)[0]
        if rebuild_result is not None:
            self._switch_to_rebuild(rebuild_result)
        return {
            "snapshot_age": float(n_steps - (self._current_rebuild.step if self._current_rebuild else 0)),
            "encoding_seconds": self._current_rebuild.encoding_seconds if self._current_rebuild else 0.0,
            "rebuild_seconds": self._current_rebuild.seconds if self._current_rebuild else 0.0,
            "swap_seconds": self._swap_seconds,
            "waited_seconds": time.perf_counter() - start_time,
            "refreshes_failed": float(self._n_failures),
        }

    def _choose_rebuild(self, n_steps: int) -> RebuildResult | None:
        """Return the finished rebuild to switch to after `n_steps` steps, or None."""
        is_due = self._settings.is_due(n_steps)
        if self._settings.mode == "synchronous":
            if is_due:
                self._start_rebuild(n_steps)
            return self._wait_for_rebuild() if is_due else None
        resumed_rebuild, self._has_resumed = self._resume_rebuild(n_steps) if self._has_resumed else None, False
        # The previous run may already have started the rebuild of this step.
        is_due &= resumed_rebuild is None or resumed_rebuild.step < n_steps
        finished_rebuild = resumed_rebuild if isinstance(resumed_rebuild, RebuildResult) else None
        if finished_rebuild is None and self._running_rebuild is not None and self._running_rebuild[1].done():
            finished_rebuild = self._wait_for_rebuild()
        self._is_overdue |= is_due
        if self._is_overdue and self._running_rebuild is None:
            self._is_overdue = False
            self._start_rebuild(n_steps)
        return finished_rebuild

    def _resume_rebuild(self, n_steps: int) -> RebuildOrder | RebuildResult | None:
        """Return the last rebuild that the killed run did not switch to; restart it if it is
        unfinished.
        """
        latest_rebuild = self._rebuild_folder.find_latest(
            self._current_rebuild.step if self._current_rebuild else 0, n_steps
        )
        if isinstance(latest_rebuild, RebuildOrder):
            self._start_order(latest_rebuild)
        return latest_rebuild

    def _start_rebuild(self, n_steps: int) -> None:
        try:
            rebuild_order = self._rebuild_folder.create_order(n_steps, self._hooks.save_encoders)
        except (ResourceError, OSError) as error:
            self._record_failure(n_steps, f"its encoders cannot be saved ({error})")
        else:
            self._start_order(rebuild_order)

    def _start_order(self, rebuild_order: RebuildOrder) -> None:
        assert self._rebuild is not None  # checked by __init__
        try:
            self._running_rebuild = rebuild_order, self._rebuild.start(rebuild_order)
        except BookwheelError as error:
            self._record_failure(rebuild_order.step, str(error))

    def _wait_for_rebuild(self) -> RebuildResult | None:
        """Wait for the running rebuild; return None if there is none, or if it failed."""
        if self._running_rebuild is None:
            return None
        (rebuild_order, running_rebuild), self._running_rebuild = self._running_rebuild, None
        try:
            rebuild_result = running_rebuild.result()
            self._rebuild_folder.record_result(rebuild_result)
        except GateRefusedError as error:
            self._record_failure(rebuild_order.step, str(error), "was refused by the gate")
        except BookwheelError as error:
            self._record_failure(rebuild_order.step, str(error))
        except OSError as error:
            self._record_failure(rebuild_order.step, f"it cannot be recorded ({error})")
        else:
            return rebuild_result
        return None

    def _switch_to_rebuild(self, rebuild_result: RebuildResult) -> None:
        start_time, previous_id = time.perf_counter(), self._snapshot_id
        error_message = self._try_switch(rebuild_result.snapshot)
        # If one process failed, none may switch, because all must search the same snapshot.
        errors = filter(None, gather_object([error_message]))
        if first_error := next(errors, ""):
            if not error_message:
                self._switch_to(previous_id)
            self._record_failure(rebuild_result.step, first_error)
            return
        self._current_rebuild, self._swap_seconds = rebuild_result, time.perf_counter() - start_time
        if PartialState().is_main_process:
            self._rebuild_folder.delete_encoders(rebuild_result.step)

    def _try_switch(self, snapshot_id: str) -> str:
        """Switch to a snapshot; return the error message, or an empty string on success."""
        try:
            self._switch_to(snapshot_id)
        except BookwheelError as error:
            return str(error)
        return ""

    def _switch_to(self, snapshot_id: str) -> None:
        previous_id = self._snapshot_id
        self._lease.hold(snapshot_id)
        try:
            self._hooks.switch_to(Snapshot.from_store(self._store, snapshot_id))
        except BookwheelError:
            self._lease.hold(previous_id)
            raise
        self._snapshot_id = snapshot_id

    def _record_failure(self, step: int, reason: str, verb: str = "failed") -> None:
        self._n_failures += 1
        if PartialState().is_main_process:
            self._rebuild_folder.delete_encoders(step)
        _log.warning(
            "the rebuild of step %d %s; the training stays at snapshot %s: %s",
            step,
            verb,
            self._snapshot_id[:12],
            reason,
        )


class MovingIndexTask(ABC):
    """Base class of tasks that search a snapshot, whose index may be rebuilt by a `MovingIndex`."""

    _snapshot: Snapshot  # a snapshot of the store in which all searched snapshots are
    _moving_index: MovingIndex | None = None  # None if the index is never rebuilt

    @property
    @abstractmethod
    def searched_snapshot(self) -> str:
        """The id of the snapshot that is searched now."""

    @abstractmethod
    def switch_to(self, snapshot: Snapshot) -> None:
        """Search this snapshot from now on; if this fails, the current snapshot is still searched."""

    def move_index(self, step: int) -> Measures:
        """Switch to a rebuilt snapshot if there is one; see `MovingIndex`."""
        return {} if self._moving_index is None else self._moving_index.move_index(step)

    def search_snapshot(self, snapshot: str) -> None:
        """Search the snapshot that was searched when a checkpoint was written.

        Raises:
            BookwheelError: the snapshot no longer exists, or cannot be searched.
        """
        if self._moving_index is not None:
            self._moving_index.search_snapshot(snapshot)
        elif snapshot != self.searched_snapshot:
            self.switch_to(Snapshot.open(str(self._snapshot.location), snapshot))
