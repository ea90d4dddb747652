"""Models are stored, resolved, verified, and kept by gc and expire; hostile manifests are refused."""

import copy
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
from rag_model.store.versions.models import ModelMetadata, StoredModel, put_model
from rag_model.store.versions.moves import rollback, tag

DAY = 86400.0
IMMEDIATELY = ExpirePolicy(keep=1, older_than=0)
RECIPE = {"learning_rate": 1e-5, "seed": 0}


@pytest.fixture
def store(local_store: Store) -> Store:
    return local_store


@pytest.fixture
def write_trained(tmp_path: Path) -> Callable[[str], Path]:
    """Return a function that writes a trained model's folder with the given weights."""

    def write_trained(word: str) -> Path:
        folder = tmp_path / f"trained-{word}"
        (folder / "question").mkdir(parents=True, exist_ok=True)
        (folder / "question" / "config.json").write_text("{}")
        (folder / "question" / "model.safetensors").write_text(word)
        (folder / "README.md").write_text("# A model")
        return folder

    return write_trained


@pytest.fixture
def put_weights(store: Store, write_trained: Callable[[str], Path]) -> Callable[..., StoredModel]:
    """Return a function that stores a model with the given weights."""

    def put_weights(word: str, ref: str = "reader") -> StoredModel:
        return put_model(
            store, write_trained(word), ModelMetadata("dpr", {"name": "s"}, {"recipe": RECIPE}, {"after": {}}), ref
        )

    return put_weights


def test_stored_model_is_read_back(store: Store, put_weights: Callable[..., StoredModel]) -> None:
    stored = put_weights("one")
    assert (stored.move.number, stored.move.snapshot) == (1, stored.model)
    for name in ("reader", "reader@1", stored.model, stored.model[:8]):
        assert store.models.resolve(name) == stored.model
    manifest = store.models.get(stored.model)
    assert (manifest.content.kind, manifest.content.space) == ("dpr", {"name": "s"})
    assert (manifest.content.lineage, manifest.metrics) == ({"recipe": RECIPE}, {"after": {}})
    folder = store.get_model_folder("reader")
    assert {path.relative_to(folder).as_posix(): path.read_text() for path in folder.rglob("*.*")} == {
        "README.md": "# A model",
        "question/config.json": "{}",
        "question/model.safetensors": "one",
    }
    assert store.get_model_folder(stored.model) == folder
    assert verify_version(store, stored.model, store.models) == []


def test_model_is_stored_in_memory(memory_store: Store, write_trained: Callable[[str], Path]) -> None:
    stored = put_model(memory_store, write_trained("one"), ModelMetadata("dpr", None, {}), "reader")
    assert (memory_store.get_model_folder("reader") / "question" / "model.safetensors").read_text() == "one"
    assert collect_garbage(memory_store, 0.0)["blobs"].files == 0
    assert verify_version(memory_store, stored.model, memory_store.models) == []


def test_same_model_is_stored_once(store: Store, put_weights: Callable[..., StoredModel]) -> None:
    assert put_weights("one") == put_weights("one")
    assert put_weights("two").move.number == 2
    assert put_weights("one").move.number == 3, "a ref may return to an earlier model"
    assert len(store.models.list_ids()) == 2
    assert store.intents.files.list_names("intents") == []


def test_models_and_snapshots_have_separate_names(
    store: Store, put_weights: Callable[..., StoredModel], publish: Callable[..., str]
) -> None:
    snapshot, stored = publish(store), put_weights("one", "latest")
    tag(store, snapshot, "latest")
    assert store.snapshots.resolve("latest") == snapshot
    assert store.models.resolve("latest") == stored.model
    assert (store.refs.list_names(), store.models.refs.list_names()) == (["latest"], ["latest"])
    assert json.loads(store.files.read("models/refs/latest/00000001.json") or b"")["model"] == stored.model
    with pytest.raises(StoreError, match=f"no snapshot or ref '{stored.model[:8]}'"):
        store.snapshots.resolve(stored.model[:8])
    with pytest.raises(StoreError, match=f"no model or ref '{snapshot[:8]}'"):
        store.models.resolve(snapshot[:8])


def test_models_are_tagged_and_rolled_back(store: Store, put_weights: Callable[..., StoredModel]) -> None:
    first, second = put_weights("one").model, put_weights("two").model
    assert tag(store, "model:reader@1", "good").snapshot == first
    assert (store.models.resolve("good"), store.refs.list_names()) == (first, [])
    assert tag(store, "model:reader", "model:good").number == 2
    back = rollback(store, "model:reader")
    assert (back.number, back.snapshot, back.previous) == (3, first, second)
    with pytest.raises(UsageError, match=f"names model {first[:12]}"):
        rollback(store, "model:reader", 1)
    with pytest.raises(UsageError, match="leave out `model:`"):
        tag(store, "latest", "model:good")


def test_ref_does_not_move_to_an_incomplete_model(store: Store, put_weights: Callable[..., StoredModel]) -> None:
    first = put_weights("one").model
    put_weights("two")
    store.files.remove(store.models.get(first).content.files["question/model.safetensors"].path)
    with pytest.raises(RefusedError, match=f"model {first[:12]} .* is incomplete"):
        rollback(store, "model:reader")
    assert store.models.refs.list_numbers("reader") == [1, 2]
    with pytest.raises(StoreError, match="is missing"):
        store.get_model_folder(first)


def test_gc_keeps_files_of_models(store: Store, put_weights: Callable[..., StoredModel]) -> None:
    stored = put_weights("one")
    orphan = store.blobs.put_bytes(b"orphan")
    assert collect_garbage(store, 0.0)["blobs"].files == 1
    assert not store.blobs.exists(orphan)
    assert verify_version(store, stored.model, store.models) == []
    assert store.get_model_folder("reader").is_dir()


def test_expire_deletes_model_without_ref(store: Store, put_weights: Callable[..., StoredModel]) -> None:
    first, second = put_weights("one").model, put_weights("two").model
    third = put_weights("three", "other").model
    assert expire_store(store, IMMEDIATELY, dry_run=True).models == (first,)
    report = expire_store(store, IMMEDIATELY)
    assert (report.moves, report.snapshots, report.models) == (("model:reader@1",), (), (first,))
    assert collect_garbage(store, 0.0)["blobs"].files == 1, "only the weights, because all models share the other files"
    assert store.models.list_ids() == sorted([second, third])
    assert verify_version(store, second, store.models) == verify_version(store, third, store.models) == []
    with pytest.raises(StoreError, match=f"model {first[:12]} is missing"):
        store.models.get(first)


def test_recent_model_without_ref_is_kept(
    store: Store, put_weights: Callable[..., StoredModel], age_store: Callable[..., None]
) -> None:
    stored = put_weights("one")
    store.files.delete_folder("models/refs")
    assert expire_store(store, ExpirePolicy()).models == ()
    age_store(store, 91 * DAY)
    assert expire_store(store, ExpirePolicy()).models == (stored.model,)


@pytest.mark.parametrize("data", [b"{", b'{"format": 2}'], ids=["damaged", "of a newer format"])
def test_unreadable_model_stops_gc(store: Store, put_weights: Callable[..., StoredModel], data: bytes) -> None:
    stored = put_weights("one")
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


def test_gc_keeps_files_of_a_model_that_is_being_stored(
    store: Store, write_trained: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sweeps run after the blobs are written: before the intent to publish, and before the manifest."""
    deleted_files = {}
    write, create = store.files.write, store.files.create

    def sweep_and_write(write_file: Callable[[str, bytes], Any], path: str, data: bytes) -> Any:
        if path.startswith(("models/", "intents/publish-")):
            deleted_files[path.partition("/")[0]] = collect_garbage(Store.open(store.url), 0.0)["blobs"].files
        return write_file(path, data)

    monkeypatch.setattr(store.files, "write", partial(sweep_and_write, write))
    monkeypatch.setattr(store.files, "create", partial(sweep_and_write, create))
    stored = put_model(store, write_trained("one"), ModelMetadata("dpr", None, {}), "reader")
    assert deleted_files == {"intents": 0, "models": 0}
    assert verify_version(store, stored.model, store.models) == []


def test_history_has_models_of_all_concurrent_writers(store: Store, write_trained: Callable[[str], Path]) -> None:
    words = [f"weights {number}" for number in range(8)]

    def put_from_another_process(word: str) -> str:
        return put_model(Store.open(store.url), write_trained(word), ModelMetadata("dpr", None, {}), "reader").model

    with ThreadPoolExecutor(4) as pool:
        models = list(pool.map(put_from_another_process, words))
    history = store.models.refs.read_history("reader")
    assert [move.number for move in history] == [*range(1, 9)]
    assert sorted(move.snapshot for move in history) == sorted(models)
    assert [move.previous for move in history] == [None, *(move.snapshot for move in history[:-1])]


def test_folder_without_a_model_is_refused(store: Store, write_trained: Callable[[str], Path], tmp_path: Path) -> None:
    metadata = ModelMetadata("dpr", None, {})
    with pytest.raises(UsageError, match="has no files"):
        put_model(store, tmp_path / "nothing", metadata, "reader")
    (write_trained("one") / "pytorch_model.bin").write_bytes(b"pickled")
    with pytest.raises(UsageError, match=r"pytorch_model\.bin is not a file .* save the weights as safetensors"):
        put_model(store, write_trained("one"), metadata, "reader")
    with pytest.raises(UsageError, match="not a ref name"):
        put_model(store, write_trained("two"), metadata, "a/b")
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
    manifest = build_manifest()
    manifest["content"][field] = value
    with pytest.raises(StoreError, match=message):
        ModelManifest.from_json(manifest)
    store.files.write(f"models/{'0' * 64}.json", json.dumps(manifest).encode())
    with pytest.raises(StoreError, match="cannot be used"):
        store.get_model_folder("0" * 64)


@pytest.mark.parametrize("lineage", [float("nan"), "\ud800"])
def test_content_that_json_cannot_represent_has_no_id(lineage: Any) -> None:
    with pytest.raises(StoreError, match="JSON cannot represent"):
        _ = ModelManifest(ModelContent("dpr", {}, None, {"loss": lineage})).id


def test_content_with_another_id_is_refused(store: Store, put_weights: Callable[..., StoredModel]) -> None:
    changed = build_manifest()
    changed["content"]["lineage"] = {"snapshot": "another"}
    with pytest.raises(StoreError, match="its content hashes to"):
        ModelManifest.from_json(changed)
    model_id = put_weights("one").model
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
    changed = copy.deepcopy(build_manifest())
    (changed["content"] if field in changed["content"] else changed)[field] = value
    try:
        manifest = ModelManifest.from_json(changed)
    except StoreError:
        return
    assert ModelManifest.from_json(manifest.to_json()) == manifest
