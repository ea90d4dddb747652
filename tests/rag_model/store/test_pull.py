"""Pulling: only what is missing, verified, and never a mix for the reader."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from rag_model.digest import digest_file
from rag_model.errors import StoreError
from rag_model.store import Snapshot, Store
from rag_model.store.pull import pull

VECTORS = "embeddings/part-00000.npy"


@pytest.fixture
def dest(tmp_path: Path) -> Path:
    return tmp_path / "dest"


def size_of(store: Store, snapshot: str) -> int:
    return sum(ref.size for ref in set(store.snapshots.get(snapshot).content.files.values()))


def test_a_pulled_folder_is_read_with_nothing_else(
    memory_store: Store, publish: Callable[..., str], dest: Path, cache: Path
) -> None:
    snapshot = publish(memory_store)
    report = pull(memory_store, snapshot[:8], dest)
    memory_store.files.delete("blobs")
    assert (report.snapshot, report.path) == (snapshot, dest / snapshot)
    assert (report.fetched_bytes, report.reused_bytes) == (size_of(memory_store, snapshot), 0)
    for folder in (dest, dest / "current", dest / snapshot):
        with Snapshot.from_folder(folder) as pulled:
            assert pulled.id == snapshot
            assert pulled.passages([1500])[0].text == "text 1500"
            assert pulled.embeddings("part-00002")[0, 0] == 1501
            assert (pulled.folder("encoder/question") / "copy" / "config.json").read_bytes() == b"{}"
    assert not cache.exists()
    assert json.loads((dest / snapshot / "manifest.json").read_bytes())["id"] == snapshot
    for path, ref in Snapshot.from_folder(dest).manifest.content.files.items():
        assert digest_file(dest / snapshot / path) == ref.id


def test_a_second_pull_fetches_nothing(local_store: Store, publish: Callable[..., str], dest: Path) -> None:
    snapshot = publish(local_store)
    pull(local_store, snapshot, dest)
    again = pull(local_store, snapshot, dest)
    assert (again.fetched_bytes, again.reused_bytes) == (0, size_of(local_store, snapshot))


def test_the_next_snapshot_fetches_what_changed(local_store: Store, publish: Callable[..., str], dest: Path) -> None:
    old, new = publish(local_store), publish(local_store, words=50)
    pull(local_store, old, dest)
    reader = Snapshot.from_folder(dest)
    assert pull(local_store, new, dest).fetched_bytes == 0
    assert Snapshot.from_folder(dest).id == new
    assert reader.id == old
    assert reader.passages([7])[0].text == "text 7"
    reader.close()


def test_a_choice_of_files_grows(local_store: Store, publish: Callable[..., str], dest: Path) -> None:
    snapshot = publish(local_store)
    pull(local_store, snapshot, dest, select=lambda path: not path.startswith("embeddings/"))
    with pytest.raises(StoreError, match=r"part-00000.npy was not pulled"):
        Snapshot.from_folder(dest).embeddings("part-00000")
    report = pull(local_store, snapshot, dest, select=lambda path: path == VECTORS)
    assert report.fetched_bytes == local_store.snapshots.get(snapshot).content.files[VECTORS].size
    assert Snapshot.from_folder(dest).embeddings("part-00000").shape == (1500, 4)
    with Snapshot.from_folder(dest) as pulled:
        assert pulled.passages([0])[0].text == "text 0"


@pytest.mark.parametrize("damage", ["flipped", "truncated", "gone"])
def test_a_damaged_copy_is_repaired(local_store: Store, publish: Callable[..., str], dest: Path, damage: str) -> None:
    snapshot = publish(local_store)
    pull(local_store, snapshot, dest)
    file = dest / snapshot / VECTORS
    data = file.read_bytes()
    if damage == "gone":
        file.unlink()
    else:
        file.write_bytes(data[:-1] + b"\1" if damage == "flipped" else data[:50])
    if damage != "flipped":
        with pytest.raises(StoreError, match=r"was not pulled|is damaged"):
            Snapshot.from_folder(dest).embeddings("part-00000")
    pull(local_store, snapshot, dest)
    assert file.read_bytes() == data


@pytest.mark.parametrize("damage", [b"short", None])
def test_a_bad_blob_moves_nothing(
    local_store: Store, publish: Callable[..., str], dest: Path, damage: bytes | None
) -> None:
    old, new = publish(local_store), publish(local_store, words=50)
    pull(local_store, old, dest, select=lambda path: path.startswith("passages/"))
    blob = local_store.snapshots.get(new).content.files[VECTORS]
    local_store.files.delete(blob.path)
    if damage is not None:
        local_store.files.put(blob.path, damage)
    with pytest.raises(StoreError, match=blob.id):
        pull(local_store, new, dest)
    assert Snapshot.from_folder(dest).id == old
    assert not (dest / new).exists()


def test_a_hostile_manifest_writes_nothing(
    local_store: Store, publish: Callable[..., str], dest: Path, tmp_path: Path
) -> None:
    path = f"snapshots/{publish(local_store)}.json"
    data = local_store.files.read(path) or b""
    local_store.files.put(path, data.replace(b"encoder/question/copy/config.json", b"../../escaped"))
    with pytest.raises(StoreError, match=r"bad file path '\.\./\.\./escaped'"):
        pull(local_store, local_store.snapshots.list()[0], dest)
    assert not dest.exists()
    assert not (tmp_path / "escaped").exists()


def test_a_place_that_is_a_file_says_so(local_store: Store, publish: Callable[..., str], tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(StoreError, match="cannot write"):
        pull(local_store, publish(local_store), tmp_path / "file")


def test_an_empty_folder_is_no_snapshot(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="no pulled snapshot"):
        Snapshot.from_folder(tmp_path)
