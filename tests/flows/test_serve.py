"""`bookwheel serve` as people start it: a process, its address, its signals, its end."""

import json
import os
import shutil
import signal
import socket
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from rag_model.store.pulling.pull import pull
from rag_model.store.store import Store
from tests.fixtures.forked_processes import ForkedCommand

PATIENCE = 400  # seconds; a busy machine takes a while to import torch
SECRET = "a-word-that-nobody-may-see"


pytestmark = pytest.mark.xdist_group("processes")


@dataclass(slots=True)
class Served:
    """A service in a process of its own."""

    process: ForkedCommand
    url: str
    health: str | None
    log: Path

    @property
    def address(self) -> tuple[str, int]:
        host, port = self.url.removeprefix("http://").split(":")
        return host, int(port)

    def get(self, path: str) -> tuple[int, Any]:
        try:
            with urllib.request.urlopen(self.url + path, timeout=PATIENCE) as reply:
                return reply.status, reply.read().decode()
        except urllib.error.HTTPError as refused:
            with refused:
                return refused.code, refused.read().decode()

    def until(self, condition: Callable[[], object]) -> None:
        wait_until(condition, self.process, self.log)

    def end(self, number: int) -> int | None:
        """Send a signal; return the exit code."""
        os.kill(self.process.pid, number)
        return self.process.wait(PATIENCE)


def wait_until(condition: Callable[[], object], process: ForkedCommand, log: Path) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert process.poll() is None, log.read_text()
        assert time.monotonic() < deadline, log.read_text()
        time.sleep(0.05)  # between two looks


@contextmanager
def service(tmp_path: Path, *options: object) -> Iterator[Served]:
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("BOOKWHEEL_CACHE", str(tmp_path / "cache"))
        environment.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
        environment.setenv("OMP_NUM_THREADS", "1")
        process = ForkedCommand(["serve", "--port", "0", "--json", *map(str, options)], tmp_path)
    output, log = process.outputs
    try:
        wait_until(lambda: output.exists() and output.read_text().endswith("\n"), process, log)
        (line,) = output.read_text().splitlines()
        addresses = json.loads(line)
        yield Served(process, addresses["url"], addresses["health"], log)
    finally:
        process.kill()
        process.wait()
    assert output.read_text() == f"{line}\n", "a service prints its addresses alone"


@pytest.fixture(scope="module")
def copy(library: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(shutil.copytree(library, tmp_path_factory.mktemp("serve") / "store"))


def test_it_serves_follows_and_ends_when_what_is_under_way_is_answered(
    copy: Path, tmp_path: Path, bookwheel: Callable
) -> None:
    searched = bookwheel("search", "who wrote about anarchism?", "--store", copy, "-k", 2, "--json").json
    with service(tmp_path, "--store", copy, "--poll", 0.1, "--in-memory") as served:
        served.until(lambda: served.get("/readyz")[0] == 200)
        assert "bookwheel_snapshot_info" in served.get("/metrics")[1]
        assert json.loads(served.get("/snapshot")[1])["snapshot"] == searched["snapshot"]
        body = json.dumps({"questions": ["who wrote about anarchism?"], "k": 2}).encode()
        head = (
            f"POST /search HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
        )
        head += "\r\nConnection: close\r\n\r\n"
        with socket.create_connection(served.address, timeout=PATIENCE) as connection:
            connection.sendall(head.encode() + body[:10])
            served.get("/healthz")  # by now the first bytes are there
            os.kill(served.process.pid, signal.SIGTERM)
            served.until(lambda: served.get("/readyz")[0] == 503)
            assert "is shutting down" in served.get("/readyz")[1]
            connection.sendall(body[10:])
            reply = b"".join(iter(lambda: connection.recv(65536), b""))
        assert reply.startswith(b"HTTP/1.1 200 ")
        found = json.loads(reply.partition(b"\r\n\r\n")[2])
        hits, expected = ([hit["id"] for hit in one["results"][0]["hits"]] for one in (found, searched))
        assert hits == expected
        assert served.process.wait(PATIENCE) == 0
    log = served.log.read_text()
    assert f"serving latest at {served.url}" in log
    assert SECRET not in log
    assert "Traceback" not in log


def test_a_snapshot_without_a_graph_is_served_by_what_it_has(lists_only: Path, tmp_path: Path) -> None:
    with service(tmp_path, "--store", lists_only, "--dest", tmp_path / "dest") as served:
        served.until(lambda: served.get("/readyz")[0] == 200)
        told = json.loads(served.get("/snapshot")[1])
        assert (told["retrievers"], told["indexes"]) == (["ivfpq"], ["ivfpq"])
        assert served.end(signal.SIGTERM) == 0


def test_an_expression_is_served_and_composed_of(copy: Path, tmp_path: Path) -> None:
    named = ("--retriever", "rrf(hnsw, exact)", "--retriever", "exact:5")
    with service(tmp_path, "--store", copy, "--dest", tmp_path / "dest", *named) as served:
        served.until(lambda: served.get("/readyz")[0] == 200)
        assert json.loads(served.get("/snapshot")[1])["retrievers"] == ["rrf(hnsw, exact)", "exact:5"]
        body = json.dumps({"questions": ["Who?"], "retriever": "rrf(exact:2,hnsw:2)", "k": 1}).encode()
        asked = urllib.request.Request(f"{served.url}/search", body, {"Content-Type": "application/json"})
        with urllib.request.urlopen(asked, timeout=PATIENCE) as reply:
            (hit,) = json.loads(reply.read())["results"][0]["hits"]
        assert {leg["leg"] for leg in hit["legs"]} == {"exact", "hnsw"}


def test_who_has_no_token_is_not_answered_and_health_has_a_port_of_its_own(copy: Path, tmp_path: Path) -> None:
    token, file = "a" * 40, tmp_path / "tokens"
    file.write_text(token)
    doors = ("--tokens", file, "--health-port", 0, "--allow-host", "rag.example")
    with service(tmp_path, "--store", copy, "--dest", tmp_path / "dest", *doors) as served:
        served.until(lambda: served.get("/readyz")[0] == 200)
        with urllib.request.urlopen(f"{served.health}/metrics", timeout=PATIENCE) as reply:
            assert 'bookwheel_thread_deaths_total{thread="search"} 0.0' in reply.read().decode()
        assert served.get("/snapshot")[0] == 401
        headers = {"Authorization": f"Bearer {token}", "Host": "rag.example"}
        asked = urllib.request.Request(f"{served.url}/snapshot", headers=headers)
        with urllib.request.urlopen(asked, timeout=PATIENCE) as reply:
            assert reply.status == 200
        assert token not in served.log.read_text()


def test_an_interrupt_ends_it_at_once(copy: Path, tmp_path: Path) -> None:
    with service(tmp_path, "--store", copy, "--dest", tmp_path / "dest", "--host", "0.0.0.0") as served:
        assert served.end(signal.SIGINT) == 0
    assert "programs may use any host name" in served.log.read_text()
    assert "Traceback" not in served.log.read_text()


def test_a_misspelt_ref_is_not_served_from_what_was_pulled(copy: Path, tmp_path: Path, bookwheel: Callable) -> None:
    pull(Store.open(str(copy)), "latest", tmp_path / "dest")
    result = bookwheel("serve", "--store", copy, "--ref", "nobody", "--port", 0, "--dest", tmp_path / "dest")
    assert (result.code, "no snapshot or ref 'nobody'" in result.err) == (1, True)


@pytest.mark.parametrize(
    ("options", "code", "words"),
    [
        (["--store", "{nothing}"], 1, "there is no bookwheel store"),
        (["--store", "{store}", "--ref", "nobody"], 1, "no snapshot or ref 'nobody'"),
        (["--store", "{store}", "--index", "nonesuch"], 2, "no index 'nonesuch'"),
        (["--store", "{store}", "--retriever", "rrf(hnsw, nonesuch)"], 2, "no index 'nonesuch'"),
        (["--store", "{store}", "--retriever", "rrf(hnsw, exact"], 2, "is not closed"),
        (["--store", "{store}", "--retriever", "exact", "--index", "hnsw"], 2, "are both given"),
        (["--store", "{store}", "--in-memory", "--low-memory"], 2, "give one of them, or none to map them"),
        (["--store", "{store}", "--model", "nonesuch"], 1, "nonesuch"),
        (["--store", "{store}", "--port", "{taken}"], 2, "give another --port"),
        (["--store", "{store}", "--port", "99999"], 2, "--port is 99999: give 1 to 65535"),
        (["--store", "{store}", "--host", "nohost.invalid"], 2, "give another --host"),
        (["--store", "{store}", "--poll", "nan"], 2, "poll_seconds is nan: give a finite number"),
        (["--store", "{store}", "--keep", "0"], 2, "keep is 0"),
        (["--store", "{store}", "--request-seconds", "0"], 2, "request_seconds is 0"),
        (["--store", "{store}", "--model", "openai:m", "--max-tokens", "0"], 2, "max_new_tokens (--max-tokens) is 0"),
        (["--store", "{store}", "--override-every", "5"], 2, "no model gives any: add --model, or leave it out"),
        (["--store", "{store}", "--model", "openai:m", "--override-every", "-1"], 2, "override_every is -1"),
        (["--store", "{store}", "--tokens", "{nothing}"], 2, "cannot be read"),
        (["--store", "{store}", "--tls-key", "{nothing}"], 2, "--tls-certificate and --tls-key belong together"),
        (["--store", "{store}", "--health-port", "{taken}"], 2, "give another --health-port"),
    ],
)
def test_what_can_never_be_served_is_one_sentence(
    options: list[str], code: int, words: str, copy: Path, tmp_path: Path, bookwheel: Callable
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        known = {"store": copy, "nothing": tmp_path / "nothing", "taken": taken.getsockname()[1]}
        given = [option.format(**known) for option in options]
        given += [] if "--port" in given else ["--port", "0"]
        result = bookwheel("serve", *given, "--dest", tmp_path / "dest")
    assert result.code == code, result.err
    told = [line for line in result.err.splitlines() if line.startswith("bookwheel: ")]
    assert len(told) == 1
    assert words in told[0]
