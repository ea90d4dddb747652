"""Put a local file in place so that nobody ever sees half of it, and a crash leaves nothing but a dot-file.

The bytes go to a temporary file beside the destination, reach the disk (fsync), and only then take their
name.
"""

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

TEMPORARY = ".landing-"  # names that start with it are leftovers of a crash; nobody reads them


@contextmanager
def landing(dest: Path, *, exclusive: bool = False) -> Iterator[Path]:
    """Yield a temporary path to fill; on a clean exit it becomes `dest`, on an error it is removed.

    An existing `dest` is replaced atomically, or left as it is where `exclusive`.

    Raises:
        FileExistsError: `exclusive`, and `dest` exists or another process won.
        OSError: the disk is full, or the folder cannot be written.
    """
    dest.parent.mkdir(parents=True, exist_ok=True)
    temporary = dest.parent / f"{TEMPORARY}{secrets.token_hex(8)}"
    try:
        yield temporary
        sync(temporary)
        if exclusive:
            os.link(temporary, dest)  # the one local call that fails when the name is taken
        else:
            temporary.replace(dest)
        sync(dest.parent)
    finally:
        with suppress(FileNotFoundError):
            temporary.unlink()


def sync(path: Path) -> None:
    """Force a file's bytes, or a folder's names, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
