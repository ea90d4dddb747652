"""Pull a snapshot into a local folder: only what is missing, verified, and put in place atomically.

```
DEST/.blobs/ab/abcdef…     every blob pulled so far, verified: what an interrupted pull resumes from
DEST/<snapshot id>/…       the snapshot's files under their own names (hard links into .blobs), and
manifest.json DEST/current               a symbolic link to the snapshot pulled last, swapped by one rename
```
A reader opens `DEST/current` once and keeps that folder, which never changes: it can never see a mix.
"""

import os
import secrets
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from rag_model.digest import digest_file
from rag_model.errors import StoreError
from rag_model.landing import TEMPORARY
from rag_model.store.blobs import BlobRef
from rag_model.store.files import json_bytes
from rag_model.store.manifest import Manifest
from rag_model.store.snapshot import CURRENT, MANIFEST
from rag_model.store.store import Store

_THREADS = 4  # each may hold 4 chunks of a large file


@dataclass(frozen=True, slots=True)
class PullReport:
    """What a pull did."""

    snapshot: str  # full id
    path: Path  # DEST/<snapshot id>
    fetched_bytes: int
    reused_bytes: int  # found in DEST and verified


def pull(store: Store, snapshot: str, dest: Path, *, select: Callable[[str], bool] = lambda path: True) -> PullReport:
    """Bring a snapshot (an id, a unique prefix or a ref) to `dest`; `select` says which of its files.

    A later pull of the same snapshot that selects more adds files to the same folder. An interrupted pull
    leaves `current` as it was and is resumed by the next. What lies in `dest` already is hashed again, and
    replaced if damaged.

    Raises:
        StoreError: a blob is missing or damaged, or `dest` is full or cannot be written; `current` did not
        move.
    """
    manifest = store.snapshots.get(store.snapshots.resolve(snapshot))
    files = {path: ref for path, ref in manifest.content.files.items() if select(path)}
    dest = dest.absolute()
    with ThreadPoolExecutor(_THREADS) as pool:
        blobs = list(dict.fromkeys(files.values()))
        fetched = list(pool.map(lambda ref: _obtain(store, ref, dest), blobs))
    try:
        _place(manifest, files, dest)
    except OSError as error:
        raise StoreError(f"cannot write {dest}: {error.strerror or error}") from error
    return PullReport(
        snapshot=manifest.id,
        path=dest / manifest.id,
        fetched_bytes=sum(ref.size for ref, new in zip(blobs, fetched, strict=True) if new),
        reused_bytes=sum(ref.size for ref, new in zip(blobs, fetched, strict=True) if not new),
    )


def _obtain(store: Store, ref: BlobRef, dest: Path) -> bool:
    """Have a sound copy of a blob in `dest`; True when it had to be fetched."""
    copy = _copy(dest, ref)
    if copy.is_file() and copy.stat().st_size == ref.size and digest_file(copy) == ref.id:
        return False
    store.blobs.fetch(ref, copy)
    return True


def _copy(dest: Path, ref: BlobRef) -> Path:
    return dest / f".{ref.path}"


def _place(manifest: Manifest, files: dict[str, BlobRef], dest: Path) -> None:
    """Build the snapshot's folder beside its place, move it there whole, then swap `current`."""
    building = dest / f"{TEMPORARY}{secrets.token_hex(8)}"
    building.mkdir(parents=True)
    try:
        (building / MANIFEST).write_bytes(json_bytes(manifest.to_json()))
        for path, ref in files.items():
            (building / path).parent.mkdir(parents=True, exist_ok=True)
            os.link(_copy(dest, ref), building / path)
        _move(building, dest / manifest.id)
        link = dest / f"{TEMPORARY}{secrets.token_hex(8)}"
        link.symlink_to(manifest.id)
        link.replace(dest / CURRENT)
    finally:
        shutil.rmtree(building, ignore_errors=True)


def _move(building: Path, place: Path) -> None:
    """Move a folder to `place`; where that exists (same id, so same files), add and repair file by file."""
    if not place.is_dir():
        building.rename(place)
        return
    for source in [path for path in building.rglob("*") if path.is_file()]:
        target = place / source.relative_to(building)
        target.parent.mkdir(parents=True, exist_ok=True)
        source.replace(target)
