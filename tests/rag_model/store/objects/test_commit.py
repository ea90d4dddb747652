"""Exports to the Hub make one commit or none, and an exported store can be read there."""

from pathlib import Path

import pytest

from rag_model.errors import StoreError, UsageError
from rag_model.store import Snapshot, Store
from rag_model.store.pulling.export import Layout, export_snapshot, export_store, parse_destination
from rag_model.store.upkeep.verify import verify_version
from rag_model.store.versions.models import export_model
from rag_model.store.versions.signatures import SIGNING_KEY_VARIABLE
from tests.fixtures.hub import OWNER, READER, Hub, HubError
from tests.fixtures.publisher import Publisher
from tests.fixtures.store_files import MODEL_FILES, WEIGHTS, publish_parts, put_weights

DESTINATION = "hf://datasets/me/wiki"


@pytest.fixture
def snapshot(store: Store) -> Snapshot:
    return Snapshot.from_store(store, publish_parts(store))


@pytest.fixture(autouse=True)
def signed_in(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", OWNER)


def list_commit_requests(hub: Hub) -> list[str]:
    return [request for request in hub.request_lines if "/commit/" in request]


@pytest.mark.parametrize("layout", ["dpr", "jsonl", "datasets"])
def test_a_layout_becomes_one_commit_in_a_new_private_repository(
    layout: Layout, snapshot: Snapshot, hub: Hub, tmp_path: Path, temporary_folder: Path
) -> None:
    export_snapshot(snapshot, tmp_path / "local", layout)
    report = export_snapshot(snapshot, DESTINATION, layout)
    repository = hub.repositories["datasets/me/wiki"]
    paths = {path.relative_to(tmp_path / "local").as_posix(): path for path in (tmp_path / "local").rglob("*")}
    files = {name: path.read_bytes() for name, path in paths.items() if path.is_file()}
    assert repository.read_at("main") == {".gitattributes": b"*.bin filter=lfs\n", **files}
    assert (repository.private, len(repository.commits), len(list_commit_requests(hub))) == (True, 2, 1)
    assert (report.path, report.bytes) == (DESTINATION, sum(map(len, files.values())))
    assert [*temporary_folder.iterdir()] == []


def test_export_into_folder_of_a_branch(snapshot: Snapshot, hub: Hub) -> None:
    repository = hub.add("datasets/me/wiki", {"README.md": b"mine", ".gitignore": b"2026"})
    repository.branches["drafts"] = repository.branches["main"]
    export_snapshot(snapshot, f"{DESTINATION}@drafts/2026/11", "jsonl")
    assert set(repository.read_at("drafts")) == {"README.md", ".gitignore", "2026/11/corpus.jsonl", "2026/11/README.md"}
    assert set(repository.read_at("main")) == {"README.md", ".gitignore"}
    assert repository.read_at("drafts")["README.md"] == b"mine"


@pytest.mark.parametrize("destination", [DESTINATION, f"{DESTINATION}/data", f"{DESTINATION}/data/one"])
def test_existing_files_are_not_overwritten(destination: str, snapshot: Snapshot, hub: Hub) -> None:
    repository = hub.add("datasets/me/wiki", {"data/one": b""})
    with pytest.raises(UsageError, match=f"{destination} is not empty: give a new repository, or a new fold"):
        export_snapshot(snapshot, destination, "jsonl")
    assert len(repository.commits) == 1


@pytest.mark.parametrize("folder", ["../other", "a/../../b", ".git/a", ".cache"])
def test_folder_that_the_hub_rejects_is_refused_before_any_request(folder: str, snapshot: Snapshot, hub: Hub) -> None:
    with pytest.raises(
        UsageError, match=f"files cannot be written to {DESTINATION}/{folder}: the Hub accepts no folder .., .git"
    ):
        export_snapshot(snapshot, f"{DESTINATION}/{folder}", "jsonl")
    assert hub.request_lines == []


def test_second_of_two_concurrent_exports_is_refused(snapshot: Snapshot, hub: Hub) -> None:
    repository = hub.add("datasets/me/wiki", {".gitattributes": b""})

    def commit_first(request: str) -> None:
        if "/preupload/" in request and len(repository.commits) == 1:
            repository.commit({"README.md": b"theirs"})

    hub.before_request = commit_first
    with pytest.raises(StoreError, match="was changed by another writer meanwhile: inspect it, and export again"):
        export_snapshot(snapshot, DESTINATION, "jsonl")
    assert repository.read_at("main") == {".gitattributes": b"", "README.md": b"theirs"}


def test_repository_that_another_writer_creates_meanwhile_stays_empty(snapshot: Snapshot, hub: Hub) -> None:
    def create_first(request: str) -> None:
        if request.endswith("/repos/create"):
            hub.add("datasets/me/wiki", {})

    hub.before_request = create_first
    with pytest.raises(StoreError, match="was changed by another writer meanwhile"):
        export_snapshot(snapshot, DESTINATION, "jsonl")
    assert hub.repositories["datasets/me/wiki"].read_at("main") == {}


@pytest.mark.parametrize(
    ("destination", "message"),
    [
        ("hf://me/wiki", "is in a repository of models: give hf://datasets/USER/NAME"),
        ("hf://spaces/me/wiki", "is in a repository of spaces: give hf://datasets/USER/NAME"),
        ("hf://datasets/wiki", "names no repository of the Hub"),
    ],
)
def test_repository_of_another_kind_is_refused(destination: str, message: str, snapshot: Snapshot, hub: Hub) -> None:
    with pytest.raises(UsageError, match=message):
        export_snapshot(snapshot, destination, "jsonl")
    assert hub.request_lines == []


@pytest.mark.parametrize(
    ("token", "destination", "message"),
    [
        (None, DESTINATION, "HF_TOKEN is not set; set it to a token with write permission"),
        (READER, DESTINATION, "the token in HF_TOKEN cannot write to hf://datasets/me/wiki.*no write access"),
        (READER, "hf://datasets/me/new", "the token in HF_TOKEN cannot write to .*no right to create"),
        ("hf_unknown", DESTINATION, "cannot write to .*the token in HF_TOKEN does not open it"),
        (OWNER, f"{DESTINATION}@gone", "cannot write to .*no such revision; check the revision after the @"),
        (OWNER, "hf://datasets/me/new@drafts", "cannot write to .*no such repository"),
    ],
)
def test_missing_write_permission_is_reported(
    token: str | None, destination: str, message: str, snapshot: Snapshot, hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    repository = hub.add("datasets/me/wiki", {})
    monkeypatch.setenv("HF_TOKEN", token) if token else monkeypatch.delenv("HF_TOKEN")
    with pytest.raises(StoreError, match=message):
        export_snapshot(snapshot, destination, "jsonl")
    assert (len(repository.commits), set(hub.repositories)) == (1, {"datasets/me/wiki"})


def test_failed_upload_publishes_nothing(snapshot: Snapshot, hub: Hub) -> None:
    repository = hub.add("datasets/me/wiki", {})

    def fail_upload(request: str) -> None:
        if request.startswith("PUT"):
            raise HubError(403, message="the storage is full")

    hub.before_request = fail_upload
    with pytest.raises(StoreError, match=r"cannot write to hf://datasets/me/wiki: .*storage is full"):
        export_snapshot(snapshot, DESTINATION, "datasets")
    assert (len(repository.commits), list_commit_requests(hub)) == (1, [])
    hub.before_request = lambda request: None
    export_snapshot(snapshot, DESTINATION, "datasets")
    assert len(repository.read_at("main")) == 4


def test_damaged_snapshot_creates_no_repository(store: Store, snapshot: Snapshot, hub: Hub, tmp_path: Path) -> None:
    ref = snapshot.manifest.content.files["passages/part-00002.parquet"]
    store.files.write(ref.path, b"damaged")
    for write in (
        lambda: export_snapshot(snapshot, DESTINATION, "jsonl"),
        lambda: export_store(store, snapshot.id, DESTINATION),
    ):
        with pytest.raises(StoreError, match=ref.id):
            write()
    assert hub.repositories == {}


def test_card_has_tags_and_a_summary(snapshot: Snapshot, hub: Hub) -> None:
    export_snapshot(snapshot, DESTINATION, "jsonl")
    head, card = hub.repositories["datasets/me/wiki"].read_at("main")["README.md"].decode().split("---\n")[1:]
    assert head.splitlines() == ["tags:", "- bookwheel"]
    assert card.startswith("2,201 passages of bookwheel snapshot ")


def test_model_is_exported_to_a_model_repository(store: Store, hub: Hub) -> None:
    put_weights(store)
    report = export_model(store, "reader", "hf://me/reader")
    files = hub.repositories["models/me/reader"].read_at("main")
    assert files.keys() == {".gitattributes", WEIGHTS, *MODEL_FILES}
    assert report.path == "hf://me/reader"
    with pytest.raises(UsageError, match="is in a repository of datasets: give hf://USER/NAME"):
        export_model(store, "reader", "hf://datasets/me/reader")


def test_exported_store_is_complete(store: Store, snapshot: Snapshot, hub: Hub, tmp_path: Path) -> None:
    publish_parts(store, other=1)
    for destination in (tmp_path / "out", "hf://datasets/me/library/2026-11"):
        report = export_store(store, snapshot.id, destination)
        exported_store = Store.open(str(destination))
        assert (exported_store.refs.list_names(), exported_store.snapshots.list_ids()) == (["latest"], [snapshot.id])
        assert exported_store.snapshots.get(snapshot.id) == snapshot.manifest
        assert verify_version(exported_store, snapshot.id) == []
        assert Snapshot.from_store(exported_store).passages([1600]) == snapshot.passages([1600])
        assert (report.layout, report.passages, report.path) == ("store", 2201, destination)
    assert {path.name for path in (tmp_path / "out").iterdir()} == {
        "README.md",
        "blobs",
        "refs",
        "snapshots",
        "store.json",
    }
    assert "--store hf://datasets/me/library/2026-11" in (
        hub.repositories["datasets/me/library"].read_at("main")["2026-11/README.md"].decode()
    )
    local_export = Store.open(str(tmp_path / "out"))  # later builds can publish to it
    assert local_export.refs.move("latest", publish_parts(local_export, other=1), 1).number == 2


def test_export_of_an_exported_store_is_equal(snapshot: Snapshot, store: Store, tmp_path: Path) -> None:
    export_store(store, snapshot.id, "hf://datasets/me/library")
    export_store(Store.open("hf://datasets/me/library"), "latest", tmp_path / "back")
    back = Store.open(str(tmp_path / "back"))
    assert back.snapshots.get(snapshot.id) == snapshot.manifest
    assert verify_version(back, snapshot.id) == []


def test_exported_store_is_signed_if_its_snapshot_is_signed(
    snapshot: Snapshot, store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(SIGNING_KEY_VARIABLE, Publisher("library").pem)
    export_store(store, snapshot.id, tmp_path / "unsigned")
    store.snapshots.sign(snapshot.id)
    export_store(store, snapshot.id, tmp_path / "signed")
    for name, signed in (("unsigned", False), ("signed", True)):
        exported_store = Store.open(str(tmp_path / name))
        assert exported_store.snapshots.has_trusted_signature(snapshot.id) is signed
        assert exported_store.refs.has_trusted_signature("latest", 1) is signed


def test_url_is_not_taken_for_a_local_folder() -> None:
    assert parse_destination("hf://datasets/me/wiki") == "hf://datasets/me/wiki"
    assert parse_destination("out") == Path("out")
    for url in ("s3://bucket/out", "hf://user:hushhush@datasets/me/wiki", "hf:/datasets/me/wiki"):
        with pytest.raises(UsageError) as error:
            parse_destination(url)
        assert "hushhush" not in str(error.value)
