"""Read verified ranges of a snapshot's files from its store, without copying the files first.

A build stores the digests of the blocks of large files (`snapshots.range_digests`) as two files of
the snapshot, so its id, and a signature, cover them:

* `ranges/digests`: 16 bytes for each block, file by file
* `ranges/table.json`: for each file its block size, how many digests precede its first one and, if
  it has one, its *outline*; also the digests of the blocks of `ranges/digests`

Blocks have equal sizes, or the boundaries in the outline (`bounds`). A table without such
boundaries has version 1, which all readers support.

A file of up to `WHOLE_BYTES` has no entry. Such a file is one block, whose digest is in the
manifest.
"""

import base64
import binascii
import shutil
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from threading import Lock
from typing import Any, BinaryIO, Self

import numpy as np

from rag_model.errors import StoreError, UsageError
from rag_model.ranges import (
    DIGEST_BYTES,
    BlockLayout,
    Bytes,
    CachedFile,
    Numbers,
    RangeCache,
    StoredDigests,
    evict_unused_files,
)
from rag_model.store.objects.blobs import BlobRef
from rag_model.store.objects.cache import get_cache_folder, get_cache_limit
from rag_model.store.store import Store
from rag_model.store.versions.manifest import RANGE_DIGESTS, RANGE_TABLE, Manifest
from rag_model.untrusted_text import parse_json

WHOLE_BYTES = 1 << 20  # maximum size of a file without an entry in the table
DIGEST_PAGE_BYTES = 4 << 10  # block size of the file `ranges/digests`
_MAX_BLOCK_BYTES = 1 << 30
VERSION, BOUNDS_VERSION = 1, 2  # versions of a table without and with boundaries of blocks


class SnapshotRanges:
    """The files of one snapshot that can be read by byte ranges. Thread-safe."""

    def __init__(self, store: Store, manifest: Manifest, table: Mapping[str, Any], cache: RangeCache) -> None:
        """Use a table that the caller has checked; callers use `open` instead."""
        self.cache = cache
        self._id, self._files, self._blobs = manifest.id, manifest.content.files, store.blobs
        self._entries: Mapping[str, Any] = table["files"]
        self._digest_pages = base64.b64decode(table["pages"])
        self._file_by_path: dict[str, CachedFile] = {}
        self._lock = Lock()

    @classmethod
    def open(cls, store: Store, manifest: Manifest, max_bytes: int | None = None) -> Self:
        """Open the files of a snapshot; a snapshot without large files has no table.

        Args:
            store: store of the snapshot.
            manifest: manifest of the snapshot.
            max_bytes: maximum size of the cache of ranges; by default that of the blobs' cache.

        Raises:
            StoreError: the table is missing, damaged or of a newer version.
        """
        max_bytes = get_cache_limit(get_cache_folder()) if max_bytes is None else max_bytes
        evict_unused_files(_get_cache_folder(), max_bytes)
        cache = RangeCache(_get_cache_folder(), max_bytes)
        files = manifest.content.files
        table: dict[str, Any] = {"version": VERSION, "files": {}, "pages": ""}
        if RANGE_TABLE in files:
            table = _parse_table(store.blobs.read(files[RANGE_TABLE]), files, f"snapshot {manifest.id[:12]}")
        return cls(store, manifest, table, cache)

    def covers(self, path: str) -> bool:
        """Return whether a file of the snapshot can be read by range."""
        return path in self._entries or (path in self._files and 0 < self._files[path].size <= WHOLE_BYTES)

    def get_outline(self, path: str) -> Any:
        """Return the outline of an index file; None if it has none."""
        return self._entries.get(path, {}).get("outline")

    def file(self, path: str) -> CachedFile:
        """Return an open file of the snapshot; each file is opened only once.

        Raises:
            ResourceError: the cache cannot be written.
            UsageError: the file cannot be read by range.
        """
        with self._lock:
            if path not in self._file_by_path:
                self._file_by_path[path] = self._open_file(path)
            return self._file_by_path[path]

    def open_file(self, path: str) -> BinaryIO:
        """Open a file for reads at any offset; see `CachedFile.open`."""
        return self.file(path).open()

    def read(self, path: str, start: int, end: int) -> bytes:
        """Read the verified bytes [start, end) of a file; fewer if the file is shorter."""
        return self.file(path).read(start, end)

    def prefetch(self, ranges: Sequence[tuple[str, int, int]]) -> None:
        """Load the ranges (path, start, end) of files in one round of requests."""
        with self.cache.hold():
            self.cache.load([(self.file(path), np.array([start]), np.array([end])) for path, start, end in ranges])

    def read_ranges(self, ranges: Sequence[tuple[str, Numbers, int]]) -> list[Bytes]:
        """Read verified ranges in one round of requests; return an (m, length) array of bytes for
        each (path, (m,) starts, length).
        """
        with self.cache.hold():
            files = [self.file(path) for path, _, _ in ranges]
            self.cache.load(
                [(file, starts, starts + length) for file, (_, starts, length) in zip(files, ranges, strict=True)]
            )
            return [file.copy_loaded(*file_range[1:]) for file, file_range in zip(files, ranges, strict=True)]

    def close(self) -> None:
        """Close all files."""
        self.cache.close()

    def _open_file(self, path: str) -> CachedFile:
        if not self.covers(path):
            raise UsageError(f"{path} cannot be read by ranges, because the snapshot has no digests of them: pull it")
        ref = self._files[path]
        if path not in self._entries:
            digest = bytes.fromhex(ref.hex_digest)[:DIGEST_BYTES]
            return self._open_blob(path, ref, BlockLayout(ref.size, ref.size), digest)
        if RANGE_DIGESTS not in self._file_by_path:
            digests_ref = self._files[RANGE_DIGESTS]
            digest_layout = BlockLayout(digests_ref.size, DIGEST_PAGE_BYTES)
            self._file_by_path[RANGE_DIGESTS] = self._open_blob(
                RANGE_DIGESTS, digests_ref, digest_layout, self._digest_pages
            )
        entry = self._entries[path]
        stored_digests = StoredDigests(self._file_by_path[RANGE_DIGESTS], entry["first"])
        return self._open_blob(path, ref, get_layout(entry, ref.size), stored_digests)

    def _open_blob(self, path: str, ref: BlobRef, layout: BlockLayout, digests: bytes | StoredDigests) -> CachedFile:
        name, identity = f"{path} (blob {ref.id})", f"{self._id}-{ref.hex_digest}"
        return self.cache.open(name, identity, layout, digests, partial(self._blobs.read_range, ref))


def delete_cached_ranges(snapshots: Collection[str]) -> None:
    """Delete the cached ranges of snapshots, including those that other processes have cached.

    Files of earlier versions of this package, whose names do not begin with the id of a snapshot,
    and folders of earlier versions are deleted too. A process that has such files open can read
    them until it closes them.

    Raises:
        OSError: a file cannot be deleted, for example because another user owns it; all other files
            have been deleted.
    """
    if not snapshots:
        return
    failure: OSError | None = None
    # NotADirectoryError: the folder's path is a file. RuntimeError: there is no home directory.
    with suppress(FileNotFoundError, NotADirectoryError, RuntimeError):
        for entry in _get_cache_folder().iterdir():
            snapshot_id, separator, _ = entry.name.partition("-")
            try:
                if entry.is_dir() and not entry.is_symlink():
                    shutil.rmtree(entry)
                elif snapshot_id in snapshots or not separator:
                    entry.unlink(missing_ok=True)
            except OSError as error:
                failure = error
    if failure is not None:
        raise failure


def _get_cache_folder() -> Path:
    """Return the folder of all cached ranges; each file name begins with the id of its snapshot."""
    return get_cache_folder() / "ranges"


def get_layout(entry: Mapping[str, Any], size: int) -> BlockLayout:
    """Return how a file of `size` bytes is divided into blocks; `entry` is its entry in the table.

    Raises:
        ValueError: the boundaries of its blocks are damaged.
    """
    bounds = (entry.get("outline") or {}).get("bounds")
    if bounds is None:
        return BlockLayout(size, entry["block"])
    return BlockLayout.unpack(size, entry["block"], bounds)


def _parse_table(table_bytes: bytes, files: Mapping[str, BlobRef], snapshot: str) -> dict[str, Any]:
    """Parse a table, and check that its numbers fit the files of the snapshot."""
    try:
        table: dict[str, Any] = parse_json(table_bytes)
        if table["version"] not in (VERSION, BOUNDS_VERSION):
            raise StoreError(
                f"the digests of ranges of {snapshot} have version {table['version']!r}: upgrade bookwheel, or pull it"
            )
        digest_bytes = files[RANGE_DIGESTS].size
        is_valid = len(base64.b64decode(table["pages"])) == DIGEST_BYTES * -(-digest_bytes // DIGEST_PAGE_BYTES)
        for path, entry in table["files"].items():
            first_digest_number, block_bytes = entry["first"], entry["block"]
            is_valid &= (
                type(first_digest_number) is int
                and type(block_bytes) is int
                and first_digest_number >= 0
                and 0 < block_bytes <= _MAX_BLOCK_BYTES
            )
            is_valid &= isinstance(entry.get("outline"), dict | None)
            is_valid = is_valid and (
                DIGEST_BYTES * (first_digest_number + get_layout(entry, files[path].size).count) <= digest_bytes
            )
    except (KeyError, TypeError, AttributeError, ValueError, binascii.Error) as error:
        raise StoreError(f"the digests of ranges of {snapshot} are damaged ({error!r}): pull it") from error
    if not is_valid:
        raise StoreError(f"the digests of ranges of {snapshot} are damaged: pull it")
    return table
