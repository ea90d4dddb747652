"""`verify` finds every kind of damage and names it."""

from collections.abc import Callable

import pytest

from rag_model.store import Store
from rag_model.store.upkeep.verify import verify_version

FILE = "embeddings/part-00000.npy"


@pytest.fixture
def snapshot(store: Store, publish: Callable[..., str]) -> str:
    snapshot = publish(store)
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
