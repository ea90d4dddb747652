"""The manifest: one JSON file that is a snapshot.

Its *content* section decides the snapshot's id; metrics, parents and provenance lie outside it, so a rebuild
of the same dump by the same recipe has the same id however long it took. A manifest may come from anyone: it
is checked as hostile input before a single path of it is used.
"""

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Self

from rag_model.store.objects.blobs import BlobRef
from rag_model.store.versions.checks import (
    ID,
    check,
    check_format,
    check_objects,
    check_paths,
    content_id,
    fields_of,
    from_bytes,
)
from rag_model.store.versions.paths import EXACT

FORMAT = 1
MOST_ROWS = 1 << 40  # far beyond any corpus, far below where sums overflow
MOST_PAGE = (1 << 63) - 1
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


@dataclass(frozen=True, slots=True)
class PartEntry:
    """One part's page range and its number of rows."""

    name: str  # part-00042
    first_page: int  # inclusive
    last_page: int  # inclusive
    rows: int

    def __post_init__(self) -> None:
        """Refuse names and numbers that no builder writes."""
        check(isinstance(self.name, str) and _NAME.fullmatch(self.name), f"part name {self.name!r}")
        for label in ("first_page", "last_page"):
            value = getattr(self, label)
            check(type(value) is int and abs(value) <= MOST_PAGE, f"{label} {value!r} of {self.name}")
        check(type(self.rows) is int and 0 <= self.rows <= MOST_ROWS, f"row count {self.rows!r} of {self.name}")


@dataclass(frozen=True, slots=True)
class Content:
    """What a snapshot holds: all that its id depends on."""

    corpus: Mapping[str, Any]  # kind, dbname, language, base, licence, newest_revision
    parts: tuple[PartEntry, ...]  # in row order
    files: Mapping[str, BlobRef]  # relative path -> blob
    recipe: Mapping[str, Any] = field(default_factory=dict)
    space: Mapping[str, Any] | None = None  # the encoder space of the vectors; None: no vectors
    indexes: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)  # name -> factory, metric, n, d, search

    def __post_init__(self) -> None:
        """Refuse doubled parts, and paths that could leave a folder or hide one another."""
        names = [part.name for part in self.parts]
        check(len(set(names)) == len(names), "list of parts, which names one twice")
        check(self.n <= MOST_ROWS, f"total of {self.n} rows")
        check_paths(self.files)

    @property
    def n(self) -> int:
        """The number of passages."""
        return sum(part.rows for part in self.parts)

    @property
    def default_retriever(self) -> str:
        """The retriever that answers where none is named: `hnsw`, else the first index by name, else `exact`."""
        return "hnsw" if "hnsw" in self.indexes else min(self.indexes, default=EXACT)

    def to_json(self) -> dict[str, Any]:
        """Return the section as JSON values, files and indexes sorted by name."""
        return {
            "corpus": dict(self.corpus),
            "recipe": dict(self.recipe),
            "space": None if self.space is None else dict(self.space),
            "indexes": {name: dict(self.indexes[name]) for name in sorted(self.indexes)},
            "parts": [asdict(part) for part in self.parts],
            "files": {path: self.files[path].to_json() for path in sorted(self.files)},
        }

    @classmethod
    def from_json(cls, value: Any) -> Self:
        """Read back what `to_json` wrote.

        Raises:
            StoreError: the section is not one that this version could have written.
        """
        fields = fields_of(value, {"corpus", "recipe", "space", "indexes", "parts", "files"}, "content")
        check_objects(fields, "corpus", "recipe", "indexes", "files")
        check(isinstance(fields["space"], dict | None), "field 'space', which is not an object")
        check(isinstance(fields["parts"], list), "field 'parts', which is not a list")
        check(
            all(isinstance(index, dict) for index in fields["indexes"].values()),
            "index, which is not an object",
        )
        labels = {"name", "first_page", "last_page", "rows"}
        parts = tuple(PartEntry(**fields_of(part, labels, "part")) for part in fields["parts"])
        files = {path: BlobRef.from_json(ref) for path, ref in fields["files"].items()}
        return cls(fields["corpus"], parts, files, fields["recipe"], fields["space"], fields["indexes"])


@dataclass(frozen=True, slots=True)
class Manifest:
    """A snapshot: its content, and what is said about it."""

    content: Content
    metrics: Mapping[str, Any] = field(default_factory=dict)
    parents: tuple[str, ...] = ()  # snapshot ids, nearest first
    provenance: Mapping[str, Any] = field(default_factory=dict)  # when, where, by which versions, how long
    format: int = FORMAT

    def __post_init__(self) -> None:
        """Refuse parents that are no snapshot ids."""
        good = all(isinstance(parent, str) and ID.fullmatch(parent) for parent in self.parents)
        check(good, f"list of parents {self.parents!r}")

    @property
    def id(self) -> str:
        """The snapshot id: SHA-256 of the content's canonical JSON, 64 hex digits (people see 12)."""
        return content_id(self.content.to_json())

    def to_json(self) -> dict[str, Any]:
        """Return the manifest as JSON values in reading order."""
        return {
            "format": self.format,
            "id": self.id,
            "content": self.content.to_json(),
            "metrics": dict(self.metrics),
            "parents": list(self.parents),
            "provenance": dict(self.provenance),
        }

    @classmethod
    def from_json(cls, value: Any) -> Self:
        """Read back what `to_json` wrote, trusting nothing.

        Raises:
            StoreError: a newer format, a hostile path, an impossible number, or content that does not match
            its id.
        """
        written = check_format(value, FORMAT, "snapshot")
        fields = fields_of(value, {"format", "id", "content", "metrics", "parents", "provenance"}, "manifest")
        check_objects(fields, "metrics", "provenance")
        check(isinstance(fields["parents"], list), "field 'parents', which is not a list")
        manifest = cls(
            content=Content.from_json(fields["content"]),
            metrics=fields["metrics"],
            parents=tuple(fields["parents"]),
            provenance=fields["provenance"],
            format=written,
        )
        check(manifest.id == fields["id"], f"id {fields['id']!r}: its content hashes to {manifest.id}")
        return manifest

    @classmethod
    def from_bytes(cls, data: bytes) -> Self:
        """Read a manifest file."""
        return from_bytes(data, cls.from_json)
