"""The temporary store of `bookwheel index`, on a disk with enough free space.

A run that was killed leaves it, and the next run continues with it. No other process uses it, so
temporary files of workers and of the cache are in it as well, and all of it is deleted at the end.
"""

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from rag_model.errors import UsageError
from rag_model.process import check_disk
from rag_model.store.objects.cache import nearest_existing
from rag_model.store.store import Store

_STORE_MARKER = "store.json"  # the first file of every store


@contextmanager
def open_work_store(out: Path, folder: Path | None, work_bytes: int, out_bytes: int) -> Iterator[Store]:
    """Open the store `OUT.work`, which is deleted at the end of the block and kept if it fails.

    Args:
        out: the file to build.
        folder: the folder of the store; None: that of `out`.
        work_bytes: disk space for the store.
        out_bytes: disk space for `out`.

    Raises:
        UsageError: the folder contains something else, or another run uses it.
        ResourceError: there is too little disk.
    """
    work = (folder or out.parent).resolve() / f"{out.name}.work"
    _check_disk(work, work_bytes, out, out_bytes)
    if work.exists() and not (work.is_dir() and ((work / _STORE_MARKER).exists() or not any(work.iterdir()))):
        raise UsageError(f"{work} exists and is not a work folder: remove it, or name another with --work")
    temporary = work / "tmp"
    store = Store.open(str(work), create=True)
    with lock_folder(work):
        shutil.rmtree(temporary, ignore_errors=True)  # left by a run that was killed
        temporary.mkdir()
        with _set_environment({"TMPDIR": str(temporary), "BOOKWHEEL_CACHE": str(work / "cache")}):
            yield store
        shutil.rmtree(work)


def _check_disk(work: Path, work_bytes: int, out: Path, out_bytes: int) -> None:
    work_disk = nearest_existing(work)
    used_bytes = sum(path.stat().st_size for path in work.rglob("*") if path.is_file()) if work.exists() else 0
    is_other_disk = work_disk.stat().st_dev != nearest_existing(out.resolve()).stat().st_dev
    for disk_path, needed in (
        (work_disk, work_bytes - used_bytes),
        (nearest_existing(out.resolve()), out_bytes if is_other_disk else 0),
    ):
        check_disk(disk_path, needed, "the work", "name a folder on another disk with --work")


@contextmanager
def lock_folder(work: Path) -> Iterator[None]:
    """Lock an existing folder; the kernel releases the lock when this process ends by any means.

    Raises:
        UsageError: another run uses it.
    """
    with (work / "lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise UsageError(f"another run works in {work}: wait for it, or name another folder with --work") from error
        yield


@contextmanager
def _set_environment(values: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables for this process and its children within the block."""
    environment, folder = {name: os.environ.get(name) for name in values}, tempfile.tempdir
    os.environ.update(values)
    tempfile.tempdir = None  # tempfile then looks it up again
    try:
        yield
    finally:
        for name, value in environment.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})
        tempfile.tempdir = folder
