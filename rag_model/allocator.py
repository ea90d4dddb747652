"""The allocators of a process. glibc's, in processes that embed or serve: what one operation frees, the next one uses.

By default glibc gives large blocks back to the kernel as soon as they are free, and a model's next layer gets them
again one zeroed page at a time: hundreds of page faults a passage, and processes side by side wait for one another in
the kernel. Vectors do not depend on it.

Training is the other way round (`release_freed`). Kept blocks made no step cheaper and took 8 % more memory, and at
glibc's defaults too a third of a step's memory was holes: batches differ in length, what stays from step to step lies
between them, and torch's aligned blocks do not fit into a hole of their own size. Other allocators, and other C
libraries, stay as they are.
"""

import ctypes
import os
import sys
from collections.abc import Mapping
from functools import cache
from typing import Any

_MIB = 1 << 20
_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD = -1, -2, -3  # mallopt's numbers, in glibc's malloc.h
_KEEPING = {
    _MMAP_THRESHOLD: 32 * _MIB,  # the most that glibc takes; larger blocks are mapped, and go back at once
    _TRIM_THRESHOLD: 128 * _MIB,  # free at the end of the heap; a layer of MiniLM over a batch needs 80 in float32
    _TOP_PAD: 64 * _MIB,  # a heap of a thread: an empty one stays; only address space until it is written to
}
_GIVING = {
    _MMAP_THRESHOLD: 4 * _MIB,  # larger blocks are mapped; smaller ones cost more to map than they hold
    _TRIM_THRESHOLD: _MIB // 8,  # glibc's default, as the next
    _TOP_PAD: _MIB // 8,
}


def plain_arrow() -> None:
    """Let Arrow allocate by the C library, in this process and those that it starts; call it before Arrow is imported.

    Arrow's own allocator keeps the memory that a thread freed, even when the thread has ended: `diff` of half a million
    passages held 340 MB in place of 200. The environment's own choice (`ARROW_DEFAULT_MEMORY_POOL`) is kept.
    """
    os.environ.setdefault("ARROW_DEFAULT_MEMORY_POOL", "system")


def reuse_freed() -> bool:
    """Let glibc keep what this process frees, for what it allocates next; return whether it does.

    It is for the whole process, and does nothing where the C library is not glibc, or where the environment chooses an
    allocator (`LD_PRELOAD`) or sets glibc's (`MALLOC_…_`, `GLIBC_TUNABLES`).
    """
    return not chosen(os.environ) and _set()


def release_freed() -> bool:
    """Let glibc give large blocks back to the kernel as soon as they are free; return whether it does.

    It is for the whole process, as `reuse_freed`, whose opposite it is: the one that is called last holds.
    """
    _set.cache_clear()
    return not chosen(os.environ) and _apply(_GIVING)


def give_back() -> None:
    """Give the kernel the free pages, as after a stage or a large object that no other will follow.

    glibc keeps those at the end of each thread's heap: at most 64 MiB a thread. Arrow has an allocator of its own.
    """
    if arrow := sys.modules.get("pyarrow"):
        arrow.default_memory_pool().release_unused()
    if libc := _glibc():
        libc.malloc_trim(0)


def chosen(environment: Mapping[str, str]) -> bool:
    """Return whether an environment names another allocator, or sets glibc's own.

    >>> chosen({"LD_PRELOAD": "/usr/lib/libjemalloc.so.2"}), chosen({"MALLOC_ARENA_MAX": "2"}), chosen({"PATH": "/bin"})
    (True, True, False)
    """
    return (
        "malloc" in environment.get("LD_PRELOAD", "")
        or "glibc.malloc." in environment.get("GLIBC_TUNABLES", "")
        or any(name.startswith("MALLOC_") for name in environment)
    )


@cache
def _set() -> bool:
    return _apply(_KEEPING)


def _apply(settings: Mapping[int, int]) -> bool:
    libc = _glibc()
    return libc is not None and all(libc.mallopt(name, value) for name, value in settings.items())


def _glibc() -> Any:
    """Return the C library of this process; None if it is not glibc."""
    try:
        return ctypes.CDLL(None) if os.confstr("CS_GNU_LIBC_VERSION") else None
    except (ValueError, OSError):  # macOS and musl know no such name
        return None
