"""The whole service in one process: what `bookwheel serve` runs."""

import logging
import resource
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path

from rag_model.digest import digest_bytes
from rag_model.errors import BookwheelError, UsageError
from rag_model.evaluation.questions.files import read_questions
from rag_model.reading.confidence import Threshold
from rag_model.reading.settings import ReaderSettings
from rag_model.serving.following.folder import Pulled
from rag_model.serving.following.follower import Followed
from rag_model.serving.http.app import create_app
from rag_model.serving.http.certificate import Certificate, CertificateFiles
from rag_model.serving.http.health import Exposition, create_health_app
from rag_model.serving.http.server import HealthPort, Server, address, bound
from rag_model.serving.http.tokens import Tokens
from rag_model.serving.process import prepare
from rag_model.serving.service import Service
from rag_model.serving.service_settings import ANY_HOST, LOOPBACK, ServiceSettings
from rag_model.serving.watching.metrics import CONTENT_TYPE, Metrics
from rag_model.serving.watching.quality import Quality
from rag_model.store.objects.cache import cache_folder
from rag_model.store.objects.files import Files

_LOG = logging.getLogger(__name__)
__all__ = [
    "CertificateFiles",
    "Entrance",
    "Followed",
    "Listening",
    "Pulled",
    "ReaderSettings",
    "ServiceSettings",
    "Threshold",
    "default_dest",
    "hosts_of",
    "read_questions",
    "run",
]
_LOOPBACK = ("localhost", "::1")
_LAST_PORT = 65_535


@dataclass(frozen=True, slots=True)
class Entrance:
    """Where a service listens, and who may come in."""

    host: str
    port: int  # 0 takes a free one
    health_port: int | None = None  # for /healthz, /readyz and /metrics alone; they are at `port` too
    tokens: Path | None = None  # a file of bearer tokens, one a line; None: everyone may ask
    certificate: CertificateFiles | None = None  # None: HTTP without TLS

    def __post_init__(self) -> None:
        """Refuse what is no port.

        Raises:
            UsageError: a port is below 0, or above 65,535.
        """
        for option, port in (("--port", self.port), ("--health-port", self.health_port)):
            if port is not None and not 0 <= port <= _LAST_PORT:
                raise UsageError(f"{option} is {port}: give 1 to {_LAST_PORT}, or 0 for a free one")


@dataclass(frozen=True, slots=True)
class Listening:
    """The URLs that a service is reached at from this machine."""

    url: str
    health: str | None


def run(
    followed: Followed | Pulled,
    settings: ServiceSettings,
    entrance: Entrance,
    questions: Sequence[str] = (),
    listening: Callable[[Listening], None] = lambda at: None,
) -> None:
    """Serve until a signal comes.

    Args:
        followed: what to serve.
        settings: how.
        entrance: where to listen.
        questions: of the evaluation; how far live ones drift from them is measured.
        listening: called with the URLs once connections are taken, which may be long before questions can be answered.

    Raises:
        StoreError: the store has no such snapshot; or it cannot be reached, and nothing that this ref named before is
            on this machine's disk.
        UsageError: an address is taken, a file of tokens or a certificate cannot be used, or the snapshot has no such
            index.
        RefusedError: the model's questions ask into another space than the snapshot's.
    """
    prepare()
    logging.getLogger("uvicorn").setLevel(logging.ERROR)  # what is wrong with a request is told who sent it
    if ANY_HOST in settings.hosts:
        _LOG.warning(
            "programs may ask under any host name, and pages and GET only by an address or a name without dots: give "
            "--allow-host NAME, the name that the service is asked by"
        )
    _allow_files()
    tokens = None if entrance.tokens is None else Tokens(entrance.tokens)
    certificate = None if entrance.certificate is None else Certificate(entrance.certificate)
    followed.check()
    failures: list[BookwheelError] = []
    servers: list[Server] = []

    def hopeless(error: BookwheelError) -> None:
        failures.append(error)
        for server in servers:
            server.should_exit = True

    with ExitStack() as stack:
        socket = stack.enter_context(bound(entrance.host, entrance.port))
        health = None
        if entrance.health_port is not None:
            health = stack.enter_context(bound(entrance.host, entrance.health_port, "--health-port"))
        metrics = Metrics(settings, Quality(questions=questions))
        service, exposition = (
            Service(followed, settings, metrics, hopeless),
            Exposition(metrics.exposition, CONTENT_TYPE),
        )
        at = Listening(
            address(socket, "http" if certificate is None else "https"), None if health is None else address(health)
        )
        server = Server(
            create_app(service, exposition, tokens),
            service,
            lambda: listening(at),
            None if health is None else HealthPort(create_health_app(service, exposition), health),
            certificate,
        )
        servers.append(server)
        service.start()
        try:
            server.run(sockets=[socket])
        finally:
            service.close()
    if failures:
        raise failures[0]


def hosts_of(host: str, named: Sequence[str]) -> tuple[str, ...]:
    """Return the host names that a service answers to: those named; else any, unless only this machine reaches it."""
    if named:
        return tuple(named)
    return LOOPBACK if host in _LOOPBACK or host.startswith("127.") else (ANY_HOST,)


def default_dest(url: str) -> Path:
    """Return the default folder for a store's pulled snapshots: in the cache, the same on every start."""
    return cache_folder() / "served" / digest_bytes(Files(url).url.encode())[-16:]


def _allow_files() -> None:
    """Take as many file descriptors as this process may have: connections of many clients need them."""
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    with suppress(ValueError, OSError):  # some systems have a lower limit than they say
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
