"""The workers of this machine: whether a run has them at all, how many, and how much memory is theirs.

Beam is not asked, and not imported: that takes a second, and a small rebuild does without it.
"""

import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

CORES, MEMORY = "BOOKWHEEL_CORES", "BOOKWHEEL_WORKER_MEMORY"  # what a launch gave this run


def here(flags: Sequence[str]) -> bool:
    """Tell whether the workers are this machine's own processes: no `--runner` is among Beam's flags."""
    return not any(flag.partition("=")[0] == "--runner" for flag in flags)


def named(flags: Sequence[str]) -> bool:
    """Tell whether Beam's flags say how many workers this machine shall have."""
    return any(flag.partition("=")[0] == "--direct_num_workers" for flag in flags)


def cores() -> int:
    """Return the processors this process may run on, or those that it was given (`BOOKWHEEL_CORES`) where fewer."""
    given = os.environ.get(CORES)
    return min(int(given), _processors()) if given else _processors()


def _processors() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def side_by_side(flags: Sequence[str], task_bytes: int, memory_bytes: int | None = None) -> tuple[str, ...]:
    """Return flags under which local workers are no more than memory has room for; other machines' are theirs to count.

    Args:
        flags: Beam's; a number of workers among them stands.
        task_bytes: memory of one task.
        memory_bytes: of all workers; None: what is free.
    """
    free = worker_memory(flags)
    if free is None or named(flags):
        return tuple(flags)
    fitting = max(1, (memory_bytes or free) // task_bytes)
    return (*flags, f"--direct_num_workers={fitting}") if fitting < cores() else tuple(flags)


def worker_memory(flags: Sequence[str]) -> int | None:
    """Return the bytes of memory that are free for workers; None where they are other machines'.

    A container sees its host's memory: what it was given is named by `BOOKWHEEL_WORKER_MEMORY`, in bytes.
    """
    if not here(flags):
        return None
    given = os.environ.get(MEMORY)
    return min(int(given), _available()) if given else _available()


def _available() -> int:
    """Return the bytes that are free; on Linux with the caches that the kernel would give back at once."""
    with suppress(OSError):
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return 1024 * int(line.split()[1])
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
