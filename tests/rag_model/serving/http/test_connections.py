"""Malicious or idle clients: the service answers other clients, and gets the connections back."""

import select
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import pytest

from rag_model.serving.http.connections import normalize_client_address
from rag_model.serving.http.guard import BearerTokens
from tests.fixtures.serving import TIMEOUT, Library, SearchGate, make_settings, run_service, wait_until

SEARCH = b"POST /search HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 24\r\n\r\n"
OTHER_ADDRESS = "127.0.0.2"  # an address of this machine that makes it look like another client


def open_connection(url: str, source: str = OTHER_ADDRESS) -> socket.socket:
    host, port = url.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), timeout=TIMEOUT, source_address=(source, 0))


@contextmanager
def hold_connections(url: str, count: int, data: bytes = b"") -> Iterator[list[socket.socket]]:
    """Hold connections of another client that send `data` and nothing more."""
    with ExitStack() as stack:
        connections = [stack.enter_context(open_connection(url)) for _ in range(count)]
        for connection in connections:
            connection.sendall(data)
        yield connections


@pytest.mark.parametrize("sent", [b"", SEARCH[:30], SEARCH + b'{"questions"'], ids=["idle", "slow head", "slow body"])
def test_connections_of_one_client_keep_no_other_client_out(sent: bytes, shared_library: Library, dest: Path) -> None:
    bounds = make_settings(connections=8, connections_per_client=6, body_seconds=TIMEOUT, idle_seconds=TIMEOUT)
    with run_service(shared_library.url, dest, bounds) as service, hold_connections(service.url, 12, sent):
        wait_until(lambda: len(service.server.server_state.connections) >= 6)
        service.search("who?")
        assert httpx.get(f"{service.url}/healthz").status_code == 200


def test_too_many_connections_of_one_client_get_429(shared_library: Library, dest: Path) -> None:
    bounds = make_settings(connections_per_client=2, body_seconds=TIMEOUT)
    with run_service(shared_library.url, dest, bounds) as service, hold_connections(service.url, 2):
        wait_until(lambda: len(service.server.server_state.connections) >= 2)
        with open_connection(service.url) as third:
            reply = b"".join(iter(lambda: third.recv(65536), b""))
        assert reply.startswith(b"HTTP/1.1 429 ")
        assert b"2 connections of your address are open" in reply


SNAPSHOT = b"GET /snapshot HTTP/1.1\r\nHost: localhost\r\n"
CHUNKED = SEARCH.replace(b"Content-Length: 24", b"Transfer-Encoding: chunked")


@pytest.mark.parametrize(
    ("head", "unit", "reply"),
    [
        (SNAPSHOT, b"a: b\r\n" * 500, b"HTTP/1.1 431 "),
        (SNAPSHOT + b"x: ", b"a" * 4096, b"HTTP/1.1 431 "),
        (b"GET /", b"a" * 4096, b"HTTP/1.1 431 "),
        (CHUNKED, b"1\r\n{\r\n" * 500, b"HTTP/1.1 431 "),
        (CHUNKED + b"2;", b"a" * 4096, b"HTTP/1.1 431 "),
        (CHUNKED + b"2\r\n{}\r\n0\r\n", b"a: b\r\n" * 500, b"HTTP/1.1 431 "),
    ],
    ids=["headers", "a header", "a path", "chunks of one byte", "a chunk's extension", "trailers"],
)
def test_endless_headers_and_chunks_are_refused(
    head: bytes, unit: bytes, reply: bytes, shared_library: Library, dest: Path
) -> None:
    bounds = make_settings(body_seconds=TIMEOUT, idle_seconds=TIMEOUT)
    with run_service(shared_library.url, dest, bounds) as service, open_connection(service.url) as endless:
        endless.settimeout(10)
        received = b""
        with suppress(ConnectionError):
            endless.sendall(head + unit * 16)
            received = endless.recv(65536)
        assert received.startswith(reply)
        # The remaining connection is that of `service.client`.
        wait_until(lambda: len(service.server.server_state.connections) <= 1)
        service.search("who?")


@pytest.mark.parametrize(
    ("request_bytes", "status", "words"),
    [
        (SNAPSHOT + b"a: b\r\n" * 101 + b"\r\n", b"431 Request Header Fields Too Large", b"100 headers"),
        (SNAPSHOT + b"a: b\r\n" * 99 + b"\r\n", b"200 OK", b"snapshot"),
        (
            CHUNKED.replace(b"chunked", b"gzip, chunked") + b"2\r\n{}\r\n0\r\n\r\n",
            b"501 Not Implemented",
            b"Transfer-Encoding",
        ),
        (CHUNKED + b"2\r\n{}\r\n0\r\n" + b"a: b\r\n" * 5_000, b"431 Request Header Fields Too Large", b"16 KiB"),
    ],
    ids=["101 headers", "100 headers", "two codings", "5,000 trailers"],
)
def test_refused_request_in_one_piece_gets_the_reason(
    request_bytes: bytes, status: bytes, words: bytes, shared_library: Library, dest: Path
) -> None:
    with run_service(shared_library.url, dest) as service, open_connection(service.url) as connection:
        connection.sendall(request_bytes)
        reply = connection.recv(65536)
        assert (reply.partition(b"\r\n")[0], words in reply) == (b"HTTP/1.1 " + status, True)


def test_a_trailer_is_not_a_header(shared_library: Library, dest: Path, tmp_path: Path) -> None:
    (tmp_path / "tokens").write_text("a-token-of-sixteen-characters\n")
    trailer = b"Authorization: Bearer a-token-of-sixteen-characters\r\n"
    with (
        run_service(shared_library.url, dest, tokens=BearerTokens(tmp_path / "tokens")) as service,
        open_connection(service.url) as connection,
    ):
        connection.sendall(CHUNKED + b"18\r\n" + b'{"questions": ["who?"]  }'[:24] + b"\r\n0\r\n" + trailer + b"\r\n")
        assert connection.recv(65536).startswith(b"HTTP/1.1 401 ")


@pytest.mark.parametrize("sent", [b"", SEARCH + b'{"questions"'], ids=["idle", "slow body"])
def test_silent_connection_makes_room_if_all_connections_are_taken(
    sent: bytes, shared_library: Library, dest: Path
) -> None:
    bounds = make_settings(connections=4, body_seconds=TIMEOUT, idle_seconds=TIMEOUT)
    with run_service(shared_library.url, dest, bounds) as service, hold_connections(service.url, 4, sent) as silent:
        state = service.server.server_state
        wait_until(lambda: len(state.connections) == 4 and len(state.tasks) == 4 * bool(sent))
        service.search("who?")
        (closed,) = select.select(silent, [], [], TIMEOUT)[0]
        with suppress(ConnectionResetError):
            assert closed.recv(1) == b""


def test_new_connection_gets_503_if_all_connections_are_busy(shared_library: Library, dest: Path) -> None:
    gate, bounds = SearchGate(), make_settings(connections=1, body_seconds=TIMEOUT)
    with run_service(shared_library.url, dest, bounds, gate) as service:
        gate.open.clear()
        client = threading.Thread(target=service.search, args=("held",))
        client.start()
        try:
            assert gate.is_waiting.wait(TIMEOUT)
            with open_connection(service.url) as second:
                reply = b"".join(iter(lambda: second.recv(65536), b""))
            assert reply.startswith(b"HTTP/1.1 503 ")
            assert httpx.get(f"{service.health}/readyz").status_code == 200  # The health port has its own connections.
        finally:
            gate.open.set()
            client.join()


def test_health_has_connections_of_its_own(shared_library: Library, dest: Path) -> None:
    bounds = make_settings(body_seconds=TIMEOUT, idle_seconds=TIMEOUT)
    with run_service(shared_library.url, dest, bounds) as service, hold_connections(service.health, 80):
        assert httpx.get(f"{service.health}/healthz").status_code == 200
        assert httpx.get(f"{service.health}/readyz").json() == {"status": "ready"}
        assert httpx.post(f"{service.health}/search", json={"questions": ["who?"]}).status_code == 404


@pytest.mark.parametrize("bound", [{"write_seconds": 0.2}, {"unsent_bytes_per_client": 1}], ids=["late", "much"])
def test_client_that_does_not_read_is_disconnected(bound: dict[str, Any], shared_library: Library, dest: Path) -> None:
    """The client sends requests until the replies fill the buffers of the system and wait in the service."""
    bounds = make_settings(**{"write_seconds": TIMEOUT, **bound})
    with run_service(shared_library.url, dest, bounds) as service, open_connection(service.url) as connection:
        state = service.server.server_state

        def is_cut_off() -> bool:
            return not any(connection.client[0] == OTHER_ADDRESS for connection in state.connections)

        wait_until(lambda: not is_cut_off())
        with suppress(ConnectionResetError, BrokenPipeError):
            while not is_cut_off():
                request_count = state.total_requests
                connection.sendall(b"GET /openapi.json HTTP/1.1\r\nHost: localhost\r\n\r\n" * 50)
                wait_until(lambda before=request_count: state.total_requests >= before + 50 or is_cut_off())  # type: ignore[misc]
        wait_until(is_cut_off)
        service.search("who?")


def test_client_that_pipelines_too_many_requests_is_disconnected(shared_library: Library, dest: Path) -> None:
    gate = SearchGate()
    with (
        run_service(shared_library.url, dest, make_settings(), gate) as service,
        open_connection(service.url) as connection,
    ):
        gate.open.clear()
        connection.sendall(SEARCH + b'{"questions": ["first"]}')
        connection.sendall(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n" * 2_000)
        wait_until(lambda: not service.server.server_state.connections)
        gate.open.set()
        service.search("who?")


def test_request_of_a_disconnected_client_is_not_searched(shared_library: Library, dest: Path) -> None:
    gate = SearchGate()
    with run_service(shared_library.url, dest, make_settings(), gate) as service:
        gate.open.clear()
        with open_connection(service.url) as first:
            first.sendall(SEARCH + b'{"questions": ["first"]}')
            assert gate.is_waiting.wait(TIMEOUT)
            with open_connection(service.url) as second:
                second.sendall(SEARCH + b'{"questions": ["leave"]}')
                wait_until(lambda: service.service._search_batcher.queued_questions == 1)
            wait_until(lambda: service.service._search_batcher.queued_questions == 0)
            gate.open.set()
            assert first.recv(65536).startswith(b"HTTP/1.1 200 ")
        assert gate.batches == [["first"]]


@pytest.mark.parametrize(
    ("host", "client"),
    [
        ("10.1.2.3", "10.1.2.3"),
        ("::ffff:10.1.2.3", "10.1.2.3"),
        ("2001:db8:1:2:3:4:5:6", "2001:db8:1:2::/64"),
        ("::1", "::/64"),
        ("/run/socket", "/run/socket"),
    ],
)
def test_ipv6_client_is_identified_by_its_network(host: str, client: str) -> None:
    assert normalize_client_address(host) == client
