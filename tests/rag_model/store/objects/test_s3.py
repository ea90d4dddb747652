"""A real S3 server on bad days: it throttles, breaks off, loses answers, refuses. Retried in one layer, or told."""

import json
import os
import secrets
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path

import fsspec
import pytest

from flows.cli import run
from rag_model.digest import digest_file
from rag_model.errors import StoreError
from rag_model.store import BlobRef, Manifest, RefMove, Snapshot, Store
from rag_model.store.objects.blobs import PARTIAL_SUFFIX
from rag_model.store.objects.s3 import S3
from rag_model.store.pulling.pull import pull
from rag_model.store.upkeep.gc import collect_garbage
from rag_model.store.upkeep.verify import verify_version
from tests.fixtures.s3_proxy import FaultyServer, Request

TRIES = 7
CHUNK = 5 << 20  # the least that S3 takes as a part of an upload; as shipped it is larger
LARGE = 2 * CHUNK + 7
FIRST, SECOND, LAST = (
    f"bytes={start}-{end}" for start, end in ((0, CHUNK - 1), (CHUNK, 2 * CHUNK - 1), (2 * CHUNK, LARGE - 1))
)


@pytest.fixture
def store(
    faulty_server: FaultyServer,
    s3_bucket: Callable[[str], AbstractContextManager[str]],
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[Store]:
    """A store behind the proxy, whose client does not wait long between two tries."""
    monkeypatch.setattr("rag_model.store.objects.s3._PAUSE_SECONDS", 0.001)
    monkeypatch.setattr("rag_model.store.objects.files._CHUNK_BYTES", CHUNK)
    with s3_bucket(faulty_server.url) as url:
        yield Store.open(url, create=True)
        faulty_server.fault = lambda request: None


@pytest.fixture
def large(store: Store, tmp_path: Path) -> BlobRef:
    (tmp_path / "large").write_bytes(secrets.token_bytes(LARGE))
    return store.blobs.put_file(tmp_path / "large")


def every(n: int, fault: str, method: str = "") -> Callable[[Request], str | None]:
    return lambda request: fault if request.number % n == 0 and request.method.startswith(method) else None


def test_a_bucket_without_conditional_writes_is_refused_before_a_store_is_created(
    faulty_server: FaultyServer,
    s3_bucket: Callable[[str], AbstractContextManager[str]],
    capsys: pytest.CaptureFixture[str],
) -> None:
    with s3_bucket(faulty_server.url) as url:
        faulty_server.fault = lambda request: "unknown header" if "If-None-Match" in request.headers else None
        with pytest.raises(StoreError, match=r"does not honour conditional writes \(If-None-Match\)"):
            Store.open(url, create=True)
        assert run(["doctor", "--store", url, "--json"]) == 3
        findings = {finding["what"]: finding for finding in json.loads(capsys.readouterr().out)["findings"]}
        assert not findings["store, conditional create"]["ok"]
        assert "If-None-Match" in findings["store, conditional create"]["todo"]
        faulty_server.fault = lambda request: None
        left_files = S3(skip_instance_cache=True, use_listings_cache=False).find(url)
        assert [file for file in left_files if "probe" in file or "store.json" in file] == []


@pytest.mark.parametrize("fault", ["empty", "page"])
def test_a_listing_that_is_no_listing_deletes_nothing(
    store: Store, faulty_server: FaultyServer, fault: str, publish: Callable[..., str]
) -> None:
    snapshot = publish(store)
    faulty_server.fault = lambda request: fault if "list-type=2" in request.path else None
    with pytest.raises(StoreError, match="replied to a list request without a listing"):
        collect_garbage(store, 0.0)
    assert not any(request.method == "DELETE" and request.touches("/blobs/") for request in faulty_server.requests)
    faulty_server.fault = lambda request: None
    assert verify_version(store, snapshot) == []


def test_a_server_without_checksums_is_named_with_the_variable_that_turns_them_off(
    faulty_server: FaultyServer,
    s3_bucket: Callable[[str], AbstractContextManager[str]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse_checksums(request: Request) -> str | None:
        sends_checksum = any("x-amz-checksum" in f"{name}{value}".lower() for name, value in request.headers.items())
        return "unknown header" if sends_checksum and request.method == "PUT" else None

    with s3_bucket(faulty_server.url) as url:
        faulty_server.fault = refuse_checksums
        with pytest.raises(StoreError, match="set AWS_REQUEST_CHECKSUM_CALCULATION=when_required"):
            Store.open(url, create=True)
        monkeypatch.setenv("AWS_REQUEST_CHECKSUM_CALCULATION", "when_required")
        S3.clear_instance_cache()
        Store.open(url, create=True)


@pytest.mark.parametrize("fault", ["throttle", "error", "refuse", "break"])
def test_a_bad_day_costs_time_and_nothing_else(
    store: Store, faulty_server: FaultyServer, fault: str, publish: Callable[..., str], tmp_path: Path
) -> None:
    faulty_server.fault = every(3, fault)
    snapshot = publish(store)
    store.refs.move("latest", snapshot, 0)
    assert verify_version(store, snapshot) == []
    with Snapshot.open(store.url) as remote:
        assert [passage.text for passage in remote.passages([2200, 0])] == ["text 2200", "text 0"]
    pull(store, "latest", tmp_path / "dest")
    with Snapshot.from_folder(tmp_path / "dest") as pulled:
        assert pulled.passages([1500])[0].text == "text 1500"


@pytest.mark.parametrize("fault", ["throttle", "break", "trickle"])
def test_large_files_go_up_and_down(store: Store, faulty_server: FaultyServer, fault: str, tmp_path: Path) -> None:
    faulty_server.fault = every(2, fault)
    (tmp_path / "large").write_bytes(secrets.token_bytes(LARGE))
    blob = store.blobs.put_file(tmp_path / "large")
    store.blobs.fetch(blob, tmp_path / "copy")
    assert (tmp_path / "copy").read_bytes() == (tmp_path / "large").read_bytes()


@pytest.mark.parametrize("lost", ["POST", "PUT"])
def test_a_lost_answer_to_an_upload_is_no_failure(
    store: Store, faulty_server: FaultyServer, lost: str, tmp_path: Path
) -> None:
    seen: set[str] = set()

    def once(request: Request) -> str | None:
        if request.method != lost or request.path in seen:
            return None
        seen.add(request.path)
        return "lose"

    faulty_server.fault = once
    (tmp_path / "large").write_bytes(secrets.token_bytes(LARGE))
    blob = store.blobs.put_file(tmp_path / "large")
    assert seen
    assert store.blobs.get_local_path(blob).read_bytes() == (tmp_path / "large").read_bytes()


def test_a_move_whose_answer_was_lost_is_made_once(store: Store, faulty_server: FaultyServer) -> None:
    store.refs.require_exclusive_creation()
    faulty_server.fault = lambda request: "lose" if request.method == "PUT" and _first(faulty_server, request) else None
    move = store.refs.move("latest", "0" * 64, 0)
    assert isinstance(move, RefMove)
    assert store.refs.read_history("latest") == [move]


def _first(server: FaultyServer, request: Request) -> bool:
    return [request.path for request in server.requests].count(request.path) == 1


@pytest.mark.parametrize("fault", ["throttle", "error", "refuse", "break"])
def test_retries_are_in_one_layer(store: Store, faulty_server: FaultyServer, fault: str) -> None:
    """A server that never recovers is asked seven times for one thing, not seven times seven.

    aiohttp by itself opens a new connection where a kept one turns out to be closed; that is no other layer's try.
    """
    store.files.write("file", b"data")
    faulty_server.requests.clear()
    faulty_server.fault = lambda request: fault
    with pytest.raises(StoreError, match=r"cannot read s3://.*/file: .") as given_up:
        store.files.read("file")
    assert "\n" not in str(given_up.value)
    assert len(faulty_server.requests) <= (2 * TRIES if fault == "refuse" else TRIES)


def test_what_is_not_there_is_asked_for_once(store: Store, faulty_server: FaultyServer) -> None:
    faulty_server.requests.clear()
    assert store.files.read("nothing") is None
    assert len(faulty_server.requests) == 1


def test_expired_credentials_are_one_sentence(
    store: Store, faulty_server: FaultyServer, capsys: pytest.CaptureFixture[str]
) -> None:
    faulty_server.requests.clear()
    faulty_server.fault = lambda request: "expired"
    assert run(["log", "--store", store.url]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("bookwheel: not allowed to read s3://")
    assert "token has expired" in line
    assert "credentials" in line
    assert len(faulty_server.requests) == 1


def test_no_credentials_are_one_sentence(
    store: Store, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", os.devnull)
    S3.clear_instance_cache()
    assert run(["log", "--store", store.url]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert "credentials" in line
    assert "AWS_ACCESS_KEY_ID" in line


def test_large_files_go_up_in_parts(store: Store, faulty_server: FaultyServer, large: BlobRef) -> None:
    numbers = [request.path for request in faulty_server.requests if "partNumber=" in request.path]
    assert len(numbers) == 3
    faulty_server.requests.clear()
    assert b"".join(store.files.iter_chunks(large.path, large.size)) != b""
    asked = sorted(request.headers["Range"] for request in faulty_server.requests)
    assert asked == [FIRST, LAST, SECOND]


def test_a_fetch_goes_on_where_it_broke_off(
    store: Store, faulty_server: FaultyServer, large: BlobRef, tmp_path: Path
) -> None:
    faulty_server.fault = lambda request: "throttle" if request.headers.get("Range") == LAST else None
    with pytest.raises(StoreError, match="reduce your request rate"):
        store.blobs.fetch(large, tmp_path / "copy")
    assert not (tmp_path / "copy").exists()
    faulty_server.fault = lambda request: None
    faulty_server.requests.clear()
    store.blobs.fetch(large, tmp_path / "copy")
    assert [request.headers["Range"] for request in faulty_server.requests if request.method == "GET"] == [LAST]
    assert sorted(path.name for path in tmp_path.iterdir() if "copy" in path.name) == ["copy"]


def test_a_listing_has_more_than_one_page(s3_store: Store) -> None:
    names = [f"{number:08d}.json" for number in range(1, 1052)]
    fsspec.filesystem("s3").pipe({f"{s3_store.url}/refs/latest/{name}": b"{}" for name in names})
    assert s3_store.files.list_names("refs/latest") == names
    assert s3_store.refs.list_numbers("latest")[-1] == 1051


_CHILD = """
import json, resource, sys
from pathlib import Path
from rag_model.store import BlobRef, Store
url, source, dest = sys.argv[1:]
store = Store.open(url)
store.files.write("warm", b"up")
store.files.read("warm")
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
blob = store.blobs.put_file(Path(source))
up = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
store.blobs.fetch(blob, Path(dest))
down = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
print(json.dumps([up - before, down - before]))
"""


def test_memory_does_not_grow_with_a_file(s3_store: Store, tmp_path: Path) -> None:
    grown = {}
    for megabytes in (64, 192):
        source = tmp_path / "source"
        with source.open("wb") as file:
            file.truncate(megabytes << 20)
            file.write(secrets.token_bytes(8))  # at the front: another file each time
        command = [sys.executable, "-c", _CHILD, s3_store.url, str(source), str(tmp_path / f"copy-{megabytes}")]
        child = subprocess.run(command, check=True, capture_output=True, text=True)
        grown[megabytes] = max(json.loads(child.stdout)) >> 10
    assert grown[192] < grown[64] + 48, grown


_PULL = """
import sys
from pathlib import Path
from rag_model.store import Store
from rag_model.store.objects import files
from rag_model.store.pulling.pull import pull
url, snapshot, dest, chunk = sys.argv[1:]
files._CHUNK_BYTES = int(chunk)
pull(Store.open(url), snapshot, Path(dest))
"""


def test_a_killed_pull_leaves_the_old_version_and_is_gone_on_with(
    store: Store, faulty_server: FaultyServer, large: BlobRef, publish: Callable[..., str], tmp_path: Path
) -> None:
    old, dest = publish(store), tmp_path / "dest"
    pull(store, old, dest)
    content = store.snapshots.get(old).content
    new = store.snapshots.publish(Manifest(replace(content, files={**content.files, "index/large.faiss": large})))
    command = [sys.executable, "-c", _PULL, store.url, new, str(dest), str(CHUNK)]
    kills = 0
    for deadly in (FIRST, LAST, LAST):
        with subprocess.Popen(command, stderr=subprocess.PIPE) as child:

            def kill(request: Request, child: subprocess.Popen[bytes] = child, deadly: str = deadly) -> str | None:
                if request.headers.get("Range") == deadly:
                    child.kill()
                    return "refuse"
                return None

            faulty_server.fault = kill
            kills += child.wait() == -signal.SIGKILL
        with Snapshot.from_folder(dest) as kept:
            assert kept.id == old
            assert kept.passages([1500])[0].text == "text 1500"
    assert kills == 3
    faulty_server.fault = lambda request: None
    report = pull(store, new, dest)
    assert (report.snapshot, report.fetched_bytes) == (new, large.size)
    assert digest_file(Snapshot.from_folder(dest).path("index/large.faiss")) == large.id
    assert not [*dest.rglob(f"*{PARTIAL_SUFFIX}")]
