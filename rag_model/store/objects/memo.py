"""The memo records the outputs of each stage by its exact inputs. Builds look records up to resume
interrupted work and to reuse outputs.

A record is written after its outputs and is created exclusively: of several workers, the first one
creates it, and all use its outputs. A record with missing outputs counts as absent: the next record
is written as the next generation, `<key>.2.json`, and only the newest generation is read. No record
is locked, overwritten or deleted.
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
from rag_model.store.objects.files import Files, encode_json
from rag_model.untrusted_text import parse_json

# The groups are the stage, the key and, in the names of second and later records, the generation.
RECORD_PATH = re.compile(r"memo/([^/]+)/([^/.]+)(?:\.([0-9]+))?\.json")
# Prefix of the stages that record the states of followed wikis (`snapshots.mirrors`).
MIRROR_STAGE_PREFIX = "wiki-"
_FORMAT = 1
# Key in the statistics of a record whose outputs no version names, such as a delta. Its value is
# the digest of a file, or a list of digests: `gc` keeps the outputs as long as it keeps one of
# these files.
TARGET_KEY = "after"


class ResultNotRecordedError(Exception):
    """The memo has no record of these inputs, and must not run the stage to produce one."""


@dataclass(frozen=True, slots=True)
class Record:
    """The outputs of one stage for one key."""

    stage: str
    key: str
    outputs: Mapping[str, BlobRef]  # by name
    stats: Mapping[str, Any]  # small JSON values, such as counts and digests
    owner: str | None = None  # name of the writer


@dataclass(frozen=True, slots=True)
class StageResult:
    """The files that a stage wrote to its work folder, and their statistics."""

    outputs: Mapping[str, Path]  # by name
    stats: Mapping[str, Any] = field(default_factory=dict)
    # digests that were computed while the outputs were written, by name of the output
    digests: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Memo:
    """The memo of one store."""

    files: Files
    blobs: Blobs
    # If False, `get_or_create` raises `ResultNotRecordedError` if there is no record.
    can_produce: bool = True
    # name of the writer, by which the retry of an interrupted task recognises its own record
    owner: str | None = None

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
        """Write a record and return the valid one: this record, or an earlier one of another
        writer.

        `inputs` are kept in the record, so that people can see why a stage ran again.
        """
        record_fields = {
            "format": _FORMAT,
            "stage": stage,
            "key": key,
            "outputs": {name: ref.to_json() for name, ref in outputs.items()},
            "facts": dict(stats),
            "inputs": inputs,
            "by": self.owner,
            "nonce": secrets.token_hex(8),
        }
        record_bytes, generation, valid_record = encode_json(record_fields), 0, None
        while valid_record is None:
            if self.files.create(_record_path(stage, key, generation + 1), record_bytes):
                valid_record = parse_record(stage, key, record_bytes)
            else:
                generation, valid_record = self._find_newest(stage, key)
        return valid_record

    def get_or_create(self, stage: str, inputs: Any, produce: Callable[[Path], StageResult]) -> tuple[Record, bool]:
        """Return the record of `inputs`, and whether it is new; produce the outputs if there is
        none.

        The record is new if `produce` ran, or if this memo's owner wrote it before it was
        interrupted. `produce` is called with an empty work folder, which is always removed
        afterwards. Outputs in this folder are moved into the store.

        Raises:
            ResultNotRecordedError: there is no record, and this memo must not produce one.
        """
        key = self.compute_key(inputs)
        record = self.find(stage, key)
        if record is not None:
            return record, record.owner is not None and record.owner == self.owner
        if not self.can_produce:
            raise ResultNotRecordedError(f"{stage} {key}")
        with temporary_folder("stage") as workdir:
            stage_result = produce(workdir)
            outputs = {
                name: self.blobs.put_file(path, move=path.parent == workdir, digest=stage_result.digests.get(name))
                for name, path in stage_result.outputs.items()
            }
        return self.write_record(stage, key, outputs, stage_result.stats, inputs), True

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
        """Return the newest generation (0 if there is none), and its record; the record is None if
        it is damaged, or if one of its outputs is missing.
        """
        generation, newest_record = 0, None
        while (data := self.files.read(_record_path(stage, key, generation + 1))) is not None:
            generation, newest_record = generation + 1, parse_record(stage, key, data)
        if newest_record is None or not all(map(self.blobs.exists, newest_record.outputs.values())):
            return generation, None
        return generation, newest_record


def parse_record(stage: str, key: str, data: bytes) -> Record | None:
    """Parse a record's bytes; return None if they are damaged, so that a new generation replaces
    it.
    """
    try:
        record_fields = parse_json(data)
        outputs = {name: BlobRef.from_json(ref) for name, ref in record_fields["outputs"].items()}
        return Record(stage, key, outputs, dict(record_fields["facts"]), record_fields.get("by"))
    except (ValueError, KeyError, TypeError, AttributeError, StoreError):
        return None


def _record_path(stage: str, key: str, generation: int) -> str:
    suffix = "" if generation == 1 else f".{generation}"
    return f"memo/{stage}/{key}{suffix}.json"
