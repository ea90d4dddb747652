"""The service of the page pulls at its start, answers, and follows the ref; only the store's address is replaced."""

import importlib.util
import threading
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import httpx
import pytest
import uvicorn

from rag_model.store.store import Store
from rag_model.store.versions.moves import tag
from tests.docs.blocks import DOCS, read_blocks
from tests.docs.shell import Shell
from tests.fixtures.serving import wait_until

pytestmark = pytest.mark.xdist_group("docs")

PAGE = DOCS / "howto" / "embed-a-service.md"


@pytest.fixture
def service(shell: Shell) -> ModuleType:
    """The page's file, imported."""
    (file,) = [block for block in read_blocks(PAGE) if block.mark == "file"]
    code = [line for line in file.text.splitlines() if line.strip() and not line.startswith(("import", "from", '"""'))]
    assert len(code) <= 20, "the page promises a service of twenty lines"
    path = shell.folder / file.note
    path.write_text(file.text.replace("s3://bucket/library", "library"), encoding="utf-8")
    spec = importlib.util.spec_from_file_location("embedded_service", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def url(service: ModuleType) -> Iterator[str]:
    """The URL at which uvicorn serves the app of the page."""
    server = uvicorn.Server(uvicorn.Config(service.app, port=0, log_level="error"))
    thread = threading.Thread(target=server.run)
    thread.start()
    wait_until(lambda: server.started or not thread.is_alive())
    assert server.started
    port = server.servers[0].sockets[0].getsockname()[1]
    yield f"http://127.0.0.1:{port}"
    server.should_exit = True
    thread.join()


def test_the_service_answers_from_the_snapshot_that_the_ref_names(url: str, service: ModuleType) -> None:
    store = Store.open("library")
    newest = store.snapshots.resolve("latest")
    with httpx.Client(base_url=url, timeout=300) as client:
        reply = client.get("/ask", params={"question": "Who wrote about anarchism?", "k": 2}).json()
        assert (reply["snapshot"], len(reply["hits"])) == (newest, 2)
        assert {"text", "title", "licence", "snapshot"} <= set(reply["hits"][0])
        rejected = client.get("/ask", params={"question": " "})
        assert (rejected.status_code, rejected.json()) == (
            400,
            {"detail": "question 1 is empty: write at least one visible character"},
        )
        older = store.snapshots.resolve("latest@1")
        assert older != newest
        tag(store, older, "latest")
        service.library.open().follower.poll()  # sooner than after ten seconds
        assert client.get("/ask", params={"question": "anarchism"}).json()["snapshot"] == older
    assert Path("pulled").is_dir()
