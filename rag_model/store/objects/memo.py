"""The memo: what a stage made of exact inputs, so that resuming and reusing are the same look-up.

A record is written after its outputs exist and is created exclusively: of workers that race, the first wins
and all use its outputs. A record whose outputs are gone is as good as absent: the next one takes the next
generation, `<key>.2.json`, and only the newest generation counts. Nothing is locked, overwritten or deleted.
"""

import json
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
from rag_model.store.objects.blobs import BlobRef, Blobs
from rag_model.store.objects.files import Files, json_bytes

RECORD = re.compile(r"memo/([^/]+)/([^/.]+)(?:\.([0-9]+))?\.json")  # stage, key, generation from the second on
_FORMAT = 1


class NotRecordedError(Exception):
    """There is no record, and this memo makes none."""


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
    makes: bool = True  # False: what is not recorded is told by `NotRecordedError`
    by: str | None = None  # who records: what an engine lets the same one do again is still its own work

    @staticmethod
    def key(inputs: Any) -> str:
        """Return the key of a stage's exact inputs (any JSON value): 64 hex digits."""
        return digest_json(inputs).partition(":")[2]

    def get(self, stage: str, key: str) -> Record | None:
        """Return the newest record; None without one, or when an output of it is gone or of another size."""
        return self._newest(stage, key)[1]

    def record(
        self,
        stage: str,
        key: str,
        outputs: Mapping[str, BlobRef],
        facts: Mapping[str, Any],
        inputs: Any = None,
    ) -> Record:
        """Write a record and return the winner: this one, or that of whoever was first.

        `inputs` is kept beside it for people who ask why something was made again.
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
        """Return the record of `inputs`, making it first if need be; the flag says whether it was made here.

        That is so if `produce` ran, or if it was recorded `by` this very memo's owner, who was cut off after it.

        `produce` is given an empty work folder, which is removed afterwards whatever happens.

        Raises:
            NotRecordedError: there is none, and this memo makes none.
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
        """Yield what a stage's records were made of; reads all of them."""
        folder = f"memo/{stage}"
        for name in self.files.names(folder):
            with suppress(ValueError, KeyError, TypeError):  # a damaged record explains nothing
                inputs = json.loads(self.files.read(f"{folder}/{name}") or b"")["inputs"]
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
        value = json.loads(data)
        outputs = {name: BlobRef.from_json(ref) for name, ref in value["outputs"].items()}
        return Record(stage, key, outputs, dict(value["facts"]), value.get("by"))
    except (ValueError, KeyError, TypeError, AttributeError, StoreError):
        return None


def _path(stage: str, key: str, generation: int) -> str:
    suffix = "" if generation == 1 else f".{generation}"
    return f"memo/{stage}/{key}{suffix}.json"
