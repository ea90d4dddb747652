"""The temporary store of `bookwheel index`, on a disk with enough free space.

If a run is killed, the store remains, and the next run continues with it. No other process uses the
store, so the temporary files of workers and the cache are in the same folder, which is deleted at
the end.
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
from rag_model.store.objects.cache import find_existing_ancestor
from rag_model.store.store import Store

_STORE_MARKER = "store.json"  # every store contains this file


@contextmanager
def open_work_store(out: Path, folder: Path | None, work_bytes: int, out_bytes: int) -> Iterator[Store]:
    """Open the store `OUT.work`, and delete it at the end of the block unless the block fails.

    Args:
        out: the file to build.
        folder: the folder of the store; None: the folder of `out`.
        work_bytes: disk space for the store.
        out_bytes: disk space for `out`.

    Raises:
        UsageError: the folder `OUT.work` contains other files, or another run uses it.
        ResourceError: the disk has less free space than the work needs.
    """
    work_folder = (folder or out.parent).resolve() / f"{out.name}.work"
    _check_disk(work_folder, work_bytes, out, out_bytes)
    if work_folder.exists() and not (
        work_folder.is_dir() and ((work_folder / _STORE_MARKER).exists() or not any(work_folder.iterdir()))
    ):
        raise UsageError(f"{work_folder} exists and is not a work folder: remove it, or name another with --work")
    temporary_folder = work_folder / "tmp"
    store = Store.open(str(work_folder), create=True)
    with lock_folder(work_folder):
        shutil.rmtree(temporary_folder, ignore_errors=True)  # a killed run left it behind
        temporary_folder.mkdir()
        with _set_environment({"TMPDIR": str(temporary_folder), "BOOKWHEEL_CACHE": str(work_folder / "cache")}):
            yield store
        shutil.rmtree(work_folder)


def _check_disk(work_folder: Path, work_bytes: int, out: Path, out_bytes: int) -> None:
    work_disk = find_existing_ancestor(work_folder)
    used_bytes = (
        sum(path.stat().st_size for path in work_folder.rglob("*") if path.is_file()) if work_folder.exists() else 0
    )
    is_other_disk = work_disk.stat().st_dev != find_existing_ancestor(out.resolve()).stat().st_dev
    for disk_path, needed_bytes in (
        (work_disk, work_bytes - used_bytes),
        (find_existing_ancestor(out.resolve()), out_bytes if is_other_disk else 0),
    ):
        check_disk(disk_path, needed_bytes, "the work", "name a folder on another disk with --work")


@contextmanager
def lock_folder(work_folder: Path) -> Iterator[None]:
    """Lock an existing folder; the kernel releases the lock even if this process is killed.

    Raises:
        UsageError: another run uses the folder.
    """
    with (work_folder / "lock").open("w") as lock_file:
        try:
            fcntl.flock(lock_file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise UsageError(
                f"another run works in {work_folder}: wait for it, or name another folder with --work"
            ) from error
        yield


@contextmanager
def _set_environment(environment: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables for this process and its children within the block."""
    previous_values, previous_folder = {name: os.environ.get(name) for name in environment}, tempfile.tempdir
    os.environ.update(environment)
    tempfile.tempdir = None  # so that tempfile reads its variables again
    try:
        yield
    finally:
        for name, value in previous_values.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})
        tempfile.tempdir = previous_folder
