"""Pull a snapshot, or a model, into a local folder: only what is missing, verified, and put in place atomically.

```
DEST/.blobs/ab/abcdef…         every blob pulled so far, verified; .abcdef….partial: one that was interrupted
DEST/.mapped/abcdef….arrow     passages as a service reads them: memory-mapped, derived once from their blob
DEST/.verified/…               stamps: which of these files are unchanged since they were verified
DEST/.named/…                  notes: which snapshot each name of a store meant when it was last pulled
DEST/.lock                     a shared lock that every pull holds while it runs
DEST/<snapshot id>/…           the snapshot's files under their own names (hard links into .blobs), manifest.json
DEST/current                   a symbolic link to the snapshot pulled last, swapped by one rename
```
A reader opens `DEST/current` once and keeps that folder, which never changes: it never sees a mix of two snapshots.
Earlier snapshots stay until a pull with `keep` prunes them (`store.pulling.prune`). In new files, the vectors of
passages that the snapshot pulled last has too are not fetched again (`store.pulling.overlap`). A model's folder has the
same layout, and `load_rag` and `from_pretrained` open it. Snapshots and models are pulled to different folders.
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

from rag_model.errors import ResourceError, StoreError, UsageError
from rag_model.landing import TEMPORARY, sync
from rag_model.store.objects.blobs import BlobRef
from rag_model.store.objects.cache import existing
from rag_model.store.objects.fetch import partial_bytes
from rag_model.store.objects.files import json_bytes
from rag_model.store.pulling.obtain import Derive, Puller, Watch, nothing, obtain_snapshot
from rag_model.store.pulling.prune import check_keep, prune, pulled_of, pulling
from rag_model.store.pulling.pulled import CURRENT, MANIFEST, blob_copy, remember, stamps_of
from rag_model.store.store import Store
from rag_model.store.versions.shelf import Shelf
from rag_model.store.versions.signatures import Carried, Signatures, Trust


@dataclass(frozen=True, slots=True)
class PullReport:
    """What a pull did."""

    snapshot: str  # full id, of a snapshot or a model
    path: Path  # DEST/<id>
    fetched_bytes: int
    reused_bytes: int  # found in DEST and verified: files, and vectors within files
    pruned: tuple[str, ...] = ()  # ids of earlier ones that were deleted
    taken_down: tuple[str, ...] = ()  # ids of earlier ones that were taken down in the store and lie there still


def pull(
    store: Store,
    snapshot: str,
    dest: Path,
    *,
    select: Callable[[str], bool] = lambda path: True,
    mapped: bool = True,
    keep: int | None = None,
    accept: Callable[[Path], None] = lambda folder: None,
    derive: Derive = nothing,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> PullReport:
    """Materialise a snapshot (an id, a unique prefix or a ref), or a model (`model:` before it), in `dest`.

    `select` chooses among its files; a later pull of the same snapshot that selects more adds files to the same folder.
    An interrupted pull leaves `current` unchanged; the next one continues where it stopped, within a file too. Files in
    `dest` are hashed again, and replaced if damaged; vectors of passages that the snapshot pulled last has too are
    copied from it. `mapped` also writes the memory-mapped copy of the passages, which is about three times as large.
    `keep` is the number of snapshots, those pulled last, that are not deleted; a snapshot that a reader has open is
    never deleted; None keeps all. With `keep`, snapshots that were taken down are all deleted; without, they are told.
    `derive` makes index files of what is on this disk (`retrieve.derived`); what it makes is used if it has the digest
    of the published file. `accept` is called with the complete folder of the snapshot, before `current` names it: an
    error of it ends the pull. `on_progress` is called with the bytes that are there and the bytes in total.

    Raises:
        RefusedError: a trust file is given, and no key of it signed the snapshot or the ref's move.
        UsageError: `keep` is below 1, or a model is pulled to a folder of snapshots, or the other way round.
        ResourceError: the disk of `dest` has too little free space; nothing was fetched.
        StoreError: a blob is missing or damaged, or `dest` is full or cannot be written; `current` is unchanged.
    """
    check_keep(keep)
    shelf, name = store.shelf(snapshot)
    if shelf is store.evaluations:
        raise UsageError(f"{snapshot} is an evaluation, which is not pulled: export it, which writes its files")
    identity = shelf.trusted(name)
    manifest = shelf.get(identity)
    _check_of_one_kind(store, shelf, dest)
    files = {path: ref for path, ref in manifest.content.files.items() if select(path)}
    dest, blobs = dest.absolute(), list(dict.fromkeys(files.values()))
    _check_room(dest, blobs)
    pruned: tuple[str, ...] = ()
    puller = Puller(store, dest, Watch(sum(ref.size for ref in blobs), on_progress))
    try:
        with pulling(dest) as lock:
            if shelf is store.models:
                fetched = puller.obtain(blobs)
            else:
                fetched = obtain_snapshot(puller, manifest, files, mapped=mapped, derive=derive)
            with _linking(dest, blobs):
                _place(manifest, identity, files, dest, partial(_keep_signatures, shelf, identity))
            accept(dest / identity)
            remember(dest, store.url, snapshot, identity)
            _make_current(identity, dest)
            gone = store.takedowns.replaced() if shelf is store.snapshots else frozenset()
            if keep:
                with _linking(dest, blobs):
                    pruned = prune(dest, keep, lock, shelf.parse, gone)
    except OSError as error:
        raise StoreError(f"cannot write {dest}: {error.strerror or error}") from error
    return PullReport(
        snapshot=identity,
        path=dest / identity,
        fetched_bytes=fetched,
        reused_bytes=sum(ref.size for ref in blobs) - fetched,
        pruned=pruned,
        taken_down=pulled_of(dest, gone),
    )


def _check_of_one_kind(store: Store, shelf: Shelf[Any], dest: Path) -> None:
    """Check that a folder holds either snapshots or models: a reader of `current` expects one of the two."""
    other = store.snapshots if shelf is store.models else store.models
    try:
        other.parse((dest / CURRENT / MANIFEST).read_bytes())
    except (OSError, StoreError):
        return
    raise UsageError(f"{dest} is a folder of {other.noun}s: pull {shelf.noun}s to a folder of their own")


def _check_room(dest: Path, blobs: list[BlobRef]) -> None:
    """Check that the free space is enough, before the disk is filled."""
    copies = [(ref, blob_copy(dest, ref)) for ref in blobs]
    lacking = sum(ref.size - min(partial_bytes(copy), ref.size) for ref, copy in copies if not copy.is_file())
    free = shutil.disk_usage(existing(dest)).free
    if lacking > free:
        raise ResourceError(
            f"the disk of {dest} is full: {lacking:,} bytes have to be fetched and {free:,} are free; make room, "
            "or pull less of the snapshot"
        )


@contextmanager
def _linking(dest: Path, blobs: list[BlobRef]) -> Iterator[None]:
    """Keep the stamps of copies while the block links or unlinks them, which changes their times."""
    stamps = stamps_of(dest)
    with ExitStack() as linked:
        for ref in blobs:
            linked.enter_context(stamps.linked(blob_copy(dest, ref), ref.id))
        yield


def _keep_signatures(shelf: Shelf[Any], identity: str, folder: Path) -> None:
    if trust := Trust.given():
        Carried(folder).keep(Signatures(shelf.files), trust, shelf.path(identity))


def _place(manifest: Any, identity: str, files: dict[str, BlobRef], dest: Path, sign: Callable[[Path], None]) -> None:
    """Build the snapshot's folder under a temporary name, and rename it to its place."""
    building = dest / f"{TEMPORARY}{secrets.token_hex(8)}"
    building.mkdir(parents=True)
    try:
        (building / MANIFEST).write_bytes(json_bytes(manifest.to_json()))
        sync(building / MANIFEST)
        sign(building)
        for path, ref in files.items():
            (building / path).parent.mkdir(parents=True, exist_ok=True)
            os.link(blob_copy(dest, ref), building / path)
        for folder in {building, *(path for path in building.rglob("*") if path.is_dir())}:
            sync(folder)
        _move(building, dest / identity)
        os.utime(dest / identity)  # `prune` orders snapshots by this time
    finally:
        shutil.rmtree(building, ignore_errors=True)


def _make_current(identity: str, dest: Path) -> None:
    """Swap `current`."""
    sync(dest)  # the folder must be on the disk before `current` names it
    link = dest / f"{TEMPORARY}{secrets.token_hex(8)}"
    link.symlink_to(identity)
    link.replace(dest / CURRENT)


def _move(building: Path, place: Path) -> None:
    """Rename a folder to `place`; if that exists (same id, so same files), add and repair file by file."""
    try:
        building.rename(place)
    except OSError:  # it exists: perhaps another pull has just made it
        if not place.is_dir():
            raise
    else:
        return
    for source in [path for path in building.rglob("*") if path.is_file()]:
        target = place / source.relative_to(building)
        target.parent.mkdir(parents=True, exist_ok=True)
        source.replace(target)
