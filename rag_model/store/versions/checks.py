"""Checks of manifests. A manifest may be hostile, so each path and number is checked before use."""

import re
from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import Any, TypeVar

from rag_model.digest import digest_json
from rag_model.errors import StoreError
from rag_model.store.objects.blobs import BlobRef
from rag_model.untrusted_text import parse_json

FULL_ID = re.compile(r"[0-9a-f]{64}")
_SEGMENT = re.compile(r"[A-Za-z0-9_+-][A-Za-z0-9._+=@-]{0,199}")
_MAX_DEPTH = 16  # maximum depth of nested folders
T = TypeVar("T")


PULL_AGAIN = ": pull it again, or verify the store"  # advice for a manifest that is not JSON


class NewerFormatError(StoreError):
    """The manifest is from a newer bookwheel. The manifest is not damaged, so it must not be
    replaced.
    """


def check(condition: object, description: str) -> None:
    """Check a condition that every valid manifest fulfils.

    Raises:
        StoreError: the condition is false; the message contains `description`.
    """
    if not condition:
        raise StoreError(f"the manifest has a bad {description}: it is damaged or was not written by bookwheel")


def check_fields(value: Any, expected: set[str], where: str) -> dict[str, Any]:
    """Return `value` if it is a JSON object with exactly the expected fields.

    Raises:
        StoreError: the value is not an object, or a field is missing or unknown.
    """
    check(isinstance(value, dict), f"{where}, which is not an object")
    missing_fields = sorted(expected - value.keys())
    unknown_fields = sorted(value.keys() - expected)
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
        StoreError: the value is not an object of blobs; the message names the file.
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
    """Return files as JSON values, sorted by path."""
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
    except (ValueError, RecursionError) as error:  # NaN, a lone surrogate, deep nesting
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
        value = parse_json(data)
    except ValueError as error:
        raise StoreError(f"the manifest is damaged ({error}){PULL_AGAIN}") from error
    return from_json(value)
