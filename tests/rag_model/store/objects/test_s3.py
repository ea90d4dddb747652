"""Faults of a real S3 server, such as throttling and lost replies, are retried in one layer or reported."""

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
from rag_model.store.objects.cache import PARTIAL_SUFFIX
from rag_model.store.objects.s3 import S3
from rag_model.store.pulling.pull import pull
from rag_model.store.upkeep.gc import collect_garbage
from rag_model.store.upkeep.verify import verify_version
from tests.fixtures.s3_proxy import FaultyServer, Request
from tests.fixtures.store_files import publish_parts

TRIES = 7
CHUNK = 5 << 20  # smallest part of an upload that S3 accepts; the default is larger
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
    """A store behind the proxy, whose client retries soon."""
    monkeypatch.setattr("rag_model.store.objects.buckets._PAUSE_SECONDS", 0.001)
    monkeypatch.setattr("rag_model.store.objects.files._CHUNK_BYTES", CHUNK)
    with s3_bucket(faulty_server.url) as url:
        yield Store.open(url, create=True)
        faulty_server.fault = lambda request: None


@pytest.fixture
def large(store: Store, tmp_path: Path) -> BlobRef:
    (tmp_path / "large").write_bytes(secrets.token_bytes(LARGE))
    return store.blobs.put_file(tmp_path / "large")


def fail_every(n: int, fault: str, method: str = "") -> Callable[[Request], str | None]:
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
def test_invalid_listing_deletes_nothing(store: Store, faulty_server: FaultyServer, fault: str) -> None:
    snapshot = publish_parts(store)
    faulty_server.fault = lambda request: fault if "list-type=2" in request.path else None
    with pytest.raises(StoreError, match="replied to a list request without a listing"):
        collect_garbage(store, 0.0)
    assert not any(request.method == "DELETE" and "/blobs/" in request.path for request in faulty_server.requests)
    faulty_server.fault = lambda request: None
    assert verify_version(store, snapshot) == []


def test_error_of_server_without_checksums_names_the_variable_to_set(
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
def test_failed_requests_are_retried(store: Store, faulty_server: FaultyServer, fault: str, tmp_path: Path) -> None:
    faulty_server.fault = fail_every(3, fault)
    snapshot = publish_parts(store)
    store.refs.move("latest", snapshot, 0)
    assert verify_version(store, snapshot) == []
    with Snapshot.open(store.url) as remote:
        assert [passage.text for passage in remote.passages([2200, 0])] == ["text 2200", "text 0"]
    pull(store, "latest", tmp_path / "dest")
    with Snapshot.from_folder(tmp_path / "dest") as pulled:
        assert pulled.passages([1500])[0].text == "text 1500"


@pytest.mark.parametrize("fault", ["throttle", "break", "trickle"])
def test_large_files_survive_faults(store: Store, faulty_server: FaultyServer, fault: str, tmp_path: Path) -> None:
    faulty_server.fault = fail_every(2, fault)
    (tmp_path / "large").write_bytes(secrets.token_bytes(LARGE))
    blob = store.blobs.put_file(tmp_path / "large")
    store.blobs.fetch(blob, tmp_path / "copy")
    assert (tmp_path / "copy").read_bytes() == (tmp_path / "large").read_bytes()


@pytest.mark.parametrize("method", ["POST", "PUT"])
def test_upload_succeeds_though_a_reply_is_lost(
    store: Store, faulty_server: FaultyServer, method: str, tmp_path: Path
) -> None:
    lost_paths: set[str] = set()

    def lose_first_reply(request: Request) -> str | None:
        if request.method != method or request.path in lost_paths:
            return None
        lost_paths.add(request.path)
        return "lose"

    faulty_server.fault = lose_first_reply
    (tmp_path / "large").write_bytes(secrets.token_bytes(LARGE))
    blob = store.blobs.put_file(tmp_path / "large")
    assert lost_paths
    assert store.blobs.get_local_path(blob).read_bytes() == (tmp_path / "large").read_bytes()


def test_move_is_written_once_though_its_reply_is_lost(store: Store, faulty_server: FaultyServer) -> None:
    store.refs.require_exclusive_creation()
    faulty_server.fault = lambda request: (
        "lose" if request.method == "PUT" and _is_new(faulty_server, request) else None
    )
    move = store.refs.move("latest", "0" * 64, 0)
    assert isinstance(move, RefMove)
    assert store.refs.read_history("latest") == [move]


def _is_new(server: FaultyServer, request: Request) -> bool:
    return [request.path for request in server.requests].count(request.path) == 1


@pytest.mark.parametrize("fault", ["throttle", "error", "refuse", "break"])
def test_only_one_layer_retries(store: Store, faulty_server: FaultyServer, fault: str) -> None:
    """If a server never recovers, a request is sent seven times, and not seven times seven.

    aiohttp itself opens a new connection if the server has closed one, which is not counted as a retry.
    """
    store.files.write("file", b"data")
    faulty_server.requests.clear()
    faulty_server.fault = lambda request: fault
    with pytest.raises(StoreError, match=r"cannot read s3://.*/file: .") as error:
        store.files.read("file")
    assert "\n" not in str(error.value)
    assert len(faulty_server.requests) <= (2 * TRIES if fault == "refuse" else TRIES)


def test_missing_file_costs_one_request(store: Store, faulty_server: FaultyServer) -> None:
    faulty_server.requests.clear()
    assert store.files.read("nothing") is None
    assert len(faulty_server.requests) == 1


def test_expired_credentials_are_reported_in_one_line(
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


def test_missing_credentials_are_reported_in_one_line(
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


def test_large_files_are_uploaded_and_read_in_parts(store: Store, faulty_server: FaultyServer, large: BlobRef) -> None:
    numbers = [request.path for request in faulty_server.requests if "partNumber=" in request.path]
    assert len(numbers) == 3
    faulty_server.requests.clear()
    assert b"".join(store.files.iter_chunks(large.path, large.size)) != b""
    ranges = sorted(request.headers["Range"] for request in faulty_server.requests)
    assert ranges == [FIRST, LAST, SECOND]


def test_fetch_resumes_after_a_failure(
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


def test_listing_has_several_pages(store: Store, faulty_server: FaultyServer, monkeypatch: pytest.MonkeyPatch) -> None:
    names = [f"{number:08d}.json" for number in range(1, 52)]
    fsspec.filesystem("s3").pipe({f"{store.url}/refs/latest/{name}": b"{}" for name in names})
    monkeypatch.setitem(store.files._fs.req_kw, "MaxKeys", 20)  # instead of 1,000 names on a page
    faulty_server.requests.clear()
    assert store.files.list_names("refs/latest") == names
    assert sum("list-type=2" in request.path for request in faulty_server.requests) == 3
    assert store.refs.list_numbers("latest")[-1] == 51


_MEASURE_MEMORY = r"""
import json, re, sys
from pathlib import Path
from rag_model.store import Store
from rag_model.store.objects import files
url, folder = sys.argv[1], Path(sys.argv[2])
files._CHUNK_BYTES = 5 << 20
store, peaks = Store.open(url), []
for megabytes in (1, 40, 100):
    with (folder / "source").open("wb") as file:
        file.truncate(megabytes << 20)
    blob = store.blobs.put_file(folder / "source")
    store.blobs.fetch(blob, folder / f"copy-{megabytes}")
    # Unlike getrusage, the peak of /proc does not include that of the process that started this one.
    peaks.append(int(re.search(r"VmHWM:\s+(\d+)", Path("/proc/self/status").read_text())[1]) >> 10)
print(json.dumps(peaks))
"""


def test_memory_does_not_grow_with_file_size(s3_store: Store, tmp_path: Path) -> None:
    command = [sys.executable, "-c", _MEASURE_MEMORY, s3_store.url, str(tmp_path)]
    child = subprocess.run(command, check=True, capture_output=True, text=True)
    _, small, large = json.loads(child.stdout)
    assert large < small + 30, f"{child.stdout} MiB, and the last file is 60 MiB larger than the one before"


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


def test_killed_pull_keeps_the_old_version_and_is_resumed(
    store: Store, faulty_server: FaultyServer, large: BlobRef, tmp_path: Path
) -> None:
    first_id, dest = publish_parts(store), tmp_path / "dest"
    pull(store, first_id, dest)
    content = store.snapshots.get(first_id).content
    second_id = store.snapshots.publish(Manifest(replace(content, files={**content.files, "index/large.faiss": large})))
    command = [sys.executable, "-c", _PULL, store.url, second_id, str(dest), str(CHUNK)]
    kills = 0
    for fatal_range in (FIRST, LAST):
        with subprocess.Popen(command, stderr=subprocess.PIPE) as child:

            def kill(request: Request, child: subprocess.Popen[bytes] = child, last: str = fatal_range) -> str | None:
                if request.headers.get("Range") == last:
                    child.kill()
                    return "refuse"
                return None

            faulty_server.fault = kill
            kills += child.wait() == -signal.SIGKILL
        with Snapshot.from_folder(dest) as snapshot:
            assert snapshot.id == first_id
            assert snapshot.passages([1500])[0].text == "text 1500"
    assert kills == 2
    faulty_server.fault = lambda request: None
    report = pull(store, second_id, dest)
    assert (report.snapshot, report.fetched_bytes) == (second_id, large.size)
    assert digest_file(Snapshot.from_folder(dest).path("index/large.faiss")) == large.id
    assert not [*dest.rglob(f"*{PARTIAL_SUFFIX}")]
