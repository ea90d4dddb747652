"""One connection: time limits for what it sends and takes, and a share of the service's connections.

uvicorn bounds idle connections. It has no limit for a request's head, in time or in bytes, for what is sent around a
body, for a reply that its client does not read, or for requests that are sent ahead, and it answers 503 to everyone
when there are too many connections.
"""

import asyncio
from collections import Counter
from collections.abc import Callable
from ipaddress import IPv6Address, ip_address, ip_network
from typing import Any

from fastapi import FastAPI
from pydantic_core import to_json
from uvicorn import Config
from uvicorn.protocols.http.auto import AutoHTTPProtocol

from rag_model.serving.service_settings import ServiceSettings

_Base: Any = AutoHTTPProtocol  # httptools' where that is installed, else h11's
_SLOWEST = 65_536  # bytes a second that a client must read of a long reply
_LOOK = 1.0  # seconds between two looks at what a client has read
_AT_ONCE = 16_384  # bytes that are parsed between two looks at how many requests came
_MOST_AROUND = 16_384  # bytes of a request that are no body: its head, chunks' sizes, trailers
_MOST_HEADERS = 100  # of a request; each takes 100 times its bytes
_MOST_WAITING = 64  # requests that a client may send ahead; uvicorn keeps all, and each takes 100 times its bytes
_NETWORK = 64  # bits of an IPv6 address that a provider gives to one client


class _Outbox:
    """A transport that sends what is written in one turn of the loop at once: uvicorn writes head and body apart.

    A client that does not read what it is sent is cut off. Under TLS only what waits to be encrypted is known; the rest
    is bounded by the limit of idle connections.
    """

    def __init__(
        self,
        transport: asyncio.Transport,
        loop: asyncio.AbstractEventLoop,
        seconds: float,
        too_much: Callable[[], bool],
    ) -> None:
        """Give a client `seconds` to read, as long as not `too_much` waits for it on all its connections."""
        self._transport, self._loop, self._seconds, self._too_much = transport, loop, seconds, too_much
        self._written: list[bytes] = []
        self._total = 0  # bytes handed to the transport so far
        self._mark = 0  # of them, those that the client must have read until `_deadline`, by the loop's clock
        self._deadline = 0.0
        self._due: asyncio.TimerHandle | None = None

    @property
    def unsent(self) -> int:
        """Bytes that wait to be sent."""
        return 0 if self._transport.is_closing() else self._transport.get_write_buffer_size()

    def write(self, data: bytes) -> None:
        if not self._written:
            self._loop.call_soon(self._send)
        self._written.append(data)

    def close(self) -> None:
        self._send()
        self._transport.close()

    def abort(self) -> None:
        self.forget()
        self._transport.abort()

    def forget(self) -> None:
        """Stop the clock: the connection is gone."""
        if self._due is not None:
            self._due.cancel()
            self._due = None

    def _send(self) -> None:
        written, self._written = self._written, []
        if not written or self._transport.is_closing():
            return
        data = b"".join(written)
        self._transport.write(data)
        self._total += len(data)
        if self._due is None and (unsent := self._transport.get_write_buffer_size()):
            self._watch(unsent)

    def _watch(self, unsent: int) -> None:
        self._mark, self._deadline = self._total, self._loop.time() + self._seconds + unsent / _SLOWEST
        self._due = self._loop.call_later(min(_LOOK, self._seconds), self._check)

    def _check(self) -> None:
        """End the connection if its client is too late; look again as long as something waits."""
        self._due, unsent = None, self._transport.get_write_buffer_size()
        late = self._total - unsent < self._mark and self._loop.time() >= self._deadline
        if unsent and (late or self._too_much()):
            self.abort()
        elif unsent and self._total - unsent >= self._mark:
            self._watch(unsent)
        elif unsent:
            self._due = self._loop.call_later(min(_LOOK, self._seconds), self._check)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)


class _Connection(_Base):  # type: ignore[misc]
    """HTTP with limits; `_body` has those of a request's body."""

    head_seconds = write_seconds = 10.0
    most = most_of_client = 1_000
    most_unsent = 1 << 27
    clients: Counter[str]  # connections of each client of this server
    app_state: dict[str, Any]
    _due: asyncio.TimerHandle | None = None
    _around = 0  # bytes since the request began, without those of its body
    _counted = hasattr(_Base, "on_body")  # httptools says what is body; h11 has limits of its own
    _since = 0.0  # when it last sent something, by the loop's clock
    _of = ""

    def connection_made(self, transport: asyncio.Transport) -> None:
        super().connection_made(_Outbox(transport, self.loop, self.write_seconds, self._holds_too_much))
        self._of = client_of(self.client[0]) if self.client else ""
        self.app_state = {**self.app_state, "client": self._of}  # each request's `state`
        self._since = self.loop.time()
        self.clients[self._of] += 1
        if self.clients[self._of] > self.most_of_client:
            self._refuse(429, f"{self.most_of_client} connections of your address are open: close some, or use them")
        elif len(self.connections) > self.most and not self._made_room():
            self._refuse(503, f"all {self.most} connections are in use: ask again in a moment")
        else:
            self._expect()

    def data_received(self, data: bytes) -> None:
        self._since = self.loop.time()
        for start in range(0, len(data), _AT_ONCE):
            if self.transport.is_closing():
                return  # it was refused
            piece = data if len(data) <= _AT_ONCE else data[start : start + _AT_ONCE]
            self._around += len(piece)
            super().data_received(piece)
            if self._counted and (self._around > _MOST_AROUND or len(self.headers or ()) > _MOST_HEADERS):
                self._too_long()
            if len(getattr(self, "pipeline", ())) > _MOST_WAITING:  # h11 takes one request at a time
                self.transport.abort()
        self._expect()

    def on_body(self, body: bytes) -> None:
        self._around -= len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._around = 0  # what comes behind it in the same piece is no more than a piece
        self.scope["state"]["whole"] = True  # the body
        super().on_message_complete()

    def on_header(self, name: bytes, value: bytes) -> None:
        if len(self.headers) <= _MOST_HEADERS:  # one more, by which too many are known
            super().on_header(name, value)

    def _too_long(self) -> None:
        if self.idle and not self.transport.is_closing():
            most = f"{_MOST_AROUND >> 10} KiB and {_MOST_HEADERS} headers"
            self._refuse(431, f"a request has at most {most} beside its body: send fewer, or shorter ones")
        else:
            self.transport.abort()  # the request is worked on

    def connection_lost(self, exc: Exception | None) -> None:
        self._forget()
        self.transport.forget()
        self.clients[self._of] -= 1
        if not self.clients[self._of]:
            del self.clients[self._of]
        leave = self.scope["state"].get("leave") if self.scope else None
        super().connection_lost(exc)
        if leave is not None:  # a request is worked on, and its client has gone
            leave()

    def _holds_too_much(self) -> bool:
        """Return whether more waits for this client, on all its connections, than one may hold."""
        own = (one for one in self.connections if one._of == self._of)
        return bool(sum(one.transport.unsent for one in own) > self.most_unsent)

    def _refuse(self, status: int, sentence: str) -> None:
        body = to_json({"detail": sentence})
        head = f"HTTP/1.1 {status} \r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n"
        self.transport.write(head.encode() + b"Connection: close\r\n\r\n" + body)
        self.transport.close()

    def _made_room(self) -> bool:
        """End the longest silent connection of the client that has most; False: all have a whole request under way."""
        silent = [one for one in self.connections if one is not self and (one.idle or one.cycle.more_body)]
        if not silent:
            return False
        last = min(silent, key=lambda one: (-self.clients[one._of], one._since))
        self.connections.discard(last)
        last.transport.abort()
        return True

    @property
    def idle(self) -> bool:
        """Whether no request is under way."""
        return self.cycle is None or bool(self.cycle.response_complete)

    def _expect(self) -> None:
        if not self.idle:
            self._forget()
        elif self._due is None:
            self._due = self.loop.call_later(self.head_seconds, self._give_up)

    def _forget(self) -> None:
        if self._due is not None:
            self._due.cancel()
            self._due = None

    def _give_up(self) -> None:
        self._due = None
        if self.idle:
            self.transport.close()


def configured(app: FastAPI, settings: ServiceSettings, most: int, most_of_client: int, **more: Any) -> Config:
    """Return how uvicorn serves an application to `most` connections at once, and `most_of_client` of one address."""
    bounds = {
        "head_seconds": settings.body_seconds,
        "write_seconds": settings.write_seconds,
        "most": most,
        "most_of_client": most_of_client,
        "most_unsent": settings.unsent_bytes_per_client,
        "clients": Counter[str](),
    }
    return Config(
        app,
        http=type("_Protocol", (_Connection,), bounds),
        ws="none",
        lifespan="off",
        access_log=False,
        log_config=None,
        server_header=False,
        proxy_headers=False,  # what a client says of its address is not believed
        timeout_keep_alive=round(settings.idle_seconds),
        timeout_graceful_shutdown=round(settings.drain_seconds),
        **more,
    )


def client_of(host: str) -> str:
    """Return what a client's connections are counted by: its address, or its network where that is IPv6.

    >>> client_of("10.0.0.7"), client_of("::ffff:10.0.0.7"), client_of("2001:db8::1:2")
    ('10.0.0.7', '10.0.0.7', '2001:db8::/64')
    """
    try:
        address = ip_address(host)
    except ValueError:
        return host
    if not isinstance(address, IPv6Address):
        return host
    return str(address.ipv4_mapped or ip_network((int(address), _NETWORK), strict=False))
