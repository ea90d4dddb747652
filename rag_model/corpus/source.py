"""The source of a corpus: any fsspec URL, read as chunks of bytes.

Local disks, HTTP, S3 and memory raise different errors; this module turns each into one sentence.
"""

import re
import sys
from collections.abc import Iterator
from typing import Any

import fsspec
from fsspec.core import url_to_fs

from rag_model.errors import InputError, UsageError, reason
from rag_model.secrets import refuse_secret

CHUNK = 1 << 18  # bytes yielded at a time
_STAMPS = ("ETag", "mtime", "LastModified", "last_modified", "created", "blob_id")  # by file system
_CLIENTS = {"aiohttp": "ClientError", "httpx2": "HTTPError"}  # the second is huggingface_hub's


def expand(pattern: str) -> list[str]:
    """Return the full URLs of the files that a path, URL or glob names, in natural order (`2` before `10`).

    Raises:
        InputError: no file matches, or the source cannot be reached.
        UsageError: the pattern is empty, or a URL that may contain a secret.
    """
    if not pattern.strip():
        raise UsageError("the name of the dump is empty: give a path, a URL or a glob")
    refuse_secret(pattern)
    try:
        fs, path = _fresh(pattern)
        paths = [path] if fs.isfile(path) else fs.glob(path)
        urls = [fs.unstrip_protocol(found) for found in paths if fs.isfile(found)]
    except Exception as problem:
        raise _unreadable(pattern, problem) from problem
    if not urls:
        raise InputError(f"{pattern} names no file: check the path, or give a glob such as 'dumps/*.bz2'")
    return sorted(urls, key=_natural)


def exists(url: str) -> bool:
    """Return whether a file exists."""
    try:
        fs, path = _fresh(url)
        return bool(fs.isfile(path))
    except Exception as problem:
        raise _unreadable(url, problem) from problem


def size_of(url: str) -> int:
    """Return a file's size in bytes.

    Raises:
        InputError: it cannot be reached, or its server does not say.
    """
    try:
        fs, path = url_to_fs(url)
        size = fs.size(path)
    except Exception as problem:
        raise _unreadable(url, problem) from problem
    if size is None:
        raise InputError(f"the server of {url} does not tell its size: download the file and give its path")
    return int(size)


def stamp_of(url: str) -> str | None:
    """Return what tells one state of a file from another: its size, and the tag or time that its disk or server gives.

    None: it gives neither.

    Raises:
        InputError: the file cannot be reached.
    """
    try:
        fs, path = _fresh(url)
        told = fs.info(path)
    except Exception as problem:
        raise _unreadable(url, problem) from problem
    written = next((str(told[name]) for name in _STAMPS if told.get(name) is not None), None)
    return None if written is None else f"{told.get('size')} {written}"


def read_bytes(url: str, offset: int = 0, length: int | None = None) -> Iterator[bytes]:
    """Yield the bytes of a file, or `length` of them from `offset`, in chunks of at most `CHUNK`.

    Raises:
        InputError: the file cannot be read, or ends before `length` bytes.
    """
    left = length
    try:
        with fsspec.open(url, "rb").open() as file:
            if offset:
                file.seek(offset)
            while left is None or left > 0:
                chunk = file.read(CHUNK if left is None else min(CHUNK, left))
                if not chunk:
                    break
                left = None if left is None else left - len(chunk)
                yield chunk
    except Exception as problem:
        raise _unreadable(url, problem) from problem
    if left:
        raise InputError(f"{url} ends {left} bytes before byte {offset + (length or 0)}: download it again")


def errors_of(*expected: type[Exception]) -> tuple[type[Exception], ...]:
    """Return the expected errors of reading a URL, and those of HTTP clients that are no OSErrors, if imported."""
    return (*expected, *(getattr(sys.modules[name], error) for name, error in _CLIENTS.items() if name in sys.modules))


def basename(url: str) -> str:
    """Return the last segment of a URL: what messages call the file."""
    return url.rpartition("/")[2]


def _fresh(url: str) -> tuple[Any, str]:
    """Return a file system that has forgotten its listings, which some keep for as long as the process lives."""
    fs, path = url_to_fs(url)
    fs.invalidate_cache()
    return fs, path


def _natural(url: str) -> list[tuple[int, str]]:
    return [(int(piece or 0), "") if i % 2 else (0, piece) for i, piece in enumerate(re.split(r"(\d+)", url))]


def _unreadable(url: str, problem: Exception) -> InputError:
    return InputError(f"cannot read {url} ({reason(problem)}): check that it exists and that you may read it")
