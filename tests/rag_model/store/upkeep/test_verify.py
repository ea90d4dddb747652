"""`verify` finds every kind of damage and names it, and the probe of a store leaves no files."""

import time
from collections.abc import Callable
from pathlib import Path

import pytest

from rag_model.errors import StoreError
from rag_model.store import Store
from rag_model.store.upkeep.verify import probe_store, verify_version
from tests.fixtures.store_files import publish_parts

FILE = "embeddings/part-00000.npy"


@pytest.fixture
def snapshot(store: Store) -> str:
    snapshot = publish_parts(store)
    store.refs.move("latest", snapshot, 0)
    return snapshot


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda data: data[:-1] + bytes([data[-1] ^ 1]), "its bytes do not match its name"),
        (lambda data: data[:100], "100 bytes instead of"),
        (lambda data: None, "missing"),
    ],
    ids=["one bit flipped", "truncated", "gone"],
)
def test_damaged_blob_is_reported(
    store: Store, snapshot: str, damage: Callable[[bytes], bytes | None], message: str
) -> None:
    blob = store.snapshots.get(snapshot).content.files[FILE]
    path = store.blobs.get_local_path(blob)
    damaged_bytes = damage(path.read_bytes())
    path.unlink() if damaged_bytes is None else path.write_bytes(damaged_bytes)
    (problem,) = verify_version(store, snapshot)
    assert (problem.path, problem.blob) == (FILE, blob.id)
    assert problem.what.startswith(message)


def test_missing_blob_is_reported_for_each_file(store: Store, snapshot: str) -> None:
    blob = store.snapshots.get(snapshot).content.files["encoder/question/config.json"]
    store.blobs.get_local_path(blob).unlink()
    assert [problem.path for problem in verify_version(store, snapshot)] == [
        "encoder/question/config.json",
        "encoder/question/copy/config.json",
    ]


def test_damaged_manifest_is_reported(store: Store, snapshot: str) -> None:
    path = f"snapshots/{snapshot}.json"
    data = store.files.read(path) or b""
    store.files.write(path, data.replace(b'"rows": 700', b'"rows": 701'))
    (problem,) = verify_version(store, snapshot)
    assert problem.path == path
    assert "hashes to" in problem.what


def test_missing_snapshot_is_reported(store: Store, snapshot: str) -> None:
    store.files.delete_folder(f"snapshots/{snapshot}.json")
    assert [problem.path for problem in verify_version(store, snapshot)] == [
        f"snapshots/{snapshot}.json",
        "refs/latest/00000001.json",
    ]


def test_missing_and_damaged_moves_are_reported(store: Store, snapshot: str) -> None:
    for number in (1, 2, 3):
        store.refs.move("latest", snapshot, number)
    store.files.delete_folder("refs/latest/00000002.json")
    store.files.write("refs/latest/00000003.json", b"{}")
    problems = {problem.path: problem.what for problem in verify_version(store, snapshot)}
    assert problems["refs/latest/00000002.json"] == "missing: the log has a gap"
    assert "damaged" in problems["refs/latest/00000003.json"]
    assert len(problems) == 2


def test_probe_of_a_working_store_passes_and_leaves_no_file(store: Store, tmp_path: Path) -> None:
    files_before = sorted(path for path in tmp_path.rglob("*") if path.is_file())
    result = probe_store(store)
    assert result.creates_exclusively
    assert abs(result.clock_skew) <= 1
    assert result.seconds >= 0
    assert sorted(path for path in tmp_path.rglob("*") if path.is_file()) == files_before


def test_probe_measures_the_clock_skew(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """This machine's clock is five minutes behind the clock that sets the times of the store's files."""
    read_clock = time.time
    monkeypatch.setattr("time.time", lambda: read_clock() - 300)
    assert probe_store(store).clock_skew == pytest.approx(300, abs=1)


def test_probe_reports_missing_write_access(store: Store, tmp_path: Path) -> None:
    (tmp_path / "store" / "probe").write_text("a file where the folder would be")
    with pytest.raises(StoreError, match="cannot write"):
        probe_store(store)
