"""Read verified and cached ranges of remote files, without downloading the whole files.

A remote file is divided into blocks (`BlockLayout`), and each block has a digest: the first 16
bytes of its SHA-256. A `CachedFile` is a sparse local file of the same size. `CachedFile.load`
fetches the missing blocks of a search in one round of parallel requests, verifies them and writes
them to the sparse file. Code that memory-maps whole files can map the sparse file instead.

`RangeCache` limits the bytes on the disk: it removes the blocks that were used least recently, but
never those of a running search. A process that finds the sparse file of an earlier process verifies
its blocks again, so neither a crash nor another program can make the results of a search wrong.
"""

import base64
import ctypes
import fcntl
import hashlib
import io
import logging
import mmap
import os
import shutil
import tempfile
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any, BinaryIO, Self, cast

import numpy as np
import numpy.typing as npt

from rag_model.errors import ResourceError, StoreError

_RANGES_SUFFIX = ".ranges"  # suffix of the names of sparse files
DIGEST_BYTES = 16  # the first bytes of a block's SHA-256
MAX_REQUESTS = 64  # maximum number of concurrent requests of a cache
_MAX_RUN_BYTES = 1 << 20  # bytes per request; longer ranges are read by parallel requests
_MAX_SILENT_SECONDS = 15.0  # time without an answer to any request, after which a search gives up
_MAX_PROBE_SECONDS = 1.0  # the same limit for later searches, until the store answers again
_MIN_FREE_BYTES = 64 << 20  # on a disk with less free space, blocks are kept in memory
_MAX_MEMORY_BYTES = 256 << 20  # maximum bytes of all blocks that are kept in memory
_HEADROOM_DIVISOR = 8  # an eviction frees an additional eighth of the maximum
_DISK_PAGE_BYTES = 4 << 10  # allocation unit of the disk
_LOG = logging.getLogger(__name__)
_KEEP_SIZE, _PUNCH_HOLE = 1, 2  # flags of `fallocate`, in `linux/falloc.h`
Numbers = npt.NDArray[np.int64]
Bytes = npt.NDArray[np.uint8]


def digest_blocks(data: bytes | memoryview, block_bytes: int) -> bytes:
    """Return the digests of the blocks of `data`, 16 bytes each, concatenated."""
    return digest_ranges(data, [*range(0, len(data), block_bytes), len(data)])


def digest_ranges(data: bytes | memoryview, bounds: Iterable[int]) -> bytes:
    """Return the digests of the ranges of `data` between consecutive `bounds`, concatenated."""
    view = memoryview(data)
    return b"".join(hashlib.sha256(view[start:end]).digest()[:DIGEST_BYTES] for start, end in pairwise(bounds))


def pack_bounds(bounds: npt.ArrayLike) -> str:
    """Encode the boundaries of blocks, (blocks + 1,), as text; every block is smaller than 64
    KiB.
    """
    return base64.b64encode(np.diff(bounds).astype("<u2").tobytes()).decode()


@dataclass(frozen=True, slots=True)
class BlockLayout:
    """The division of a file into blocks, which have equal sizes (except the last block) or
    explicit boundaries.
    """

    size: int  # bytes of the file
    block_bytes: int  # bytes per block; only an estimate if there are explicit boundaries
    bounds: Numbers | None = None  # (blocks + 1,) from 0 to `size`; None for blocks of equal size

    @classmethod
    def unpack(cls, size: int, block_bytes: int, packed_bounds: str) -> Self:
        """Return a layout from the text that `pack_bounds` returned.

        Raises:
            ValueError: the blocks do not add up to `size`.
        """
        lengths = np.frombuffer(base64.b64decode(packed_bounds), "<u2")
        if not lengths.all() or lengths.sum(dtype=np.int64) != size:
            raise ValueError("the blocks do not add up to the size of the file")
        return cls(size, block_bytes, np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)]))

    @property
    def count(self) -> int:
        """The number of blocks."""
        return -(-self.size // self.block_bytes) if self.bounds is None else len(self.bounds) - 1

    def locate_offsets(self, offsets: Numbers) -> Numbers:
        """Return the block number of each offset."""
        if self.bounds is None:
            return offsets // self.block_bytes
        blocks: Numbers = np.searchsorted(self.bounds, offsets, "right") - 1
        return blocks

    def locate_range(self, start: int, end: int) -> slice:
        """Return the block numbers of the range [start, end), as a slice."""
        if self.bounds is None:
            return slice(start // self.block_bytes, -(-end // self.block_bytes))
        first_block, last_block = self.locate_offsets(np.array([start, end - 1])).tolist()
        return slice(first_block, last_block + 1)

    def get_starts(self, blocks: Numbers) -> Numbers:
        """Return the offset of each block; for the number `count`, which follows that of the last
        block, it is the size of the file.
        """
        if self.bounds is None:
            return np.minimum(blocks * self.block_bytes, self.size)
        starts: Numbers = self.bounds[blocks]
        return starts

    def count_disk_bytes(self, blocks: Numbers) -> int:
        """Return the disk space of blocks in whole disk pages; a page that two blocks share
        counts twice.
        """
        first_pages = self.get_starts(blocks) // _DISK_PAGE_BYTES
        end_pages = -(-self.get_starts(blocks + 1) // _DISK_PAGE_BYTES)
        return _DISK_PAGE_BYTES * int((end_pages - first_pages).sum())

    def locate_ranges(self, starts: Numbers, ends: Numbers) -> Numbers:
        """Return the block numbers of each range; a block of several ranges is repeated."""
        first_blocks, last_blocks = self.locate_offsets(starts), self.locate_offsets(ends - 1)
        # Ranges within one block are frequent, and the steps below would slow them down.
        if ((first_blocks == last_blocks) & (starts < ends)).all():
            return first_blocks
        counts = np.where(ends > starts, last_blocks + 1 - first_blocks, 0)
        # position of each block within its range
        offsets = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
        blocks: Numbers = np.repeat(first_blocks, counts) + offsets
        return blocks


class RangeFile(io.RawIOBase):
    """A file of known size that is read by range.

    Unlike fsspec's files, it does not request the size and does not read ahead.
    """

    def __init__(self, name: str, size: int, read: Callable[[int, int], bytes]) -> None:
        """Create a file whose bytes [start, end) are `read(start, end)`; messages contain
        `name`.
        """
        self.name = name
        self._size, self._read, self._position = size, read, 0

    def readable(self) -> bool:
        """Return True."""
        return True

    def seekable(self) -> bool:
        """Return True."""
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Set the position, as `io.IOBase.seek` does, and return it."""
        self._position = max(
            0,
            offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._size}[whence],
        )
        return self._position

    def readinto(self, buffer: Any) -> int:
        """Fill the buffer, or less of it at the end of the file; return the number of bytes."""
        read_bytes = self.read(len(buffer))
        buffer[: len(read_bytes)] = read_bytes
        return len(read_bytes)

    def read(self, size: int | None = -1, /) -> bytes:
        """Return `size` bytes, or fewer at the end of the file, without the copy that `readinto`
        makes.
        """
        end = self._size if size is None or size < 0 else min(self._position + size, self._size)
        file_bytes = self._read(self._position, end) if self._position < end else b""
        self._position += len(file_bytes)
        return file_bytes


class RangeCache:
    """Keeps blocks of remote files on the disk, up to a maximum number of bytes. Thread-safe."""

    def __init__(self, folder: Path, max_bytes: int) -> None:
        """Create a cache with its sparse files in `folder`, which is created when it is needed."""
        self.folder, self.max_bytes = folder, max_bytes
        # Counts since the cache was created. The requests of one round are sent together.
        self.rounds = self.requests = self.fetched_bytes = 0
        self._lock = threading.Lock()
        self._files: list[CachedFile] = []
        self._used_bytes = 0
        self._clock = 1  # a counter of searches, which serves as the time of a block's last use
        self._is_silent = False  # whether no request was answered since a search gave up
        # whether any file is in memory because the disk is full or not writable
        self._is_in_memory = False
        self._search_starts = set[int]()  # the clock at the start of each running search
        self._pool = ThreadPoolExecutor(MAX_REQUESTS, "ranges")
        self._background = ThreadPoolExecutor(1, "ranges-later")

    def open(
        self,
        name: str,
        identity: str,
        layout: BlockLayout,
        digests: "bytes | StoredDigests",
        read: Callable[[int, int], bytes],
    ) -> "CachedFile":
        """Open a remote file; nothing is fetched yet.

        Args:
            name: name of the file in messages.
            identity: name of the sparse file, which identifies the bytes of the remote file.
            layout: size of the remote file, and its blocks.
            digests: digests of all blocks, or their location in another file.
            read: returns the bytes [start, end) of the remote file, unverified.

        Raises:
            ResourceError: no sparse file can be created.
        """
        descriptor = self._create_file(identity)
        try:
            os.ftruncate(descriptor, layout.size)
        except OSError as error:
            os.close(descriptor)
            raise _build_write_error(self.folder, error) from error
        cached_file = CachedFile(self, name, descriptor, layout, digests, read)
        with self._lock:
            self._files.append(cached_file)
            self._used_bytes += layout.count_disk_bytes(cached_file.list_stored())
        return cached_file

    @contextmanager
    def hold(self) -> Iterator[None]:
        """Prevent the removal of blocks that are loaded inside this context until it ends."""
        with self._lock:
            self._clock += 1
            search_start = self._clock
            self._search_starts.add(search_start)
        try:
            yield
        finally:
            with self._lock:
                self._search_starts.remove(search_start)
                if self._used_bytes > self.max_bytes:
                    self._evict(self.max_bytes - self.max_bytes // _HEADROOM_DIVISOR)

    def load(self, ranges: Sequence[tuple["CachedFile", Numbers, Numbers]], *, is_patient: bool = False) -> None:
        """Load ranges of several files in one round of requests.

        Args:
            ranges: (file, (m,) starts, (m,) ends) in bytes for each file.
            is_patient: wait even if the store does not answer for long, as on a slow connection.

        Raises:
            ResourceError: the disk of the cache is full.
            StoreError: a block cannot be read, or does not match its digest, even when it is read
                again. The message names the bytes and the file.
        """
        missing_blocks = self._find_missing(ranges)
        if not missing_blocks:
            return
        with self._lock:
            self.rounds += 1
        digest_pages = self._find_missing([file._locate_digests(blocks) for file, blocks in missing_blocks])
        fetches = [
            self._start_fetch(file, file._verify_stored(blocks)) for file, blocks in [*digest_pages, *missing_blocks]
        ]
        try:
            for fetch in fetches:  # digests come first, because other blocks are verified by them
                fetch.file._store_runs([(run, self._wait_for_next_run(fetch, is_patient)) for run in fetch.runs])
        except TimeoutError as error:
            raise StoreError(f"cannot read ranges of {fetch.file.name}: the store does not answer") from error
        finally:
            for fetch in fetches:
                for request in fetch.requests:
                    request.cancel()

    def _wait_for_next_run(self, fetch: "_Fetch", is_patient: bool) -> bytes:
        """Remove the first request of a fetch, and return its bytes when it is answered.

        Raises:
            TimeoutError: no request was answered for some seconds. The search must then end and
                free its thread for searches that find their ranges in the cache.
        """
        request = fetch.requests.popleft()
        try:
            while True:
                requests_before = self.requests
                max_seconds = _MAX_PROBE_SECONDS if self._is_silent else _MAX_SILENT_SECONDS
                try:
                    return request.result(None if is_patient else max_seconds)
                except TimeoutError:
                    if self.requests == requests_before:
                        self._is_silent = True
                        raise
        finally:
            request.cancel()
            # The error of a request refers to this frame. If the frame referred to the request, the
            # cycle would keep the objects of all callers in memory.
            del request

    def load_later(self, ranges: Sequence[tuple["CachedFile", Numbers, Numbers]]) -> None:
        """Load ranges in the background, after the ranges of earlier calls.

        Failures are not reported, because a search that needs the ranges loads them itself.
        """

        def load() -> None:
            with self.hold():
                self.load(ranges)

        with suppress(RuntimeError):  # the cache is closed
            self._background.submit(load)

    def _find_missing(
        self, ranges: Sequence[tuple["CachedFile", Numbers, Numbers] | None]
    ) -> list[tuple["CachedFile", Numbers]]:
        """Record the use of ranges; return (file, numbers of unverified blocks) for each file that
        has such blocks.
        """
        blocks_by_file: dict[CachedFile, list[Numbers]] = {}
        with self._lock:
            for file_range in ranges:
                if file_range is not None and len(
                    unverified_blocks := file_range[0]._mark_used(*file_range[1:], self._clock)
                ):
                    blocks_by_file.setdefault(file_range[0], []).append(unverified_blocks)
        return [(file, np.unique(np.concatenate(block_arrays))) for file, block_arrays in blocks_by_file.items()]

    def close(self) -> None:
        """Close all files; arrays that map them stay valid."""
        # Background loads write to the files, so this waits for them. It does not wait for single
        # requests, which write to no file and may wait minutes for the store.
        self._pool.shutdown(wait=False, cancel_futures=True)
        self._background.shutdown(cancel_futures=True)
        with self._lock:
            files, self._files = self._files, []
        for file in files:
            os.close(file._descriptor)

    def _start_fetch(self, file: "CachedFile", blocks: Numbers) -> "_Fetch":
        """Start requests for blocks, one for each run of adjacent blocks."""
        if not len(blocks):
            return _Fetch(file, [], deque())
        starts, is_run_start = file.layout.get_starts(blocks), np.append(True, np.diff(blocks) > 1)
        run_starts = starts[np.maximum.accumulate(np.where(is_run_start, np.arange(len(blocks)), 0))]
        # Which request of its run reads each block: long runs are divided among several requests.
        request_numbers = (starts - run_starts) // _MAX_RUN_BYTES
        runs = np.split(blocks, np.flatnonzero(is_run_start[1:] | (np.diff(request_numbers) > 0)) + 1)
        return _Fetch(file, runs, deque(self._pool.submit(self._fetch, file, run) for run in runs))

    def _fetch(self, file: "CachedFile", run: Numbers) -> bytes:
        data = file._read_remote(int(run[0]), int(run[-1]) + 1)
        with self._lock:
            self.requests += 1
            self.fetched_bytes += len(data)
            self._is_silent = False
        return data

    def _reserve(self, file: "CachedFile", blocks: Numbers) -> None:
        """Record that blocks are on the disk, before they are written.

        Otherwise another search that evicts blocks on the same disk page could delete them.
        """
        with self._lock:
            self._used_bytes += file.layout.count_disk_bytes(blocks[~file._is_stored[blocks]])
            file._is_stored[blocks] = True
            if self._used_bytes > self.max_bytes:
                self._evict(self.max_bytes - self.max_bytes // _HEADROOM_DIVISOR)

    def _free_disk(self) -> bool:
        """Evict all blocks that no search uses; return whether there were any."""
        with self._lock:
            bytes_before = self._used_bytes
            self._evict(0)
            return self._used_bytes < bytes_before

    def _evict(self, target_bytes: int) -> None:
        """Remove the least recently used blocks until at most `target_bytes` are left."""
        clock_limit = min(self._search_starts, default=self._clock + 1)
        evictable_blocks = [file._list_evictable(clock_limit) for file in self._files]
        last_used_times = np.concatenate([np.empty(0, np.int64), *(used_times for _, used_times in evictable_blocks)])
        file_numbers = np.repeat(np.arange(len(self._files)), [len(used_times) for _, used_times in evictable_blocks])
        blocks = np.concatenate([np.empty(0, np.int64), *(blocks for blocks, _ in evictable_blocks)])
        for i in np.argsort(last_used_times, kind="stable").tolist():
            if self._used_bytes <= target_bytes:
                return
            file = self._files[file_numbers[i]]
            if not file._free_block(int(blocks[i])):
                return  # the file system cannot free a part of a file
            self._used_bytes -= file.layout.count_disk_bytes(blocks[i : i + 1])

    def _create_file(self, identity: str) -> int:
        """Open the sparse file of an identity on the disk or, if this is impossible, in memory."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            if shutil.disk_usage(self.folder).free >= _MIN_FREE_BYTES:
                return self._open_file(identity)
            reason = f"less than {_MIN_FREE_BYTES / 1e6:.0f} MB of its disk are free"
            return self._create_in_memory(identity, OSError(reason))
        except OSError as error:
            return self._create_in_memory(identity, error)

    def _open_file(self, identity: str) -> int:
        """Open a sparse file, or a private one if another process uses it.

        If another process deletes the file before it is locked here, the open file is private too.
        """
        # O_NOFOLLOW: another user may have replaced the file by a link to a file of this user.
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW
        descriptor = os.open(self.folder / f"{identity}{_RANGES_SUFFIX}", flags, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(descriptor)
            with tempfile.TemporaryFile(dir=self.folder) as temporary:
                return os.dup(temporary.fileno())
        return descriptor

    def _create_in_memory(self, identity: str, disk_error: OSError) -> int:
        write_error = _build_write_error(self.folder, disk_error)
        try:
            descriptor = os.memfd_create(identity)
        except OSError:
            raise write_error from disk_error
        with self._lock:
            is_first_file, self._is_in_memory = not self._is_in_memory, True
            self.max_bytes = min(self.max_bytes, _MAX_MEMORY_BYTES)
        if is_first_file:
            _LOG.warning("%s; up to %.0f MB are cached in memory instead", write_error, self.max_bytes / 1e6)
        return descriptor


def evict_unused_files(folder: Path, max_bytes: int) -> None:
    """Delete sparse files that no process has open, until all files below a folder take at most
    `max_bytes`. Files without blocks are deleted too.

    Folders are kept, because another process may be about to create a file in them.
    """
    with suppress(OSError):
        paths_with_stats = [(path, path.lstat()) for path in folder.rglob(f"*{_RANGES_SUFFIX}")]
        files = [(stat.st_mtime, 512 * stat.st_blocks, path) for path, stat in paths_with_stats]
        total_bytes = sum(size for _, size, _ in files)
        for _, size, path in sorted(files):
            if size and total_bytes <= max_bytes:
                continue
            # An error means that a process uses or has deleted the file, or another user owns it.
            # Without O_NONBLOCK, opening a named pipe would wait for its writer.
            with suppress(OSError), os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK)) as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                path.unlink()
                total_bytes -= size


@dataclass(frozen=True, slots=True)
class StoredDigests:
    """The location of a file's digests in another file."""

    file: "CachedFile"
    n_preceding: int  # number of digests in `file` before that of the first block


@dataclass(frozen=True, slots=True)
class _Fetch:
    """The pending requests for blocks of a file; each request reads a run of adjacent blocks."""

    file: "CachedFile"
    runs: list[Numbers]
    requests: deque["Future[bytes]"]  # one for each run that is not stored yet, in the same order


class CachedFile:
    """A remote file whose verified blocks are cached in a sparse local file at `path`."""

    def __init__(
        self,
        cache: RangeCache,
        name: str,
        descriptor: int,
        layout: BlockLayout,
        digests: "bytes | StoredDigests",
        read: Callable[[int, int], bytes],
    ) -> None:
        """Use an open sparse file; callers use `RangeCache.open` instead."""
        self.cache, self.name, self.layout, self.size = cache, name, layout, layout.size
        self.path = Path(f"/proc/self/fd/{descriptor}")  # stays valid even if the file is deleted
        self._descriptor, self._digests, self._read = descriptor, digests, read
        # (count,) whether the block is on the disk, and this process has verified it
        self._is_verified = np.zeros(layout.count, bool)
        # (count,) whether the block is on the disk, perhaps written by an earlier process
        self._is_stored = np.zeros(layout.count, bool)
        # (count,) value of the cache's clock when the block was last used
        self._last_used = np.zeros(layout.count, np.int64)
        for start, end in _iter_extents(descriptor, layout.size):
            self._is_stored[layout.locate_range(start, end)] = True

    def list_stored(self) -> Numbers:
        """Return the block numbers of the blocks on the disk."""
        return np.flatnonzero(self._is_stored)

    def load(self, starts: npt.ArrayLike, ends: npt.ArrayLike) -> None:
        """Load the ranges [start, end), (m,) each, in one round; see `RangeCache.load`.

        Call it inside `RangeCache.hold`, which keeps the blocks until the search ends.
        """
        self.cache.load([(self, np.asarray(starts, np.int64), np.asarray(ends, np.int64))])

    def count_missing_bytes(self, start: int, end: int) -> int:
        """Return how many bytes have to be fetched or verified to load the range [start, end)."""
        blocks = self.layout.locate_range(start, end)
        missing_blocks = blocks.start + np.flatnonzero(~self._is_verified[blocks])
        return int((self.layout.get_starts(missing_blocks + 1) - self.layout.get_starts(missing_blocks)).sum())

    def pin(self, *ranges: tuple[int, int]) -> None:
        """Load ranges that are never removed from the cache."""
        starts, ends = np.array(ranges, np.int64).reshape(-1, 2).T
        with self.cache.hold():
            self.cache.load([(self, starts, ends)], is_patient=True)
            with self.cache._lock:
                self._last_used[self.layout.locate_ranges(starts, ends)] = np.iinfo(np.int64).max

    def read(self, start: int, end: int) -> bytes:
        """Return the verified bytes [start, end), or those up to the end of the file."""
        end = min(end, self.size)
        if start >= end:
            return b""
        blocks = self.layout.locate_range(start, end)
        with self.cache._lock:  # the lock keeps blocks from being removed before they are read
            if self._is_verified[blocks].all():
                np.maximum(self._last_used[blocks], self.cache._clock, out=self._last_used[blocks])
                return os.pread(self._descriptor, end - start, start)
        with self.cache.hold():
            self.load([start], [end])
            return os.pread(self._descriptor, end - start, start)

    def read_loaded(self, start: int, end: int) -> bytes:
        """Return bytes that `RangeCache.load` has loaded; call it inside the same
        `RangeCache.hold`.
        """
        return os.pread(self._descriptor, end - start, start)

    def copy_loaded(self, starts: Numbers, length: int) -> Bytes:
        """Return `length` bytes from each of `starts` on, (m, length); see `read_loaded`."""
        byte_windows = np.ndarray((self.size - length + 1,), f"V{length}", self._mapping, 0, (1,))
        return byte_windows[starts].view(np.uint8).reshape(len(starts), length)

    @cached_property
    def _mapping(self) -> mmap.mmap:
        # The file is opened again: `mmap` copies its descriptor, and a copy would keep the lock.
        with self.path.open("rb") as file:
            return mmap.mmap(file.fileno(), self.size, access=mmap.ACCESS_READ)

    def open(self) -> BinaryIO:
        """Open the file for reads at any offset; blocks are loaded when they are read."""
        # A buffer would read ahead.
        return cast(BinaryIO, RangeFile(self.name, self.size, self.read))

    def _mark_used(self, starts: Numbers, ends: Numbers, clock: int) -> Numbers:
        """Record that a search uses ranges; return the numbers of their unverified blocks."""
        if len(starts) == 1 and starts[0] < ends[0] <= self.size:  # slices are faster than arrays
            block_range = self.layout.locate_range(int(starts[0]), int(ends[0]))
            np.maximum(self._last_used[block_range], clock, out=self._last_used[block_range])
            unverified_blocks: Numbers = block_range.start + np.flatnonzero(~self._is_verified[block_range])
            return unverified_blocks
        blocks = self.layout.locate_ranges(starts, np.minimum(ends, self.size))
        self._last_used[blocks] = np.maximum(self._last_used[blocks], clock)
        return blocks[~self._is_verified[blocks]]

    def _locate_digests(self, blocks: Numbers) -> "tuple[CachedFile, Numbers, Numbers] | None":
        """Return the file and ranges that contain blocks' digests; None for digests in memory."""
        if isinstance(self._digests, bytes):
            return None
        starts = DIGEST_BYTES * (self._digests.n_preceding + blocks)
        return self._digests.file, starts, starts + DIGEST_BYTES

    def _read_digests(self, first_block: int, n_blocks: int) -> bytes:
        """Return the digests of `n_blocks` adjacent blocks.

        If the digests are in another file, its blocks with these digests must have been loaded.
        """
        if isinstance(self._digests, bytes):
            return self._digests[DIGEST_BYTES * first_block : DIGEST_BYTES * (first_block + n_blocks)]
        descriptor = self._digests.file._descriptor
        return os.pread(descriptor, DIGEST_BYTES * n_blocks, DIGEST_BYTES * (self._digests.n_preceding + first_block))

    def _verify_stored(self, blocks: Numbers) -> Numbers:
        """Verify stored blocks of an earlier process; return the blocks that must be fetched."""
        stored_blocks = blocks[self._is_stored[blocks]]
        if not len(stored_blocks):
            return blocks
        if (digest_location := self._locate_digests(stored_blocks)) is not None:
            self.cache.load([digest_location])
        is_sound = np.array([self._matches_digest(block, self._read_stored(block)) for block in stored_blocks.tolist()])
        self._is_verified[stored_blocks[is_sound]] = True
        return np.setdiff1d(blocks, stored_blocks[is_sound], assume_unique=True)

    def _read_stored(self, block: int) -> bytes:
        start_byte, end_byte = self._get_bounds(block, block + 1)
        return os.pread(self._descriptor, end_byte - start_byte, start_byte)

    def _matches_digest(self, block: int, block_data: bytes) -> bool:
        """Return whether bytes have the digest of a block."""
        return digest_ranges(block_data, [0, len(block_data)]) == self._read_digests(block, 1)

    def _get_bounds(self, first_block: int, end_block: int) -> list[int]:
        """Return the boundaries of adjacent blocks [first_block, end_block)."""
        bounds: list[int] = self.layout.get_starts(np.arange(first_block, end_block + 1)).tolist()
        return bounds

    def _read_remote(self, first_block: int, end_block: int) -> bytes:
        bounds = self._get_bounds(first_block, end_block)
        try:
            return self._read(bounds[0], bounds[-1])
        except StoreError as error:
            raise StoreError(f"cannot read bytes {bounds[0]:,} to {bounds[-1]:,} of {self.name}: {error}") from error

    def _store_runs(self, runs: Sequence[tuple[Numbers, bytes]]) -> None:
        """Verify and store fetched runs of blocks."""
        for run, data in runs:
            sound_data = self._verify(run, data)
            self.cache._reserve(self, run)
            self._write(sound_data, int(self.layout.get_starts(run[0])))
            self._is_verified[run] = True

    def _verify(self, run: Numbers, run_data: bytes) -> bytes:
        """Return the bytes of a run; a block that does not match its digest is read once more.

        Raises:
            StoreError: the block does not match its digest after the second read either.
        """
        bounds = self._get_bounds(int(run[0]), int(run[-1]) + 1)
        digests = digest_ranges(run_data, [bound - bounds[0] for bound in bounds])
        if digests == self._read_digests(int(run[0]), len(run)):
            return run_data
        sound_blocks = []
        for block, (start, end) in zip(run.tolist(), pairwise(bounds), strict=True):
            block_data = run_data[start - bounds[0] : end - bounds[0]]
            if not self._matches_digest(block, block_data):
                problem = f"bytes {start:,} to {end:,} of {self.name} do not match their digest"
                _LOG.warning("%s and are read again", problem)
                block_data = self._read_remote(block, block + 1)
                if not self._matches_digest(block, block_data):
                    raise StoreError(
                        f"{problem}, although they were read twice: run `verify`, and restore the file from a copy"
                    )
            sound_blocks.append(block_data)
        return b"".join(sound_blocks)

    def _write(self, data: bytes, start: int) -> None:
        try:
            self._write_all(data, start)
        except OSError as error:
            if not self.cache._free_disk():
                raise _build_write_error(self.cache.folder, error) from error
            try:
                self._write_all(data, start)
            except OSError as second_error:
                raise _build_write_error(self.cache.folder, second_error) from second_error

    def _write_all(self, data: bytes, start: int) -> None:
        view = memoryview(data)
        while view:  # a full disk may accept only a part
            n_written = os.pwrite(self._descriptor, view, start)
            view, start = view[n_written:], start + n_written

    def _list_evictable(self, clock_limit: int) -> tuple[Numbers, Numbers]:
        """Return the stored blocks that were last used before `clock_limit`, and when each was
        last used, by the cache's clock.
        """
        blocks = np.flatnonzero(self._is_stored & (self._last_used < clock_limit))
        return blocks, self._last_used[blocks]

    def _free_block(self, block: int) -> bool:
        """Remove a block: free those of its disk pages that no other stored block uses.

        Return False if the file system cannot free a part of a file.
        """
        self._is_verified[block] = False
        start, end = self._get_bounds(block, block + 1)
        first_page, end_page = start - start % _DISK_PAGE_BYTES, -(-end // _DISK_PAGE_BYTES) * _DISK_PAGE_BYTES
        if not self._is_stored[self.layout.locate_range(first_page, start)].any():
            start = first_page
        if not self._is_stored[self.layout.locate_range(end, end_page)].any():
            end = end_page
        if not _punch_hole(self._descriptor, start, end - start):
            return False
        self._is_stored[block] = False
        return True


def _build_write_error(folder: Path, error: OSError) -> ResourceError:
    return ResourceError(
        f"cannot write the cache of ranges in {folder} ({error.strerror or error}): free some "
        "space, or set BOOKWHEEL_CACHE to a folder of another disk"
    )


def _iter_extents(descriptor: int, file_size: int) -> Iterator[tuple[int, int]]:
    """Yield the ranges of a sparse file that hold data."""
    hole_start = 0
    while hole_start < file_size:
        try:
            data_start = os.lseek(descriptor, hole_start, os.SEEK_DATA)
        except OSError:  # no data follows
            return
        hole_start = os.lseek(descriptor, data_start, os.SEEK_HOLE)
        yield data_start, hole_start


def _punch_hole(descriptor: int, start_byte: int, n_bytes: int) -> bool:
    """Free a range of a file, which then reads as zeros; return False if the file system cannot."""
    libc = ctypes.CDLL(None, use_errno=True)
    if not hasattr(libc, "fallocate"):
        return False
    offset, length = ctypes.c_int64(start_byte), ctypes.c_int64(n_bytes)
    return bool(libc.fallocate(descriptor, _KEEP_SIZE | _PUNCH_HOLE, offset, length) == 0)
