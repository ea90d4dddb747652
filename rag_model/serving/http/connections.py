"""Limit connections in time, bytes and number, beyond the limits of uvicorn.

uvicorn limits only the time of idle connections. It does not limit the time and size of a request's
head, the bytes around a body, the time of a reply that the client does not read, or the number of
pipelined requests. With too many connections, it answers 503 to every client.
"""

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http import HTTPStatus
from ipaddress import IPv6Address, ip_address, ip_network
from typing import Any

from fastapi import FastAPI
from pydantic_core import to_json
from starlette.requests import ClientDisconnect
from uvicorn import Config
from uvicorn.protocols.http.auto import AutoHTTPProtocol

from rag_model.serving.settings import ServiceSettings

_BaseProtocol: Any = AutoHTTPProtocol  # the protocol of httptools if installed, or else of h11
_MIN_BYTES_PER_SECOND = 65_536  # slowest speed at which a client may read a long reply
_CHECK_SECONDS = 1.0  # time between two checks of how much a client has read
_PARSE_BYTES = 16_384  # bytes parsed between two checks of the number of pipelined requests
_MAX_OVERHEAD_BYTES = 16_384  # maximum bytes of a request's head, chunk sizes and trailers
_MAX_HEADERS = 100  # maximum headers; each takes 100 times its size in memory
_MAX_PIPELINED = 64  # maximum pipelined requests; in memory each takes 100 times its size
_IPV6_PREFIX_BITS = 64  # a provider usually assigns a /64 network to one client


class _BufferedTransport:
    """A transport that joins writes of one event loop iteration, such as a reply's head and body.

    The transport aborts the connection of a client that does not read. With TLS, only bytes that
    are not encrypted yet are counted; if encrypted bytes are not read, the time limit of idle
    connections applies.
    """

    def __init__(
        self,
        transport: asyncio.Transport,
        loop: asyncio.AbstractEventLoop,
        seconds: float,
        exceeds_limit: Callable[[], bool],
    ) -> None:
        """Abort if the client does not read within `seconds` or if `exceeds_limit` returns True."""
        self._transport, self._loop, self._seconds = transport, loop, seconds
        self._exceeds_limit = exceeds_limit
        self._pending_writes: list[bytes] = []
        self._total_written = 0  # bytes handed to the transport so far
        # bytes that the client must have read by `_deadline` (the loop's clock)
        self._required_bytes = 0
        self._deadline = 0.0
        self._timer: asyncio.TimerHandle | None = None

    @property
    def unsent_bytes(self) -> int:
        """The number of bytes in the write buffer."""
        return 0 if self._transport.is_closing() else self._transport.get_write_buffer_size()

    def write(self, data: bytes) -> None:
        if not self._pending_writes:
            self._loop.call_soon(self.flush)
        self._pending_writes.append(data)

    def close(self) -> None:
        self.flush()
        self._transport.close()

    def abort(self) -> None:
        self.cancel_timer()
        self._transport.abort()

    def cancel_timer(self) -> None:
        """Cancel the timer of a closed connection."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def flush(self) -> None:
        """Send the joined writes now."""
        pending_writes, self._pending_writes = self._pending_writes, []
        if not pending_writes or self._transport.is_closing():
            return
        reply_bytes = b"".join(pending_writes)
        self._transport.write(reply_bytes)
        self._total_written += len(reply_bytes)
        if self._timer is None and (unsent_bytes := self._transport.get_write_buffer_size()):
            self._start_deadline(unsent_bytes)

    def _start_deadline(self, unsent_bytes: int) -> None:
        self._required_bytes = self._total_written
        self._deadline = self._loop.time() + self._seconds + unsent_bytes / _MIN_BYTES_PER_SECOND
        self._timer = self._loop.call_later(min(_CHECK_SECONDS, self._seconds), self._check_deadline)

    def _check_deadline(self) -> None:
        """Abort the connection if its client is too slow; check again while bytes are unsent."""
        self._timer, unsent_bytes = None, self._transport.get_write_buffer_size()
        is_late = self._total_written - unsent_bytes < self._required_bytes and self._loop.time() >= self._deadline
        if unsent_bytes and (is_late or self._exceeds_limit()):
            self.abort()
        elif unsent_bytes and self._total_written - unsent_bytes >= self._required_bytes:
            self._start_deadline(unsent_bytes)
        elif unsent_bytes:
            self._timer = self._loop.call_later(min(_CHECK_SECONDS, self._seconds), self._check_deadline)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)


class _LimitedHttpProtocol(_BaseProtocol):  # type: ignore[misc]
    """An HTTP protocol with limits; `app._read_body` limits request bodies."""

    head_seconds = write_seconds = 10.0
    max_connections = max_connections_per_client = 1_000
    max_unsent_bytes = 1 << 27
    clients: Counter[str]  # open connections by client
    app_state: dict[str, Any]
    _timer: asyncio.TimerHandle | None = None
    _overhead_bytes = 0  # bytes of the current request without its body
    # whether the protocol reports body bytes, as httptools does; h11 has limits of its own
    _counts_body_bytes = hasattr(_BaseProtocol, "on_body")
    _last_received = 0.0  # when the client last sent data (event loop's clock)
    _client_key = ""
    _has_head = False  # whether the head is complete; later headers are trailers
    _is_refused = False  # whether a request was refused; further data of the client is ignored

    def connection_made(self, transport: asyncio.Transport) -> None:
        super().connection_made(
            _BufferedTransport(transport, self.loop, self.write_seconds, self._exceeds_unsent_limit)
        )
        self._client_key = normalize_client_address(self.client[0]) if self.client else ""
        # copied to the `state` of each request
        self.app_state = {**self.app_state, "client": self._client_key}
        self._last_received = self.loop.time()
        self.clients[self._client_key] += 1
        if self.clients[self._client_key] > self.max_connections_per_client:
            self._refuse(
                429,
                f"{self.max_connections_per_client} connections of your address are open: close some, or use them",
            )
        elif len(self.connections) > self.max_connections and not self._evict_idle_connection():
            self._refuse(503, f"all {self.max_connections} connections are in use: ask again in a moment")
        else:
            self._restart_timer()

    def data_received(self, data: bytes) -> None:
        self._last_received = self.loop.time()
        for start in range(0, len(data), _PARSE_BYTES):
            if self.transport.is_closing():
                return  # a request was refused meanwhile
            chunk = data if len(data) <= _PARSE_BYTES else data[start : start + _PARSE_BYTES]
            self._overhead_bytes += len(chunk)
            super().data_received(chunk)
            if self._counts_body_bytes and (
                self._overhead_bytes > _MAX_OVERHEAD_BYTES or len(self.headers or ()) > _MAX_HEADERS
            ):
                self._refuse_long_request()
            # Only httptools has a pipeline; h11 takes one request at a time.
            if len(getattr(self, "pipeline", ())) > _MAX_PIPELINED:
                self.transport.abort()
        self._restart_timer()

    def on_message_begin(self) -> None:
        self._has_head = False
        super().on_message_begin()

    def on_header(self, name: bytes, value: bytes) -> None:
        # Trailers are ignored. One header more than allowed is stored, to detect that there are too
        # many.
        if not self._has_head and len(self.headers) <= _MAX_HEADERS:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """Check the head of the request, and start the request if the head is accepted."""
        self._has_head = True
        encodings = [header for name, header in self.headers if name == b"transfer-encoding"]
        if self._is_refused or len(self.headers) > _MAX_HEADERS:
            self._refuse_long_request()
        elif any(encoding.strip().lower() != b"chunked" for encoding in encodings):
            self._refuse_request(501, "Transfer-Encoding may only be `chunked`: send the body without another coding")
        else:
            super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._overhead_bytes -= len(body)
        if not self._is_refused:
            super().on_body(body)

    def on_message_complete(self) -> None:
        if self._is_refused:
            return
        # The rest of the chunk, at most `_PARSE_BYTES`, is not counted as overhead of the next
        # request.
        self._overhead_bytes = 0
        self.scope["state"]["is_body_complete"] = True
        super().on_message_complete()

    def on_response_complete(self) -> None:
        self.transport.flush()  # do not wait for the next iteration of the event loop
        super().on_response_complete()

    def _refuse_long_request(self) -> None:
        limits_text = f"{_MAX_OVERHEAD_BYTES >> 10} KiB and {_MAX_HEADERS} headers"
        self._refuse_request(431, f"a request has at most {limits_text} besides its body: send fewer, or shorter ones")

    def _refuse_request(self, status: int, detail: str) -> None:
        """Refuse the request that is being read, and close the connection; during the reply to
        another request, abort the connection.
        """
        if self._is_refused:
            return  # further bytes belong to the refused request
        self._is_refused = True
        if self.transport.is_closing() or not (self.idle or self._is_only_reading()):
            self.transport.abort()
            return
        if not self.idle:
            self.cycle.disconnected = True  # the handler of this request still waits for the body
        self._refuse(status, detail)

    def connection_lost(self, exc: Exception | None) -> None:
        self._cancel_timer()
        self.transport.cancel_timer()
        self.clients[self._client_key] -= 1
        if not self.clients[self._client_key]:
            del self.clients[self._client_key]
        on_disconnect = self.scope["state"].get("on_disconnect") if self.scope else None
        super().connection_lost(exc)
        if on_disconnect is not None:  # a request is in progress; cancel it
            on_disconnect()

    def _exceeds_unsent_limit(self) -> bool:
        """Return whether all connections of this client together have too many unsent bytes."""
        siblings = (connection for connection in self.connections if connection._client_key == self._client_key)
        return bool(sum(connection.transport.unsent_bytes for connection in siblings) > self.max_unsent_bytes)

    def _refuse(self, status: int, detail: str) -> None:
        body = to_json({"detail": detail})
        response_head = (
            f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
        )
        self.transport.write(response_head.encode() + body)
        self.transport.close()

    def _evict_idle_connection(self) -> bool:
        """Abort the longest idle connection of the client with the most connections.

        Return False if all connections have a complete request in progress.
        """
        idle_connections = [
            connection
            for connection in self.connections
            if connection is not self and (connection.idle or connection.cycle.more_body)
        ]
        if not idle_connections:
            return False
        oldest_connection = min(
            idle_connections,
            key=lambda connection: (
                -self.clients[connection._client_key],
                connection._last_received,
            ),
        )
        self.connections.discard(oldest_connection)
        oldest_connection.transport.abort()
        return True

    def _is_only_reading(self) -> bool:
        """Return whether one request is in progress, is still being read, and has no reply yet."""
        return self.cycle.more_body and not (self.cycle.response_started or getattr(self, "pipeline", ()))

    @property
    def idle(self) -> bool:
        """Whether no request is in progress."""
        return self.cycle is None or bool(self.cycle.response_complete)

    def _restart_timer(self) -> None:
        if not self.idle:
            self._cancel_timer()
        elif self._timer is None:
            self._timer = self.loop.call_later(self.head_seconds, self._close_idle)

    def _cancel_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _close_idle(self) -> None:
        self._timer = None
        if self.idle:
            self.transport.close()


def create_uvicorn_config(
    app: FastAPI,
    settings: ServiceSettings,
    max_connections: int,
    max_connections_per_client: int,
    **config_options: Any,
) -> Config:
    """Create uvicorn's configuration with the connection limits of this module."""
    uvicorn_limits = {
        "head_seconds": settings.body_seconds,
        "write_seconds": settings.write_seconds,
        "max_connections": max_connections,
        "max_connections_per_client": max_connections_per_client,
        "max_unsent_bytes": settings.unsent_bytes_per_client,
        "clients": Counter[str](),
    }
    return Config(
        app,
        http=type("_Protocol", (_LimitedHttpProtocol,), uvicorn_limits),
        ws="none",
        lifespan="off",
        access_log=False,
        log_config=None,
        server_header=False,
        proxy_headers=False,  # do not trust a client's X-Forwarded-For header
        timeout_keep_alive=round(settings.idle_seconds),
        timeout_graceful_shutdown=round(settings.drain_seconds),
        **config_options,
    )


def normalize_client_address(host: str) -> str:
    """Return the identity of a client for limits: its IPv4 address or its /64 IPv6 network.

    >>> [normalize_client_address(host) for host in ("10.0.0.7", "::ffff:10.0.0.7", "2001:db8::1:2")]
    ['10.0.0.7', '10.0.0.7', '2001:db8::/64']
    """
    try:
        address = ip_address(host)
    except ValueError:
        return host
    if not isinstance(address, IPv6Address):
        return host
    return str(address.ipv4_mapped or ip_network((int(address), _IPV6_PREFIX_BITS), strict=False))


@contextmanager
def cancel_on_disconnect(state: dict[str, Any]) -> Iterator[None]:
    """Run the block, and cancel it if the client of the request with `state` disconnects.

    Raises:
        ClientDisconnect: The client disconnected.
    """
    current_task, is_disconnected = asyncio.current_task(), False

    def disconnect() -> None:
        nonlocal is_disconnected
        is_disconnected = True
        if current_task is not None:
            current_task.cancel()

    state["on_disconnect"] = disconnect  # called by `_LimitedHttpProtocol.connection_lost`
    try:
        yield
    except asyncio.CancelledError:
        if is_disconnected:
            raise ClientDisconnect from None
        raise
    finally:
        del state["on_disconnect"]
