"""The rebuilds of a training's moving index: each in a child process that ends with the training (`flows.rebuild`)."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from beam_jobs.lease import hold_lease
from flows.rebuild import OUTCOME, RebuildTask
from rag_model.errors import BookwheelError, RefConflictError, ResourceError, error_from_dict
from rag_model.store.store import Store
from rag_model.training.rebuilds import RebuildOrder, RebuildResult
from rag_model.untrusted_text import parse_json

_TRIES = 3  # starts of a rebuild that is killed: by a person, or for memory
_PATIENCE = 20.0  # seconds to end by itself


class RebuildProcess:
    """A rebuild in a child process; one that dies is started again, and repeats only what it had not recorded."""

    def __init__(self, folder: Path, environment: dict[str, str]) -> None:
        """Start it; `folder` has its task."""
        self._folder, self._environment, self._starts = folder, environment, 0
        self._log = folder.with_suffix(".log")  # beside the folder, which a failed rebuild does not keep
        self._start()

    def done(self) -> bool:
        """Return whether the process has ended for good."""
        return self._process.poll() is not None and not self._restart_if_failed()

    def result(self) -> RebuildResult:
        """Wait for the end; as `Running.result`.

        Raises:
            BookwheelError: the error of the child, as `raised` gives it; or it died again and again.
        """
        while self._process.wait() is not None and self._restart_if_failed():
            pass
        try:
            outcome = parse_json((self._folder / OUTCOME).read_bytes())
        except (OSError, ValueError) as error:
            raise BookwheelError(
                f"the process that rebuilds ended {_describe_exit(self._process.returncode)} {self._starts} times: see "
                f"{self._log}"
            ) from error
        if "made" not in outcome:
            raise error_from_dict(**outcome)
        return RebuildResult.from_json(outcome["made"])

    def stop(self) -> None:
        """End the process and its workers."""
        self._starts = _TRIES
        for signal_sent in (signal.SIGTERM, signal.SIGKILL):
            if self._process.poll() is None:
                with suppress(ProcessLookupError, subprocess.TimeoutExpired):
                    os.killpg(self._process.pid, signal_sent)
                    self._process.wait(_PATIENCE)

    def _restart_if_failed(self) -> bool:
        """Start the process again if it died without an outcome; return whether it runs again."""
        if (self._folder / OUTCOME).exists() or self._starts >= _TRIES:
            return False
        self._start()
        return True

    def _start(self) -> None:
        self._starts += 1
        command = [sys.executable, "-m", "flows.rebuild", str(self._folder)]
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=self._environment,
                start_new_session=True,
            )


class RebuildLauncher:
    """Starts the rebuilds of one training; make it with `rebuilds`."""

    def __init__(self, store: Store, ref: str, beam_options: Sequence[str], devices: str, lease: Path) -> None:
        """Set what all rebuilds share; `ref` names their snapshots, and their models."""
        self._task_arguments = store.url, ref, tuple(beam_options), str(lease)
        self._environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        if devices:
            self._environment["CUDA_VISIBLE_DEVICES"] = devices
        self._children: list[RebuildProcess] = []

    def start(self, order: RebuildOrder) -> RebuildProcess:
        """Start a rebuild; as `Rebuild.start`.

        Raises:
            ResourceError: its folder cannot be written, or no process can be started.
        """
        store, ref, beam_options, lease = self._task_arguments
        try:
            (order.folder / OUTCOME).unlink(missing_ok=True)
            task = RebuildTask(store, order.snapshot, str(order.encoders), order.step, ref, beam_options, lease)
            task.write(order.folder)
            child = RebuildProcess(order.folder, self._environment)
        except OSError as error:
            raise ResourceError(
                f"the rebuild in {order.folder} cannot be started ({error.strerror or error}): free space, or "
                "raise the limit of processes"
            ) from error
        self._children.append(child)
        return child

    def stop(self) -> None:
        """End what still runs."""
        for child in self._children:
            child.stop()


@contextmanager
def open_rebuild_launcher(store: Store, ref: str, beam_options: Sequence[str], devices: str = "") -> Iterator[RebuildLauncher]:
    """Yield the rebuilds of a training; those that still run at the end of the block are ended."""
    with hold_lease() as lease:
        launcher = RebuildLauncher(store, ref, beam_options, devices, lease)
        try:
            yield launcher
        finally:
            launcher.stop()


def delete_rebuild_refs(store: Store, ref: str) -> None:
    """Delete the refs of a training's rebuilds, whose snapshots and models `expire` may then delete."""
    for refs in (store.refs, store.models.refs):
        with suppress(RefConflictError):  # it is being moved, so another training has these inputs
            if (current_move := refs.find_current(ref)) is not None:
                refs.delete(ref, current_move.number, "the training has ended")


def _describe_exit(code: int) -> str:
    return f"by {signal.Signals(-code).name}" if code < 0 else f"with exit code {code}"
