"""Write a local file atomically: readers never see a partial file.

The bytes are written to a temporary file in the destination's folder and forced to the disk
(fsync) before the file is renamed. A crash can leave the temporary file, whose name starts with a
dot.
"""

import errno
import os
import secrets
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from rag_model.errors import InputError

TEMPORARY_PREFIX = ".landing-"  # files with this prefix are leftovers of a crash and are never read


@contextmanager
def atomic_write(destination: Path, *, exclusive: bool = False) -> Iterator[Path]:
    """Yield a temporary path to write; it becomes `destination` on success and is removed on error.

    An existing `destination` is replaced atomically, or left unchanged if `exclusive`.

    Raises:
        FileExistsError: `exclusive` is set and `destination` exists.
        OSError: The disk is full, or the folder is not writable.
    """
    destination.parent.mkdir(parents=True, exist_ok=True)
    temporary_path = destination.parent / f"{TEMPORARY_PREFIX}{secrets.token_hex(8)}"
    try:
        yield temporary_path
        fsync(temporary_path)
        if exclusive:
            os.link(temporary_path, destination)  # unlike a rename, a link fails if the name exists
        else:
            temporary_path.replace(destination)
        fsync(destination.parent)
    finally:
        with suppress(FileNotFoundError):
            temporary_path.unlink()


def write_user_file(path: Path, pieces: Iterable[str]) -> None:
    """Write a text, given in pieces, atomically to a file that the user has named.

    Raises:
        InputError: The file cannot be written.
    """
    try:
        with atomic_write(path) as temporary_path, temporary_path.open("w", encoding="utf-8") as file:
            file.writelines(pieces)
    except OSError as error:
        raise InputError(f"{path} cannot be written ({error.strerror}): choose another path") from error


def describe_write_error(path: Path | str, error: OSError) -> str:
    """Return the error message for a local file or folder that cannot be written."""
    if error.errno in {errno.ENOSPC, errno.EDQUOT}:  # pyarrow's message differs from the system's
        return f"the disk is full: cannot write {path}; free some space and run it again"
    return f"cannot write {path}: {error.strerror or error}"


def fsync(path: Path) -> None:
    """Force a file's bytes, or a folder's entries, to the disk."""
    file_descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(file_descriptor)
    finally:
        os.close(file_descriptor)
