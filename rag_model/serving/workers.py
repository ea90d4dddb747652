"""Serve from several processes: a supervisor starts them, and restarts a process that dies.

All workers accept connections from one listening socket. They map the same index files, which are
therefore in memory only once. Worker 0, the leader, follows the ref and pulls new snapshots. When
all workers have opened a snapshot, a number in shared memory is increased, which switches all of
them to the snapshot at the same moment. The supervisor forwards messages between the leader and the
other workers. The supervisor itself loads no models or indexes, so a crash that ends a worker does
not end the service.

This module imports no libraries for models, indexes or HTTP, so that the supervisor takes little
memory.
"""

import errno
import json
import logging
import multiprocessing
import os
import queue
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import FrameType
from typing import Any

from rag_model.errors import BookwheelError, ResourceError, UsageError, error_from_dict, error_to_dict
from rag_model.process import CORES_VARIABLE, count_cores, temporary_folder
from rag_model.secrets import mask_secrets

_LOG = logging.getLogger(__name__)
_LAST_PORT = 65_535
EXCHANGE_SECONDS = 0.2  # maximum time until a process handles a message of another process
_STOP_SECONDS = 60.0  # time to shut down before a worker is killed
_FIRST_PAUSE, _MAX_PAUSE = 0.1, 30.0  # seconds before a restart; doubled each time
_HEALTHY_SECONDS = 60.0  # run time after which the restart pause is reset
_MAX_FAILED_STARTS = 3
_TOLERANCE_DIVISOR = 8  # a worker may have an eighth more connections than another worker
# Names the folder in which prometheus_client stores the metrics of each process, to sum them.
_METRICS_VARIABLE = "PROMETHEUS_MULTIPROC_DIR"
_SPAWN_CONTEXT = multiprocessing.get_context("spawn")  # a fork would copy locks of other threads

Message = dict[str, Any]


def open_listener(host: str, port: int, option: str = "--port") -> socket.socket:
    """Open a listening socket; port 0 takes a free port, and error messages name `option`.

    Raises:
        UsageError: The address is in use, or is not an address of this machine.
    """
    if not 0 <= port <= _LAST_PORT:
        raise UsageError(f"{option} is {port}: give 1 to {_LAST_PORT}, or 0 for a free one")
    try:
        address_family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((host, port), family=address_family, backlog=2048)
    except (socket.gaierror, ValueError) as error:
        raise UsageError(_format_address_error(host, getattr(error, "strerror", None) or error)) from error
    except OSError as error:
        if error.errno == errno.EADDRNOTAVAIL:
            raise UsageError(_format_address_error(host, error.strerror)) from error
        raise UsageError(
            f"cannot listen at {host}:{port} ({error.strerror or error}): give another {option}"
        ) from error


def _format_address_error(host: str, reason: object) -> str:
    return f"cannot listen at {host!r} ({reason}): give another --host, an address of this machine such as 127.0.0.1"


def format_url(listener: socket.socket, scheme: str = "http") -> str:
    """Return the URL of a listening socket on this machine."""
    host, port = listener.getsockname()[:2]
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


class WorkerLink:
    """A worker's connection to the supervisor, and the state that all workers share."""

    def __init__(
        self,
        worker_id: int,
        connection: Connection,
        listeners: tuple[socket.socket, socket.socket | None],
        shared_numbers: Any,
        metrics_folder: Path,
        *,
        is_restarted: bool,
    ) -> None:
        """Store the arguments, which the supervisor passes to a new worker.

        Args:
            worker_id: The worker's number; worker 0 is the leader.
            connection: Connection to the supervisor.
            listeners: The listening sockets of the service and of its health port.
            shared_numbers: Array in shared memory: the switch number of the current snapshot, then
                the number of open connections of each worker.
            metrics_folder: Folder of the metrics of all workers.
            is_restarted: Whether the worker replaces one that died.
        """
        self.worker_id, self._connection, self._shared_numbers = worker_id, connection, shared_numbers
        self.listener, self.health_listener = listeners
        self.metrics_folder, self.is_restarted = metrics_folder, is_restarted

    def start(self) -> None:
        """Begin to receive messages; the worker calls this once."""
        self._send_lock = threading.Lock()
        self.inbox: queue.SimpleQueue[Message] = queue.SimpleQueue()  # for the follower's thread
        self.replies: queue.SimpleQueue[Message] = queue.SimpleQueue()  # to the leader's `open`
        self.stop_signals: list[int] = []  # in the order in which they arrived
        self.process_ids: list[int] = [os.getpid()]  # of the supervisor and all workers
        self.on_tick: Callable[[], None] = lambda: None  # called at intervals of `EXCHANGE_SECONDS`
        threading.Thread(target=self._receive, name="link", daemon=True).start()

    @property
    def is_leader(self) -> bool:
        """Whether this worker is the leader, which follows the ref for all workers."""
        return self.worker_id == 0

    @property
    def switch_number(self) -> int:
        """The number of the last switch to a snapshot, which all workers share."""
        return int(self._shared_numbers[0])

    @switch_number.setter
    def switch_number(self, number: int) -> None:
        self._shared_numbers[0] = number

    def record_connections(self, n_connections: int) -> bool:
        """Record this worker's number of connections; return whether another has clearly fewer.

        Differences of up to an eighth are ignored, so that a busy worker need not wait for others.
        """
        self._shared_numbers[1 + self.worker_id] = n_connections
        return any(n_others + n_others // _TOLERANCE_DIVISOR < n_connections for n_others in self._shared_numbers[1:])

    def send(self, kind: str, **values: Any) -> None:
        """Send a message; it is lost if the supervisor has ended."""
        with self._send_lock, suppress(OSError):
            self._connection.send_bytes(json.dumps({"kind": kind, **values}).encode())

    def _receive(self) -> None:
        tick_time = 0.0  # when the next tick is due; monotonic clock
        while True:
            if time.monotonic() >= tick_time:
                self._tick()
                tick_time = time.monotonic() + EXCHANGE_SECONDS
            try:
                if not self._connection.poll(tick_time - time.monotonic()):
                    continue
                received_message = json.loads(self._connection.recv_bytes())
            except (EOFError, OSError):  # the supervisor was killed
                self.stop_signals.append(signal.SIGTERM)
                return
            if received_message["kind"] == "stop":
                self.stop_signals.append(received_message["signal"])
            elif received_message["kind"] == "processes":
                self.process_ids = received_message["ids"]
            else:
                (self.replies if received_message["kind"] == "all_opened" else self.inbox).put(received_message)

    def _tick(self) -> None:
        try:
            self.on_tick()
        except Exception:
            _LOG.exception("cannot publish the state of this worker")


def _run_worker(serve: Callable[[WorkerLink], None], link: WorkerLink, cores: int) -> None:
    """Serve in this process until a signal arrives; the first error is sent to the supervisor."""
    os.setpgid(0, 0)  # Ctrl-C in a terminal reaches the supervisor only, which tells the workers
    os.environ[_METRICS_VARIABLE] = str(link.metrics_folder)
    os.environ[CORES_VARIABLE] = str(cores)
    link.start()
    try:
        serve(link)
    except BookwheelError as error:
        link.send("failed", **error_to_dict(error))
        raise SystemExit(error.exit_code) from None


@dataclass(slots=True)
class _Worker:
    """A worker as the supervisor sees it: process, connection, and monotonic start time."""

    worker_id: int
    process: BaseProcess
    connection: Connection
    start_time: float = field(default_factory=time.monotonic)

    def send(self, message: Message) -> None:
        with suppress(OSError):  # the worker has died; `_step` handles it
            self.connection.send_bytes(json.dumps(message).encode())


class Supervisor:
    """Starts workers, forwards their messages, and restarts workers that die."""

    def __init__(
        self,
        n_workers: int,
        serve: Callable[[WorkerLink], None],
        listeners: tuple[socket.socket, socket.socket | None],
        on_listening: Callable[[], None],
        on_ready: Callable[[], None],
    ) -> None:
        """Prepare `n_workers` workers.

        Args:
            n_workers: Number of workers.
            serve: Function that serves in a worker until a signal arrives. `serve` must be a
                function of a module, because the worker imports it.
            listeners: The listening sockets of the service and of its health port.
            on_listening: Called once the first worker accepts connections.
            on_ready: Called once all workers serve the first snapshot.
        """
        self._n_workers, self._serve, self._listeners = n_workers, serve, listeners
        self._on_listening, self._on_ready = on_listening, on_ready
        self._shared_numbers = _SPAWN_CONTEXT.RawArray("Q", 1 + n_workers)
        self._workers: dict[int, _Worker] = {}
        self._restart_times: dict[int, float] = {}
        self._restart_pauses = dict.fromkeys(range(n_workers), _FIRST_PAUSE)
        self._failed_starts = 0
        self._has_listened = self._was_ready = False
        self._stop_time: float | None = None
        self._first_error: BookwheelError | None = None
        self._open_number = 0  # switch number of the last `open` message
        # an `open` message, and the ids of the workers that have not opened its snapshot yet
        self._opening: tuple[Message, set[int]] | None = None
        self._current: Message | None = None  # `open` message of the current snapshot
        self._state: Message | None = None  # the last `state` message of the leader

    def run(self) -> None:
        """Serve until a signal arrives and all workers have ended.

        Raises:
            BookwheelError: The first snapshot cannot be served.
        """
        handler_by_signal = {
            signal_number: signal.signal(signal_number, self._handle_signal)
            for signal_number in (signal.SIGINT, signal.SIGTERM)
        }
        try:
            with temporary_folder("metrics") as folder:
                self._metrics_folder = folder
                for worker_id in range(self._n_workers):
                    self._start(worker_id, is_restarted=False)
                while self._workers or (self._stop_time is None and self._restart_times):
                    self._step()
        finally:
            for worker in self._workers.values():
                worker.process.kill()
            for signal_number, handler in handler_by_signal.items():
                signal.signal(signal_number, handler)
        if self._first_error is not None:
            raise self._first_error

    def _start(self, worker_id: int, *, is_restarted: bool) -> None:
        supervisor_end, worker_end = _SPAWN_CONTEXT.Pipe()
        self._shared_numbers[1 + worker_id] = 0
        link = WorkerLink(
            worker_id,
            worker_end,
            self._listeners,
            self._shared_numbers,
            self._metrics_folder,
            is_restarted=is_restarted,
        )
        cores = max(1, count_cores() // self._n_workers)
        process = _SPAWN_CONTEXT.Process(
            target=_run_worker, args=(self._serve, link, cores), name=f"worker {worker_id}"
        )
        process.start()
        worker_end.close()
        worker = self._workers[worker_id] = _Worker(worker_id, process, supervisor_end)
        if worker_id and self._current is not None:
            worker.send(self._current)
        if worker_id and self._state is not None:
            worker.send(self._state)
        process_ids = [os.getpid(), *(worker.process.pid for worker in self._workers.values())]
        self._send_to(self._workers, {"kind": "processes", "ids": process_ids})

    def _step(self) -> None:
        """Wait briefly, then handle the messages and deaths of workers."""
        workers = list(self._workers.values())
        wait([*(w.connection for w in workers), *(w.process.sentinel for w in workers)], EXCHANGE_SECONDS)
        for worker in workers:
            with suppress(EOFError, OSError):
                while worker.connection.poll():
                    self._handle_message(worker, json.loads(worker.connection.recv_bytes()))
            if worker.process.exitcode is not None:
                self._handle_death(worker)
        if not self._was_ready and self._shared_numbers[0]:
            self._was_ready = True
            self._on_ready()
        current_time = time.monotonic()
        if self._stop_time is not None:
            if current_time > self._stop_time + _STOP_SECONDS:
                for worker in self._workers.values():
                    worker.process.kill()
            return
        due_restarts = [
            worker_id for worker_id, restart_time in self._restart_times.items() if current_time >= restart_time
        ]
        for worker_id in due_restarts:
            del self._restart_times[worker_id]
            self._start(worker_id, is_restarted=self._was_ready)

    def _handle_signal(self, signal_number: int, frame: FrameType | None) -> None:
        self._stop(signal_number)

    def _stop(self, signal_number: int) -> None:
        self._stop_time = self._stop_time or time.monotonic()
        self._send_to(self._workers, {"kind": "stop", "signal": signal_number})

    def _send_to(self, worker_ids: Iterable[int], message: Message) -> None:
        for worker_id in list(worker_ids):
            if worker := self._workers.get(worker_id):
                worker.send(message)

    def _list_nonleaders(self) -> list[int]:
        return [worker_id for worker_id in self._workers if worker_id]

    def _handle_message(self, sender: _Worker, message: Message) -> None:
        match message["kind"]:
            case "listening":
                if not self._has_listened:
                    self._has_listened = True
                    self._on_listening()
            case "failed":
                self._handle_failure(sender, error_from_dict(message["error"], message["message"]))
            case "open":
                self._open_number += 1
                opening = {**message, "number": max(self._open_number, self._shared_numbers[0] + 1)}
                self._open_number = opening["number"]
                self._opening = opening, set(self._list_nonleaders())
                self._send_to(self._list_nonleaders(), opening)
                self._finish_opening()
            case "opened":
                self._handle_opened(sender, message)
            case "pin":
                self._send_to([message.pop("to", 0)], {**message, "sender": sender.worker_id})
            case kind:
                if kind == "switch":
                    self._current = message["opening"]
                elif kind == "withdraw" and self._current and self._current["ref"]["snapshot"] in message["snapshots"]:
                    self._current = None
                elif kind == "ref" and self._current is not None:
                    self._current = {**self._current, "ref": message["ref"]}
                elif kind == "state":
                    self._state = message
                self._send_to(self._list_nonleaders(), message)

    def _handle_opened(self, sender: _Worker, message: Message) -> None:
        if self._opening is None or self._opening[0]["number"] != message["number"]:
            return
        self._opening[1].discard(sender.worker_id)
        self._finish_opening(message.get("error"))

    def _finish_opening(self, error: dict[str, str] | None = None) -> None:
        """Tell the leader that all workers have opened the snapshot, or why one cannot open it."""
        if self._opening is None or (self._opening[1] and error is None):
            return
        opening, self._opening = self._opening[0], None
        if error is not None:
            self._send_to(self._list_nonleaders(), {"kind": "drop", "number": opening["number"]})
        self._send_to([0], {"kind": "all_opened", "opening": opening, "error": error})

    def _handle_failure(self, worker: _Worker, error: BookwheelError) -> None:
        """Stop the service if it was never ready; otherwise only log why a worker ends."""
        if self._was_ready:
            _LOG.error("worker %d ends: %s", worker.worker_id, mask_secrets(str(error)))
        elif self._first_error is None:
            self._first_error = error
            self._stop(signal.SIGINT)

    def _handle_death(self, worker: _Worker) -> None:
        worker_id, exit_code = worker.worker_id, worker.process.exitcode or 0
        del self._workers[worker_id]
        self._shared_numbers[1 + worker_id] = 2**63  # so that no worker waits for this one
        for file in self._metrics_folder.glob(f"gauge_live*_{worker.process.pid}.db"):
            file.unlink()
        worker.connection.close()
        worker.process.join()
        if self._opening is not None and not worker_id:
            opening, self._opening = self._opening[0], None
            self._send_to(self._list_nonleaders(), {"kind": "drop", "number": opening["number"]})
        if self._opening is not None and worker_id in self._opening[1]:
            reason = f"worker {worker_id} {_describe_exit(exit_code)} while it opened the snapshot"
            self._finish_opening(error_to_dict(ResourceError(reason)))
        if self._stop_time is not None:
            return
        pause = self._restart_pauses[worker_id]
        if time.monotonic() - worker.start_time > _HEALTHY_SECONDS:
            pause = _FIRST_PAUSE
        self._restart_pauses[worker_id] = min(2 * pause, _MAX_PAUSE)
        self._restart_times[worker_id] = time.monotonic() + pause
        _LOG.error("worker %d %s and is restarted", worker_id, _describe_exit(exit_code))
        self._failed_starts += not self._was_ready
        if self._failed_starts >= _MAX_FAILED_STARTS:
            self._first_error = ResourceError(
                f"worker {worker_id} {_describe_exit(exit_code)} before the service could answer, as "
                f"workers did {self._failed_starts} times: give the service more memory, or fewer "
                "--workers"
            )
            self._stop(signal.SIGINT)


def _describe_exit(exit_code: int) -> str:
    if exit_code < 0:
        with suppress(ValueError):
            return f"was ended by {signal.Signals(-exit_code).name}"
    return f"ended with exit code {exit_code}"


def supervise(
    n_workers: int,
    serve: Callable[[WorkerLink], None],
    address: tuple[str, int, int | None],
    on_listening: Callable[[str, str | None], None],
    on_ready: Callable[[str, str | None], None],
    scheme: str = "http",
) -> None:
    """Serve from `n_workers` processes until a signal arrives.

    Args:
        n_workers: Number of processes that answer.
        serve: Function that serves in a worker; see `Supervisor`.
        address: Host, port, and the port for health checks (None: no such port).
        on_listening: Called with the URLs of both ports once connections are accepted.
        on_ready: Called with the same URLs once the first snapshot is served.
        scheme: `http` or `https`.

    Raises:
        UsageError: An address is in use, or the settings of the workers are wrong.
        BookwheelError: The first snapshot cannot be served.
    """
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(levelname)s %(message)s")
    host, port, health_port = address
    with ExitStack() as stack:
        listener = stack.enter_context(open_listener(host, port))
        health_listener = None
        if health_port is not None:
            health_listener = stack.enter_context(open_listener(host, health_port, "--health-port"))
        urls = format_url(listener, scheme), None if health_listener is None else format_url(health_listener)
        Supervisor(
            n_workers, serve, (listener, health_listener), partial(on_listening, *urls), partial(on_ready, *urls)
        ).run()
