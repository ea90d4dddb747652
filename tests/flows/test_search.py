"""The imports of `bookwheel search`, and its default depth."""

import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from rag_model.integrations.langchain import BookwheelRetriever
from rag_model.store.store import Store
from tests.fixtures.s3_proxy import FaultyServer
from tests.fixtures.serving import wait_until
from tests.fixtures.tiny_snapshot import copy_store, publish_tiny
from tests.flows.conftest import Bookwheel

ARTICLES = {"Animal Farm": "a story that was written by the king of music", "Rivers": "the river of the city"}
UNUSED = {  # These packages are installed and slow to import.
    *("transformers", "prefect", "apache_beam", "fastapi", "pydantic", "rich", "onnxruntime", "s3fs", "numba"),
    *("scipy", "sklearn", "pandas", "matplotlib", "sympy", "huggingface_hub", "sentence_transformers"),
}
PROGRAM = """
import sys
from flows.cli import run
code = run(["search", "who wrote it?", *sys.argv[1:]])
print(*sorted(%r & set(sys.modules)), file=sys.stderr)
own = [name for name in sys.modules if name.partition(".")[0] in ("flows", "beam_jobs", "rag_model")]
print(*(own if len(own) > 90 else ()), file=sys.stderr)
sys.exit(code)
"""


@pytest.fixture(scope="module")
def store(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store of two passages."""
    folder = tmp_path_factory.mktemp("searched")
    publish_tiny(Store.open(str(folder / "store"), create=True), tiny, ARTICLES, folder)
    return folder / "store"


def test_dense_search_imports_no_unused_package(store: Path) -> None:
    command = [sys.executable, "-c", PROGRAM % UNUSED, "--store", str(store), "-k", "2"]
    result = subprocess.run(command, check=False, capture_output=True, text=True)
    assert (result.returncode, result.stderr.split()) == (0, [])
    assert "a story that was written" in result.stdout


def test_default_depth_is_capped_at_corpus_size(store: Path, tmp_path: Path, bookwheel: Bookwheel) -> None:
    (hits,) = [result["hits"] for result in bookwheel("search", "who?", "--store", store, "--json").json["results"]]
    assert len(hits) == 2
    questions = tmp_path / "questions.jsonl"
    questions.write_text('{"question": "who wrote it?", "answers": ["king of music"]}\n')
    result = bookwheel("evaluate", "--store", store, "--questions", questions, "--json")
    assert (result.code, "Success@1" in result.json["metrics"], "Success@5" in result.json["metrics"]) == (
        0,
        True,
        False,
    )
    assert len(BookwheelRetriever(store=str(store)).invoke("who wrote it?")) == 2
    for command in (["search", "who?"], ["evaluate", "--questions", questions]):
        refused = bookwheel(*command, "--store", store, "-k", 3)
        assert (refused.code, "k is 3 but the snapshot holds 2 passages" in refused.err) == (2, True)


@pytest.mark.parametrize(
    ("command", "method", "path"),
    [("verify", "GET", "/blobs/"), ("verify", "HEAD", "/blobs/"), ("gc", "GET", "%2Fblobs%2F..%2F")],
    ids=["reads", "look-ups", "listings"],
)
def test_interrupt_ends_a_command_whose_threads_wait_for_the_store(
    command: str,
    method: str,
    path: str,
    store: Path,
    tmp_path: Path,
    faulty_server: FaultyServer,
    s3_bucket: Callable[[str], AbstractContextManager[str]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("BOOKWHEEL_CACHE", str(tmp_path / "cache"))
    with s3_bucket(faulty_server.url) as url:
        copy_store(Store.open(str(store)), url)
        faulty_server.fault = lambda request: (
            "hold" if request.method == method and re.search(path, request.path) else None
        )
        with subprocess.Popen([sys.executable, "-m", "flows.cli", command, "--store", url]) as process:
            wait_until(lambda: faulty_server.n_held > 1)
            process.send_signal(signal.SIGINT)
            try:
                assert process.wait(60) == 130
            finally:
                process.kill()


def test_second_interrupt_ends_a_command_at_once(
    tmp_path: Path, faulty_server: FaultyServer, s3_bucket: Callable[[str], AbstractContextManager[str]]
) -> None:
    (tmp_path / "dump.jsonl").write_text('{"id": "1", "title": "Ada", "text": "Ada wrote."}\n')
    with s3_bucket(faulty_server.url) as url:
        # The threads that probe whether the bucket accepts conditional writes do not look for an interrupt.
        faulty_server.fault = lambda request: "hold" if request.method == "PUT" and "/probe/" in request.path else None
        command = [sys.executable, "-m", "flows.cli", "reindex", "--dump", str(tmp_path / "dump.jsonl"), "--store", url]
        with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
            wait_until(lambda: faulty_server.n_held > 1)
            try:
                while process.poll() is None:
                    process.send_signal(signal.SIGINT)
                    time.sleep(0.2)
                assert process.returncode == 130
                assert process.stderr is not None
                assert "Traceback" not in process.stderr.read()
            finally:
                process.kill()
