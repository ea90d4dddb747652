"""Checkpoints of unfinished trainings: replaced, read back, refused where they are damaged, and deleted in time."""

import base64
import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat

from rag_model.digest import digest_file
from rag_model.errors import NotFoundError, RefusedError, StoreError
from rag_model.store import BlobRef, Content, Manifest, ModelContent, ModelManifest, Store
from rag_model.store.upkeep.expire import ExpirePolicy, expire_store
from rag_model.store.upkeep.gc import collect_garbage
from rag_model.store.versions.signatures import SIGNING_KEY_VARIABLE, TRUST_VARIABLE
from rag_model.store.versions.trainings import TrainingProgress

KEY, TWIN = "ab" * 32, "cd" * 32
DAY = 86400.0


@pytest.fixture(params=["local", "memory", "s3"])
def store(request: pytest.FixtureRequest) -> Store:
    found: Store = request.getfixturevalue(f"{request.param}_store")
    return found


Put = Callable[..., None]


@pytest.fixture
def put(tmp_path: Path) -> Put:
    """Put a checkpoint of the given files, by relative path, for a step."""

    def put(store: Store, step: int, key: str = KEY, snapshot: str = "0" * 64, **texts: str) -> None:
        folder = tmp_path / "folder" / key / str(step)
        files = {}
        for name, text in texts.items():
            path = folder / f"checkpoints/step-{name}.json"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
            files[path.relative_to(folder).as_posix()] = path, BlobRef(digest_file(path), path.stat().st_size)
        reached = TrainingProgress("dpr", snapshot, "", step, 9, "2026-11-23T00:00:00+00:00")
        assert store.trainings.save_checkpoint(key, reached, files, lambda: True)

    return put


def fetched(store: Store, folder: Path, key: str = KEY) -> Mapping[str, str]:
    found = store.trainings.find_newest(key)
    assert found is not None
    store.trainings.fetch(key, found, folder)
    return {path.stem.removeprefix("step-"): path.read_text() for path in folder.rglob("*.json")}


def paths(store: Store) -> list[str]:
    return sorted(file.path for file in store.files.iter_tree("trainings"))


def test_a_checkpoint_takes_the_place_of_the_one_before(store: Store, put: Put, tmp_path: Path) -> None:
    assert (store.trainings.find_newest(KEY), store.trainings.list_keys()) == (None, [])
    put(store, 1, same="same", weights="one")
    put(store, 2, same="same", weights="two")
    assert fetched(store, tmp_path / "out") == {"same": "same", "weights": "two"}
    assert len(paths(store)) == 3, "one record, two files: those of step 1 are gone"
    (again,) = Store.open(store.url).trainings.iter_newest()
    assert (again[0], again[1].progress.step, again[1].bytes) == (KEY, 2, 7)
    assert store.trainings.resolve(KEY[:4]) == KEY
    put(store, 1, key=TWIN, weights="one")
    store.trainings.delete(KEY)
    assert store.trainings.list_keys() == [TWIN]
    with pytest.raises(NotFoundError, match=r"no unfinished training 'abab' in .* \(cdcdcdcdcdcd\)"):
        store.trainings.resolve("abab")
    assert fetched(store, tmp_path / "twin", TWIN) == {"weights": "one"}


def test_on_the_same_disk_a_checkpoint_takes_no_space(local_store: Store, put: Put, tmp_path: Path) -> None:
    put(local_store, 1, weights="one")
    (blob,) = (local_store.files.local_path(path) for path in paths(local_store) if "/blobs/" in path)
    assert blob.samefile(tmp_path / "folder" / KEY / "1" / "checkpoints" / "step-weights.json")


def test_a_second_machine_with_the_same_training_overwrites_nothing(
    memory_store: Store, put: Put, tmp_path: Path
) -> None:
    put(memory_store, 3, weights="three")
    taken = memory_store.trainings.record_path(KEY, 2)
    memory_store.files.write(taken, memory_store.files.read(memory_store.trainings.record_path(KEY, 1)) or b"")
    memory_store.files.remove(memory_store.trainings.record_path(KEY, 1))
    put(memory_store, 4, weights="four")
    found = memory_store.trainings.find_newest(KEY)
    assert found is not None
    assert (found.number, found.progress.step) == (3, 4)
    assert fetched(memory_store, tmp_path / "out") == {"weights": "four"}


def test_a_put_that_is_told_to_stop_leaves_the_one_before(memory_store: Store, put: Put, tmp_path: Path) -> None:
    put(memory_store, 1, weights="one")
    found = memory_store.trainings.find_newest(KEY)
    assert found is not None
    path = tmp_path / "two"
    path.write_text("two")
    files = {"two": (path, BlobRef(digest_file(path), 3))}
    asked = iter([True, False])
    assert not memory_store.trainings.save_checkpoint(KEY, replace(found.progress, step=2), files, lambda: next(asked))
    assert memory_store.trainings.find_newest(KEY) == found
    assert collect_garbage(memory_store, 0)["trainings"].files == 1, "what was put of it"
    assert fetched(memory_store, tmp_path / "out") == {"weights": "one"}


def test_a_damaged_file_is_one_sentence_and_nothing_else_is_lost(memory_store: Store, put: Put, tmp_path: Path) -> None:
    put(memory_store, 1, weights="one")
    (blob,) = (path for path in paths(memory_store) if "/blobs/" in path)
    for damage in (b"0ne", b"on", None):
        memory_store.files.remove(blob) if damage is None else memory_store.files.write(blob, damage)
        with pytest.raises(StoreError, match=rf"{blob} is missing or damaged, .*: delete .*/00000001\.json, and"):
            fetched(memory_store, tmp_path / "out")
    put(memory_store, 1, weights="one")
    assert fetched(memory_store, tmp_path / "out") == {"weights": "one"}


@pytest.mark.parametrize(
    "changed",
    [
        {"format": 2},
        {"files": {"../out": {"id": "sha256:" + "0" * 64, "size": 1}}},
        {"files": []},
        {"files": {"a": {"id": "x", "size": 1}}},
        {"step": -1},
        {"step": True},
        {"snapshot": "latest"},
        {"stage": "../x"},
        {"more": 1},
    ],
)
def test_a_hostile_record_is_refused(memory_store: Store, put: Put, changed: dict[str, object]) -> None:
    put(memory_store, 1, weights="one")
    path = memory_store.trainings.record_path(KEY, 1)
    value = memory_store.files.read_json(path)
    assert value is not None
    memory_store.files.write(path, json.dumps(value | changed).encode())
    with pytest.raises(
        StoreError, match=r"00000001\.json cannot be used: .*; delete this file, and the training starts"
    ):
        memory_store.trainings.find_newest(KEY)
    assert list(memory_store.trainings.iter_newest()) == []
    assert collect_garbage(memory_store, 0)["trainings"].files == 0, "nothing is deleted that is not understood"


def test_with_a_trust_file_only_a_trusted_signature_counts(
    memory_store: Store, put: Put, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    key, stranger = Ed25519PrivateKey.generate(), Ed25519PrivateKey.generate()
    public = base64.b64encode(key.public_key().public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)).decode()
    (tmp_path / "trusted").write_text(f"library {public}\n")
    monkeypatch.setenv(TRUST_VARIABLE, str(tmp_path / "trusted"))
    for step, signer in enumerate((None, stranger, key), start=1):
        if signer is not None:
            pem = signer.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()).decode()
            monkeypatch.setenv(SIGNING_KEY_VARIABLE, pem)
        put(memory_store, step, weights=str(step))
        found = memory_store.trainings.find_newest(KEY)
        assert found is not None
        if signer is not key:
            with pytest.raises(RefusedError, match=f"the checkpoint of training {KEY[:12]} in .* is not signed by a k"):
                memory_store.trainings.fetch(KEY, found, tmp_path / "out")
    assert fetched(memory_store, tmp_path / "out") == {"weights": "3"}
    assert memory_store.trainings.describe_signature(KEY, found) == "signed by library"
    assert len(paths(memory_store)) == 3, "the signatures of replaced records are gone"
    collect_garbage(memory_store, 0)
    assert memory_store.trainings.describe_signature(KEY, found) == "signed by library"


def test_gc_keeps_what_a_training_goes_on_from_and_nothing_else(local_store: Store, put: Put, tmp_path: Path) -> None:
    put(local_store, 1, weights="one")
    record = local_store.files.read(local_store.trainings.record_path(KEY, 1)) or b""
    orphan = f"trainings/{KEY}/{BlobRef('sha256:' + 'e' * 64, 1).path}"
    local_store.files.write(orphan, b"x")
    put(local_store, 2, weights="two")
    local_store.files.write(
        local_store.trainings.record_path(KEY, 1), record
    )  # as of a process killed while it replaced this
    with local_store.intents.hold("finetune-1"):
        assert collect_garbage(local_store, 0)["trainings"].files == 0, (
            "a training runs, whose next checkpoint may name these"
        )
    assert collect_garbage(local_store, DAY)["trainings"].files == 0, "they are young"
    assert collect_garbage(local_store, 0)["trainings"].files == 2
    assert fetched(local_store, tmp_path / "out") == {"weights": "two"}
    model = local_store.models.publish(ModelManifest(ModelContent("dpr", {})))
    local_store.memo.write_record("finetune", KEY, {}, {"model": model})
    assert collect_garbage(local_store, DAY)["trainings"].files == 0
    assert collect_garbage(local_store, 0)["trainings"].files == 2, "its model is published"
    assert paths(local_store) == []


def test_an_abandoned_training_expires_and_keeps_its_snapshot_until_then(
    local_store: Store, put: Put, later: Callable[[Store, float], None]
) -> None:
    snapshot = local_store.snapshots.publish(Manifest(Content({}, (), {})))
    later(local_store, 100 * DAY)
    put(local_store, 1, snapshot=snapshot, weights="one")
    found = expire_store(local_store, ExpirePolicy(older_than=90 * DAY))
    assert (found.trainings, found.snapshots) == ((), ())
    later(local_store, 100 * DAY)
    with local_store.intents.hold("finetune-1"):
        assert expire_store(local_store, ExpirePolicy(older_than=90 * DAY)).trainings == (), "it may be going on"
    assert expire_store(local_store, ExpirePolicy(older_than=90 * DAY), dry_run=True).trainings == (KEY,)
    found = expire_store(local_store, ExpirePolicy(older_than=90 * DAY))
    assert (found.trainings, found.snapshots) == ((KEY,), (snapshot,))
    assert local_store.trainings.find_newest(KEY) is None
    collect_garbage(local_store, 0)
    assert paths(local_store) == []
