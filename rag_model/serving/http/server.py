"""Serve the application with uvicorn: sockets, TLS certificates, signals and shutdown.

After SIGTERM, /readyz fails while requests are still answered, so that load balancers send no
further requests. Then no further connections are accepted, requests in progress are answered, and
the process exits with 0. SIGINT does the same without the wait.
"""

import asyncio
import logging
import signal
import socket
import ssl
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import uvicorn
from fastapi import FastAPI
from uvicorn.server import ServerState

from rag_model.errors import UsageError
from rag_model.serving.http.connections import create_uvicorn_config
from rag_model.serving.service import Service
from rag_model.serving.workers import WorkerLink

_LOG = logging.getLogger(__name__)
_YIELD_SECONDS = 0.01  # maximum seconds to wait for another worker to accept a connection
_YIELD_CHECK_SECONDS = 0.0005
_FAILED_ACCEPT_SECONDS = 1.0  # pause after an error, such as too many open files
_HEALTH_CONNECTIONS = 64  # maximum connections of the health port


@dataclass(frozen=True, slots=True)
class CertificateFiles:
    """PEM files: the certificate with its chain, and the private key without a password."""

    certificate: Path
    key: Path

    def read_stamps(self) -> tuple[tuple[int, int, int], ...]:
        """Return inode, size and modification time of both files, to detect changes.

        Raises:
            UsageError: A file is missing.
        """
        try:
            statuses = [path.stat() for path in (self.certificate, self.key)]
        except OSError as error:
            raise UsageError(f"{error.filename} cannot be read ({error.strerror}): give a PEM file") from error
        return tuple((status.st_ino, status.st_size, status.st_mtime_ns) for status in statuses)

    def load(self, context: ssl.SSLContext) -> None:
        """Load both files into `context`.

        Raises:
            UsageError: A file is missing or damaged, or the key has a password or belongs to
                another certificate.
        """
        try:
            context.load_cert_chain(self.certificate, self.key, password=lambda: b"")
        except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
            ssl_reason = getattr(error, "reason", None) or error.__class__.__name__
            raise UsageError(
                f"{self.certificate} and {self.key} are not a certificate and its key ({ssl_reason}): "
                "give two PEM files, and a key without a password"
            ) from error


class ReloadingCertificate:
    """A certificate that is reloaded when its files change, for example after a renewal."""

    def __init__(self, files: CertificateFiles) -> None:
        """Check the files.

        Raises:
            UsageError: See `CertificateFiles.load`.
        """
        self.files = files
        self._stamps = files.read_stamps()
        self._check_files()

    def reload_if_changed(self, context: ssl.SSLContext) -> None:
        """Reload changed files into `context`; unusable files are logged and ignored."""
        try:
            current_stamps = self.files.read_stamps()
            if current_stamps == self._stamps:
                return
            self._stamps = current_stamps
            self._check_files()
            self.files.load(context)
            _LOG.info("%s was read again", self.files.certificate)
        except UsageError as error:
            _LOG.error("%s; the certificate that was read before is still used", error)

    def _check_files(self) -> None:
        """Load the files into a new TLS context, because a wrong key would break the one in use."""
        self.files.load(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER))


@dataclass(frozen=True, slots=True)
class HealthPort:
    """A separate port for health checks and metrics."""

    app: FastAPI
    socket: socket.socket


class _SharedSocketAcceptor:
    """Accepts connections from a socket that several workers share.

    A worker that has more connections than another worker waits briefly until the other worker has
    accepted as many. Otherwise the worker that is woken first would accept all connections.
    """

    def __init__(
        self,
        listener: socket.socket,
        connect: Callable[[socket.socket], Coroutine[Any, Any, Any]],
        has_more_connections: Callable[[int], bool],
    ) -> None:
        """Begin to accept.

        Args:
            listener: The shared listening socket.
            connect: Coroutine that takes over an accepted connection.
            has_more_connections: Receives the number of connections that are being set up, and
                returns whether another worker has fewer connections.
        """
        self._listener, self._connect, self._has_more_connections = listener, connect, has_more_connections
        self._loop = asyncio.get_running_loop()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._timer: asyncio.TimerHandle | None = None
        listener.setblocking(False)
        self._loop.add_reader(listener.fileno(), self._handle_readable)

    def close(self) -> None:
        """Stop accepting connections."""
        if self._timer is not None:
            self._timer.cancel()
        self._loop.remove_reader(self._listener.fileno())

    async def wait_closed(self) -> None:
        """Wait until the connections that are being set up are ready."""
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _handle_readable(self) -> None:
        if self._has_more_connections(len(self._tasks)):
            self._pause(_YIELD_SECONDS)
        else:
            self._accept()

    def _pause(self, seconds: float) -> None:
        """Accept nothing until other workers have as many connections, for at most `seconds`."""
        self._loop.remove_reader(self._listener.fileno())
        self._wait_for_others(self._loop.time() + seconds)

    def _wait_for_others(self, deadline: float) -> None:
        if self._loop.time() < deadline and self._has_more_connections(len(self._tasks)):
            self._timer = self._loop.call_later(_YIELD_CHECK_SECONDS, self._wait_for_others, deadline)
        else:
            self._resume()

    def _resume(self) -> None:
        self._timer = None
        self._loop.add_reader(self._listener.fileno(), self._handle_readable)
        self._accept()

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except (BlockingIOError, InterruptedError, ConnectionAbortedError):
            return  # another worker accepted the connection, or the client left
        except OSError as error:  # for example, too many open files
            _LOG.error("cannot accept a connection: %s", error)
            self._loop.remove_reader(self._listener.fileno())
            self._timer = self._loop.call_later(_FAILED_ACCEPT_SECONDS, self._resume)
            return
        connection.setblocking(False)
        task = self._loop.create_task(self._set_up(connection))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _set_up(self, connection: socket.socket) -> None:
        try:
            await self._connect(connection)
        except (OSError, asyncio.CancelledError):  # for example, a failed TLS handshake
            connection.close()


class ServiceServer(uvicorn.Server):
    """A uvicorn server that runs until the process gets a signal or `should_exit` is set."""

    def __init__(
        self,
        app: FastAPI,
        service: Service,
        on_listening: Callable[[], None],
        health: HealthPort | None = None,
        certificate: ReloadingCertificate | None = None,
        on_ready: Callable[[], None] = lambda: None,
        link: WorkerLink | None = None,
    ) -> None:
        """Prepare the server.

        `on_listening` is called once connections are accepted, and `on_ready` once the first
        snapshot is served. With `link`, other processes accept connections from the same socket.
        """
        settings = service.settings
        files = None if certificate is None else certificate.files
        tls_options = {} if files is None else {"ssl_certfile": files.certificate, "ssl_keyfile": files.key}
        super().__init__(
            create_uvicorn_config(app, settings, settings.connections, settings.connections_per_client, **tls_options),
        )
        self._service, self._on_listening, self._health = service, on_listening, health
        self._certificate = certificate
        # separate, so that clients of the main port do not use up the connections of the health
        # port
        self._health_state = ServerState()
        self._exit_time = float("inf")  # when to stop accepting connections; monotonic clock
        self._should_stop: Callable[[], bool] = lambda: False
        self._on_ready, self._was_ready = on_ready, False
        # number of stop signals from the supervisor that have been handled
        self._link, self._n_handled_signals = link, 0

    def stop_if(self, should_stop: Callable[[], bool]) -> None:
        """Let the server stop once `should_stop` returns True; it is called ten times a second."""
        self._should_stop = should_stop

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Accept connections, then call `on_listening`."""
        worker_link = self._link
        await super().startup(sockets if worker_link is None else [])
        if worker_link is not None:
            protocol_factory = _create_protocol_factory(self.config, self.server_state, self.lifespan.state)
            connect = partial(asyncio.get_running_loop().connect_accepted_socket, protocol_factory, ssl=self.config.ssl)
            # The acceptors are in `servers`, which uvicorn closes at the end.
            acceptors: list[Any] = [
                _SharedSocketAcceptor(sock, connect, self._has_more_connections) for sock in sockets or ()
            ]
            self.servers.extend(acceptors)
        if self._health is not None:
            await self._listen_for_health(self._health)
        self._on_listening()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Stop accepting connections, and wait for the requests in progress."""
        for connection in list(self._health_state.connections):
            connection.shutdown()
        await super().shutdown(sockets)

    async def on_tick(self, counter: int) -> bool:
        """Check whether the service has to end, has a first snapshot, or has a new certificate.

        uvicorn calls it ten times a second; the certificate is checked once a second.
        """
        if not self._was_ready and self._service.slot.served_ref is not None:
            self._was_ready = True
            self._on_ready()
        if self._link is not None:
            self._has_more_connections()
            for signal_number in self._link.stop_signals[self._n_handled_signals :]:
                self._n_handled_signals += 1
                self.handle_exit(signal_number, None)
        if time.monotonic() >= self._exit_time or self._should_stop():
            self.should_exit = True
        if self._certificate is not None and self.config.ssl is not None and counter % 10 == 0:
            self._certificate.reload_if_changed(self.config.ssl)
        return await super().on_tick(counter)

    async def _listen_for_health(self, health: HealthPort) -> None:
        config = create_uvicorn_config(health.app, self._service.settings, _HEALTH_CONNECTIONS, _HEALTH_CONNECTIONS)
        config.load()
        protocol_factory = _create_protocol_factory(config, self._health_state, {})
        self.servers.append(await asyncio.get_running_loop().create_server(protocol_factory, sock=health.socket))

    def _has_more_connections(self, n_pending: int = 0) -> bool:
        """Publish this worker's number of connections; return whether another worker has fewer."""
        n_connections = len(self.server_state.connections) + n_pending
        return self._link is not None and self._link.record_connections(n_connections)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Start the shutdown."""
        is_repeated = self._service.is_draining
        self._service.is_draining = True
        linger_seconds = 0.0 if is_repeated or sig == signal.SIGINT else self._service.settings.linger_seconds
        self._exit_time = time.monotonic() + linger_seconds
        self.force_exit = is_repeated and sig == signal.SIGINT

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Handle signals while serving, and restore the previous handlers afterwards.

        Unlike uvicorn, do not raise the signal again: the process exits with 0.
        """
        # Only the main thread may set signal handlers.
        is_main_thread = threading.current_thread() is threading.main_thread()
        signals = (signal.SIGINT, signal.SIGTERM) if is_main_thread else ()
        handler_by_signal = {signal_number: signal.signal(signal_number, self.handle_exit) for signal_number in signals}
        try:
            yield
        finally:
            for signal_number, previous_handler in handler_by_signal.items():
                signal.signal(signal_number, previous_handler)


def _create_protocol_factory(
    config: uvicorn.Config, server_state: ServerState, app_state: dict[str, Any]
) -> Callable[[], asyncio.Protocol]:
    protocol_class: Any = config.http_protocol_class
    return partial(protocol_class, config=config, server_state=server_state, app_state=app_state)
