"""The HTTP endpoints. No request contains paths or URLs.

| endpoint | reply |
| --- | --- |
| `POST /search`, `POST /answer` | passages and answers, as the commands of these names print them |
| `POST /retrieve` | documents for any number of queries, as trainings of search agents send them |
| `GET /snapshot` | the served snapshot, and a refused version if there is one |
| `GET /healthz` | 200 while the process runs |
| `GET /readyz` | 200 while the service can answer |
| `GET /metrics` | metrics in Prometheus' exposition format |
| `GET /` | a web page; its content policy forbids to load anything from other hosts |
| `GET /openapi.json` | the OpenAPI schema; the usual page for it is off, because it loads scripts |

The health port serves `/healthz`, `/readyz` and `/metrics` only, so clients cannot use it up.

An error is `{"detail": "one sentence"}` with one of these statuses:

| status | cause |
| --- | --- |
| 400, 422 | invalid request |
| 410 | no such snapshot; it expired or was taken down |
| 401 | missing or wrong token |
| 403, 421 | page or host that is not allowed |
| 408, 413, 415 | body that is slow, too large, or not JSON |
| 429 | full queue |
| 500 | error of the service |
| 502 | error of the remote model |
| 503 | no snapshot is loaded, or a range of it cannot be read from the store |
| 504 | request exceeded its time limit |

`POST /answer` can stream server-sent events: passages, text as it is decoded, the whole reply.

| event | data |
| --- | --- |
| `passages` | `snapshot`, `model`, and `passages` of each question; replaces all earlier events |
| `text` | `answer`, the position of a question, and new `text` at the end of its answer |
| `answer` | the whole reply of `POST /answer`; the last event |
| `error` | `detail`, one sentence, and the HTTP `status` of such an error; the last event |
"""

import asyncio
import logging
import re
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.resources import files
from typing import Any, Self, TypeVar

from fastapi import APIRouter, FastAPI, Request, Response
from fastapi.responses import JSONResponse, PlainTextResponse, StreamingResponse
from pydantic import BaseModel, Field
from pydantic_core import to_json
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send

from rag_model.client.replies import AnswerReply, SearchReply, SnapshotReply
from rag_model.errors import (
    BookwheelError,
    EndpointError,
    GoneError,
    NotReadyError,
    PromptTooLongError,
    ResourceError,
    StoreError,
    UsageError,
)
from rag_model.retrieve.retriever import has_visible_text
from rag_model.serving.answering.batcher import (
    AnswerDelta,
    AnswerProgress,
    DeadlineError,
    QueueFullError,
    RetrievedPassages,
    ShuttingDownError,
)
from rag_model.serving.answering.execution import AnswerResult
from rag_model.serving.http import messages
from rag_model.serving.http.connections import cancel_on_disconnect
from rag_model.serving.http.guard import JSON_TYPE, MSGPACK_TYPE, BearerTokens, RequestGuard
from rag_model.serving.http.messages import (
    AnswerRequest,
    MalformedError,
    RetrieveReply,
    RetrieveRequest,
    SearchRequest,
    create_model,
    format_answer_reply,
)
from rag_model.serving.monitoring.observer import notify
from rag_model.serving.monitoring.tracing import CURRENT_TRACE, RequestTrace
from rag_model.serving.service import Service

EVENT_STREAM_TYPE = "text/event-stream"
# These headers keep proxies from buffering the stream.
_STREAM_HEADERS = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
_MAX_LOOP_QUERIES = 64  # maximum queries whose hits the event loop formats itself, in under 1 ms
_STATUS_OK = 200
_CLIENT_CLOSED_REQUEST = 499  # status as in nginx; only the metrics show it
_ZERO_QUALITY = re.compile(r"q=0(\.0*)?")  # a weight in an Accept header that excludes a type

# returns the HTTP status of an error, and its message
ErrorExplainer = Callable[[Exception], tuple[int, str]]
_LOG = logging.getLogger(__name__)
_STATUS_BY_ERROR: tuple[tuple[type[BookwheelError], int], ...] = (  # the first match counts
    (MalformedError, 422),
    (GoneError, 410),
    (UsageError, 400),
    (QueueFullError, 429),
    (ShuttingDownError, 503),
    (NotReadyError, 503),
    (DeadlineError, 504),
    (EndpointError, 502),
    (StoreError, 503),  # a byte range of a file cannot be read from the store
    (ResourceError, 503),  # the disk with the cache of byte ranges is full
)
_RETRY_AFTER = {429: "1", 503: "2"}  # seconds in the header Retry-After, by status
_CONTENT_SECURITY_POLICY = "; ".join(
    [
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "connect-src 'self'",
        "img-src data:",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
    ]
)
_PAGE_HEADERS = {
    "Content-Security-Policy": _CONTENT_SECURITY_POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",  # linked sites do not see the question
    "Cache-Control": "no-cache",
}
_MEDIA_TYPES = {"html": "text/html", "css": "text/css", "js": "text/javascript"}


class AnswerStream(StreamingResponse):
    """Sends the events of one request, until the last event is sent or the client disconnects."""

    def __init__(
        self,
        questions: Sequence[str],
        progress: AnswerProgress,
        task: "asyncio.Task[AnswerResult]",
        first_updates: Sequence[RetrievedPassages | AnswerDelta],
        explain_error: ErrorExplainer,
    ) -> None:
        """Prepare to send `first_updates` and all later updates; `start` creates the arguments."""
        self._questions, self._progress, self._task = questions, progress, task
        self._explain_error = explain_error
        self._status = _STATUS_OK
        self.on_end: Callable[[int], None] = lambda status: None  # gets the final HTTP status
        self._events = self._iter_events(first_updates)
        super().__init__(self._events, media_type=EVENT_STREAM_TYPE, headers=_STREAM_HEADERS)

    @classmethod
    async def start(cls, service: Service, request: AnswerRequest, client: str, explain_error: ErrorExplainer) -> Self:
        """Submit a request and wait for its first update; raise errors that occur before it.

        Raises:
            BookwheelError: See `Service.answer`.
        """
        progress = AnswerProgress()
        task = asyncio.create_task(service.answer(request.questions, request.k, request.expression, client, progress))
        task.add_done_callback(partial(_finish_progress, progress))
        try:
            first_updates = await progress.wait_for_updates()
            if not first_updates:
                await task
        except BaseException:
            task.cancel()
            raise
        return cls(request.questions, progress, task, first_updates, explain_error)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events."""
        try:
            with cancel_on_disconnect(scope["state"]):
                await self.stream_response(send)
        except ClientDisconnect:
            self._status = _CLIENT_CLOSED_REQUEST
        finally:
            self._task.cancel()
            await self._events.aclose()
            self.on_end(self._status)

    async def _iter_events(self, updates: Sequence[RetrievedPassages | AnswerDelta]) -> AsyncGenerator[bytes, None]:
        try:
            while updates:
                yield b"".join(_format_update(self._questions, update) for update in updates)
                updates = await self._progress.wait_for_updates()
            yield format_event("answer", format_answer_reply(await self._task))
        # The head of the response has been sent, so the error is sent as an event.
        except Exception as error:
            self._status, detail = self._explain_error(error)
            yield format_event("error", to_json({"status": self._status, "detail": detail}))


def _finish_progress(progress: AnswerProgress, task: "asyncio.Task[AnswerResult]") -> None:
    progress.finish()
    if not task.cancelled():
        task.exception()  # read the exception, so that asyncio does not log it as never retrieved


def accepts_event_stream(accept: str) -> bool:
    """Return whether an Accept header accepts event streams.

    >>> accepts_event_stream("application/json, text/event-stream")
    True
    >>> accepts_event_stream("text/event-stream;q=0, application/json")
    False
    """
    for media_range in accept.lower().split(","):
        media_type, *parameters = (range_part.strip() for range_part in media_range.split(";"))
        if media_type == EVENT_STREAM_TYPE:
            return not any(_ZERO_QUALITY.fullmatch(parameter) for parameter in parameters)
    return False


def format_event(name: str, data: bytes) -> bytes:
    r"""Format one event; `data` is JSON without line breaks.

    >>> format_event("text", b'{"answer":0}')
    b'event: text\ndata: {"answer":0}\n\n'
    """
    return b"event: %b\ndata: %b\n\n" % (name.encode(), data)


def _format_update(questions: Sequence[str], update: RetrievedPassages | AnswerDelta) -> bytes:
    if isinstance(update, AnswerDelta):
        return format_event("text", to_json({"answer": update.position, "text": update.text}))
    answers = [
        {"question": question, "passages": [hit.to_json() for hit in hits]}
        for question, hits in zip(questions, update.hits, strict=True)
    ]
    return format_event(
        "passages",
        to_json({"snapshot": update.snapshot, "model": update.model, "answers": answers}),
    )


_QueryT = TypeVar("_QueryT", SearchRequest, RetrieveRequest, AnswerRequest)
_page_router = APIRouter(include_in_schema=False)


@dataclass(frozen=True, slots=True)
class MetricsExposition:
    """The reply of /metrics."""

    render: Callable[[], bytes]
    media_type: str = "text/plain"


class Problem(BaseModel):
    """The body of an error reply."""

    detail: str = Field(description="One sentence: what happened, and what to do.")


def create_error_reply(status: int, detail: str, headers: Mapping[str, str] | None = None) -> Response:
    """Create the reply of an error."""
    retry_after = {"Retry-After": _RETRY_AFTER[status]} if status in _RETRY_AFTER else {}
    return JSONResponse({"detail": detail}, status, {**retry_after, **(headers or {})})


class _BodyError(BookwheelError):
    """The body is too large or arrives too slowly; the connection must be closed."""

    def __init__(self, status: int, detail: str) -> None:
        super().__init__(detail)
        self.status = status


class _ServiceApp(FastAPI):
    """A FastAPI application that calls the query endpoints directly.

    With the normal routing of FastAPI, or of Starlette alone, a search of a small snapshot takes
    longer: 1.3 instead of 1.2 ms at the lower quartile (10 %), and 2.0 instead of 1.6 ms at the
    median (29 %). The endpoints check their requests themselves. The endpoints are also declared to
    FastAPI, which describes them in OpenAPI and refuses other HTTP methods.
    """

    def __init__(self, guard: RequestGuard, **settings: Any) -> None:
        super().__init__(**settings)
        self.guard = guard
        # endpoints of POST requests, by path
        self.direct_endpoints: dict[str, Callable[[Request], Awaitable[Response]]] = {}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if rejection := self.guard.find_rejection(scope):
            headers = {**rejection.headers, "Connection": "close"}
            response = create_error_reply(rejection.status, rejection.detail, headers)
        elif scope["method"] == "POST" and (endpoint := self.direct_endpoints.get(scope["path"])):
            response = await endpoint(Request(scope, receive))
        else:
            await super().__call__(scope, receive, send)
            return
        await response(scope, receive, send)


def create_app(
    service: Service, metrics: MetricsExposition | None = None, tokens: BearerTokens | None = None
) -> FastAPI:
    """Create the ASGI application of a service; with `tokens`, requests need a valid token."""
    description = "Passages and answers from the snapshot that a ref names."
    guard = RequestGuard(service.settings, tokens)
    # Redirects are off, because they would contain the host name that the client sent.
    app = _ServiceApp(
        guard,
        title="bookwheel",
        description=description,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
    )
    _add_query_endpoints(app, service)
    _add_snapshot_endpoint(app, service)
    add_health(app, service, metrics)
    app.include_router(_page_router)
    return app


def create_health_app(service: Service, metrics: MetricsExposition | None = None) -> FastAPI:
    """Create the application of the health port."""
    app = FastAPI(
        title="bookwheel health",
        docs_url=None,
        redoc_url=None,
        openapi_url=None,
        redirect_slashes=False,
    )
    add_health(app, service, metrics)
    return app


def _add_query_endpoints(app: _ServiceApp, service: Service) -> None:
    @app.post("/search", **_describe_endpoint(SearchRequest, create_model(SearchReply)))
    async def search(request: Request) -> Response:
        """Find passages for questions, best first."""

        async def run(query: SearchRequest) -> bytes:
            search_result = await service.search(query.questions, query.k, query.expression, _get_client(request))
            return messages.format_search_reply(query.questions, search_result)

        return await _handle_request(
            service, "search", request, partial(messages.read_request, SearchRequest, settings=service.settings), run
        )

    @app.post("/retrieve", **_describe_endpoint(RetrieveRequest, RetrieveReply))
    async def retrieve(request: Request) -> Response:
        """Find documents for many queries, in the format of Search-R1, verl and GEM.

        The URL may name a snapshot (`?snapshot=latest@3`), which stays open while requests name it,
        and a `retriever`. Queries without text get no documents; long queries are truncated.
        """
        as_msgpack = messages.is_msgpack(request.headers.get("content-type"))

        def read(body: bytes) -> RetrieveRequest:
            return messages.read_retrieve_request(body, service.settings, as_msgpack=as_msgpack)

        async def run(query: RetrieveRequest) -> bytes:
            options = messages.read_retrieve_options(request.scope["query_string"])
            text_by_position = {
                position: text[: service.settings.max_question_chars]
                for position, text in enumerate(query.questions)
                if has_visible_text(text)
            }
            async with service.hold(options.snapshot) as snapshot:
                hit_lists = await service.retrieve(
                    list(text_by_position.values()), query.topk, options.expression, _get_client(request), snapshot
                )
            hits_by_position = dict(zip(text_by_position, hit_lists, strict=True))
            ordered_hits = [hits_by_position.get(position, []) for position in range(len(query.questions))]
            format_reply = partial(
                messages.format_retrieve_reply, query, snapshot.id, ordered_hits, as_msgpack=as_msgpack
            )
            # A long reply is formatted in a thread, so that the event loop serves other requests.
            return (
                format_reply() if len(text_by_position) <= _MAX_LOOP_QUERIES else await asyncio.to_thread(format_reply)
            )

        media_type = MSGPACK_TYPE if as_msgpack else JSON_TYPE
        max_bytes = service.settings.max_retrieve_body_bytes
        return await _handle_request(service, "retrieve", request, read, run, media_type, max_bytes)

    @app.post(
        "/answer",
        **_describe_endpoint(AnswerRequest, create_model(AnswerReply), other_media_type=EVENT_STREAM_TYPE),
    )
    async def answer(request: Request) -> Response:
        """Answer questions with the service's model; reply with the passages that it read."""

        async def run(query: AnswerRequest) -> bytes | AnswerStream:
            client = _get_client(request)
            if query.stream if query.stream is not None else accepts_event_stream(request.headers.get("accept", "")):
                return await AnswerStream.start(service, query, client, _explain_error)
            return messages.format_answer_reply(
                await service.answer(query.questions, query.k, query.expression, client)
            )

        return await _handle_request(
            service, "answer", request, partial(messages.read_request, AnswerRequest, settings=service.settings), run
        )

    app.direct_endpoints = {"/search": search, "/retrieve": retrieve, "/answer": answer}


def _add_snapshot_endpoint(app: FastAPI, service: Service) -> None:
    @app.get("/snapshot", response_model=create_model(SnapshotReply), responses={503: {"model": Problem}})
    async def snapshot() -> Response:
        """Return the served snapshot, and a refused version if there is one."""
        try:
            return JSONResponse(service.describe())
        except NotReadyError:
            return create_error_reply(503, service.explain_unready())


def add_health(app: FastAPI, service: Service, metrics: MetricsExposition | None = None) -> None:
    """Add the health endpoints to an application, and /metrics if `metrics` is given."""

    @app.get("/healthz")
    async def healthz() -> dict[str, str]:
        """Return 200 while the process runs."""
        return {"status": "alive"}

    @app.get("/readyz", responses={503: {"model": Problem}})
    async def readyz() -> Response:
        """Return 200 while the service can answer."""
        if service.is_ready:
            return JSONResponse({"status": "ready"})
        return create_error_reply(503, service.explain_unready())

    if metrics is not None:
        render_exposition = metrics

        @app.get("/metrics", response_class=PlainTextResponse)
        def scrape() -> Response:
            """Return the metrics of this service in Prometheus' exposition format."""
            return Response(render_exposition.render(), media_type=render_exposition.media_type)


@_page_router.get("/")
def page() -> Response:
    """Return the HTML of the web page."""
    return _read_page_file("html")


@_page_router.get("/page.css")
def style_sheet() -> Response:
    """Return the style sheet of the web page."""
    return _read_page_file("css")


@_page_router.get("/page.js")
def script() -> Response:
    """Return the script of the web page."""
    return _read_page_file("js")


def _read_page_file(kind: str) -> Response:
    content = (files("rag_model.serving.http") / f"page.{kind}").read_bytes()
    return Response(content, headers=_PAGE_HEADERS, media_type=_MEDIA_TYPES[kind])


async def _handle_request(
    service: Service,
    endpoint: str,
    request: Request,
    read: Callable[[bytes], _QueryT],
    run: Callable[[_QueryT], Awaitable[bytes | AnswerStream]],
    media_type: str = JSON_TYPE,
    max_bytes: int | None = None,
) -> Response:
    """Read a request, run it while the client is connected, and return its reply or its error.

    Args:
        service: The service.
        endpoint: The endpoint's name in the metrics.
        request: The request.
        read: Function that parses and checks the body.
        run: Function that returns the body of the reply, or a stream of it.
        media_type: Type of the reply.
        max_bytes: Maximum size of the body; None means the limit of the settings.
    """
    start_time, question_count = time.perf_counter(), 0
    trace = None if service.tracer is None else service.tracer.start(endpoint, request.headers)
    CURRENT_TRACE.set(trace)
    try:
        body = await _read_body(request, max_bytes or service.settings.max_body_bytes, service.settings.body_seconds)
        start_time = time.perf_counter()
        query = read(body)
        question_count = len(query.questions)
        with cancel_on_disconnect(request.scope["state"]):
            content = await run(query)
        if isinstance(content, AnswerStream):
            content.on_end = lambda status: _record_reply(service, endpoint, status, question_count, start_time, trace)
            return content
        response = Response(content, media_type=media_type)
    except ClientDisconnect:
        response = Response(status_code=_CLIENT_CLOSED_REQUEST)
    except _BodyError as error:
        response = create_error_reply(error.status, str(error), {"Connection": "close"})
    except Exception as error:
        response = create_error_reply(*_explain_error(error))
    _record_reply(service, endpoint, response.status_code, question_count, start_time, trace)
    return response


def _record_reply(
    service: Service, endpoint: str, status: int, question_count: int, start_time: float, trace: RequestTrace | None
) -> None:
    if trace is not None:
        notify(trace.end, status, question_count)
    notify(service.observer.on_reply, endpoint, status, question_count, time.perf_counter() - start_time)


def _get_client(request: Request) -> str:
    """Return the identity of a request's client, which was derived from its connection."""
    return str(request.scope["state"].get("client", ""))


def _explain_error(error: Exception) -> tuple[int, str]:
    """Return the HTTP status of an error, and the message for the client."""
    status = next((status for error_type, status in _STATUS_BY_ERROR if isinstance(error, error_type)), 500)
    if isinstance(error, PromptTooLongError):
        _LOG.error("a request failed: %s", error)
        return (
            status,
            "the prompt is longer than the service's model reads: ask for fewer passages, or a shorter question",
        )
    if status not in {500, 502}:
        return status, str(error)
    if isinstance(error, BookwheelError):
        _LOG.error("a request failed: %s", error)
    else:
        _LOG.error("a request failed", exc_info=error)
    failed_part = "the service" if status == 500 else "the model behind the service"
    return status, f"{failed_part} could not answer: the service's log says why"


async def _read_body(request: Request, max_bytes: int, seconds: float) -> bytes:
    """Read a request's body within the limits of size and time."""
    size_error = _BodyError(413, f"the body is larger than {max_bytes} bytes: ask fewer questions at once")
    if request.scope["state"].get("is_body_complete"):  # a complete body needs no timer
        first_message = await request.receive()
        if first_message["type"] != "http.request":
            raise ClientDisconnect
        complete_body: bytes = first_message["body"]
        if len(complete_body) > max_bytes:
            raise size_error
        return complete_body
    content_length = request.headers.get("content-length", "0")
    if content_length.isdecimal() and int(content_length) > max_bytes:
        raise size_error
    body = bytearray()
    try:
        async with asyncio.timeout(seconds):
            async for chunk in request.stream():
                body += chunk
                if len(body) > max_bytes:
                    raise size_error
    except TimeoutError as error:
        raise _BodyError(408, f"the body did not arrive within {seconds:g} s: send it at once") from error
    return bytes(body)


def _describe_endpoint(
    request_type: type[BaseModel], reply_model: type[BaseModel], other_media_type: str = ""
) -> dict[str, Any]:
    """Return the OpenAPI description of an endpoint that reads its body itself.

    The endpoint may also reply with `other_media_type`.
    """
    other_replies: dict[int, Any] = {}
    if other_media_type:
        other_replies = {200: {"content": {other_media_type: {"schema": {"type": "string"}}}}}
    schema = request_type.model_json_schema(ref_template="#/components/schemas/{model}")
    reply_by_status = {
        status: {"model": Problem} for status in (400, 401, 403, 408, 410, 413, 415, 421, 422, 429, 500, 502, 503, 504)
    }
    return {
        "response_model": reply_model,
        "responses": {**reply_by_status, **other_replies},
        "openapi_extra": {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}},
    }
