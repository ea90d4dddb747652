"""Blobs: immutable files named by the digest of their bytes, so equal files are stored once and damage is detected.

The path of a blob is `blobs/<first two hex digits>/<all 64>`; `sha256sum` of the file gives its name.
"""

import re
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, Self

from rag_model.digest import ALGORITHM, digest_bytes, digest_file
from rag_model.errors import StoreError
from rag_model.store.objects.cache import cache_folder, cache_stamps, make_room, used
from rag_model.store.objects.fetch import fetch
from rag_model.store.objects.files import Files
from rag_model.store.objects.intents import Intents

_ID = re.compile(rf"{ALGORITHM}:[0-9a-f]{{64}}")
_TRUSTED = 12 * 3600.0  # seconds; half of the margin of `gc`, so clocks may be as far apart
_LARGEST = 1 << 50  # bytes; no object store holds a larger file

Chunks = Callable[[Callable[[int, int], bytes], int], Iterator[bytes]]


@dataclass(frozen=True, slots=True)
class BlobRef:
    """The identity of a file's bytes."""

    id: str  # sha256:<64 hex digits>
    size: int  # bytes

    def __post_init__(self) -> None:
        """Refuse a malformed id or size: the id may come from anywhere, and a path is made from it."""
        if not isinstance(self.id, str) or not _ID.fullmatch(self.id):
            raise StoreError(f"{self.id!r} is not a blob id (sha256:<64 hex digits>)")
        if type(self.size) is not int or not 0 <= self.size <= _LARGEST:
            raise StoreError(f"blob {self.id} has an impossible size: {self.size!r}")

    def to_json(self) -> dict[str, Any]:
        """Return `{"id": …, "size": …}`."""
        return {"id": self.id, "size": self.size}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Self:
        """Read back what `to_json` wrote.

        Raises:
            StoreError: a field is missing or impossible.
        """
        if not isinstance(value, Mapping) or set(value) != {"id", "size"}:
            raise StoreError(f"{value!r} is not a blob: it needs an id and a size")
        return cls(id=value["id"], size=value["size"])

    @property
    def path(self) -> str:
        """The blob's path, relative to the store: `blobs/ab/abcdef…`."""
        digits = self.id.partition(":")[2]
        return f"blobs/{digits[:2]}/{digits}"


@dataclass(frozen=True, slots=True)
class Blobs:
    """The blobs of one store."""

    files: Files

    def put_file(self, path: Path) -> BlobRef:
        """Store a local file's bytes, streamed; nothing is copied if they were stored within the last twelve hours.

        Raises:
            StoreError: the store is full or unwritable, or the file cannot be read.
        """
        try:
            ref = BlobRef(digest_file(path), path.stat().st_size)
        except OSError as error:
            raise StoreError(f"cannot read {path} to store it: {error}") from error
        if self._put(ref, partial(self.files.upload, path, ref.path)) and self.files.is_local:
            cache_stamps().put(self.files.local_path(ref.path), ref.id)
        return ref

    def put_bytes(self, data: bytes) -> BlobRef:
        """Store a few bytes."""
        ref = BlobRef(digest_bytes(data), len(data))
        self._put(ref, partial(self.files.put, ref.path, data))
        return ref

    def exists(self, ref: BlobRef) -> bool:
        """Whether the blob exists with the right size (`verify` hashes it again)."""
        return self.files.size(ref.path) == ref.size

    def open(self, ref: BlobRef) -> BinaryIO:
        """Open a blob for reading at any offset; the bytes are not verified.

        Raises:
            StoreError: the blob is missing or its size is wrong.
        """
        self._require(ref)
        return self.files.open(ref.path, ref.size)

    def read(self, ref: BlobRef) -> bytes:
        """Return a small blob's bytes, verified.

        Raises:
            StoreError: the blob is missing or damaged.
        """
        data = self.files.read(ref.path)
        if data is None:
            raise self._missing(ref)
        if digest_bytes(data) != ref.id:
            raise self.damaged(ref)
        return data

    def read_range(self, ref: BlobRef, start: int, end: int) -> bytes:
        """Return a blob's bytes from `start` to `end` (exclusive), by one request; they are not verified.

        Raises:
            StoreError: the blob is missing or shorter, or has no such bytes.
        """
        if not 0 <= start <= end <= ref.size:
            raise StoreError(f"blob {ref.id} of {ref.size} bytes has none from {start} to {end}")
        try:
            data = self.files.read_range(ref.path, start, end)
        except StoreError:
            self._require(ref)  # if the blob is missing or of a wrong size, say that instead
            raise
        if len(data) != end - start:
            raise self.damaged(ref, "it is cut short")
        return data

    def fetch(self, ref: BlobRef, dest: Path, watch: Callable[[int], None] = lambda size: None) -> None:
        """Copy a blob to a local path, which appears complete and verified or not at all, in bounded memory.

        An interrupted copy is continued where it ended. `watch` is called with the number of bytes that an earlier
        copy left, and then with the size of each chunk; an exception of it interrupts the copy.

        Raises:
            StoreError: the blob is missing or damaged, or `dest` cannot be written.
        """
        if not self._copied(ref, dest, partial(self.files.chunks, ref.path, ref.size), watch):
            raise self.damaged(ref)

    def assemble(
        self, ref: BlobRef, dest: Path, chunks: Chunks, watch: Callable[[int], None] = lambda size: None
    ) -> bool:
        """Fill a local path as `fetch` does, but from `chunks(read, start)`: bytes from `start` on, in order.

        `chunks` gets the bytes that it lacks by `read(start, end)`. Returns False if the result is not the blob; then
        `dest` is unchanged.

        Raises:
            StoreError: the blob is missing or of another size, or `dest` cannot be written.
        """
        return self._copied(ref, dest, partial(chunks, partial(self.files.read_range, ref.path)), watch)

    def _copied(
        self, ref: BlobRef, dest: Path, chunks: Callable[[int], Iterator[bytes]], watch: Callable[[int], None]
    ) -> bool:
        def rest(start: int) -> Iterator[bytes]:
            watch(start)
            for chunk in chunks(start):
                watch(len(chunk))
                yield chunk

        try:
            return fetch(ref.id, ref.size, dest, rest)
        except OSError as error:
            raise StoreError(f"cannot write {dest}: {error.strerror or error}") from error
        except StoreError:
            self._require(ref)  # if the blob is missing or of a wrong size, say that instead
            raise

    def local(self, ref: BlobRef) -> Path:
        """Return a local path to read a blob from: the blob itself, or a copy in the cache; verified.

        A file is hashed at its first use on this machine, and again only after it was written to.

        Raises:
            StoreError: the blob is missing or damaged.
        """
        if self.files.is_local:
            self._require(ref)
            path = self.files.local_path(ref.path)
            if not _sound(path, ref):
                raise self.damaged(ref)
            return path
        copy = cache_folder() / ref.path.partition("/")[2]
        if not _sound(copy, ref):
            make_room(ref.size)
            self.fetch(ref, copy)
            cache_stamps().put(copy, ref.id)
        with cache_stamps().linked(copy, ref.id):
            used(copy)
        return copy

    def forget(self, ref: BlobRef) -> None:
        """Remove this machine's copy of a remote blob, if there is one; the blob itself is not deleted."""
        if not self.files.is_local:
            (cache_folder() / ref.path.partition("/")[2]).unlink(missing_ok=True)

    def url(self, ref: BlobRef) -> str:
        """Return the blob's full URL, which any fsspec reader opens."""
        return self.files.url_of(ref.path)

    def _put(self, ref: BlobRef, write: Callable[[], None]) -> bool:
        """Write a blob and return True; False if it exists and is too recent for any `gc` to be deleting it."""
        found = self.files.find(ref.path)
        if found is not None and found.size == ref.size and time.time() - found.written < _TRUSTED:
            return False
        Intents(self.files).write(ref.path, write)
        return True

    def _require(self, ref: BlobRef) -> None:
        size = self.files.size(ref.path)
        if size is None:
            raise self._missing(ref)
        if size != ref.size:
            raise self.damaged(ref, f"{size} bytes instead of {ref.size}")

    def _missing(self, ref: BlobRef) -> StoreError:
        return StoreError(
            f"blob {ref.id} is missing in {self.files.url}: restore it from a copy of the store, "
            "or run the command again that made it"
        )

    def damaged(self, ref: BlobRef, what: str = "its bytes do not match its name") -> StoreError:
        """Return the error of a damaged blob, to be raised; `what` is wrong with it."""
        return StoreError(
            f"blob {ref.id} in {self.files.url} is damaged, {what}: restore it from a copy of the store, "
            "or delete it and run the command again that made it"
        )


def _sound(path: Path, ref: BlobRef) -> bool:
    try:
        return path.stat().st_size == ref.size and cache_stamps().sound(path, ref.id)
    except FileNotFoundError:
        return False
    except OSError as error:
        raise StoreError(f"cannot read {path}: {error.strerror or error}") from error
