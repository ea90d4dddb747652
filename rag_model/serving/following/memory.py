"""Check that an edition fits into memory beside the current one, so that the service is not killed for memory."""

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from rag_model.errors import ResourceError
from rag_model.index.sizing.amounts import gigabytes
from rag_model.serving.service_settings import ServiceSettings
from rag_model.store.versions.manifest import Content

_GROUP = Path("/sys/fs/cgroup")  # what a container may use, version 2


def check_memory(content: Content, indexes: Sequence[str], settings: ServiceSettings) -> None:
    """Refuse to load indexes that do not fit into what is free; mapped ones need no room.

    Raises:
        ResourceError: they do not fit.
    """
    free = free_bytes()
    if settings.swap == "low-memory" or free is None:
        return
    files = [content.files.get(content.index_file(name)) for name in indexes]
    needed = sum(file.size for file in files if file is not None)
    if needed > free:
        raise ResourceError(
            f"the indexes take {gigabytes(needed)} of memory beside those that serve, and {gigabytes(free)} are free: "
            "give the service more, or serve with --low-memory"
        )


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
