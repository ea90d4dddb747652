"""The process around the service: its socket, its signals and its end.

SIGTERM: /readyz says 503 while questions are still answered, so that load balancers send no more; then no connection
is taken, requests under way are answered, and the process ends with 0. SIGINT is the same without the wait.
"""

import asyncio
import errno
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any

import uvicorn
from fastapi import FastAPI
from uvicorn.server import ServerState

from rag_model.errors import UsageError
from rag_model.serving.http.certificate import Certificate
from rag_model.serving.http.connections import configured
from rag_model.serving.service import Service

_HEALTH_CONNECTIONS = 64  # at once, at the port for health: probes, and a scraper


@dataclass(frozen=True, slots=True)
class HealthPort:
    """A port for health alone."""

    app: FastAPI
    socket: socket.socket


class Server(uvicorn.Server):
    """Serves one application until a signal comes, or `should_exit` is set."""

    def __init__(
        self,
        app: FastAPI,
        service: Service,
        listening: Callable[[], None],
        health: HealthPort | None = None,
        certificate: Certificate | None = None,
    ) -> None:
        """Prepare; `listening` is called once connections are taken."""
        settings = service.settings
        files = None if certificate is None else certificate.files
        tls = {} if files is None else {"ssl_certfile": files.certificate, "ssl_keyfile": files.key}
        super().__init__(
            configured(app, settings, settings.connections, settings.connections_per_client, **tls),
        )
        self._service, self._listening, self._health, self._certificate = service, listening, health, certificate
        self._health_state = ServerState()  # connections of its own: clients of the other port do not use them up
        self._until = float("inf")  # by the monotonic clock

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Take connections, and say so."""
        await super().startup(sockets)
        if self._health is not None:
            await self._listen_for_health(self._health)
        self._listening()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Take no more connections, and wait for the requests under way."""
        for connection in list(self._health_state.connections):
            connection.shutdown()
        await super().shutdown(sockets)

    async def on_tick(self, counter: int) -> bool:
        """Look, ten times a second, whether it is time to end, and each second for another certificate."""
        if time.monotonic() >= self._until:
            self.should_exit = True
        if self._certificate is not None and self.config.ssl is not None and counter % 10 == 0:
            self._certificate.renew(self.config.ssl)
        return await super().on_tick(counter)

    async def _listen_for_health(self, health: HealthPort) -> None:
        config = configured(health.app, self._service.settings, _HEALTH_CONNECTIONS, _HEALTH_CONNECTIONS)
        config.load()

        def connection(_loop: asyncio.AbstractEventLoop | None = None) -> asyncio.Protocol:
            made: Any = config.http_protocol_class
            return made(config=config, server_state=self._health_state, app_state={}, _loop=_loop)  # type: ignore[no-any-return]

        loop = asyncio.get_running_loop()
        self.servers.append(await loop.create_server(connection, sock=health.socket))

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


def bound(host: str, port: int, option: str = "--port") -> socket.socket:
    """Return a socket that listens; port 0 takes a free one, and `option` is what the error names.

    Raises:
        UsageError: the address is taken, or not this machine's.
    """
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((host, port), family=family, backlog=2048)
    except (socket.gaierror, ValueError) as unknown:
        raise UsageError(_no_address(host, getattr(unknown, "strerror", None) or unknown)) from unknown
    except OSError as taken:
        if taken.errno == errno.EADDRNOTAVAIL:
            raise UsageError(_no_address(host, taken.strerror)) from taken
        raise UsageError(
            f"cannot listen at {host}:{port} ({taken.strerror or taken}): give another {option}"
        ) from taken


def _no_address(host: str, why: object) -> str:
    return f"cannot listen at {host!r} ({why}): give another --host, an address of this machine such as 127.0.0.1"


def address(listener: socket.socket, scheme: str = "http") -> str:
    """Return the URL that a socket is reached at from this machine."""
    host, port = listener.getsockname()[:2]
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"
