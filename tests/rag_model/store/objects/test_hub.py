"""Stores in repositories of the Hub: read as any other, from fresh listings, never written; errors are one line."""

import sys
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
from rag_model.errors import InputError, MissingExtraError, ReadOnlyError, StoreError, UsageError
from rag_model.evaluation.questions import read_questions
from rag_model.store import Snapshot, Store
from rag_model.store.objects.files import Files
from rag_model.store.objects.hub import Hub as HubFiles
from rag_model.store.pulling.pull import pull
from rag_model.store.upkeep.verify import probe_store, verify_version
from rag_model.store.versions.moves import tag
from rag_model.training.data.examples import read_examples
from rag_model.training.objectives.end2end import read_statements
from tests.fixtures.hub import OWNER, READER, AnswerError, Hub

URL = "hf://datasets/me/library"
STORE = {"store.json": b'{"format": 1}'}


def _rows(url: str) -> object:
    return list(PARQUET.read_records(url))


def _bytes(url: str) -> object:
    return list(read_bytes(url))


def _limited(asked: str) -> Never:
    raise AnswerError(429)


def _answering(body: bytes) -> Callable[[str], Never]:
    def answer(asked: str) -> Never:
        raise AnswerError(200, body=body)

    return answer


@pytest.fixture
def published(local_store: Store, publish: Callable[..., str], tmp_path: Path, hub: Hub) -> str:
    """A snapshot under `latest` in a store, which is then put into a repository."""
    identity = publish(local_store)
    tag(local_store, identity, "latest")
    hub.add_folder("datasets/me/library", tmp_path / "store")
    return identity


def test_a_store_is_read_as_any_other(published: str, local_store: Store, tmp_path: Path) -> None:
    store = Store.open(URL)
    assert store.refs.list_names() == ["latest"]
    assert store.snapshots.resolve("latest") == published
    here, there = Snapshot.from_store(local_store), Snapshot.from_store(store)
    assert there.passages([0, 1600, 2200]) == here.passages([0, 1600, 2200])
    assert verify_version(store, published) == []
    report = pull(store, published, tmp_path / "pulled")
    assert Snapshot.from_folder(report.path).passages([7]) == here.passages([7])


@pytest.mark.parametrize("url", [f"{URL}@main/deep/er", "hf://me/model/deep/er", f"{URL}@refs%2Fpr%2F1/deep/er"])
def test_it_may_lie_in_a_folder_of_a_revision_of_any_kind(url: str, hub: Hub) -> None:
    files = {f"deep/er/{name}": data for name, data in {**STORE, "refs/latest/x.json": b""}.items()}
    repository = hub.add("models/me/model" if "model" in url else "datasets/me/library", {})
    repository.commit(files, "main" if "pr" not in url else "refs/pr/1")
    store = Store.open(url)
    assert store.url == url
    assert store.files.list_names("refs", kind="directory") == ["latest"]
    assert [found.path for found in store.files.iter_tree()] == ["store.json", "refs/latest/x.json"]
    assert (store.files.get_size("refs"), store.files.get_size("refs/latest/x.json")) == (None, 0)


def test_listings_are_fresh_and_whole(hub: Hub) -> None:
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


def test_large_files_are_read_by_range_where_they_are_stored(hub: Hub) -> None:
    data = bytes(range(256)) * 200
    hub.add("datasets/me/library", {**STORE, "large": data})
    files = Store.open(URL).files
    hub.asked.clear()
    assert files.get_size("large") == len(data)
    assert files.read_range("large", 1000, 1300) == data[1000:1300]
    assert [asked.split()[0] for asked in hub.asked] == ["HEAD", "GET", "GET"]
    assert files.read_range("large", len(data) + 5, len(data) + 9) == b""
    assert files.read_range("large", len(data) - 2, len(data) + 9) == data[-2:]
    with files.open("large", len(data)) as file:
        file.seek(51_000)
        assert file.read(100) == data[51_000:51_100]
    assert b"".join(files.iter_chunks("large", len(data), 7)) == data[7:]
    assert files.read("large") == data


def test_a_private_one_needs_its_owner_s_token(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.add("datasets/me/library", {**STORE, "large": bytes(20_000)}, private=True)
    with pytest.raises(StoreError, match="no such repository, or it is private and HF_TOKEN is not set; check"):
        Store.open(URL)
    monkeypatch.setenv("HF_TOKEN", READER)
    with pytest.raises(StoreError, match="no such repository, or the token in HF_TOKEN does not open it"):
        Store.open(URL)
    monkeypatch.setenv("HF_TOKEN", OWNER)
    assert Store.open(URL).files.read("large") == bytes(20_000)  # the storage gets no token


@pytest.mark.parametrize(
    ("url", "said"),
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
def test_what_is_not_there_is_one_sentence(url: str, said: str, hub: Hub, capsys: pytest.CaptureFixture[str]) -> None:
    hub.add("datasets/me/library", STORE)
    assert run(["log", "--store", url]) in {1, 2}
    (line,) = capsys.readouterr().err.splitlines()
    assert said in line


def test_a_passing_failure_is_waited_for(hub: Hub) -> None:
    hub.add("datasets/me/library", {**STORE, "refs/x": b""})
    files = Store.open(URL).files
    for status in (429, 500, 503):
        limit = {"ratelimit": '"resolvers";r=0;t=0'} if status == 429 else {}
        for ask in (
            lambda: files.read("store.json"),
            lambda: files.get_size("store.json"),
            lambda: files.list_names("refs"),
        ):
            hub.refusals.append(AnswerError(status, headers=limit))
            assert ask()
            assert not hub.refusals


@pytest.mark.parametrize("path", ["store.json", "refs"])
def test_a_request_without_a_reply_is_sent_again(path: str, hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.add("datasets/me/library", {**STORE, "refs/x": b""})
    files, is_held, may_reply = Store.open(URL).files, Event(), Event()

    def hold_first(request: str) -> None:
        if not is_held.is_set():
            is_held.set()
            may_reply.wait()

    hub.before = hold_first
    monkeypatch.setattr(constants, "HF_HUB_DOWNLOAD_TIMEOUT", 0.5)
    assert files.read(path) if path == "store.json" else files.list_names(path)
    assert is_held.is_set()
    may_reply.set()


def test_a_limit_of_requests_is_told(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.add("datasets/me/library", STORE)
    waited = list[float]()
    monkeypatch.setattr("rag_model.store.objects.hub.time.sleep", waited.append)
    limit = {"ratelimit": '"resolvers";r=0;t=211', "ratelimit-policy": '"fixed window";"resolvers";q=3000;w=300'}
    hub.refusals.extend(AnswerError(429, headers=limit) for _ in range(7))
    with pytest.raises(StoreError, match="limit of requests is reached: try again in 211 s; with HF_TOKEN it is"):
        Store.open(URL)
    assert len(waited) == 6
    assert min(waited) >= 211
    hub.refusals.extend(AnswerError(429) for _ in range(7))
    with pytest.raises(StoreError, match="limit of requests is reached: try again later"):
        Store.open(URL)


@pytest.mark.parametrize(
    ("code", "said"),
    [
        (AnswerError(403, "GatedRepo"), "accept them on the repository's page, and set HF_TOKEN"),
        (AnswerError(403, message="not yours"), "not allowed to read .*not yours.*check the permissions"),
        (AnswerError(418, message="a teapot"), "a teapot"),
    ],
)
def test_a_refusal_is_told_at_once(code: AnswerError, said: str, hub: Hub) -> None:
    hub.refusals.append(code)
    with pytest.raises(StoreError, match=said):
        Store.open(URL)
    assert len(hub.asked) == 1


def test_offline_nothing_is_asked(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(StoreError, match="HF_HUB_OFFLINE is set, so no request is sent to the Hub: unset it"):
        Store.open(URL)
    assert hub.asked == []


def test_without_a_network_that_is_told(monkeypatch: pytest.MonkeyPatch, hub: Hub) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr("rag_model.store.objects.hub._MAX_TRIES", 2)
    HubFiles.clear_instance_cache()
    with pytest.raises(
        StoreError, match=r"the Hub cannot be reached \(.*refused\); check the network, and HF_ENDPOINT"
    ):
        Store.open(URL)


@pytest.mark.parametrize("setting", [("HF_ENDPOINT", "http://[::1"), ("HF_TOKEN", "hf_naïve")])
def test_a_setting_that_makes_no_request_is_told(
    setting: tuple[str, str], monkeypatch: pytest.MonkeyPatch, hub: Hub
) -> None:
    monkeypatch.setenv(*setting)
    HubFiles.clear_instance_cache()
    with pytest.raises(StoreError, match=r"the reply is not from the Hub .* HF_ENDPOINT and HF_TOKEN if they are set"):
        Store.open(URL)
    assert hub.asked == []


@pytest.mark.parametrize("answer", [b"<html>sign in</html>", b"null", b"[1]", b'[{"type": "file"}]'])
def test_what_is_not_the_hub_is_told(answer: bytes, hub: Hub) -> None:
    """As the page of a network that asks to sign in first."""
    hub.add("datasets/me/library", STORE)
    files = Store.open(URL).files
    hub.before = _answering(answer)
    with pytest.raises(StoreError, match=r"the reply is not from the Hub .*check the network") as refused:
        files.list_names("refs")
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    "write",
    [
        lambda store, here: store.files.create("new", b""),
        lambda store, here: store.files.write("new", b""),
        lambda store, here: store.files.upload(here, "new"),
        lambda store, here: store.files.link(here, "new"),
        lambda store, here: store.files.remove("store.json"),
        lambda store, here: store.files.delete_folder("refs"),
        lambda store, here: store.files.supports_exclusive_creation(),
        lambda store, here: store.refs.require_exclusive_creation(),
        lambda store, here: probe_store(store),
    ],
)
def test_nothing_is_ever_written(write: Callable[[Store, Path], object], hub: Hub, tmp_path: Path) -> None:
    repository = hub.add("datasets/me/library", {**STORE, "refs/x": b""})
    (tmp_path / "here").touch()
    store = Store.open(URL)
    with pytest.raises(ReadOnlyError, match=r"datasets/me/library can be read as a store, but not written: .* export"):
        write(store, tmp_path / "here")
    assert len(repository.commits) == 1
    assert {asked.split()[0] for asked in hub.asked} <= {"HEAD", "GET"}


def test_a_new_store_is_not_begun_there(hub: Hub) -> None:
    hub.add("datasets/me/library", {})
    with pytest.raises(ReadOnlyError):
        Store.open(URL, create=True)


def test_a_dump_there_is_found_and_read(hub: Hub) -> None:
    repository = hub.add("datasets/me/dumps", {"part-10": b"later", "part-2": b"0123456789"})
    second, tenth = expand_pattern("hf://datasets/me/dumps/part-*")
    assert (second.endswith("part-2"), tenth.endswith("part-10"), get_size(tenth)) == (True, True, 5)
    assert b"".join(read_bytes(second, 3, 4)) == b"3456"
    before = get_version_tag(second)
    assert before == get_version_tag(second) is not None
    repository.commit({"part-2": b"9876543210", "part-3": b""})
    assert get_version_tag(second) not in {before, None}
    assert len(expand_pattern("hf://datasets/me/dumps/part-*")) == 3


@pytest.mark.parametrize(
    "read", [read_questions, read_statements, read_examples, expand_pattern, get_version_tag, _rows, _bytes]
)
def test_what_fsspec_alone_reads_fails_in_one_line_too(
    read: Callable[[str], object], hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.add("datasets/me/files", {"one.jsonl": b"{}"})
    for url in ("hf://datasets/me/files@gone/one.jsonl", "hf://datasets/me/none/one.jsonl", "hf://one.jsonl"):
        with pytest.raises(InputError, match=r"one.jsonl") as refused:
            read(url)
        assert "\n" not in str(refused.value)
    hub.before = _limited
    fsspec.filesystem("hf").invalidate_cache()
    with pytest.raises(InputError, match=r"one.jsonl.*429 Too Many Requests") as refused:
        read("hf://datasets/me/files/one.jsonl")
    assert "\n" not in str(refused.value)
    monkeypatch.setitem(fsspec.config.conf, "hf", {"endpoint": "http://127.0.0.1:9"})
    with pytest.raises(InputError, match=r"one.jsonl.*refused"):
        read("hf://datasets/me/files/one.jsonl")


def test_without_its_client_the_install_line_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'bookwheel\[hub\]'"):
        Files(URL)


def test_a_url_must_name_a_repository() -> None:
    with pytest.raises(UsageError, match="names no repository"):
        Files("hf://datasets/me")
