"""Models are pulled and exported like snapshots: a pull fetches and verifies missing files and moves one link."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from rag_model.errors import StoreError, UsageError
from rag_model.store import Store
from rag_model.store.pulling.pull import pull
from rag_model.store.upkeep.gc import collect_garbage
from rag_model.store.upkeep.verify import verify_version
from rag_model.store.versions.models import ModelMetadata, export_model, put_model

FILES = {"README.md": "# A model", "question/config.json": "{}", "question/tokenizer.json": "tokens"}


@pytest.fixture(params=["local_store", "memory_store", "s3_store"])
def store(request: pytest.FixtureRequest) -> Store:
    store: Store = request.getfixturevalue(request.param)
    return store


@pytest.fixture
def put_weights(store: Store, tmp_path: Path) -> Callable[[str], str]:
    """Store a model with the given weights and otherwise equal files under the name `reader`; return its id."""

    def put_weights(weights: str) -> str:
        folder = tmp_path / f"trained-{weights}"
        for name, text in {**FILES, "question/model.safetensors": weights}.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(text)
        return put_model(store, folder, ModelMetadata("dpr", None, {"weights": weights}), "reader").model

    return put_weights


def read_files(folder: Path) -> dict[str, str]:
    return {path.relative_to(folder).as_posix(): path.read_text() for path in folder.rglob("*") if path.is_file()}


def test_pull_fetches_missing_files(store: Store, put_weights: Callable[[str], str], tmp_path: Path) -> None:
    first_id, dest = put_weights("one"), tmp_path / "dest"
    first = pull(store, "model:reader", dest)
    assert (first.snapshot, first.path, first.reused_bytes) == (first_id, dest / first_id, 0)
    assert first.fetched_bytes == sum(map(len, FILES.values())) + len("one")
    files = read_files(dest / "current")
    assert json.loads(files.pop("manifest.json"))["id"] == first_id
    assert files == {**FILES, "question/model.safetensors": "one"}

    second_id = put_weights("two")
    second = pull(store, f"model:{second_id[:8]}", dest)
    assert (second.fetched_bytes, second.reused_bytes) == (len("two"), sum(map(len, FILES.values())))
    assert (dest / "current").resolve().name == second_id
    assert read_files(dest / first_id)["question/model.safetensors"] == "one", "a reader may use it"

    third = pull(store, "model:reader@1", dest, keep_snapshots=1)
    assert (third.fetched_bytes, third.pruned, (dest / second_id).exists()) == (0, (second_id,), False)
    blob_texts = {path.read_text() for path in (dest / ".blobs").rglob("*") if path.is_file()}
    assert blob_texts == {*FILES.values(), "one"}, "files that only the deleted version had are deleted"


def test_model_is_resolved_loaded_verified_and_kept_by_gc(store: Store, put_weights: Callable[[str], str]) -> None:
    model_id = put_weights("one")
    assert {store.models.resolve(name) for name in ("reader", "reader@1", model_id, model_id[:6])} == {model_id}
    assert read_files(store.get_model_folder("reader"))["question/model.safetensors"] == "one"
    assert verify_version(store, model_id, store.models) == []
    assert collect_garbage(store, 0.0)["blobs"].files == 0


def test_damaged_blob_does_not_change_the_link(store: Store, put_weights: Callable[[str], str], tmp_path: Path) -> None:
    first_id, dest = put_weights("one"), tmp_path / "dest"
    pull(store, "model:reader", dest)
    second_id = put_weights("two")
    blob = store.models.get(second_id).content.files["question/model.safetensors"]
    store.files.remove(blob.path)
    store.files.write(blob.path, b"TWO")
    for copy in (lambda: pull(store, "model:reader", dest), lambda: export_model(store, "reader", tmp_path / "out")):
        with pytest.raises(StoreError, match="is damaged"):
            copy()
    assert (dest / "current").resolve().name == first_id
    assert not (tmp_path / "out").exists()
    (problem,) = verify_version(store, second_id, store.models)
    assert problem.path == "question/model.safetensors"


def test_export_is_independent_of_the_store(store: Store, put_weights: Callable[[str], str], tmp_path: Path) -> None:
    model_id, out = put_weights("one"), tmp_path / "out"
    report = export_model(store, "reader", out)
    assert (report.model, report.path, report.kind) == (model_id, out, "dpr")
    assert report.bytes == sum(path.stat().st_size for path in out.rglob("*") if path.is_file())
    assert read_files(out) == {**FILES, "question/model.safetensors": "one"}
    (out / "README.md").write_text("edited")
    assert read_files(store.get_model_folder("reader"))["README.md"] == FILES["README.md"]
    with pytest.raises(UsageError, match="exists already"):
        export_model(store, "reader", out)


def test_snapshots_and_models_are_pulled_to_separate_folders(
    local_store: Store, publish: Callable[..., str], tmp_path: Path
) -> None:
    snapshot = publish(local_store)
    (tmp_path / "trained").mkdir()
    (tmp_path / "trained" / "config.json").write_text("{}")
    put_model(local_store, tmp_path / "trained", ModelMetadata("dpr", None, {}), "reader")
    pull(local_store, snapshot, tmp_path / "snapshots")
    pull(local_store, "model:reader", tmp_path / "models")
    with pytest.raises(UsageError, match="is a folder of snapshots: pull models to another folder"):
        pull(local_store, "model:reader", tmp_path / "snapshots")
    with pytest.raises(UsageError, match="is a folder of models"):
        pull(local_store, snapshot, tmp_path / "models")
    assert (tmp_path / "snapshots" / "current").resolve().name == snapshot
