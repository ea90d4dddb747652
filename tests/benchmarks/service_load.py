"""A snapshot of real passages, a server of it in a process, and clients in another process.

Clients keep their connections and send one question at a time, the next as soon as they have the reply. One thread
sends prepared HTTP requests over plain sockets for all of them, because a client library, or an event loop in Python,
takes as much CPU of the shared cores as the server takes for HTTP.
"""

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from selectors import EVENT_READ, BaseSelector, DefaultSelector
from typing import Any

import numpy as np
import numpy.typing as npt
from passages import draw_sample, embed_sample

from flows.demo import demo_encoder
from rag_model.corpus.passages import PassageWriter
from rag_model.corpus.records import Passage
from rag_model.encoders.encoder import collect_question_encoder_files
from rag_model.encoders.files import resolve_folder
from rag_model.encoders.space import compute_space
from rag_model.encoders.spec import read_encoder_spec
from rag_model.index.build import run_stages
from rag_model.index.recipe import IndexRecipe, resolve
from rag_model.store import Content, Manifest, PartEntry, Store
from rag_model.store.versions.manifest import embeddings_in_space
from rag_model.store.versions.moves import tag

Vectors = npt.NDArray[np.float32]
K = 5
_PIECE = 1 << 16  # bytes of one read
_LOOK = 0.05  # seconds between two checks whether the load ends


@dataclass(frozen=True, slots=True)
class TimedRequest:
    """One request, as seen by its client; times are seconds of the machine's monotonic clock."""

    start_seconds: float
    end_seconds: float
    status: int  # 0: the connection broke
    snapshot: str
    is_mixed: bool  # the reply has passages of both snapshots


def add_sample_options(parser: argparse.ArgumentParser, count: int) -> None:
    """Add the options for the passages that are served and the questions of the clients."""
    parser.add_argument("--passages", type=Path, help="JSON lines; by default the demo's")
    parser.add_argument("--questions", type=Path, nargs="*", default=[], help="JSON lines; by default the demo's")
    parser.add_argument("--count", type=int, default=count, help="passages")
    parser.add_argument("--max-questions", type=int, default=74, help="different questions")
    parser.add_argument("--cache", type=Path, help="where vectors are kept")


def load_sample(options: argparse.Namespace, folder: Path) -> tuple[list[dict[str, Any]], Vectors, list[str]]:
    """Return the passages of the options, their vectors, and the questions; by default the cache is in `folder`."""
    selection = options.passages, options.questions, options.count, options.max_questions
    vectors = embed_sample(options.cache or folder / "cache", *selection).passages
    rows, questions = draw_sample(*selection)
    return rows, vectors, questions


def publish(store: Store, rows: Sequence[dict[str, Any]], vectors: Vectors, work: Path, mark: str = "") -> str:
    """Publish passages with their vectors and an HNSW32 graph; `mark` begins every title. Return the id."""
    work.mkdir(parents=True)
    parquet, array, index = work / "rows.parquet", work / "rows.npy", work / "hnsw.faiss"
    with PassageWriter(parquet) as writer:
        for number, row in enumerate(rows, start=1):
            title, text = mark + row["title"], row["text"]
            digest = Passage.hash_of(title, text)
            writer.write(Passage(f"{number}-0", str(number), 1, title, "", text, 0, len(text.split()), digest))
    np.save(array, vectors, allow_pickle=False)
    plan = resolve(IndexRecipe("HNSW32"), len(rows), vectors.shape[1])
    run_stages(plan, [array], index, work)
    folder = resolve_folder(demo_encoder())
    spec = read_encoder_spec(folder, {})
    space = compute_space(folder, spec, "MiniLM")
    paths = {
        "passages/part-00000.parquet": parquet,
        "embeddings/part-00000.npy": array,
        "index/hnsw.faiss": index,
        **{f"encoder/question/{n}": p for n, p in collect_question_encoder_files(folder, spec, space, work).items()},
    }
    files = {name: store.blobs.put_file(path) for name, path in paths.items()}
    parts = (PartEntry("part-00000", 1, len(rows), len(rows)),)
    content = Content({"kind": "wiki"}, parts, files, {}, embeddings_in_space(space.to_json()), {"hnsw": plan.entry()})
    identity = store.snapshots.publish(Manifest(content))
    tag(store, identity, "latest")
    return identity


def print_measurement(
    options: argparse.Namespace, measure: Callable[[Path, list[str], argparse.Namespace], dict[str, Any]]
) -> None:
    """Publish the selected passages in the store `store` of a temporary folder, call `measure`, and print its JSON."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        rows, vectors, questions = load_sample(options, folder)
        publish(Store.open(str(folder / "store"), create=True), rows, vectors, folder / "work")
        print(json.dumps(measure(folder, questions, options)))


@contextmanager
def service(url: str, dest: Path, *options: str) -> Iterator[tuple[str, int]]:
    """Run `bookwheel serve` until the block ends; yield its address and process id once it is ready."""
    program = [str(Path(sys.executable).with_name("bookwheel")), "serve", "--store", url, "--dest", str(dest)]
    environment = {name: value for name, value in os.environ.items() if not name.endswith("_NUM_THREADS")}
    process = subprocess.Popen(
        [*program, "--port", "0", "--json", *options], stdout=subprocess.PIPE, text=True, env=environment
    )
    try:
        assert process.stdout is not None
        address = json.loads(process.stdout.readline())["url"].removeprefix("http://")
        while get(address, "/readyz")[0] != 200:
            if process.poll() is not None:
                raise SystemExit("the service ended: its output is above")
            time.sleep(0.2)
        yield address, process.pid
    finally:
        process.terminate()
        process.wait()


def get(address: str, path: str) -> tuple[int, Any]:
    """Send one GET request on a new connection; return the status and the JSON."""
    connection = _Connection(address)
    with connection.socket:
        connection.socket.sendall(_request("GET", path, b""))
        while (reply := connection.read()) is None:
            pass
    return reply[0], json.loads(reply[1])


def load(address: str, questions: Sequence[str], clients: int, until: Path | float) -> list[TimedRequest]:
    """Send queries from `clients` clients, for some seconds or until a file exists; return all requests, in order."""
    bodies = (json.dumps({"questions": [question], "k": K}).encode() for question in questions)
    requests = [_request("POST", "/search", body) for body in bodies]
    start = last_check = time.monotonic()
    finished_requests: list[TimedRequest] = []
    with DefaultSelector() as selector:
        for number in range(clients):
            first = number % len(requests)
            _Client(address, requests[first:] + requests[:first], clients, selector).ask()
        goes_on = True
        while selector.get_map():
            for key, _ in selector.select(_LOOK):
                if (request := key.data.read_reply()) is None:
                    continue
                finished_requests.append(request)
                key.data.ask() if goes_on else key.data.close()
            if (current_time := time.monotonic()) > last_check + _LOOK:
                goes_on, last_check = (
                    (not until.exists() if isinstance(until, Path) else current_time < start + until),
                    current_time,
                )
    return finished_requests


class _Connection:
    """A keep-alive connection, whose replies are read piece by piece."""

    def __init__(self, address: str) -> None:
        host, port = address.rsplit(":", 1)
        self.socket = socket.create_connection((host, int(port)))
        self._reply, self._ends = b"", 0

    def read(self) -> tuple[int, bytes] | None:
        """Wait for bytes; return status and body, or None if the reply is not complete."""
        piece = self.socket.recv(_PIECE)
        if not piece:
            raise ConnectionError("the service has closed the connection")
        self._reply += piece
        head = self._reply.find(b"\r\n\r\n") + 4
        if not self._ends and head > 3:
            length = self._reply[:head].lower().partition(b"content-length:")[2].partition(b"\r\n")[0]
            self._ends = head + int(length)
        if not self._ends or len(self._reply) < self._ends:
            return None
        reply, self._reply, self._ends = self._reply, b"", 0
        return int(reply[9:12]), reply[head:]


class _Client:
    """A client that sends one request after the other; `selector` tells when there is something to read."""

    def __init__(self, address: str, requests: Sequence[bytes], step: int, selector: BaseSelector) -> None:
        self._address, self._requests, self._step, self._selector = address, requests, step, selector
        self._place, self._start_seconds = 0, 0.0
        self._connect()

    def ask(self) -> None:
        """Send the next request."""
        self._start_seconds = time.monotonic()
        with suppress(OSError):  # the connection is broken; `read_reply` handles it
            self._connection.socket.sendall(self._requests[self._place])
        self._place = (self._place + self._step) % len(self._requests)

    def read_reply(self) -> TimedRequest | None:
        """Read what has arrived; return None if the reply is not complete."""
        try:
            reply = self._connection.read()
        except OSError:
            self.close()
            self._connect()
            return TimedRequest(self._start_seconds, time.monotonic(), 0, "", False)
        return None if reply is None else _parse_reply(self._start_seconds, time.monotonic(), *reply)

    def close(self) -> None:
        """Close the connection."""
        self._selector.unregister(self._connection.socket)
        self._connection.socket.close()

    def _connect(self) -> None:
        self._connection = _Connection(self._address)
        self._selector.register(self._connection.socket, EVENT_READ, self)


def _parse_reply(start_seconds: float, end_seconds: float, status: int, reply: bytes) -> TimedRequest:
    """Find the marks of the snapshots at the beginning of titles, without parsing JSON, as clients share the cores."""
    snapshot = reply[13:77].decode(errors="replace") if status == 200 else ""
    is_mixed = b'"title":"RED' in reply and b'"title":"BLU' in reply
    return TimedRequest(start_seconds, end_seconds, status, snapshot, is_mixed)


def _request(method: str, path: str, body: bytes) -> bytes:
    head = f"{method} {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body


def percentile_ms(requests: Sequence[TimedRequest], share: float) -> float:
    """Return a percentile of the requests' latency in milliseconds; `share` is in percent."""
    return (
        round(
            float(np.percentile([request.end_seconds - request.start_seconds for request in requests], share)) * 1e3, 2
        )
        if requests
        else 0.0
    )


def cpu_seconds(process: int) -> float:
    """Return the CPU seconds that a process has spent."""
    fields = Path("/proc", str(process), "stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def memory_mb(process: int, name: str = "RssAnon") -> float:
    """Return a memory figure of a process in megabytes: `RssAnon` is its current value, `VmHWM` its peak."""
    status = Path("/proc", str(process), "status").read_text()
    return round(int(status.partition(f"{name}:")[2].split()[0]) * 1024 / 1e6, 1)


def list_processes(process: int) -> list[int]:
    """Return a process and its children."""
    children = Path("/proc", str(process), "task", str(process), "children").read_text().split()
    return [process, *map(int, children)]


def proportional_mb(process: int) -> float:
    """Return the proportional set size of a process: a page that n processes share counts as 1/n."""
    return int(Path("/proc", str(process), "smaps_rollup").read_text().partition("Pss:")[2].split()[0]) * 1024 / 1e6
