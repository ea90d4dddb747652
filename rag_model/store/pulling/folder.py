"""A folder of pulled snapshots: its paths and locks, and the deletion of old snapshots.

`store.pulling.pull` shows the layout. A prune deletes all snapshots that were taken down, and all
but the newest of the others. It deletes no snapshot that a reader has open.

A reader holds a shared lock (`flock`) on its snapshot's manifest, which the kernel releases even if
the reader is killed. A locked snapshot is kept until the next prune, so a reader may open its files
at any time. Pulls hold a shared lock on the folder, and files are only deleted while no other pull
runs, because another pull may be about to link them.
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

from rag_model.atomic_write import TEMPORARY_PREFIX, atomic_write
from rag_model.digest import ALGORITHM, digest_bytes
from rag_model.errors import StoreError, UsageError
from rag_model.store.objects.blobs import BlobRef
from rag_model.store.objects.cache import PARTIAL_SUFFIX, Stamps, open_cache_stamps, open_stamps

_HEX_DIGEST = re.compile(r"[0-9a-f]{64}")  # a snapshot id, or the digest in the name of a blob
CURRENT = "current"  # the symbolic link to the last pulled snapshot
MANIFEST = "manifest.json"
_LOCK_FILE = ".lock"


def blob_copy_path(dest: Path, ref: BlobRef) -> Path:
    """Return the path of a blob's copy in a folder of pulled snapshots."""
    return dest / f".{ref.path}"


def mapped_copy_path(dest: Path, ref: BlobRef) -> Path:
    """Return the path of the memory-mapped copy of a passage file."""
    return dest / ".mapped" / f"{ref.hex_digest}.arrow"


def mapped_copy_identity(ref: BlobRef) -> str:
    """Return the identity in the stamp of a memory-mapped copy, whose own digest is not known."""
    return f"mapped-{ref.hex_digest}"


def record_ref(dest: Path, store_url: str, name: str, identity: str) -> None:
    """Record which snapshot `name` meant in a store when it was pulled.

    Raises:
        OSError: the folder cannot be written.
    """
    if name != identity:  # an id names the same snapshot in every store
        with atomic_write(_get_ref_path(dest, store_url, name)) as temporary:
            temporary.write_text(identity)


def find_ref_folder(dest: Path, store_url: str, name: str) -> Path | None:
    """Return the folder of the snapshot that `name` meant when it was last pulled, or None."""
    try:
        identity = name if _HEX_DIGEST.fullmatch(name) else _get_ref_path(dest, store_url, name).read_text()
    except (OSError, UnicodeDecodeError):
        return None
    return dest / identity if _HEX_DIGEST.fullmatch(identity) and (dest / identity / MANIFEST).is_file() else None


def _get_ref_path(dest: Path, store_url: str, name: str) -> Path:
    return dest / ".named" / digest_bytes(f"{store_url}\n{name}".encode())[-32:]


def open_folder_stamps(dest: Path) -> Stamps:
    """Return the stamps of a folder's files; all machines that mount the folder share them.

    If `dest` is a copy of a single snapshot's folder, its stamps are in the cache.
    """
    return open_stamps(dest / ".verified") if (dest / ".blobs").is_dir() else open_cache_stamps()


def check_keep_count(keep_snapshots: int | None) -> None:
    """Check, before files are fetched, that at least one snapshot is kept.

    Raises:
        UsageError: `keep_snapshots` is less than 1.
    """
    if keep_snapshots is not None and keep_snapshots < 1:
        raise UsageError(f"keep must be at least 1, not {keep_snapshots}: the snapshot just pulled is always kept")


@contextmanager
def lock_pull_folder(dest: Path) -> Iterator[int]:
    """Hold the shared lock of a folder while the block pulls to it; yield the file descriptor.

    Raises:
        OSError: the folder cannot be written.
    """
    dest.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(dest / _LOCK_FILE, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH)
        yield descriptor
    finally:
        os.close(descriptor)


def prune_folder(
    dest: Path,
    keep_snapshots: int | None,
    lock_descriptor: int,
    parse_manifest: Callable[[bytes], Any],
    taken_down: Collection[str] = frozenset(),
) -> tuple[str, ...]:
    """Delete all but the `keep_snapshots` last pulled snapshots, with files that only they have;
    return the ids of the deleted snapshots.

    The snapshot that `current` names and snapshots that a reader holds are kept. If
    `keep_snapshots` is None, all are kept. Snapshots that were taken down are deleted unless a
    reader holds them; if the link `current` names one of them, it is deleted too.
    `lock_descriptor` comes from `lock_pull_folder`. Nothing is deleted while another pull runs.

    Raises:
        OSError: a file cannot be deleted; the next prune continues.
    """
    try:
        fcntl.flock(lock_descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return ()
    oldest_folders = [] if keep_snapshots is None else _list_oldest_folders(dest, keep_snapshots)
    folders = dict.fromkeys([*(dest / name for name in list_pulled_snapshots(dest, taken_down)), *oldest_folders])
    removed_ids = tuple(folder.name for folder in folders if _remove_if_unlocked(folder))
    if (dest / CURRENT).is_symlink() and not (dest / CURRENT).exists():
        (dest / CURRENT).unlink()
    # No other pull is running, so these folders were left by pulls that were killed.
    for folder in dest.glob(f"{TEMPORARY_PREFIX}*"):
        shutil.rmtree(folder, ignore_errors=True)
    _delete_unreferenced_copies(dest, parse_manifest)
    return removed_ids


def remove_taken_down(
    dest: Path, taken_down: Collection[str], parse_manifest: Callable[[bytes], Any]
) -> tuple[str, ...]:
    """Delete taken-down snapshots in a folder, except those that a reader holds; return their ids.

    Raises:
        OSError: a file cannot be deleted; the next call continues.
    """
    if not list_pulled_snapshots(dest, taken_down):
        return ()
    with lock_pull_folder(dest) as lock_descriptor:
        return prune_folder(dest, None, lock_descriptor, parse_manifest, taken_down)


def list_pulled_snapshots(dest: Path, snapshots: Collection[str]) -> tuple[str, ...]:
    """Return the sorted ids of all `snapshots` that are in the folder `dest`."""
    return tuple(sorted(name for name in snapshots if (dest / name).is_dir())) if dest.is_dir() else ()


def lock_manifest(manifest_path: Path) -> int | None:
    """Lock a snapshot's manifest for reading; return the descriptor, or None if locks are
    unsupported.

    Raises:
        OSError: there is no such file, or it is being deleted.
    """
    descriptor = os.open(manifest_path, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        if not os.path.samestat(os.fstat(descriptor), manifest_path.stat()):
            raise BlockingIOError(f"{manifest_path} was replaced by another file")
    except OSError as error:
        os.close(descriptor)
        if isinstance(error, BlockingIOError | FileNotFoundError):
            raise
        return None
    return descriptor


def _list_oldest_folders(dest: Path, keep_snapshots: int) -> list[Path]:
    current_id = (dest / CURRENT).resolve().name
    folders = [folder for folder in dest.iterdir() if _HEX_DIGEST.fullmatch(folder.name) and folder.is_dir()]
    older_folders = [folder for folder in folders if folder.name != current_id]
    older_folders.sort(key=lambda folder: folder.stat().st_mtime_ns)
    return older_folders[: max(0, len(older_folders) + 1 - keep_snapshots)]


def _remove_if_unlocked(folder: Path) -> bool:
    """Rename and then delete a snapshot's folder, unless a reader holds it."""
    temporary = folder.with_name(f"{TEMPORARY_PREFIX}{secrets.token_hex(8)}")
    try:
        descriptor = os.open(folder / MANIFEST, os.O_RDONLY)
    except FileNotFoundError:
        return False  # not a snapshot, or a snapshot that is being pulled
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        folder.rename(temporary)
    except BlockingIOError:
        return False
    finally:
        os.close(descriptor)
    shutil.rmtree(temporary, ignore_errors=True)
    return True


def _delete_unreferenced_copies(dest: Path, parse_manifest: Callable[[bytes], Any]) -> None:
    """Delete blob copies, partial copies and derived files that no snapshot in the folder names."""
    with suppress(StoreError):  # an unreadable manifest may name any file: nothing is deleted
        needed_digests = _read_needed_digests(dest, parse_manifest)
        for copy_path in (dest / ".blobs").glob("??/*"):
            digest = copy_path.name.removeprefix(".").removesuffix(PARTIAL_SUFFIX)
            if _HEX_DIGEST.fullmatch(digest) and digest not in needed_digests:
                mapped_path = mapped_copy_path(dest, BlobRef(f"{ALGORITHM}:{digest}", 0))
                for path in (copy_path, mapped_path, *(dest / ".verified").glob(f"*{digest}-*")):
                    path.unlink(missing_ok=True)


def _read_needed_digests(dest: Path, parse_manifest: Callable[[bytes], Any]) -> set[str]:
    """Return the hex digests of all files of the snapshots in a folder."""
    manifests = [parse_manifest(manifest.read_bytes()) for manifest in dest.glob(f"*/{MANIFEST}")]
    return {ref.hex_digest for manifest in manifests for ref in manifest.content.files.values()}
