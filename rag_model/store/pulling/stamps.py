"""Stamps: records of verified local files, so that a large file is hashed once and not at every opening.

A stamp says that a file (an inode) had the right bytes at a given size and at given times: of its last write (mtime),
which a program may set as it likes, and of its last change of any kind (ctime), which only the kernel sets. So a file
that was written to since is hashed again before it is read, also if its time was restored. A new link or a new owner
changes ctime too: who makes one keeps the stamp by `linked`. Bit errors of the disk itself change no time: `verify` and
`pull` hash every file, with a stamp or without.
"""

import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path

from rag_model.digest import digest_file

_TICK = 0.01  # seconds; two writes within it may leave the same time of change


class Stamps:
    """The stamps in one folder, a small file each; if it cannot be written, they last as long as the process."""

    def __init__(self, folder: Path) -> None:
        """Keep stamps in `folder`, created with the first of them; call `stamps_in`, which shares one object."""
        self.folder = folder
        self._known: dict[str, str] = {}

    def sound(self, path: Path, identity: str) -> bool:
        """Whether a local file has the digest `identity`: by its stamp, else by hashing it, which writes a stamp."""
        if self.holds(path, identity):
            return True
        name, state = _settled(path, identity)  # before the bytes are read: a write meanwhile makes the stamp void
        if digest_file(path) != identity:
            return False
        self._write(name, state)
        return True

    def holds(self, path: Path, identity: str) -> bool:
        """Whether `put` was called for this file and identity, and the file was not written to since."""
        name, state = _stamp(path, identity)
        return self._read(name) == state

    def put(self, path: Path, identity: str) -> None:
        """Record that a file has the content of `identity`, which the caller has verified."""
        self._write(*_settled(path, identity))

    @contextmanager
    def linked(self, path: Path, identity: str) -> Iterator[None]:
        """Keep a stamp valid while the block links the file, unlinks it or sets its time of access.

        A file without a valid stamp gets none; nor does one that is written to in the block.
        """
        held, before = self.holds(path, identity), path.stat()
        yield
        after = path.stat()
        if held and (before.st_size, before.st_mtime_ns) == (after.st_size, after.st_mtime_ns):
            self.put(path, identity)

    def _read(self, name: str) -> str | None:
        if name not in self._known:
            with suppress(OSError, UnicodeDecodeError):
                self._known[name] = (self.folder / name).read_text()
        return self._known.get(name)

    def _write(self, name: str, state: str) -> None:
        self._known[name] = state
        temporary = self.folder / f".{secrets.token_hex(8)}"
        with suppress(OSError):  # a stamp only saves time
            self.folder.mkdir(parents=True, exist_ok=True)
            temporary.write_text(state)
            temporary.replace(self.folder / name)


@cache
def stamps_in(folder: Path) -> Stamps:
    """Return the stamps of a folder: one object for each folder in this process."""
    return Stamps(folder)


def _settled(path: Path, identity: str) -> tuple[str, str]:
    """Return a file's stamp, after a tick of the file system's clock, so that a later write gives another stamp."""
    found = path.stat()
    time.sleep(max(0.0, max(found.st_mtime, found.st_ctime) + _TICK - time.time()) % _TICK)
    return _stamp(path, identity)


def _stamp(path: Path, identity: str) -> tuple[str, str]:
    """Return a stamp's name (identity and inode) and content (size and times)."""
    found = path.stat()
    return f"{identity.rpartition(':')[2]}-{found.st_ino}", f"{found.st_size} {found.st_mtime_ns} {found.st_ctime_ns}"
