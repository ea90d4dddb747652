"""Full disks, missing permissions and unsuitable servers cause a clear error and no partial result."""

import errno
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import fsspec
import pytest

from rag_model.atomic_write import TEMPORARY_PREFIX
from rag_model.errors import MissingExtraError, RefConflictError, StoreError, UsageError
from rag_model.store import Snapshot, Store
from rag_model.store.objects.files import PROBE_FOLDERS, create_exclusive
from rag_model.store.objects.s3 import S3
from rag_model.store.pulling.pull import pull
from rag_model.store.upkeep.verify import verify_version

MAX_WRITES = 40


@contextmanager
def disk_full_at(write: int) -> Iterator[None]:
    """Let the given fsync and all later ones fail because the disk is full."""
    calls, flush = 0, os.fsync

    def fsync(descriptor: int) -> None:
        nonlocal calls
        calls += 1
        if calls >= write:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        flush(descriptor)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", fsync)
        yield


def list_temporary_files(folder: Path) -> list[Path]:
    return list(folder.rglob(f"{TEMPORARY_PREFIX}*"))


def iter_disk_full_errors(attempt: Callable[[], object]) -> Iterator[StoreError]:
    """Yield the error of an attempt with a full disk at the first write, then at the second, until it succeeds."""
    for write in range(1, MAX_WRITES):
        try:
            with disk_full_at(write):
                attempt()
        except StoreError as error:
            yield error
        else:
            return
    pytest.fail(f"more than {MAX_WRITES} writes")


def test_full_disk_publishes_no_part(local_store: Store, publish: Callable[..., str], tmp_path: Path) -> None:
    def attempt() -> None:
        local_store.refs.move("latest", publish(local_store), 0)

    errors = 0
    for error in iter_disk_full_errors(attempt):
        errors += 1
        assert str(error).startswith("the disk is full: cannot write file://")
        assert list_temporary_files(tmp_path) == []
        move = local_store.refs.find_current("latest")
        if move is not None:  # the move was written; only the sync of its folder failed
            assert verify_version(local_store, move.snapshot) == []
            return
    assert errors >= 1


def test_full_disk_keeps_the_old_version_readable(
    local_store: Store, publish: Callable[..., str], tmp_path: Path
) -> None:
    first, second = publish(local_store), publish(local_store, words=50)
    dest = tmp_path / "dest"
    pull(local_store, first, dest, select=lambda path: path.startswith("passages/"))
    errors = 0
    for error in iter_disk_full_errors(lambda: pull(local_store, second, dest)):
        errors += 1
        assert "disk is full" in str(error) or "No space left" in str(error)
        assert list_temporary_files(dest) == []
        with Snapshot.from_folder(dest) as snapshot:
            assert snapshot.id == first
            assert snapshot.passages([2200])[0].text == "text 2200"
    assert errors >= 1
    assert Snapshot.from_folder(dest).id == second


def test_folder_without_write_access_is_reported(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(StoreError, match=r"cannot write file://.*/file/store/store.json"):
        Store.open(str(tmp_path / "file" / "store"), create=True)


def test_missing_file_is_not_stored(local_store: Store, tmp_path: Path) -> None:
    with pytest.raises(StoreError, match=r"cannot read .*absent to store it"):
        local_store.blobs.put_file(tmp_path / "absent")


def test_newer_store_format_is_refused(local_store: Store) -> None:
    local_store.files.write("store.json", b'{"format": 2}')
    with pytest.raises(StoreError, match=r"format 2.*upgrade"):
        Store.open(local_store.url)


def test_newer_move_format_is_refused(local_store: Store) -> None:
    local_store.refs.move("latest", "0" * 64, 0)
    local_store.files.write("refs/latest/00000002.json", b'{"format": 3, "target": "elsewhere"}')
    with pytest.raises(StoreError, match=r"format 3.*upgrade"):
        local_store.refs.find_current("latest")


def test_unknown_protocol_is_refused() -> None:
    with pytest.raises(UsageError, match=r"cannot open a store at nosuch://bucket \(.+\): give a folder, "):
        Store.open("nosuch://bucket")


@pytest.mark.parametrize("url", ["gs:/bucket/store", "s3:bucket", "hf:/datasets/a/b", "http:/host/store"])
def test_url_that_lacks_a_slash_is_refused(url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    scheme = url.partition(":")[0]
    with pytest.raises(UsageError, match=rf"^the store's URL {url} lacks a slash: give {scheme}://…$"):
        Store.open(url, create=True)
    assert not list(tmp_path.iterdir())


def test_missing_s3fs_names_the_extra_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "s3fs", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'bookwheel\[s3\]'"):
        Store.open("s3://bucket/store")


def test_store_is_imported_without_optional_packages() -> None:
    heavy = "torch transformers s3fs botocore pydantic prefect apache_beam lxml moto"
    modules = "rag_model.store.pulling.pull, rag_model.store.pulling.export"
    code = f"import sys, {modules}; print(*[name for name in '{heavy}'.split() if name in sys.modules])"
    loaded = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert loaded.stdout.split() == []


@pytest.mark.parametrize("conditions", ["ignore", "refuse", "race", "race memo"])
def test_publish_refuses_bucket_without_conditional_writes(
    conditions: str, moto_server: Callable[[str], str], s3_bucket: Callable[[str], AbstractContextManager[str]]
) -> None:
    with s3_bucket(moto_server("honour")) as url:
        Store.open(url, create=True)
    with s3_bucket(moto_server(conditions)):
        store = Store.open(url)
        with pytest.raises(StoreError, match="conditional writes"):
            store.refs.move("latest", "0" * 64, 0)
        assert store.refs.list_numbers("latest") == []
        assert [store.files.list_names(folder) for folder in PROBE_FOLDERS] == [[], []]


def test_repeated_request_recognises_its_own_file(
    moto_server: Callable[[str], str], s3_bucket: Callable[[str], AbstractContextManager[str]]
) -> None:
    with s3_bucket(moto_server("repeat")) as url:
        store = Store.open(url, create=True)
        fs, root = fsspec.url_to_fs(url)
        assert create_exclusive(fs, f"{root}/raw", b"data") is False
        assert store.refs.move("latest", "0" * 64, 0) == store.refs.find_current("latest")
        with pytest.raises(RefConflictError):
            store.refs.move("latest", "1" * 64, 0)
        assert store.memo.write_record("chunk", "k", {}, {"by": 1}).stats == {"by": 1}


def test_missing_bucket_is_reported(s3_store_url: str) -> None:
    with pytest.raises(StoreError, match=r"bucket does not exist|no bookwheel store"):
        Store.open("s3://bookwheel-nowhere/store")


def test_wrong_credentials_are_reported(s3_store_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong")
    S3.clear_instance_cache()
    with pytest.raises(StoreError, match=r"not allowed to read s3://.* credentials"):
        Store.open(s3_store_url)


@pytest.mark.parametrize("url", ["", " "])
def test_empty_url_is_refused(url: str) -> None:
    with pytest.raises(UsageError, match="URL is empty"):
        Store.open(url, create=True)


@pytest.mark.parametrize("url", ["gs://", "gs:///library", "s3://", "az:///library"])
def test_cloud_url_must_name_a_bucket(url: str) -> None:
    with pytest.raises(UsageError, match=f"{url} names no bucket: give {url[:2]}://BUCKET/FOLDER$"):
        Store.open(url)


def test_store_is_not_created_in_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("words")
    with pytest.raises(StoreError, match=r"give a folder|Not a directory"):
        Store.open(str(tmp_path / "file"), create=True)
    assert (tmp_path / "file").read_text() == "words"
