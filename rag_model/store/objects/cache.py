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
_SHARES = 64  # of the room that is left: as many processes may fill one each
_SPARE = 64  # the part of the bound that is emptied at once
_ROOM = threading.Lock()
_left: dict[
    tuple[Path, int], int
] = {}  # bytes that this process may add before it lists the copies, by folder and bound


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
    """Remove the least recently used copies until `size` more bytes fit within the bound.

    Copies are listed again only once this process has added its share of the room that it saw: to list all of them for
    each new one would take time with the square of their number.

    Raises:
        UsageError: `BOOKWHEEL_CACHE_BYTES` is not a number.
    """
    folder = cache_folder()
    most = _most_bytes(folder)
    with _ROOM:
        if size <= _left.get((folder, most), 0):
            _left[folder, most] -= size
            return
        room = most - size - _emptied(folder, most, size)
        _left[folder, most] = (room if room >= 0 else most // _SPARE) // _SHARES  # less than 0: all copies are in use


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
