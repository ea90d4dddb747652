"""The only module that calls fsspec: the file operations that a store needs, each failing with one clear sentence.

Paths are relative to the store's URL. Listings are never answered from a cache.
"""

import errno
import io
import json
import math
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, cast

import fsspec
from fsspec.implementations.local import LocalFileSystem

from rag_model.errors import StoreError, UsageError
from rag_model.json_text import parse_json
from rag_model.landing import landing
from rag_model.store.objects.clouds import cloud_of
from rag_model.store.objects.create import create_exclusive, excludes
from rag_model.store.objects.ranges import AHEAD, ASKED, Answer, Place, RangeFile, read_ahead

_CHUNK = 16 << 20  # bytes; a transfer holds `AHEAD` chunks in memory, for a file of any size
_MOST_CHUNKS = 10_000  # S3's limit for one upload; beyond 160 GB the chunks grow
_TOKEN_REFUSED = {"InvalidToken", "TokenRefreshRequired"}  # codes that s3fs does not translate to PermissionError
_WRITTEN = ("mtime", "LastModified", "last_modified", "created")  # when a file was written: local, S3, Azure, memory
PROBED = ("probe", "memo/probe")  # folders of the files of a probe, which exist for a moment
_REMOTE_BLOCK = 1 << 20  # bytes; the least that a read at an offset requests


@dataclass(frozen=True, slots=True)
class Found:
    """A file as the store lists it."""

    path: str  # relative to the store
    size: int  # bytes
    written: float  # seconds since 1970, by the store's own clock: that of its server, not of this machine


class Files:
    """Files below one URL: a local path, `file://`, `memory://`, a cloud's, or another protocol of fsspec."""

    def __init__(self, url: str) -> None:
        """Connect to `url`; nothing is read or written yet.

        Raises:
            MissingExtraError: the URL needs a package that is not installed.
            StoreError: fsspec knows no such protocol.
            UsageError: the URL is empty, which fsspec would take for the current folder; or a cloud's without bucket.
        """
        if not url.strip():
            raise UsageError("the store's URL is empty: give a folder, file:///…, s3://…, gs://… or az://…")
        self._cloud = cloud_of(url)
        if self._cloud and not url.partition("://")[2].partition("/")[0]:
            raise UsageError(f"the store's URL {url} names no bucket: give {url.partition('://')[0]}://BUCKET/FOLDER")
        try:
            fs, root = self._connected(url)
        except (ValueError, ImportError) as unknown:
            raise StoreError(f"cannot open a store at {url}: {unknown}") from unknown
        except OSError as error:
            raise StoreError(_sentence(error, "open", url)) from error
        self._errors: tuple[type[Exception], ...] = (OSError, *getattr(fs, "errors", ()))
        self._fs: Any = fs
        self._root: str = root.rstrip("/")
        self.url: str = fs.unstrip_protocol(self._root)

    @property
    def is_local(self) -> bool:
        """Whether the files are on this machine's disk."""
        return isinstance(self._fs, LocalFileSystem)

    @property
    def at_once(self) -> int:
        """How many small requests to make at once: one on this machine, where nothing is gained by waiting together."""
        return 1 if self.is_local else ASKED

    def ask(self, read: Callable[[Place], Answer], places: Sequence[Place]) -> Iterator[Answer]:
        """Yield `read(place)` for each place, in order: small requests, `at_once` of them at once."""
        return read_ahead(read, places, self.at_once)

    def local_path(self, path: str) -> Path:
        """Return the local path of `path` (only where `is_local`)."""
        return Path(self._path(path))

    def url_of(self, path: str) -> str:
        """Return the full URL of `path`."""
        return f"{self.url}/{path}"

    def size(self, path: str) -> int | None:
        """Return a file's size in bytes; None when there is no such file."""
        with self._explaining("look for", path):
            try:
                info = self._fs.info(self._path(path))
            except (FileNotFoundError, NotADirectoryError):
                return None
        return int(info["size"]) if info["type"] == "file" else None

    def find(self, path: str) -> Found | None:
        """Return a file's size and when it was last written; None when there is no such file."""
        with self._explaining("look for", path):
            try:
                info = self._fs.info(self._path(path))
            except (FileNotFoundError, NotADirectoryError):
                return None
        return Found(path, int(info["size"]), _written(info)) if info["type"] == "file" else None

    def tree(self, folder: str = "") -> Iterator[Found]:
        """Yield all files below a folder, dot-files too, from fresh listings; none if the folder does not exist.

        Folders of one depth are listed at once, those above first.
        """
        ahead = [folder]
        while ahead:
            level, ahead = ahead, []
            for parent, entries in zip(level, self.ask(self._entries, level), strict=True):
                for entry in entries:
                    path = entry["name"][len(self._root) :].strip("/")
                    if entry["type"] == "file" and not entry["name"].endswith("/"):
                        yield Found(path, int(entry["size"]), _written(entry))
                    elif entry["type"] == "directory" and path != parent:
                        ahead.append(path)

    def names(self, folder: str, *, kind: str = "file") -> list[str]:
        """Return the sorted base names of a folder's files, or of its folders (`kind="directory"`)."""
        found = (entry for entry in self._entries(folder) if entry["type"] == kind)
        bases = (entry["name"].rpartition("/")[2] for entry in found)
        # An object store may list the folder itself (a name that ends in a slash). A dot-file is a temporary file.
        return sorted(base for base in bases if base and not base.startswith("."))

    def read(self, path: str) -> bytes | None:
        """Return a small file's bytes; None when there is no such file."""
        with self._explaining("read", path):
            try:
                return bytes(self._fs.cat_file(self._path(path)))
            except (FileNotFoundError, NotADirectoryError):
                return None

    def read_json(self, path: str) -> dict[str, Any] | None:
        """Return the JSON object that a file holds; None when there is no such file.

        Raises:
            StoreError: the file holds something else.
        """
        data = self.read(path)
        if data is None:
            return None
        try:
            value = parse_json(data)
        except ValueError as broken:
            raise StoreError(
                f"{self.url_of(path)} is damaged: it is not JSON ({broken}); restore it from a copy"
            ) from broken
        if not isinstance(value, dict):
            raise StoreError(f"{self.url_of(path)} is damaged: it holds no JSON object; restore it from a copy")
        return value

    def open(self, path: str, size: int) -> BinaryIO:
        """Open a file of `size` bytes to read at any offset; only the requested ranges of a remote file are read."""
        if not self.is_local:
            read = partial(self.read_range, path)
            return cast(BinaryIO, io.BufferedReader(RangeFile(self.url_of(path), size, read), _REMOTE_BLOCK))
        with self._explaining("read", path):
            return self.local_path(path).open("rb")

    def read_range(self, path: str, start: int, end: int) -> bytes:
        """Return the bytes from `start` to `end` (exclusive); fewer where the file is shorter."""
        with self._explaining("read", path):
            return bytes(self._fs.cat_file(self._path(path), start=start, end=end)) if end > start else b""

    def chunks(self, path: str, size: int, start: int = 0) -> Iterator[bytes]:
        """Yield a file's bytes from `start` to `size` in order, in chunks of 16 MiB; the next three are prefetched."""
        starts = range(start, size, _CHUNK)
        if self.is_local or len(starts) < 2:
            return (self.read_range(path, at, min(at + _CHUNK, size)) for at in starts)
        return read_ahead(lambda at: self.read_range(path, at, min(at + _CHUNK, size)), starts)

    def create(self, path: str, data: bytes) -> bool:
        """Create a file exclusively; return False when another writer was first.

        A retried request can find the file of its own first attempt. So on failure a remote file is read back, and
        equal bytes count as success: put a nonce into `data`, so that no other writer's bytes are equal.
        """
        with self._explaining("write", path):
            if create_exclusive(self._fs, self._path(path), data):
                return True
        return not self.is_local and self.read(path) == data

    def put(self, path: str, data: bytes) -> None:
        """Write a small file, replacing an existing one."""
        with self._explaining("write", path):
            if self.is_local:
                with landing(self.local_path(path)) as temporary:
                    temporary.write_bytes(data)
            else:
                self._fs.pipe_file(self._path(path), data)

    def upload(self, source: Path, path: str) -> None:
        """Copy a local file into the store; it appears complete or not at all."""
        with self._explaining("write", path):
            if self.is_local:
                with landing(self.local_path(path)) as temporary:
                    shutil.copyfile(source, temporary)
            else:
                self._put_remote(source, path)

    def link(self, source: Path, path: str) -> None:
        """Store a local file that never changes: as a further link to it on the store's own disk, elsewhere a copy."""
        if self.is_local:
            with suppress(OSError), landing(self.local_path(path)) as temporary:  # another disk, or one without links
                os.link(source, temporary)
                return
        self.upload(source, path)

    def delete(self, folder: str) -> None:
        """Delete a folder with its contents; do nothing if there is none."""
        with self._explaining("delete", folder):
            try:
                self._fs.rm(self._path(folder), recursive=True)
            except FileNotFoundError:
                return

    def remove(self, path: str) -> None:
        """Delete one file; do nothing if there is none."""
        with self._explaining("delete", path), suppress(FileNotFoundError):
            self._fs.rm_file(self._path(path))

    def excludes(self) -> bool:
        """Probe whether exclusive creation works here: without it two publishers would both succeed.

        A gateway may treat prefixes differently, so the memo's is probed as well.
        """
        with self._explaining("write", "probe"):
            return all(excludes(self._fs, self._path(folder)) for folder in PROBED)

    def _connected(self, url: str) -> tuple[Any, str]:
        if self._cloud is None:
            fs, root = fsspec.url_to_fs(url, use_listings_cache=False)
            return fs, str(root)
        fs = self._cloud.connected()
        return fs, str(fs._strip_protocol(url))

    def _entries(self, folder: str) -> list[dict[str, Any]]:
        with self._explaining("list", folder):
            try:
                return list(self._fs.ls(self._path(folder), detail=True, refresh=True))
            except (FileNotFoundError, NotADirectoryError):
                return []

    def _put_remote(self, source: Path, path: str) -> None:
        """Upload a file, a large one in parts; s3fs alone would hold 500 MB of it in memory."""
        size = source.stat().st_size
        bounds = {"chunksize": max(_CHUNK, -(-size // _MOST_CHUNKS)), "max_concurrency": AHEAD}
        try:
            self._fs.put_file(str(source), self._path(path), **(bounds if self._cloud else {}))
        except FileNotFoundError:  # the upload had succeeded, its response was lost, and the request was repeated
            if self.size(path) != size:
                raise

    def _path(self, path: str) -> str:
        return f"{self._root}/{path}" if path else self._root

    @contextmanager
    def _explaining(self, doing: str, path: str) -> Iterator[None]:
        try:
            yield
        except self._errors as error:
            raise StoreError(_sentence(error, doing, self.url_of(path))) from error


def json_bytes(value: Any) -> bytes:
    """Encode a JSON value for people: indented, keys in the order given, one newline at the end."""
    return (json.dumps(value, indent=1, ensure_ascii=False, allow_nan=False) + "\n").encode()


def _written(info: Mapping[str, Any]) -> float:
    """Return when a listed file was last written, under any system's name; without a time the file counts as new."""
    moment = next((info[name] for name in _WRITTEN if info.get(name) is not None), math.inf)
    return moment.timestamp() if isinstance(moment, datetime) else float(moment)


def _code(error: Exception) -> str | None:
    """Return the S3 error code of an exception."""
    response = getattr(error.__cause__, "response", None)
    return response.get("Error", {}).get("Code") if isinstance(response, dict) else None


def _sentence(error: Exception, doing: str, url: str) -> str:
    number = getattr(error, "errno", None)
    if number in {errno.ENOSPC, errno.EDQUOT}:
        return f"the disk is full: cannot {doing} {url}; free some space and run it again"
    if type(error).__name__ in {"NoCredentialsError", "PartialCredentialsError"}:
        return f"cannot {doing} {url}: {error}; set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE"
    if isinstance(error, PermissionError) or number == errno.EROFS or _code(error) in _TOKEN_REFUSED:
        return f"not allowed to {doing} {url} ({error}); check the permissions or credentials"
    if isinstance(error, FileNotFoundError):
        return f"cannot {doing} {url}: the file, its folder or its bucket does not exist"
    return f"cannot {doing} {url}: {str(error) or type(error).__name__}"
