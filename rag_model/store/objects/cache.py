"""The cache of remote blobs: verified copies on this machine's disk, bounded, the longest unused leaving first.

`BOOKWHEEL_CACHE` says where it lies (else `~/.cache/bookwheel/blobs`), `BOOKWHEEL_CACHE_BYTES` how much it may
hold (else half of its disk). What was used within the last hour stays whatever the bound, since somebody
may be about to open it; whoever has opened a copy keeps reading it after it left.
"""

import os
import re
import shutil
import time
from contextlib import suppress
from pathlib import Path

from rag_model.errors import UsageError
from rag_model.store.pulling.stamps import Stamps, stamps_in

_COPY = re.compile(r"[0-9a-f]{64}")
_IN_USE = 3600  # seconds


def cache_folder() -> Path:
    """Return where copies of remote blobs are kept."""
    named = os.environ.get("BOOKWHEEL_CACHE")
    return Path(named).expanduser() if named else Path.home() / ".cache" / "bookwheel" / "blobs"


def cache_stamps() -> Stamps:
    """Return the stamps of the cache's copies, and of the blobs of stores on this machine's disk."""
    return stamps_in(cache_folder() / "stamps")


def used(copy: Path) -> None:
    """Note that a copy was used now, by its time of access, which most systems keep only roughly."""
    with suppress(OSError):
        os.utime(copy, ns=(time.time_ns(), copy.stat().st_mtime_ns))


def make_room(size: int) -> None:
    """Remove the copies that were unused for longest until `size` more bytes fit within the bound.

    Raises:
        UsageError: `BOOKWHEEL_CACHE_BYTES` is no number.
    """
    folder = cache_folder()
    most = _most_bytes(folder)
    copies = [(found.st_atime, found.st_size, path) for path in folder.glob("??/*") if (found := _copy(path))]
    held = sum(held for _, held, _ in copies)
    for last, held_by, path in sorted(copies):
        if held + size <= most or time.time() - last < _IN_USE:
            return
        path.unlink(missing_ok=True)
        held -= held_by


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
