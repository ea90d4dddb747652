"""Models are stored, resolved, verified, and kept by gc and expire; hostile manifests are refused."""

import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rag_model.errors import RefusedError, StoreError, UsageError
from rag_model.store import ModelContent, ModelManifest, Store
from rag_model.store.upkeep.expire import ExpirePolicy, expire_store
from rag_model.store.upkeep.gc import collect_garbage
from rag_model.store.upkeep.verify import verify_version
from rag_model.store.versions.model_manifest import detect_model_parts
from rag_model.store.versions.models import ModelMetadata, put_model
from rag_model.store.versions.moves import rollback, tag
from tests.fixtures.store_files import (
    MODEL_FILES,
    WEIGHTS,
    age_files,
    publish_parts,
    put_weights,
    read_texts,
    replace_value,
    write_model,
)

DAY = 86400.0
IMMEDIATELY = ExpirePolicy(keep=1, older_than=0)


def test_stored_model_is_read_back(any_store: Store) -> None:
    stored = put_weights(any_store, "one")
    assert (stored.move.number, stored.move.snapshot) == (1, stored.model)
    for name in ("reader", "reader@1", stored.model, stored.model[:8]):
        assert any_store.models.resolve(name) == stored.model
    manifest = any_store.models.get(stored.model)
    assert (manifest.content.kind, manifest.content.space) == ("dpr", {"name": "s"})
    assert (manifest.content.lineage, manifest.metrics) == ({"recipe": {"seed": 0}}, {"after": {}})
    folder = any_store.get_model_folder("reader")
    assert read_texts(folder) == {**MODEL_FILES, WEIGHTS: "one"}
    assert any_store.get_model_folder(stored.model) == folder
    assert collect_garbage(any_store, 0.0)["blobs"].files == 0
    assert verify_version(any_store, stored.model, any_store.models) == []


def test_same_model_is_stored_once(store: Store) -> None:
    assert put_weights(store, "one") == put_weights(store, "one")
    assert put_weights(store, "two").move.number == 2
    assert put_weights(store, "one").move.number == 3, "a ref may return to an earlier model"
    assert len(store.models.list_ids()) == 2
    assert store.intents.files.list_names("intents") == []


def test_models_and_snapshots_have_separate_names(store: Store) -> None:
    snapshot, stored = publish_parts(store), put_weights(store, "one", "latest")
    tag(store, snapshot, "latest")
    assert store.snapshots.resolve("latest") == snapshot
    assert store.models.resolve("latest") == stored.model
    assert (store.refs.list_names(), store.models.refs.list_names()) == (["latest"], ["latest"])
    assert json.loads(store.files.read("models/refs/latest/00000001.json") or b"")["model"] == stored.model
    with pytest.raises(StoreError, match=f"no snapshot or ref '{stored.model[:8]}'"):
        store.snapshots.resolve(stored.model[:8])
    with pytest.raises(StoreError, match=f"no model or ref '{snapshot[:8]}'"):
        store.models.resolve(snapshot[:8])


def test_models_are_tagged_and_rolled_back(store: Store) -> None:
    first, second = put_weights(store, "one").model, put_weights(store, "two").model
    assert tag(store, "model:reader@1", "good").snapshot == first
    assert (store.models.resolve("good"), store.refs.list_names()) == (first, [])
    assert tag(store, "model:reader", "model:good").number == 2
    back = rollback(store, "model:reader")
    assert (back.number, back.snapshot, back.previous) == (3, first, second)
    with pytest.raises(UsageError, match=f"names model {first[:12]}"):
        rollback(store, "model:reader", 1)
    with pytest.raises(UsageError, match="leave out `model:`"):
        tag(store, "latest", "model:good")


def test_ref_does_not_move_to_an_incomplete_model(store: Store) -> None:
    first = put_weights(store, "one").model
    put_weights(store, "two")
    store.files.remove(store.models.get(first).content.files[WEIGHTS].path)
    with pytest.raises(RefusedError, match=f"model {first[:12]} .* is incomplete"):
        rollback(store, "model:reader")
    assert store.models.refs.list_numbers("reader") == [1, 2]
    with pytest.raises(StoreError, match="is missing"):
        store.get_model_folder(first)


def test_expire_deletes_model_without_ref(store: Store) -> None:
    first, second = put_weights(store, "one").model, put_weights(store, "two").model
    third = put_weights(store, "three", "other").model
    assert expire_store(store, IMMEDIATELY, dry_run=True).models == (first,)
    report = expire_store(store, IMMEDIATELY)
    assert (report.moves, report.snapshots, report.models) == (("model:reader@1",), (), (first,))
    assert collect_garbage(store, 0.0)["blobs"].files == 1, "only the weights, because all models share the other files"
    assert store.models.list_ids() == sorted([second, third])
    assert verify_version(store, second, store.models) == verify_version(store, third, store.models) == []
    with pytest.raises(StoreError, match=f"model {first[:12]} is missing"):
        store.models.get(first)


def test_recent_model_without_ref_is_kept(store: Store) -> None:
    stored = put_weights(store, "one")
    store.files.delete_folder("models/refs")
    assert expire_store(store, ExpirePolicy()).models == ()
    age_files(store, 91 * DAY)
    assert expire_store(store, ExpirePolicy()).models == (stored.model,)


@pytest.mark.parametrize("data", [b"{", b'{"format": 2}'], ids=["damaged", "of a newer format"])
def test_unreadable_model_stops_gc(store: Store, data: bytes) -> None:
    stored = put_weights(store, "one")
    orphan = store.blobs.put_bytes(b"orphan")
    store.files.write(f"models/{stored.model}.json", data)
    with pytest.raises(StoreError, match="cannot be used"):
        collect_garbage(store, 0.0)
    assert store.blobs.exists(orphan)
    store.files.remove(f"models/{stored.model}.json")
    with pytest.raises(StoreError, match=f"ref reader .* names model {stored.model[:12]}, which is missing"):
        collect_garbage(store, 0.0)
    assert store.blobs.exists(orphan)
    assert [problem.path for problem in verify_version(store, stored.model, store.models)] == [
        f"models/{stored.model}.json",
        "models/refs/reader/00000001.json",
    ]


def test_gc_keeps_files_of_a_model_that_is_being_stored(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sweeps run after the blobs are written: before the intent to publish, and before the manifest."""
    deleted_files = {}
    write, create = store.files.write, store.files.create

    def sweep_and_write(write_file: Callable[[str, bytes], Any], path: str, data: bytes) -> Any:
        if path.startswith(("models/", "intents/publish-")):
            deleted_files[path.partition("/")[0]] = collect_garbage(Store.open(store.url), 0.0)["blobs"].files
        return write_file(path, data)

    monkeypatch.setattr(store.files, "write", partial(sweep_and_write, write))
    monkeypatch.setattr(store.files, "create", partial(sweep_and_write, create))
    stored = put_weights(store)
    assert deleted_files == {"intents": 0, "models": 0}
    assert verify_version(store, stored.model, store.models) == []


def test_history_has_models_of_all_concurrent_writers(store: Store) -> None:
    with ThreadPoolExecutor(4) as pool:
        models = list(pool.map(lambda n: put_weights(Store.open(store.url), f"weights {n}").model, range(8)))
    history = store.models.refs.read_history("reader")
    assert [move.number for move in history] == [*range(1, 9)]
    assert sorted(move.snapshot for move in history) == sorted(models)
    assert [move.previous for move in history] == [None, *(move.snapshot for move in history[:-1])]


def test_folder_without_a_model_is_refused(store: Store, tmp_path: Path) -> None:
    metadata = ModelMetadata("dpr", None, {})
    with pytest.raises(UsageError, match="has no files"):
        put_model(store, tmp_path / "nothing", metadata, "reader")
    (write_model(tmp_path / "pickled", "one") / "pytorch_model.bin").write_bytes(b"pickled")
    with pytest.raises(UsageError, match=r"pytorch_model\.bin is not a file .* save the weights as safetensors"):
        put_model(store, tmp_path / "pickled", metadata, "reader")
    with pytest.raises(UsageError, match="not a ref name"):
        put_weights(store, "two", "a/b")
    assert store.models.list_ids() == store.files.list_names("blobs", kind="directory") == []


BLOB = {"id": f"sha256:{'0' * 64}", "size": 1}


def build_manifest() -> dict[str, Any]:
    content = {"kind": "dpr", "space": {}, "lineage": {}, "files": {"question/config.json": BLOB}}
    value = {"format": 1, "id": "", "content": content, "metrics": {}, "provenance": {}}
    value["id"] = ModelManifest(ModelContent.from_json(content)).id
    return value


def test_manifest_round_trips_through_json() -> None:
    read = ModelManifest.from_json(build_manifest())
    assert ModelManifest.from_bytes(json.dumps(read.to_json()).encode()) == read


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("files", {"../etc/passwd.json": BLOB}, "file path"),
        ("files", {"/etc/passwd.json": BLOB}, "file path"),
        ("files", {"a\\b.json": BLOB}, "file path"),
        ("files", {"manifest.json": BLOB}, "file path"),
        ("files", {"a.json": BLOB, "a.json/b.json": BLOB}, "which is a folder as well"),
        ("files", {"pytorch_model.bin": BLOB}, r"a model's files are \.json"),
        ("files", {"a.json": {"id": "md5:0", "size": 1}}, "not a blob id"),
        ("files", {"a.json": {**BLOB, "size": -1}}, "impossible size"),
        ("files", [], "field 'files'"),
        ("kind", "../dpr", "kind"),
        ("kind", None, "kind"),
        ("space", "minilm", "field 'space'"),
        ("lineage", [], "field 'lineage'"),
        ("more", 1, "the unknown field 'more'"),
    ],
)
def test_hostile_manifest_is_refused(store: Store, field: str, value: Any, message: str) -> None:
    manifest = replace_value(build_manifest(), ("content", field), value)
    with pytest.raises(StoreError, match=message):
        ModelManifest.from_json(manifest)
    store.files.write(f"models/{'0' * 64}.json", json.dumps(manifest).encode())
    with pytest.raises(StoreError, match="cannot be used"):
        store.get_model_folder("0" * 64)


@pytest.mark.parametrize("lineage", [float("nan"), "\ud800"])
def test_content_that_json_cannot_represent_has_no_id(lineage: Any) -> None:
    with pytest.raises(StoreError, match="JSON cannot represent"):
        _ = ModelManifest(ModelContent("dpr", {}, None, {"loss": lineage})).id


def test_content_with_another_id_is_refused(store: Store) -> None:
    with pytest.raises(StoreError, match="its content hashes to"):
        ModelManifest.from_json(replace_value(build_manifest(), ("content", "lineage"), {"snapshot": "another"}))
    model_id = put_weights(store, "one").model
    store.files.write(f"models/{model_id}.json", json.dumps(build_manifest()).encode())
    with pytest.raises(StoreError, match="is damaged: it contains model"):
        store.models.get(model_id)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)


@given(st.sampled_from(["format", "id", "content", "metrics", "provenance", "kind", "space", "lineage", "files"]), JSON)
def test_any_field_value_is_read_or_refused(field: str, value: Any) -> None:
    changed = build_manifest()
    (changed["content"] if field in changed["content"] else changed)[field] = value
    try:
        manifest = ModelManifest.from_json(changed)
    except StoreError:
        return
    assert ModelManifest.from_json(manifest.to_json()) == manifest


@pytest.mark.parametrize(
    ("paths", "parts"),
    [
        (["README.md", "question/config.json", "passage/config.json"], {"question", "passage"}),
        (["question/config.json", "generator/model.safetensors"], {"question", "generator"}),
        (
            ["model.safetensors", "question_encoder_tokenizer/a.json", "generator_tokenizer/b.json"],
            {"question", "generator"},
        ),
        (["words/model.safetensors"], {"words"}),
        (["model.safetensors"], set()),
    ],
)
def test_parts_are_detected_by_folders_and_tokenizers(paths: list[str], parts: set[str]) -> None:
    assert detect_model_parts(paths) == parts
