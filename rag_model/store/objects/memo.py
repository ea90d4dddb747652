"""The memo: records of a stage's outputs by its exact inputs. A look-up serves resume and reuse.

A record is written after its outputs and is created exclusively: if workers race, the first one
wins, and all use its outputs. A record with missing outputs counts as absent: the next record is
written as the next generation, `<key>.2.json`, and only the newest generation is read. No record is
locked, overwritten or deleted.
"""

import re
import secrets
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rag_model.digest import digest_json
from rag_model.errors import StoreError
from rag_model.process import temporary_folder
from rag_model.store.objects.blobs import BlobRef, Blobs
from rag_model.store.objects.files import Files, json_bytes
from rag_model.untrusted_text import parse_json

# Stage, key, generation from the second on.
RECORD_PATH = re.compile(r"memo/([^/]+)/([^/.]+)(?:\.([0-9]+))?\.json")
MIRROR_STAGE = "wiki-"  # start of the stages with the states of followed wikis (`snapshots.mirrors`)
_FORMAT = 1
# The key, in a record's statistics, of the digests of files with which `gc` keeps the outputs: one,
# or a list. No file of a version names these outputs, such as a delta, which produces the file.
TARGET_KEY = "after"


class NotRecordedError(Exception):
    """There is no record, and this memo may not produce one."""


@dataclass(frozen=True, slots=True)
class Record:
    """One stage's outputs for one key."""

    stage: str
    key: str
    outputs: Mapping[str, BlobRef]
    stats: Mapping[str, Any]  # small JSON: counts, digests
    owner: str | None = None  # the writer


@dataclass(frozen=True, slots=True)
class StageResult:
    """The files that a stage wrote to its work folder, and their statistics."""

    outputs: Mapping[str, Path]
    stats: Mapping[str, Any] = field(default_factory=dict)
    digests: Mapping[str, str] = field(default_factory=dict)  # of outputs that were digested as they were written


@dataclass(frozen=True, slots=True)
class Memo:
    """The memo of one store."""

    files: Files
    blobs: Blobs
    # False: `get_or_create` raises `NotRecordedError` if there is no record.
    can_produce: bool = True
    owner: str | None = None  # the writer; a retried element recognises its own record by it

    @staticmethod
    def compute_key(inputs: Any) -> str:
        """Return the key of a stage's exact inputs (any JSON value): 64 hex digits."""
        return digest_json(inputs).partition(":")[2]

    def find(self, stage: str, key: str) -> Record | None:
        """Return the newest record; None if there is none, or if one of its outputs is missing."""
        return self._find_newest(stage, key)[1]

    def write_record(
        self,
        stage: str,
        key: str,
        outputs: Mapping[str, BlobRef],
        stats: Mapping[str, Any],
        inputs: Any = None,
    ) -> Record:
        """Write a record and return the valid one: this record, or that of a writer who was first.

        `inputs` are kept in the record, so that people can see why a stage ran again.
        """
        value = {
            "format": _FORMAT,
            "stage": stage,
            "key": key,
            "outputs": {name: ref.to_json() for name, ref in outputs.items()},
            "facts": dict(stats),
            "inputs": inputs,
            "by": self.owner,
            "nonce": secrets.token_hex(8),
        }
        while True:
            generation, winner = self._find_newest(stage, key)
            if winner is not None:
                return winner
            self.files.create(_path(stage, key, generation + 1), json_bytes(value))

    def get_or_create(self, stage: str, inputs: Any, produce: Callable[[Path], StageResult]) -> tuple[Record, bool]:
        """Return the record of `inputs`, produced first if there is none, and whether it is new.

        It is new if `produce` ran, or if this memo's owner wrote it before it was interrupted.
        `produce` is called with an empty work folder, which is always removed afterwards.
        Outputs in this folder are moved into the store.

        Raises:
            NotRecordedError: there is no record, and this memo may not produce one.
        """
        key = self.compute_key(inputs)
        record = self.find(stage, key)
        if record is not None:
            return record, record.owner is not None and record.owner == self.owner
        if not self.can_produce:
            raise NotRecordedError(f"{stage} {key}")
        with temporary_folder("stage") as workdir:
            produced = produce(workdir)
            outputs = {
                name: self.blobs.put_file(path, move=path.parent == workdir, digest=produced.digests.get(name))
                for name, path in produced.outputs.items()
            }
        return self.write_record(stage, key, outputs, produced.stats, inputs), True

    def iter_inputs(self, stage: str) -> Iterator[Mapping[str, Any]]:
        """Yield the inputs of each record of a stage; reads all of its records."""
        folder = f"memo/{stage}"
        for name in self.files.list_names(folder):
            # A damaged record has no inputs to show.
            with suppress(ValueError, KeyError, TypeError):
                inputs = parse_json(self.files.read(f"{folder}/{name}") or b"")["inputs"]
                if isinstance(inputs, dict):
                    yield inputs

    def _find_newest(self, stage: str, key: str) -> tuple[int, Record | None]:
        """Return the newest generation's number (0: none) and its record (None if damaged)."""
        generation, newest = 0, None
        while (data := self.files.read(_path(stage, key, generation + 1))) is not None:
            generation, newest = generation + 1, parse_record(stage, key, data)
        if newest is None or not all(map(self.blobs.exists, newest.outputs.values())):
            return generation, None
        return generation, newest


def parse_record(stage: str, key: str, data: bytes) -> Record | None:
    """Parse a record's bytes; None for a damaged record, which is then superseded."""
    try:
        value = parse_json(data)
        outputs = {name: BlobRef.from_json(ref) for name, ref in value["outputs"].items()}
        return Record(stage, key, outputs, dict(value["facts"]), value.get("by"))
    except (ValueError, KeyError, TypeError, AttributeError, StoreError):
        return None


def _path(stage: str, key: str, generation: int) -> str:
    suffix = "" if generation == 1 else f".{generation}"
    return f"memo/{stage}/{key}{suffix}.json"
