"""Fetch a blob into a local file: resumable, verified, and by one process at a time.

The bytes are written in order to a partial file beside the destination. An interrupted fetch leaves it, and the
next fetch continues at its end. The file is renamed to the destination only if its digest is right.
"""

import fcntl
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from rag_model.digest import digest_chunks, digest_file
from rag_model.landing import sync

PARTIAL = ".partial"
_BLOCK = 1 << 20


def fetch(identity: str, size: int, dest: Path, rest: Callable[[int], Iterable[bytes]]) -> bool:
    """Fill `dest` with the `size` bytes of a digest; `rest(start)` yields those from `start` on, in order.

    A second process that wants the same file waits for the first and takes its result. Returns False when the bytes
    have another digest: then `dest` is unchanged and the partial file is deleted.

    Raises:
        OSError: the disk is full, or the folder cannot be written; the partial file keeps its bytes.
    """
    dest.parent.mkdir(parents=True, exist_ok=True)
    partial = dest.with_name(f".{dest.name}{PARTIAL}")
    with _alone_with(partial) as (file, waited):
        if waited and dest.is_file() and dest.stat().st_size == size and digest_file(dest) == identity:
            partial.unlink()
            return True
        if not (_resumed(file, size, identity, rest) or _digest(file, size, rest) == identity):
            partial.unlink()
            return False
        os.fsync(file.fileno())
        partial.replace(dest)
        sync(dest.parent)
        return True


def partial_bytes(dest: Path) -> int:
    """Return how many bytes of `dest` an interrupted fetch has left."""
    with suppress(OSError):
        return dest.with_name(f".{dest.name}{PARTIAL}").stat().st_size
    return 0


def _resumed(file: BinaryIO, size: int, identity: str, rest: Callable[[int], Iterable[bytes]]) -> bool:
    """Continue the partial file of an earlier fetch, if there is one; delete it if it turns out to be damaged."""
    found = file.seek(0, os.SEEK_END)
    if 0 < found <= size and _digest(file, size, rest) == identity:
        return True
    file.seek(0)
    file.truncate()
    return False


def _digest(file: BinaryIO, size: int, rest: Callable[[int], Iterable[bytes]]) -> str:
    """Append the missing bytes to a file and return the digest of the complete file."""
    identity = digest_chunks(_whole(file, rest))
    file.flush()
    return identity


def _whole(file: BinaryIO, rest: Callable[[int], Iterable[bytes]]) -> Iterator[bytes]:
    file.seek(0)
    while block := file.read(_BLOCK):
        yield block
    for chunk in rest(file.tell()):
        for start in range(0, len(chunk), _BLOCK):  # Linux may take ten times as long to write 16 MiB at once
            block = chunk[start : start + _BLOCK]
            file.write(block)
            yield block


@contextmanager
def _alone_with(partial: Path) -> Iterator[tuple[BinaryIO, bool]]:
    """Lock a partial file, so that one process fills it; the flag says that this process had to wait for another."""
    waited = False
    while True:
        with partial.open("ab+") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                waited = True
                fcntl.flock(file, fcntl.LOCK_EX)
            if _is_at(file, partial):
                yield file, waited
                return


def _is_at(file: BinaryIO, path: Path) -> bool:
    """Whether `path` is still the open file: a process that held the lock before may have renamed or removed it."""
    with suppress(FileNotFoundError):
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    return False
