"""Prune a folder that snapshots are pulled to: keep the newest snapshots, and those that a reader has open.

Snapshots that were taken down are deleted whatever is kept.

A reader holds a shared lock (`flock`) on its snapshot's manifest, which the kernel releases however the reader ends.
A locked snapshot is kept until the next prune, so a reader may open its files at any time. Pulls hold a shared lock
on the folder, and files are only deleted while no other pull runs, since that may be about to link them.
"""

import fcntl
import os
import re
import secrets
import shutil
from collections.abc import Callable, Collection, Iterator
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
    """Check, before anything is fetched, that at least one snapshot is kept.

    Raises:
        UsageError: `keep` is below 1.
    """
    if keep is not None and keep < 1:
        raise UsageError(f"keep must be at least 1, not {keep}: the snapshot just pulled is always kept")


@contextmanager
def pulling(dest: Path) -> Iterator[int]:
    """Hold the shared lock of a folder while the block pulls to it; yields the lock.

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


def prune(
    dest: Path,
    keep: int | None,
    lock: int,
    parse: Callable[[bytes], Any],
    taken_down: Collection[str] = frozenset(),
) -> tuple[str, ...]:
    """Delete all but the `keep` snapshots pulled last, and the files that only they had; return the deleted ids.

    The snapshot that `current` names is kept, and so is one that a reader holds; None keeps all. Those that were taken
    down are deleted in any case, with `current` where it names one, unless a reader holds them. `lock` is what
    `pulling` yielded, `parse` reads a manifest. While another pull runs nothing is deleted; the next prune does it.

    Raises:
        OSError: a file cannot be deleted; the next prune continues.
    """
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return ()
    oldest = [] if keep is None else _oldest(dest, keep)
    doomed = dict.fromkeys([*(dest / name for name in pulled_of(dest, taken_down)), *oldest])
    gone = tuple(folder.name for folder in doomed if _removed(folder))
    if (dest / CURRENT).is_symlink() and not (dest / CURRENT).exists():
        (dest / CURRENT).unlink()
    for folder in dest.glob(f"{TEMPORARY}*"):  # left by pulls that died: no other pull is running
        shutil.rmtree(folder, ignore_errors=True)
    _sweep(dest, parse)
    return gone


def remove_taken_down(dest: Path, taken_down: Collection[str], parse: Callable[[bytes], Any]) -> tuple[str, ...]:
    """Delete the snapshots in a folder that were taken down, but for those that a reader holds; return their ids.

    Raises:
        OSError: a file cannot be deleted; the next call continues.
    """
    if not pulled_of(dest, taken_down):
        return ()
    with pulling(dest) as lock:
        return prune(dest, None, lock, parse, taken_down)


def pulled_of(dest: Path, snapshots: Collection[str]) -> tuple[str, ...]:
    """Return which of these snapshots lie in a folder, sorted."""
    return tuple(sorted(name for name in snapshots if (dest / name).is_dir())) if dest.is_dir() else ()


def hold(manifest: Path) -> int | None:
    """Lock a snapshot's manifest for reading, and return the lock; None where the file system has no locks.

    Raises:
        OSError: there is no such file, or it is being deleted.
    """
    descriptor = os.open(manifest, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        if not os.path.samestat(os.fstat(descriptor), manifest.stat()):
            raise BlockingIOError(f"{manifest} was replaced by another file")
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
    """Remove a snapshot's folder, unless a reader holds it: first rename it, then delete it."""
    doomed = folder.with_name(f"{TEMPORARY}{secrets.token_hex(8)}")
    try:
        descriptor = os.open(folder / MANIFEST, os.O_RDONLY)
    except FileNotFoundError:
        return False  # not a snapshot, or one that is being pulled
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
    """Delete the copies of blobs (partial ones too) and the files derived from them that no snapshot here names."""
    with suppress(StoreError):  # an unreadable manifest may name any of them, so nothing is deleted
        named = _named(dest, parse)
        for copy in (dest / ".blobs").glob("??/*"):
            digest = copy.name.removeprefix(".").removesuffix(PARTIAL)
            if _ID.fullmatch(digest) and digest not in named:
                mapped = mapped_copy(dest, BlobRef(f"{ALGORITHM}:{digest}", 0))
                for path in (copy, mapped, *(dest / ".verified").glob(f"*{digest}-*")):
                    path.unlink(missing_ok=True)


def _named(dest: Path, parse: Callable[[bytes], Any]) -> set[str]:
    """Return the digests of all files of the snapshots in a folder."""
    manifests = [parse(manifest.read_bytes()) for manifest in dest.glob(f"*/{MANIFEST}")]
    return {ref.id.partition(":")[2] for manifest in manifests for ref in manifest.content.files.values()}
