"""Stores on all backends, and small snapshots for them."""

import io
import secrets
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from importlib import import_module
from pathlib import Path
from typing import Any

import fsspec
import pytest
from werkzeug.serving import BaseWSGIServer, make_server

from rag_model.store import Store
from tests.fixtures.slow_lookup import LookupBarrier


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache of remote blobs."""
    monkeypatch.setenv("BOOKWHEEL_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def memory_store() -> Iterator[Store]:
    url = f"memory://{secrets.token_hex(4)}"
    yield Store.open(url, create=True)
    fsspec.filesystem("memory").rm(url, recursive=True)


@pytest.fixture(scope="session")
def moto_server() -> Iterator[Callable[[str], str]]:
    """Return a function that starts S3 servers, which "honour", "ignore", "refuse", "repeat" or "race" `If-None-Match`.

    "repeat" executes such a request twice, like a client that retries after a lost reply. "race" looks for the file
    and then writes it, so two concurrent writers both succeed. "race memo" does so only for paths with "memo".
    """
    moto = import_module("moto.moto_server.werkzeug_app")  # imported here, because it takes 0.25 s
    app = moto.DomainDispatcherApplication(moto.create_backend_app)
    servers: dict[str, BaseWSGIServer] = {}

    def start(conditions: str) -> str:
        if conditions not in servers:
            servers[conditions] = make_server("127.0.0.1", 0, simulate_conditions(app, conditions), threaded=True)
            threading.Thread(target=servers[conditions].serve_forever, daemon=True).start()
        return f"http://127.0.0.1:{servers[conditions].port}"

    yield start
    for server in servers.values():
        server.shutdown()
        server.server_close()


def simulate_conditions(app: Callable[..., Any], conditions: str) -> Callable[..., Any]:
    request_lock, lookup_gate = threading.Lock(), LookupBarrier()
    refusal = b"<Error><Code>NotImplemented</Code><Message>No such header</Message></Error>"

    def handle(environ: dict[str, Any], start_response: Callable[..., Any]) -> Any:
        condition = environ.get("HTTP_IF_NONE_MATCH")
        if condition and conditions == "refuse":
            start_response("501 Not Implemented", [("Content-Type", "application/xml")])
            return [refusal]
        if condition and conditions == "ignore":
            del environ["HTTP_IF_NONE_MATCH"]
        if condition and conditions == "repeat":
            body = environ["wsgi.input"].read(int(environ["CONTENT_LENGTH"]))
            environ["wsgi.input"] = io.BytesIO(body)
            with request_lock:
                list(app(dict(environ), lambda status, headers: None))
            environ["wsgi.input"] = io.BytesIO(body)
        if condition and conditions.startswith("race") and conditions[5:] in environ["PATH_INFO"]:
            statuses: list[str] = []
            body = environ["wsgi.input"].read(int(environ["CONTENT_LENGTH"]))
            lookup = {**environ, "REQUEST_METHOD": "HEAD", "CONTENT_LENGTH": "0", "wsgi.input": io.BytesIO()}
            list(app(lookup, lambda status, headers: statuses.append(status)))
            environ["wsgi.input"] = io.BytesIO(body)
            lookup_gate.wait()
            if statuses[0].startswith("404"):
                del environ["HTTP_IF_NONE_MATCH"]
            return app(environ, start_response)
        if condition:
            with request_lock:  # because moto looks up the file and then writes it, without a lock
                return [b"".join(app(environ, start_response))]
        return app(environ, start_response)

    return handle


@pytest.fixture(scope="class")
def moto_store_url(
    moto_server: Callable[[str], str], s3_bucket: Callable[[str], AbstractContextManager[str]]
) -> Iterator[str]:
    with s3_bucket(moto_server("honour")) as url:
        yield url


@pytest.fixture
def s3_store(s3_store_url: str) -> Store:
    return Store.open(f"{s3_store_url}/{secrets.token_hex(4)}", create=True)


@pytest.fixture(params=["store", "memory_store", "s3_store"])
def any_store(request: pytest.FixtureRequest) -> Store:
    """A new store on disk, in memory, and on an S3 server."""
    store: Store = request.getfixturevalue(request.param)
    return store


@pytest.fixture
def dest(tmp_path: Path) -> Path:
    """The folder to which a test pulls; it does not exist."""
    return tmp_path / "dest"


@pytest.fixture
def temporary_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder for temporary files."""
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temporary"))
    return tmp_path / "temporary"
