"""File operations of a store; no other module of the store calls fsspec.

Paths are relative to the store's URL. Listings never come from a cache. Every error is a
`StoreError` with one sentence that says what to do. `create` is exclusive: of all writers of a
file, in any process on any machine, exactly one succeeds. Refs and the memo use it, so the store
needs no locks. On a local disk, fsspec's `mode="create"` checks and then writes, so two processes
may both succeed; a temporary file and a hard link are used instead.
"""

import asyncio
import errno
import io
import json
import math
import os
import re
import secrets
import shutil
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from copy import copy
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from itertools import islice
from pathlib import Path
from stat import S_ISREG
from typing import Any, BinaryIO, TypeVar, cast
from urllib.parse import urlsplit

import fsspec
from fsspec.implementations.local import LocalFileSystem
from fsspec.implementations.memory import MemoryFileSystem

from rag_model.atomic_write import atomic_write
from rag_model.errors import StoreError, UsageError, format_error
from rag_model.process import INTERRUPTED
from rag_model.ranges import RangeFile
from rag_model.store.objects.buckets import CLOUDS, find_cloud
from rag_model.untrusted_text import parse_json

# Two races, because in the first one the writers also connect, so they do not write simultaneously.
_RACE_WRITERS, _RACES = 8, 2

# Schemes that fsspec interprets as the name of a folder unless `://` follows.
_SCHEMES = {*CLOUDS, "http", "https", "memory"}
_memory_lock = threading.Lock()  # a lock suffices: a memory:// store exists in one process only
Item = TypeVar("Item")
Output = TypeVar("Output")
CHUNKS_AHEAD = 4  # maximum number of chunks of a file that are in memory or being read at a time
# maximum number of concurrent small requests to an object store; they mostly wait for replies
MAX_REQUESTS = 32
_CHUNK_BYTES = 16 << 20  # bytes of a chunk; a transfer holds `CHUNKS_AHEAD` chunks in memory
_MAX_CHUNKS = 10_000  # S3's maximum number of parts; above 160 GB the chunks get larger
# error codes that s3fs does not translate to PermissionError
_TOKEN_REFUSED = {"InvalidToken", "TokenRefreshRequired"}
# fields with the time of the last write, in listings of local disks, S3, Azure, and memory
_TIME_FIELDS = ("mtime", "LastModified", "last_modified", "created")
PROBE_FOLDERS = ("probe", "memo/probe")  # folders of probe files, which exist only for a moment
_NUMBERED_FILE = re.compile(r"(\d{8})\.json")  # file of a ref's move, a takedown or a checkpoint
# Errors for HTTP status 501 and 400, which servers send if, for example, a header is unknown.
_UNSUPPORTED = frozenset({errno.ENOSYS, errno.EINVAL})
# end of an error message that begins with the URL of a store
NO_CONDITIONAL_WRITES = (
    "does not honour conditional writes (If-None-Match), so two publishers could both succeed: use a bucket that does"
)
_MESSAGE_CHARS = 300  # maximum length of a cloud client's error message
_REMOTE_BLOCK_BYTES = 1 << 20  # minimum bytes that a read at an offset requests
_CHECK_SECONDS = 0.2  # interval at which a waiting read checks whether it is interrupted
_LOOKUPS = {"info", "ls"}
_reader_thread = threading.local()  # `is_reader` is set in the threads of `read_ahead`


def create_exclusive(fs: Any, path: str, data: bytes) -> bool:
    """Create `path` with the bytes `data`; return False, and change nothing, if it exists.

    On an object store, False may also mean that an earlier attempt of this request created the
    file. To find out, callers put a nonce into `data`, read the file back and compare.

    Raises:
        OSError: the file could not be created, and not because it exists already.
    """
    if isinstance(fs, LocalFileSystem):
        return _create_local(Path(path), data)
    if isinstance(fs, MemoryFileSystem):
        return _create_in_memory(fs, path, data)
    return _create_by_condition(fs, path, data)


def probe_exclusive_creation(fs: Any, folder: str) -> bool:
    """Probe whether exclusive creation works below `folder`: several writers race for one file.

    A bucket that ignores `If-None-Match` overwrites without an error. A bucket that checks and then
    writes rejects a late writer, but lets simultaneous writers succeed. The probe leaves no file.

    Raises:
        OSError: the probe could not be written or read.
    """
    if isinstance(fs, LocalFileSystem | MemoryFileSystem):
        return True
    return all(_has_one_winner(fs, f"{folder}/probe-{secrets.token_hex(8)}") for _ in range(_RACES))


def _has_one_winner(fs: Any, path: str) -> bool:
    values = [f"{writer} {secrets.token_hex(8)}".encode() for writer in range(_RACE_WRITERS)]
    start_barrier = threading.Barrier(_RACE_WRITERS)

    def write(value: bytes) -> bool:
        start_barrier.wait()
        return create_exclusive(fs, path, value)

    try:
        with ThreadPoolExecutor(_RACE_WRITERS) as pool:
            winning_values = [
                value for value, is_created in zip(values, pool.map(write, values), strict=True) if is_created
            ]
        stored_bytes = fs.cat_file(path)
        late_writer_won = create_exclusive(fs, path, b"late") or fs.cat_file(path) != stored_bytes
    except OSError as error:
        if error.errno in _UNSUPPORTED:
            return False
        raise
    else:
        # Without a winner, an earlier attempt of a retried request created the file.
        return not late_writer_won and winning_values in ([stored_bytes], [])
    finally:
        if fs.exists(path):
            fs.rm_file(path)


def _create_local(path: Path, file_bytes: bytes) -> bool:
    try:
        with atomic_write(path, exclusive=True) as temporary:
            temporary.write_bytes(file_bytes)
    except FileExistsError:
        if os.path.lexists(path.parent) and not path.parent.is_dir():  # the parent is a file
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(path.parent)) from None
        return False
    return True


def _create_in_memory(fs: MemoryFileSystem, path: str, file_bytes: bytes) -> bool:
    with _memory_lock:
        if fs.exists(path):
            return False
        fs.pipe_file(path, file_bytes)
        return True


def _create_by_condition(fs: Any, path: str, file_bytes: bytes) -> bool:
    """Create a file by a request with `If-None-Match: *`; return False if the file exists."""
    try:
        fs.pipe_file(path, file_bytes, mode="create")
    except FileExistsError:
        return False
    except OSError:
        if fs.exists(path):
            return False
        raise
    return True


def read_ahead(read: Callable[[Item], Output], items: Sequence[Item], n_ahead: int = CHUNKS_AHEAD) -> Iterator[Output]:
    """Yield `read(item)` for each item, in order; threads read up to `n_ahead` items in advance."""
    if min(len(items), n_ahead) < 2:
        yield from map(read, items)  # without a thread
        return
    with ThreadPoolExecutor(n_ahead, initializer=_mark_reader_thread) as pool:
        futures = deque(pool.submit(read, item) for item in items[:n_ahead])
        remaining_items = iter(items[n_ahead:])
        try:
            while futures:
                yield futures.popleft().result()
                futures.extend(pool.submit(read, item) for item in islice(remaining_items, 1))
        finally:
            pool.shutdown(cancel_futures=True)


def _mark_reader_thread() -> None:
    _reader_thread.is_reader = True


def _check_interrupt() -> None:
    if INTERRUPTED.is_set():
        raise KeyboardInterrupt


def _start_call(fs: Any, method: str, arguments: Sequence[Any], options: Mapping[str, Any]) -> "Future[Any]":
    """Call a method of a file system in the background.

    S3's file system is asynchronous, so a cancelled request closes its connection. The requests of
    other file systems cannot be cancelled: they end at the time limits of their clients.
    """
    if getattr(fs, "async_impl", False):
        return asyncio.run_coroutine_threadsafe(getattr(fs, f"_{method}")(*arguments, **options), fs.loop)
    request: Future[Any] = Future()
    request.set_running_or_notify_cancel()

    def run(request: "Future[Any]") -> None:
        try:
            request.set_result(getattr(fs, method)(*arguments, **options))
        except BaseException as error:
            request.set_exception(error)
        finally:
            # The request contains its error, which refers to this frame. If the frame referred to
            # the request, this cycle would keep them in memory.
            del request

    # The threads of a pool would keep the process from exiting while the store does not answer.
    threading.Thread(target=run, args=(request,), name="read", daemon=True).start()
    return request


@dataclass(frozen=True, slots=True)
class StoredFile:
    """A file in a listing of the store."""

    path: str  # path relative to the store
    size: int  # bytes
    # last write in seconds since 1970, by the clock of the store's server, not of this machine
    modified: float


class Files:
    """The files below one URL: a local path, or the URL of a cloud or of another fsspec
    protocol.
    """

    def __init__(self, url: str) -> None:
        """Connect to `url`; nothing is read or written yet.

        Raises:
            MissingExtraError: the URL needs a package that is not installed.
            StoreError: a service cannot be reached, or its library cannot be imported.
            UsageError: the URL is empty, has a scheme without `//` (fsspec would interpret it as a
                folder), names a cloud but no bucket, or has a protocol that fsspec does not know.
        """
        if not url.strip():
            raise UsageError("the store's URL is empty: give a folder, file:///…, s3://…, gs://… or az://…")
        try:
            urlsplit(url)
        except ValueError as error:
            raise UsageError(f"the store's URL {url} is malformed ({error}): correct it") from error
        if (scheme := url.partition(":")[0]) in _SCHEMES and not url.startswith(f"{scheme}://"):
            raise UsageError(f"the store's URL {url} lacks a slash: give {scheme}://…")
        self._cloud = find_cloud(url)
        if self._cloud and not url.partition("://")[2].partition("/")[0]:
            raise UsageError(f"the store's URL {url} names no bucket: give {url.partition('://')[0]}://BUCKET/FOLDER")
        try:
            fs, root = self._connect(url)
        except (ValueError, ImportError) as error:
            reason = str(error).rstrip(".")
            error_type = UsageError if isinstance(error, ValueError) else StoreError
            raise error_type(
                f"cannot open a store at {url} ({reason}): give a folder, file:///…, s3://…, gs://… or az://…"
            ) from error
        except OSError as error:
            raise StoreError(_describe_error(error, "open", url)) from error
        self._errors: tuple[type[Exception], ...] = (OSError, *getattr(fs, "errors", ()))
        self._fs: Any = fs
        self._root: str = root.rstrip("/")
        self._check: Callable[[], None] | None = None
        self.url: str = fs.unstrip_protocol(self._root)

    def make_interruptible(self, check: Callable[[], None]) -> "Files":
        """Return a copy of this object that calls `check` before and during its requests to a
        remote store: reads, `write` and `remove`.

        An exception from `check` ends the call: a request in progress is cancelled or, if its
        client cannot cancel it, its reply is discarded; a write or a deletion may still take
        effect. After the first exception, `check` must raise at every later call, because the other
        reads of a transfer call it as well.
        """
        files = copy(self)
        files._check = check
        return files

    @property
    def is_local(self) -> bool:
        """Whether the files are on this machine's disk."""
        return isinstance(self._fs, LocalFileSystem)

    @property
    def concurrency(self) -> int:
        """The maximum number of concurrent small requests: one for a local disk, which has no
        latency.
        """
        return 1 if self.is_local else MAX_REQUESTS

    def map_concurrently(self, read: Callable[[Item], Output], items: Sequence[Item]) -> Iterator[Output]:
        """Yield `read(item)` for each item, in order; up to `concurrency` threads read items."""
        return read_ahead(read, items, self.concurrency)

    def local_path(self, path: str) -> Path:
        """Return the local path of `path` (only if `is_local`)."""
        return Path(self._get_full_path(path))

    def url_of(self, path: str) -> str:
        """Return the full URL of `path`."""
        return f"{self.url}/{path}"

    def get_size(self, path: str) -> int | None:
        """Return a file's size in bytes; None if there is no such file."""
        file = self.find(path)
        return None if file is None else file.size

    def find(self, path: str) -> StoredFile | None:
        """Return a file's size and time of last write; None if there is no such file."""
        with self._translate_errors("look for", path):
            try:
                if self.is_local:  # fsspec takes five times as long
                    status = self.local_path(path).stat()
                    return StoredFile(path, status.st_size, status.st_mtime) if S_ISREG(status.st_mode) else None
                info = self._call_remote("info", path)
            except (FileNotFoundError, NotADirectoryError):
                return None
        return StoredFile(path, int(info["size"]), _get_modified_time(info)) if info["type"] == "file" else None

    def iter_tree(self, folder: str = "") -> Iterator[StoredFile]:
        """Yield all files below a folder, including dot-files, from fresh listings.

        All folders of one depth are listed concurrently, then all folders of the next depth. A
        missing folder has no files.
        """
        folders = [folder]
        while folders:
            parents, folders = folders, []
            for parent, folder_entries in zip(parents, self.map_concurrently(self._list_entries, parents), strict=True):
                for entry in folder_entries:
                    path = entry["name"][len(self._root) :].strip("/")
                    if entry["type"] == "file" and not entry["name"].endswith("/"):
                        yield StoredFile(path, int(entry["size"]), _get_modified_time(entry))
                    elif entry["type"] == "directory" and path != parent:
                        folders.append(path)

    def list_names(self, folder: str, *, kind: str = "file") -> list[str]:
        """Return the sorted base names of a folder's files or (`kind="directory"`) folders."""
        folder_entries = (entry for entry in self._list_entries(folder) if entry["type"] == kind)
        base_names = (folder_entry["name"].rpartition("/")[2] for folder_entry in folder_entries)
        # An object store may list the folder itself, by a name that ends in a slash. A dot-file is
        # a temporary file.
        return sorted(name for name in base_names if name and not name.startswith("."))

    def list_numbers(self, folder: str) -> list[int]:
        """Return the numbers in the names of a folder's files, such as 00000001.json, in ascending
        order.
        """
        return sorted(int(match[1]) for match in map(_NUMBERED_FILE.fullmatch, self.list_names(folder)) if match)

    def read(self, path: str) -> bytes | None:
        """Return a small file's bytes; None if there is no such file."""
        with self._translate_errors("read", path):
            try:
                return self._read_bytes(path)
            except (FileNotFoundError, NotADirectoryError):
                return None

    def read_json(self, path: str) -> dict[str, Any] | None:
        """Return the JSON object in a file; None if there is no such file.

        Raises:
            StoreError: the file is not a JSON object.
        """
        file_bytes = self.read(path)
        if file_bytes is None:
            return None
        try:
            json_object = parse_json(file_bytes)
        except ValueError as error:
            raise StoreError(
                f"{self.url_of(path)} is damaged: it is not JSON ({error}); restore it from a copy"
            ) from error
        if not isinstance(json_object, dict):
            raise StoreError(f"{self.url_of(path)} is damaged: it is not a JSON object; restore it from a copy")
        return json_object

    def open(self, path: str, size: int) -> BinaryIO:
        """Open a file of `size` bytes for reads at any offset; a remote file is read by range."""
        if not self.is_local:
            read = partial(self.read_range, path)
            return cast(BinaryIO, io.BufferedReader(RangeFile(self.url_of(path), size, read), _REMOTE_BLOCK_BYTES))
        with self._translate_errors("read", path):
            return self.local_path(path).open("rb")

    def read_range(self, path: str, start: int, end: int) -> bytes:
        """Return the bytes [start, end); fewer if the file is shorter."""
        with self._translate_errors("read", path):
            return self._read_bytes(path, start, end) if end > start else b""

    def iter_chunks(self, path: str, size: int, start: int = 0) -> Iterator[bytes]:
        """Yield the bytes [start, size) in chunks of 16 MiB; three further chunks are
        prefetched.
        """
        chunk_starts = range(start, size, _CHUNK_BYTES)
        if self.is_local or len(chunk_starts) < 2:
            return (self.read_range(path, offset, min(offset + _CHUNK_BYTES, size)) for offset in chunk_starts)
        return read_ahead(lambda offset: self.read_range(path, offset, min(offset + _CHUNK_BYTES, size)), chunk_starts)

    def create(self, path: str, data: bytes) -> bool:
        """Create a file exclusively; return False if another writer was first.

        If a request is retried, its first attempt may have created the file. So after a failure a
        remote file is read back, and equal bytes count as success. Callers put a nonce into `data`,
        so that no other writer's bytes are equal.

        Raises:
            StoreError: the file cannot be written, or the bucket refuses conditional writes.
        """
        with self._translate_errors("write", path):
            try:
                if create_exclusive(self._fs, self._get_full_path(path), data):
                    return True
            except OSError as error:
                if self.is_local or error.errno not in _UNSUPPORTED or not self._accepts_plain_writes(path):
                    raise
                raise StoreError(f"{self.url} {NO_CONDITIONAL_WRITES}") from error
        return not self.is_local and self.read(path) == data

    def write(self, path: str, data: bytes) -> None:
        """Write a small file, replacing an existing one."""
        with self._translate_errors("write", path):
            if self.is_local:
                with atomic_write(self.local_path(path)) as temporary:
                    temporary.write_bytes(data)
            else:
                self._call_remote("pipe_file", path, data)

    def upload(self, source: Path, path: str) -> None:
        """Copy a local file into the store; it appears complete or not at all."""
        with self._translate_errors("write", path):
            if self.is_local:
                with atomic_write(self.local_path(path)) as temporary:
                    shutil.copyfile(source, temporary)
            else:
                self._upload_remote(source, path)

    def link(self, source: Path, path: str) -> None:
        """Store a local file that never changes, as a hard link if possible, or else as a copy."""
        if self.is_local:
            # OSError: the source is on another disk, or the disk has no hard links
            with suppress(OSError), atomic_write(self.local_path(path)) as temporary:
                os.link(source, temporary)
                os.utime(temporary)  # the link has the source's time, but `gc` needs that of now
                return
        self.upload(source, path)

    def delete_folder(self, folder: str) -> None:
        """Delete a folder with its contents, if it exists."""
        with self._translate_errors("delete", folder):
            try:
                self._fs.rm(self._get_full_path(folder), recursive=True)
            except FileNotFoundError:
                return

    def remove(self, path: str) -> None:
        """Delete one file, if it exists."""
        with self._translate_errors("delete", path), suppress(FileNotFoundError):
            self._call_remote("rm_file", path)

    def supports_exclusive_creation(self) -> bool:
        """Probe whether exclusive creation works; otherwise two publishers could both succeed.

        A gateway may treat prefixes differently, so the memo's prefix is probed as well.
        """
        with self._translate_errors("write", "probe"):
            return all(probe_exclusive_creation(self._fs, self._get_full_path(folder)) for folder in PROBE_FOLDERS)

    def _accepts_plain_writes(self, path: str) -> bool:
        """Return whether the store accepts an unconditional write; the probe file is deleted."""
        probe_path = self._get_full_path(f"{path}.probe-{secrets.token_hex(8)}")
        try:
            self._fs.pipe_file(probe_path, b"probe")
            self._fs.rm_file(probe_path)
        except OSError:
            return False
        return True

    def _connect(self, url: str) -> tuple[Any, str]:
        if self._cloud is None:
            fs, root = fsspec.url_to_fs(url, use_listings_cache=False)
            return fs, str(root)
        fs = self._cloud.connect()
        return fs, str(fs._strip_protocol(url))

    def _list_entries(self, folder: str) -> list[dict[str, Any]]:
        with self._translate_errors("list", folder):
            try:
                return list(self._call_remote("ls", folder, detail=True, refresh=True))
            except (FileNotFoundError, NotADirectoryError):
                return []

    def _read_bytes(self, path: str, start: int = 0, end: int | None = None) -> bytes:
        if not self.is_local:
            return bytes(self._call_remote("cat_file", path, start=start or None, end=end))
        with self.local_path(path).open("rb") as file:
            file.seek(start)
            return file.read(-1 if end is None else end - start)

    def _call_remote(self, method: str, path: str, *arguments: Any, **options: Any) -> Any:
        """Call a method of the file system, interruptibly; see `make_interruptible`.

        Ctrl-C interrupts only the main thread, so reads of other threads look for it, and so do
        listings and look-ups of `read_ahead`'s threads. Writes and deletions do not, because they
        may release a lease or finish an upload.
        """
        arguments = self._get_full_path(path), *arguments
        check = self._check
        if check is None and (
            getattr(_reader_thread, "is_reader", False)
            if method in _LOOKUPS
            else method == "cat_file" and threading.current_thread() is not threading.main_thread()
        ):
            check = _check_interrupt
        if check is None or self.is_local:
            return getattr(self._fs, method)(*arguments, **options)
        check()
        request = _start_call(self._fs, method, arguments, options)
        try:
            while not wait([request], _CHECK_SECONDS).done:
                check()
            return request.result()
        finally:
            request.cancel()  # has no effect on a request that has ended
            # The request contains its error, which refers to this frame and those of the callers.
            # If this frame referred to the request, the cycle would keep all objects that they use,
            # such as a replaced snapshot, in memory.
            del request

    def _upload_remote(self, source: Path, path: str) -> None:
        """Upload a file, in parts if it is large; with the default limits of s3fs, an upload would
        take 500 MB of memory.
        """
        file_bytes = source.stat().st_size
        transfer_limits = {
            "chunksize": max(_CHUNK_BYTES, -(-file_bytes // _MAX_CHUNKS)),
            "max_concurrency": CHUNKS_AHEAD,
        }
        try:
            self._fs.put_file(str(source), self._get_full_path(path), **(transfer_limits if self._cloud else {}))
        except FileNotFoundError:
            # Perhaps the upload succeeded, its response was lost, and the request was sent again.
            if self.get_size(path) != file_bytes:
                raise

    def _get_full_path(self, path: str) -> str:
        return f"{self._root}/{path}" if path else self._root

    @contextmanager
    def _translate_errors(self, action: str, path: str) -> Iterator[None]:
        try:
            yield
        except self._errors as error:
            raise StoreError(_describe_error(error, action, self.url_of(path))) from error


def encode_json(value: Any) -> bytes:
    """Encode a JSON value for human readers: indented, keys in the given order, a newline at the
    end.
    """
    return (json.dumps(value, indent=1, ensure_ascii=False, allow_nan=False) + "\n").encode()


def _get_modified_time(info: Mapping[str, Any]) -> float:
    """Return the time of a listed file's last write; infinity (a new file) if it is unknown."""
    modified_time = next((info[name] for name in _TIME_FIELDS if info.get(name) is not None), math.inf)
    return modified_time.timestamp() if isinstance(modified_time, datetime) else float(modified_time)


def _get_s3_error_code(error: Exception) -> str | None:
    response = getattr(error.__cause__, "response", None)
    return response.get("Error", {}).get("Code") if isinstance(response, dict) else None


def _describe_error(error: Exception, action: str, url: str) -> str:
    error_number = getattr(error, "errno", None)
    if error_number in {errno.ENOSPC, errno.EDQUOT}:
        return f"the disk is full: cannot {action} {url}; free some space and run it again"
    if type(error).__name__ in {"NoCredentialsError", "PartialCredentialsError"}:
        return f"cannot {action} {url}: {error}; set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE"
    if isinstance(error, PermissionError) or error_number == errno.EROFS or _get_s3_error_code(error) in _TOKEN_REFUSED:
        return f"not allowed to {action} {url} ({error}); check the permissions or credentials"
    if action == "write" and url.startswith("s3://") and error_number in _UNSUPPORTED:
        return (
            f"cannot write {url}: {str(error).rstrip('.')}; if the server does not support the "
            "checksums that S3 "
            "clients send by default, set AWS_REQUEST_CHECKSUM_CALCULATION=when_required"
        )
    if isinstance(error, FileNotFoundError):
        return f"cannot {action} {url}: the file, its folder or its bucket does not exist"
    advice = "" if find_cloud(url) is None else "; check the network, the endpoint and the credentials"
    return f"cannot {action} {url}: {format_error(error)[:_MESSAGE_CHARS].rstrip('.')}{advice}"
