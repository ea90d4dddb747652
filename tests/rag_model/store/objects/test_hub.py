"""Stores in repositories of the Hub are read-only, have no outdated listings, and report errors in one line."""

from collections.abc import Callable
from pathlib import Path
from threading import Event
from typing import Never

import fsspec
import pytest
from huggingface_hub import constants

from flows.cli import run
from rag_model.corpus.dump_formats.parquet import FORMAT as PARQUET
from rag_model.corpus.source import expand_pattern, get_size, get_version_tag, read_bytes
from rag_model.errors import InputError, ReadOnlyError, StoreError
from rag_model.evaluation.questions import read_questions
from rag_model.store import Snapshot, Store
from rag_model.store.objects.hub import Hub as HubFiles
from rag_model.store.pulling.pull import pull
from rag_model.store.upkeep.verify import probe_store, verify_version
from rag_model.store.versions.moves import tag
from rag_model.training.data.examples import read_examples
from rag_model.training.objectives.end2end import read_statements
from tests.fixtures.hub import OWNER, READER, Hub, HubError
from tests.fixtures.store_files import publish_parts

URL = "hf://datasets/me/library"
STORE = {"store.json": b'{"format": 1}'}


def _read_rows(url: str) -> object:
    return list(PARQUET.read_records(url))


def _read_bytes(url: str) -> object:
    return list(read_bytes(url))


def _raise_rate_limit(request: str) -> Never:
    raise HubError(429)


def _reply_with(body: bytes) -> Callable[[str], Never]:
    def reply(request: str) -> Never:
        raise HubError(200, body=body)

    return reply


@pytest.fixture
def published_id(store: Store, tmp_path: Path, hub: Hub) -> str:
    """Publish a snapshot as `latest`, and upload its store to a repository."""
    snapshot_id = publish_parts(store)
    tag(store, snapshot_id, "latest")
    hub.add_folder("datasets/me/library", tmp_path / "store")
    return snapshot_id


def test_store_on_the_hub_is_read(published_id: str, store: Store, tmp_path: Path) -> None:
    hub_store = Store.open(URL)
    assert hub_store.refs.list_names() == ["latest"]
    assert hub_store.snapshots.resolve("latest") == published_id
    local_snapshot, hub_snapshot = Snapshot.from_store(store), Snapshot.from_store(hub_store)
    assert hub_snapshot.passages([0, 1600, 2200]) == local_snapshot.passages([0, 1600, 2200])
    assert verify_version(hub_store, published_id) == []
    report = pull(hub_store, published_id, tmp_path / "pulled")
    assert Snapshot.from_folder(report.path).passages([7]) == local_snapshot.passages([7])


@pytest.mark.parametrize("url", [f"{URL}@main/deep/er", "hf://me/model/deep/er", f"{URL}@refs%2Fpr%2F1/deep/er"])
def test_store_in_folder_of_a_revision_is_read(url: str, hub: Hub) -> None:
    files = {f"deep/er/{name}": data for name, data in {**STORE, "refs/latest/x.json": b""}.items()}
    repository = hub.add("models/me/model" if "model" in url else "datasets/me/library", {})
    repository.commit(files, "main" if "pr" not in url else "refs/pr/1")
    store = Store.open(url)
    assert store.url == url
    assert store.files.list_names("refs", kind="directory") == ["latest"]
    assert [file.path for file in store.files.iter_tree()] == ["store.json", "refs/latest/x.json"]
    assert (store.files.get_size("refs"), store.files.get_size("refs/latest/x.json")) == (None, 0)


def test_listings_are_current_and_complete(hub: Hub) -> None:
    repository = hub.add("datasets/me/library", STORE)
    files = Store.open(URL).files
    assert files.list_names("refs") == []
    names = [f"{number}.json" for number in range(10)]  # several pages
    repository.commit({f"refs/{name}": name.encode() for name in names})
    assert files.list_names("refs") == names
    assert files.read("refs/7.json") == b"7.json"
    repository.commit({"refs/7.json": b"changed"})
    assert (files.read("refs/7.json"), files.get_size("refs/7.json")) == (b"changed", 7)
    assert files.read("refs/70.json") is None


def test_ranges_of_large_files_are_read_from_the_storage(hub: Hub) -> None:
    data = bytes(range(256)) * 200
    hub.add("datasets/me/library", {**STORE, "large": data})
    files = Store.open(URL).files
    hub.request_lines.clear()
    assert files.get_size("large") == len(data)
    assert files.read_range("large", 1000, 1300) == data[1000:1300]
    assert [request.split()[0] for request in hub.request_lines] == ["HEAD", "GET", "GET"]
    assert files.read_range("large", len(data) + 5, len(data) + 9) == b""
    assert files.read_range("large", len(data) - 2, len(data) + 9) == data[-2:]
    with files.open("large", len(data)) as file:
        file.seek(51_000)
        assert file.read(100) == data[51_000:51_100]
    assert b"".join(files.iter_chunks("large", len(data), 7)) == data[7:]
    assert files.read("large") == data


def test_private_repository_needs_its_owner_s_token(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.add("datasets/me/library", {**STORE, "large": bytes(20_000)}, private=True)
    with pytest.raises(StoreError, match="no such repository, or it is private and HF_TOKEN is not set; check"):
        Store.open(URL)
    monkeypatch.setenv("HF_TOKEN", READER)
    with pytest.raises(StoreError, match="no such repository, or the token in HF_TOKEN does not open it"):
        Store.open(URL)
    monkeypatch.setenv("HF_TOKEN", OWNER)
    assert Store.open(URL).files.read("large") == bytes(20_000)  # the storage server rejects requests with a token


@pytest.mark.parametrize(
    ("url", "message"),
    [
        (f"{URL}@gone", "no such revision; check the revision after the @"),
        ("hf://datasets/me/other", "no such repository, or it is private and HF_TOKEN is not set"),
        (f"{URL}/empty", "there is no bookwheel store at hf://datasets/me/library/empty"),
        ("hf://datasets/me", "hf://datasets/me names no repository of the Hub: give hf://datasets/USER/NAME"),
        ("hf://library", "hf://library names no repository of the Hub"),
        ("hf://", "names no bucket"),
        ("hf://buckets/me/library", "in no repository of datasets, models or spaces"),
    ],
)
def test_missing_repository_is_reported(url: str, message: str, hub: Hub, capsys: pytest.CaptureFixture[str]) -> None:
    hub.add("datasets/me/library", STORE)
    assert run(["log", "--store", url]) in {1, 2}
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line


def test_temporary_failures_are_retried(hub: Hub) -> None:
    hub.add("datasets/me/library", {**STORE, "refs/x": b""})
    files = Store.open(URL).files
    for status in (429, 500, 503):
        limit = {"ratelimit": '"resolvers";r=0;t=0'} if status == 429 else {}
        for send_request in (
            lambda: files.read("store.json"),
            lambda: files.get_size("store.json"),
            lambda: files.list_names("refs"),
        ):
            hub.refusals.append(HubError(status, headers=limit))
            assert send_request()
            assert not hub.refusals


@pytest.mark.parametrize("path", ["store.json", "refs"])
def test_a_request_without_a_reply_is_sent_again(path: str, hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.add("datasets/me/library", {**STORE, "refs/x": b""})
    files, is_held, may_reply = Store.open(URL).files, Event(), Event()

    def hold_first(request: str) -> None:
        if not is_held.is_set():
            is_held.set()
            may_reply.wait()

    hub.before_request = hold_first
    monkeypatch.setattr(constants, "HF_HUB_DOWNLOAD_TIMEOUT", 0.5)
    assert files.read(path) if path == "store.json" else files.list_names(path)
    assert is_held.is_set()
    may_reply.set()


def test_rate_limit_is_reported(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.add("datasets/me/library", STORE)
    pauses = list[float]()
    monkeypatch.setattr("rag_model.store.objects.hub.time.sleep", pauses.append)
    limit = {"ratelimit": '"resolvers";r=0;t=211', "ratelimit-policy": '"fixed window";"resolvers";q=3000;w=300'}
    hub.refusals.extend(HubError(429, headers=limit) for _ in range(7))
    with pytest.raises(StoreError, match="limit of requests is reached: try again in 211 s; with HF_TOKEN it is"):
        Store.open(URL)
    assert len(pauses) == 6
    assert min(pauses) >= 211
    hub.refusals.extend(HubError(429) for _ in range(7))
    with pytest.raises(StoreError, match="limit of requests is reached: try again later"):
        Store.open(URL)


@pytest.mark.parametrize(
    ("code", "message"),
    [
        (HubError(403, "GatedRepo"), "accept them on the repository's page, and set HF_TOKEN"),
        (HubError(403, message="not yours"), "not allowed to read .*not yours.*check the permissions"),
        (HubError(418, message="a teapot"), "a teapot"),
    ],
)
def test_refusal_is_reported_without_retry(code: HubError, message: str, hub: Hub) -> None:
    hub.refusals.append(code)
    with pytest.raises(StoreError, match=message):
        Store.open(URL)
    assert len(hub.request_lines) == 1


def test_offline_mode_sends_no_request(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(StoreError, match="HF_HUB_OFFLINE is set, so no request is sent to the Hub: unset it"):
        Store.open(URL)
    assert hub.request_lines == []


def test_missing_network_is_reported(monkeypatch: pytest.MonkeyPatch, hub: Hub) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr("rag_model.store.objects.hub.MAX_TRIES", 2)
    HubFiles.clear_instance_cache()
    with pytest.raises(
        StoreError, match=r"the Hub cannot be reached \(.*refused\); check the network, and HF_ENDPOINT"
    ):
        Store.open(URL)


@pytest.mark.parametrize("setting", [("HF_ENDPOINT", "http://[::1"), ("HF_TOKEN", "hf_naïve")])
def test_invalid_setting_is_reported(setting: tuple[str, str], monkeypatch: pytest.MonkeyPatch, hub: Hub) -> None:
    monkeypatch.setenv(*setting)
    HubFiles.clear_instance_cache()
    with pytest.raises(StoreError, match=r"the reply is not from the Hub .* HF_ENDPOINT and HF_TOKEN if they are set"):
        Store.open(URL)
    assert hub.request_lines == []


@pytest.mark.parametrize("answer", [b"<html>sign in</html>", b"null", b"[1]", b'[{"type": "file"}]'])
def test_reply_of_another_server_is_reported(answer: bytes, hub: Hub) -> None:
    """A network that requires a login replies with its own page."""
    hub.add("datasets/me/library", STORE)
    files = Store.open(URL).files
    hub.before_request = _reply_with(answer)
    with pytest.raises(StoreError, match=r"the reply is not from the Hub .*check the network") as error:
        files.list_names("refs")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "write",
    [
        lambda store, path: store.files.create("new", b""),
        lambda store, path: store.files.write("new", b""),
        lambda store, path: store.files.upload(path, "new"),
        lambda store, path: store.files.link(path, "new"),
        lambda store, path: store.files.remove("store.json"),
        lambda store, path: store.files.delete_folder("refs"),
        lambda store, path: store.files.supports_exclusive_creation(),
        lambda store, path: store.refs.require_exclusive_creation(),
        lambda store, path: probe_store(store),
        lambda store, path: Store.open(f"{store.url}/new", create=True),
    ],
)
def test_store_on_the_hub_is_read_only(write: Callable[[Store, Path], object], hub: Hub, tmp_path: Path) -> None:
    repository = hub.add("datasets/me/library", {**STORE, "refs/x": b""})
    (tmp_path / "local").touch()
    store = Store.open(URL)
    with pytest.raises(ReadOnlyError, match=r"library.* can be read as a store, but not written: .* export"):
        write(store, tmp_path / "local")
    assert len(repository.commits) == 1
    assert {request.split()[0] for request in hub.request_lines} <= {"HEAD", "GET"}


def test_dump_on_the_hub_is_found_and_read(hub: Hub) -> None:
    repository = hub.add("datasets/me/dumps", {"part-10": b"later", "part-2": b"0123456789"})
    second, tenth = expand_pattern("hf://datasets/me/dumps/part-*")
    assert (second.endswith("part-2"), tenth.endswith("part-10"), get_size(tenth)) == (True, True, 5)
    assert b"".join(read_bytes(second, 3, 4)) == b"3456"
    version_tag = get_version_tag(second)
    assert version_tag == get_version_tag(second) is not None
    repository.commit({"part-2": b"9876543210", "part-3": b""})
    assert get_version_tag(second) not in {version_tag, None}
    assert len(expand_pattern("hf://datasets/me/dumps/part-*")) == 3


@pytest.mark.parametrize(
    "read", [read_questions, read_statements, read_examples, expand_pattern, get_version_tag, _read_rows, _read_bytes]
)
def test_errors_of_fsspec_are_one_line(
    read: Callable[[str], object], hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.add("datasets/me/files", {"one.jsonl": b"{}"})
    for url in ("hf://datasets/me/files@gone/one.jsonl", "hf://datasets/me/none/one.jsonl", "hf://one.jsonl"):
        with pytest.raises(InputError, match=r"one.jsonl") as error:
            read(url)
        assert "\n" not in str(error.value)
    hub.before_request = _raise_rate_limit
    fsspec.filesystem("hf").invalidate_cache()
    with pytest.raises(InputError, match=r"one.jsonl.*429 Too Many Requests") as error:
        read("hf://datasets/me/files/one.jsonl")
    assert "\n" not in str(error.value)
    monkeypatch.setitem(fsspec.config.conf, "hf", {"endpoint": "http://127.0.0.1:9"})
    with pytest.raises(InputError, match=r"one.jsonl.*refused"):
        read("hf://datasets/me/files/one.jsonl")
