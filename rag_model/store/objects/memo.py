"""The memo: records of what a stage made from exact inputs, so that resuming and reusing are the same look-up.

A record is written after its outputs exist and is created exclusively: if workers race, the first one wins
and all use its outputs. A record whose outputs are gone counts as absent: the next record is written as the next
generation, `<key>.2.json`, and only the newest generation is read. Nothing is locked, overwritten or deleted.
"""

import re
import secrets
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rag_model.digest import digest_json
from rag_model.errors import StoreError
from rag_model.json_text import parse_json
from rag_model.store.objects.blobs import BlobRef, Blobs
from rag_model.store.objects.files import Files, json_bytes

RECORD = re.compile(r"memo/([^/]+)/([^/.]+)(?:\.([0-9]+))?\.json")  # stage, key, generation from the second on
_FORMAT = 1


class NotRecordedError(Exception):
    """There is no record, and this memo only reads."""


@dataclass(frozen=True, slots=True)
class Record:
    """One stage's outputs for one key."""

    stage: str
    key: str
    outputs: Mapping[str, BlobRef]
    facts: Mapping[str, Any]  # small JSON: counts, digests
    by: str | None = None  # who made it


@dataclass(frozen=True, slots=True)
class Produced:
    """What a stage left in its work folder."""

    outputs: Mapping[str, Path]
    facts: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Memo:
    """The memo of one store."""

    files: Files
    blobs: Blobs
    makes: bool = True  # False: a missing record raises `NotRecordedError`
    by: str | None = None  # who writes; a retried element finds its own record by it

    @staticmethod
    def key(inputs: Any) -> str:
        """Return the key of a stage's exact inputs (any JSON value): 64 hex digits."""
        return digest_json(inputs).partition(":")[2]

    def get(self, stage: str, key: str) -> Record | None:
        """Return the newest record; None if there is none, or if an output of it is missing or has another size."""
        return self._newest(stage, key)[1]

    def record(
        self,
        stage: str,
        key: str,
        outputs: Mapping[str, BlobRef],
        facts: Mapping[str, Any],
        inputs: Any = None,
    ) -> Record:
        """Write a record and return the one that counts: this one, or that of a writer who was first.

        `inputs` is kept in the record, so that people can see why something was made again.
        """
        value = {
            "format": _FORMAT,
            "stage": stage,
            "key": key,
            "outputs": {name: ref.to_json() for name, ref in outputs.items()},
            "facts": dict(facts),
            "inputs": inputs,
            "by": self.by,
            "nonce": secrets.token_hex(8),
        }
        while True:
            generation, winner = self._newest(stage, key)
            if winner is not None:
                return winner
            self.files.create(_path(stage, key, generation + 1), json_bytes(value))

    def once(self, stage: str, inputs: Any, produce: Callable[[Path], Produced]) -> tuple[Record, bool]:
        """Return the record of `inputs`, made first if there is none; the flag says whether it was made here.

        It is true if `produce` ran, or if the record is `by` this memo's owner, who was interrupted after writing it.

        `produce` is given an empty work folder, which is always removed afterwards.

        Raises:
            NotRecordedError: there is no record, and this memo only reads.
        """
        key = self.key(inputs)
        known = self.get(stage, key)
        if known is not None:
            return known, known.by is not None and known.by == self.by
        if not self.makes:
            raise NotRecordedError(f"{stage} {key}")
        workdir = Path(tempfile.mkdtemp(prefix="bookwheel-"))
        try:
            produced = produce(workdir)
            outputs = {name: self.blobs.put_file(path) for name, path in produced.outputs.items()}
        finally:
            shutil.rmtree(workdir, ignore_errors=True)
        return self.record(stage, key, outputs, produced.facts, inputs), True

    def inputs(self, stage: str) -> Iterator[Mapping[str, Any]]:
        """Yield the inputs of each of a stage's records; reads all of them."""
        folder = f"memo/{stage}"
        for name in self.files.names(folder):
            with suppress(ValueError, KeyError, TypeError):  # a damaged record has no inputs to show
                inputs = parse_json(self.files.read(f"{folder}/{name}") or b"")["inputs"]
                if isinstance(inputs, dict):
                    yield inputs

    def _newest(self, stage: str, key: str) -> tuple[int, Record | None]:
        """Return the newest generation's number (0: none) and its record, None if it is unsound."""
        generation, newest = 0, None
        while (data := self.files.read(_path(stage, key, generation + 1))) is not None:
            generation, newest = generation + 1, parsed(stage, key, data)
        if newest is None or not all(map(self.blobs.exists, newest.outputs.values())):
            return generation, None
        return generation, newest


def parsed(stage: str, key: str, data: bytes) -> Record | None:
    """Read a record's bytes; None for a damaged one, which is then superseded."""
    try:
        value = parse_json(data)
        outputs = {name: BlobRef.from_json(ref) for name, ref in value["outputs"].items()}
        return Record(stage, key, outputs, dict(value["facts"]), value.get("by"))
    except (ValueError, KeyError, TypeError, AttributeError, StoreError):
        return None


def _path(stage: str, key: str, generation: int) -> str:
    suffix = "" if generation == 1 else f".{generation}"
    return f"memo/{stage}/{key}{suffix}.json"
