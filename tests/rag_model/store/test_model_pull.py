"""Models pulled and exported as snapshots are: what is missing, verified, in one step; from a folder, memory and S3."""

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
    found: Store = request.getfixturevalue(request.param)
    return found


@pytest.fixture
def put(store: Store, tmp_path: Path) -> Callable[[str], str]:
    """Put a model whose weights are a word, all else equal, under the name `reader`; return its id."""

    def put(weights: str) -> str:
        folder = tmp_path / f"trained-{weights}"
        for name, text in {**FILES, "question/model.safetensors": weights}.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(text)
        return put_model(store, folder, ModelMetadata("dpr", None, {"weights": weights}), "reader").model

    return put


def texts(folder: Path) -> dict[str, str]:
    return {path.relative_to(folder).as_posix(): path.read_text() for path in folder.rglob("*") if path.is_file()}


def test_what_is_missing_comes_and_one_link_moves(store: Store, put: Callable[[str], str], tmp_path: Path) -> None:
    one, dest = put("one"), tmp_path / "dest"
    first = pull(store, "model:reader", dest)
    assert (first.snapshot, first.path, first.reused_bytes) == (one, dest / one, 0)
    assert first.fetched_bytes == sum(map(len, FILES.values())) + len("one")
    found = texts(dest / "current")
    assert json.loads(found.pop("manifest.json"))["id"] == one
    assert found == {**FILES, "question/model.safetensors": "one"}

    two = put("two")
    second = pull(store, f"model:{two[:8]}", dest)
    assert (second.fetched_bytes, second.reused_bytes) == (len("two"), sum(map(len, FILES.values())))
    assert (dest / "current").resolve().name == two
    assert texts(dest / one)["question/model.safetensors"] == "one", "whoever reads it keeps it"

    third = pull(store, "model:reader@1", dest, keep=1)
    assert (third.fetched_bytes, third.pruned, (dest / two).exists()) == (0, (two,), False)
    held = {path.read_text() for path in (dest / ".blobs").rglob("*") if path.is_file()}
    assert held == {*FILES.values(), "one"}, "what only the deleted one had is gone"


def test_it_is_found_loaded_verified_and_kept(store: Store, put: Callable[[str], str]) -> None:
    one = put("one")
    assert {store.models.resolve(name) for name in ("reader", "reader@1", one, one[:6])} == {one}
    assert texts(store.get_model_folder("reader"))["question/model.safetensors"] == "one"
    assert verify_version(store, one, store.models) == []
    assert collect_garbage(store, 0.0)["blobs"].files == 0


def test_a_damaged_blob_moves_nothing(store: Store, put: Callable[[str], str], tmp_path: Path) -> None:
    one, dest = put("one"), tmp_path / "dest"
    pull(store, "model:reader", dest)
    two = put("two")
    blob = store.models.get(two).content.files["question/model.safetensors"]
    store.files.remove(blob.path)
    store.files.write(blob.path, b"TWO")
    for bring in (lambda: pull(store, "model:reader", dest), lambda: export_model(store, "reader", tmp_path / "out")):
        with pytest.raises(StoreError, match="is damaged"):
            bring()
    assert (dest / "current").resolve().name == one
    assert not (tmp_path / "out").exists()
    assert [problem.path for problem in verify_version(store, two, store.models)] == ["question/model.safetensors"]


def test_an_export_is_a_plain_folder_of_its_own(store: Store, put: Callable[[str], str], tmp_path: Path) -> None:
    one, out = put("one"), tmp_path / "out"
    report = export_model(store, "reader", out)
    assert (report.model, report.path, report.kind) == (one, out, "dpr")
    assert report.bytes == sum(path.stat().st_size for path in out.rglob("*") if path.is_file())
    assert texts(out) == {**FILES, "question/model.safetensors": "one"}
    (out / "README.md").write_text("edited")  # nobody else's file
    assert texts(store.get_model_folder("reader"))["README.md"] == FILES["README.md"]
    with pytest.raises(UsageError, match="exists already"):
        export_model(store, "reader", out)


def test_snapshots_and_models_have_folders_of_their_own(
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
