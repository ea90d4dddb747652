"""Upload the checkpoints of a training to the store, so that another machine can resume it.

The training loop calls `CheckpointUploader.enqueue` after each checkpoint. This method puts the
files into a separate folder, by hard links if they never change, and returns. A thread uploads them
while the loop runs. While the thread is busy, only the newest checkpoint waits, and older waiting
checkpoints are dropped. If the store cannot be written, the training goes on and reports the
failure once.
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
from rag_model.store.versions.trainings import StoredCheckpoint, TrainingProgress
from rag_model.training.loop.checkpoint import (
    METRICS,
    RECORD,
    TrainerState,
    list_checkpoints,
    read_checkpoint,
    read_state,
)

_UPLOAD_PREFIX, _DOWNLOAD_FOLDER = ".leaving-", ".arriving"
_MAX_WAIT = 5.0  # seconds to wait for a running upload when the user ends the run

OnMessage = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class TrainingIdentity:
    """The training to which a work folder belongs."""

    store: Store
    key: str  # memo key of all inputs of the training, 64 hex digits
    kind: str  # the objective's name
    snapshot: str  # full id
    folder: Path  # the work folder of the training


@dataclass(frozen=True, slots=True)
class _PendingUpload:
    """A checkpoint that waits to be uploaded."""

    folder: Path
    progress: TrainingProgress
    digests: dict[str, str]  # known digests of files, by relative path


class CheckpointUploader:
    """Uploads the checkpoints of one training one by one, while the `with` block runs."""

    def __init__(self, identity: TrainingIdentity, on_message: OnMessage) -> None:
        """Start the upload thread; its failures are reported by the thread of the training loop."""
        self._identity, self._on_message = identity, on_message
        self._condition = threading.Condition()
        self._pending: _PendingUpload | None = None
        self._closing = self._aborting = False
        self._failure = self._reported_failure = ""
        # references to uploaded files by (inode, size, modification time)
        self._blob_refs: dict[tuple[int, int, int], BlobRef] = {}
        # A process that was killed may have left the folders of its uploads.
        for stale_folder in identity.folder.glob(f"{_UPLOAD_PREFIX}*"):
            shutil.rmtree(stale_folder, ignore_errors=True)
        self._thread = threading.Thread(target=self._upload_pending, daemon=True, name="checkpoints")
        self._thread.start()

    def enqueue(self, stage: str, step: int, n_steps: int) -> None:
        """Enqueue the checkpoint of `step`, which was just written, in a stage of `n_steps` steps.

        The checkpoint of step 0 is skipped, because it contains only the initial models.
        """
        self._report_failure()
        if step == 0:
            return
        try:
            upload = self._link_files(stage, step, n_steps)
        except (BookwheelError, OSError) as error:
            self._failure = _describe_failure(step, error)
            return
        with self._condition:
            superseded_upload, self._pending = self._pending, upload
            self._condition.notify()
        if superseded_upload is not None:
            shutil.rmtree(superseded_upload.folder, ignore_errors=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, _: type[BaseException] | None, error: BaseException | None, __: TracebackType | None) -> None:
        """Stop the thread. If the training failed, upload the waiting checkpoint first.

        If the training succeeded or the user ended it, the waiting checkpoint is not needed.
        """
        has_failed = isinstance(error, Exception)
        with self._condition:
            self._closing, self._aborting = True, not has_failed
            self._condition.notify()
        self._thread.join(_MAX_WAIT if error is not None and not has_failed else None)
        self._report_failure()

    def _upload_pending(self) -> None:
        while True:
            with self._condition:
                self._condition.wait_for(lambda: self._pending is not None or self._closing)
                upload, self._pending = self._pending, None
            if upload is None:
                return
            try:
                self._upload(upload)
                self._failure = ""
            except (BookwheelError, OSError) as error:
                self._failure = _describe_failure(upload.progress.step, error)
            finally:
                shutil.rmtree(upload.folder, ignore_errors=True)

    def _upload(self, upload: _PendingUpload) -> None:
        refs_by_name = {}
        for path in sorted(path for path in upload.folder.rglob("*") if path.is_file()):
            if self._aborting:
                return
            name = path.relative_to(upload.folder).as_posix()
            refs_by_name[name] = path, self._find_blob_ref(path, upload.digests.get(name))
        self._identity.store.trainings.save_checkpoint(
            self._identity.key, upload.progress, refs_by_name, lambda: not self._aborting
        )

    def _find_blob_ref(self, path: Path, digest: str | None) -> BlobRef:
        stat = path.stat()
        file_identity = stat.st_ino, stat.st_size, stat.st_mtime_ns
        if file_identity not in self._blob_refs:
            self._blob_refs[file_identity] = BlobRef(digest or digest_file(path), stat.st_size)
        return self._blob_refs[file_identity]

    def _report_failure(self) -> None:
        """Report a failed upload, but no further failures until an upload has succeeded again."""
        failure = self._failure
        if failure and not self._reported_failure:
            self._on_message(f"{failure}; the training goes on, and this machine can resume it")
        self._reported_failure = failure

    def _link_files(self, stage: str, step: int, n_steps: int) -> _PendingUpload:
        identity = self._identity
        timestamp = datetime.now(UTC)
        folder = identity.folder / f"{_UPLOAD_PREFIX}{timestamp.timestamp():.6f}"
        digests: dict[str, str] = {}
        for path, is_immutable in _iter_resume_files(identity.folder):
            name = path.relative_to(identity.folder)
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            _link_or_copy(path, folder / name, is_immutable=is_immutable)
        for path in _list_newest_checkpoints(identity.folder):
            name = path.relative_to(identity.folder)
            digests |= {f"{name.as_posix()}/{file_name}": digest for file_name, digest in read_state(path)[0].items()}
        created_at = timestamp.isoformat(timespec="seconds")
        return _PendingUpload(
            folder, TrainingProgress(identity.kind, identity.snapshot, stage, step, n_steps, created_at), digests
        )


def restore_checkpoint(identity: TrainingIdentity, on_message: OnMessage) -> None:
    """Fetch the newest checkpoint of a training from the store.

    Nothing is fetched if the work folder has an equally new checkpoint. If the fetch fails and the
    folder has an older checkpoint, the reason is reported and the training resumes from the older
    one.

    Raises:
        BookwheelError: the folder has no checkpoint, and the one in the store is damaged or not
            signed by a trusted key.
    """
    try:
        stored_checkpoint = identity.store.trainings.find_newest(identity.key)
        if stored_checkpoint is None or _is_up_to_date(identity.folder, stored_checkpoint.progress):
            return
        _copy_into_folder(identity, stored_checkpoint)
    except BookwheelError as error:
        if not any(True for stage in _list_stage_folders(identity.folder) for _ in _iter_valid_states(stage)):
            raise
        on_message(f"{error}; the training resumes from this machine's checkpoint")
        return
    progress = stored_checkpoint.progress
    stage_suffix = f" of {progress.stage}" if progress.stage else ""
    on_message(f"goes on after step {progress.step:,}{stage_suffix}, whose checkpoint is in the store")


def _copy_into_folder(identity: TrainingIdentity, stored_checkpoint: StoredCheckpoint) -> None:
    """Fetch a checkpoint into a temporary folder, then move its files, with `state.json` last."""
    download_folder = identity.folder / _DOWNLOAD_FOLDER
    shutil.rmtree(download_folder, ignore_errors=True)
    try:
        identity.store.trainings.fetch(identity.key, stored_checkpoint, download_folder)
        for name in sorted(
            stored_checkpoint.files, key=lambda name: ("checkpoints/" in name, name.endswith("state.json"))
        ):
            (identity.folder / name).parent.mkdir(parents=True, exist_ok=True)
            (download_folder / name).replace(identity.folder / name)
    finally:
        shutil.rmtree(download_folder, ignore_errors=True)


def _is_up_to_date(folder: Path, progress: TrainingProgress) -> bool:
    """Return whether the folder has an undamaged checkpoint as new as `progress`, or newer."""
    return any(state.step >= progress.step for state in _iter_valid_states(folder / progress.stage))


def _iter_valid_states(folder: Path) -> Iterator[TrainerState]:
    """Yield the state of each undamaged checkpoint of a stage, newest first."""
    for path in list_checkpoints(folder / "checkpoints"):
        with suppress(InputError):
            yield read_checkpoint(path)


def _list_newest_checkpoints(folder: Path) -> list[Path]:
    """Return the newest checkpoint of every stage."""
    checkpoint_lists = (list_checkpoints(stage / "checkpoints") for stage in _list_stage_folders(folder))
    return [checkpoints[0] for checkpoints in checkpoint_lists if checkpoints]


def _list_stage_folders(folder: Path) -> list[Path]:
    """Return the folders of the stages that have begun; without stages, this is `folder` itself."""
    stages = (folder, *(path.parent for path in folder.glob(f"*/{RECORD}")))
    return [stage for stage in stages if (stage / RECORD).is_file() and not stage.name.startswith(".")]


def _iter_resume_files(folder: Path) -> Iterator[tuple[Path, bool]]:
    """Yield (path, whether the file never changes) for each file that a resumed run needs."""
    stage_folders = _list_stage_folders(folder)
    for stage_folder in stage_folders:
        yield stage_folder / RECORD, True
        yield stage_folder / METRICS, False
    for checkpoint in _list_newest_checkpoints(folder):
        best_folder = checkpoint.parent.parent / read_state(checkpoint)[1].best.folder
        yield from (
            (path, True) for subfolder in (checkpoint, best_folder) for path in subfolder.rglob("*") if path.is_file()
        )
    journal_paths = {stage_folder / METRICS for stage_folder in stage_folders}
    # All other `.jsonl` files are caches of scores.
    yield from ((path, False) for path in folder.glob("*.jsonl") if path not in journal_paths)
    rebuilds = folder / "refreshes"
    yield from ((path, True) for path in rebuilds.glob("step-*.json"))
    yield from ((path, True) for path in rebuilds.glob("step-*/encoders/**/*") if path.is_file())


def _describe_failure(step: int, error: Exception) -> str:
    return f"the checkpoint of step {step:,} is not in the store: {error}"


def _link_or_copy(path: Path, dest: Path, *, is_immutable: bool) -> None:
    try:
        if is_immutable:
            os.link(path, dest)
            return
    except OSError:  # The file system may not support hard links.
        pass
    shutil.copyfile(path, dest)
