"""Run the whole service in one process, or one worker of several, for `bookwheel serve`."""

import logging
import resource
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from rag_model.digest import digest_bytes
from rag_model.errors import BookwheelError
from rag_model.secrets import LOOPBACK
from rag_model.serving.following.follower import FollowedRef, PulledFolder
from rag_model.serving.following.group import LeaderStatePublisher, WorkerFollower
from rag_model.serving.following.snapshot_slot import FollowerStoppedError
from rag_model.serving.http.app import MetricsExposition, create_app, create_health_app
from rag_model.serving.http.guard import BearerTokens
from rag_model.serving.http.server import (
    CertificateFiles,
    HealthPort,
    ReloadingCertificate,
    ServiceServer,
)
from rag_model.serving.monitoring.metrics import CONTENT_TYPE, ServiceMetrics
from rag_model.serving.monitoring.probes import ProbeMonitor
from rag_model.serving.monitoring.quality import QualityMonitor
from rag_model.serving.monitoring.tracing import RequestTracer
from rag_model.serving.runtime import freeze_loaded_objects, prepare_process
from rag_model.serving.service import Service
from rag_model.serving.settings import ANY_HOST, ServiceSettings
from rag_model.serving.workers import WorkerLink, format_url, open_listener
from rag_model.store.objects.cache import get_cache_folder
from rag_model.store.objects.files import Files

_LOG = logging.getLogger(__name__)
__all__ = [
    "BindSettings",
    "CertificateFiles",
    "FollowedRef",
    "PulledFolder",
    "ServiceSettings",
    "get_default_dest",
    "resolve_allowed_hosts",
    "run",
]
_START_POLL_SECONDS = 0.05


@dataclass(frozen=True, slots=True)
class BindSettings:
    """Addresses at which a service listens, and settings of who may connect."""

    host: str
    port: int  # 0: a free port
    health_port: int | None = None  # a second port, only for /healthz, /readyz and /metrics
    tokens: Path | None = None  # file of bearer tokens, one per line; None means no authentication
    certificate: CertificateFiles | None = None  # None means HTTP without TLS


def run(
    target: FollowedRef | PulledFolder,
    settings: ServiceSettings,
    bind_settings: BindSettings,
    on_listening: Callable[[str, str | None], None],
    on_ready: Callable[[str, str | None], None],
    evaluation_questions: Sequence[str] = (),
    probe_questions: Sequence[str] = (),
    link: WorkerLink | None = None,
) -> None:
    """Serve until a signal arrives.

    Args:
        target: The ref or the pulled folder to serve.
        settings: The service's settings.
        bind_settings: Where to listen, and who may connect.
        on_listening: Called with the URLs of the service and of its health port once connections
            are accepted, which may be long before the first snapshot is loaded. The supervisor of
            workers calls it instead of each worker.
        on_ready: Called with the same URLs, and by the same process, once the first snapshot is
            served.
        evaluation_questions: The questions of the evaluation, from which drift is measured.
        probe_questions: Questions that the model is asked repeatedly, to measure its drift.
        link: A worker's link to the supervisor, with the listening sockets.

    Raises:
        StoreError: The store has no such snapshot, or it is unreachable and no snapshot of this ref
            was pulled before.
        UsageError: An address is in use, the tokens or the certificate cannot be used, or the
            snapshot does not have an index that the settings name.
        RefusedError: The vector space of the model's question encoder is not the snapshot's.
    """
    prepare_process("" if link is None else f"worker {link.worker_id}: ")
    logging.getLogger("uvicorn").setLevel(logging.ERROR)  # uvicorn only warns of clients' mistakes
    _raise_file_limit()
    if ANY_HOST in settings.allowed_hosts and (link is None or link.is_leader):
        _LOG.warning(
            "programs may use any host name, but web pages and GET requests only an IP address or "
            "a name without dots: to allow the service's host name there, give --allow-host NAME"
        )
    bearer_tokens = None if bind_settings.tokens is None else BearerTokens(bind_settings.tokens)
    certificate = None if bind_settings.certificate is None else ReloadingCertificate(bind_settings.certificate)
    try:
        # A restarted leader also follows a ref that is missing, because it may be published again.
        if link is None or not (link.is_leader and link.is_restarted):
            target.check(lambda: _check_stop(link))
    except FollowerStoppedError:
        return

    with ExitStack() as stack:
        listener = stack.enter_context(
            open_listener(bind_settings.host, bind_settings.port) if link is None else link.listener
        )
        health_listener = None if link is None else link.health_listener
        if link is None and bind_settings.health_port is not None:
            health_listener = stack.enter_context(
                open_listener(bind_settings.host, bind_settings.health_port, "--health-port")
            )
        scheme = "http" if certificate is None else "https"
        urls = format_url(listener, scheme), None if health_listener is None else format_url(health_listener)

        fatal_errors: list[BookwheelError] = []
        folder = target.dest if isinstance(target, FollowedRef) else None
        probes = ProbeMonitor(probe_questions, folder, settings.probe_seconds)
        metrics = ServiceMetrics(settings, QualityMonitor(questions=evaluation_questions), link=link, probes=probes)
        service = Service(target, settings, metrics, fatal_errors.append, RequestTracer.from_environment(), link)
        exposition = MetricsExposition(metrics.render_exposition, CONTENT_TYPE)
        health_port = None
        if health_listener is not None:
            health_port = HealthPort(create_health_app(service, exposition), health_listener)

        def announce_ready() -> None:
            freeze_loaded_objects()
            if link is None:
                on_ready(*urls)

        server = ServiceServer(
            create_app(service, exposition, bearer_tokens),
            service,
            partial(on_listening, *urls) if link is None else partial(link.send, "listening"),
            health_port,
            certificate,
            announce_ready,
            link,
        )
        server.stop_if(lambda: bool(fatal_errors))
        if link is not None:
            _share_state(link, service, metrics)

        service.start()
        try:
            while link is not None and link.is_restarted and not (service.is_ready or link.stop_signals):
                time.sleep(_START_POLL_SECONDS)  # other workers accept requests meanwhile
            server.run(sockets=[listener])
        finally:
            service.close()
    if fatal_errors:
        raise fatal_errors[0]


def _check_stop(link: WorkerLink | None) -> None:
    """Raise an error if the supervisor stops this worker.

    A single process has no handlers of signals before it listens, so a signal ends it at once.
    """
    if link is not None and link.stop_signals:
        raise FollowerStoppedError("the service is shutting down")


def _share_state(link: WorkerLink, service: Service, metrics: ServiceMetrics) -> None:
    """Publish the leader's state to the other workers at regular intervals."""
    if not isinstance(service.follower, WorkerFollower):
        publisher = LeaderStatePublisher(link, service.slot, service.follower, service.pins)

        def publish_state() -> None:
            publisher.tick()
            metrics.share_state()

        link.on_tick = publish_state


def resolve_allowed_hosts(host: str, given_hosts: Sequence[str]) -> tuple[str, ...]:
    """Return the given host names; without any, any host, or loopback for a loopback `host`."""
    if given_hosts:
        return tuple(given_hosts)
    is_loopback = host.startswith("127.") or host in LOOPBACK or f"[{host}]" in LOOPBACK
    return LOOPBACK if is_loopback else (ANY_HOST,)


def get_default_dest(url: str) -> Path:
    """Return the default folder for a store's pulled snapshots, which is in the cache."""
    return get_cache_folder() / "served" / digest_bytes(Files(url).url.encode())[-16:]


def _raise_file_limit() -> None:
    """Raise the limit of file descriptors to its maximum, for many connections."""
    hard_limit = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    with suppress(ValueError, OSError):  # some systems allow fewer than they report
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard_limit, hard_limit))
