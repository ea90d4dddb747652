"""The cache of remote blobs: verified copies on this machine's disk, of bounded size, least recently used out first.

`BOOKWHEEL_CACHE` is its folder (default `~/.cache/bookwheel/blobs`), `BOOKWHEEL_CACHE_BYTES` its greatest size
(default: half of its disk). A copy that was used within the last hour is never removed, since a process may be
about to open it. A process that has opened a copy can read it after it was removed.
"""

import os
import re
import shutil
import threading
import time
from contextlib import suppress
from pathlib import Path

from rag_model.errors import UsageError
from rag_model.store.pulling.stamps import Stamps, stamps_in

_COPY = re.compile(r"[0-9a-f]{64}")
_IN_USE = 3600  # seconds
_NOTED = 60  # seconds between two records of a use
_SPARE = 64  # of a full cache a 64th of the bound is emptied at once
_SHARES = 16  # a process that has added a 16th of that lists the copies again
_ROOM = threading.Lock()
_left: dict[tuple[Path, int], int] = {}  # by folder and bound: bytes that this process may add before it lists copies


def cache_folder() -> Path:
    """Return where copies of remote blobs are kept."""
    named = os.environ.get("BOOKWHEEL_CACHE")
    return Path(named).expanduser() if named else Path.home() / ".cache" / "bookwheel" / "blobs"


def cache_stamps() -> Stamps:
    """Return the stamps of the cache's copies, and of the blobs of stores on this machine's disk."""
    return stamps_in(cache_folder() / "stamps")


def used(copy: Path) -> None:
    """Set a copy's access time to about now, since most systems update that only roughly."""
    with suppress(OSError):
        if time.time() - copy.stat().st_atime > _NOTED:
            os.utime(copy, ns=(time.time_ns(), copy.stat().st_mtime_ns))


def make_room(size: int) -> None:
    """Remove the least recently used copies if `size` more bytes do not fit within the bound.

    Copies are listed now and then: to list all of them for each new one would take time with the square of their
    number. So where more than `_SHARES` processes add copies at once, the bound may be exceeded by some per cent.

    Raises:
        UsageError: `BOOKWHEEL_CACHE_BYTES` is not a number.
    """
    folder = cache_folder()
    most = _most_bytes(folder)
    with _ROOM:
        if size <= _left.get((folder, most), 0):
            _left[folder, most] -= size
            return
        room, spare = most - size - _emptied(folder, most, size), most // _SPARE
        _left[folder, most] = (min(room, spare) if room >= 0 else spare) // _SHARES  # less than 0: all are in use


def _emptied(folder: Path, most: int, size: int) -> int:
    """Remove copies as `make_room` does, and a little more of them, so that there is room for a while; return the
    bytes that are left.
    """
    copies = [(found.st_atime, found.st_size, path) for path in folder.glob("??/*") if (found := _copy(path))]
    held = sum(held for _, held, _ in copies)
    wanted = most - most // _SPARE if held + size > most else most
    for last, held_by, path in sorted(copies):
        if held + size <= wanted or time.time() - last < _IN_USE:
            break
        path.unlink(missing_ok=True)
        held -= held_by
    return held


def _copy(path: Path) -> os.stat_result | None:
    if not _COPY.fullmatch(path.name):
        return None
    with suppress(OSError):
        return path.stat()
    return None


def _most_bytes(folder: Path) -> int:
    named = os.environ.get("BOOKWHEEL_CACHE_BYTES")
    if named is None:
        return shutil.disk_usage(existing(folder)).total // 2
    if not named.isdecimal():
        raise UsageError(f"BOOKWHEEL_CACHE_BYTES is {named!r}: give a number of bytes")
    return int(named)


def existing(folder: Path) -> Path:
    """Return the nearest folder, this one or above it, that exists."""
    return next(place for place in (folder, *folder.parents) if place.exists())
