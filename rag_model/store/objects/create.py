"""Create a file exclusively: of all writers that try, in any process on any machine, exactly one succeeds.

Refs and memo are built on this one operation, so the store needs no locks. fsspec's own local `mode="create"` is a
check and then a write (two processes may both succeed), so locally a temporary file and a hard link are used.
"""

import errno
import os
import secrets
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from fsspec.implementations.local import LocalFileSystem
from fsspec.implementations.memory import MemoryFileSystem

from rag_model.landing import landing

_WRITERS, _RACES = 8, 2  # the first race also opens the connections, which spreads its writers

_memory_lock = threading.Lock()  # memory:// exists in one process


def create_exclusive(fs: Any, path: str, data: bytes) -> bool:
    """Create `path` with the bytes `data`; return False, and change nothing, when it exists already.

    On object stores False may also mean that a retried request found the file of its own first attempt: put a nonce
    into `data`, read the file back and compare.

    Raises:
        OSError: nothing was created, for a reason other than that the file exists.
    """
    if isinstance(fs, LocalFileSystem):
        return _create_local(Path(path), data)
    if isinstance(fs, MemoryFileSystem):
        return _create_in_memory(fs, path, data)
    return _create_by_condition(fs, path, data)


def excludes(fs: Any, folder: str) -> bool:
    """Probe whether exclusive creation works below `folder`: of writers that race for one file, one succeeds.

    A bucket that ignores `If-None-Match` overwrites without an error. One that looks for the file and then writes it
    refuses a late writer, but lets two succeed that come at once. Leaves no file behind.

    Raises:
        OSError: the probe could not be written or read.
    """
    if isinstance(fs, LocalFileSystem | MemoryFileSystem):
        return True
    return all(_one_wins(fs, f"{folder}/probe-{secrets.token_hex(8)}") for _ in range(_RACES))


def _one_wins(fs: Any, path: str) -> bool:
    values = [f"{number} {secrets.token_hex(8)}".encode() for number in range(_WRITERS)]
    start = threading.Barrier(_WRITERS)

    def write(value: bytes) -> bool:
        start.wait()
        return create_exclusive(fs, path, value)

    try:
        with ThreadPoolExecutor(_WRITERS) as pool:
            won = [value for value, created in zip(values, pool.map(write, values), strict=True) if created]
        kept = fs.cat_file(path)
        late = create_exclusive(fs, path, b"late") or fs.cat_file(path) != kept
    except OSError as error:
        if error.errno in {errno.ENOSYS, errno.EINVAL}:  # 501 and 400: the header itself is refused
            return False
        raise
    else:
        return not late and won in ([kept], [])  # []: a repeated request found the file of its own first attempt
    finally:
        if fs.exists(path):
            fs.rm_file(path)


def _create_local(path: Path, data: bytes) -> bool:
    try:
        with landing(path, exclusive=True) as temporary:
            temporary.write_bytes(data)
    except FileExistsError:
        if os.path.lexists(path.parent) and not path.parent.is_dir():  # what exists is no file of this name
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(path.parent)) from None
        return False
    return True


def _create_in_memory(fs: MemoryFileSystem, path: str, data: bytes) -> bool:
    with _memory_lock:
        if fs.exists(path):
            return False
        fs.pipe_file(path, data)
        return True


def _create_by_condition(fs: Any, path: str, data: bytes) -> bool:
    """Create with `If-None-Match: *`. Servers report a lost race differently, but afterwards the file exists."""
    try:
        fs.pipe_file(path, data, mode="create")
    except FileExistsError:
        return False
    except OSError:
        if fs.exists(path):
            return False
        raise
    return True
