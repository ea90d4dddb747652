"""Prune a folder that snapshots are pulled to: the newest stay, and so does what somebody reads.

A reader holds its snapshot's manifest by a shared lock (`flock`), which the kernel lets go of however the reader ends;
a snapshot that is held is left for the next time. So a reader may open its files as late as it likes. Pulls hold a lock
of the folder, shared too, and files are only deleted where no other pull is at work, which may be about to link them.
"""

import fcntl
import os
import re
import secrets
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from rag_model.digest import ALGORITHM
from rag_model.errors import StoreError, UsageError
from rag_model.landing import TEMPORARY
from rag_model.store.objects.blobs import BlobRef
from rag_model.store.objects.fetch import PARTIAL
from rag_model.store.pulling.pulled import CURRENT, MANIFEST, mapped_copy

_LOCK = ".lock"
_ID = re.compile(r"[0-9a-f]{64}")


def check_keep(keep: int | None) -> None:
    """Refuse, before anything is fetched, to keep fewer than one.

    Raises:
        UsageError: `keep` is below 1.
    """
    if keep is not None and keep < 1:
        raise UsageError(f"keep must be at least 1, not {keep}: what was just pulled stays")


@contextmanager
def pulling(dest: Path) -> Iterator[int]:
    """Say, as long as the block runs, that files of a folder may be about to be linked; gives the lock.

    Raises:
        OSError: the folder cannot be written.
    """
    dest.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(dest / _LOCK, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH)
        yield descriptor
    finally:
        os.close(descriptor)


def prune(dest: Path, keep: int, lock: int, parse: Callable[[bytes], Any]) -> tuple[str, ...]:
    """Delete all but the `keep` snapshots that were pulled last, and the files that only they had; return their ids.

    What `current` names stays, and so does what a reader holds. `lock` is what `pulling` gave,
    `parse` reads a manifest. Where another pull is at
    work nothing is deleted; the next one does it.

    Raises:
        OSError: a file cannot be deleted; the next one goes on.
    """
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return ()
    gone = tuple(folder.name for folder in _oldest(dest, keep) if _removed(folder))
    for folder in dest.glob(f"{TEMPORARY}*"):  # of those who died half-way: nobody else is at work
        shutil.rmtree(folder, ignore_errors=True)
    _sweep(dest, parse)
    return gone


def hold(manifest: Path) -> int | None:
    """Lock a snapshot's manifest for reading, and return the lock; None where the file system knows no locks.

    Raises:
        OSError: there is no such file, or it is just being deleted.
    """
    descriptor = os.open(manifest, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        if not os.path.samestat(os.fstat(descriptor), manifest.stat()):
            raise BlockingIOError(f"{manifest} is another now")
    except OSError as refused:
        os.close(descriptor)
        if isinstance(refused, BlockingIOError | FileNotFoundError):
            raise
        return None
    return descriptor


def _oldest(dest: Path, keep: int) -> list[Path]:
    current = (dest / CURRENT).resolve().name
    folders = [folder for folder in dest.iterdir() if _ID.fullmatch(folder.name) and folder.is_dir()]
    others = sorted((folder for folder in folders if folder.name != current), key=_pulled)
    return others[: max(0, len(others) + 1 - keep)]


def _pulled(folder: Path) -> int:
    return folder.stat().st_mtime_ns


def _removed(folder: Path) -> bool:
    """Remove a snapshot's folder, unless a reader holds it: first from its name, then from the disk."""
    doomed = folder.with_name(f"{TEMPORARY}{secrets.token_hex(8)}")
    try:
        descriptor = os.open(folder / MANIFEST, os.O_RDONLY)
    except FileNotFoundError:
        return False  # not a snapshot, or one on its way
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        folder.rename(doomed)
    except BlockingIOError:
        return False
    finally:
        os.close(descriptor)
    shutil.rmtree(doomed, ignore_errors=True)
    return True


def _sweep(dest: Path, parse: Callable[[bytes], Any]) -> None:
    """Delete what no snapshot's folder names any more: copies of blobs, whole or not, and what was derived of them."""
    with suppress(StoreError):  # a manifest that cannot be read may name any of them
        named = _named(dest, parse)
        for copy in (dest / ".blobs").glob("??/*"):
            digest = copy.name.removeprefix(".").removesuffix(PARTIAL)
            if _ID.fullmatch(digest) and digest not in named:
                mapped = mapped_copy(dest, BlobRef(f"{ALGORITHM}:{digest}", 0))
                for path in (copy, mapped, *(dest / ".verified").glob(f"*{digest}-*")):
                    path.unlink(missing_ok=True)


def _named(dest: Path, parse: Callable[[bytes], Any]) -> set[str]:
    """Return the digests of all files of the snapshots that are there."""
    manifests = [parse(manifest.read_bytes()) for manifest in dest.glob(f"*/{MANIFEST}")]
    return {ref.id.partition(":")[2] for manifest in manifests for ref in manifest.content.files.values()}
