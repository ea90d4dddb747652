"""Models are pulled and exported like snapshots: a pull fetches and verifies missing files and moves one link."""

import json
from pathlib import Path

import pytest

from rag_model.errors import StoreError, UsageError
from rag_model.store import Store
from rag_model.store.pulling.pull import pull
from rag_model.store.upkeep.verify import verify_version
from rag_model.store.versions.models import export_model
from tests.fixtures.store_files import MODEL_FILES, WEIGHTS, publish_parts, put_weights, read_texts


def test_pull_fetches_missing_files(any_store: Store, tmp_path: Path) -> None:
    first_id, dest = put_weights(any_store, "one").model, tmp_path / "dest"
    first = pull(any_store, "model:reader", dest)
    assert (first.snapshot, first.path, first.reused_bytes) == (first_id, dest / first_id, 0)
    assert first.fetched_bytes == sum(map(len, MODEL_FILES.values())) + len("one")
    files = read_texts(dest / "current")
    assert json.loads(files.pop("manifest.json"))["id"] == first_id
    assert files == {**MODEL_FILES, WEIGHTS: "one"}

    second_id = put_weights(any_store, "two").model
    second = pull(any_store, f"model:{second_id[:8]}", dest)
    assert (second.fetched_bytes, second.reused_bytes) == (len("two"), sum(map(len, MODEL_FILES.values())))
    assert (dest / "current").resolve().name == second_id
    assert read_texts(dest / first_id)[WEIGHTS] == "one", "a reader may use it"

    third = pull(any_store, "model:reader@1", dest, keep_snapshots=1)
    assert (third.fetched_bytes, third.pruned, (dest / second_id).exists()) == (0, (second_id,), False)
    blob_texts = {path.read_text() for path in (dest / ".blobs").rglob("*") if path.is_file()}
    assert blob_texts == {*MODEL_FILES.values(), "one"}, "files that only the deleted version had are deleted"


def test_damaged_blob_does_not_change_the_link(any_store: Store, tmp_path: Path) -> None:
    first_id, dest = put_weights(any_store, "one").model, tmp_path / "dest"
    pull(any_store, "model:reader", dest)
    second_id = put_weights(any_store, "two").model
    blob = any_store.models.get(second_id).content.files[WEIGHTS]
    any_store.files.remove(blob.path)
    any_store.files.write(blob.path, b"TWO")
    for copy in (
        lambda: pull(any_store, "model:reader", dest),
        lambda: export_model(any_store, "reader", tmp_path / "out"),
    ):
        with pytest.raises(StoreError, match="is damaged"):
            copy()
    assert (dest / "current").resolve().name == first_id
    assert not (tmp_path / "out").exists()
    (problem,) = verify_version(any_store, second_id, any_store.models)
    assert problem.path == WEIGHTS


def test_export_is_independent_of_the_store(any_store: Store, tmp_path: Path) -> None:
    model_id, out = put_weights(any_store, "one").model, tmp_path / "out"
    report = export_model(any_store, "reader", out)
    assert (report.model, report.path, report.kind) == (model_id, out, "dpr")
    assert report.bytes == sum(path.stat().st_size for path in out.rglob("*") if path.is_file())
    assert read_texts(out) == {**MODEL_FILES, WEIGHTS: "one"}
    (out / "README.md").write_text("edited")
    assert read_texts(any_store.get_model_folder("reader"))["README.md"] == MODEL_FILES["README.md"]
    with pytest.raises(UsageError, match="exists already"):
        export_model(any_store, "reader", out)


def test_snapshots_and_models_are_pulled_to_separate_folders(store: Store, tmp_path: Path) -> None:
    snapshot = publish_parts(store)
    put_weights(store)
    pull(store, snapshot, tmp_path / "snapshots")
    pull(store, "model:reader", tmp_path / "models")
    with pytest.raises(UsageError, match="is a folder of snapshots: pull models to another folder"):
        pull(store, "model:reader", tmp_path / "snapshots")
    with pytest.raises(UsageError, match="is a folder of models"):
        pull(store, snapshot, tmp_path / "models")
    assert (tmp_path / "snapshots" / "current").resolve().name == snapshot
