"""Store checkpoints of unfinished trainings, so that another machine can continue a training.

```
trainings/<key>/00000003.json     record of the newest checkpoint: training, step and files
trainings/<key>/blobs/ab/abcdef…  files of the checkpoint, content-addressed
```
`<key>` is the digest of the training's exact inputs. A checkpoint is replaced every few minutes, so
its files are not stored among the store's blobs, which only `gc` may delete. A training deletes its
previous checkpoint with the checkpoint's files, and deletes its whole folder when the model is
published. A record is created exclusively, signed like a manifest, and never changed; the record
with the highest number is current. `gc` deletes the files of killed processes, and `expire` deletes
abandoned trainings.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Self

from rag_model.atomic_write import describe_write_error
from rag_model.errors import NotFoundError, StoreError
from rag_model.store.objects.blobs import BlobRef, fetch_file
from rag_model.store.objects.files import Files, encode_json
from rag_model.store.objects.intents import Intents
from rag_model.store.versions.checks import (
    FULL_ID,
    check,
    check_fields,
    check_format,
    check_paths,
    files_to_json,
    parse_files,
    parse_manifest,
)
from rag_model.store.versions.signatures import Signatures, TrustedKeys, normalize_json

FOLDER = "trainings"
TRAINING_STAGE = "finetune"  # stage of the memo with the records of published trainings
CHECKPOINT_PATH = re.compile(rf"{FOLDER}/([0-9a-f]{{64}})/(\d{{8}})\.json")
_FORMAT = 1
_STAGE = re.compile(r"[A-Za-z0-9_-]{0,100}")
_PREFIX = re.compile(r"[0-9a-f]{4,64}")
# types of the fields of `TrainingProgress`
_FIELDS = {"kind": str, "snapshot": str, "stage": str, "step": int, "steps": int, "created_at": str}


@dataclass(frozen=True, slots=True)
class TrainingProgress:
    """The training that a checkpoint belongs to, and the step that it has reached."""

    kind: str  # name of the training objective
    snapshot: str  # full id
    stage: str  # name of the stage; empty if the training has only one
    step: int
    steps: int  # total number of steps of the stage
    created_at: str  # ISO 8601, UTC, by the writer's clock; only shown to people


@dataclass(frozen=True, slots=True)
class StoredCheckpoint:
    """The record of a checkpoint: its progress, and the files to continue from."""

    progress: TrainingProgress
    files: Mapping[str, BlobRef]  # relative path -> file
    number: int = 0  # record number; 0 if the record is not stored yet

    @property
    def bytes(self) -> int:
        """The total size of the files in bytes; files with equal bytes are counted once."""
        return sum({blob.id: blob.size for blob in self.files.values()}.values())

    def to_json(self) -> dict[str, Any]:
        """Return the record as JSON values, with files sorted by name."""
        fields = {name: getattr(self.progress, name) for name in _FIELDS}
        return {"format": _FORMAT, **fields, "files": files_to_json(self.files)}

    @classmethod
    def from_json(cls, value: Any) -> Self:
        """Parse and check the result of `to_json`; the input may be hostile.

        Raises:
            StoreError: the format is newer, a path is unsafe, or a value is invalid.
        """
        check_format(value, _FORMAT, "checkpoint")
        fields = check_fields(value, {"format", "files", *_FIELDS}, "checkpoint")
        progress = {name: fields[name] for name in _FIELDS}
        for name, field_type in _FIELDS.items():
            check(
                type(progress[name]) is field_type and (field_type is str or progress[name] >= 0),
                f"{name} {progress[name]!r}",
            )
        check(FULL_ID.fullmatch(progress["snapshot"]), f"snapshot {progress['snapshot']!r}")
        check(_STAGE.fullmatch(progress["stage"]), f"stage {progress['stage']!r}")
        files = parse_files(fields["files"])
        check_paths(files)
        return cls(TrainingProgress(**progress), files)


@dataclass(frozen=True, slots=True)
class Trainings:
    """The unfinished trainings of one store, by key (64 hex digits)."""

    files: Files

    def list_keys(self) -> list[str]:
        """Return the keys of the trainings that have a checkpoint, sorted."""
        names = self.files.list_names(FOLDER, kind="directory")
        return [name for name in names if FULL_ID.fullmatch(name) and self._list_numbers(name)]

    def resolve(self, prefix: str) -> str:
        """Return the key that begins with `prefix` (4 digits or more).

        Raises:
            NotFoundError: there is no such key, or more than one.
        """
        keys = self.list_keys()
        matching_keys = [key for key in keys if key.startswith(prefix)]
        if _PREFIX.fullmatch(prefix) and len(matching_keys) == 1:
            return matching_keys[0]
        known_keys = ", ".join(key[:12] for key in keys) or "none"
        raise NotFoundError(
            f"{'no' if not matching_keys else 'more than one'} unfinished training {prefix!r} in "
            f"{self.files.url} ({known_keys}): give the first digits of its key"
        )

    def find_newest(self, key: str) -> StoredCheckpoint | None:
        """Return the newest checkpoint of a training; None if there is none.

        Raises:
            StoreError: the record is damaged, or of a newer format.
        """
        for number in reversed(self._list_numbers(key)):
            # The record is None if the checkpoint has just been replaced.
            if (checkpoint := self._read_record(key, number)) is not None:
                return checkpoint
        return None

    def iter_newest(self) -> Iterator[tuple[str, StoredCheckpoint]]:
        """Yield the key and newest checkpoint of each training; skip unreadable checkpoints."""
        for key in self.list_keys():
            with suppress(StoreError):
                if (checkpoint := self.find_newest(key)) is not None:
                    yield key, checkpoint

    def describe_signature(self, key: str, checkpoint: StoredCheckpoint) -> str:
        """Describe who signed a checkpoint; see `Signatures.describe`."""
        return Signatures(self.files).describe(self.record_path(key, checkpoint.number))

    def save_checkpoint(
        self,
        key: str,
        progress: TrainingProgress,
        files: Mapping[str, tuple[Path, BlobRef]],
        should_continue: Callable[[], bool],
    ) -> bool:
        """Replace the training's checkpoint; return False if `should_continue` returned False.

        `files` must never change, because in a local store they become hard links, which take no
        space. If the result is False or an error is raised, the previous checkpoint is kept.

        Raises:
            StoreError: the store cannot be written.
        """
        numbers = self._list_numbers(key)
        stored_files = self._read_files(key, numbers[-1]) if numbers else set[BlobRef]()
        for path, ref in files.values():
            if not should_continue():
                return False
            self._write_file(key, path, ref, stored_files)
        checkpoint = StoredCheckpoint(progress, {name: ref for name, (_, ref) in files.items()})
        if is_complete := should_continue():
            self._write_record(key, checkpoint, (numbers or [0])[-1] + 1)
        return is_complete

    def fetch(self, key: str, checkpoint: StoredCheckpoint, folder: Path) -> None:
        """Copy a checkpoint's files to a folder, each verified.

        Raises:
            RefusedError: a trust file is given, and no trusted key signed the record.
            StoreError: a file is missing or damaged, or the folder cannot be written.
        """
        record_path = self.record_path(key, checkpoint.number)
        if trusted_keys := TrustedKeys.from_environment():
            description = f"the checkpoint of training {key[:12]} in {self.files.url}"
            trusted_keys.check(Signatures(self.files), record_path, normalize_json(checkpoint.to_json()), description)
        try:
            for name, ref in checkpoint.files.items():
                path = f"{FOLDER}/{key}/{ref.path}"
                if self.files.get_size(path) != ref.size or not fetch_file(
                    ref.id, ref.size, folder / name, partial(self.files.iter_chunks, path, ref.size)
                ):
                    raise StoreError(
                        f"{self.files.url_of(path)} is missing or damaged, and the checkpoint of "
                        f"training {key[:12]} needs it: delete {self.files.url_of(record_path)}, "
                        "and the training starts again"
                    )
        except OSError as error:
            raise StoreError(describe_write_error(folder, error)) from error

    def delete(self, key: str) -> None:
        """Delete a training's checkpoint after its model is published; its records are deleted
        first.

        Raises:
            StoreError: the store cannot be written.
        """
        for number in self._list_numbers(key):
            self.files.remove(self.record_path(key, number))
        self.files.delete_folder(f"{FOLDER}/{key}")

    def record_path(self, key: str, number: int) -> str:
        """Return the path of a record."""
        return f"{FOLDER}/{key}/{number:08d}.json"

    def _list_numbers(self, key: str) -> list[int]:
        return self.files.list_numbers(f"{FOLDER}/{key}")

    def _read_record(self, key: str, number: int) -> StoredCheckpoint | None:
        path = self.record_path(key, number)
        if (record_bytes := self.files.read(path)) is None:
            return None
        try:
            return replace(parse_manifest(record_bytes, StoredCheckpoint.from_json), number=number)
        except StoreError as error:
            raise StoreError(
                f"{self.files.url_of(path)} cannot be used: {error}; delete this file, and the training starts again"
            ) from error

    def _read_files(self, key: str, number: int) -> set[BlobRef]:
        """Return the files that a record names; no files if it cannot be read."""
        with suppress(StoreError):
            if (checkpoint := self._read_record(key, number)) is not None:
                return {*checkpoint.files.values()}
        return set()

    def _write_file(self, key: str, path: Path, ref: BlobRef, stored_files: set[BlobRef]) -> None:
        stored_path = f"{FOLDER}/{key}/{ref.path}"
        if ref not in stored_files or self.files.get_size(stored_path) != ref.size:
            Intents(self.files).write_despite_sweeps(stored_path, partial(self.files.link, path, stored_path))

    def _write_record(self, key: str, checkpoint: StoredCheckpoint, number: int) -> None:
        record, signatures = normalize_json(checkpoint.to_json()), Signatures(self.files)
        while True:
            # Another machine that runs the same training may write this number first. The signature
            # is not removed then, because it is also the other machine's if both records are equal.
            signatures.sign(self.record_path(key, number), record)
            if self.files.create(self.record_path(key, number), encode_json(record)):
                break
            number += 1
        for older_number in self._list_numbers(key):
            if older_number < number:
                self._delete_replaced(key, older_number, {*checkpoint.files.values()})

    def _delete_replaced(self, key: str, number: int, needed_files: set[BlobRef]) -> None:
        """Delete a replaced checkpoint. Its record is deleted last, so that its files can be found
        if the deletion is interrupted.
        """
        for ref in self._read_files(key, number) - needed_files:
            self.files.remove(f"{FOLDER}/{key}/{ref.path}")
        stem = f"{number:08d}."
        for name in self.files.list_names(f"{FOLDER}/{key}"):
            if name.startswith(stem) and name.endswith(".sig"):
                self.files.remove(f"{FOLDER}/{key}/{name}")
        self.files.remove(self.record_path(key, number))
