"""Measure free memory, check that indexes fit into it, and read index files into the page cache."""

from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path

from rag_model.errors import ResourceError
from rag_model.index.byte_sizes import format_bytes
from rag_model.serving.settings import ServiceSettings
from rag_model.store.versions.manifest import Content

_CGROUP = Path("/sys/fs/cgroup")  # control group version 2: the container's limits
_READ_BYTES = 1 << 20


def page_in(files: Iterable[Path], mapped_bytes: int = 0) -> None:
    """Read files that will be memory-mapped into the page cache, in order, as long as they fit.

    Otherwise the first searches would read them from the disk page by page. `mapped_bytes` of free
    memory are left to files that are mapped already, so that these are not evicted.
    """
    remaining_bytes = (get_free_bytes() or 0) - mapped_bytes  # free memory includes the page cache
    for file in files:
        remaining_bytes -= file.stat().st_size
        if remaining_bytes < 0:
            return
        with file.open("rb", buffering=0) as index_file:
            while index_file.read(_READ_BYTES):
                pass


def get_free_bytes() -> int | None:
    """Return the free memory of the machine or the container, the smaller one; None if unknown."""
    limits = [size for size in (_get_machine_bytes(), _get_container_bytes()) if size is not None]
    return min(limits, default=None)


def _get_machine_bytes() -> int | None:
    with suppress(OSError, ValueError, IndexError):
        return int(Path("/proc/meminfo").read_text().partition("MemAvailable:")[2].split()[0]) * 1024
    return None


def _get_container_bytes() -> int | None:
    with suppress(OSError, ValueError, IndexError):  # memory.max is "max" if there is no limit
        limit, used = (int((_CGROUP / name).read_text()) for name in ("memory.max", "memory.current"))
        reclaimable = int((_CGROUP / "memory.stat").read_text().partition("\ninactive_file ")[2].split()[0])
        return limit - used + reclaimable
    return None


def check_memory(content: Content, indexes: Sequence[str], settings: ServiceSettings) -> None:
    """Check that indexes fit into free memory, next to the ones in use; mapped indexes always do.

    Raises:
        ResourceError: They do not fit.
    """
    free_bytes = get_free_bytes()
    if not settings.in_memory or free_bytes is None:
        return
    files = [content.files.get(content.index_file(name)) for name in indexes]
    needed_bytes = sum(file.size for file in files if file is not None)
    if needed_bytes > free_bytes:
        raise ResourceError(
            f"the indexes need {format_bytes(needed_bytes)} of memory next to the ones in use, and "
            f"{format_bytes(free_bytes)} are free: give the service more, or serve without "
            "--in-memory"
        )
