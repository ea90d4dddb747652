"""A stamp saves hashing a file again, and is not valid for a changed file."""

import os
from pathlib import Path

import pytest

from rag_model.digest import digest_bytes
from rag_model.errors import InputError
from rag_model.store import Store
from rag_model.store.objects.cache import Stamps, open_cache_stamps
from rag_model.store.pulling.folder import CURRENT, open_folder_stamps
from rag_model.store.pulling.pull import pull
from tests.fixtures.store_files import publish_blobs

ID = digest_bytes(b"sound")
OTHER = digest_bytes(b"other")


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (tmp_path / "file").write_bytes(b"sound")
    return tmp_path / "file"


@pytest.mark.parametrize("in_same_process", [True, False], ids=["same process", "another"])
def test_changed_file_is_hashed_again(file: Path, tmp_path: Path, in_same_process: bool) -> None:
    stamps = Stamps(tmp_path / "stamps")
    for _ in range(50):  # a change soon after the stamp must be noticed in every round
        file.write_bytes(b"sound")
        assert stamps.is_sound(file, ID)
        if not in_same_process:
            stamps = Stamps(tmp_path / "stamps")
        assert stamps.has_valid_stamp(file, ID)
        with file.open("r+b") as writer:
            writer.write(b"Sound")
        assert not stamps.has_valid_stamp(file, ID)
        assert not stamps.is_sound(file, ID)


def test_stamped_file_is_not_hashed(file: Path, tmp_path: Path) -> None:
    """A stamp is trusted: it is valid even if it was recorded for other bytes."""
    Stamps(tmp_path / "stamps").record(file, OTHER)
    assert Stamps(tmp_path / "stamps").is_sound(file, OTHER)


def test_file_with_restored_times_is_hashed_again(file: Path, tmp_path: Path) -> None:
    assert Stamps(tmp_path / "stamps").is_sound(file, ID)
    status = file.stat()
    file.write_bytes(b"Sound")
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert not Stamps(tmp_path / "stamps").is_sound(file, ID)


def test_links_keep_a_stamp_and_writes_do_not(file: Path, tmp_path: Path) -> None:
    stamps = Stamps(tmp_path / "stamps")
    with stamps.preserve(file, ID):
        os.link(file, tmp_path / "unknown")
    assert not stamps.has_valid_stamp(file, ID)
    stamps.record(file, ID)
    with stamps.preserve(file, ID):
        os.link(file, tmp_path / "link")
    assert stamps.has_valid_stamp(file, ID)
    with stamps.preserve(file, ID):
        file.write_bytes(b"longer than before")
    assert not stamps.has_valid_stamp(file, ID)


def test_a_moved_file_is_not_copied_and_keeps_its_stamp(file: Path, store: Store) -> None:
    os.utime(file, (0, 0))
    inode = file.stat().st_ino
    ref = store.blobs.put_file(file, move=True)
    path = store.files.local_path(ref.path)
    assert (file.exists(), path.stat().st_ino, path.stat().st_nlink) == (False, inode, 1)
    assert path.stat().st_mtime > 0, "`gc` would take it for an old file"
    assert open_cache_stamps().has_valid_stamp(path, ref.id)


def test_stamp_is_valid_for_one_file(file: Path, tmp_path: Path) -> None:
    stamps = Stamps(tmp_path / "stamps")
    stamps.record(file, ID)
    (tmp_path / "other").write_bytes(b"other")
    assert not stamps.has_valid_stamp(tmp_path / "other", ID)
    assert not stamps.is_sound(tmp_path / "other", ID)
    with pytest.raises(FileNotFoundError):
        stamps.is_sound(tmp_path / "gone", ID)


def test_stamp_that_cannot_be_stored_lasts_as_long_as_the_process(file: Path, tmp_path: Path) -> None:
    stamps = Stamps(file / "no folder")
    assert stamps.is_sound(file, ID)
    assert stamps.has_valid_stamp(file, ID)
    assert not Stamps(file / "no folder").has_valid_stamp(file, ID)


@pytest.mark.parametrize("damage", [b"", b"\xff\xfe", b"5"])
def test_damaged_stamp_is_ignored(file: Path, tmp_path: Path, damage: bytes) -> None:
    Stamps(tmp_path / "stamps").record(file, ID)
    (stamp,) = (tmp_path / "stamps").iterdir()
    stamp.write_bytes(damage)
    assert not Stamps(tmp_path / "stamps").has_valid_stamp(file, ID)
    assert Stamps(tmp_path / "stamps").is_sound(file, ID)


def test_pull_keeps_the_stamps_of_shared_files(store: Store, tmp_path: Path) -> None:
    """Snapshots share files by links, and a link changes a file's times."""
    blob, other = store.blobs.put_bytes(b"shared"), store.blobs.put_bytes(b"other")
    first, second = publish_blobs(store, blob), publish_blobs(store, blob, other)
    dest = tmp_path / "dest"
    pull(store, first, dest)
    stamps = open_folder_stamps(dest)
    assert stamps.has_valid_stamp(dest / first / "index/0.faiss", blob.id)
    pull(store, second, dest, keep_snapshots=1)
    assert stamps.has_valid_stamp(dest / second / "index/0.faiss", blob.id)
    assert not (dest / first).exists()


def test_snapshot_that_is_not_accepted_never_becomes_current(store: Store, tmp_path: Path) -> None:
    first, second = (publish_blobs(store, store.blobs.put_bytes(data)) for data in (b"first", b"second"))
    dest, contents = tmp_path / "dest", list[bytes]()

    def refuse(folder: Path) -> None:
        contents.append((folder / "index/0.faiss").read_bytes())
        raise InputError("it is not accepted")

    pull(store, first, dest)
    with pytest.raises(InputError, match="not accepted"):
        pull(store, second, dest, accept=refuse)
    assert (contents, (dest / CURRENT).resolve().name) == ([b"second"], first)
