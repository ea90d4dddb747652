"""The cache of remote blobs on this machine's disk, and stamps of verified local files.

The cache holds verified copies; the least recently used are removed first. `BOOKWHEEL_CACHE` is its
folder (default `~/.cache/bookwheel/blobs`), `BOOKWHEEL_CACHE_BYTES` its maximum size (default: half
of its disk). A copy that was used within the last hour is never removed, because a process may be
about to open it. A process that has opened a copy can still read it after its removal.

A stamp records that a file was verified, so that a large file is hashed once and not at every
opening. It contains three values that the file (the inode) had when its bytes were right: its size,
the time of its last write (mtime), which a program may set to any value, and the time of its last
change of any kind (ctime), which only the kernel sets. So a file that was written later is hashed
again before it is read, even if its mtime was restored. A new link or a new owner changes ctime
too, but `Stamps.preserve` keeps the stamp valid. Bit errors of the disk do not change these times,
so `verify` and `pull` hash every file, even with a stamp.
"""

import fcntl
import os
import re
import secrets
import shutil
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path

from rag_model.digest import digest_file, digest_json
from rag_model.errors import StoreError, UsageError

# resolution of the file system's timestamps; two writes within this time may get the same time
_TICK_SECONDS = 0.01
PARTIAL_SUFFIX = ".partial"
# a copy, or the partial file of a fetch
_COPY_NAME = re.compile(rf"[0-9a-f]{{64}}|\.[0-9a-f]{{64}}{re.escape(PARTIAL_SUFFIX)}")
_IN_USE_SECONDS = 3600  # a copy counts as in use for this time after its last use
_TOUCH_SECONDS = 60  # minimum interval between two updates of an access time
_HEADROOM_SHARES = 64  # an eviction frees headroom: an additional 64th of the maximum size
_RELIST_SHARES = 16  # a process lists the copies again after it has added a 16th of the headroom
_ALLOWANCE_LOCK = threading.Lock()
# (folder, maximum size) -> bytes that may be added before the copies are listed again.
_allowance: dict[tuple[Path, int], int] = {}


class Stamps:
    """The stamps of verified files: small files in one folder, or in memory if the folder is
    read-only.
    """

    def __init__(self, folder: Path) -> None:
        """Keep stamps in `folder`, which is created when needed; call `open_stamps` to share one
        object.
        """
        self.folder = folder
        self._content_by_name: dict[str, str] = {}  # stamps that this process has read or written

    def is_sound(self, path: Path, identity: str) -> bool:
        """Return whether a file has this digest; without a valid stamp, hash and stamp the file."""
        if self.has_valid_stamp(path, identity):
            return True
        # The stamp is computed before the file is read, so that a concurrent write invalidates it.
        stamp_name, file_state = _wait_and_stamp(path, identity)
        if digest_file(path) != identity:
            return False
        self._write_stamp(stamp_name, file_state)
        return True

    def has_valid_stamp(self, path: Path, identity: str) -> bool:
        """Return whether `record` was called for this file after its last write."""
        stamp_name, file_state = _compute_stamp(path, identity)
        return self._read_stamp(stamp_name) == file_state

    def record(self, path: Path, identity: str) -> None:
        """Record that a file has the digest `identity`, which the caller has verified."""
        self._write_stamp(*_wait_and_stamp(path, identity))

    @contextmanager
    def preserve(self, path: Path, identity: str) -> Iterator[None]:
        """Keep a stamp valid while the block links or unlinks the file, or sets its access time.

        If the file has no valid stamp, or is written to in the block, it gets no stamp.
        """
        had_stamp, status_before = self.has_valid_stamp(path, identity), path.stat()
        yield
        status_after = path.stat()
        is_same_size = status_before.st_size == status_after.st_size
        if had_stamp and is_same_size and status_before.st_mtime_ns == status_after.st_mtime_ns:
            self.record(path, identity)

    def _read_stamp(self, name: str) -> str | None:
        if name not in self._content_by_name:
            with suppress(OSError, UnicodeDecodeError):
                self._content_by_name[name] = (self.folder / name).read_text()
        return self._content_by_name.get(name)

    def _write_stamp(self, name: str, state: str) -> None:
        self._content_by_name[name] = state
        temporary_path = self.folder / f".{secrets.token_hex(8)}"
        with suppress(OSError):  # without a stamp the file is hashed again, which only costs time
            self.folder.mkdir(parents=True, exist_ok=True)
            temporary_path.write_text(state)
            temporary_path.replace(self.folder / name)


@cache
def open_stamps(folder: Path) -> Stamps:
    """Return the stamps of a folder, one object per folder in this process."""
    return Stamps(folder)


def _wait_and_stamp(path: Path, identity: str) -> tuple[str, str]:
    """Wait until a later write to the file would get another timestamp, then return its stamp."""
    file_stat = path.stat()
    time.sleep(max(0.0, max(file_stat.st_mtime, file_stat.st_ctime) + _TICK_SECONDS - time.time()) % _TICK_SECONDS)
    return _compute_stamp(path, identity)


def _compute_stamp(path: Path, identity: str) -> tuple[str, str]:
    """Return the name (digest and inode) and the content (size and times) of a file's stamp."""
    file_stat = path.stat()
    return (
        f"{identity.rpartition(':')[2]}-{file_stat.st_ino}",
        f"{file_stat.st_size} {file_stat.st_mtime_ns} {file_stat.st_ctime_ns}",
    )


def get_cache_folder() -> Path:
    """Return the folder of the cache."""
    folder = os.environ.get("BOOKWHEEL_CACHE")
    return Path(folder).expanduser() if folder else Path.home() / ".cache" / "bookwheel" / "blobs"


def open_cache_stamps() -> Stamps:
    """Return the stamps of the cached copies, and of the blobs of local stores."""
    return open_stamps(get_cache_folder() / "stamps")


def touch(copy: Path) -> None:
    """Set a copy's access time to now, because most systems update it only rarely."""
    with suppress(OSError):
        if time.time() - copy.stat().st_atime > _TOUCH_SECONDS:
            os.utime(copy, ns=(time.time_ns(), copy.stat().st_mtime_ns))


def make_room_for(new_bytes: int) -> None:
    """Remove the least recently used copies if `new_bytes` more bytes exceed the maximum size.

    The copies are not listed for each new copy, since that would take quadratic time. So if more
    than `_RELIST_SHARES` processes add copies at once, the cache may exceed the maximum slightly.

    Raises:
        UsageError: `BOOKWHEEL_CACHE_BYTES` is not a number.
    """
    folder = get_cache_folder()
    max_bytes = get_cache_limit(folder)
    with _ALLOWANCE_LOCK:
        if new_bytes <= _allowance.get((folder, max_bytes), 0):
            _allowance[folder, max_bytes] -= new_bytes
            return
        headroom_bytes = max_bytes // _HEADROOM_SHARES
        free_bytes = max_bytes - new_bytes - _evict_oldest_copies(folder, max_bytes, new_bytes)
        if free_bytes < 0:  # all copies are in use
            free_bytes = headroom_bytes
        _allowance[folder, max_bytes] = min(free_bytes, headroom_bytes) // _RELIST_SHARES


def _evict_oldest_copies(folder: Path, max_bytes: int, new_bytes: int) -> int:
    """Remove copies until `new_bytes` more bytes and some headroom fit; return the bytes of the
    remaining copies.
    """
    cached_copies = [
        (stat.st_mtime if path.suffix == PARTIAL_SUFFIX else stat.st_atime, stat.st_size, path)
        for path in folder.glob("??/*")
        if (stat := _stat_copy(path))
    ]
    cached_bytes = sum(copy_bytes for _, copy_bytes, _ in cached_copies)
    target_bytes = max_bytes - max_bytes // _HEADROOM_SHARES if cached_bytes + new_bytes > max_bytes else max_bytes
    for last_access, copy_bytes, path in sorted(cached_copies):
        if cached_bytes + new_bytes <= target_bytes or time.time() - last_access < _IN_USE_SECONDS:
            break
        if path.suffix != PARTIAL_SUFFIX:
            path.unlink(missing_ok=True)
        elif not delete_partial(path):
            continue
        cached_bytes -= copy_bytes
    return cached_bytes


def get_partial_path(copy: Path) -> Path:
    """Return the path of the partial file of a copy that is being fetched."""
    return copy.with_name(f".{copy.name}{PARTIAL_SUFFIX}")


def delete_partial(partial_path: Path) -> bool:
    """Delete a partial file unless a fetch has locked it; return whether it is gone."""
    try:
        with partial_path.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            partial_path.unlink(missing_ok=True)
    except FileNotFoundError:
        return True
    except OSError:  # locked, or it cannot be deleted
        return False
    return True


def _stat_copy(path: Path) -> os.stat_result | None:
    if not _COPY_NAME.fullmatch(path.name):
        return None
    with suppress(OSError):
        return path.stat()
    return None


def get_cache_limit(folder: Path) -> int:
    """Return the maximum size of the cache in a folder.

    Raises:
        UsageError: `BOOKWHEEL_CACHE_BYTES` is not a number.
    """
    limit_setting = os.environ.get("BOOKWHEEL_CACHE_BYTES")
    if limit_setting is None:
        return shutil.disk_usage(find_existing_ancestor(folder)).total // 2
    if not limit_setting.isdecimal():
        raise UsageError(f"BOOKWHEEL_CACHE_BYTES is {limit_setting!r}: give a number of bytes")
    return int(limit_setting)


def find_existing_ancestor(folder: Path) -> Path:
    """Return `folder` if it exists, else its nearest parent that exists."""
    return next(path for path in (folder, *folder.parents) if path.exists())


def build_link_tree(targets: Mapping[str, Path]) -> Path:
    """Return a folder in the cache with a symbolic link to each target under its relative path.

    Equal targets have the same folder, which is created once.

    Raises:
        StoreError: the cache folder cannot be written.
    """
    identity = digest_json({name: str(target) for name, target in targets.items()}).partition(":")[2]
    folder = get_cache_folder() / "trees" / identity
    if folder.is_dir():  # the targets exist, because the caller has just fetched them
        return folder
    temporary_folder = folder.with_name(f".{secrets.token_hex(8)}")
    try:
        for name, target in targets.items():
            link_path = temporary_folder / name
            link_path.parent.mkdir(parents=True, exist_ok=True)
            link_path.symlink_to(target)
        temporary_folder.rename(folder)  # atomic: the folder is complete or absent
    except OSError as error:
        shutil.rmtree(temporary_folder, ignore_errors=True)
        if not folder.is_dir():  # if the folder exists, another process has created it
            raise StoreError(
                f"cannot write the cache folder {folder.parent} ({error.strerror}): "
                "set BOOKWHEEL_CACHE to another folder"
            ) from error
    return folder
