"""Checkpoints of unfinished trainings are replaced and read, refused if damaged, and deleted when they expire."""

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from rag_model.digest import digest_file
from rag_model.errors import NotFoundError, RefusedError, StoreError
from rag_model.store import BlobRef, ModelContent, ModelManifest, Store
from rag_model.store.upkeep.expire import ExpirePolicy, expire_store
from rag_model.store.upkeep.gc import collect_garbage, preview_garbage
from rag_model.store.versions.signatures import SIGNING_KEY_VARIABLE, TRUST_VARIABLE
from rag_model.store.versions.trainings import StoredCheckpoint, TrainingProgress
from tests.fixtures.publisher import Publisher
from tests.fixtures.store_files import age_files, publish_empty

Save = Callable[..., None]
KEY, OTHER_KEY = "ab" * 32, "cd" * 32
DAY = 86400.0


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


def get_newest(store: Store, key: str = KEY) -> StoredCheckpoint:
    record = store.trainings.find_newest(key)
    assert record is not None
    return record


def fetch_files(store: Store, folder: Path, key: str = KEY) -> Mapping[str, str]:
    store.trainings.fetch(key, get_newest(store, key), folder)
    return {path.stem.removeprefix("step-"): path.read_text() for path in folder.rglob("*.json")}


def list_paths(store: Store) -> list[str]:
    return sorted(file.path for file in store.files.iter_tree("trainings"))


def test_checkpoint_replaces_the_previous_one(any_store: Store, save: Save, tmp_path: Path) -> None:
    assert (any_store.trainings.find_newest(KEY), any_store.trainings.list_keys()) == (None, [])
    save(any_store, 1, same="same", weights="one")
    save(any_store, 2, same="same", weights="two")
    assert fetch_files(any_store, tmp_path / "out") == {"same": "same", "weights": "two"}
    assert len(list_paths(any_store)) == 3, "one record and two files; the files of step 1 are deleted"
    (newest,) = Store.open(any_store.url).trainings.iter_newest()
    assert (newest[0], newest[1].progress.step, newest[1].bytes) == (KEY, 2, 7)
    assert any_store.trainings.resolve(KEY[:4]) == KEY
    save(any_store, 1, key=OTHER_KEY, weights="one")
    any_store.trainings.delete(KEY)
    assert any_store.trainings.list_keys() == [OTHER_KEY]
    with pytest.raises(NotFoundError, match=r"no unfinished training 'abab' in .* \(cdcdcdcdcdcd\)"):
        any_store.trainings.resolve("abab")
    assert fetch_files(any_store, tmp_path / "twin", OTHER_KEY) == {"weights": "one"}


def test_checkpoint_on_the_same_disk_is_linked(store: Store, save: Save, tmp_path: Path) -> None:
    save(store, 1, weights="one")
    (blob,) = (store.files.local_path(path) for path in list_paths(store) if "/blobs/" in path)
    assert blob.samefile(tmp_path / "folder" / KEY / "1" / "checkpoints" / "step-weights.json")


def test_second_machine_with_the_same_training_overwrites_nothing(
    memory_store: Store, save: Save, tmp_path: Path
) -> None:
    save(memory_store, 3, weights="three")
    record_path = memory_store.trainings.record_path(KEY, 2)
    memory_store.files.write(record_path, memory_store.files.read(memory_store.trainings.record_path(KEY, 1)) or b"")
    memory_store.files.remove(memory_store.trainings.record_path(KEY, 1))
    save(memory_store, 4, weights="four")
    record = get_newest(memory_store)
    assert (record.number, record.progress.step) == (3, 4)
    assert fetch_files(memory_store, tmp_path / "out") == {"weights": "four"}


def test_stopped_save_keeps_the_previous_checkpoint(memory_store: Store, save: Save, tmp_path: Path) -> None:
    save(memory_store, 1, weights="one")
    record = get_newest(memory_store)
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
    library, stranger = Publisher("library"), Publisher("stranger")
    (tmp_path / "trusted").write_text(library.trust_line)
    monkeypatch.setenv(TRUST_VARIABLE, str(tmp_path / "trusted"))
    for step, signer in enumerate((None, stranger, library), start=1):
        if signer is not None:
            monkeypatch.setenv(SIGNING_KEY_VARIABLE, signer.pem)
        save(memory_store, step, weights=str(step))
        record = get_newest(memory_store)
        if signer is not library:
            with pytest.raises(RefusedError, match=f"the checkpoint of training {KEY[:12]} in .* is not signed by a k"):
                memory_store.trainings.fetch(KEY, record, tmp_path / "out")
    assert fetch_files(memory_store, tmp_path / "out") == {"weights": "3"}
    assert memory_store.trainings.describe_signature(KEY, record) == "signed by library"
    assert len(list_paths(memory_store)) == 3, "the signatures of replaced records are deleted"
    collect_garbage(memory_store, 0)
    assert memory_store.trainings.describe_signature(KEY, record) == "signed by library"


def test_gc_keeps_only_files_of_the_newest_checkpoint(store: Store, save: Save, tmp_path: Path) -> None:
    save(store, 1, weights="one")
    record = store.files.read(store.trainings.record_path(KEY, 1)) or b""
    orphan = f"trainings/{KEY}/{BlobRef('sha256:' + 'e' * 64, 1).path}"
    store.files.write(orphan, b"x")
    save(store, 2, weights="two")
    # A process that was killed while it replaced this record leaves it.
    store.files.write(store.trainings.record_path(KEY, 1), record)
    with store.intents.hold("finetune-1"):
        assert collect_garbage(store, 0)["trainings"].files == 0, (
            "the next checkpoint of the running training may need these files"
        )
    assert collect_garbage(store, DAY)["trainings"].files == 0, "the files are recent"
    assert collect_garbage(store, 0)["trainings"].files == 2
    assert fetch_files(store, tmp_path / "out") == {"weights": "two"}
    model = store.models.publish(ModelManifest(ModelContent("dpr", {})))
    store.memo.write_record("finetune", KEY, {}, {"model": model})
    assert collect_garbage(store, DAY)["trainings"].files == 0
    assert collect_garbage(store, 0)["trainings"].files == 2, "its model is published"
    assert list_paths(store) == []


def test_abandoned_training_keeps_its_snapshot_until_it_expires(store: Store, save: Save) -> None:
    snapshot = publish_empty(store)
    age_files(store, 100 * DAY)
    save(store, 1, snapshot=snapshot, weights="one")
    report = expire_store(store, ExpirePolicy(older_than=90 * DAY))
    assert (report.trainings, report.snapshots) == ((), ())
    age_files(store, 100 * DAY)
    with store.intents.hold("finetune-1"):
        assert expire_store(store, ExpirePolicy(older_than=90 * DAY)).trainings == (), "it may be running"
    assert expire_store(store, ExpirePolicy(older_than=90 * DAY), dry_run=True).trainings == (KEY,)
    preview = preview_garbage(store, 0, ExpirePolicy(older_than=90 * DAY))
    report = expire_store(store, ExpirePolicy(older_than=90 * DAY))
    assert (report.trainings, report.snapshots) == ((KEY,), (snapshot,))
    assert store.trainings.find_newest(KEY) is None
    assert preview["trainings"].files > 0
    assert collect_garbage(store, 0) == preview
    assert list_paths(store) == []
