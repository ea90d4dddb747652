"""OpenTelemetry traces of requests: each request has a server span, with its stages as children.

The children are `queue` (waiting for a worker), and the stages of the request's batch: `encode`,
`search`, `read` (of passages) and `answer`. Traces are sent by OTLP over HTTP if
OpenTelemetry's own variables name an endpoint; without them, nothing is imported and requests
are not slowed down. A request's `traceparent` header makes its span a part of the caller's trace.

Conventions: https://opentelemetry.io/docs/specs/semconv/http/http-spans/
"""

import logging
import math
import os
import time
from collections.abc import Iterable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Protocol, Self

_LOG = logging.getLogger(__name__)
_ENDPOINT_VARIABLES = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
_SERVER_ERROR = 500
_LOG_SECONDS = 300.0  # seconds between two warnings about unsent traces
_NANOSECONDS = 1_000_000_000


@dataclass(frozen=True, slots=True)
class RequestTrace:
    """The span of one request. Thread-safe."""

    _api: Any  # the module opentelemetry.trace
    _tracer: Any
    _span: Any

    def add_stage(self, name: str, start: int, end: int, attributes: Mapping[str, Any] | None = None) -> None:
        """Add a stage that lasted from `start` to `end`, in nanoseconds since the epoch."""
        context = self._api.set_span_in_context(self._span)
        self._tracer.start_span(name, context, attributes=attributes, start_time=start).end(max(start, end))

    def end(self, status: int, n_questions: int) -> None:
        """End the request's span with the HTTP status of its reply."""
        self._span.set_attributes({"http.response.status_code": status, "bookwheel.questions": n_questions})
        if status >= _SERVER_ERROR:
            self._span.set_status(self._api.StatusCode.ERROR)
        self._span.end()


# The trace of the request that the current task handles.
CURRENT_TRACE: ContextVar[RequestTrace | None] = ContextVar("CURRENT_TRACE", default=None)


class TracedRequest(Protocol):
    """A request in a queue."""

    trace: RequestTrace | None
    queued_at: int  # nanoseconds since the epoch


class _SpanExporter:
    """An OpenTelemetry span exporter that logs at most one failure per five minutes."""

    def __init__(self, exporter: Any) -> None:
        self._exporter, self._logged_at = exporter, -math.inf

    def export(self, spans: Any) -> Any:
        result = self._exporter.export(spans)
        if result.name != "SUCCESS" and time.monotonic() - self._logged_at > _LOG_SECONDS:
            self._logged_at = time.monotonic()
            _LOG.warning("traces cannot be sent, and are lost: check OTEL_EXPORTER_OTLP_ENDPOINT, and that it answers")
        return result

    def force_flush(self, timeout_millis: int = 30_000) -> bool:
        return bool(self._exporter.force_flush(timeout_millis))

    def shutdown(self) -> None:
        self._exporter.shutdown()


class RequestTracer:
    """Starts traces of requests, and sends them."""

    def __init__(self, provider: Any) -> None:
        """Use an OpenTelemetry `TracerProvider`."""
        from opentelemetry import trace  # noqa: PLC0415 - of an optional package
        from opentelemetry.trace.propagation import tracecontext  # noqa: PLC0415

        self._api, self._provider, self._tracer = trace, provider, provider.get_tracer("bookwheel")
        self._propagator = tracecontext.TraceContextTextMapPropagator()

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> Self | None:
        """Return a tracer that sends to the endpoint that OpenTelemetry's variables name.

        Return None if there is no endpoint, if OTEL_SDK_DISABLED is true, or (with a warning) if
        the extra is not installed.
        """
        is_disabled = environment.get("OTEL_SDK_DISABLED", "").strip().lower() == "true"
        if is_disabled or not any(environment.get(variable, "").strip() for variable in _ENDPOINT_VARIABLES):
            return None
        try:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter  # noqa: PLC0415
            from opentelemetry.sdk.resources import Resource  # noqa: PLC0415
            from opentelemetry.sdk.trace import TracerProvider  # noqa: PLC0415
            from opentelemetry.sdk.trace.export import BatchSpanProcessor  # noqa: PLC0415
        except ImportError as error:
            _LOG.warning(
                "no traces are sent to OTEL_EXPORTER_OTLP_ENDPOINT, because %s is not installed: "
                "install bookwheel[trace]",
                error.name,
            )
            return None
        default_name = {} if environment.get("OTEL_SERVICE_NAME") else {"service.name": "bookwheel"}
        provider = TracerProvider(resource=Resource.create(default_name))
        # `_SpanExporter` logs failures instead, less often
        logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)
        exporter: Any = _SpanExporter(OTLPSpanExporter())
        provider.add_span_processor(BatchSpanProcessor(exporter))
        return cls(provider)

    def start(self, verb: str, headers: Mapping[str, str]) -> RequestTrace:
        """Start the span of a request to the endpoint `verb`."""
        route = f"/{verb}"
        span = self._tracer.start_span(
            f"POST {route}",
            self._propagator.extract(headers),
            self._api.SpanKind.SERVER,
            {"http.request.method": "POST", "http.route": route},
        )
        return RequestTrace(self._api, self._tracer, span)

    def close(self) -> None:
        """Send the remaining spans, and stop."""
        self._provider.shutdown()


def add_search_stages(
    requests: Iterable[TracedRequest],
    start_ns: int,
    encode_seconds: float,
    read_seconds: float,
    attributes: Mapping[str, Any],
) -> None:
    """Add the stages of a searched batch to the traces of its requests.

    The batch began at `start_ns`, in nanoseconds since the epoch, and ends now. Several child
    retrievers may encode and search in turn, so there is one span for each stage, with the total
    time of the stage, in the order of the stages.
    """
    end_ns = time.time_ns()
    encode_end_ns = start_ns + round(encode_seconds * _NANOSECONDS)
    search_end_ns = max(encode_end_ns, end_ns - round(read_seconds * _NANOSECONDS))
    for request in requests:
        if request.trace is not None:
            request.trace.add_stage("queue", request.queued_at, start_ns)
            request.trace.add_stage("encode", start_ns, encode_end_ns, attributes)
            request.trace.add_stage("search", encode_end_ns, search_end_ns, attributes)
            request.trace.add_stage("read", search_end_ns, end_ns, attributes)


def add_answer_stages(requests: Iterable[TracedRequest], start_ns: int, attributes: Mapping[str, Any]) -> None:
    """Add the stages of an answered batch to the traces of its requests.

    The batch began at `start_ns`, in nanoseconds since the epoch, and ends now.
    """
    end_ns = time.time_ns()
    for request in requests:
        if request.trace is not None:
            request.trace.add_stage("queue", request.queued_at, start_ns)
            request.trace.add_stage("answer", start_ns, end_ns, attributes)
