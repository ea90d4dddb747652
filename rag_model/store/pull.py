"""Pull a snapshot, or a model, into a local folder: only what is missing, verified, and put in place atomically.

```
DEST/.blobs/ab/abcdef…         every blob pulled so far, verified; .abcdef….partial: one that was interrupted
DEST/.mapped/abcdef….arrow     passages as a service reads them: memory-mapped, derived once from their blob
DEST/.verified/…               stamps: which of these files nobody wrote to since they were verified
DEST/.lock                     held by every pull while it lasts, shared
DEST/<snapshot id>/…           the snapshot's files under their own names (hard links into .blobs), manifest.json
DEST/current                   a symbolic link to the snapshot pulled last, swapped by one rename
```
A reader opens `DEST/current` once and keeps that folder, which never changes: it can never see a mix. Earlier snapshots
stay until a pull is told how many to keep (`rag_model.store.prune`). Of the files that are new, vectors of passages
that the snapshot pulled last has too are not fetched again (`rag_model.store.overlap`). A model's folder looks the same
and is one that `load_rag` and `from_pretrained` open; snapshots and models are pulled to folders of their own.
"""

import os
import secrets
import shutil
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from threading import Lock
from typing import Any

from rag_model.digest import digest_file
from rag_model.errors import ResourceError, StoreError, UsageError
from rag_model.landing import TEMPORARY, sync
from rag_model.store.blobs import BlobRef
from rag_model.store.cache import existing
from rag_model.store.fetch import partial_bytes
from rag_model.store.files import json_bytes
from rag_model.store.kinds import kind_of
from rag_model.store.manifest import Manifest
from rag_model.store.mapped import write_mapped
from rag_model.store.overlap import Overlap
from rag_model.store.prune import check_keep, prune, pulling
from rag_model.store.pulled import CURRENT, MANIFEST, blob_copy, mapped_copy, mapped_identity, stamps_of
from rag_model.store.shelf import Shelf
from rag_model.store.snapshot import Snapshot
from rag_model.store.store import Store
from rag_model.store.tables import Vectors, convertible

_THREADS = 4  # blobs at once; each holds at most 4 chunks of 16 MiB


@dataclass(frozen=True, slots=True)
class PullReport:
    """What a pull did."""

    snapshot: str  # full id, of a snapshot or a model
    path: Path  # DEST/<id>
    fetched_bytes: int
    reused_bytes: int  # found in DEST and verified: files, and vectors within files
    pruned: tuple[str, ...] = ()  # ids of earlier ones that were deleted


def pull(
    store: Store,
    snapshot: str,
    dest: Path,
    *,
    select: Callable[[str], bool] = lambda path: True,
    mapped: bool = True,
    keep: int | None = None,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> PullReport:
    """Bring a snapshot (an id, a unique prefix or a ref), or a model (`model:` before it), to `dest`.

    `select` says which of its files; a later pull of the same snapshot that selects more adds files to the same folder.
    An interrupted pull leaves `current` as it was; the next goes on where it stopped, within a file too. What lies in
    `dest` already is hashed again, and replaced if damaged. `mapped` derives the memory-mapped copy of the passages,
    which takes about three times their room. `keep` deletes all but so many snapshots, those pulled last, but none that
    a reader has open; None keeps all. `on_progress` is called with the bytes that are there and all bytes.

    Raises:
        UsageError: `keep` is below 1, or models are asked for in a folder of snapshots, or the other way round.
        ResourceError: `dest` has not enough room; nothing was fetched.
        StoreError: a blob is missing or damaged, or `dest` is full or cannot be written; `current` did not
        move.
    """
    check_keep(keep)
    shelf, name = store.shelf(snapshot)
    manifest = shelf.get(shelf.resolve(name))
    _check_of_one_kind(store, shelf, dest)
    files = {path: ref for path, ref in manifest.content.files.items() if select(path)}
    dest, blobs = dest.absolute(), list(dict.fromkeys(files.values()))
    _check_room(dest, blobs)
    puller = _Puller(store, dest, _Watch(sum(ref.size for ref in blobs), on_progress))
    try:
        with pulling(dest) as lock:
            if shelf is store.models:
                fetched = puller.obtain(blobs)
            else:
                fetched = _obtain_snapshot(puller, manifest, files, mapped=mapped)
            _place(manifest, files, dest)
            pruned = prune(dest, keep, lock, shelf.parse) if keep else ()
    except OSError as error:
        raise StoreError(f"cannot write {dest}: {error.strerror or error}") from error
    return PullReport(
        snapshot=manifest.id,
        path=dest / manifest.id,
        fetched_bytes=fetched,
        reused_bytes=sum(ref.size for ref in blobs) - fetched,
        pruned=pruned,
    )


def _check_of_one_kind(store: Store, shelf: Shelf[Any], dest: Path) -> None:
    """Refuse to let `current` name now a snapshot and now a model: whoever follows it reads one of the two."""
    other = store.snapshots if shelf is store.models else store.models
    try:
        other.parse((dest / CURRENT / MANIFEST).read_bytes())
    except (OSError, StoreError):
        return
    raise UsageError(f"{dest} is a folder of {other.noun}s: pull {shelf.noun}s to a folder of their own")


def _check_room(dest: Path, blobs: list[BlobRef]) -> None:
    """Refuse to fill a disk, whose readers may need the rest, when it is plain that it will not do."""
    copies = [(ref, blob_copy(dest, ref)) for ref in blobs]
    lacking = sum(ref.size - min(partial_bytes(copy), ref.size) for ref, copy in copies if not copy.is_file())
    free = shutil.disk_usage(existing(dest)).free
    if lacking > free:
        raise ResourceError(
            f"the disk of {dest} is full: {lacking:,} bytes have to be fetched and {free:,} are free; make room, "
            "or pull less of the snapshot"
        )


class _Watch:
    """Counts bytes for all threads; when one fails, the others stop where they are: what they have is kept."""

    def __init__(self, total: int, tell: Callable[[int, int], None]) -> None:
        self._done, self._total, self._tell, self._lock = 0, total, tell, Lock()
        self._failure: BaseException | None = None

    def __call__(self, size: int) -> None:
        with self._lock:
            if self._failure is not None:
                raise self._failure  # whoever is asked first tells the cause
            self._done += size
            self._tell(min(self._done, self._total), self._total)

    @contextmanager
    def stopping(self) -> Iterator[None]:
        try:
            yield
        except BaseException as failure:
            self._failure = self._failure or failure
            raise


@dataclass(frozen=True, slots=True)
class _Puller:
    """Brings blobs to a folder."""

    store: Store
    dest: Path
    watch: _Watch

    def obtain(self, blobs: Iterable[BlobRef], one: Callable[[BlobRef], int] | None = None) -> int:
        """Have every blob here, the largest first, since they take longest; return the bytes that were fetched."""
        with ThreadPoolExecutor(_THREADS) as pool, self.watch.stopping():
            return sum(pool.map(one or self.whole, sorted(blobs, key=lambda ref: -ref.size)))

    def whole(self, ref: BlobRef) -> int:
        """Have one blob here."""
        return self._have(ref, self._fetch)

    def mapped(self, ref: BlobRef) -> int:
        """Have a passage file here, and the memory-mapped copy of it."""
        fetched = self.whole(ref)
        with self.watch.stopping():
            _derive(ref, self.dest)
        return fetched

    def patched(self, ref: BlobRef, path: str, overlap: Overlap, vectors: Vectors) -> int:
        """Have a blob here, by fetching what of it is neither here nor among an earlier snapshot's vectors."""

        def assemble(ref: BlobRef, copy: Path) -> int:
            patch = overlap.patch(path)
            if patch is not None and convertible(vectors.width, patch.table.width):
                chunks = partial(patch.chunks, vectors)
                if self.store.blobs.assemble(ref, copy, chunks, self.watch):
                    return patch.fetched_bytes
            return self._fetch(ref, copy)

        return self._have(ref, assemble)

    def _fetch(self, ref: BlobRef, copy: Path) -> int:
        self.store.blobs.fetch(ref, copy, self.watch)
        return ref.size

    def _have(self, ref: BlobRef, get: Callable[[BlobRef, Path], int]) -> int:
        """Have a sound copy of a blob; return the bytes that had to be fetched."""
        with self.watch.stopping():
            copy, fetched = blob_copy(self.dest, ref), 0
            if copy.is_file() and copy.stat().st_size == ref.size and digest_file(copy) == ref.id:
                self.watch(ref.size)
            else:
                fetched = get(ref, copy)
            stamps_of(self.dest).put(copy, ref.id)
        return fetched


def _obtain_snapshot(puller: _Puller, manifest: Manifest, files: dict[str, BlobRef], *, mapped: bool) -> int:
    """Have a snapshot's files here; return the bytes that were fetched.

    After an earlier snapshot, passages come first: they tell which vectors are here.
    """
    paths = {ref: path for path, ref in files.items()}
    passages = {ref for ref, path in paths.items() if kind_of(path) == "passages"}

    def obtain(ref: BlobRef) -> int:
        return puller.mapped(ref) if mapped and ref in passages else puller.whole(ref)

    with _pulled_before(puller.dest) as before:
        overlap = before and Overlap.of(before, _arriving(manifest, puller.dest))
        vectors = Vectors.of(before) if before and overlap else None
        if not (overlap and vectors):
            return puller.obtain(paths, obtain)
        fetched = puller.obtain(passages, obtain)
        others = paths.keys() - passages
        return fetched + puller.obtain(others, lambda ref: puller.patched(ref, paths[ref], overlap, vectors))


@contextmanager
def _pulled_before(dest: Path) -> Iterator[Snapshot | None]:
    """Hold the snapshot that was pulled last, if there is one."""
    with ExitStack() as stack:
        before = None
        with suppress(StoreError):
            before = stack.enter_context(Snapshot.from_folder(dest))
        yield before


def _arriving(manifest: Manifest, dest: Path) -> Snapshot:
    """Open a snapshot whose files are only just being pulled; those that are not there yet cannot be read."""

    def path(file: str) -> Path:
        return blob_copy(dest, manifest.content.files[file])

    return Snapshot(manifest, path, path, dest)


def _derive(ref: BlobRef, dest: Path) -> None:
    copy, identity = mapped_copy(dest, ref), mapped_identity(ref)
    if not (copy.is_file() and stamps_of(dest).holds(copy, identity)):
        write_mapped(blob_copy(dest, ref), copy)
        stamps_of(dest).put(copy, identity)


def _place(manifest: Any, files: dict[str, BlobRef], dest: Path) -> None:
    """Build the snapshot's folder beside its place, move it there whole, then swap `current`."""
    building = dest / f"{TEMPORARY}{secrets.token_hex(8)}"
    building.mkdir(parents=True)
    try:
        (building / MANIFEST).write_bytes(json_bytes(manifest.to_json()))
        sync(building / MANIFEST)
        for path, ref in files.items():
            (building / path).parent.mkdir(parents=True, exist_ok=True)
            os.link(blob_copy(dest, ref), building / path)
        for folder in {building, *(path for path in building.rglob("*") if path.is_dir())}:
            sync(folder)
        _move(building, dest / manifest.id)
        os.utime(dest / manifest.id)  # by its time it is known which were pulled last
        sync(dest)  # what `current` will name is on the disk before it is named
        link = dest / f"{TEMPORARY}{secrets.token_hex(8)}"
        link.symlink_to(manifest.id)
        link.replace(dest / CURRENT)
    finally:
        shutil.rmtree(building, ignore_errors=True)


def _move(building: Path, place: Path) -> None:
    """Move a folder to `place`; where that exists (same id, so same files), add and repair file by file."""
    try:
        building.rename(place)
    except OSError:  # it exists, perhaps only now: another pull was as quick
        if not place.is_dir():
            raise
    else:
        return
    for source in [path for path in building.rglob("*") if path.is_file()]:
        target = place / source.relative_to(building)
        target.parent.mkdir(parents=True, exist_ok=True)
        source.replace(target)
