"""Answers as server-sent events: the passages first, then words as they come, then the reply as it is without a stream.

| event | data |
| --- | --- |
| `passages` | `snapshot`, `model`, and of each question its `passages`; a second one begins again |
| `text` | `answer`, the place of a question in the request, and the `text` that its answer grew by |
| `answer` | the whole reply, as `POST /answer` gives it; the last event |
| `error` | `detail`, one sentence, and the `status` that a reply without a stream has; the last event |
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

from rag_model.retrieve.retriever import hit_json
from rag_model.serving.answering.growing import Growing, Piece, Sources
from rag_model.serving.answering.work import Answered
from rag_model.serving.http.leaving import while_connected
from rag_model.serving.http.messages import AnswerRequest, answer_reply
from rag_model.serving.service import Service

TYPE = "text/event-stream"
_HEADERS = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}  # a proxy that gathers would hold the words back
_OK, _GONE = 200, 499
_REFUSED = re.compile(r"q=0(\.0*)?")  # of a media type in an Accept header: it is not wanted

Explain = Callable[[Exception], tuple[int, str]]  # the status of a failure, and its sentence


class AnswerStream(StreamingResponse):
    """Sends the events of one request as they come, until the last one is sent or the client has left."""

    def __init__(
        self,
        questions: Sequence[str],
        growing: Growing,
        answered: "asyncio.Task[Answered]",
        first: Sequence[Sources | Piece],
        explain: Explain,
    ) -> None:
        """Begin with what came first."""
        self._questions, self._growing, self._answered, self._explain = questions, growing, answered, explain
        self._status = _OK
        self.ended: Callable[[int], None] = lambda status: None  # called at the end, with what became of it
        self._events = self._told(first)
        super().__init__(self._events, media_type=TYPE, headers=_HEADERS)

    @classmethod
    async def begun(cls, service: Service, asked: AnswerRequest, client: str, explain: Explain) -> Self:
        """Ask, and wait until there is something to send; what fails before that is raised, and no stream begins.

        Raises:
            BookwheelError: see `Service.answer`.
        """
        growing = Growing()
        answered = asyncio.create_task(service.answer(asked.questions, asked.k, asked.expression, client, growing))
        answered.add_done_callback(partial(_end, growing))
        try:
            first = await growing.next()
            if not first:
                await answered
        except BaseException:
            answered.cancel()
            raise
        return cls(asked.questions, growing, answered, first, explain)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send."""
        try:
            with while_connected(scope["state"]):
                await self.stream_response(send)
        except ClientDisconnect:
            self._status = _GONE
        finally:
            self._answered.cancel()
            await self._events.aclose()
            self.ended(self._status)

    async def _told(self, new: Sequence[Sources | Piece]) -> AsyncGenerator[bytes, None]:
        try:
            while new:
                yield b"".join(_event_of(self._questions, one) for one in new)
                new = await self._growing.next()
            yield event("answer", answer_reply(await self._answered))
        except Exception as failed:  # the head is sent, so the failure has to be an event
            self._status, sentence = self._explain(failed)
            yield event("error", to_json({"status": self._status, "detail": sentence}))


def _end(growing: Growing, answered: "asyncio.Task[Answered]") -> None:
    growing.end()
    if not answered.cancelled():
        answered.exception()  # it is looked at, also where the client has left


def accepted(accept: str) -> bool:
    """Return whether an Accept header names event streams, and does not refuse them.

    >>> accepted("application/json, text/event-stream"), accepted("text/event-stream;q=0, application/json")
    (True, False)
    """
    for one in accept.lower().split(","):
        kind, *parameters = (part.strip() for part in one.split(";"))
        if kind == TYPE:
            return not any(_REFUSED.fullmatch(part) for part in parameters)
    return False


def event(name: str, data: bytes) -> bytes:
    r"""Return one event; JSON holds no line break.

    >>> event("text", b'{"answer":0}')
    b'event: text\ndata: {"answer":0}\n\n'
    """
    return b"event: %b\ndata: %b\n\n" % (name.encode(), data)


def _event_of(questions: Sequence[str], new: Sources | Piece) -> bytes:
    if isinstance(new, Piece):
        return event("text", to_json({"answer": new.place, "text": new.text}))
    answers = [
        {"question": question, "passages": [hit_json(hit) for hit in hits]}
        for question, hits in zip(questions, new.hits, strict=True)
    ]
    return event("passages", to_json({"snapshot": new.snapshot, "model": new.model, "answers": answers}))
