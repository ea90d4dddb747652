"""The manifest of a snapshot, which is one JSON file, and the paths and kinds of its files.

The *content* section determines the snapshot's id. Metrics, parents and provenance are not in the
content, so a rebuild of the same dump with the same recipe has the same id. A manifest may come
from an untrusted source: it is checked as hostile input before any of its paths is used. The files
of a pulled snapshot have the paths in the manifest.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, ClassVar, Self

from rag_model.errors import UsageError
from rag_model.store.objects.blobs import BlobRef
from rag_model.store.versions.checks import (
    FULL_ID,
    VersionManifest,
    check,
    check_fields,
    check_objects,
    check_paths,
    files_to_json,
    parse_files,
)

EMBEDDINGS = "embeddings"  # the representation that every build writes: one vector per passage
TOKENS = "tokens"  # the kind, and the usual name, of a representation with many vectors per passage
SPARSE = "sparse"  # the kind, and the usual name, of a representation of weighted terms
TEXT = "text"  # the representation that every snapshot has: title and text of its passages
QUESTION_ENCODER = "encoder/question"  # folder of the query encoder of `embeddings`
EXACT = "exact"  # index of every snapshot with vectors; if it has no file, all vectors are scanned
# suffixes of row files by kind of representation; the suffix of vectors is .npy
_SUFFIXES = {TOKENS: ".arrow", SPARSE: ".sparse"}
FORMAT = 2  # format 1 has one space, no named representations, no kinds of indexes, no retriever
MAX_ROWS = 1 << 40  # more rows than any corpus has, but few enough that sums do not overflow
_MAX_PAGE_ID = (1 << 63) - 1
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
# Kinds of files that readers do not need: article logs, trained files of indexes, spans for
# trainings, digests of ranges, and representations that indexes store in their own form.
BUILD_ONLY_KINDS = frozenset({"articles", "trained", "spans", "ranges", TOKENS, SPARSE})
# Files with the digests that verify ranges of large files, read from the store (`versions.ranges`).
RANGE_TABLE, RANGE_DIGESTS = "ranges/table.json", "ranges/digests"


def passages_path(part: str) -> str:
    """Return the path of a part's passages."""
    return f"passages/{part}.parquet"


def embeddings_path(part: str, representation: str = EMBEDDINGS, kind: str = "vectors") -> str:
    """Return the path of a part's rows; their `kind` is `vectors`, `tokens` or `sparse`."""
    folder = EMBEDDINGS if representation == EMBEDDINGS else f"{EMBEDDINGS}/{representation}"
    return f"{folder}/{part}{_SUFFIXES.get(kind, '.npy')}"


def row_file_kind(path: str) -> str:
    """Return the kind of a file of rows by its path: `embeddings`, `tokens` or `sparse`."""
    return next((kind for kind, suffix in _SUFFIXES.items() if path.endswith(suffix)), EMBEDDINGS)


def question_encoder_path(representation: str = EMBEDDINGS) -> str:
    """Return the folder of the query encoder of a representation."""
    return QUESTION_ENCODER if representation == EMBEDDINGS else f"encoder/{representation}/question"


def index_path(name: str, suffix: str = "faiss") -> str:
    """Return the path of an index's file."""
    return f"index/{name}.{suffix}"


def trained_path(name: str) -> str:
    """Return the path of an index's trained cells or quantizers, which only later builds read."""
    return f"trained/{name}"


def articles_path(part: str) -> str:
    """Return the path of a part's article log, which only later builds read."""
    return f"articles/{part}.parquet"


def spans_path(part: str) -> str:
    """Return the path of a part's salient spans (links and dates), which some trainings mask."""
    return f"spans/{part}.npy"


@dataclass(frozen=True, slots=True)
class PartEntry:
    """The page range and the number of rows of one part."""

    name: str  # name, such as part-00042
    first_page: int  # inclusive
    last_page: int  # inclusive
    rows: int

    def __post_init__(self) -> None:
        check(isinstance(self.name, str) and _NAME.fullmatch(self.name), f"part name {self.name!r}")
        for field_name in ("first_page", "last_page"):
            page_id = getattr(self, field_name)
            check(type(page_id) is int and abs(page_id) <= _MAX_PAGE_ID, f"{field_name} {page_id!r} of {self.name}")
        check(
            type(self.rows) is int and 0 <= self.rows <= MAX_ROWS,
            f"row count {self.rows!r} of {self.name}",
        )


@dataclass(frozen=True, slots=True)
class Content:
    """The content of a snapshot: everything that determines its id.

    An index is built over a representation, which has a row for each passage. The representation
    `text`, the passages themselves, is not listed. Each listed representation has a `kind`;
    `vectors` also have a `space`, the encoder space of queries.
    """

    # the values of kind, dbname, language, base, licence and newest_revision, by these names
    corpus: Mapping[str, Any]
    parts: tuple[PartEntry, ...]  # in row order
    files: Mapping[str, BlobRef]  # relative path -> blob
    recipe: Mapping[str, Any] = field(default_factory=dict)
    # kind and space of each representation, by name
    representations: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    # kind, over, file, factory, search, … of each index, by name
    indexes: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    retriever: str = ""  # the default retriever expression; if empty, see `default_retriever`

    def __post_init__(self) -> None:
        part_names = [part.name for part in self.parts]
        check(len(set(part_names)) == len(part_names), "list of parts, which names one twice")
        check(self.n <= MAX_ROWS, f"total of {self.n} rows")
        check_paths(self.files)

    @property
    def n(self) -> int:
        """The number of passages."""
        return sum(part.rows for part in self.parts)

    @property
    def space(self) -> Mapping[str, Any] | None:
        """The encoder space of the representation `embeddings`; None without such vectors."""
        return self.space_of(EMBEDDINGS)

    def space_of(self, representation: str) -> Mapping[str, Any] | None:
        """Return the encoder space of a representation; None if it has no encoder space."""
        space: Mapping[str, Any] | None = self.representations.get(representation, {}).get("space")
        return space

    def shares_space(self, other: "Content", representation: str) -> bool:
        """Return whether both contents encode a representation in the same space, so that equal
        passages have equal vectors.
        """
        digests = [(content.space_of(representation) or {}).get("digest") for content in (self, other)]
        return representation == TEXT or (digests[0] is not None and digests[0] == digests[1])

    def kind_of(self, representation: str) -> str:
        """Return the kind of a representation: `text`, `vectors`, `tokens` or `sparse`."""
        if representation == TEXT:
            return TEXT
        return str(self.representations.get(representation, {}).get("kind", "vectors"))

    def rows_path(self, representation: str, part: str) -> str:
        """Return the path of a part's rows in a representation: its passages or its vectors."""
        if representation == TEXT:
            return passages_path(part)
        return embeddings_path(part, representation, self.kind_of(representation))

    def representation_of(self, index: str) -> str:
        """Return the representation that an index is built over; `exact` is over the embeddings."""
        return str(self.indexes.get(index, {}).get("over", EMBEDDINGS))

    def index_file(self, index: str) -> str:
        """Return the path of an index's file."""
        return str(self.indexes.get(index, {}).get("file", index_path(index)))

    @property
    def default_retriever(self) -> str:
        """The retriever to use by default: the manifest's expression if it has one.

        Otherwise `hnsw` if there is such an index, else the first index by name, else `exact`.
        """
        return self.retriever or ("hnsw" if "hnsw" in self.indexes else min(self.indexes, default=EXACT))

    def to_json(self, format_number: int = FORMAT) -> dict[str, Any]:
        """Return the section as JSON values of a format, with files and indexes sorted by name."""
        representation_fields: dict[str, Any] = (
            {"space": None if self.space is None else dict(self.space)}
            if format_number == 1
            else {
                "representations": _sort_entries(self.representations),
                "retriever": self.retriever,
            }
        )
        return representation_fields | {
            "corpus": dict(self.corpus),
            "recipe": dict(self.recipe),
            "indexes": _sort_entries(self.indexes),
            "parts": [asdict(part) for part in self.parts],
            "files": files_to_json(self.files),
        }

    @classmethod
    def from_json(cls, value: Any, format_number: int = FORMAT) -> Self:
        """Parse and check the result of `to_json` for the same format.

        Raises:
            StoreError: a field is missing, unknown or invalid.
        """
        format_fields = {"space"} if format_number == 1 else {"representations", "retriever"}
        fields = check_fields(value, {"corpus", "recipe", "indexes", "parts", "files"} | format_fields, "content")
        check_objects(fields, "corpus", "recipe", "indexes")
        check(isinstance(fields["parts"], list), "field 'parts', which is not a list")
        part_fields = {"name", "first_page", "last_page", "rows"}
        numbered_entries = enumerate(fields["parts"])
        parts = tuple(PartEntry(**check_fields(entry, part_fields, f"parts[{i}]")) for i, entry in numbered_entries)
        files = parse_files(fields["files"])
        retriever = fields.get("retriever", "")
        check(isinstance(retriever, str), "field 'retriever', which is not a string")
        representations = embeddings_in_space(fields["space"]) if format_number == 1 else fields["representations"]
        check(isinstance(representations, dict), "field 'representations', which is not an object")
        for name, representation in representations.items():
            _check_representation(name, representation)
        for name, index_entry in fields["indexes"].items():
            _check_index(name, index_entry, files)
        return cls(
            fields["corpus"],
            parts,
            files,
            fields["recipe"],
            representations,
            fields["indexes"],
            retriever,
        )


def embeddings_in_space(space: Mapping[str, Any] | None) -> dict[str, dict[str, Any]]:
    """Return the `representations` of a snapshot with only `embeddings` in a space; they are empty
    if `space` is None.
    """
    return {} if space is None else {EMBEDDINGS: {"kind": "vectors", "space": space}}


def _sort_entries(entries: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    return {name: dict(entries[name]) for name in sorted(entries)}


def _check_representation(name: str, entry: Any) -> None:
    check(_NAME.fullmatch(name), f"representation name {name!r}")
    check(isinstance(entry, dict), f"representation {name!r}, which is not an object")
    is_valid = isinstance(entry.get("kind"), str) and isinstance(entry.get("space"), dict | None)
    check(is_valid, f"representation {name!r}, whose kind or space is wrong")


def _check_index(name: str, index_entry: Any, files: Mapping[str, BlobRef]) -> None:
    check(isinstance(index_entry, dict), "index, which is not an object")
    for field_name in ("kind", "over", "file", "factory", "metric", "refine"):
        check(isinstance(index_entry.get(field_name, ""), str), f"{field_name} of index {name!r}")
    for field_name in ("n", "d", "row_bytes"):
        number = index_entry.get(field_name, 0)
        check(type(number) is int and 0 <= number <= MAX_ROWS, f"{field_name} of index {name!r}")
    for field_name in ("search", "settings"):
        check(isinstance(index_entry.get(field_name, {}), dict), f"{field_name} of index {name!r}")
    check(
        index_entry.get("file", index_path(name)) in files or "file" not in index_entry,
        f"file of index {name!r}",
    )


@dataclass(frozen=True, slots=True)
class Manifest(VersionManifest[Content]):
    """A snapshot: its content, parents, metrics and provenance."""

    noun: ClassVar[str] = "snapshot"
    newest_format: ClassVar[int] = FORMAT
    content: Content
    metrics: Mapping[str, Any] = field(default_factory=dict)
    parents: tuple[str, ...] = ()  # ids of the parent snapshots, nearest first
    # time, processor, versions and duration of the build
    provenance: Mapping[str, Any] = field(default_factory=dict)
    format: int = FORMAT

    def __post_init__(self) -> None:
        is_tuple = isinstance(self.parents, tuple)
        are_ids = is_tuple and all(isinstance(parent, str) and FULL_ID.fullmatch(parent) for parent in self.parents)
        check(are_ids, f"list of parents {self.parents!r}")

    @classmethod
    def parse_content(cls, value: Any, format_number: int) -> Content:
        """Parse the content of a manifest of this format."""
        return Content.from_json(value, format_number)

    def content_to_json(self) -> dict[str, Any]:
        """Return the content as JSON values of the manifest's format."""
        return self.content.to_json(self.format)


def file_kind(path: str) -> str:
    """Return the kind of a file, such as `passages`, `embeddings`, `tokens` or `index/hnsw`.

    >>> file_kind("passages/part-00042.parquet"), file_kind("index/hnsw.faiss")
    ('passages', 'index/hnsw')
    """
    folder, _, file_path = path.partition("/")
    if folder == EMBEDDINGS:
        return row_file_kind(path)
    return f"index/{file_path.partition('/')[0].partition('.')[0]}" if folder == "index" else folder


def select_files(
    content: Content,
    *,
    indexes: Sequence[str] = (),
    embeddings: bool = True,
    passages_only: bool = False,
) -> Callable[[str], bool]:
    """Return the `select` argument of `pull`, which selects files for readers, or only passages.

    `indexes` names the indexes to pull; without names, all indexes that can be searched are pulled.
    `exact` selects the embeddings. They are also selected for an index whose entry has `refine`,
    because it ranks by the embeddings.

    Raises:
        UsageError: the snapshot has no such index, or the arguments contradict each other.
    """
    if unknown_indexes := sorted({*indexes} - {*content.indexes, EXACT}):
        known_indexes = ", ".join([*content.indexes, EXACT])
        raise UsageError(f"the snapshot has no index {unknown_indexes[0]!r} to pull: choose from {known_indexes}")
    if indexes and passages_only:
        raise UsageError(f"passages alone include no index {indexes[0]}: select one or the other")
    if EXACT in indexes and EXACT not in content.indexes and not embeddings:
        raise UsageError("index exact is searched in the embeddings: pull them too")
    unwanted_indexes = [name for name in content.indexes if indexes and name not in indexes]
    if not embeddings:
        reranking_indexes = [name for name, entry in content.indexes.items() if entry.get("refine") == "vectors"]
        if selected_reranking := sorted({*reranking_indexes} & {*indexes}):
            raise UsageError(f"index {selected_reranking[0]} ranks its hits by the embeddings: pull them too")
        unwanted_indexes += reranking_indexes
    excluded_kinds = {
        *BUILD_ONLY_KINDS,
        *(f"index/{name}" for name in unwanted_indexes),
        *([] if embeddings else ["embeddings"]),
    }
    return lambda path: file_kind(path) == "passages" if passages_only else file_kind(path) not in excluded_kinds
