"""The process around the service: its socket, its signals and its end.

SIGTERM: /readyz says 503 while questions are still answered, so that load balancers send no more; then no connection
is taken, requests under way are answered, and the process ends with 0. SIGINT is the same without the wait.
"""

import asyncio
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import uvicorn
from fastapi import FastAPI
from uvicorn.protocols.http.auto import AutoHTTPProtocol

from rag_model.errors import UsageError
from rag_model.serving.service import Service

_Base: Any = AutoHTTPProtocol  # httptools' where that is installed, else h11's


class _Corked:
    """A transport that sends what is written in one turn of the loop at once: uvicorn writes head and body apart."""

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        self._transport, self._loop = transport, loop
        self._written: list[bytes] = []

    def write(self, data: bytes) -> None:
        if not self._written:
            self._loop.call_soon(self._send)
        self._written.append(data)

    def close(self) -> None:
        self._send()
        self._transport.close()

    def _send(self) -> None:
        written, self._written = self._written, []
        if written:
            self._transport.write(b"".join(written))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)


class _HastyProtocol(_Base):  # type: ignore[misc]
    """HTTP with a time limit for a request's head; uvicorn bounds idle connections, and `_body` the bodies."""

    head_seconds = 10.0
    _due: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:
        super().connection_made(_Corked(transport, self.loop))
        self._expect()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._expect()

    def connection_lost(self, exc: Exception | None) -> None:
        self._forget()
        super().connection_lost(exc)

    def _expect(self) -> None:
        if self.cycle is not None and not self.cycle.response_complete:
            self._forget()
        elif self._due is None:
            self._due = self.loop.call_later(self.head_seconds, self._give_up)

    def _forget(self) -> None:
        if self._due is not None:
            self._due.cancel()
            self._due = None

    def _give_up(self) -> None:
        self._due = None
        if self.cycle is None or self.cycle.response_complete:
            self.transport.close()


class Server(uvicorn.Server):
    """Serves one application until a signal comes, or `should_exit` is set."""

    def __init__(self, app: FastAPI, service: Service, listening: Callable[[], None]) -> None:
        """Prepare; `listening` is called once connections are taken."""
        settings = service.settings
        config = uvicorn.Config(
            app,
            http=type("_Protocol", (_HastyProtocol,), {"head_seconds": settings.body_seconds}),
            ws="none",
            lifespan="off",
            access_log=False,
            log_config=None,
            server_header=False,
            limit_concurrency=settings.connections,
            timeout_keep_alive=round(settings.idle_seconds),
            timeout_graceful_shutdown=round(settings.drain_seconds),
        )
        super().__init__(config)
        self._service, self._listening = service, listening
        self._until = float("inf")  # by the monotonic clock

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Take connections, and say so."""
        await super().startup(sockets)
        self._listening()

    async def on_tick(self, counter: int) -> bool:
        """Look, ten times a second, whether it is time to end."""
        if time.monotonic() >= self._until:
            self.should_exit = True
        return await super().on_tick(counter)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Begin to end."""
        again = self._service.draining
        self._service.draining = True
        linger = 0.0 if again or sig == signal.SIGINT else self._service.settings.linger_seconds
        self._until = time.monotonic() + linger
        self.force_exit = again and sig == signal.SIGINT

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Handle signals while it serves; afterwards the old handlers are restored, and the process ends with 0."""
        main = threading.current_thread() is threading.main_thread()  # no other thread may listen for signals
        signals = (signal.SIGINT, signal.SIGTERM) if main else ()
        before = {number: signal.signal(number, self.handle_exit) for number in signals}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def bound(host: str, port: int) -> socket.socket:
    """Return a socket that listens; port 0 takes a free one.

    Raises:
        UsageError: the address is taken, or not this machine's.
    """
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((host, port), family=family, backlog=2048)
    except OSError as taken:
        raise UsageError(f"cannot listen at {host}:{port} ({taken.strerror or taken}): give another --port") from taken


def address(listener: socket.socket) -> str:
    """Return the URL that a socket is reached at from this machine."""
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
