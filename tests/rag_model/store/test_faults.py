"""Full disks, missing rights, wrong servers: one clear sentence each, and nothing half done."""

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

MOST_WRITES = 40


@contextmanager
def disk_full_at(write: int) -> Iterator[None]:
    """From the given fsync on, the disk is full."""
    calls, real = 0, os.fsync

    def fsync(descriptor: int) -> None:
        nonlocal calls
        calls += 1
        if calls >= write:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(descriptor)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", fsync)
        yield


def leftovers(folder: Path) -> list[Path]:
    return list(folder.rglob(f"{TEMPORARY_PREFIX}*"))


def failures(attempt: Callable[[], object]) -> Iterator[StoreError]:
    """Make the disk full at the first write, then at the second, …, until the attempt succeeds."""
    for write in range(1, MOST_WRITES):
        try:
            with disk_full_at(write):
                attempt()
        except StoreError as error:
            yield error
        else:
            return
    pytest.fail(f"more than {MOST_WRITES} writes")


def test_a_full_disk_publishes_nothing_half(local_store: Store, publish: Callable[..., str], tmp_path: Path) -> None:
    def attempt() -> None:
        local_store.refs.move("latest", publish(local_store), 0)

    seen = 0
    for error in failures(attempt):
        seen += 1
        assert str(error).startswith("the disk is full: cannot write file://")
        assert leftovers(tmp_path) == []
        move = local_store.refs.find_current("latest")
        if move is not None:  # it was made, and only its folder could not be synced
            assert verify_version(local_store, move.snapshot) == []
            return
    assert seen >= 1


def test_a_full_disk_leaves_the_old_version_readable(
    local_store: Store, publish: Callable[..., str], tmp_path: Path
) -> None:
    old, new = publish(local_store), publish(local_store, words=50)
    dest = tmp_path / "dest"
    pull(local_store, old, dest, select=lambda path: path.startswith("passages/"))
    seen = 0
    for error in failures(lambda: pull(local_store, new, dest)):
        seen += 1
        assert "disk is full" in str(error) or "No space left" in str(error)
        assert leftovers(dest) == []
        with Snapshot.from_folder(dest) as snapshot:
            assert snapshot.id == old
            assert snapshot.passages([2200])[0].text == "text 2200"
    assert seen >= 1
    assert Snapshot.from_folder(dest).id == new


def test_a_store_where_nothing_can_be_written_says_so(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(StoreError, match=r"cannot write file://.*/file/store/store.json"):
        Store.open(str(tmp_path / "file" / "store"), create=True)


def test_a_file_that_is_gone_is_not_stored(local_store: Store, tmp_path: Path) -> None:
    with pytest.raises(StoreError, match=r"cannot read .*absent to store it"):
        local_store.blobs.put_file(tmp_path / "absent")


def test_a_newer_store_is_refused(local_store: Store) -> None:
    local_store.files.write("store.json", b'{"format": 2}')
    with pytest.raises(StoreError, match=r"format 2.*upgrade"):
        Store.open(local_store.url)


def test_a_newer_move_of_a_ref_is_refused(local_store: Store) -> None:
    local_store.refs.move("latest", "0" * 64, 0)
    local_store.files.write("refs/latest/00000002.json", b'{"format": 3, "target": "elsewhere"}')
    with pytest.raises(StoreError, match=r"format 3.*upgrade"):
        local_store.refs.find_current("latest")


def test_an_unknown_protocol_is_refused() -> None:
    with pytest.raises(UsageError, match=r"cannot open a store at nosuch://bucket \(.+\): give a folder, "):
        Store.open("nosuch://bucket")


@pytest.mark.parametrize("url", ["gs:/bucket/store", "s3:bucket", "hf:/datasets/a/b", "http:/host/store"])
def test_a_url_that_lacks_a_slash_is_no_folder(url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    scheme = url.partition(":")[0]
    with pytest.raises(UsageError, match=rf"^the store's URL {url} lacks a slash: give {scheme}://…$"):
        Store.open(url, create=True)
    assert not list(tmp_path.iterdir())


def test_without_s3fs_the_install_line_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "s3fs", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'bookwheel\[s3\]'"):
        Store.open("s3://bucket/store")


def test_the_core_is_enough_to_import_the_store() -> None:
    heavy = "torch transformers s3fs botocore pydantic prefect apache_beam lxml moto"
    used = "rag_model.store.pulling.pull, rag_model.store.pulling.export"
    code = f"import sys, {used}; print(*[name for name in '{heavy}'.split() if name in sys.modules])"
    loaded = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert loaded.stdout.split() == []


@pytest.mark.parametrize("conditions", ["ignore", "refuse", "race", "race memo"])
def test_a_bucket_without_conditional_writes_is_not_published_to(
    conditions: str,
    moto_server: Callable[[str], str],
    s3_bucket: Callable[[str], AbstractContextManager[str]],
) -> None:
    with s3_bucket(moto_server("honour")) as url:
        Store.open(url, create=True)
    with s3_bucket(moto_server(conditions)):
        store = Store.open(url)
        with pytest.raises(StoreError, match="conditional writes"):
            store.refs.move("latest", "0" * 64, 0)
        assert store.refs.list_numbers("latest") == []
        assert [store.files.list_names(folder) for folder in PROBE_FOLDERS] == [[], []]


def test_a_writer_that_meets_its_own_first_attempt_has_won(
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


def test_a_missing_bucket_says_so(s3_store_url: str) -> None:
    with pytest.raises(StoreError, match=r"bucket does not exist|no bookwheel store"):
        Store.open("s3://bookwheel-nowhere/store")


def test_wrong_credentials_say_so(s3_store_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong")
    S3.clear_instance_cache()
    with pytest.raises(StoreError, match=r"not allowed to read s3://.* credentials"):
        Store.open(s3_store_url)


@pytest.mark.parametrize("url", ["", " "])
def test_an_empty_url_is_not_the_current_folder(url: str) -> None:
    with pytest.raises(UsageError, match="URL is empty"):
        Store.open(url, create=True)


@pytest.mark.parametrize("url", ["gs://", "gs:///library", "s3://", "az:///library"])
def test_a_cloud_s_url_names_a_bucket(url: str) -> None:
    with pytest.raises(UsageError, match=f"{url} names no bucket: give {url[:2]}://BUCKET/FOLDER$"):
        Store.open(url)


def test_a_file_is_no_place_for_a_store(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("words")
    with pytest.raises(StoreError, match=r"give a folder|Not a directory"):
        Store.open(str(tmp_path / "file"), create=True)
    assert (tmp_path / "file").read_text() == "words"
