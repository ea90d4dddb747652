"""An object store as a file system of fsspec, over its vendor's own client: seven requests, and nothing cached.

A cloud's class makes the requests; this class gives them the names that `Files` calls. There are no folders: a folder
is what names have in common before a slash.
"""

import errno
import os
import re
from abc import abstractmethod
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from pathlib import Path
from typing import Any
from weakref import finalize

from fsspec import AbstractFileSystem

_DELETING = 8  # requests at once
_QUERY = re.compile(r"\?[^\s)'\"]+")  # of an address within a message; it may sign the request
_KINDS: dict[int, type[OSError]] = {401: PermissionError, 403: PermissionError, 404: FileNotFoundError}
_NUMBERS = {400: errno.EINVAL, 501: errno.ENOSYS}  # where a condition is not understood


class Bucket(AbstractFileSystem):  # type: ignore[misc]
    """The files of all buckets (Azure: containers) that one set of credentials reaches."""

    root_marker = ""

    def __init__(self, **kwargs: Any) -> None:
        """Connect; nothing is sent yet."""
        super().__init__(**kwargs)
        self._owner, self._connected = os.getpid(), self.connect()
        finalize(self, self._connected.close).atexit = False  # at exit a forked child would end its parent's

    @property
    def client(self) -> Any:
        """The vendor's client, this process's own: what was forked makes another, for a connection has one user."""
        if self._owner != os.getpid():
            self._owner, self._connected = os.getpid(), self.connect()
        return self._connected

    @abstractmethod
    def connect(self) -> Any:
        """Return a client of what the environment names."""

    @abstractmethod
    def head(self, bucket: str, key: str) -> dict[str, Any] | None:
        """Return what `entry` makes of an object; None when there is no such object."""

    @abstractmethod
    def listed(self, bucket: str, prefix: str, *, deep: bool) -> Iterator[dict[str, Any]]:
        """Yield the objects whose keys begin with `prefix`; unless `deep`, those beyond the next slash as folders."""

    @abstractmethod
    def get(self, bucket: str, key: str, start: int | None, end: int | None) -> bytes:
        """Return the bytes from `start` to `end` (exclusive) in one request; fewer where the object is shorter."""

    @abstractmethod
    def put(self, bucket: str, key: str, data: bytes, *, create: bool) -> None:
        """Write an object whole; with `create` the server itself refuses if there is one.

        Raises:
            FileExistsError: it refused.
        """

    @abstractmethod
    def upload(self, bucket: str, key: str, source: Path, chunk: int, ahead: int) -> None:
        """Write a file in chunks of about `chunk` bytes, `ahead` at once; the object appears complete or not at all."""

    @abstractmethod
    def remove(self, bucket: str, key: str) -> None:
        """Delete an object.

        Raises:
            FileNotFoundError: there is none.
        """

    def split(self, path: str) -> tuple[str, str]:
        """Return the bucket and the key that a path names."""
        bucket, _, key = path.partition("/")
        return bucket, key

    def info(self, path: str, **_: Any) -> dict[str, Any]:
        """Describe one object; a folder counts as absent."""
        bucket, key = self.split(path)
        found = self.head(bucket, key) if key else None
        if found is None:
            raise FileNotFoundError(errno.ENOENT, "no such object", path)
        return found

    def ls(self, path: str, detail: bool = True, **_: Any) -> list[Any]:
        """List a folder's objects and folders; nothing for one that does not exist."""
        bucket, key = self.split(path)
        found = list(self.listed(bucket, f"{key}/" if key else "", deep=False))
        return found if detail else [entry["name"] for entry in found]

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **_: Any) -> bytes:
        """Return an object's bytes, or a range of them."""
        return self.get(*self.split(path), start, end)

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **_: Any) -> None:
        """Write an object's bytes; `mode="create"` only if there is none."""
        self.put(*self.split(path), value, create=mode == "create")

    def put_file(self, lpath: str, rpath: str, chunksize: int = 16 << 20, max_concurrency: int = 1, **_: Any) -> None:
        """Upload a local file."""
        self.upload(*self.split(rpath), Path(lpath), chunksize, max_concurrency)

    def rm_file(self, path: str) -> None:
        """Delete one object."""
        self.remove(*self.split(path))

    def rm(self, path: str, recursive: bool = False, **_: Any) -> None:
        """Delete an object, and all below it if `recursive`."""
        bucket, key = self.split(path)
        below = [entry["name"] for entry in self.listed(bucket, f"{key}/", deep=True)] if recursive else []
        doomed = below if self.head(bucket, key) is None else [*below, path]
        if not doomed:
            raise FileNotFoundError(errno.ENOENT, "no such object", path)
        with ThreadPoolExecutor(_DELETING) as pool:
            list(pool.map(self._gone, doomed))

    def _gone(self, path: str) -> None:
        try:
            self.rm_file(path)
        except FileNotFoundError:  # another process was faster
            return


def entry(bucket: str, key: str, size: int, written: datetime | None) -> dict[str, Any]:
    """Describe an object as fsspec does."""
    return {"name": f"{bucket}/{key}", "size": size, "type": "file", "last_modified": written}


def folder(bucket: str, prefix: str) -> dict[str, Any]:
    """Describe a folder as fsspec does."""
    return {"name": f"{bucket}/{prefix.rstrip('/')}", "size": 0, "type": "directory"}


def refusal(status: int | None, message: str) -> OSError:
    """Return the error that an answer with an HTTP status means, its message on one line and without query strings.

    409 and 412 mean that a file exists: no other condition is ever sent.
    """
    said = _QUERY.sub("?…", " ".join(message.split()))
    if status in {409, 412}:
        return FileExistsError(said)
    if status in _KINDS:
        return _KINDS[status](said)
    return OSError(_NUMBERS[status], said) if status in _NUMBERS else OSError(said)
