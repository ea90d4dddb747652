"""Write a local file atomically: readers never see a part of it, and a crash leaves only a dot-file.

The bytes are written to a temporary file in the destination's folder, forced to the disk (fsync), and only then the
file is renamed.
"""

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

TEMPORARY = ".landing-"  # files whose name starts with it are leftovers of a crash; they are never read


@contextmanager
def landing(dest: Path, *, exclusive: bool = False) -> Iterator[Path]:
    """Yield a temporary path to fill; on a clean exit it becomes `dest`, on an error it is removed.

    An existing `dest` is replaced atomically, or left unchanged if `exclusive`.

    Raises:
        FileExistsError: `exclusive`, and `dest` exists or another process created it first.
        OSError: the disk is full, or the folder cannot be written.
    """
    dest.parent.mkdir(parents=True, exist_ok=True)
    temporary = dest.parent / f"{TEMPORARY}{secrets.token_hex(8)}"
    try:
        yield temporary
        sync(temporary)
        if exclusive:
            os.link(temporary, dest)  # unlike a rename, it fails if the name exists
        else:
            temporary.replace(dest)
        sync(dest.parent)
    finally:
        with suppress(FileNotFoundError):
            temporary.unlink()


def sync(path: Path) -> None:
    """Force a file's bytes, or a folder's entries, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
