"""Models in the store: put, named, found, verified, kept by gc and expire, and no hostile manifest used."""

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
AT_ONCE = ExpirePolicy(keep=1, older_than=0)
RECIPE = {"learning_rate": 1e-5, "seed": 0}


@pytest.fixture
def store(local_store: Store) -> Store:
    return local_store


@pytest.fixture
def trained(tmp_path: Path) -> Callable[[str], Path]:
    """Return a function that writes a folder as a training saves it, its weights being the word given."""

    def trained(word: str) -> Path:
        folder = tmp_path / f"trained-{word}"
        (folder / "question").mkdir(parents=True, exist_ok=True)
        (folder / "question" / "config.json").write_text("{}")
        (folder / "question" / "model.safetensors").write_text(word)
        (folder / "README.md").write_text("# A model")
        return folder

    return trained


@pytest.fixture
def put(store: Store, trained: Callable[[str], Path]) -> Callable[..., StoredModel]:
    """Put a model whose weights are a word."""

    def put(word: str, ref: str = "reader") -> StoredModel:
        return put_model(
            store, trained(word), ModelMetadata("dpr", {"name": "s"}, {"recipe": RECIPE}, {"after": {}}), ref
        )

    return put


def test_a_model_comes_out_as_it_went_in(store: Store, put: Callable[..., StoredModel]) -> None:
    made = put("one")
    assert (made.move.number, made.move.snapshot) == (1, made.model)
    for name in ("reader", "reader@1", made.model, made.model[:8]):
        assert store.models.resolve(name) == made.model
    manifest = store.models.get(made.model)
    assert (manifest.content.kind, manifest.content.space) == ("dpr", {"name": "s"})
    assert (manifest.content.lineage, manifest.metrics) == ({"recipe": RECIPE}, {"after": {}})
    folder = store.get_model_folder("reader")
    assert {path.relative_to(folder).as_posix(): path.read_text() for path in folder.rglob("*.*")} == {
        "README.md": "# A model",
        "question/config.json": "{}",
        "question/model.safetensors": "one",
    }
    assert store.get_model_folder(made.model) == folder
    assert verify_version(store, made.model, store.models) == []


def test_any_kind_of_store_keeps_models(memory_store: Store, trained: Callable[[str], Path]) -> None:
    made = put_model(memory_store, trained("one"), ModelMetadata("dpr", None, {}), "reader")
    assert (memory_store.get_model_folder("reader") / "question" / "model.safetensors").read_text() == "one"
    assert collect_garbage(memory_store, 0.0)["blobs"].files == 0
    assert verify_version(memory_store, made.model, memory_store.models) == []


def test_the_same_model_is_put_once(store: Store, put: Callable[..., StoredModel]) -> None:
    assert put("one") == put("one")
    assert put("two").move.number == 2
    assert put("one").move.number == 3, "a name may return to what it named before"
    assert len(store.models.list_ids()) == 2
    assert store.intents.files.list_names("intents") == []


def test_names_of_models_and_of_snapshots_are_apart(
    store: Store, put: Callable[..., StoredModel], publish: Callable[..., str]
) -> None:
    snapshot, made = publish(store), put("one", "latest")
    tag(store, snapshot, "latest")
    assert store.snapshots.resolve("latest") == snapshot
    assert store.models.resolve("latest") == made.model
    assert (store.refs.list_names(), store.models.refs.list_names()) == (["latest"], ["latest"])
    assert json.loads(store.files.read("models/refs/latest/00000001.json") or b"")["model"] == made.model
    with pytest.raises(StoreError, match=f"no snapshot or ref '{made.model[:8]}'"):
        store.snapshots.resolve(made.model[:8])
    with pytest.raises(StoreError, match=f"no model or ref '{snapshot[:8]}'"):
        store.models.resolve(snapshot[:8])


def test_models_are_tagged_and_rolled_back(store: Store, put: Callable[..., StoredModel]) -> None:
    one, two = put("one").model, put("two").model
    assert tag(store, "model:reader@1", "good").snapshot == one
    assert (store.models.resolve("good"), store.refs.list_names()) == (one, [])
    assert tag(store, "model:reader", "model:good").number == 2
    back = rollback(store, "model:reader")
    assert (back.number, back.snapshot, back.previous) == (3, one, two)
    with pytest.raises(UsageError, match=f"names model {one[:12]}"):
        rollback(store, "model:reader", 1)
    with pytest.raises(UsageError, match="leave out `model:`"):
        tag(store, "latest", "model:good")


def test_no_name_moves_to_a_model_that_is_not_whole(store: Store, put: Callable[..., StoredModel]) -> None:
    one = put("one").model
    put("two")
    store.files.remove(store.models.get(one).content.files["question/model.safetensors"].path)
    with pytest.raises(RefusedError, match=f"model {one[:12]} .* is incomplete"):
        rollback(store, "model:reader")
    assert store.models.refs.list_numbers("reader") == [1, 2]
    with pytest.raises(StoreError, match="is missing"):
        store.get_model_folder(one)


def test_gc_keeps_what_models_name(store: Store, put: Callable[..., StoredModel]) -> None:
    made = put("one")
    orphan = store.blobs.put_bytes(b"orphan")
    assert collect_garbage(store, 0.0)["blobs"].files == 1
    assert not store.blobs.exists(orphan)
    assert verify_version(store, made.model, store.models) == []
    assert store.get_model_folder("reader").is_dir()


def test_expire_forgets_a_model_that_no_name_has_any_more(store: Store, put: Callable[..., StoredModel]) -> None:
    one, two = put("one").model, put("two").model
    kept = put("three", "other").model
    assert expire_store(store, AT_ONCE, dry_run=True).models == (one,)
    found = expire_store(store, AT_ONCE)
    assert (found.moves, found.snapshots, found.models) == (("model:reader@1",), (), (one,))
    assert collect_garbage(store, 0.0)["blobs"].files == 1, "the weights; the other two files are those of all three"
    assert store.models.list_ids() == sorted([two, kept])
    assert verify_version(store, two, store.models) == verify_version(store, kept, store.models) == []
    with pytest.raises(StoreError, match=f"model {one[:12]} is missing"):
        store.models.get(one)


def test_a_young_model_without_a_name_stays(
    store: Store, put: Callable[..., StoredModel], later: Callable[..., None]
) -> None:
    made = put("one")
    store.files.delete_folder("models/refs")
    assert expire_store(store, ExpirePolicy()).models == ()
    later(store, 91 * DAY)
    assert expire_store(store, ExpirePolicy()).models == (made.model,)


@pytest.mark.parametrize("data", [b"{", b'{"format": 2}'], ids=["damaged", "of a newer format"])
def test_gc_deletes_nothing_where_a_model_cannot_be_read(
    store: Store, put: Callable[..., StoredModel], data: bytes
) -> None:
    made = put("one")
    orphan = store.blobs.put_bytes(b"orphan")
    store.files.write(f"models/{made.model}.json", data)
    with pytest.raises(StoreError, match="cannot be used"):
        collect_garbage(store, 0.0)
    assert store.blobs.exists(orphan)
    store.files.remove(f"models/{made.model}.json")
    with pytest.raises(StoreError, match=f"ref reader .* names model {made.model[:12]}, which is missing"):
        collect_garbage(store, 0.0)
    assert store.blobs.exists(orphan)
    assert [problem.path for problem in verify_version(store, made.model, store.models)] == [
        f"models/{made.model}.json",
        "models/refs/reader/00000001.json",
    ]


def test_gc_takes_nothing_from_under_a_model_that_is_being_put(
    store: Store, trained: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sweep comes when the blobs are there and neither the intent to publish nor the manifest is, and one after."""
    swept = {}
    put, create = store.files.write, store.files.create

    def sweeping(write: Callable[[str, bytes], Any], path: str, data: bytes) -> Any:
        if path.startswith(("models/", "intents/publish-")):
            swept[path.partition("/")[0]] = collect_garbage(Store.open(store.url), 0.0)["blobs"].files
        return write(path, data)

    monkeypatch.setattr(store.files, "write", partial(sweeping, put))
    monkeypatch.setattr(store.files, "create", partial(sweeping, create))
    made = put_model(store, trained("one"), ModelMetadata("dpr", None, {}), "reader")
    assert swept == {"intents": 0, "models": 0}
    assert verify_version(store, made.model, store.models) == []


def test_of_two_writers_both_are_in_the_history(store: Store, trained: Callable[[str], Path]) -> None:
    words = [f"weights {number}" for number in range(8)]

    def put(word: str) -> str:
        return put_model(Store.open(store.url), trained(word), ModelMetadata("dpr", None, {}), "reader").model

    with ThreadPoolExecutor(4) as pool:
        models = list(pool.map(put, words))
    history = store.models.refs.read_history("reader")
    assert [move.number for move in history] == [*range(1, 9)]
    assert sorted(move.snapshot for move in history) == sorted(models)
    assert [move.previous for move in history] == [None, *(move.snapshot for move in history[:-1])]


def test_what_is_no_model_is_refused(store: Store, trained: Callable[[str], Path], tmp_path: Path) -> None:
    made = ModelMetadata("dpr", None, {})
    with pytest.raises(UsageError, match="has no files"):
        put_model(store, tmp_path / "nothing", made, "reader")
    (trained("one") / "pytorch_model.bin").write_bytes(b"pickled")
    with pytest.raises(UsageError, match=r"pytorch_model\.bin is not a file .* save the weights as safetensors"):
        put_model(store, trained("one"), made, "reader")
    with pytest.raises(UsageError, match="not a ref name"):
        put_model(store, trained("two"), made, "a/b")
    assert store.models.list_ids() == store.files.list_names("blobs", kind="directory") == []


BLOB = {"id": f"sha256:{'0' * 64}", "size": 1}


def document() -> dict[str, Any]:
    content = {"kind": "dpr", "space": {}, "lineage": {}, "files": {"question/config.json": BLOB}}
    value = {"format": 1, "id": "", "content": content, "metrics": {}, "provenance": {}}
    value["id"] = ModelManifest(ModelContent.from_json(content)).id
    return value


def test_a_manifest_is_read_back() -> None:
    read = ModelManifest.from_json(document())
    assert ModelManifest.from_bytes(json.dumps(read.to_json()).encode()) == read


@pytest.mark.parametrize(
    ("field", "value", "why"),
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
def test_a_hostile_manifest_is_refused(store: Store, field: str, value: Any, why: str) -> None:
    hostile = document()
    hostile["content"][field] = value
    with pytest.raises(StoreError, match=why):
        ModelManifest.from_json(hostile)
    store.files.write(f"models/{'0' * 64}.json", json.dumps(hostile).encode())
    with pytest.raises(StoreError, match="cannot be used"):
        store.get_model_folder("0" * 64)


@pytest.mark.parametrize("lineage", [float("nan"), "\ud800"])
def test_content_that_json_cannot_carry_has_no_id(lineage: Any) -> None:
    with pytest.raises(StoreError, match="JSON cannot represent"):
        _ = ModelManifest(ModelContent("dpr", {}, None, {"loss": lineage})).id


def test_content_of_another_id_is_refused(store: Store, put: Callable[..., StoredModel]) -> None:
    changed = document()
    changed["content"]["lineage"] = {"snapshot": "another"}
    with pytest.raises(StoreError, match="its content hashes to"):
        ModelManifest.from_json(changed)
    made = put("one").model
    store.files.write(f"models/{made}.json", json.dumps(document()).encode())
    with pytest.raises(StoreError, match="is damaged: it contains model"):
        store.models.get(made)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)


@given(st.sampled_from(["format", "id", "content", "metrics", "provenance", "kind", "space", "lineage", "files"]), JSON)
def test_whatever_stands_in_a_field_is_read_or_refused(field: str, value: Any) -> None:
    changed = copy.deepcopy(document())
    (changed["content"] if field in changed["content"] else changed)[field] = value
    try:
        manifest = ModelManifest.from_json(changed)
    except StoreError:
        return
    assert ModelManifest.from_json(manifest.to_json()) == manifest
