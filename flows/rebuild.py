"""Rebuild an index during a training, in a separate process: `python -m flows.rebuild FOLDER`.

`FOLDER` contains the task, as `order.json`. The process publishes the encoders in the folder as a
model, and `reencode` builds a snapshot with them. Then the process writes the result or the error
to `outcome.json`. If the training ends earlier, the process ends too.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from beam_jobs.workers import exit_with_launcher, hold_launcher_lock
from flows.add_index import reencode
from flows.stage import run_flow
from rag_model.atomic_write import atomic_write
from rag_model.encoders.space import read_declared_space
from rag_model.errors import BookwheelError, RefConflictError, ResourceError, error_from_dict, error_to_dict
from rag_model.store.store import MODEL_PREFIX, Store
from rag_model.store.versions.model_manifest import QUESTION
from rag_model.store.versions.models import ModelMetadata, put_model
from rag_model.training.moving_index import RebuildOrder, RebuildResult
from rag_model.untrusted_text import parse_json

ORDER, OUTCOME = "order.json", "outcome.json"
_NICENESS = 10  # lets the training on the same machine run before the rebuild
# how often a rebuild is started at most, if it is killed by a user or for lack of memory
_MAX_STARTS = 3
_STOP_TIMEOUT = 20.0  # seconds to wait after each signal for the process to end


@dataclass(frozen=True, slots=True)
class RebuildTask:
    """The task of a rebuild process; its fields are the keys of `order.json`."""

    store: str
    snapshot: str  # full id
    encoders: str  # the folder with the encoders `question` and `passage`
    step: int
    ref: str  # name under which the rebuilt snapshot and the model are published
    beam_options: tuple[str, ...]
    lease: str  # path of the lock that the training holds until it ends (`hold_launcher_lock`)


def main(folder: Path) -> None:
    """Run the task that is in a folder, and write the outcome to the folder."""
    rebuild_task = RebuildTask(**parse_json((folder / ORDER).read_bytes()))
    exit_with_launcher(Path(rebuild_task.lease))
    os.nice(_NICENESS)
    try:
        outcome: Mapping[str, Any] = {"made": asdict(rebuild_index(rebuild_task))}
    except BookwheelError as error:
        outcome = error_to_dict(error)
    except Exception as error:
        outcome = {"error": "BookwheelError", "message": f"unexpected {type(error).__name__}: {error}"}
    with atomic_write(folder / OUTCOME) as temporary_path:
        temporary_path.write_text(json.dumps(outcome), encoding="utf-8")


def rebuild_index(task: RebuildTask) -> RebuildResult:
    """Publish the encoders, and a snapshot that is encoded with them.

    Raises:
        BookwheelError: a stage failed, or the gate refused the snapshot.
    """
    start_time = time.monotonic()
    model_id = publish_encoders(task)
    outcome = run_flow(reencode, task.snapshot, task.store, f"{MODEL_PREFIX}{model_id}", task.ref, task.beam_options)
    assert outcome.snapshot is not None  # None only after a dry run
    return RebuildResult(task.step, outcome.snapshot, outcome.seconds["embed"], round(time.monotonic() - start_time, 3))


def publish_encoders(task: RebuildTask) -> str:
    """Put the pair of encoders into the store as a model; return its id."""
    folder = Path(task.encoders)
    question_space = read_declared_space(folder / QUESTION)
    metadata = ModelMetadata(
        "encoders", question_space.to_json() if question_space else None, {"snapshot": task.snapshot, "step": task.step}
    )
    return put_model(Store.open(task.store), folder, metadata, task.ref).model


class RebuildProcess:
    """A rebuild that runs in a child process.

    If the process dies, it is started again, and repeats only work that is not recorded yet.
    """

    def __init__(self, folder: Path, environment: dict[str, str]) -> None:
        """Start the process with the task in `folder`."""
        self._folder, self._environment, self._n_starts = folder, environment, 0
        # The log is outside the folder, which is deleted after a failure.
        self._log = folder.with_suffix(".log")
        self._start_process()

    def done(self) -> bool:
        """Return whether the process has ended and will not be restarted."""
        return self._process.poll() is not None and not self._restart_if_failed()

    def result(self) -> RebuildResult:
        """Wait for the end of the rebuild and return its result; see `RunningRebuild.result`.

        Raises:
            BookwheelError: the error that the process reported, or the process died after every
                start.
        """
        while self._process.wait() is not None and self._restart_if_failed():
            pass
        try:
            outcome = parse_json((self._folder / OUTCOME).read_bytes())
        except (OSError, ValueError) as error:
            raise BookwheelError(
                f"the rebuild process ended {_describe_exit(self._process.returncode)} "
                f"{self._n_starts} times: see {self._log}"
            ) from error
        if "made" not in outcome:
            raise error_from_dict(**outcome)
        return RebuildResult(**outcome["made"])

    def stop(self) -> None:
        """End the process and its workers."""
        self._n_starts = _MAX_STARTS
        for stop_signal in (signal.SIGTERM, signal.SIGKILL):
            if self._process.poll() is None:
                with suppress(ProcessLookupError, subprocess.TimeoutExpired):
                    os.killpg(self._process.pid, stop_signal)
                    self._process.wait(_STOP_TIMEOUT)

    def _restart_if_failed(self) -> bool:
        """Start the process again if it died without an outcome; return whether it was started."""
        if (self._folder / OUTCOME).exists() or self._n_starts >= _MAX_STARTS:
            return False
        self._start_process()
        return True

    def _start_process(self) -> None:
        self._n_starts += 1
        rebuild_command = [sys.executable, "-m", "flows.rebuild", str(self._folder)]
        with self._log.open("ab") as log_file:
            self._process = subprocess.Popen(
                rebuild_command,
                stdin=subprocess.DEVNULL,
                stdout=log_file,
                stderr=log_file,
                env=self._environment,
                start_new_session=True,
            )


class RebuildLauncher:
    """Starts the rebuilds of one training; create it with `open_rebuild_launcher`."""

    def __init__(self, store: Store, ref: str, beam_options: Sequence[str], devices: str, lock: Path) -> None:
        """Set the arguments of all rebuilds; `ref` will name their snapshots and models."""
        self._task_arguments = store.url, ref, tuple(beam_options), str(lock)
        self._environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        if devices:
            self._environment["CUDA_VISIBLE_DEVICES"] = devices
        self._processes: list[RebuildProcess] = []

    def start(self, order: RebuildOrder) -> RebuildProcess:
        """Start a rebuild; see `Rebuilder.start`.

        Raises:
            ResourceError: the order's folder cannot be written, or no process can be started.
        """
        store, ref, beam_options, lock = self._task_arguments
        try:
            (order.folder / OUTCOME).unlink(missing_ok=True)
            task = RebuildTask(store, order.snapshot, str(order.encoders), order.step, ref, beam_options, lock)
            (order.folder / ORDER).write_text(json.dumps(asdict(task)), encoding="utf-8")
            rebuild_process = RebuildProcess(order.folder, self._environment)
        except OSError as error:
            raise ResourceError(
                f"the rebuild in {order.folder} cannot be started ({error.strerror or error}): "
                "free space, or raise the limit of processes"
            ) from error
        self._processes.append(rebuild_process)
        return rebuild_process

    def stop(self) -> None:
        """End the processes that are still running."""
        for process in self._processes:
            process.stop()


@contextmanager
def open_rebuild_launcher(
    store: Store, ref: str, beam_options: Sequence[str], devices: str = ""
) -> Iterator[RebuildLauncher]:
    """Yield a launcher for the rebuilds of a training. At the end of the block, rebuilds that still run
    are ended.
    """
    with hold_launcher_lock() as lock:
        launcher = RebuildLauncher(store, ref, beam_options, devices, lock)
        try:
            yield launcher
        finally:
            launcher.stop()


def delete_rebuild_refs(store: Store, ref: str) -> None:
    """Delete the refs of a training's rebuilds, so that `expire` may delete their versions."""
    for refs in (store.refs, store.models.refs):
        # The ref may have been moved meanwhile by another training with the same inputs.
        with suppress(RefConflictError):
            if (current_move := refs.find_current(ref)) is not None:
                refs.delete(ref, current_move.number, "the training has ended")


def _describe_exit(code: int) -> str:
    return f"by {signal.Signals(-code).name}" if code < 0 else f"with exit code {code}"


if __name__ == "__main__":
    main(Path(sys.argv[1]))
