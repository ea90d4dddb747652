"""Stream answers as server-sent events: passages, text as it is decoded, the whole reply.

| event | data |
| --- | --- |
| `passages` | `snapshot`, `model`, and the `passages` of each question; it replaces all earlier events |
| `text` | `answer`, the index of a question, and new `text` at the end of its answer |
| `answer` | the whole reply of `POST /answer`; the last event |
| `error` | `detail`, one sentence, and the HTTP `status` of such an error; the last event |
"""

import asyncio
import re
from collections.abc import AsyncGenerator, Callable, Sequence
from functools import partial
from typing import Self

from fastapi.responses import StreamingResponse
from pydantic_core import to_json
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send

from rag_model.serving.answering.execution import AnswerResult
from rag_model.serving.answering.progress import AnswerDelta, AnswerProgress, RetrievedPassages
from rag_model.serving.http.connections import cancel_on_disconnect
from rag_model.serving.http.messages import AnswerRequest, format_answer_reply
from rag_model.serving.service import Service

EVENT_STREAM_TYPE = "text/event-stream"
# forbids proxies to buffer the stream
_HEADERS = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
_STATUS_OK, _STATUS_CLIENT_CLOSED = 200, 499
_ZERO_QUALITY = re.compile(r"q=0(\.0*)?")  # in an Accept header: the media type is not acceptable

# returns the HTTP status of an error, and its message
ErrorExplainer = Callable[[Exception], tuple[int, str]]


class AnswerStream(StreamingResponse):
    """Sends the events of one request, until the last one is sent or the client disconnects."""

    def __init__(
        self,
        questions: Sequence[str],
        progress: AnswerProgress,
        task: "asyncio.Task[AnswerResult]",
        first_updates: Sequence[RetrievedPassages | AnswerDelta],
        explain_error: ErrorExplainer,
    ) -> None:
        """Prepare to send `first_updates` and all further ones; `start` creates the arguments."""
        self._questions, self._progress, self._task, self._explain_error = (
            questions,
            progress,
            task,
            explain_error,
        )
        self._status = _STATUS_OK
        self.on_end: Callable[[int], None] = lambda status: None  # receives the final HTTP status
        self._events = self._iter_events(first_updates)
        super().__init__(self._events, media_type=EVENT_STREAM_TYPE, headers=_HEADERS)

    @classmethod
    async def start(cls, service: Service, request: AnswerRequest, client: str, explain_error: ErrorExplainer) -> Self:
        """Submit a request and wait for its first update; raise errors that occur before.

        Raises:
            BookwheelError: As `Service.answer`.
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
            self._status = _STATUS_CLIENT_CLOSED
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
        except Exception as error:  # the response head is sent already, so the error must be an event
            self._status, detail = self._explain_error(error)
            yield format_event("error", to_json({"status": self._status, "detail": detail}))


def _finish_progress(progress: AnswerProgress, task: "asyncio.Task[AnswerResult]") -> None:
    progress.finish()
    if not task.cancelled():
        task.exception()  # retrieves the exception, so that asyncio does not log it as lost


def accepts_event_stream(accept: str) -> bool:
    """Return whether an Accept header accepts event streams.

    >>> accepts_event_stream("application/json, text/event-stream")
    True
    >>> accepts_event_stream("text/event-stream;q=0, application/json")
    False
    """
    for media_range in accept.lower().split(","):
        media_type, *parameters = (part.strip() for part in media_range.split(";"))
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
        return format_event("text", to_json({"answer": update.question_index, "text": update.text}))
    answers = [
        {"question": question, "passages": [hit.to_json() for hit in hits]}
        for question, hits in zip(questions, update.hits, strict=True)
    ]
    return format_event(
        "passages",
        to_json({"snapshot": update.snapshot, "model": update.model, "answers": answers}),
    )
