"""A model's manifest: one JSON file that describes a trained model, as `store.versions.manifest` does a snapshot.

Its *content* decides the model's id: the objective, the files, the encoder space of its queries, and what it was
trained on. Metrics and provenance are outside the content.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import Any, Self

from rag_model.store.objects.blobs import BlobRef
from rag_model.store.versions.checks import (
    check,
    check_format,
    check_objects,
    check_paths,
    content_id,
    fields_of,
    from_bytes,
)

FORMAT = 1
# No pickles. `.model` is sentencepiece's, `.metadata` ColBERT's settings in JSON.
SUFFIXES = (".json", ".jsonl", ".safetensors", ".txt", ".model", ".md", ".jinja", ".metadata")
_KIND = re.compile(r"[a-z][a-z0-9-]{0,39}")


@dataclass(frozen=True, slots=True)
class ModelContent:
    """The content of a model: all that its id depends on."""

    kind: str  # the name of the objective that made it
    files: Mapping[str, BlobRef]  # relative path -> blob
    space: Mapping[str, Any] | None = None  # the encoder space of its queries
    lineage: Mapping[str, Any] = field(default_factory=dict)  # snapshot, digests of the data, recipe, initial weights

    def __post_init__(self) -> None:
        """Refuse paths that could leave a folder or hide one another, and files with other suffixes than `SUFFIXES`."""
        check(isinstance(self.kind, str) and _KIND.fullmatch(self.kind), f"kind {self.kind!r}")
        check_paths(self.files)
        for path in self.files:
            suffix = PurePosixPath(path).suffix
            check(suffix in SUFFIXES, f"file {path!r}: a model's files are {', '.join(SUFFIXES)}")

    def to_json(self) -> dict[str, Any]:
        """Return the section as JSON values, files sorted by name."""
        return {
            "kind": self.kind,
            "space": None if self.space is None else dict(self.space),
            "lineage": dict(self.lineage),
            "files": {path: self.files[path].to_json() for path in sorted(self.files)},
        }

    @classmethod
    def from_json(cls, value: Any) -> Self:
        """Read back what `to_json` wrote.

        Raises:
            StoreError: this version could not have written the section.
        """
        fields = fields_of(value, {"kind", "space", "lineage", "files"}, "content")
        check_objects(fields, "lineage", "files")
        check(isinstance(fields["space"], dict | None), "field 'space', which is not an object")
        files = {path: BlobRef.from_json(ref) for path, ref in fields["files"].items()}
        return cls(fields["kind"], files, fields["space"], fields["lineage"])


@dataclass(frozen=True, slots=True)
class ModelManifest:
    """A model: its content, its metrics and its provenance."""

    content: ModelContent
    metrics: Mapping[str, Any] = field(default_factory=dict)  # before and after, on the dev file
    provenance: Mapping[str, Any] = field(default_factory=dict)  # when, by which versions, how long
    format: int = FORMAT

    @property
    def id(self) -> str:
        """The model's id: SHA-256 of the content's canonical JSON, 64 hex digits (people see 12)."""
        return content_id(self.content.to_json())

    def to_json(self) -> dict[str, Any]:
        """Return the manifest as JSON values in reading order."""
        return {
            "format": self.format,
            "id": self.id,
            "content": self.content.to_json(),
            "metrics": dict(self.metrics),
            "provenance": dict(self.provenance),
        }

    @classmethod
    def from_json(cls, value: Any) -> Self:
        """Read back what `to_json` wrote; the input may be hostile, so every field is checked.

        Raises:
            StoreError: a newer format, a hostile path, or content that does not match its id.
        """
        written = check_format(value, FORMAT, "model")
        fields = fields_of(value, {"format", "id", "content", "metrics", "provenance"}, "manifest")
        check_objects(fields, "metrics", "provenance")
        content = ModelContent.from_json(fields["content"])
        manifest = cls(content, fields["metrics"], fields["provenance"], written)
        check(manifest.id == fields["id"], f"id {fields['id']!r}: its content hashes to {manifest.id}")
        return manifest

    @classmethod
    def from_bytes(cls, data: bytes) -> Self:
        """Read a manifest file."""
        return from_bytes(data, cls.from_json)
