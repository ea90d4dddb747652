"""Pull a snapshot or a model into a local folder: fetch missing files, verify, switch atomically.

```
DEST/.blobs/ab/abcdef…       every pulled blob, verified; .abcdef….partial: an interrupted fetch
DEST/.mapped/abcdef….arrow   memory-mapped copies of passage files, for services
DEST/.verified/…             stamps of the files that have not changed since they were verified
DEST/.named/…                the snapshot that each pulled name (such as a ref) meant last
DEST/.lock                   a shared lock that every pull holds while it runs
DEST/<snapshot id>/…         the snapshot's files (hard links into .blobs), and manifest.json
DEST/current                 a symbolic link to the last pulled snapshot, swapped by one rename
```

A reader opens `DEST/current` once and keeps that folder, which never changes: it never sees a mix
of two snapshots. Earlier snapshots stay until a pull with `keep_snapshots` prunes them. Vectors of
passages that the last pulled snapshot also has are not fetched again (`store.pulling.overlap`). A
model's folder has the same layout, and `load_rag` and `from_pretrained` open it. Snapshots and
models must be pulled to different folders.
"""

import os
import secrets
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from rag_model.atomic_write import TEMPORARY_PREFIX, describe_write_error, fsync
from rag_model.errors import NotFoundError, ResourceError, StoreError, UsageError
from rag_model.store.objects.blobs import BlobRef, get_partial_size
from rag_model.store.objects.cache import find_existing_ancestor
from rag_model.store.objects.files import encode_json
from rag_model.store.pulling.folder import (
    CURRENT,
    MANIFEST,
    blob_copy_path,
    check_keep_count,
    list_pulled_snapshots,
    lock_pull_folder,
    open_folder_stamps,
    prune_folder,
    record_ref,
)
from rag_model.store.pulling.materialize import (
    DeriveIndex,
    Puller,
    PullProgress,
    derive_nothing,
    materialize_snapshot,
)
from rag_model.store.store import Store
from rag_model.store.versions.catalog import Catalog
from rag_model.store.versions.signatures import PulledSignatures, Signatures, TrustedKeys


@dataclass(frozen=True, slots=True)
class PullReport:
    """The result of a pull."""

    snapshot: str  # full id of the snapshot or model
    path: Path  # DEST/<id>
    fetched_bytes: int
    reused_bytes: int  # verified bytes that were in DEST before, as files or as vectors in files
    pruned: tuple[str, ...] = ()  # ids of earlier snapshots that were deleted
    taken_down: tuple[str, ...] = ()  # ids of snapshots in DEST that the store has taken down


def pull(
    store: Store,
    snapshot: str,
    dest: Path,
    *,
    select: Callable[[str], bool] = lambda path: True,
    with_mapped_copies: bool = True,
    keep_snapshots: int | None = None,
    accept: Callable[[Path], None] = lambda folder: None,
    derive_index: DeriveIndex = derive_nothing,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> PullReport:
    """Pull a snapshot (an id, a unique prefix or a ref) or a model (`model:NAME`) into `dest`.

    Files in `dest` are hashed again, and replaced if damaged. Vectors of passages that the last
    pulled snapshot also has are copied from it. An interrupted pull leaves `current` unchanged; the
    next pull continues it, even in the middle of a file.

    Args:
        store: the store to pull from.
        snapshot: the name of the snapshot or model.
        dest: the folder of pulled snapshots, or of pulled models.
        select: chooses files by path. A later pull that selects more files of the same snapshot
            adds them to its folder.
        with_mapped_copies: also write memory-mapped copies of the passage files, which are about
            three times as large.
        keep_snapshots: how many of the last pulled snapshots to keep; None keeps all and reports
            taken-down snapshots. A number also deletes all taken-down snapshots. A snapshot that a
            reader has open is never deleted.
        accept: called with the complete folder of the snapshot before `current` names it; if it
            raises an exception, the pull ends.
        derive_index: writes index files from local files (`retrieve.indexes`); they are used if
            they have the digests of the published files.
        on_progress: called with the number of bytes that are present and the total, and several
            times a second while the store sends nothing. An exception that it raises ends the pull
            at once; requests to the store that are in progress are cancelled or abandoned.

    Raises:
        RefusedError: a trust file is given, and no trusted key signed the snapshot or the ref's
            move.
        UsageError: `keep_snapshots` is less than 1, or a snapshot is pulled to a folder of models,
            or a model to a folder of snapshots.
        NotFoundError: there is no such version, or the snapshot was taken down while it was pulled.
        ResourceError: the disk of `dest` has too little free space; nothing was fetched.
        StoreError: a blob is missing or damaged, or `dest` is full or cannot be written; `current`
            is unchanged.
    """
    check_keep_count(keep_snapshots)
    catalog, name = store.find_catalog(snapshot)
    if catalog is store.evaluations:
        raise UsageError(f"{snapshot} is an evaluation, which cannot be pulled: export it to get its files")
    identity = catalog.resolve_trusted(name)
    manifest = catalog.get(identity)
    _check_same_kind(store, catalog, dest)
    files = {path: ref for path, ref in manifest.content.files.items() if select(path)}
    dest, blobs = dest.absolute(), list(dict.fromkeys(files.values()))
    _check_free_space(dest, blobs)
    pruned_ids: tuple[str, ...] = ()
    progress = PullProgress(sum(ref.size for ref in blobs), on_progress)
    puller = Puller(store.make_interruptible(progress.check), dest, progress)
    try:
        with lock_pull_folder(dest) as lock:
            if catalog is store.models:
                fetched_bytes = puller.materialize_all(blobs)
            else:
                fetched_bytes = materialize_snapshot(
                    puller, manifest, files, with_mapped_copies=with_mapped_copies, derive_index=derive_index
                )
            with _preserve_stamps(dest, blobs):
                _publish_folder(manifest, identity, files, dest, partial(_copy_signatures, catalog, identity))
            replaced_ids = store.takedowns.list_replaced() if catalog is store.snapshots else frozenset()
            if identity in replaced_ids:
                prune_folder(dest, None, lock, catalog.parse, {identity})
                raise NotFoundError(
                    f"snapshot {identity[:12]} was taken down while it was pulled: pull its replacement"
                )
            accept(dest / identity)
            record_ref(dest, store.url, snapshot, identity)
            _set_current_link(identity, dest)
            if keep_snapshots:
                with _preserve_stamps(dest, blobs):
                    pruned_ids = prune_folder(dest, keep_snapshots, lock, catalog.parse, replaced_ids)
    except OSError as error:
        raise StoreError(describe_write_error(dest, error)) from error
    return PullReport(
        snapshot=identity,
        path=dest / identity,
        fetched_bytes=fetched_bytes,
        reused_bytes=sum(ref.size for ref in blobs) - fetched_bytes,
        pruned=pruned_ids,
        taken_down=list_pulled_snapshots(dest, replaced_ids),
    )


def _check_same_kind(store: Store, catalog: Catalog[Any], dest: Path) -> None:
    """Check that a folder does not mix snapshots and models, because readers of `current` expect
    one kind.
    """
    other_catalog = store.snapshots if catalog is store.models else store.models
    try:
        other_catalog.parse((dest / CURRENT / MANIFEST).read_bytes())
    except (OSError, StoreError):
        return
    raise UsageError(f"{dest} is a folder of {other_catalog.noun}s: pull {catalog.noun}s to another folder")


def _check_free_space(dest: Path, blobs: list[BlobRef]) -> None:
    """Check that the disk has enough free space, before files are fetched."""
    copies = [(ref, blob_copy_path(dest, ref)) for ref in blobs]
    missing_bytes = sum(ref.size - min(get_partial_size(copy), ref.size) for ref, copy in copies if not copy.is_file())
    free_bytes = shutil.disk_usage(find_existing_ancestor(dest)).free
    if missing_bytes > free_bytes:
        raise ResourceError(
            f"the disk of {dest} is full: {missing_bytes:,} bytes have to be fetched and "
            f"{free_bytes:,} are free; free some space, or pull less of the snapshot"
        )


@contextmanager
def _preserve_stamps(dest: Path, blobs: list[BlobRef]) -> Iterator[None]:
    """Keep the stamps of copies valid while the block links or unlinks the copies."""
    folder_stamps = open_folder_stamps(dest)
    with ExitStack() as stack:
        for ref in blobs:
            stack.enter_context(folder_stamps.preserve(blob_copy_path(dest, ref), ref.id))
        yield


def _copy_signatures(catalog: Catalog[Any], identity: str, folder: Path) -> None:
    if trusted_keys := TrustedKeys.from_environment():
        PulledSignatures(folder).copy_trusted(Signatures(catalog.files), trusted_keys, catalog.manifest_path(identity))


def _publish_folder(
    manifest: Any,
    identity: str,
    files: dict[str, BlobRef],
    dest: Path,
    copy_signatures: Callable[[Path], None],
) -> None:
    """Build the snapshot's folder under a temporary name, and rename it."""
    staging = dest / f"{TEMPORARY_PREFIX}{secrets.token_hex(8)}"
    staging.mkdir(parents=True)
    try:
        (staging / MANIFEST).write_bytes(encode_json(manifest.to_json()))
        fsync(staging / MANIFEST)
        copy_signatures(staging)
        for path, ref in files.items():
            (staging / path).parent.mkdir(parents=True, exist_ok=True)
            os.link(blob_copy_path(dest, ref), staging / path)
        for folder in {staging, *(path for path in staging.rglob("*") if path.is_dir())}:
            fsync(folder)
        _rename_or_merge(staging, dest / identity)
        os.utime(dest / identity)  # `prune_folder` orders snapshots by this time
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _set_current_link(identity: str, dest: Path) -> None:
    """Replace the link `current` atomically."""
    fsync(dest)  # the folder must be on the disk before `current` names it
    link_path = dest / f"{TEMPORARY_PREFIX}{secrets.token_hex(8)}"
    link_path.symlink_to(identity)
    link_path.replace(dest / CURRENT)


def _rename_or_merge(staging: Path, final_folder: Path) -> None:
    """Rename a folder; if the target exists, replace its files one by one, since equal ids have
    equal files.

    An equal manifest is not replaced, because readers lock it: a lock on a replaced file would not
    keep `prune_folder` from deleting the snapshot.
    """
    try:
        staging.rename(final_folder)
    except OSError:  # another pull may have created the folder
        if not final_folder.is_dir():
            raise
    else:
        return
    for source_file in [path for path in staging.rglob("*") if path.is_file()]:
        target_file = final_folder / source_file.relative_to(staging)
        if source_file == staging / MANIFEST and _has_equal_bytes(target_file, source_file):
            continue
        target_file.parent.mkdir(parents=True, exist_ok=True)
        source_file.replace(target_file)


def _has_equal_bytes(target_file: Path, source_file: Path) -> bool:
    return target_file.is_file() and target_file.read_bytes() == source_file.read_bytes()
