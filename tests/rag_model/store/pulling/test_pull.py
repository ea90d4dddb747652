"""A pull fetches and verifies missing files, and readers never see a mix of two snapshots."""

import json
import re
import secrets
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pyarrow
import pytest

from rag_model.atomic_write import describe_write_error
from rag_model.errors import ResourceError, StoreError
from rag_model.store import BlobRef, Manifest, Snapshot, Store
from rag_model.store.objects.blobs import get_partial_size
from rag_model.store.objects.cache import PARTIAL_SUFFIX
from rag_model.store.pulling.folder import blob_copy_path, mapped_copy_path
from rag_model.store.pulling.pull import pull
from rag_model.store.versions.mapped import MappedPassages
from tests.fixtures.store_files import check_pulled_files, publish_parts

VECTORS = "embeddings/part-00000.npy"


def make_partial_path(dest: Path, ref: BlobRef) -> Path:
    """Create the folder of a partly fetched blob, and return the blob's path."""
    path = blob_copy_path(dest, ref)
    path.parent.mkdir(parents=True)
    return path.with_name(f".{path.name}{PARTIAL_SUFFIX}")


def sum_sizes(store: Store, snapshot: str) -> int:
    return sum(ref.size for ref in set(store.snapshots.get(snapshot).content.files.values()))


def test_pulled_folder_is_read_without_store_and_cache(memory_store: Store, dest: Path, cache: Path) -> None:
    snapshot = publish_parts(memory_store)
    report = pull(memory_store, snapshot[:8], dest)
    memory_store.files.delete_folder("blobs")
    assert (report.snapshot, report.path) == (snapshot, dest / snapshot)
    assert (report.fetched_bytes, report.reused_bytes) == (sum_sizes(memory_store, snapshot), 0)
    for folder in (dest, dest / "current", dest / snapshot):
        with Snapshot.from_folder(folder) as pulled:
            assert pulled.id == snapshot
            assert pulled.passages([1500])[0].text == "text 1500"
            assert pulled.embeddings("part-00002")[0, 0] == 1501
            assert (pulled.folder("encoder/question") / "copy" / "config.json").read_bytes() == b"{}"
    assert not cache.exists()
    assert json.loads((dest / snapshot / "manifest.json").read_bytes())["id"] == snapshot
    check_pulled_files(Snapshot.from_folder(dest), dest / snapshot)


def test_second_pull_fetches_nothing(store: Store, dest: Path) -> None:
    snapshot = publish_parts(store)
    pull(store, snapshot, dest)
    report = pull(store, snapshot, dest)
    assert (report.fetched_bytes, report.reused_bytes) == (0, sum_sizes(store, snapshot))


def test_shared_files_are_not_fetched_again(store: Store, dest: Path) -> None:
    first, second = publish_parts(store), publish_parts(store, words=50)
    pull(store, first, dest)
    reader = Snapshot.from_folder(dest)
    assert pull(store, second, dest).fetched_bytes == 0
    assert Snapshot.from_folder(dest).id == second
    assert reader.id == first
    assert reader.passages([7])[0].text == "text 7"
    reader.close()


def test_selected_files_can_be_extended(store: Store, dest: Path) -> None:
    snapshot = publish_parts(store)
    pull(store, snapshot, dest, select=lambda path: not path.startswith("embeddings/"))
    with pytest.raises(StoreError, match=r"part-00000.npy was not pulled"):
        Snapshot.from_folder(dest).embeddings("part-00000")
    report = pull(store, snapshot, dest, select=lambda path: path == VECTORS)
    assert report.fetched_bytes == store.snapshots.get(snapshot).content.files[VECTORS].size
    assert Snapshot.from_folder(dest).embeddings("part-00000").shape == (1500, 4)
    with Snapshot.from_folder(dest) as pulled:
        assert pulled.passages([0])[0].text == "text 0"


@pytest.mark.parametrize("damage", ["flipped", "truncated", "gone"])
def test_damaged_copy_is_repaired(store: Store, dest: Path, damage: str) -> None:
    snapshot = publish_parts(store)
    pull(store, snapshot, dest)
    file = dest / snapshot / VECTORS
    data = file.read_bytes()
    if damage == "gone":
        file.unlink()
    else:
        file.write_bytes(data[:-1] + b"\1" if damage == "flipped" else data[:50])
    with pytest.raises(StoreError, match=r"part-00000.npy (was not pulled|.*is damaged)"):
        Snapshot.from_folder(dest).embeddings("part-00000")
    pull(store, snapshot, dest)
    assert file.read_bytes() == data
    assert Snapshot.from_folder(dest).embeddings("part-00000").shape == (1500, 4)


@pytest.mark.parametrize("damage", [b"short", None])
def test_damaged_blob_does_not_change_the_current_snapshot(store: Store, dest: Path, damage: bytes | None) -> None:
    first, second = publish_parts(store), publish_parts(store, words=50)
    pull(store, first, dest, select=lambda path: path.startswith("passages/"))
    blob = store.snapshots.get(second).content.files[VECTORS]
    store.files.delete_folder(blob.path)
    if damage is not None:
        store.files.write(blob.path, damage)
    with pytest.raises(StoreError, match=blob.id):
        pull(store, second, dest)
    assert Snapshot.from_folder(dest).id == first
    assert not (dest / second).exists()


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (b'"encoder/question/copy/config.json"', b'"../../escaped"', r"bad file path '\.\./\.\./escaped'"),
        (b'"encoder/question/config.json"', b'"/etc/config.json"', "file path"),
        (b'"encoder/question/config.json"', b'"encoder/../../config.json"', "file path"),
        (b'"encoder/question/config.json"', b'"encoder/question/copy"', "is a folder as well"),
        (b'"encoder/question/config.json"', b'".blobs/config.json"', "file path"),
        (b'"id": "sha256:', b'"id": "../sha256:', "not a blob id"),
        (b'"rows": 1500', b'"rows": 99999999999999999999', "row count"),
        (b'"size": 2', b'"size": 9999999999999999999', "impossible size"),
    ],
)
def test_hostile_manifest_is_refused(store: Store, dest: Path, old: bytes, new: bytes, message: str) -> None:
    path = f"snapshots/{publish_parts(store)}.json"
    data = store.files.read(path) or b""
    assert old in data
    store.files.write(path, data.replace(old, new))
    with pytest.raises(StoreError, match=message):
        pull(store, store.snapshots.list_ids()[0], dest)
    assert not [*dest.parent.glob("dest*"), *dest.parent.glob("escaped")]


def test_links_in_the_folder_are_replaced_and_not_followed(store: Store, dest: Path, tmp_path: Path) -> None:
    snapshot = publish_parts(store)
    pull(store, snapshot, dest)
    outside = tmp_path / "outside"
    outside.write_bytes(b"outside")
    for file in (
        dest / snapshot / VECTORS,
        dest / f".{store.snapshots.get(snapshot).content.files[VECTORS].path}",
    ):
        file.unlink()
        file.symlink_to(outside)
    pull(store, snapshot, dest)
    assert outside.read_bytes() == b"outside"
    assert not (dest / snapshot / VECTORS).is_symlink()
    assert Snapshot.from_folder(dest).embeddings("part-00000").shape == (1500, 4)


def test_missing_disk_space_is_reported_before_fetching(
    store: Store, dest: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(1 << 20, 1 << 20, 1000))  # type: ignore[attr-defined]
    with pytest.raises(ResourceError, match=r"bytes have to be fetched and 1,000 are free"):
        pull(store, publish_parts(store), dest)
    assert not dest.exists()


def test_pull_resumes_from_any_partial_file(memory_store: Store, dest: Path) -> None:
    snapshot = publish_parts(memory_store)
    ref = memory_store.snapshots.get(snapshot).content.files[VECTORS]
    data = memory_store.blobs.read(ref)
    partial = make_partial_path(dest, ref)
    for partial_data in (data[:1000], data, b"x" * 1000, data + b"more", b""):
        partial.write_bytes(partial_data)
        blob_copy_path(dest, ref).unlink(missing_ok=True)
        pull(memory_store, snapshot, dest)
        assert blob_copy_path(dest, ref).read_bytes() == data
        assert not partial.exists()


def test_concurrent_pulls_into_one_folder_succeed(memory_store: Store, dest: Path) -> None:
    snapshot = publish_parts(memory_store)
    with ThreadPoolExecutor(4) as pool:
        reports = list(pool.map(lambda _: pull(memory_store, snapshot, dest), range(4)))
    assert {report.path for report in reports} == {dest / snapshot}
    with Snapshot.from_folder(dest) as pulled:
        assert pulled.passages([1500])[0].text == "text 1500"
        check_pulled_files(pulled, dest / snapshot)
    assert not [*dest.rglob(f"*{PARTIAL_SUFFIX}")]


def test_passages_are_mapped(store: Store, dest: Path) -> None:
    snapshot = publish_parts(store)
    pull(store, snapshot, dest)
    rows = [2200, 0, 1500, 0, 1023, 1024]
    with Snapshot.from_folder(dest) as pulled, Snapshot.from_store(store, snapshot) as stored:
        assert pulled.passages(rows) == stored.passages(rows)
        assert {type(reader) for reader in pulled._readers.values()} == {MappedPassages}
    ref = store.snapshots.get(snapshot).content.files["passages/part-00000.parquet"]
    copy = mapped_copy_path(dest, ref)
    copy.write_bytes(copy.read_bytes().replace(b"text 7", b"text X"))
    with Snapshot.from_folder(dest) as pulled:  # changed copies are not read
        assert pulled.passages([7])[0].text == "text 7"
    pull(store, snapshot, dest)
    assert b"text X" not in copy.read_bytes()


def test_progress_is_reported(memory_store: Store, dest: Path) -> None:
    snapshot = publish_parts(memory_store)
    total = sum_sizes(memory_store, snapshot)
    ref = memory_store.snapshots.get(snapshot).content.files[VECTORS]
    partial = make_partial_path(dest, ref)
    partial.write_bytes(memory_store.blobs.read(ref)[:1000])
    for _ in range(2):  # in the second round all files exist
        messages: list[tuple[int, int]] = []
        pull(memory_store, snapshot, dest, on_progress=lambda done, all_, out=messages: out.append((done, all_)))  # type: ignore[misc]
        assert messages == sorted(messages)
        assert messages[-1] == (total, total)


def test_failure_stops_other_threads(memory_store: Store, dest: Path) -> None:
    snapshot = publish_parts(memory_store)
    calls = []

    def fail(done: int, total: int) -> None:
        calls.append(done)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        pull(memory_store, snapshot, dest, on_progress=fail)
    assert len(calls) <= 4  # one call for each thread
    assert not (dest / "current").exists()
    assert pull(memory_store, snapshot, dest).snapshot == snapshot


def test_pull_without_mapped_copies(store: Store, dest: Path) -> None:
    pull(store, publish_parts(store), dest, with_mapped_copies=False)
    assert not (dest / ".mapped").exists()
    with Snapshot.from_folder(dest) as pulled:
        assert pulled.passages([7])[0].text == "text 7"


_PULL_WITH_SIZE_LIMIT = """
import resource, signal, sys
from pathlib import Path
from rag_model.errors import StoreError
from rag_model.store import Store
from rag_model.store.pulling.pull import pull
url, snapshot, dest, max_bytes = sys.argv[1:]
resource.setrlimit(resource.RLIMIT_FSIZE, (int(max_bytes), int(max_bytes)))
try:
    pull(Store.open(url), snapshot, Path(dest))
except StoreError as error:
    sys.exit(str(error))
"""


def test_partly_written_file_keeps_the_old_version(store: Store, dest: Path, tmp_path: Path) -> None:
    first = publish_parts(store)
    pull(store, first, dest)
    large = store.blobs.put_bytes(secrets.token_bytes(3 << 20))
    content = store.snapshots.get(first).content
    content = replace(content, files={**content.files, "index/large.faiss": large})
    second = store.snapshots.publish(Manifest(content))
    command = [sys.executable, "-c", _PULL_WITH_SIZE_LIMIT, store.url, second, str(dest), str(2 << 20)]
    child = subprocess.run(command, check=False, capture_output=True, text=True)
    assert child.returncode == 1
    assert re.fullmatch(r"cannot write .*: File too large\n", child.stderr)
    assert Snapshot.from_folder(dest).id == first
    assert Snapshot.from_folder(dest).passages([7])[0].text == "text 7"
    assert 0 < get_partial_size(blob_copy_path(dest, large)) <= 2 << 20
    pull(store, second, dest)
    assert Snapshot.from_folder(dest).path("index/large.faiss").stat().st_size == large.size


def test_full_disk_is_reported_for_files_that_pyarrow_writes() -> None:
    with pytest.raises(OSError, match="Error writing bytes") as error, pyarrow.OSFile("/dev/full", "wb") as file:
        file.write(b"passages")
    sentence = "the disk is full: cannot write pulled; free some space and run it again"
    assert describe_write_error(Path("pulled"), error.value) == sentence


def test_pull_into_a_file_is_reported(store: Store, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(StoreError, match="cannot write"):
        pull(store, publish_parts(store), tmp_path / "file")


def test_empty_folder_is_not_a_snapshot(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="no pulled snapshot"):
        Snapshot.from_folder(tmp_path)
