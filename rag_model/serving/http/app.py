"""The endpoints. None reads a path or an address from a request.

| | |
| --- | --- |
| `POST /search`, `POST /answer` | as the verbs' JSON; every reply names its snapshot |
| `GET /snapshot` | what is served, and what was refused |
| `GET /healthz` | the process answers |
| `GET /readyz` | 200 once questions can be answered, until the service ends |
| `GET /metrics` | Prometheus' |
| `GET /` | a page for people |
| `GET /openapi.json` | the contract; a page of it would load scripts from elsewhere |

A failure is `{"detail": "one sentence"}`: 400 and 422 a wrong request, 401 no token, 403 and 421 a page or host that
is not allowed, 408 and 413 a slow or large body, 415 no JSON, 429 a full queue, 503 no open snapshot, 504 no answer in
time, 502 no answer of the model's endpoint, 500 an error of the service. `POST /answer` streams where it is asked to:
`streaming` lists the events.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send

from rag_model.errors import BookwheelError, EndpointError, PromptTooLongError, UsageError
from rag_model.serving.answering.batcher import BusyError, ClosingError, LateError
from rag_model.serving.following.desk import NotReadyError
from rag_model.serving.http import messages, page
from rag_model.serving.http.guard import Guard
from rag_model.serving.http.health import Exposition, add_health
from rag_model.serving.http.leaving import while_connected
from rag_model.serving.http.messages import AnswerReply, AnswerRequest, MalformedError, SearchReply, SearchRequest
from rag_model.serving.http.problems import Problem, problem
from rag_model.serving.http.streaming import TYPE, AnswerStream, accepted
from rag_model.serving.http.tokens import Tokens
from rag_model.serving.service import Service
from rag_model.serving.told import told, unready
from rag_model.serving.watching.observer import tell

_LOG = logging.getLogger(__name__)
_STATUS: tuple[tuple[type[BookwheelError], int], ...] = (  # the first that fits
    (MalformedError, 422),
    (UsageError, 400),
    (BusyError, 429),
    (ClosingError, 503),
    (NotReadyError, 503),
    (LateError, 504),
    (EndpointError, 502),
)
_GONE = 499  # the caller has left: only the metrics see this status


class _BodyError(BookwheelError):
    """The body is too large or too slow; the connection must be closed."""

    def __init__(self, status: int, sentence: str) -> None:
        super().__init__(sentence)
        self.status = status


class _App(FastAPI):
    """FastAPI that calls /search and /answer directly; these endpoints check their requests themselves.

    FastAPI's middleware and dependencies take twice the time of such an endpoint's own work. The endpoints are also
    declared to FastAPI, for OpenAPI and for the replies to other methods.
    """

    def __init__(self, guard: Guard, **settings: Any) -> None:
        super().__init__(**settings)
        self.guard = guard
        self.direct: dict[str, Callable[[Request], Awaitable[Response]]] = {}  # by path, of POST

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if refused := self.guard.refusal(scope):
            response = problem(refused.status, refused.sentence, {**refused.headers, "Connection": "close"})
        elif scope["method"] == "POST" and (endpoint := self.direct.get(scope["path"])):
            response = await endpoint(Request(scope, receive))
        else:
            await super().__call__(scope, receive, send)
            return
        await response(scope, receive, send)


def create_app(service: Service, metrics: Exposition | None = None, tokens: Tokens | None = None) -> FastAPI:
    """Return the ASGI application of a service; with `tokens` it answers only who has one."""
    about = "Passages and answers from the snapshot that a ref names."
    guard = Guard(service.settings, tokens)
    # A redirect would name the host that the client sent.
    app = _App(guard, title="bookwheel", description=about, docs_url=None, redoc_url=None, redirect_slashes=False)
    _ask(app, service)
    _state(app, service)
    add_health(app, service, metrics)
    app.include_router(page.router)
    return app


def _ask(app: _App, service: Service) -> None:
    @app.post("/search", **_described(SearchRequest, SearchReply))
    async def search(request: Request) -> Response:
        """Find passages for questions, best first."""

        async def reply(asked: SearchRequest) -> bytes:
            found = await service.search(asked.questions, asked.k, asked.expression, _client(request))
            return messages.search_reply(asked.questions, found)

        return await _replied(service, "search", request, SearchRequest, reply)

    @app.post("/answer", **_described(AnswerRequest, AnswerReply, also=TYPE))
    async def answer(request: Request) -> Response:
        """Answer questions with the service's model, each answer with the passages it was read from."""

        async def reply(asked: AnswerRequest) -> bytes | AnswerStream:
            if asked.stream if asked.stream is not None else accepted(request.headers.get("accept", "")):
                return await AnswerStream.begun(service, asked, _client(request), _explained)
            return messages.answer_reply(
                await service.answer(asked.questions, asked.k, asked.expression, _client(request))
            )

        return await _replied(service, "answer", request, AnswerRequest, reply)

    app.direct = {"/search": search, "/answer": answer}


def _state(app: FastAPI, service: Service) -> None:
    @app.get("/snapshot", response_model=messages.SnapshotReply, responses={503: {"model": Problem}})
    async def snapshot() -> Response:
        """Say what is served, and what was refused."""
        try:
            return JSONResponse(told(service))
        except NotReadyError:
            return problem(503, unready(service))


async def _replied(service: Service, verb: str, request: Request, kind: Any, reply: Any) -> Response:
    began, asked = time.perf_counter(), 0
    try:
        body = await _body(request, service)
        began = time.perf_counter()
        read = messages.read_request(kind, body, service.settings)
        asked = len(read.questions)
        with while_connected(request.scope["state"]):
            found = await reply(read)
        if isinstance(found, AnswerStream):
            found.ended = lambda status: _note(service, verb, status, asked, began)
            return found
        response = Response(found, media_type="application/json")
    except ClientDisconnect:
        response = Response(status_code=_GONE)
    except _BodyError as broken:
        response = problem(broken.status, str(broken), {"Connection": "close"})
    except BookwheelError as error:
        response = problem(*_explained(error))
    except Exception as error:
        response = problem(*_explained(error))
    _note(service, verb, response.status_code, asked, began)
    return response


def _note(service: Service, verb: str, status: int, asked: int, began: float) -> None:
    tell(service.observer.replied, verb, status, asked, time.perf_counter() - began)


def _client(request: Request) -> str:
    """Return who asks, as the connection counts it."""
    return str(request.scope["state"].get("client", ""))


def _explained(error: Exception) -> tuple[int, str]:
    """Return the status of a failure, and its sentence."""
    status = next((status for kind, status in _STATUS if isinstance(error, kind)), 500)
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
    what = "the service" if status == 500 else "the model behind the service"
    return status, f"{what} could not answer: the service's log says why"


async def _body(request: Request, service: Service) -> bytes:
    """Read a body while it is small enough and comes fast enough."""
    most, seconds = service.settings.max_body_bytes, service.settings.body_seconds
    large = _BodyError(413, f"the body is larger than {most} bytes: ask fewer questions at once")
    if request.scope["state"].get("whole"):  # it is here, and no clock is needed
        message = await request.receive()
        if message["type"] != "http.request":
            raise ClientDisconnect
        whole: bytes = message["body"]
        if len(whole) > most:
            raise large
        return whole
    declared = request.headers.get("content-length", "0")
    if declared.isdecimal() and int(declared) > most:
        raise large
    body = bytearray()
    try:
        async with asyncio.timeout(seconds):
            async for chunk in request.stream():
                body += chunk
                if len(body) > most:
                    raise large
    except TimeoutError as slow:
        raise _BodyError(408, f"the body was not there within {seconds:g} s: send it at once") from slow
    return bytes(body)


def _described(asked: type[messages.Request], reply: Any, also: str = "") -> dict[str, Any]:
    """Return how OpenAPI describes an endpoint that reads its body itself, and may reply in another type `also`."""
    more: dict[int, Any] = {200: {"content": {also: {"schema": {"type": "string"}}}}} if also else {}
    schema = asked.model_json_schema(ref_template="#/components/schemas/{model}")
    problems = {
        status: {"model": Problem} for status in (400, 401, 403, 408, 413, 415, 421, 422, 429, 500, 502, 503, 504)
    }
    return {
        "response_model": reply,
        "responses": {**problems, **more},
        "openapi_extra": {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}},
    }
