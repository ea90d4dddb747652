"""`bookwheel serve` as a process: its addresses, its replies, its signals and its end."""

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
SECRET = "secret-of-the-environment"

pytestmark = pytest.mark.xdist_group("processes")


@dataclass(slots=True)
class ServiceProcess:
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
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read().decode()

    def wait_until(self, condition: Callable[[], object]) -> None:
        wait_for(condition, self.process, self.log)

    def stop(self, number: int) -> int | None:
        """Send a signal, wait for the end, and return the exit code."""
        os.kill(self.process.pid, number)
        return self.process.wait(PATIENCE)


def wait_for(condition: Callable[[], object], process: ForkedCommand, log: Path) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert process.poll() is None, log.read_text()
        assert time.monotonic() < deadline, log.read_text()
        time.sleep(0.05)


@contextmanager
def start_service(tmp_path: Path, *options: object) -> Iterator[ServiceProcess]:
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("BOOKWHEEL_CACHE", str(tmp_path / "cache"))
        environment.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
        environment.setenv("OMP_NUM_THREADS", "1")
        process = ForkedCommand(["serve", "--port", "0", "--json", *map(str, options)], tmp_path)
    output, log = process.outputs
    try:
        wait_for(lambda: output.exists() and output.read_text().endswith("\n"), process, log)
        (line,) = output.read_text().splitlines()
        addresses = json.loads(line)
        yield ServiceProcess(process, addresses["url"], addresses["health"], log)
    finally:
        process.kill()
        process.wait()
    assert output.read_text() == f"{line}\n", "a service prints only its addresses"


@pytest.fixture(scope="module")
def store(library: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(shutil.copytree(library, tmp_path_factory.mktemp("serve") / "store"))


def test_service_answers_open_request_before_it_ends(store: Path, tmp_path: Path, bookwheel: Callable) -> None:
    searched = bookwheel("search", "who wrote about anarchism?", "--store", store, "-k", 2, "--json").json
    with start_service(tmp_path, "--store", store, "--poll", 0.1, "--in-memory") as service:
        service.wait_until(lambda: service.get("/readyz")[0] == 200)
        assert "bookwheel_snapshot_info" in service.get("/metrics")[1]
        assert json.loads(service.get("/snapshot")[1])["snapshot"] == searched["snapshot"]
        body = json.dumps({"questions": ["who wrote about anarchism?"], "k": 2}).encode()
        head = "POST /search HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        head += f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
        with socket.create_connection(service.address, timeout=PATIENCE) as connection:
            connection.sendall(head.encode() + body[:10])
            service.get("/healthz")  # The service has received the first bytes once it has answered this.
            os.kill(service.process.pid, signal.SIGTERM)
            service.wait_until(lambda: service.get("/readyz")[0] == 503)
            assert "is shutting down" in service.get("/readyz")[1]
            connection.sendall(body[10:])
            reply = b"".join(iter(lambda: connection.recv(65536), b""))
        assert reply.startswith(b"HTTP/1.1 200 ")
        reply_json = json.loads(reply.partition(b"\r\n\r\n")[2])
        hits, expected = ([hit["id"] for hit in reply["results"][0]["hits"]] for reply in (reply_json, searched))
        assert hits == expected
        assert service.process.wait(PATIENCE) == 0
    log = service.log.read_text()
    assert f"serving latest at {service.url}" in log
    assert SECRET not in log
    assert "Traceback" not in log


def test_service_uses_ivfpq_without_graph(ivf_library: Path, tmp_path: Path) -> None:
    with start_service(tmp_path, "--store", ivf_library, "--dest", tmp_path / "dest") as service:
        service.wait_until(lambda: service.get("/readyz")[0] == 200)
        description = json.loads(service.get("/snapshot")[1])
        assert (description["retrievers"], description["indexes"]) == (["ivfpq"], ["ivfpq"])
        assert service.stop(signal.SIGTERM) == 0


def test_service_composes_retriever_expressions(store: Path, tmp_path: Path) -> None:
    options = ("--retriever", "rrf(hnsw, exact)", "--retriever", "exact:5")
    with start_service(tmp_path, "--store", store, "--dest", tmp_path / "dest", *options) as service:
        service.wait_until(lambda: service.get("/readyz")[0] == 200)
        assert json.loads(service.get("/snapshot")[1])["retrievers"] == ["rrf(hnsw, exact)", "exact:5"]
        body = json.dumps({"questions": ["Who?"], "retriever": "rrf(exact:2,hnsw:2)", "k": 1}).encode()
        request = urllib.request.Request(f"{service.url}/search", body, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=PATIENCE) as reply:
            (hit,) = json.loads(reply.read())["results"][0]["hits"]
        assert {leg["leg"] for leg in hit["legs"]} == {"exact", "hnsw"}


def test_token_is_required_except_on_health_port(store: Path, tmp_path: Path) -> None:
    token, file = "a" * 40, tmp_path / "tokens"
    file.write_text(token)
    options = ("--tokens", file, "--health-port", 0, "--allow-host", "rag.example")
    with start_service(tmp_path, "--store", store, "--dest", tmp_path / "dest", *options) as service:
        service.wait_until(lambda: service.get("/readyz")[0] == 200)
        with urllib.request.urlopen(f"{service.health}/metrics", timeout=PATIENCE) as reply:
            assert 'bookwheel_thread_deaths_total{thread="search"} 0.0' in reply.read().decode()
        assert service.get("/snapshot")[0] == 401
        headers = {"Authorization": f"Bearer {token}", "Host": "rag.example"}
        request = urllib.request.Request(f"{service.url}/snapshot", headers=headers)
        with urllib.request.urlopen(request, timeout=PATIENCE) as reply:
            assert reply.status == 200
        assert token not in service.log.read_text()


def test_interrupt_ends_service(store: Path, tmp_path: Path) -> None:
    with start_service(tmp_path, "--store", store, "--dest", tmp_path / "dest", "--host", "0.0.0.0") as service:
        assert service.stop(signal.SIGINT) == 0
    assert "programs may use any host name" in service.log.read_text()
    assert "Traceback" not in service.log.read_text()


def test_misspelt_ref_is_not_served_from_earlier_pull(store: Path, tmp_path: Path, bookwheel: Callable) -> None:
    pull(Store.open(str(store)), "latest", tmp_path / "dest")
    result = bookwheel("serve", "--store", store, "--ref", "typo", "--port", 0, "--dest", tmp_path / "dest")
    assert (result.code, "no snapshot or ref 'typo'" in result.err) == (1, True)


@pytest.mark.parametrize(
    ("options", "code", "message"),
    [
        (["--store", "{nothing}"], 1, "there is no bookwheel store"),
        (["--store", "{store}", "--ref", "typo"], 1, "no snapshot or ref 'typo'"),
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
def test_wrong_options_are_refused(
    options: list[str], code: int, message: str, store: Path, tmp_path: Path, bookwheel: Callable
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        values = {"store": store, "nothing": tmp_path / "nothing", "taken": listener.getsockname()[1]}
        arguments = [option.format(**values) for option in options]
        arguments += [] if "--port" in arguments else ["--port", "0"]
        result = bookwheel("serve", *arguments, "--dest", tmp_path / "dest")
    assert result.code == code, result.err
    (error_line,) = [line for line in result.err.splitlines() if line.startswith("bookwheel: ")]
    assert message in error_line
