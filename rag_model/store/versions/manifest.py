"""The manifest: one JSON file that describes a snapshot.

Its *content* section decides the snapshot's id; metrics, parents and provenance are outside it, so a rebuild
of the same dump with the same recipe has the same id. A manifest may come from an untrusted source: it is checked
as hostile input before any path of it is used.
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
from rag_model.store.versions.paths import EMBEDDINGS, EXACT, TEXT, embeddings_path, index_path, passages_path

FORMAT = 2  # 1: one space and no named representations, no kinds of indexes, no retriever
MOST_ROWS = 1 << 40  # far above any corpus, and far below an overflow of sums
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
    """The content of a snapshot: all that its id depends on.

    A representation is what an index is built over; its rows are aligned with the passages. `text`, the passages
    themselves, is not listed. An entry gives its `kind`; `vectors` have a `space`, the encoder space of queries.
    """

    corpus: Mapping[str, Any]  # kind, dbname, language, base, licence, newest_revision
    parts: tuple[PartEntry, ...]  # in row order
    files: Mapping[str, BlobRef]  # relative path -> blob
    recipe: Mapping[str, Any] = field(default_factory=dict)
    representations: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)  # name -> kind, and its space
    indexes: Mapping[str, Mapping[str, Any]] = field(
        default_factory=dict
    )  # name -> kind, over, file, factory, search …
    retriever: str = ""  # the default expression; empty: see `default_retriever`

    def __post_init__(self) -> None:
        """Refuse duplicate parts, and paths that could leave a folder or hide one another."""
        names = [part.name for part in self.parts]
        check(len(set(names)) == len(names), "list of parts, which names one twice")
        check(self.n <= MOST_ROWS, f"total of {self.n} rows")
        check_paths(self.files)

    @property
    def n(self) -> int:
        """The number of passages."""
        return sum(part.rows for part in self.parts)

    @property
    def space(self) -> Mapping[str, Any] | None:
        """The encoder space of the representation `embeddings`; None if the snapshot has no such vectors."""
        return self.space_of(EMBEDDINGS)

    def space_of(self, representation: str) -> Mapping[str, Any] | None:
        """Return the encoder space of a representation; None if it has none, or if there is no such representation."""
        space: Mapping[str, Any] | None = self.representations.get(representation, {}).get("space")
        return space

    def kind_of(self, representation: str) -> str:
        """Return the kind of a representation: `text`, `vectors` (one a passage), `tokens` or `sparse`."""
        if representation == TEXT:
            return TEXT
        return str(self.representations.get(representation, {}).get("kind", "vectors"))

    def rows_path(self, representation: str, part: str) -> str:
        """Return the path of the file with a part's rows of a representation: its passages or its vectors."""
        if representation == TEXT:
            return passages_path(part)
        return embeddings_path(part, representation, self.kind_of(representation))

    def over(self, index: str) -> str:
        """Return the name of the representation that an index is built over; `exact` is over the embeddings."""
        return str(self.indexes.get(index, {}).get("over", EMBEDDINGS))

    def index_file(self, index: str) -> str:
        """Return the path of an index's file."""
        return str(self.indexes.get(index, {}).get("file", index_path(index)))

    @property
    def default_retriever(self) -> str:
        """The retriever that is used if the caller names none: the one in the manifest.

        Without that: `hnsw` if there is such an index, else the first index by name, else `exact`.
        """
        return self.retriever or ("hnsw" if "hnsw" in self.indexes else min(self.indexes, default=EXACT))

    def to_json(self, written: int = FORMAT) -> dict[str, Any]:
        """Return the section as JSON values of a format, files and indexes sorted by name."""
        asked: dict[str, Any] = (
            {"space": None if self.space is None else dict(self.space)}
            if written == 1
            else {"representations": _sorted(self.representations), "retriever": self.retriever}
        )
        return asked | {
            "corpus": dict(self.corpus),
            "recipe": dict(self.recipe),
            "indexes": _sorted(self.indexes),
            "parts": [asdict(part) for part in self.parts],
            "files": {path: self.files[path].to_json() for path in sorted(self.files)},
        }

    @classmethod
    def from_json(cls, value: Any, written: int = FORMAT) -> Self:
        """Read back what `to_json` wrote in that format.

        Raises:
            StoreError: this version could not have written the section.
        """
        own = {"space"} if written == 1 else {"representations", "retriever"}
        fields = fields_of(value, {"corpus", "recipe", "indexes", "parts", "files"} | own, "content")
        check_objects(fields, "corpus", "recipe", "indexes", "files")
        check(isinstance(fields["parts"], list), "field 'parts', which is not a list")
        labels = {"name", "first_page", "last_page", "rows"}
        parts = tuple(PartEntry(**fields_of(part, labels, "part")) for part in fields["parts"])
        files = {path: BlobRef.from_json(ref) for path, ref in fields["files"].items()}
        retriever = fields.get("retriever", "")
        check(isinstance(retriever, str), "field 'retriever', which is not a text")
        asked = in_space(fields["space"]) if written == 1 else fields["representations"]
        check(isinstance(asked, dict), "field 'representations', which is not an object")
        for name, entry in asked.items():
            _check_representation(name, entry)
        for name, entry in fields["indexes"].items():
            _check_index(name, entry, files)
        return cls(fields["corpus"], parts, files, fields["recipe"], asked, fields["indexes"], retriever)


def in_space(space: Mapping[str, Any] | None) -> dict[str, dict[str, Any]]:
    """Return the representations of a snapshot with only `embeddings` in this space; without a space there are none."""
    return {} if space is None else {EMBEDDINGS: {"kind": "vectors", "space": space}}


def _sorted(entries: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    return {name: dict(entries[name]) for name in sorted(entries)}


def _check_representation(name: str, entry: Any) -> None:
    check(_NAME.fullmatch(name), f"representation name {name!r}")
    check(isinstance(entry, dict), f"representation {name!r}, which is not an object")
    good = isinstance(entry.get("kind"), str) and isinstance(entry.get("space"), dict | None)
    check(good, f"representation {name!r}, whose kind or space is wrong")


def _check_index(name: str, entry: Any, files: Mapping[str, BlobRef]) -> None:
    check(isinstance(entry, dict), "index, which is not an object")
    for label in ("kind", "over", "file", "factory", "metric", "refine"):
        check(isinstance(entry.get(label, ""), str), f"{label} of index {name!r}")
    for label in ("n", "d", "row_bytes"):
        number = entry.get(label, 0)
        check(type(number) is int and 0 <= number <= MOST_ROWS, f"{label} of index {name!r}")
    for label in ("search", "settings"):
        check(isinstance(entry.get(label, {}), dict), f"{label} of index {name!r}")
    check(entry.get("file", index_path(name)) in files or "file" not in entry, f"file of index {name!r}")


@dataclass(frozen=True, slots=True)
class Manifest:
    """A snapshot: its content, parents, metrics and provenance."""

    content: Content
    metrics: Mapping[str, Any] = field(default_factory=dict)
    parents: tuple[str, ...] = ()  # snapshot ids, nearest first
    provenance: Mapping[str, Any] = field(default_factory=dict)  # when, where, by which versions, how long
    format: int = FORMAT

    def __post_init__(self) -> None:
        """Refuse parents that are not snapshot ids."""
        good = all(isinstance(parent, str) and ID.fullmatch(parent) for parent in self.parents)
        check(good, f"list of parents {self.parents!r}")

    @property
    def id(self) -> str:
        """The snapshot id: SHA-256 of the content's canonical JSON, 64 hex digits (people see 12)."""
        return content_id(self.content.to_json(self.format))

    def to_json(self) -> dict[str, Any]:
        """Return the manifest as JSON values in reading order."""
        return {
            "format": self.format,
            "id": self.id,
            "content": self.content.to_json(self.format),
            "metrics": dict(self.metrics),
            "parents": list(self.parents),
            "provenance": dict(self.provenance),
        }

    @classmethod
    def from_json(cls, value: Any) -> Self:
        """Read back what `to_json` wrote; the input may be hostile, so every field is checked.

        Raises:
            StoreError: a newer format, a hostile path, an impossible number, or content that does not match
            its id.
        """
        written = check_format(value, FORMAT, "snapshot")
        fields = fields_of(value, {"format", "id", "content", "metrics", "parents", "provenance"}, "manifest")
        check_objects(fields, "metrics", "provenance")
        check(isinstance(fields["parents"], list), "field 'parents', which is not a list")
        manifest = cls(
            content=Content.from_json(fields["content"], written),
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
