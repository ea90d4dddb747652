"""Unfinished trainings in a store: of each the newest checkpoint, so that another machine can go on with it.

```
trainings/<key>/00000003.json     the newest checkpoint: of what training, after which step, and its files
trainings/<key>/blobs/ab/abcdef…  its files, content-addressed
```
`<key>` is the digest of the training's exact inputs. A checkpoint is replaced every few minutes, so its files are not
among the store's blobs, which only `gc` may delete: a training deletes them with the record of the checkpoint before,
and all of its folder when its model is published. A record is created exclusively, signed as manifests are, and never
changed; the highest number counts. `gc` deletes what a killed process left, `expire` trainings that were abandoned.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Self

from rag_model.errors import NotFoundError, StoreError
from rag_model.store.objects.blobs import BlobRef
from rag_model.store.objects.fetch import fetch
from rag_model.store.objects.files import Files, json_bytes
from rag_model.store.objects.intents import Intents
from rag_model.store.versions.checks import ID, check, check_format, check_paths, fields_of, from_bytes
from rag_model.store.versions.signatures import Signatures, Trust, as_stored

FOLDER = "trainings"
TRAINED = "finetune"  # the memo's stage that records published trainings by their keys
RECORD = re.compile(rf"{FOLDER}/([0-9a-f]{{64}})/(\d{{8}})\.json")
_FORMAT = 1
_NUMBER = re.compile(r"(\d{8})\.json")
_STAGE = re.compile(r"[A-Za-z0-9_-]{0,100}")
_PREFIX = re.compile(r"[0-9a-f]{4,64}")
_FIELDS = {"kind": str, "snapshot": str, "stage": str, "step": int, "steps": int, "created_at": str}


@dataclass(frozen=True, slots=True)
class Reached:
    """How far a training has come."""

    kind: str  # the objective's name
    snapshot: str  # full id
    stage: str  # of several; empty: there is one
    step: int
    steps: int  # of the stage
    created_at: str  # ISO 8601, UTC, by the writer's clock: for people only


@dataclass(frozen=True, slots=True)
class StoredCheckpoint:
    """A record: how far the training has come, and the files of its folder that it goes on from."""

    reached: Reached
    files: Mapping[str, BlobRef]  # relative path -> file
    number: int = 0  # of the record; 0: it is not in a store yet

    @property
    def bytes(self) -> int:
        """The size of its files."""
        return sum({ref.id: ref.size for ref in self.files.values()}.values())

    def to_json(self) -> dict[str, Any]:
        """Return the record as JSON values, files sorted by name."""
        told = {name: getattr(self.reached, name) for name in _FIELDS}
        return {"format": _FORMAT, **told, "files": {name: self.files[name].to_json() for name in sorted(self.files)}}

    @classmethod
    def from_json(cls, value: Any) -> Self:
        """Read back what `to_json` wrote; the input may be hostile, so every field is checked.

        Raises:
            StoreError: a newer format, a hostile path, or a value that no training writes.
        """
        check_format(value, _FORMAT, "checkpoint")
        fields = fields_of(value, {"format", "files", *_FIELDS}, "checkpoint")
        told = {name: fields[name] for name in _FIELDS}
        for name, kind in _FIELDS.items():
            check(type(told[name]) is kind and (kind is str or told[name] >= 0), f"{name} {told[name]!r}")
        check(ID.fullmatch(told["snapshot"]), f"snapshot {told['snapshot']!r}")
        check(_STAGE.fullmatch(told["stage"]), f"stage {told['stage']!r}")
        check(isinstance(fields["files"], dict), "field 'files', which is not an object")
        files = {path: BlobRef.from_json(ref) for path, ref in fields["files"].items()}
        check_paths(files)
        return cls(Reached(**told), files)


@dataclass(frozen=True, slots=True)
class Trainings:
    """The unfinished trainings of one store, by their keys: 64 hex digits."""

    files: Files

    def keys(self) -> list[str]:
        """Return the keys of those that have a checkpoint, sorted."""
        names = self.files.names(FOLDER, kind="directory")
        return [name for name in names if ID.fullmatch(name) and self._numbers(name)]

    def resolve(self, prefix: str) -> str:
        """Return the key that begins with `prefix`, 4 digits or more.

        Raises:
            NotFoundError: none does, or several do.
        """
        keys = self.keys()
        found = [key for key in keys if key.startswith(prefix)]
        if _PREFIX.fullmatch(prefix) and len(found) == 1:
            return found[0]
        known = ", ".join(key[:12] for key in keys) or "none"
        raise NotFoundError(
            f"{'no' if not found else 'more than one'} unfinished training {prefix!r} in {self.files.url} ({known}): "
            "give the first digits of its key"
        )

    def newest(self, key: str) -> StoredCheckpoint | None:
        """Return the newest checkpoint of a training; None if there is none.

        Raises:
            StoreError: its record is damaged, or of a newer format.
        """
        for number in reversed(self._numbers(key)):
            if (found := self._read(key, number)) is not None:  # otherwise it has just been replaced
                return found
        return None

    def every(self) -> Iterator[tuple[str, StoredCheckpoint]]:
        """Yield the keys of all trainings with their newest checkpoints, without those that cannot be read."""
        for key in self.keys():
            with suppress(StoreError):
                if (found := self.newest(key)) is not None:
                    yield key, found

    def signed(self, key: str, found: StoredCheckpoint) -> str:
        """Say who signed a checkpoint, as `Signatures.said`."""
        return Signatures(self.files).said(self.path(key, found.number))

    def put(
        self, key: str, reached: Reached, files: Mapping[str, tuple[Path, BlobRef]], go_on: Callable[[], bool]
    ) -> bool:
        """Put a checkpoint in place of the one before; `files` never change. False: `go_on` said so, nothing is put.

        On the store's own disk the files become links to the given ones, which take no space.

        Raises:
            StoreError: the store cannot be written; the checkpoint before is kept.
        """
        numbers = self._numbers(key)
        known = self._named(key, numbers[-1]) if numbers else set[BlobRef]()
        for path, ref in files.values():
            if not go_on():
                return False
            self._put_file(key, path, ref, known)
        made = StoredCheckpoint(reached, {name: ref for name, (_, ref) in files.items()})
        return go_on() and self._record(key, made, (numbers or [0])[-1] + 1)

    def fetch(self, key: str, found: StoredCheckpoint, folder: Path) -> None:
        """Copy a checkpoint's files to a folder, each verified.

        Raises:
            RefusedError: a trust file is given, and none of its keys signed the record.
            StoreError: a file is missing or damaged, or the folder cannot be written.
        """
        record = self.path(key, found.number)
        if trust := Trust.given():
            what = f"the checkpoint of training {key[:12]} in {self.files.url}"
            trust.check(Signatures(self.files), record, as_stored(found.to_json()), what)
        try:
            for name, ref in found.files.items():
                place = f"{FOLDER}/{key}/{ref.path}"
                if self.files.size(place) != ref.size or not fetch(
                    ref.id, ref.size, folder / name, partial(self.files.chunks, place, ref.size)
                ):
                    raise StoreError(
                        f"{self.files.url_of(place)} is missing or damaged, and the checkpoint of training {key[:12]} "
                        f"needs it: delete {self.files.url_of(record)}, and the training begins again"
                    )
        except OSError as error:
            raise StoreError(f"cannot write {folder}: {error.strerror or error}") from error

    def forget(self, key: str) -> None:
        """Delete a training's checkpoint, records first: its model is published.

        Raises:
            StoreError: the store cannot be written.
        """
        for number in self._numbers(key):
            self.files.remove(self.path(key, number))
        self.files.delete(f"{FOLDER}/{key}")

    def path(self, key: str, number: int) -> str:
        """Return the path of a record."""
        return f"{FOLDER}/{key}/{number:08d}.json"

    def _numbers(self, key: str) -> list[int]:
        names = map(_NUMBER.fullmatch, self.files.names(f"{FOLDER}/{key}"))
        return sorted(int(found[1]) for found in names if found)

    def _read(self, key: str, number: int) -> StoredCheckpoint | None:
        path = self.path(key, number)
        if (data := self.files.read(path)) is None:
            return None
        try:
            return replace(from_bytes(data, StoredCheckpoint.from_json), number=number)
        except StoreError as broken:
            raise StoreError(
                f"{self.files.url_of(path)} cannot be used: {broken}; delete this file, and the training begins again"
            ) from broken

    def _named(self, key: str, number: int) -> set[BlobRef]:
        """Return the files that a record names; none of one that cannot be read."""
        with suppress(StoreError):
            if (found := self._read(key, number)) is not None:
                return {*found.files.values()}
        return set()

    def _put_file(self, key: str, path: Path, ref: BlobRef, known: set[BlobRef]) -> None:
        place = f"{FOLDER}/{key}/{ref.path}"
        if ref not in known or self.files.size(place) != ref.size:
            Intents(self.files).write(place, partial(self.files.link, path, place))

    def _record(self, key: str, made: StoredCheckpoint, number: int) -> bool:
        told, signatures = as_stored(made.to_json()), Signatures(self.files)
        while True:  # another machine may do the same training
            signatures.sign(self.path(key, number), told)
            if self.files.create(self.path(key, number), json_bytes(told)):
                break
            number += 1
        for older in self._numbers(key):
            if older < number:
                self._forget(key, older, {*made.files.values()})
        return True

    def _forget(self, key: str, number: int, needed: set[BlobRef]) -> None:
        """Delete a replaced checkpoint, its record last, so that a process that is killed here loses no file's name."""
        for ref in self._named(key, number) - needed:
            self.files.remove(f"{FOLDER}/{key}/{ref.path}")
        stem = f"{number:08d}."
        for name in self.files.names(f"{FOLDER}/{key}"):
            if name.startswith(stem) and name.endswith(".sig"):
                self.files.remove(f"{FOLDER}/{key}/{name}")
        self.files.remove(self.path(key, number))
