"""Traces arrive at a real OTLP receiver over HTTP: one span for each request, with a child span for each stage."""

import logging
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)

from rag_model.serving.monitoring.tracing import RequestTracer
from tests.fixtures.serving import Library, run_service

TRACE_ID = "0af7651916cd43dd8448eb211c80319c"
TRACEPARENT = f"00-{TRACE_ID}-b7ad6b7169203331-01"
SERVER_KIND, ERROR = 2, 2  # as in opentelemetry/proto/trace/v1/trace.proto


class Receiver(ThreadingHTTPServer):
    """Receives spans as OpenTelemetry's collector does."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.spans: list[Any] = []
        self.services: set[str] = set()


class _Handler(BaseHTTPRequestHandler):
    server: Receiver

    def do_POST(self) -> None:
        request = ExportTraceServiceRequest.FromString(self.rfile.read(int(self.headers["Content-Length"])))
        for resource_spans in request.resource_spans:
            attributes = read_attributes(resource_spans.resource)
            self.server.services.add(str(attributes["service.name"]))
            self.server.spans += [span for scope in resource_spans.scope_spans for span in scope.spans]
        self.send_response(200)
        self.send_header("Content-Type", "application/x-protobuf")
        self.end_headers()
        self.wfile.write(ExportTraceServiceResponse().SerializeToString())

    def log_message(self, *args: Any) -> None:
        pass


def read_attributes(span: Any) -> dict[str, Any]:
    return {pair.key: getattr(pair.value, pair.value.WhichOneof("value")) for pair in span.attributes}


@pytest.fixture
def receiver(monkeypatch: pytest.MonkeyPatch) -> Iterator[Receiver]:
    with Receiver() as server:
        threading.Thread(target=server.serve_forever).start()
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{server.server_address[1]}")
        yield server
        server.shutdown()


def test_request_is_a_span_of_the_callers_trace_with_its_stages(
    shared_library: Library, model: Path, tmp_path: Path, receiver: Receiver
) -> None:
    tracer = RequestTracer.from_environment()
    with run_service(shared_library.url, tmp_path, tracer=tracer, model=str(model)) as service:
        headers = {"traceparent": TRACEPARENT}
        assert service.client.post("/search", json={"questions": ["who?", "where?"]}, headers=headers).is_success
        assert service.client.post("/answer", json={"questions": ["who?"]}).is_success
        assert service.client.post("/search", json={"questions": []}).status_code == 422
    search_span, answer_span, invalid_span = [span for span in receiver.spans if span.name.startswith("POST ")]
    stages = {span.name: span for span in receiver.spans if span.parent_span_id == search_span.span_id}
    assert (receiver.services, search_span.trace_id.hex(), search_span.kind) == ({"bookwheel"}, TRACE_ID, SERVER_KIND)
    assert read_attributes(search_span) == {
        "http.request.method": "POST",
        "http.route": "/search",
        "http.response.status_code": 200,
        "bookwheel.questions": 2,
    }
    assert set(stages) == {"queue", "encode", "search", "read"}
    ordered = [stages[name] for name in ("queue", "encode", "search", "read")]
    bounds = [time for span in ordered for time in (span.start_time_unix_nano, span.end_time_unix_nano)]
    assert bounds == sorted(bounds)
    assert search_span.start_time_unix_nano <= bounds[0] <= bounds[-1] <= search_span.end_time_unix_nano
    assert all(span.trace_id == search_span.trace_id for span in ordered)
    assert read_attributes(stages["search"]) == {
        "bookwheel.snapshot": shared_library.red,
        "bookwheel.retriever": "hnsw",
        "bookwheel.batch": 2,
    }
    answer_stages = {span.name for span in receiver.spans if span.parent_span_id == answer_span.span_id}
    assert answer_stages == {"queue", "answer"}
    assert (read_attributes(invalid_span)["http.response.status_code"], invalid_span.status.code) == (422, 0)


@pytest.mark.parametrize(
    "environment", [{}, {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://localhost:1", "OTEL_SDK_DISABLED": "true"}]
)
def test_without_an_endpoint_there_are_no_traces(environment: dict[str, str]) -> None:
    assert RequestTracer.from_environment(environment) is None


def test_missing_package_logs_one_warning(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    with caplog.at_level(logging.WARNING):
        assert RequestTracer.from_environment({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://localhost:1"}) is None
    assert [record.message for record in caplog.records] == [
        "no traces are sent to OTEL_EXPORTER_OTLP_ENDPOINT, because opentelemetry.sdk.trace is not installed: "
        "install bookwheel[trace]"
    ]
