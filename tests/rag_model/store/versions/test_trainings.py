"""Checkpoints of unfinished trainings are replaced and read, refused if damaged, and deleted when they expire."""

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

KEY, OTHER_KEY = "ab" * 32, "cd" * 32
DAY = 86400.0


@pytest.fixture(params=["local", "memory", "s3"])
def store(request: pytest.FixtureRequest) -> Store:
    store: Store = request.getfixturevalue(f"{request.param}_store")
    return store


Save = Callable[..., None]


@pytest.fixture
def save(tmp_path: Path) -> Save:
    """Return a function that saves a checkpoint with the given files for a step."""

    def save(store: Store, step: int, key: str = KEY, snapshot: str = "0" * 64, **texts: str) -> None:
        folder = tmp_path / "folder" / key / str(step)
        files = {}
        for name, text in texts.items():
            path = folder / f"checkpoints/step-{name}.json"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
            files[path.relative_to(folder).as_posix()] = path, BlobRef(digest_file(path), path.stat().st_size)
        progress = TrainingProgress("dpr", snapshot, "", step, 9, "2026-11-23T00:00:00+00:00")
        assert store.trainings.save_checkpoint(key, progress, files, lambda: True)

    return save


def fetch_files(store: Store, folder: Path, key: str = KEY) -> Mapping[str, str]:
    record = store.trainings.find_newest(key)
    assert record is not None
    store.trainings.fetch(key, record, folder)
    return {path.stem.removeprefix("step-"): path.read_text() for path in folder.rglob("*.json")}


def list_paths(store: Store) -> list[str]:
    return sorted(file.path for file in store.files.iter_tree("trainings"))


def test_checkpoint_replaces_the_previous_one(store: Store, save: Save, tmp_path: Path) -> None:
    assert (store.trainings.find_newest(KEY), store.trainings.list_keys()) == (None, [])
    save(store, 1, same="same", weights="one")
    save(store, 2, same="same", weights="two")
    assert fetch_files(store, tmp_path / "out") == {"same": "same", "weights": "two"}
    assert len(list_paths(store)) == 3, "one record and two files; the files of step 1 are deleted"
    (newest,) = Store.open(store.url).trainings.iter_newest()
    assert (newest[0], newest[1].progress.step, newest[1].bytes) == (KEY, 2, 7)
    assert store.trainings.resolve(KEY[:4]) == KEY
    save(store, 1, key=OTHER_KEY, weights="one")
    store.trainings.delete(KEY)
    assert store.trainings.list_keys() == [OTHER_KEY]
    with pytest.raises(NotFoundError, match=r"no unfinished training 'abab' in .* \(cdcdcdcdcdcd\)"):
        store.trainings.resolve("abab")
    assert fetch_files(store, tmp_path / "twin", OTHER_KEY) == {"weights": "one"}


def test_checkpoint_on_the_same_disk_is_linked(local_store: Store, save: Save, tmp_path: Path) -> None:
    save(local_store, 1, weights="one")
    (blob,) = (local_store.files.local_path(path) for path in list_paths(local_store) if "/blobs/" in path)
    assert blob.samefile(tmp_path / "folder" / KEY / "1" / "checkpoints" / "step-weights.json")


def test_second_machine_with_the_same_training_overwrites_nothing(
    memory_store: Store, save: Save, tmp_path: Path
) -> None:
    save(memory_store, 3, weights="three")
    record_path = memory_store.trainings.record_path(KEY, 2)
    memory_store.files.write(record_path, memory_store.files.read(memory_store.trainings.record_path(KEY, 1)) or b"")
    memory_store.files.remove(memory_store.trainings.record_path(KEY, 1))
    save(memory_store, 4, weights="four")
    record = memory_store.trainings.find_newest(KEY)
    assert record is not None
    assert (record.number, record.progress.step) == (3, 4)
    assert fetch_files(memory_store, tmp_path / "out") == {"weights": "four"}


def test_stopped_save_keeps_the_previous_checkpoint(memory_store: Store, save: Save, tmp_path: Path) -> None:
    save(memory_store, 1, weights="one")
    record = memory_store.trainings.find_newest(KEY)
    assert record is not None
    path = tmp_path / "two"
    path.write_text("two")
    files = {"two": (path, BlobRef(digest_file(path), 3))}
    may_continue = iter([True, False])
    progress = replace(record.progress, step=2)
    assert not memory_store.trainings.save_checkpoint(KEY, progress, files, lambda: next(may_continue))
    assert memory_store.trainings.find_newest(KEY) == record
    assert collect_garbage(memory_store, 0)["trainings"].files == 1, "the file of the stopped save"
    assert fetch_files(memory_store, tmp_path / "out") == {"weights": "one"}


def test_damaged_file_can_be_replaced(memory_store: Store, save: Save, tmp_path: Path) -> None:
    save(memory_store, 1, weights="one")
    (blob,) = (path for path in list_paths(memory_store) if "/blobs/" in path)
    for damage in (b"0ne", b"on", None):
        memory_store.files.remove(blob) if damage is None else memory_store.files.write(blob, damage)
        with pytest.raises(StoreError, match=rf"{blob} is missing or damaged, .*: delete .*/00000001\.json, and"):
            fetch_files(memory_store, tmp_path / "out")
    save(memory_store, 1, weights="one")
    assert fetch_files(memory_store, tmp_path / "out") == {"weights": "one"}


@pytest.mark.parametrize(
    "changes",
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
def test_hostile_record_is_refused(memory_store: Store, save: Save, changes: dict[str, object]) -> None:
    save(memory_store, 1, weights="one")
    path = memory_store.trainings.record_path(KEY, 1)
    value = memory_store.files.read_json(path)
    assert value is not None
    memory_store.files.write(path, json.dumps(value | changes).encode())
    with pytest.raises(
        StoreError, match=r"00000001\.json cannot be used: .*; delete this file, and the training starts"
    ):
        memory_store.trainings.find_newest(KEY)
    assert list(memory_store.trainings.iter_newest()) == []
    assert collect_garbage(memory_store, 0)["trainings"].files == 0, "files of invalid records are kept"


def test_trust_file_requires_a_trusted_signature(
    memory_store: Store, save: Save, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    key, stranger = Ed25519PrivateKey.generate(), Ed25519PrivateKey.generate()
    public = base64.b64encode(key.public_key().public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)).decode()
    (tmp_path / "trusted").write_text(f"library {public}\n")
    monkeypatch.setenv(TRUST_VARIABLE, str(tmp_path / "trusted"))
    for step, signer in enumerate((None, stranger, key), start=1):
        if signer is not None:
            pem = signer.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()).decode()
            monkeypatch.setenv(SIGNING_KEY_VARIABLE, pem)
        save(memory_store, step, weights=str(step))
        record = memory_store.trainings.find_newest(KEY)
        assert record is not None
        if signer is not key:
            with pytest.raises(RefusedError, match=f"the checkpoint of training {KEY[:12]} in .* is not signed by a k"):
                memory_store.trainings.fetch(KEY, record, tmp_path / "out")
    assert fetch_files(memory_store, tmp_path / "out") == {"weights": "3"}
    assert memory_store.trainings.describe_signature(KEY, record) == "signed by library"
    assert len(list_paths(memory_store)) == 3, "the signatures of replaced records are deleted"
    collect_garbage(memory_store, 0)
    assert memory_store.trainings.describe_signature(KEY, record) == "signed by library"


def test_gc_keeps_only_files_of_the_newest_checkpoint(local_store: Store, save: Save, tmp_path: Path) -> None:
    save(local_store, 1, weights="one")
    record = local_store.files.read(local_store.trainings.record_path(KEY, 1)) or b""
    orphan = f"trainings/{KEY}/{BlobRef('sha256:' + 'e' * 64, 1).path}"
    local_store.files.write(orphan, b"x")
    save(local_store, 2, weights="two")
    local_store.files.write(
        local_store.trainings.record_path(KEY, 1), record
    )  # left by a process that was killed while it replaced this record
    with local_store.intents.hold("finetune-1"):
        assert collect_garbage(local_store, 0)["trainings"].files == 0, (
            "the next checkpoint of the running training may need these files"
        )
    assert collect_garbage(local_store, DAY)["trainings"].files == 0, "the files are recent"
    assert collect_garbage(local_store, 0)["trainings"].files == 2
    assert fetch_files(local_store, tmp_path / "out") == {"weights": "two"}
    model = local_store.models.publish(ModelManifest(ModelContent("dpr", {})))
    local_store.memo.write_record("finetune", KEY, {}, {"model": model})
    assert collect_garbage(local_store, DAY)["trainings"].files == 0
    assert collect_garbage(local_store, 0)["trainings"].files == 2, "its model is published"
    assert list_paths(local_store) == []


def test_abandoned_training_keeps_its_snapshot_until_it_expires(
    local_store: Store, save: Save, age_store: Callable[[Store, float], None]
) -> None:
    snapshot = local_store.snapshots.publish(Manifest(Content({}, (), {})))
    age_store(local_store, 100 * DAY)
    save(local_store, 1, snapshot=snapshot, weights="one")
    report = expire_store(local_store, ExpirePolicy(older_than=90 * DAY))
    assert (report.trainings, report.snapshots) == ((), ())
    age_store(local_store, 100 * DAY)
    with local_store.intents.hold("finetune-1"):
        assert expire_store(local_store, ExpirePolicy(older_than=90 * DAY)).trainings == (), "it may be running"
    assert expire_store(local_store, ExpirePolicy(older_than=90 * DAY), dry_run=True).trainings == (KEY,)
    report = expire_store(local_store, ExpirePolicy(older_than=90 * DAY))
    assert (report.trainings, report.snapshots) == ((KEY,), (snapshot,))
    assert local_store.trainings.find_newest(KEY) is None
    collect_garbage(local_store, 0)
    assert list_paths(local_store) == []
