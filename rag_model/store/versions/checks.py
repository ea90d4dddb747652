"""The base class of manifests, and checks of untrusted manifests. A manifest may be hostile, so
each path and number is checked before use.
"""

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import fields
from itertools import pairwise
from typing import Any, ClassVar, Generic, Protocol, Self, TypeVar

from rag_model.digest import digest_json
from rag_model.errors import StoreError
from rag_model.store.objects.blobs import BlobRef
from rag_model.untrusted_text import parse_json

FULL_ID = re.compile(r"[0-9a-f]{64}")
# name of a file or a folder in a path
_SEGMENT = re.compile(r"[A-Za-z0-9_+-][A-Za-z0-9._+=@-]{0,199}")
_MAX_DEPTH = 16  # maximum depth of nested folders
T = TypeVar("T")


# end of the error message about a manifest that is not JSON
PULL_AGAIN = ": pull it again, or verify the store"


class NewerFormatError(StoreError):
    """A newer bookwheel wrote the manifest; it is not damaged, so it must not be replaced."""


def check(condition: object, description: str) -> None:
    """Check a condition that every valid manifest fulfils; `description` names the checked value.

    Raises:
        StoreError: the condition is false; the message contains `description`.
    """
    if not condition:
        raise StoreError(f"the manifest has a bad {description}: it is damaged or was not written by bookwheel")


def check_fields(value: Any, field_names: set[str], where: str) -> dict[str, Any]:
    """Return `value` if it is a JSON object with exactly these fields; messages call it `where`.

    Raises:
        StoreError: the value is not an object, or a field is missing or unknown.
    """
    check(isinstance(value, dict), f"{where}, which is not an object")
    missing_fields = sorted(field_names - value.keys())
    unknown_fields = sorted(value.keys() - field_names)
    check(not missing_fields, f"{where}, which lacks {', '.join(missing_fields)}")
    check(
        not unknown_fields,
        f"{where}, which has the unknown field {', '.join(map(repr, unknown_fields))}",
    )
    fields: dict[str, Any] = value
    return fields


def check_objects(fields: Mapping[str, Any], *labels: str) -> None:
    """Check that the fields named `labels` are JSON objects.

    Raises:
        StoreError: a field has another type.
    """
    for label in labels:
        check(isinstance(fields[label], dict), f"field {label!r}, which is not an object")


def parse_files(value: Any) -> dict[str, BlobRef]:
    """Parse the result of `files_to_json`, with unchecked paths.

    Raises:
        StoreError: the value is not a JSON object of blobs; the message names the file.
    """
    check(isinstance(value, dict), "field 'files', which is not an object")
    files = {}
    for path, ref in value.items():
        try:
            files[path] = BlobRef.from_json(ref)
        except StoreError as error:
            raise StoreError(f"the manifest has a bad file {path!r}: {error}") from error
    return files


def files_to_json(files: Mapping[str, BlobRef]) -> dict[str, Any]:
    """Return the blobs of files by path, sorted, as JSON values."""
    return {path: files[path].to_json() for path in sorted(files)}


def check_paths(files: Mapping[str, BlobRef]) -> None:
    """Check that every path is relative and portable, and that no path is both a file and a folder.

    Raises:
        StoreError: a path could leave its folder on some system, or a file is also a folder.
    """
    for path in files:
        segments = path.split("/")
        is_safe = len(segments) <= _MAX_DEPTH and all(map(_SEGMENT.fullmatch, segments)) and path != "manifest.json"
        check(is_safe, f"file path {path!r}")
    for folder, next_path in pairwise(sorted(path.split("/") for path in files)):
        check(
            next_path[: len(folder)] != folder,
            f"file path {'/'.join(folder)!r}, which is a folder as well",
        )


def compute_id(content: Mapping[str, Any]) -> str:
    """Return the id of a manifest's content: SHA-256 of its canonical JSON, 64 hex digits.

    Raises:
        StoreError: the content has a value that JSON cannot represent.
    """
    try:
        return digest_json(content).partition(":")[2]
    except (ValueError, RecursionError) as error:  # raised for NaN, surrogates and deep nesting
        raise StoreError(f"the manifest has content that JSON cannot represent: {error}") from error


def check_format(value: Any, newest_format: int, noun: str) -> int:
    """Return the format number in a manifest.

    Raises:
        StoreError: the manifest is not a JSON object, has no format, or is newer than
            `newest_format`.
    """
    check(isinstance(value, dict), "document, which is not a JSON object")
    format_number = value.get("format")
    check(type(format_number) is int and format_number >= 1, f"format {format_number!r}")
    if format_number > newest_format:
        raise NewerFormatError(
            f"the {noun} has format {format_number}, but this bookwheel reads up to {newest_format}: upgrade bookwheel"
        )
    return int(format_number)


def parse_manifest(data: bytes, from_json: Callable[[Any], T]) -> T:
    """Parse the bytes of a manifest file.

    Raises:
        StoreError: the bytes are not JSON, or `from_json` rejects the value.
    """
    try:
        manifest = parse_json(data)
    except ValueError as error:
        raise StoreError(f"the manifest is damaged ({error}){PULL_AGAIN}") from error
    return from_json(manifest)


class VersionContent(Protocol):
    """The content of a version: everything that determines its id."""

    @property
    def files(self) -> Mapping[str, BlobRef]:
        """The files by path."""
        ...

    def to_json(self) -> dict[str, Any]:
        """Return the content as JSON values, with files sorted by path."""
        ...


ContentT = TypeVar("ContentT", bound=VersionContent)


class VersionManifest(ABC, Generic[ContentT]):
    """The manifest of a snapshot, a model or an evaluation: one JSON file in a catalog.

    A subclass is a frozen dataclass with the fields `content` and `format`. All its other fields
    are JSON objects or tuples of JSON values, which do not influence the id.
    """

    __slots__ = ()
    noun: ClassVar[str]  # kind of the version: snapshot, model or evaluation
    newest_format: ClassVar[int]
    id_section: ClassVar[str] = "content"  # name of the section that determines the id
    content: ContentT
    format: int

    @classmethod
    @abstractmethod
    def parse_content(cls, value: Any, format_number: int) -> ContentT:
        """Parse and check the content of a manifest of this format.

        Raises:
            StoreError: a field is missing, unknown or invalid.
        """

    def content_to_json(self) -> dict[str, Any]:
        """Return the content as JSON values of the manifest's format."""
        return self.content.to_json()

    @property
    def id(self) -> str:
        """The id: SHA-256 of the content's canonical JSON, 64 hex digits."""
        return compute_id(self.content_to_json())

    def to_json(self) -> dict[str, Any]:
        """Return the manifest as JSON values, in the order of the file."""
        values = {"format": self.format, "id": self.id, "content": self.content_to_json()}
        others = {name: getattr(self, name) for name in self._list_fields() if name not in values}
        return values | {name: [*value] if isinstance(value, tuple) else dict(value) for name, value in others.items()}

    @classmethod
    def from_json(cls, value: Any) -> Self:
        """Parse and check the result of `to_json`; the input may be hostile.

        Raises:
            StoreError: the format is newer, a path is unsafe, a number is impossible, or the id
                does not match the content.
        """
        format_number, names = check_format(value, cls.newest_format, cls.noun), cls._list_fields()
        values = dict(check_fields(value, {"id", *names}, "manifest"))
        check_objects(values, *(name for name in names if name in ("metrics", "provenance")))
        identity, values["content"] = values.pop("id"), cls.parse_content(values["content"], format_number)
        manifest = cls(**{name: tuple(value) if isinstance(value, list) else value for name, value in values.items()})
        check(manifest.id == identity, f"id {identity!r}: its {cls.id_section} hashes to {manifest.id}")
        return manifest

    @classmethod
    def from_bytes(cls, data: bytes) -> Self:
        """Parse the bytes of a manifest file."""
        return parse_manifest(data, cls.from_json)

    @classmethod
    def _list_fields(cls) -> list[str]:
        return [field.name for field in fields(cls)]  # type: ignore[arg-type]
