"""Compute ids: SHA-256 digests of bytes, files and canonical JSON, such as `sha256:ab12…`."""

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

ALGORITHM = "sha256"
_CANONICAL_ENCODER = json.JSONEncoder(sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)


def canonical_json(value: Any) -> bytes:
    r"""Encode `value` so that equal values give equal bytes: sorted keys, no spaces, UTF-8, no NaN.

    >>> canonical_json({"b": 1, "a": "é"})
    b'{"a":"\xc3\xa9","b":1}'

    Raises:
        ValueError: `value` contains a NaN or an infinity, which JSON cannot represent.
    """
    return _CANONICAL_ENCODER.encode(value).encode()


def digest_bytes(data: bytes | memoryview) -> str:
    """Return the id of `data`, as `sha256:<64 hex digits>`."""
    return f"{ALGORITHM}:{hashlib.sha256(data).hexdigest()}"


def digest_chunks(chunks: Iterable[bytes | memoryview]) -> str:
    """Return the id of a stream of bytes; only one chunk is in memory at a time."""
    hasher = hashlib.sha256()
    for chunk in chunks:
        hasher.update(chunk)
    return f"{ALGORITHM}:{hasher.hexdigest()}"


def digest_json(value: Any) -> str:
    """Return the id of a JSON value: the digest of its canonical encoding."""
    return digest_bytes(canonical_json(value))


def digest_file(path: Path) -> str:
    """Return the id of a local file's bytes, without loading the whole file into memory."""
    with path.open("rb") as file:
        return f"{ALGORITHM}:{hashlib.file_digest(file, ALGORITHM).hexdigest()}"


def digest_folder(folder: Path) -> dict[str, str]:
    """Return the digest of each file below a folder, by its relative path."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): digest_file(path) for path in files}
