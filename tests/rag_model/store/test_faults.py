"""Full disks, missing permissions and unsuitable servers cause a clear error and no partial result."""

import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import fsspec
import pytest

from rag_model.atomic_write import TEMPORARY_PREFIX
from rag_model.errors import RefConflictError, StoreError, UsageError
from rag_model.store import Snapshot, Store
from rag_model.store.objects.files import PROBE_FOLDERS, create_exclusive
from rag_model.store.objects.s3 import S3
from rag_model.store.pulling.pull import pull
from rag_model.store.upkeep.verify import verify_version
from tests.fixtures.crashing_store import fill_disk_at
from tests.fixtures.store_files import build_parts, publish_parts

MAX_WRITES = 40


def list_temporary_files(folder: Path) -> list[Path]:
    return list(folder.rglob(f"{TEMPORARY_PREFIX}*"))


def iter_disk_full_errors(attempt: Callable[[], object]) -> Iterator[StoreError]:
    """Yield the error of an attempt with a full disk at the first write, then at the second, until it succeeds."""
    for write in range(1, MAX_WRITES):
        try:
            with fill_disk_at(write):
                attempt()
        except StoreError as error:
            yield error
        else:
            assert write > 1, "the attempt writes nothing"
            return
    pytest.fail(f"more than {MAX_WRITES} writes")


def test_full_disk_publishes_no_part(store: Store, tmp_path: Path) -> None:
    def attempt() -> None:
        store.refs.move("latest", publish_parts(store), 0)

    build_parts()  # before the disk is full
    for error in iter_disk_full_errors(attempt):
        assert str(error).startswith("the disk is full: cannot write file://")
        assert list_temporary_files(tmp_path) == []
        move = store.refs.find_current("latest")
        if move is not None:  # the move was written; only the sync of its folder failed
            assert verify_version(store, move.snapshot) == []
            return


def test_full_disk_keeps_the_old_version_readable(store: Store, tmp_path: Path) -> None:
    first, second = publish_parts(store), publish_parts(store, words=50)
    dest = tmp_path / "dest"
    pull(store, first, dest, select=lambda path: path.startswith("passages/"))
    for error in iter_disk_full_errors(lambda: pull(store, second, dest)):
        assert "disk is full" in str(error) or "No space left" in str(error)
        assert list_temporary_files(dest) == []
        with Snapshot.from_folder(dest) as snapshot:
            assert snapshot.id == first
            assert snapshot.passages([2200])[0].text == "text 2200"
    assert Snapshot.from_folder(dest).id == second


def test_missing_file_is_not_stored(store: Store, tmp_path: Path) -> None:
    with pytest.raises(StoreError, match=r"cannot read .*absent to store it"):
        store.blobs.put_file(tmp_path / "absent")


def test_newer_store_format_is_refused(store: Store) -> None:
    store.files.write("store.json", b'{"format": 2}')
    with pytest.raises(StoreError, match=r"format 2.*upgrade"):
        Store.open(store.url)


def test_newer_move_format_is_refused(store: Store) -> None:
    store.refs.move("latest", "0" * 64, 0)
    store.files.write("refs/latest/00000002.json", b'{"format": 3, "target": "elsewhere"}')
    with pytest.raises(StoreError, match=r"format 3.*upgrade"):
        store.refs.find_current("latest")


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


@pytest.mark.parametrize("folder", ["file", "file/store"])
def test_store_is_not_created_in_a_file(folder: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("words")
    with pytest.raises(StoreError, match=rf"cannot write file://.*/{folder}/store\.json: .*Not a directory"):
        Store.open(str(tmp_path / folder), create=True)
    assert (tmp_path / "file").read_text() == "words"


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("", "URL is empty"),
        (" ", "URL is empty"),
        ("nosuch://bucket", r"cannot open a store at nosuch://bucket \(.+\): give a folder, "),
        ("gs://", "gs:// names no bucket: give gs://BUCKET/FOLDER$"),
        ("gs:///library", "gs:///library names no bucket: give gs://BUCKET/FOLDER$"),
        ("s3://", "s3:// names no bucket: give s3://BUCKET/FOLDER$"),
        ("az:///library", "az:///library names no bucket: give az://BUCKET/FOLDER$"),
        ("gs:/bucket/store", "^the store's URL gs:/bucket/store lacks a slash: give gs://…$"),
        ("s3:bucket", "^the store's URL s3:bucket lacks a slash: give s3://…$"),
        ("hf:/datasets/a/b", "^the store's URL hf:/datasets/a/b lacks a slash: give hf://…$"),
        ("http:/host/store", "^the store's URL http:/host/store lacks a slash: give http://…$"),
    ],
)
def test_invalid_url_is_refused(url: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match=message):
        Store.open(url, create=True)
    assert not list(tmp_path.iterdir())
