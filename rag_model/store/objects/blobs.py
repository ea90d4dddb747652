"""Blobs: immutable files named by the digest of their bytes.

Files with equal bytes are stored once, and damage is detected. The path of a blob is
`blobs/<first two hex digits>/<all 64>`, so `sha256sum` of an undamaged blob prints its file name.

A fetch writes the bytes in order to a partial file next to the destination. An interrupted fetch
leaves the partial file, and the next fetch continues at its end. The file is renamed to the
destination only if its digest is right.
"""

import fcntl
import os
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, Self

from rag_model.atomic_write import describe_write_error, fsync
from rag_model.digest import ALGORITHM, digest_bytes, digest_chunks, digest_file
from rag_model.errors import StoreError
from rag_model.store.objects.cache import (
    delete_partial,
    get_cache_folder,
    get_partial_path,
    make_room_for,
    open_cache_stamps,
    touch,
)
from rag_model.store.objects.files import Files
from rag_model.store.objects.intents import Intents

_BLOCK_BYTES = 1 << 20
_ID = re.compile(rf"{ALGORITHM}:[0-9a-f]{{64}}")
# A blob that was written within this time is not written again. This is half of the age at which
# `gc` may delete a file, so the clocks of writer and store may differ by as much.
_TRUST_SECONDS = 12 * 3600.0
_MAX_BYTES = 1 << 50  # maximum size of a blob, which is more than any object store allows
# (function that reads a range of the blob in the store, start) -> the blob's bytes from `start` on
ChunkSource = Callable[[Callable[[int, int], bytes], int], Iterator[bytes]]


def fetch_file(identity: str, size: int, dest: Path, read_from: Callable[[int], Iterable[bytes]]) -> bool:
    """Fill `dest` with `size` bytes that have the digest `identity`; resume an interrupted fetch.

    `read_from(start)` yields the bytes from `start` on, in order. If another process is fetching
    the same file, waits for it and uses its file. Returns False if the bytes have another digest;
    then `dest` is unchanged and the partial file is deleted.

    Raises:
        OSError: the disk is full, or the folder cannot be written; the partial file is kept.
    """
    dest.parent.mkdir(parents=True, exist_ok=True)
    partial_path = get_partial_path(dest)
    with _lock_partial(partial_path) as (file, has_waited):
        if has_waited and dest.is_file() and dest.stat().st_size == size and digest_file(dest) == identity:
            partial_path.unlink()
            return True
        if not (_try_resume(file, size, identity, read_from) or _append_and_digest(file, read_from) == identity):
            partial_path.unlink()
            return False
        os.fsync(file.fileno())
        partial_path.replace(dest)
        fsync(dest.parent)
        return True


def get_partial_size(dest: Path) -> int:
    """Return the number of bytes of `dest` that an interrupted fetch has written."""
    with suppress(OSError):
        return get_partial_path(dest).stat().st_size
    return 0


def _try_resume(file: BinaryIO, size: int, identity: str, read_from: Callable[[int], Iterable[bytes]]) -> bool:
    """Continue the partial file of an earlier fetch; if it is damaged, empty it and return
    False.
    """
    partial_size = file.seek(0, os.SEEK_END)
    if 0 < partial_size <= size and _append_and_digest(file, read_from) == identity:
        return True
    file.seek(0)
    file.truncate()
    return False


def _append_and_digest(file: BinaryIO, read_from: Callable[[int], Iterable[bytes]]) -> str:
    """Append the missing bytes to a file and return the digest of the complete file."""
    blob_id = digest_chunks(_iter_all_bytes(file, read_from))
    file.flush()
    return blob_id


def _iter_all_bytes(file: BinaryIO, read_from: Callable[[int], Iterable[bytes]]) -> Iterator[bytes]:
    file.seek(0)
    while block := file.read(_BLOCK_BYTES):
        yield block
    for chunk in read_from(file.tell()):
        # A single write of 16 MiB can take Linux ten times longer than smaller writes.
        for i in range(0, len(chunk), _BLOCK_BYTES):
            block = chunk[i : i + _BLOCK_BYTES]
            file.write(block)
            yield block


@contextmanager
def _lock_partial(partial_path: Path) -> Iterator[tuple[BinaryIO, bool]]:
    """Lock a partial file; yield the file, and whether this process had to wait for another one."""
    has_waited = False
    while True:
        with partial_path.open("ab+") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                has_waited = True
                fcntl.flock(file, fcntl.LOCK_EX)
            if _is_same_file(file, partial_path):
                yield file, has_waited
                return


def _is_same_file(file: BinaryIO, path: Path) -> bool:
    """Return whether `path` still names the open file, and no process renamed or removed it."""
    with suppress(FileNotFoundError):
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    return False


@dataclass(frozen=True, slots=True)
class BlobRef:
    """The identity of a file's bytes."""

    id: str  # sha256:<64 hex digits>
    size: int  # bytes

    def __post_init__(self) -> None:
        """Check the id and the size, which may come from an untrusted source; the id becomes a
        path.
        """
        if not isinstance(self.id, str) or not _ID.fullmatch(self.id):
            raise StoreError(f"{self.id!r} is not a blob id (sha256:<64 hex digits>)")
        if type(self.size) is not int or not 0 <= self.size <= _MAX_BYTES:
            raise StoreError(f"blob {self.id} has an impossible size: {self.size!r}")

    def to_json(self) -> dict[str, Any]:
        """Return `{"id": …, "size": …}`."""
        return {"id": self.id, "size": self.size}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Self:
        """Parse and check the result of `to_json`.

        Raises:
            StoreError: a field is missing or has an impossible value.
        """
        if not isinstance(value, Mapping) or set(value) != {"id", "size"}:
            raise StoreError(f"{value!r} is not a blob: it needs an id and a size")
        return cls(id=value["id"], size=value["size"])

    @property
    def hex_digest(self) -> str:
        """The SHA-256 of the bytes, 64 hex digits."""
        return self.id.partition(":")[2]

    @property
    def path(self) -> str:
        """The blob's path, relative to the store: `blobs/ab/abcdef…`."""
        return f"blobs/{self.hex_digest[:2]}/{self.hex_digest}"


@dataclass(frozen=True, slots=True)
class Blobs:
    """The blobs of one store."""

    files: Files

    def put_file(self, path: Path, *, move: bool = False, digest: str | None = None) -> BlobRef:
        """Store a local file; copy nothing if its bytes were written to the store in the last
        twelve hours.

        With `move`, a store on the same disk renames the file instead of copying it. `digest` is
        the file's digest, if its writer has computed it.

        Raises:
            StoreError: the store is full or unwritable, or the file cannot be read.
        """
        try:
            ref = BlobRef(digest or digest_file(path), path.stat().st_size)
        except OSError as error:
            raise StoreError(f"cannot read {path} to store it: {error}") from error
        write_blob = self.files.link if move else self.files.upload
        is_written = self._write_if_needed(ref, partial(write_blob, path, ref.path))
        if move:
            # Remove the link before the stamp is recorded, because removing it changes the ctime.
            path.unlink()
        if is_written and self.files.is_local:
            open_cache_stamps().record(self.files.local_path(ref.path), ref.id)
        return ref

    def put_bytes(self, data: bytes) -> BlobRef:
        """Store a small file from memory."""
        ref = BlobRef(digest_bytes(data), len(data))
        self._write_if_needed(ref, partial(self.files.write, ref.path, data))
        return ref

    def exists(self, ref: BlobRef) -> bool:
        """Return whether the blob exists with the right size; the bytes are not verified."""
        return self.files.get_size(ref.path) == ref.size

    def open(self, ref: BlobRef) -> BinaryIO:
        """Open a blob for reads at any offset; the bytes are not verified.

        Raises:
            StoreError: the blob is missing or its size is wrong.
        """
        self._check_size(ref)
        return self.files.open(ref.path, ref.size)

    def read(self, ref: BlobRef) -> bytes:
        """Return a small blob's bytes, verified.

        Raises:
            StoreError: the blob is missing or damaged.
        """
        blob_bytes = self.files.read(ref.path)
        if blob_bytes is None:
            raise self._create_missing_error(ref)
        if digest_bytes(blob_bytes) != ref.id:
            raise self.create_damaged_error(ref)
        return blob_bytes

    def read_range(self, ref: BlobRef, start: int, end: int) -> bytes:
        """Read the bytes [start, end) of a blob with one request; they are not verified.

        Raises:
            StoreError: the blob is missing or too short, or the range is not inside of it.
        """
        if not 0 <= start <= end <= ref.size:
            raise StoreError(f"blob {ref.id} has {ref.size} bytes, so none from {start} to {end}")
        try:
            range_bytes = self.files.read_range(ref.path, start, end)
        except StoreError:
            # report a missing blob or a wrong size instead, if that is the cause
            self._check_size(ref)
            raise
        if len(range_bytes) != end - start:
            raise self.create_damaged_error(ref, "it is cut short")
        return range_bytes

    def fetch(self, ref: BlobRef, dest: Path, on_bytes: Callable[[int], None] = lambda size: None) -> None:
        """Copy a blob to a local path; the file appears complete and verified or not at all.

        Memory is bounded, and an interrupted copy is resumed. `on_bytes` is called with the number
        of bytes that an earlier copy has written, and then with the size of each chunk; an
        exception that it raises interrupts the copy.

        Raises:
            StoreError: the blob is missing or damaged, or `dest` cannot be written.
        """
        if not self._copy_to(ref, dest, partial(self.files.iter_chunks, ref.path, ref.size), on_bytes):
            raise self.create_damaged_error(ref)

    def assemble(
        self,
        ref: BlobRef,
        dest: Path,
        iter_chunks: ChunkSource,
        on_bytes: Callable[[int], None] = lambda size: None,
    ) -> bool:
        """Write a blob to a local path as `fetch` does, from the bytes that `iter_chunks` yields.

        `iter_chunks(read, start)` yields the bytes from `start` on, in order; it calls
        `read(start, end)` for bytes that are only in the store. Returns False if the result has
        another digest; then `dest` is unchanged.

        Raises:
            StoreError: the blob is missing or of another size, or `dest` cannot be written.
        """
        return self._copy_to(ref, dest, partial(iter_chunks, partial(self.files.read_range, ref.path)), on_bytes)

    def _copy_to(
        self,
        ref: BlobRef,
        dest: Path,
        iter_chunks: Callable[[int], Iterator[bytes]],
        on_bytes: Callable[[int], None],
    ) -> bool:
        def read_from(start: int) -> Iterator[bytes]:
            on_bytes(start)
            for chunk in iter_chunks(start):
                on_bytes(len(chunk))
                yield chunk

        try:
            return fetch_file(ref.id, ref.size, dest, read_from)
        except OSError as error:
            raise StoreError(describe_write_error(dest, error)) from error
        except StoreError:
            # report a missing blob or a wrong size instead, if that is the cause
            self._check_size(ref)
            raise

    def get_local_path(self, ref: BlobRef) -> Path:
        """Return a local path of a blob: the blob's file in a local store, or a copy in the cache.

        The file is verified: it is hashed when this machine first uses it, and after each change.

        Raises:
            StoreError: the blob is missing or damaged.
        """
        if self.files.is_local:
            self._check_size(ref)
            path = self.files.local_path(ref.path)
            if not _is_intact(path, ref):
                raise self.create_damaged_error(ref)
            return path
        copy_path = get_cache_folder() / ref.path.partition("/")[2]
        if not _is_intact(copy_path, ref):
            make_room_for(ref.size)
            self.fetch(ref, copy_path)
            open_cache_stamps().record(copy_path, ref.id)
        with open_cache_stamps().preserve(copy_path, ref.id):
            touch(copy_path)
        return copy_path

    def delete_local_copy(self, ref: BlobRef) -> None:
        """Delete this machine's copy of a remote blob from the cache, and what an interrupted
        fetch left of it, but not the blob itself.
        """
        if not self.files.is_local:
            copy = get_cache_folder() / ref.path.partition("/")[2]
            copy.unlink(missing_ok=True)
            delete_partial(get_partial_path(copy))

    def url_of(self, ref: BlobRef) -> str:
        """Return the blob's full URL for fsspec."""
        return self.files.url_of(ref.path)

    def _write_if_needed(self, ref: BlobRef, write: Callable[[], None]) -> bool:
        """Write a blob and return True, or return False if the store has it and `gc` cannot delete
        it yet.
        """
        file = self.files.find(ref.path)
        if file is not None and file.size == ref.size and time.time() - file.modified < _TRUST_SECONDS:
            return False
        Intents(self.files).write_despite_sweeps(ref.path, write)
        return True

    def _check_size(self, ref: BlobRef) -> None:
        stored_bytes = self.files.get_size(ref.path)
        if stored_bytes is None:
            raise self._create_missing_error(ref)
        if stored_bytes != ref.size:
            raise self.create_damaged_error(ref, f"{stored_bytes} bytes instead of {ref.size}")

    def _create_missing_error(self, ref: BlobRef) -> StoreError:
        return StoreError(
            f"blob {ref.id} is missing in {self.files.url}: restore it from a copy of the store, "
            "or repeat the command that created it"
        )

    def create_damaged_error(self, ref: BlobRef, problem: str = "its bytes do not match its name") -> StoreError:
        """Return the error for a damaged blob; `problem` describes the damage."""
        return StoreError(
            f"blob {ref.id} in {self.files.url} is damaged, {problem}: restore it from a copy of "
            "the store, or delete it and repeat the command that created it"
        )


def _is_intact(path: Path, ref: BlobRef) -> bool:
    try:
        return path.stat().st_size == ref.size and open_cache_stamps().is_sound(path, ref.id)
    except FileNotFoundError:
        return False
    except OSError as error:
        raise StoreError(f"cannot read {path}: {error.strerror or error}") from error
