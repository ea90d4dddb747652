"""A service of several processes: all workers swap at one moment, and killed workers are restarted."""

import json
import os
import re
import secrets
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import httpx
import pytest

from rag_model.errors import BookwheelError, GoneError, error_to_dict
from rag_model.serving.following.follower import FollowedRef
from rag_model.serving.following.pins import SnapshotOpeningError
from rag_model.serving.service import Service
from rag_model.serving.workers import WorkerLink
from rag_model.store.versions.moves import untag
from tests.fixtures.serving import NO_TLS, QUICK, TIMEOUT, Library, wait_until

CLIENTS = 4


@contextmanager
def run_workers(library: Library, dest: Path) -> Iterator[tuple[str, int]]:
    """Run `bookwheel serve --workers 2`, and yield its URL and the process id of the supervisor."""
    command = [sys.executable, "-m", "flows.cli", "serve", "--store", library.url, "--dest", str(dest)]
    process = subprocess.Popen(
        [*command, "--port", "0", "--json", "--workers", "2", "--poll", "0.1"], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    try:
        url = json.loads(process.stdout.readline())["url"]
        wait_until(lambda: fetch(f"{url}/readyz").status_code == 200)
        yield url, process.pid
    finally:
        process.send_signal(signal.SIGTERM)
        process.stdout.close()
        assert process.wait(TIMEOUT) == 0


def create_link(worker_id: int, switch_number: int, folder: Path) -> tuple[WorkerLink, Connection]:
    """Return a worker's link without sockets, and the supervisor's end of its connection."""
    supervisor_end, worker_end = Pipe()
    sockets: Any = (None, None)
    link = WorkerLink(worker_id, worker_end, sockets, [switch_number, 0, 0], folder, is_restarted=switch_number > 0)
    link.start()
    return link, supervisor_end


@contextmanager
def run_worker(
    library: Library,
    dest: Path,
    worker_id: int,
    switch_number: int = 0,
    on_fatal: Callable[[BookwheelError], None] = lambda error: None,
) -> Iterator[tuple[Service, Connection]]:
    """Run the service of one worker in this process, and yield it and the supervisor's end of its connection."""
    link, supervisor_end = create_link(worker_id, switch_number, dest)
    service = Service(FollowedRef(library.url, "latest", dest), QUICK, on_fatal=on_fatal, link=link)
    service.start()
    try:
        yield service, supervisor_end
    finally:
        supervisor_end.close()
        service.close()


def send(connection: Connection, **message: Any) -> None:
    connection.send_bytes(json.dumps(message).encode())


def receive(connection: Connection) -> dict[str, Any]:
    assert connection.poll(TIMEOUT)
    return dict(json.loads(connection.recv_bytes()))


def list_workers(supervisor: int) -> list[int]:
    """Return the process ids of the workers, the leader first unless it was restarted."""
    children = Path(f"/proc/{supervisor}/task/{supervisor}/children").read_text().split()
    return [int(child) for child in children if "spawn_main" in Path(f"/proc/{child}/cmdline").read_text()]


def kill_leader(supervisor: int) -> None:
    """Kill the leader, the worker that was started last."""
    killed = list_workers(supervisor)[-1]
    os.kill(killed, signal.SIGKILL)
    wait_until(lambda: killed not in list_workers(supervisor))


def fetch(url: str) -> httpx.Response:
    """Send a request over a connection of its own, to any worker."""
    return httpx.get(url, timeout=TIMEOUT, verify=NO_TLS)


def retrieve(url: str, snapshot: str) -> httpx.Response:
    request = {"queries": ["who was the king?"], "topk": 1}
    return httpx.post(f"{url}/retrieve?snapshot={snapshot}", json=request, timeout=TIMEOUT, verify=NO_TLS)


def get_metric(url: str, name: str) -> float:
    text = fetch(f"{url}/metrics").text
    values = re.findall(rf"^{re.escape(name)} (\S+)$", text, re.MULTILINE)
    assert len(values) <= 1, text
    return float(values[0]) if values else 0.0


class Clients:
    """Clients that search in a loop, each over one connection."""

    def __init__(self, url: str) -> None:
        # start, end, status, snapshot, colours of the hits
        self.replies: list[tuple[float, float, int, str, set[str]]] = []
        self.pause, self._url, self._end = 0.05, url, threading.Event()
        self._threads = [threading.Thread(target=self._search) for _ in range(CLIENTS)]
        for thread in self._threads:
            thread.start()

    def end(self) -> None:
        self._end.set()
        for thread in self._threads:
            thread.join()

    def _search(self) -> None:
        with httpx.Client(base_url=self._url, timeout=TIMEOUT) as client:
            while not self._end.wait(self.pause):
                start_time = time.monotonic()
                try:
                    reply = client.post("/search", json={"questions": ["who was the king?"], "k": 3})
                except httpx.TransportError:
                    self.replies.append((start_time, time.monotonic(), 0, "", set()))
                    continue
                body: dict[str, Any] = reply.json()
                hits = body["results"][0]["hits"] if reply.status_code == 200 else []
                colours = {hit["title"].split()[0] for hit in hits}
                snapshot = body.get("snapshot", "")
                self.replies.append((start_time, time.monotonic(), reply.status_code, snapshot, colours))


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_workers_swap_together_and_are_restarted(library: Library, dest: Path, trial_record: Path) -> None:
    shutil.copytree(trial_record, dest / ".trials")
    with run_workers(library, dest) as (url, supervisor):
        clients = Clients(url)
        try:
            for snapshot in (library.blue, library.red):
                library.move(snapshot)
                wait_until(lambda target=snapshot: fetch(f"{url}/snapshot").json()["snapshot"] == target)
                count = len(clients.replies)
                wait_until(lambda before=count: len(clients.replies) > before + 4 * CLIENTS)
            reply_count = len(clients.replies)
            clients.pause = 0.25  # seconds; leaves the cores to the workers that start
            assert get_metric(url, 'bookwheel_swaps_total{outcome="ok"}') == 2
            assert get_metric(url, 'bookwheel_request_seconds_count{status="200",verb="search"}') >= reply_count
            wait_until(lambda: get_metric(url, "bookwheel_ref_number") == 5)

            for deaths, index in enumerate((1, 0), start=1):
                killed = list_workers(supervisor)[index]
                os.kill(killed, signal.SIGKILL)
                wait_until(lambda: fetch(f"{url}/readyz").status_code == 200)
                wait_until(lambda n=deaths: get_metric(url, 'bookwheel_thread_deaths_total{thread="worker"}') == n)
                wait_until(lambda: get_metric(url, "bookwheel_workers") == 2)
                assert killed not in list_workers(supervisor)

            for _ in range(2):  # perhaps at both workers
                wait_until(lambda: retrieve(url, library.blue).json().get("snapshot") == library.blue)
            # Each worker asks the leader while the request waits.
            wait_until(lambda: [retrieve(url, secrets.token_hex(32)).status_code for _ in range(8)] == [410] * 8)

            library.store.takedowns.record_replacement(library.red, "")
            wait_until(lambda: [fetch(f"{url}/snapshot").status_code for _ in range(8)] == [503] * 8)
            wait_until(lambda: not (dest / library.red).exists())

            kill_leader(supervisor)
            polls = get_metric(url, 'bookwheel_looks_total{outcome="ok"}')
            wait_until(lambda: get_metric(url, 'bookwheel_looks_total{outcome="ok"}') > polls)
            library.move(library.blue)
            wait_until(lambda: [fetch(f"{url}/snapshot").status_code for _ in range(8)] == [200] * 8)

            kill_leader(supervisor)
            library.store.takedowns.record_replacement(library.blue, "")
            wait_until(lambda: [fetch(f"{url}/snapshot").status_code for _ in range(8)] == [503] * 8)
        finally:
            clients.end()

    assert [status for _, _, status, *_ in clients.replies[:reply_count] if status != 200] == []
    lost_replies = [reply for reply in clients.replies if reply[2] == 0]
    assert len(lost_replies) <= 4 * CLIENTS, "only the requests in progress at a killed worker may be lost"
    for _, _, status, snapshot, colours in clients.replies:
        assert status != 200 or colours == {library.colour(snapshot)}
    # No request that starts after the first reply from a new snapshot may be answered from the old one.
    replies = [reply for reply in clients.replies[:reply_count] if reply[2] == 200]
    first_blue = min(end for _, end, _, snapshot, _ in replies if snapshot == library.blue)
    first_red_again = min(
        end for start, end, _, snapshot, _ in replies if snapshot == library.red and start > first_blue
    )
    between = (snapshot for start, end, _, snapshot, _ in replies if start > first_blue and end < first_red_again)
    assert set(between) == {library.blue}


def test_restarted_leader_follows_missing_ref(library: Library, dest: Path) -> None:
    untag(library.store, "latest")
    failures: list[BookwheelError] = []
    with run_worker(library, dest, 0, 1, failures.append) as (service, supervisor):
        wait_until(lambda: service.follower.refusal or service.follower.problem)
        library.move(library.blue)
        send(supervisor, kind="all_opened", opening={**receive(supervisor), "number": 2}, error=None)
        wait_until(lambda: service.is_ready)
    assert failures == []


def find_pin_error(service: Service, name: str) -> type[BookwheelError]:
    with pytest.raises(BookwheelError) as error:
        service.pins.hold(name)
    return error.type


def test_worker_asks_for_a_snapshot_until_a_leader_replies(library: Library, dest: Path) -> None:
    reply = {"kind": "pin", "name": library.blue, "error": error_to_dict(GoneError("it expired"))}
    with run_worker(library, dest, 1) as (service, supervisor):
        send(supervisor, **reply)  # No request waits for this reply any more.
        send(supervisor, kind="state", refusal=None, problem="unreachable", taken_down=[])
        wait_until(lambda: service.follower.problem == "unreachable")
        assert find_pin_error(service, library.blue) is SnapshotOpeningError
        for _ in range(2):  # The first leader dies before it replies.
            assert receive(supervisor) == {"kind": "pin", "name": library.blue}
        send(supervisor, **reply)
        wait_until(lambda: find_pin_error(service, library.blue) is GoneError)


def test_state_is_published_while_messages_arrive(dest: Path) -> None:
    link, supervisor = create_link(0, 0, dest)
    ticked = threading.Event()
    with supervisor:
        link.on_tick = ticked.set
        wait_until(lambda: send(supervisor, kind="pin") or ticked.is_set())
