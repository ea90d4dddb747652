"""Stores in Google Cloud Storage and Azure: conditional writes, retries, and errors of one line."""

import gc
import os
import secrets
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from flows.cli import run
from rag_model.corpus.source import expand_pattern, get_size, get_version_tag, read_bytes
from rag_model.errors import MissingExtraError, StoreError
from rag_model.store import RefMove, Store
from rag_model.store.objects.buckets import find_cloud
from rag_model.store.upkeep.gc import collect_garbage
from rag_model.store.upkeep.verify import probe_store, verify_version
from tests.fixtures.cloud_servers import CONTAINER, CloudServer
from tests.fixtures.s3_proxy import FaultyServer, Request, serve_faulty
from tests.fixtures.store_files import publish_parts
from tests.rag_model.store.test_races import race

# Google's client does not close a connection whose reply it did not read to the end.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")

CHUNK = 1 << 20
LARGE = 9 * CHUNK + 7  # Google's client sends up to 8 MiB in one request


@dataclass(frozen=True, slots=True)
class ProxiedCloud:
    """A cloud's server behind a proxy, and a new store in it."""

    service: CloudServer
    server: FaultyServer
    store: Store

    @property
    def creation_condition(self) -> tuple[str, str]:
        """Where a request for exclusive creation states its condition, and the condition."""
        return ("path", "ifGenerationMatch=0") if self.service.scheme == "gs" else ("If-None-Match", "*")

    def list_conditional_requests(self) -> list[Request]:
        where, condition = self.creation_condition
        return [
            r for r in self.server.requests if condition in (r.path if where == "path" else r.headers.get(where, ""))
        ]


@pytest.fixture(autouse=True)
def collect_connections() -> Iterator[None]:
    """Report these connections here, and not in the tests of a later file."""
    yield
    gc.collect()


@pytest.fixture(params=["gcs", "azure"])
def service(request: pytest.FixtureRequest) -> Any:
    return request.getfixturevalue(request.param)


@pytest.fixture
def cloud(service: CloudServer, monkeypatch: pytest.MonkeyPatch) -> Iterator[ProxiedCloud]:
    """A store whose client retries soon and uploads large files in chunks."""
    if service.scheme == "gs":
        monkeypatch.setattr("rag_model.store.objects.files._CHUNK_BYTES", CHUNK)
        from rag_model.store.objects import gcs  # noqa: PLC0415 - of an extra

        monkeypatch.setattr(gcs, "_RETRY", gcs._RETRY.with_delay(initial=0.01, maximum=0.02))
    else:
        monkeypatch.setattr("rag_model.store.objects.buckets._PAUSE_SECONDS", 0.001)
        for name in ("_BLOCK_BYTES", "_SINGLE_UPLOAD_BYTES"):
            monkeypatch.setattr(f"rag_model.store.objects.azure.{name}", CHUNK)
    with serve_faulty(service.endpoint) as server, service.connect(server.url) as url:
        yield ProxiedCloud(service, server, Store.open(url, create=True))


def fail_every(n: int, fault: str) -> Any:
    """Return a fault for every n-th request, except for requests that may not be executed twice.

    fake-gcs-server appends a repeated chunk again; Google's service ignores it.
    """
    unsafe_path = "upload_id" if fault == "break" else "\n"
    return lambda request: fault if request.number % n == 0 and unsafe_path not in request.path else None


@pytest.mark.parametrize("fault", ["throttle", "refuse", "break"])
def test_failed_requests_are_retried(cloud: ProxiedCloud, fault: str, tmp_path: Path) -> None:
    cloud.server.fault = fail_every(3, fault)
    (tmp_path / "large").write_bytes(secrets.token_bytes(LARGE))
    blob = cloud.store.blobs.put_file(tmp_path / "large")
    cloud.store.blobs.fetch(blob, tmp_path / "copy")
    assert (tmp_path / "copy").read_bytes() == (tmp_path / "large").read_bytes()
    assert [file.path for file in cloud.store.files.iter_tree("blobs")] == [blob.path]
    assert len(cloud.server.requests) > LARGE // CHUNK  # in chunks


def test_server_refuses_second_writer(cloud: ProxiedCloud) -> None:
    cloud.server.requests.clear()
    assert cloud.store.files.create("one", b"first")
    assert not cloud.store.files.create("one", b"second")
    assert len(cloud.list_conditional_requests()) == 2
    assert not [request for request in cloud.server.requests[:1] if request.method in {"GET", "HEAD"}]  # no look first
    assert cloud.store.files.read("one") == b"first"


def test_move_is_written_once_though_its_reply_is_lost(cloud: ProxiedCloud) -> None:
    cloud.store.refs.require_exclusive_creation()
    cloud.server.requests.clear()
    lost_paths: list[str] = []

    def lose_the_first(request: Request) -> str | None:
        if request.method in {"GET", "HEAD"} or request.path in lost_paths:
            return None
        lost_paths.append(request.path)
        return "lose"

    cloud.server.fault = lose_the_first
    move = cloud.store.refs.move("latest", "0" * 64, 0)
    assert isinstance(move, RefMove)
    assert lost_paths
    assert cloud.store.refs.read_history("latest") == [move]


@pytest.mark.parametrize("fault", ["throttle", "error", "refuse"])
def test_only_one_layer_retries(cloud: ProxiedCloud, fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the client's retry policy, every request is sent once."""
    cloud.store.files.write("file", b"data")
    if cloud.service.scheme == "gs":
        monkeypatch.setattr("rag_model.store.objects.gcs._RETRY", None)
    else:
        monkeypatch.setattr("rag_model.store.objects.azure.MAX_TRIES", 1)
    cloud.service.clear_clients()
    store = Store.open(cloud.store.url)
    cloud.server.requests.clear()
    cloud.server.fault = lambda request: fault
    with pytest.raises(StoreError, match=rf"cannot read {cloud.service.scheme}://.*/file: .") as error:
        store.files.read("file")
    assert "\n" not in str(error.value)
    assert len(cloud.server.requests) == 1


def test_retries_end_if_the_server_never_recovers(cloud: ProxiedCloud, monkeypatch: pytest.MonkeyPatch) -> None:
    if cloud.service.scheme == "gs":
        from rag_model.store.objects import gcs  # noqa: PLC0415 - of an extra

        monkeypatch.setattr(gcs, "_RETRY", gcs._RETRY.with_timeout(0.1))
    cloud.store.files.write("file", b"data")
    cloud.server.requests.clear()
    cloud.server.fault = lambda request: "throttle"
    with pytest.raises(StoreError, match="cannot read"):
        cloud.store.files.read("file")
    assert 1 < len(cloud.server.requests) <= 20


def test_probe_accepts_the_cloud(cloud: ProxiedCloud) -> None:
    probed = probe_store(cloud.store)
    assert probed.creates_exclusively
    assert abs(probed.clock_skew) <= 2  # Azure's times are whole seconds
    assert cloud.store.files.list_names("probe") == []


def test_missing_file_costs_one_request(cloud: ProxiedCloud) -> None:
    cloud.server.requests.clear()
    assert cloud.store.files.read("nothing") is None
    assert cloud.store.files.get_size("nothing") is None
    assert len(cloud.server.requests) == 2


def test_range_ends_at_the_end_of_the_file(cloud: ProxiedCloud) -> None:
    cloud.store.files.write("file", b"0123456789")
    read = cloud.store.files.read_range
    assert [read("file", 8, 20), read("file", 10, 20), read("file", 3, 5)] == [b"89", b"", b"34"]


def test_listing_has_folders_and_several_pages(service: CloudServer, monkeypatch: pytest.MonkeyPatch) -> None:
    with service.connect() as url:
        store = Store.open(url, create=True)
        for name in ("a", "b/c", "b/d/e", "bc"):
            store.files.write(f"folder/{name}", b"1")
        assert store.files.list_names("folder") == ["a", "bc"]
        assert store.files.list_names("folder", kind="directory") == ["b"]
        assert sorted(file.path[7:] for file in store.files.iter_tree("folder")) == ["a", "b/c", "b/d/e", "bc"]
        store.files.delete_folder("folder/b")
        assert sorted(file.path[7:] for file in store.files.iter_tree("folder")) == ["a", "bc"]


@pytest.mark.parametrize("fault", ["empty", "page", "object"])
def test_invalid_listing_deletes_nothing(cloud: ProxiedCloud, fault: str) -> None:
    snapshot = publish_parts(cloud.store)
    cloud.server.fault = lambda request: fault if _is_listing(request) else None
    with pytest.raises(StoreError, match="replied to a list request without a listing"):
        collect_garbage(cloud.store, 0.0)
    assert not any(request.method == "DELETE" and "blobs" in request.path for request in cloud.server.requests)
    cloud.server.fault = lambda request: None
    assert verify_version(cloud.store, snapshot) == []


def _is_listing(request: Request) -> bool:
    return request.method == "GET" and "prefix=" in request.path


def test_one_of_many_processes_creates(service: CloudServer) -> None:
    """The processes are forked from a connected one, and each opens its own connections."""
    with service.connect() as url:
        store = Store.open(url, create=True)

        def attempt(i: int) -> list[bool]:
            return [store.files.create(f"race/{number}", f"{i} {number}".encode()) for number in range(12)]

        for number, created in enumerate(zip(*race(4, attempt), strict=True)):
            assert created.count(True) == 1
            assert store.files.read(f"race/{number}") == f"{created.index(True)} {number}".encode()


_PUT = """
import sys
from pathlib import Path
from rag_model.store import Store
from rag_model.store.objects import files
url, source, chunk = sys.argv[1:]
files._CHUNK_BYTES = int(chunk)
if url.startswith("az:"):
    from rag_model.store.objects import azure
    azure._BLOCK_BYTES = azure._SINGLE_UPLOAD_BYTES = int(chunk)
Store.open(url).blobs.put_file(Path(source))
"""


def test_killed_upload_leaves_nothing_and_can_be_repeated(cloud: ProxiedCloud, tmp_path: Path) -> None:
    (tmp_path / "large").write_bytes(secrets.token_bytes(LARGE))
    command = [sys.executable, "-c", _PUT, cloud.store.url, str(tmp_path / "large"), str(CHUNK)]
    with subprocess.Popen(command, stderr=subprocess.PIPE) as child:

        def kill(request: Request) -> str | None:
            if int(request.headers.get("Content-Length") or 0) < CHUNK or len(large) < 3:
                large.extend([request] * (int(request.headers.get("Content-Length") or 0) >= CHUNK))
                return None
            child.kill()
            return "refuse"

        large: list[Request] = []
        cloud.server.fault = kill
        assert child.wait() == -signal.SIGKILL
    cloud.server.fault = lambda request: None
    assert list(cloud.store.files.iter_tree("blobs")) == []
    blob = cloud.store.blobs.put_file(tmp_path / "large")
    assert cloud.store.blobs.get_local_path(blob).read_bytes() == (tmp_path / "large").read_bytes()


def test_missing_bucket_is_reported(service: CloudServer, capsys: pytest.CaptureFixture[str]) -> None:
    with service.connect():
        url = f"{service.scheme}://bookwheel-nowhere/store"
        assert run(["log", "--store", url]) == 1
        (line,) = capsys.readouterr().err.splitlines()
        assert "no bookwheel store" in line
        with pytest.raises(StoreError, match="its bucket does not exist"):
            Store.open(url, create=True)


def test_denied_access_is_reported(cloud: ProxiedCloud, capsys: pytest.CaptureFixture[str]) -> None:
    if cloud.service.scheme == "gs":
        cloud.server.fault = lambda request: "deny"
    else:
        wrong = CloudServer("az", cloud.service.endpoint, "d3Jvbmc=").build_environment(cloud.server.url)
        os.environ.update(wrong)  # the fixture restores it
        cloud.service.clear_clients()
    cloud.server.requests.clear()
    assert run(["log", "--store", cloud.store.url]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"bookwheel: not allowed to read {cloud.service.scheme}://")
    assert line.endswith("check the permissions or credentials")
    assert len(cloud.server.requests) == 1


def test_unreachable_server_is_reported_without_secrets(
    cloud: ProxiedCloud, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    if cloud.service.scheme == "gs":
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", "http://127.0.0.1:9")
        from rag_model.store.objects import gcs  # noqa: PLC0415 - of an extra

        monkeypatch.setattr(gcs, "_RETRY", gcs._RETRY.with_timeout(0.05))
    else:
        signed = "BlobEndpoint=http://127.0.0.1:9/some;SharedAccessSignature=sv=2026&sig=hushhush%3D"
        monkeypatch.setenv("AZURE_STORAGE_CONNECTION_STRING", signed)
    cloud.service.clear_clients()
    assert run(["log", "--store", cloud.store.url]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"bookwheel: cannot read {cloud.service.scheme}://{CONTAINER}/")
    assert "refused" in line
    assert "hushhush" not in line


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({}, "no Azure storage account is named"),
        ({"AZURE_STORAGE_CONNECTION_STRING": "AccountKey=hushhush"}, "cannot be read"),
    ],
)
def test_invalid_azure_settings_are_reported(
    environment: dict[str, str],
    message: str,
    azure: CloudServer,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name in ("AZURE_STORAGE_CONNECTION_STRING", "AZURE_STORAGE_ACCOUNT_NAME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    azure.clear_clients()
    assert run(["log", "--store", "az://container/store"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line
    assert "hushhush" not in line


def test_missing_google_credentials_are_reported(
    gcs: CloudServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("STORAGE_EMULATOR_HOST", raising=False)
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(tmp_path / "absent.json"))
    gcs.clear_clients()
    assert run(["log", "--store", "gs://bucket/store"]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("bookwheel: not allowed to open gs://bucket/store")


def test_public_google_buckets_are_read_without_credentials(
    gcs: CloudServer, gcs_store_url: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    Store.open(gcs_store_url, create=True).files.write("file", b"public")
    monkeypatch.delenv("STORAGE_EMULATOR_HOST")
    for name, value in {"API_ENDPOINT_OVERRIDE": gcs.endpoint, "NO_GCE_CHECK": "true", "HOME": str(tmp_path)}.items():
        monkeypatch.setenv(name, value)
    gcs.clear_clients()
    assert Store.open(gcs_store_url).files.read("file") == b"public"


def test_dump_in_a_bucket_is_found_and_read(service: CloudServer) -> None:
    with service.connect() as url:
        store = Store.open(url, create=True)
        for name, data in (("part-10", b"later"), ("part-2", b"0123456789")):
            store.files.write(f"dumps/{name}", data)
        second, tenth = expand_pattern(f"{url}/dumps/part-*")
        assert (second.endswith("part-2"), tenth.endswith("part-10"), get_size(tenth)) == (True, True, 5)
        assert b"".join(read_bytes(second, 3, 4)) == b"3456"
        assert get_version_tag(second) is not None


@pytest.mark.parametrize(
    ("url", "client", "extra"),
    [
        ("gs://b/s", "google.cloud.storage", "gcs"),
        ("az://b/s", "azure.storage.blob", "azure"),
        ("s3://b/s", "s3fs", "s3"),
        ("hf://datasets/a/b", "huggingface_hub", "hub"),
    ],
)
def test_missing_client_names_the_extra_to_install(
    url: str, client: str, extra: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, client, None)
    with pytest.raises(MissingExtraError, match=rf"pip install 'bookwheel\[{extra}\]'"):
        Store.open(url)


@pytest.mark.parametrize(
    ("url", "extra"), [("s3a://b", "s3"), ("gcs://b", "gcs"), ("abfss://b", "azure"), ("gs", None), ("ftp://b", None)]
)
def test_cloud_is_chosen_by_its_scheme(url: str, extra: str | None) -> None:
    cloud = find_cloud(url)
    assert (cloud.extra if cloud else None) == extra
