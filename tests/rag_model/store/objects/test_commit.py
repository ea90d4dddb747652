"""Exports to repositories of the Hub: one commit, or nothing; and a store that is read there."""

from collections.abc import Callable
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

from rag_model.errors import StoreError, UsageError
from rag_model.store import Snapshot, Store
from rag_model.store.pulling.export import Layout, export_snapshot, export_store, parse_destination
from rag_model.store.upkeep.verify import verify_version
from rag_model.store.versions.models import ModelMetadata, export_model, put_model
from rag_model.store.versions.signatures import SIGNING_KEY_VARIABLE
from tests.fixtures.hub import OWNER, READER, AnswerError, Hub

PLACE = "hf://datasets/me/wiki"


@pytest.fixture
def snapshot(local_store: Store, publish: Callable[..., str]) -> Snapshot:
    return Snapshot.from_store(local_store, publish(local_store))


@pytest.fixture(autouse=True)
def signed_in(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", OWNER)


def commits(hub: Hub) -> list[str]:
    return [asked for asked in hub.asked if "/commit/" in asked]


@pytest.mark.parametrize("layout", ["dpr", "jsonl", "datasets"])
def test_a_layout_becomes_one_commit_in_a_new_private_repository(
    layout: Layout, snapshot: Snapshot, hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temporary"))
    export_snapshot(snapshot, tmp_path / "here", layout)
    report = export_snapshot(snapshot, PLACE, layout)
    made = hub.repositories["datasets/me/wiki"]
    here = {path.relative_to(tmp_path / "here").as_posix(): path for path in (tmp_path / "here").rglob("*")}
    files = {name: path.read_bytes() for name, path in here.items() if path.is_file()}
    assert made.at("main") == {".gitattributes": b"*.bin filter=lfs\n", **files}
    assert (made.private, len(made.commits), len(commits(hub))) == (True, 2, 1)
    assert (report.path, report.bytes) == (PLACE, sum(map(len, files.values())))
    assert [*(tmp_path / "temporary").iterdir()] == []


def test_it_may_be_a_folder_of_a_branch(snapshot: Snapshot, hub: Hub) -> None:
    made = hub.add("datasets/me/wiki", {"README.md": b"mine", ".gitignore": b"2026"})
    made.branches["drafts"] = made.branches["main"]
    export_snapshot(snapshot, f"{PLACE}@drafts/2026/11", "jsonl")
    assert set(made.at("drafts")) == {"README.md", ".gitignore", "2026/11/corpus.jsonl", "2026/11/README.md"}
    assert set(made.at("main")) == {"README.md", ".gitignore"}
    assert made.at("drafts")["README.md"] == b"mine"


@pytest.mark.parametrize("place", [PLACE, f"{PLACE}/data", f"{PLACE}/data/one"])
def test_nothing_is_overwritten(place: str, snapshot: Snapshot, hub: Hub) -> None:
    made = hub.add("datasets/me/wiki", {"data/one": b""})
    with pytest.raises(UsageError, match=f"{place} is not empty: give a new repository, or a new fold"):
        export_snapshot(snapshot, place, "jsonl")
    assert len(made.commits) == 1


@pytest.mark.parametrize("folder", ["../other", "a/../../b", ".git/a", ".cache"])
def test_a_folder_that_the_hub_does_not_take_is_refused_before_anything_is_made(
    folder: str, snapshot: Snapshot, hub: Hub
) -> None:
    with pytest.raises(
        UsageError, match=f"files cannot be written to {PLACE}/{folder}: the Hub accepts no folder .., .git"
    ):
        export_snapshot(snapshot, f"{PLACE}/{folder}", "jsonl")
    assert hub.asked == []


def test_of_two_exports_at_once_one_is_refused(snapshot: Snapshot, hub: Hub) -> None:
    made = hub.add("datasets/me/wiki", {".gitattributes": b""})

    def other(asked: str) -> None:
        if "/preupload/" in asked and len(made.commits) == 1:
            made.commit({"README.md": b"theirs"})

    hub.before = other
    with pytest.raises(StoreError, match="was changed by another writer meanwhile: inspect it, and export again"):
        export_snapshot(snapshot, PLACE, "jsonl")
    assert made.at("main") == {".gitattributes": b"", "README.md": b"theirs"}


def test_a_repository_that_another_makes_meanwhile_is_theirs(snapshot: Snapshot, hub: Hub) -> None:
    def other(asked: str) -> None:
        if asked.endswith("/repos/create"):
            hub.add("datasets/me/wiki", {})

    hub.before = other
    with pytest.raises(StoreError, match="was changed by another writer meanwhile"):
        export_snapshot(snapshot, PLACE, "jsonl")
    assert hub.repositories["datasets/me/wiki"].at("main") == {}


@pytest.mark.parametrize(
    ("place", "said"),
    [
        ("hf://me/wiki", "is in a repository of models: give hf://datasets/USER/NAME"),
        ("hf://spaces/me/wiki", "is in a repository of spaces: give hf://datasets/USER/NAME"),
        ("hf://datasets/wiki", "names no repository of the Hub"),
    ],
)
def test_a_place_of_another_kind_is_refused(place: str, said: str, snapshot: Snapshot, hub: Hub) -> None:
    with pytest.raises(UsageError, match=said):
        export_snapshot(snapshot, place, "jsonl")
    assert hub.asked == []


@pytest.mark.parametrize(
    ("token", "place", "said"),
    [
        (None, PLACE, "HF_TOKEN is not set; set it to a token with write permission"),
        (READER, PLACE, "the token in HF_TOKEN cannot write to hf://datasets/me/wiki.*no write access"),
        (READER, "hf://datasets/me/new", "the token in HF_TOKEN cannot write to .*no right to create"),
        ("hf_unknown", PLACE, "cannot write to .*the token in HF_TOKEN does not open it"),
        (OWNER, f"{PLACE}@gone", "cannot write to .*no such revision; check the revision after the @"),
        (OWNER, "hf://datasets/me/new@drafts", "cannot write to .*no such repository"),
    ],
)
def test_who_may_not_write_is_told(
    token: str | None, place: str, said: str, snapshot: Snapshot, hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = hub.add("datasets/me/wiki", {})
    monkeypatch.setenv("HF_TOKEN", token) if token else monkeypatch.delenv("HF_TOKEN")
    with pytest.raises(StoreError, match=said):
        export_snapshot(snapshot, place, "jsonl")
    assert (len(made.commits), set(hub.repositories)) == (1, {"datasets/me/wiki"})


def test_an_upload_that_fails_publishes_nothing(snapshot: Snapshot, hub: Hub) -> None:
    made = hub.add("datasets/me/wiki", {})

    def away(asked: str) -> None:
        if asked.startswith("PUT"):
            raise AnswerError(403, message="the storage is full")

    hub.before = away
    with pytest.raises(StoreError, match=r"cannot write to hf://datasets/me/wiki: .*storage is full"):
        export_snapshot(snapshot, PLACE, "datasets")
    assert (len(made.commits), commits(hub)) == (1, [])
    hub.before = lambda asked: None
    export_snapshot(snapshot, PLACE, "datasets")
    assert len(made.at("main")) == 4


def test_a_snapshot_that_is_damaged_makes_no_repository(
    local_store: Store, snapshot: Snapshot, hub: Hub, tmp_path: Path
) -> None:
    ref = snapshot.manifest.content.files["passages/part-00002.parquet"]
    local_store.files.write(ref.path, b"damaged")
    for write in (
        lambda: export_snapshot(snapshot, PLACE, "jsonl"),
        lambda: export_store(local_store, snapshot.id, PLACE),
    ):
        with pytest.raises(StoreError, match=ref.id):
            write()
    assert hub.repositories == {}


def test_the_card_says_what_the_hub_reads(snapshot: Snapshot, hub: Hub) -> None:
    export_snapshot(snapshot, PLACE, "jsonl")
    head, card = hub.repositories["datasets/me/wiki"].at("main")["README.md"].decode().split("---\n")[1:]
    assert head.splitlines() == ["tags:", "- bookwheel"]
    assert card.startswith("2,201 passages of bookwheel snapshot ")


def test_a_model_goes_to_a_repository_of_models(local_store: Store, hub: Hub, tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    (tmp_path / "model" / "model.safetensors").write_bytes(bytes(100))
    put_model(local_store, tmp_path / "model", ModelMetadata("rag-token", None, {}), "reader")
    report = export_model(local_store, "reader", "hf://me/reader")
    files = hub.repositories["models/me/reader"].at("main")
    assert {name for name in files if name != ".gitattributes"} == {"config.json", "model.safetensors"}
    assert report.path == "hf://me/reader"
    with pytest.raises(UsageError, match="is in a repository of datasets: give hf://USER/NAME"):
        export_model(local_store, "reader", "hf://datasets/me/reader")


def test_an_exported_store_is_a_whole_store(
    local_store: Store, snapshot: Snapshot, hub: Hub, tmp_path: Path, publish: Callable[..., str]
) -> None:
    publish(local_store, other=1)
    for place in (tmp_path / "out", "hf://datasets/me/library/2026-11"):
        report = export_store(local_store, snapshot.id, place)
        made = Store.open(str(place))
        assert (made.refs.list_names(), made.snapshots.list_ids()) == (["latest"], [snapshot.id])
        assert made.snapshots.get(snapshot.id) == snapshot.manifest
        assert verify_version(made, snapshot.id) == []
        assert Snapshot.from_store(made).passages([1600]) == snapshot.passages([1600])
        assert (report.layout, report.passages, report.path) == ("store", 2201, place)
    assert {path.name for path in (tmp_path / "out").iterdir()} == {
        "README.md",
        "blobs",
        "refs",
        "snapshots",
        "store.json",
    }
    assert "--store hf://datasets/me/library/2026-11" in (
        hub.repositories["datasets/me/library"].at("main")["2026-11/README.md"].decode()
    )
    here = Store.open(str(tmp_path / "out"))
    assert here.refs.move("latest", publish(here, other=1), 1).number == 2  # it can be gone on with


def test_an_exported_store_of_an_exported_store_is_equal(
    snapshot: Snapshot, local_store: Store, tmp_path: Path
) -> None:
    export_store(local_store, snapshot.id, "hf://datasets/me/library")
    export_store(Store.open("hf://datasets/me/library"), "latest", tmp_path / "back")
    back = Store.open(str(tmp_path / "back"))
    assert back.snapshots.get(snapshot.id) == snapshot.manifest
    assert verify_version(back, snapshot.id) == []


def test_it_is_signed_if_what_it_holds_was(
    snapshot: Snapshot, local_store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = Ed25519PrivateKey.generate().private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    monkeypatch.setenv(SIGNING_KEY_VARIABLE, key.decode())
    export_store(local_store, snapshot.id, tmp_path / "strange")
    local_store.snapshots.sign(snapshot.id)
    export_store(local_store, snapshot.id, tmp_path / "own")
    for name, signed in (("strange", False), ("own", True)):
        made = Store.open(str(tmp_path / name))
        assert made.snapshots.has_trusted_signature(snapshot.id) is signed
        assert made.refs.has_trusted_signature("latest", 1) is signed


def test_a_url_is_no_folder_of_this_machine() -> None:
    assert parse_destination("hf://datasets/me/wiki") == "hf://datasets/me/wiki"
    assert parse_destination("out") == Path("out")
    for url in ("s3://bucket/out", "hf://user:hushhush@datasets/me/wiki", "hf:/datasets/me/wiki"):
        with pytest.raises(UsageError) as refused:
            parse_destination(url)
        assert "hushhush" not in str(refused.value)
