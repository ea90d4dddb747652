"""Checks of a manifest, which may be hostile: every path and number of it is checked before use."""

import re
from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import Any, TypeVar

from rag_model.digest import digest_json
from rag_model.errors import StoreError
from rag_model.json_text import parse_json
from rag_model.store.objects.blobs import BlobRef

ID = re.compile(r"[0-9a-f]{64}")
_SEGMENT = re.compile(r"[A-Za-z0-9_+-][A-Za-z0-9._+=@-]{0,199}")
_DEEPEST = 16  # folders within folders
T = TypeVar("T")


PULL_AGAIN = ": pull it again, or verify the store"  # what to do about a manifest that is no JSON


class NewerFormatError(StoreError):
    """A manifest was written by a newer bookwheel: it is sound, and must be left as it is."""


def check(good: object, what: str) -> None:
    """Check that a part of a manifest is `good`.

    Raises:
        StoreError: it is not; the message names `what`.
    """
    if not good:
        raise StoreError(f"the manifest has a bad {what}: it is damaged or was not written by bookwheel")


def fields_of(value: Any, expected: set[str], where: str) -> dict[str, Any]:
    """Return `value` if it is a JSON object with exactly the expected fields.

    Raises:
        StoreError: it has other fields, or is not an object.
    """
    good = isinstance(value, dict) and set(value) == expected
    check(good, f"{where}, which does not hold exactly the fields {', '.join(sorted(expected))}")
    fields: dict[str, Any] = value
    return fields


def check_objects(fields: Mapping[str, Any], *labels: str) -> None:
    """Check that each of some fields is a JSON object.

    Raises:
        StoreError: one is not.
    """
    for label in labels:
        check(isinstance(fields[label], dict), f"field {label!r}, which is not an object")


def check_paths(files: Mapping[str, BlobRef]) -> None:
    """Check that each path stays inside its folder on every system, and that no file is also a folder.

    Raises:
        StoreError: a path leaves the folder, or a file is also a folder.
    """
    for path in files:
        segments = path.split("/")
        good = len(segments) <= _DEEPEST and all(map(_SEGMENT.fullmatch, segments)) and path != "manifest.json"
        check(good, f"file path {path!r}")
    for above, below in pairwise(sorted(path.split("/") for path in files)):
        check(below[: len(above)] != above, f"file path {'/'.join(above)!r}, which is a folder as well")


def content_id(content: Mapping[str, Any]) -> str:
    """Return the id of a content: SHA-256 of its canonical JSON, 64 hex digits.

    Raises:
        StoreError: the content has a value that JSON cannot represent.
    """
    try:
        return digest_json(content).partition(":")[2]
    except (ValueError, RecursionError) as broken:  # NaN, half a surrogate pair, too deep nesting
        raise StoreError(f"the manifest has content that JSON cannot represent: {broken}") from broken


def check_format(value: Any, newest: int, noun: str) -> int:
    """Return the format number in a manifest.

    Raises:
        StoreError: the manifest is not a JSON object, has no format, or one newer than `newest`.
    """
    check(isinstance(value, dict), "document, which is not a JSON object")
    written = value.get("format")
    check(type(written) is int and written >= 1, f"format {written!r}")
    if written > newest:
        raise NewerFormatError(
            f"the {noun} is of format {written}, this bookwheel reads up to {newest}: upgrade bookwheel"
        )
    return int(written)


def from_bytes(data: bytes, from_json: Callable[[Any], T]) -> T:
    """Read a manifest file.

    Raises:
        StoreError: it is not JSON, or `from_json` refuses it.
    """
    try:
        value = parse_json(data)
    except ValueError as broken:
        raise StoreError(f"the manifest is damaged ({broken}){PULL_AGAIN}") from broken
    return from_json(value)
