"""A store with latency: files in memory behind an fsspec file system whose requests each take some milliseconds.

`far://NAME` is one dictionary by folder, and a listing costs a request for each thousand files, as S3's does.
Concurrent requests wait concurrently. Requests are counted by kind. The store lives in one process.
"""

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import fsspec
from fsspec import AbstractFileSystem

_PAGE = 1000  # files that one request lists
Body = bytes | Callable[[], bytes]  # or a function that makes it, so that millions of records need not be held


class Far(AbstractFileSystem):  # type: ignore[misc]
    """The files of all stores `far://`."""

    protocol = "far"
    cachable = False
    # folder -> name -> body, size, modification time
    folders: ClassVar[dict[str, dict[str, tuple[Body, int, float]]]] = {}
    below: ClassVar[dict[str, set[str]]] = {}  # folder -> its folders
    requests: ClassVar[Counter[str]] = Counter()
    seconds: ClassVar[float] = 0.0  # latency of a request
    _lock: ClassVar[threading.Lock] = threading.Lock()

    @classmethod
    def write(cls, path: str, body: Body, size: int, modified_at: float) -> None:
        """Add a file without a request."""
        folder, _, name = path.rpartition("/")
        cls.folders.setdefault(folder, {})[name] = body, size, modified_at
        while folder and folder.rpartition("/")[2] not in cls.below.get(folder.rpartition("/")[0], ()):
            above, _, folder_name = folder.rpartition("/")
            cls.below.setdefault(above, set()).add(folder_name)
            folder = above

    def ls(self, path: str, detail: bool = True, **other: Any) -> list[Any]:
        """List a folder."""
        path = self._strip_protocol(path)
        files, folders = self.folders.get(path, {}), self.below.get(path, set())
        self._ask("list", 1 + (len(files) + len(folders)) // _PAGE)
        if not files and not folders:
            raise FileNotFoundError(path)
        entries = [{"name": f"{path}/{name}", "type": "directory", "size": 0} for name in sorted(folders)]
        for name, (_, size, modified_at) in sorted(files.items()):
            entries.append({"name": f"{path}/{name}", "type": "file", "size": size, "mtime": modified_at})
        return entries

    def info(self, path: str, **other: Any) -> dict[str, Any]:
        """Return the size and the modification time of a file."""
        self._ask("head")
        _, size, modified_at = self._get_entry(path)
        return {"name": path, "type": "file", "size": size, "mtime": modified_at}

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **other: Any) -> bytes:
        """Read a file, or a range of it."""
        self._ask("get")
        body = self._get_entry(path)[0]
        return (body() if callable(body) else body)[start:end]

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **other: Any) -> None:
        """Write a file; mode `create` fails if it exists."""
        self._ask("put")
        with self._lock:
            if mode == "create" and self._has_file(path):
                raise FileExistsError(path)
            self.write(self._strip_protocol(path), bytes(value), len(value), time.time())

    def rm_file(self, path: str) -> None:
        """Delete a file."""
        self._ask("delete")
        folder, _, name = self._strip_protocol(path).rpartition("/")
        self._get_entry(path)
        del self.folders[folder][name]

    def rm(self, path: str, recursive: bool = False, maxdepth: int | None = None) -> None:
        """Delete a folder's files, a thousand with each request."""
        folder = self._strip_protocol(path)
        names = [
            stored_folder
            for stored_folder in self.folders
            if stored_folder == folder or stored_folder.startswith(f"{folder}/")
        ]
        self._ask("delete", 1 + sum(len(self.folders.pop(name)) for name in names) // _PAGE)

    def _get_entry(self, path: str) -> tuple[Body, int, float]:
        folder, _, name = self._strip_protocol(path).rpartition("/")
        try:
            return self.folders[folder][name]
        except KeyError:
            raise FileNotFoundError(path) from None

    def _has_file(self, path: str) -> bool:
        folder, _, name = self._strip_protocol(path).rpartition("/")
        return name in self.folders.get(folder, {})

    def _ask(self, kind: str, count: int = 1) -> None:
        with self._lock:
            self.requests[kind] += count
        if self.seconds:
            time.sleep(self.seconds * count)


@contextmanager
def latency(seconds: float) -> Iterator[Counter[str]]:
    """Make each request inside the block take `seconds`; yield the count of its requests by kind."""
    Far.requests.clear()
    Far.seconds = seconds
    try:
        yield Far.requests
    finally:
        Far.seconds = 0.0


fsspec.register_implementation("far", Far, clobber=True)
