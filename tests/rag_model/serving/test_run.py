"""The addresses where a service can listen, workers that cannot start, and garbage collection."""

import asyncio
import gc
import socket
import sys
import weakref
from collections.abc import Callable

import pytest

from rag_model.errors import ResourceError, UsageError
from rag_model.serving.http import server
from rag_model.serving.runtime import freeze_loaded_objects
from rag_model.serving.workers import WorkerLink, open_listener, supervise
from tests.fixtures.crashing_child import die_in_service, refuse_to_serve  # a module that a worker imports quickly
from tests.fixtures.serving import TIMEOUT


@pytest.mark.parametrize(("port", "option"), [(65_536, "--port"), (-5, "--health-port")])
def test_invalid_port_is_refused(port: int, option: str) -> None:
    with pytest.raises(UsageError, match=f"{option} is {port}: give 1 to 65535"):
        open_listener("127.0.0.1", port, option)


@pytest.mark.parametrize("host", ["nohost.invalid", "192.0.2.1", "a..b"])
def test_address_of_another_machine_is_refused(host: str) -> None:
    with pytest.raises(UsageError, match=f"cannot listen at '{host}' .*: give another --host"), open_listener(host, 0):
        pass


@pytest.mark.parametrize(
    ("serve", "error", "message"),
    [
        (refuse_to_serve, UsageError, "the store has no ref nightly"),
        (
            die_in_service,
            ResourceError,
            "ended with exit code 7 before the service could answer, as workers did 3 times",
        ),
    ],
)
def test_service_ends_if_its_workers_cannot_start(
    serve: Callable[[WorkerLink], None], error: type[Exception], message: str
) -> None:
    calls: list[tuple[str, str | None]] = []
    record = lambda *urls: calls.append(urls)  # noqa: E731
    with pytest.raises(error, match=message):
        supervise(2, serve, ("127.0.0.1", 0, None), record, record)
    assert calls == []


def test_worker_accepts_once_the_others_have_as_many_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    """The worker does not wait for all the time that it gives the others."""
    monkeypatch.setattr(server, "_YIELD_SECONDS", 2 * TIMEOUT)
    accepted: list[socket.socket] = []
    leads = iter([True, True, True])

    async def connect(connection: socket.socket) -> None:
        accepted.append(connection)

    async def accept() -> None:
        with open_listener("127.0.0.1", 0) as listener, socket.create_connection(listener.getsockname()):
            acceptor = server._SharedSocketAcceptor(listener, connect, lambda pending: next(leads, False))
            async with asyncio.timeout(TIMEOUT):
                while not accepted:
                    await asyncio.sleep(0.001)
            acceptor.close()
            accepted[0].close()

    asyncio.run(accept())
    assert next(leads, None) is None


class Cycle:
    def __init__(self) -> None:
        self.itself = self


def test_ready_service_collects_garbage_often_without_visiting_older_objects() -> None:
    usual_thresholds = gc.get_threshold()
    gc.set_threshold(250_000, 10, 10)  # as the command line sets it
    try:
        freeze_loaded_objects()
        assert gc.get_freeze_count() > len(sys.modules)
        garbage = weakref.ref(Cycle())
        new_objects: list[object] = []
        while garbage() is not None and len(new_objects) < 100_000:
            new_objects.append([])
        assert garbage() is None
    finally:
        gc.unfreeze()
        gc.set_threshold(*usual_thresholds)
