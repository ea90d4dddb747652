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

A failure is `{"detail": "one sentence"}`: 400 and 422 a wrong request, 408 and 413 a slow or large body,
429 a full queue, 503 no open snapshot, 504 no answer in time, 500 an error of the service.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import asdict
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse, PlainTextResponse
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send

from rag_model.errors import BookwheelError, UsageError
from rag_model.serving.answering.batcher import BusyError, ClosingError, LateError
from rag_model.serving.following.desk import NotReadyError
from rag_model.serving.http import messages, page
from rag_model.serving.http.messages import (
    AnswerReply,
    AnswerRequest,
    MalformedError,
    Problem,
    SearchReply,
    SearchRequest,
)
from rag_model.serving.service import Service
from rag_model.serving.watching.observer import tell

_LOG = logging.getLogger(__name__)
_STATUS: tuple[tuple[type[BookwheelError], int], ...] = (  # the first that fits
    (MalformedError, 422),
    (UsageError, 400),
    (BusyError, 429),
    (ClosingError, 503),
    (NotReadyError, 503),
    (LateError, 504),
)
_AGAIN = {429: "1", 503: "2"}  # seconds until it is worth asking again
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

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.direct: dict[str, Callable[[Request], Awaitable[Response]]] = {}  # by path, of POST

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        endpoint = self.direct.get(scope["path"]) if scope["type"] == "http" and scope["method"] == "POST" else None
        if endpoint is None:
            await super().__call__(scope, receive, send)
        else:
            response = await endpoint(Request(scope, receive))
            await response(scope, receive, send)


def create_app(service: Service, metrics: Callable[[], bytes] | None = None, media_type: str = "text/plain") -> FastAPI:
    """Return the ASGI application of a service; `metrics` gives what /metrics replies, of type `media_type`."""
    about = "Passages and answers from the snapshot that a ref names."
    app = _App(title="bookwheel", description=about, docs_url=None, redoc_url=None)
    _ask(app, service)
    _state(app, service)
    app.include_router(page.router)
    if metrics is not None:
        exposition = metrics

        @app.get("/metrics", response_class=PlainTextResponse)
        def exposed() -> Response:
            """Return the metrics of this service in Prometheus' text format."""
            return Response(exposition(), media_type=media_type)

    return app


def _ask(app: _App, service: Service) -> None:
    @app.post("/search", **_described(SearchRequest, SearchReply))
    async def search(request: Request) -> Response:
        """Find passages for questions, best first."""

        async def reply(asked: SearchRequest) -> bytes:
            found = await service.search(asked.questions, asked.k, asked.expression)
            return messages.search_reply(asked.questions, found)

        return await _replied(service, "search", request, SearchRequest, reply)

    @app.post("/answer", **_described(AnswerRequest, AnswerReply))
    async def answer(request: Request) -> Response:
        """Answer questions with the service's model, each answer with the passages it was read from."""

        async def reply(asked: AnswerRequest) -> bytes:
            return messages.answer_reply(await service.answer(asked.questions, asked.k, asked.expression))

        return await _replied(service, "answer", request, AnswerRequest, reply)

    app.direct = {"/search": search, "/answer": answer}


def _state(app: FastAPI, service: Service) -> None:
    @app.get("/healthz")
    async def healthz() -> dict[str, str]:
        """Say that the process answers."""
        return {"status": "alive"}

    @app.get("/readyz", responses={503: {"model": Problem}})
    async def readyz() -> Response:
        """Say whether questions can be answered."""
        if service.ready:
            return JSONResponse({"status": "ready"})
        why = "the service is ending" if service.draining else _waiting(service)
        return _problem(503, why)

    @app.get("/snapshot", response_model=messages.SnapshotReply, responses={503: {"model": Problem}})
    async def snapshot() -> Response:
        """Say what is served, and what was refused."""
        try:
            return JSONResponse(_snapshot(service))
        except NotReadyError:
            return _problem(503, _waiting(service))


def _snapshot(service: Service) -> dict[str, Any]:
    refusal = service.follower.refusal
    with service.desk.edition() as edition:
        named = edition.named
        return {
            "snapshot": named.snapshot,
            "ref": named.ref,
            "number": named.number or None,
            "created_at": named.created_at or None,
            "passages": edition.snapshot.n,
            "indexes": list(edition.indexes),
            "retrievers": list(edition.retrievers),
            "model": edition.model.id if edition.model else None,
            "refused": None if refusal is None else {k: v for k, v in asdict(refusal).items() if k != "ref"},
            "store_problem": service.follower.problem or None,
        }


def _waiting(service: Service) -> str:
    refusal = service.follower.refusal
    reason = service.follower.problem or (refusal.reason if refusal else "it is on its way")
    return f"no snapshot is open yet: {reason}"


async def _replied(service: Service, verb: str, request: Request, kind: Any, reply: Any) -> Response:
    began, asked = time.perf_counter(), 0
    try:
        body = await _body(request, service)
        began = time.perf_counter()
        read = messages.read_request(kind, body, service.settings)
        asked = len(read.questions)
        response = Response(await reply(read), media_type="application/json")
    except ClientDisconnect:
        response = Response(status_code=_GONE)
    except _BodyError as broken:
        response = _problem(broken.status, str(broken), {"Connection": "close"})
    except BookwheelError as error:
        response = _failed(error)
    except Exception:
        _LOG.exception("/%s failed", verb)
        response = _problem(500, "the service could not answer: its log says why")
    tell(service.observer.replied, verb, response.status_code, asked, time.perf_counter() - began)
    return response


def _failed(error: BookwheelError) -> Response:
    status = next((status for kind, status in _STATUS if isinstance(error, kind)), 500)
    if status == 500:
        _LOG.error("a request failed: %s", error)
        return _problem(500, "the service could not answer: its log says why")
    return _problem(status, str(error))


def _problem(status: int, sentence: str, headers: dict[str, str] | None = None) -> Response:
    again = {"Retry-After": _AGAIN[status]} if status in _AGAIN else {}
    return JSONResponse({"detail": sentence}, status, {**again, **(headers or {})})


async def _body(request: Request, service: Service) -> bytes:
    """Read a body while it is small enough and comes fast enough."""
    most, seconds = service.settings.max_body_bytes, service.settings.body_seconds
    large = _BodyError(413, f"the body is larger than {most} bytes: ask fewer questions at once")
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


def _described(asked: type[messages.Request], reply: Any) -> dict[str, Any]:
    """Return how OpenAPI describes an endpoint that reads its body itself, under its own limits."""
    schema = asked.model_json_schema(ref_template="#/components/schemas/{model}")
    problems = {status: {"model": Problem} for status in (400, 408, 413, 422, 429, 500, 503, 504)}
    return {
        "response_model": reply,
        "responses": problems,
        "openapi_extra": {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}},
    }
