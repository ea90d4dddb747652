"""The memory that is free, and index files that are read into it before they are searched."""

from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

_GROUP = Path("/sys/fs/cgroup")  # what a container may use, version 2
_READ = 1 << 20  # bytes at once


def page_in(files: Iterable[Path], beside: int = 0) -> None:
    """Read files that will be searched where they are mapped: a search would read them from a disk page by page.

    What is in the page cache already is not read from the disk again. Files are read in their order as long as they fit
    into free memory, `beside` bytes of other mapped files: what is read beyond that would push out what is in use.
    """
    left = (free_bytes() or 0) - beside  # the page cache counts as free
    for file in files:
        left -= file.stat().st_size
        if left < 0:
            return
        with file.open("rb", buffering=0) as opened:
            while opened.read(_READ):
                pass


def free_bytes() -> int | None:
    """Return the memory that may still be used, of the machine or of this container; None if neither can be read."""
    known = [size for size in (_machine(), _container()) if size is not None]
    return min(known, default=None)


def _machine() -> int | None:
    with suppress(OSError, ValueError, IndexError):
        return int(Path("/proc/meminfo").read_text().partition("MemAvailable:")[2].split()[0]) * 1024
    return None


def _container() -> int | None:
    with suppress(OSError, ValueError, IndexError):  # "max": no limit
        most, used = (int((_GROUP / name).read_text()) for name in ("memory.max", "memory.current"))
        reclaimable = int((_GROUP / "memory.stat").read_text().partition("\ninactive_file ")[2].split()[0])
        return most - used + reclaimable
    return None
