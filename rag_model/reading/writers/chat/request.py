"""One chat completion: streamed, within its time and its bytes."""

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any

import httpx

from rag_model.http_client import http_client
from rag_model.reading.writers.chat.events import DONE, EventError, Events, Reply
from rag_model.reading.writers.chat.mask import Mask
from rag_model.reading.writers.chat.place import Place
from rag_model.reading.writers.chat.problems import FailedTryError, Problems
from rag_model.reading.writers.chat.settings import ChatSettings
from rag_model.reading.writers.chat.tries import retry_after, with_tries

_ERROR_BYTES = 1 << 16  # of the body of a refusal
_CLIENT = "bookwheel"

Grow = Callable[[str], None]


class Chat:
    """Asks one model of an endpoint. All calls must come from one event loop."""

    def __init__(self, place: Place, model: str, settings: ChatSettings) -> None:
        """Prepare; nothing is asked yet."""
        self._place, self._model, self._settings = place, model, settings
        self._problems = Problems(place, model)
        self._free = asyncio.Semaphore(settings.concurrency)
        key = {"Authorization": f"Bearer {place.key}"} if place.key else {}
        self._client = http_client(
            httpx.AsyncClient,
            headers={"User-Agent": _CLIENT, "Accept": "text/event-stream, application/json", **key},
            timeout=httpx.Timeout(None, connect=settings.connect_seconds),
            follow_redirects=False,  # a redirect would carry the prompt, and maybe the key, to another host
        )

    async def complete(self, messages: list[dict[str, str]], grow: Grow | None = None) -> Reply:
        """Return the completion of a chat; `grow` is called with each piece of its text.

        A stream that breaks is begun again only where nothing of it has been passed on.

        Raises:
            FailedTryError: it failed, and trying again did not help.
        """
        async with self._free:
            late = self._problems.late("gave no whole answer", self._settings.whole_seconds)
            return await with_tries(self._settings, lambda: self._tried(messages, grow), late)

    async def close(self) -> None:
        """Close the connections."""
        await self._client.aclose()

    async def _tried(self, messages: list[dict[str, str]], grow: Grow | None) -> Reply:
        reply = Reply(Mask(self._place.key))
        try:
            await self._stream(messages, reply, grow)
        except FailedTryError as failed:
            if grow is not None and reply.parts:
                raise FailedTryError(failed.error) from failed
            raise
        return reply

    async def _stream(self, messages: list[dict[str, str]], reply: Reply, grow: Grow | None) -> None:
        request = self._client.build_request("POST", f"{self._place.url}/chat/completions", json=self._body(messages))
        try:
            async with asyncio.timeout(self._settings.first_seconds) as first:
                response = await self._client.send(request, stream=True)
                try:
                    await self._check(response)
                    async for text in self._texts(response, reply):
                        first.reschedule(None)
                        if grow is not None:
                            grow(text)
                finally:
                    await response.aclose()
        except TimeoutError:
            raise self._problems.late("wrote no word", self._settings.first_seconds) from None
        except (httpx.HTTPError, httpx.StreamError, httpx.InvalidURL, OSError) as broken:
            raise (self._problems.cut() if reply.parts else self._problems.unreachable(broken)) from broken
        if not reply.reason:
            raise self._problems.cut()

    async def _texts(self, response: httpx.Response, reply: Reply) -> AsyncIterator[str]:
        """Yield what the reply grows by, until its end."""
        async for data in self._data(response):
            if data == DONE:
                reply.reason = reply.reason or "stop"
                break
            if text := self._take(reply, data):
                yield text
        if text := reply.end():
            yield text

    async def _check(self, response: httpx.Response) -> None:
        """Refuse a reply that is no answer."""
        if response.is_success:
            return
        if response.is_redirect:
            raise self._problems.redirects(response.headers.get("location", ""))
        body = bytearray()
        async for piece in response.aiter_bytes():
            body += piece
            if len(body) > _ERROR_BYTES:
                break
        raise self._problems.status(response.status_code, bytes(body), retry_after(response.headers.get("retry-after")))

    async def _data(self, response: httpx.Response) -> AsyncIterator[str]:
        """Yield the data of each event; of an endpoint that does not stream, its whole reply."""
        streamed = "text/event-stream" in response.headers.get("content-type", "")
        events, whole, size = Events(), bytearray(), 0
        async for piece in response.aiter_bytes():
            size += len(piece)
            if size > self._settings.max_reply_bytes:
                raise self._problems.large(self._settings.max_reply_bytes)
            if not streamed:
                whole += piece
                continue
            for data in events.feed(piece):
                yield data
        if not streamed:
            yield whole.decode("utf-8", "replace")
            return
        for data in events.end():
            yield data

    def _take(self, reply: Reply, data: str) -> str:
        try:
            return reply.take(data)
        except EventError as problem:
            raise self._problems.event(str(problem)) from None
        except (ValueError, KeyError, IndexError, TypeError, AttributeError) as odd:
            raise self._problems.malformed(f"{type(odd).__name__}: {odd}") from odd

    def _body(self, messages: list[dict[str, str]]) -> Mapping[str, Any]:
        asked = self._settings
        optional = {
            "temperature": asked.temperature,
            "top_p": asked.top_p if asked.temperature and asked.top_p < 1 else None,
            "seed": asked.seed,
            "logprobs": asked.logprobs or None,
        }
        return {
            "model": self._model,
            "messages": messages,
            asked.length_field: asked.max_new_tokens,
            "stream": True,
            "stream_options": {"include_usage": True},  # else a stream does not tell the tokens
            **{name: value for name, value in optional.items() if value is not None},
        }
