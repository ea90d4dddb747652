"""Clients that mean harm or do nothing: others are answered, and what they hold is given back."""

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
from tests.fixtures.serving import PATIENCE, Gate, Library, serving, until, with_limits

ASK = b"POST /search HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 24\r\n\r\n"
OTHER = "127.0.0.2"  # an address of this machine too, as of another client


def connected(url: str, source: str = OTHER) -> socket.socket:
    host, port = url.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), timeout=PATIENCE, source_address=(source, 0))


@contextmanager
def held(url: str, count: int, sent: bytes = b"") -> Iterator[list[socket.socket]]:
    """Hold connections of another client that send this, and no more."""
    with ExitStack() as stack:
        connections = [stack.enter_context(connected(url)) for _ in range(count)]
        for connection in connections:
            connection.sendall(sent)
        yield connections


@pytest.mark.parametrize("sent", [b"", ASK[:30], ASK + b'{"questions"'], ids=["idle", "slow head", "slow body"])
def test_what_one_client_holds_keeps_nobody_else_out(sent: bytes, shared_library: Library, dest: Path) -> None:
    bounds = with_limits(connections=8, connections_per_client=6, body_seconds=PATIENCE, idle_seconds=PATIENCE)
    with serving(shared_library.url, dest, bounds) as found, held(found.url, 12, sent):
        until(lambda: len(found.server.server_state.connections) >= 6)
        found.search("who?")
        assert httpx.get(f"{found.url}/healthz").status_code == 200


def test_more_connections_than_a_client_may_have_are_told_so(shared_library: Library, dest: Path) -> None:
    bounds = with_limits(connections_per_client=2, body_seconds=PATIENCE)
    with serving(shared_library.url, dest, bounds) as found, held(found.url, 2):
        until(lambda: len(found.server.server_state.connections) >= 2)
        with connected(found.url) as third:
            reply = b"".join(iter(lambda: third.recv(65536), b""))
        assert reply.startswith(b"HTTP/1.1 429 ")
        assert b"2 connections of your address are open" in reply


GET = b"GET /snapshot HTTP/1.1\r\nHost: localhost\r\n"
CHUNKED = ASK.replace(b"Content-Length: 24", b"Transfer-Encoding: chunked")


@pytest.mark.parametrize(
    ("head", "unit", "reply"),
    [
        (GET, b"a: b\r\n" * 500, b"HTTP/1.1 431 "),
        (GET + b"x: ", b"a" * 4096, b"HTTP/1.1 431 "),
        (b"GET /", b"a" * 4096, b"HTTP/1.1 431 "),
        (CHUNKED, b"1\r\n{\r\n" * 500, b"HTTP/1.1 431 "),
        (CHUNKED + b"2;", b"a" * 4096, b"HTTP/1.1 431 "),
        (CHUNKED + b"2\r\n{}\r\n0\r\n", b"a: b\r\n" * 500, b"HTTP/1.1 431 "),
    ],
    ids=["headers", "a header", "a path", "chunks of one byte", "a chunk's extension", "trailers"],
)
def test_what_is_sent_around_a_body_has_an_end(
    head: bytes, unit: bytes, reply: bytes, shared_library: Library, dest: Path
) -> None:
    bounds = with_limits(body_seconds=PATIENCE, idle_seconds=PATIENCE)
    with serving(shared_library.url, dest, bounds) as found, connected(found.url) as endless:
        endless.settimeout(10)
        got = b""
        with suppress(ConnectionError):
            endless.sendall(head + unit * 16)
            got = endless.recv(65536)
        assert got.startswith(reply)
        until(lambda: len(found.server.server_state.connections) <= 1)  # the other is the client's own
        found.search("who?")


@pytest.mark.parametrize(
    ("request_bytes", "status", "words"),
    [
        (GET + b"a: b\r\n" * 101 + b"\r\n", b"431 Request Header Fields Too Large", b"100 headers"),
        (GET + b"a: b\r\n" * 99 + b"\r\n", b"200 OK", b"snapshot"),
        (
            CHUNKED.replace(b"chunked", b"gzip, chunked") + b"2\r\n{}\r\n0\r\n\r\n",
            b"501 Not Implemented",
            b"Transfer-Encoding",
        ),
        (CHUNKED + b"2\r\n{}\r\n0\r\n" + b"a: b\r\n" * 5_000, b"431 Request Header Fields Too Large", b"16 KiB"),
    ],
    ids=["101 headers", "100 headers", "two codings", "5,000 trailers"],
)
def test_a_request_that_arrives_in_one_piece_is_refused_with_a_reason(
    request_bytes: bytes, status: bytes, words: bytes, shared_library: Library, dest: Path
) -> None:
    with serving(shared_library.url, dest) as found, connected(found.url) as client:
        client.sendall(request_bytes)
        reply = client.recv(65536)
        assert (reply.partition(b"\r\n")[0], words in reply) == (b"HTTP/1.1 " + status, True)


def test_a_trailer_is_not_a_header(shared_library: Library, dest: Path, tmp_path: Path) -> None:
    (tmp_path / "tokens").write_text("a-token-of-sixteen-characters\n")
    trailer = b"Authorization: Bearer a-token-of-sixteen-characters\r\n"
    with (
        serving(shared_library.url, dest, tokens=BearerTokens(tmp_path / "tokens")) as found,
        connected(found.url) as client,
    ):
        client.sendall(CHUNKED + b"18\r\n" + b'{"questions": ["who?"]  }'[:24] + b"\r\n0\r\n" + trailer + b"\r\n")
        assert client.recv(65536).startswith(b"HTTP/1.1 401 ")


@pytest.mark.parametrize("sent", [b"", ASK + b'{"questions"'], ids=["idle", "slow body"])
def test_where_all_connections_are_taken_one_that_sends_nothing_makes_room(
    sent: bytes, shared_library: Library, dest: Path
) -> None:
    bounds = with_limits(connections=4, body_seconds=PATIENCE, idle_seconds=PATIENCE)
    with serving(shared_library.url, dest, bounds) as found, held(found.url, 4, sent) as silent:
        state = found.server.server_state
        until(lambda: len(state.connections) == 4 and len(state.tasks) == 4 * bool(sent))
        found.search("who?")
        (ended,) = select.select(silent, [], [], PATIENCE)[0]
        with suppress(ConnectionResetError):
            assert ended.recv(1) == b""


def test_where_all_connections_are_at_work_a_new_one_is_told_so(shared_library: Library, dest: Path) -> None:
    gate, bounds = Gate(), with_limits(connections=1, body_seconds=PATIENCE)
    with serving(shared_library.url, dest, bounds, gate) as found:
        gate.open.clear()
        asking = threading.Thread(target=found.search, args=("held",))
        asking.start()
        try:
            assert gate.held.wait(PATIENCE)
            with connected(found.url) as second:
                reply = b"".join(iter(lambda: second.recv(65536), b""))
            assert reply.startswith(b"HTTP/1.1 503 ")
            assert httpx.get(f"{found.health}/readyz").status_code == 200  # at a port of its own
        finally:
            gate.open.set()
            asking.join()


def test_health_has_connections_of_its_own(shared_library: Library, dest: Path) -> None:
    bounds = with_limits(body_seconds=PATIENCE, idle_seconds=PATIENCE)
    with serving(shared_library.url, dest, bounds) as found, held(found.health, 80):
        assert httpx.get(f"{found.health}/healthz").status_code == 200
        assert httpx.get(f"{found.health}/readyz").json() == {"status": "ready"}
        assert httpx.post(f"{found.health}/search", json={"questions": ["who?"]}).status_code == 404


@pytest.mark.parametrize("bound", [{"write_seconds": 0.2}, {"unsent_bytes_per_client": 1}], ids=["late", "much"])
def test_a_client_that_does_not_read_is_cut_off(bound: dict[str, Any], shared_library: Library, dest: Path) -> None:
    """It asks until its replies fill what the system keeps of them, and the rest waits in the service."""
    bounds = with_limits(**{"write_seconds": PATIENCE, **bound})
    with serving(shared_library.url, dest, bounds) as found, connected(found.url) as greedy:
        state = found.server.server_state

        def gone() -> bool:
            return not any(connection.client[0] == OTHER for connection in state.connections)

        until(lambda: not gone())
        with suppress(ConnectionResetError, BrokenPipeError):
            while not gone():
                done = state.total_requests
                greedy.sendall(b"GET /openapi.json HTTP/1.1\r\nHost: localhost\r\n\r\n" * 50)
                until(lambda before=done: state.total_requests >= before + 50 or gone())  # type: ignore[misc]
        until(gone)
        found.search("who?")


def test_a_client_that_asks_far_ahead_is_cut_off(shared_library: Library, dest: Path) -> None:
    gate = Gate()
    with serving(shared_library.url, dest, with_limits(), gate) as found, connected(found.url) as greedy:
        gate.open.clear()
        greedy.sendall(ASK + b'{"questions": ["first"]}' + b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n" * 2_000)
        until(lambda: not found.server.server_state.connections)
        gate.open.set()
        found.search("who?")


def test_a_client_that_leaves_is_not_worked_for(shared_library: Library, dest: Path) -> None:
    gate = Gate()
    with serving(shared_library.url, dest, with_limits(), gate) as found:
        gate.open.clear()
        with connected(found.url) as first:
            first.sendall(ASK + b'{"questions": ["first"]}')
            assert gate.held.wait(PATIENCE)
            with connected(found.url) as second:
                second.sendall(ASK + b'{"questions": ["leave"]}')
                until(lambda: found.service._search_batcher.queued_questions == 1)
            until(lambda: found.service._search_batcher.queued_questions == 0)
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
def test_an_ipv6_client_is_its_network(host: str, client: str) -> None:
    assert normalize_client_address(host) == client
