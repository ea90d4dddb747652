"""The checkpoints of a training in the store, so that a run on another machine can go on with it.

`Keeper.put` is called by the loop after a checkpoint. It links the training's files, which never change, into a folder
of their own and returns; a thread puts them into the store beside the loop. While it is busy the newest checkpoint
waits, and one that waited before is left out. If the store cannot be written, the training goes on and says so once.
"""

import os
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Self

from rag_model.digest import digest_file
from rag_model.errors import BookwheelError, InputError
from rag_model.store.objects.blobs import BlobRef
from rag_model.store.store import Store
from rag_model.store.versions.trainings import Reached, StoredCheckpoint
from rag_model.training.loop.checkpoint import Standing, checkpoints, digests_of, read_checkpoint, standing_of
from rag_model.training.loop.folder import RECORD
from rag_model.training.loop.journal import METRICS

_LEAVING, _ARRIVING = ".leaving-", ".arriving"
_PATIENCE = 5.0  # seconds for what is being put, when a person ends the run

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Origin:
    """The training that a folder belongs to."""

    store: Store
    key: str  # of its exact inputs, 64 hex digits
    kind: str  # the objective's name
    snapshot: str  # full id
    folder: Path


@dataclass(frozen=True, slots=True)
class _Leaving:
    """A checkpoint that waits for the store."""

    folder: Path
    reached: Reached
    digests: dict[str, str]  # those that are known, by relative path


class Keeper:
    """Puts the checkpoints of one training into the store, one at a time, while the block runs."""

    def __init__(self, origin: Origin, say: Say) -> None:
        """Begin; `say` is called, by the loop's own thread, when a checkpoint could not be put."""
        self._origin, self._say = origin, say
        self._changed = threading.Condition()
        self._next: _Leaving | None = None
        self._over = self._hurry = False
        self._failed = self._told = ""
        self._digests: dict[tuple[int, int, int], BlobRef] = {}  # of files that never change, by inode, size and time
        for left in origin.folder.glob(f"{_LEAVING}*"):  # by a process that was killed
            shutil.rmtree(left, ignore_errors=True)
        self._thread = threading.Thread(target=self._serve, daemon=True, name="checkpoints")
        self._thread.start()

    def put(self, stage: str, step: int, steps: int) -> None:
        """Put the checkpoint that was just written for step `step` of a stage, which has `steps`.

        That of step 0 is left out: it is what the training begins with.
        """
        self._tell()
        if step == 0:
            return
        try:
            leaving = self._linked(stage, step, steps)
        except (BookwheelError, OSError) as refused:
            self._failed = _refused(step, refused)
            return
        with self._changed:
            replaced, self._next = self._next, leaving
            self._changed.notify()
        if replaced is not None:
            shutil.rmtree(replaced.folder, ignore_errors=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        """End: what waits is put if the training failed, and is not needed if it succeeded or was ended by a person."""
        failed = isinstance(error, Exception)
        with self._changed:
            self._over, self._hurry = True, not failed
            self._changed.notify()
        self._thread.join(_PATIENCE if error is not None and not failed else None)
        self._tell()

    def _serve(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._next is not None or self._over)
                leaving, self._next = self._next, None
            if leaving is None:
                return
            try:
                self._store(leaving)
                self._failed = ""
            except (BookwheelError, OSError) as refused:
                self._failed = _refused(leaving.reached.step, refused)
            finally:
                shutil.rmtree(leaving.folder, ignore_errors=True)

    def _store(self, leaving: _Leaving) -> None:
        files = {}
        for path in sorted(path for path in leaving.folder.rglob("*") if path.is_file()):
            if self._hurry:
                return
            name = path.relative_to(leaving.folder).as_posix()
            files[name] = path, self._identified(path, leaving.digests.get(name))
        self._origin.store.trainings.put(self._origin.key, leaving.reached, files, lambda: not self._hurry)

    def _identified(self, path: Path, digest: str | None) -> BlobRef:
        found = path.stat()
        state = found.st_ino, found.st_size, found.st_mtime_ns
        if state not in self._digests:
            self._digests[state] = BlobRef(digest or digest_file(path), found.st_size)
        return self._digests[state]

    def _tell(self) -> None:
        """Say what failed, once for as long as it fails."""
        failed = self._failed
        if failed and not self._told:
            self._say(f"{failed}; the training goes on, and this machine can resume it")
        self._told = failed

    def _linked(self, stage: str, step: int, steps: int) -> _Leaving:
        origin = self._origin
        now = datetime.now(UTC)
        folder = origin.folder / f"{_LEAVING}{now.timestamp():.6f}"
        digests: dict[str, str] = {}
        for path, fixed in _needed(origin.folder):
            name = path.relative_to(origin.folder)
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            _link(path, folder / name, fixed=fixed)
        for path in _newest(origin.folder):
            name = path.relative_to(origin.folder)
            digests |= {f"{name.as_posix()}/{file}": digest for file, digest in digests_of(path).items()}
        created = now.isoformat(timespec="seconds")
        return _Leaving(folder, Reached(origin.kind, origin.snapshot, stage, step, steps, created), digests)


def restore(origin: Origin, say: Say) -> None:
    """Bring a training's newest checkpoint from the store, unless the folder has come as far.

    If that fails and the folder has an older checkpoint, the reason is said, and the training goes on from there.

    Raises:
        BookwheelError: the folder has no checkpoint, and that of the store is damaged, or not signed by a trusted key.
    """
    try:
        found = origin.store.trainings.newest(origin.key)
        if found is None or _covers(origin.folder, found.reached):
            return
        _fetched(origin, found)
    except BookwheelError as refused:
        if not any(_sound(record.parent) for record in _records(origin.folder)):
            raise
        say(f"{refused}; the training goes on from what this machine has")
        return
    reached = found.reached
    of = f" of {reached.stage}" if reached.stage else ""
    say(f"goes on after step {reached.step:,}{of}, whose checkpoint is in the store")


def _fetched(origin: Origin, found: StoredCheckpoint) -> None:
    """Copy a checkpoint into the folder: first all files beside it, then each to its place, states last."""
    arriving = origin.folder / _ARRIVING
    shutil.rmtree(arriving, ignore_errors=True)
    try:
        origin.store.trainings.fetch(origin.key, found, arriving)
        for name in sorted(found.files, key=lambda name: ("checkpoints/" in name, name.endswith("state.json"))):
            (origin.folder / name).parent.mkdir(parents=True, exist_ok=True)
            (arriving / name).replace(origin.folder / name)
    finally:
        shutil.rmtree(arriving, ignore_errors=True)


def _covers(folder: Path, reached: Reached) -> bool:
    """Return whether the folder has a sound checkpoint that is as far."""
    return any(standing.step >= reached.step for standing in _sound(folder / reached.stage))


def _sound(folder: Path) -> Iterator[Standing]:
    """Yield the states of a stage's undamaged checkpoints, newest first."""
    for path in checkpoints(folder / "checkpoints"):
        with suppress(InputError):
            yield read_checkpoint(path)


def _newest(folder: Path) -> list[Path]:
    """Return the newest checkpoint of every stage."""
    found = (checkpoints(record.parent / "checkpoints") for record in _records(folder))
    return [some[0] for some in found if some]


def _records(folder: Path) -> list[Path]:
    found = (folder / RECORD, *folder.glob(f"*/{RECORD}"))
    return [path for path in found if path.is_file() and not path.parent.name.startswith(".")]


def _needed(folder: Path) -> Iterator[tuple[Path, bool]]:
    """Yield the files that a run resumes from, and whether each never changes."""
    for record in _records(folder):
        yield record, True
        yield record.parent / METRICS, False
    for checkpoint in _newest(folder):
        best = checkpoint.parent.parent / standing_of(checkpoint).best.folder
        yield from ((path, True) for some in (checkpoint, best) for path in some.rglob("*") if path.is_file())
    journals = {path.parent / METRICS for path in _records(folder)}
    yield from ((path, False) for path in folder.glob("*.jsonl") if path not in journals)  # scores of a teacher
    refreshes = folder / "refreshes"
    yield from ((path, True) for path in refreshes.glob("step-*.json"))
    yield from ((path, True) for path in refreshes.glob("step-*/encoders/**/*") if path.is_file())


def _refused(step: int, why: Exception) -> str:
    return f"the checkpoint of step {step:,} is not in the store: {why}"


def _link(path: Path, dest: Path, *, fixed: bool) -> None:
    try:
        if fixed:
            os.link(path, dest)
            return
    except OSError:  # this file system has no links
        pass
    shutil.copyfile(path, dest)
