"""Request a chat completion: streamed, retried, and bounded in time and bytes."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing, suppress
from typing import Any

import httpx

from rag_model.endpoint import USER_AGENT, Endpoint, EndpointErrors, FailedAttemptError, parse_retry_after, retry
from rag_model.http_client import ReplyTooLargeError, create_http_client, iter_body_async
from rag_model.reading.writers.chat_events import DONE, ChatReply, EventParser, KeyMask, StreamedError
from rag_model.reading.writers.chat_settings import ChatSettings

_MAX_ERROR_BYTES = 1 << 16  # of an error body
_INVALID_REQUEST = frozenset((400, 422))
OnText = Callable[[str], None]


class ChatClient:
    """Sends requests to one model of an endpoint. All calls must come from one event loop."""

    def __init__(self, endpoint: Endpoint, model: str, settings: ChatSettings) -> None:
        """Create the HTTP client; sends nothing."""
        self._endpoint, self._model, self._settings = endpoint, model, settings
        self._errors = EndpointErrors(endpoint, model)
        self._length_field, self._requests_usage = settings.length_field, True
        self._slots = asyncio.Semaphore(settings.concurrency)
        authorization = {"Authorization": f"Bearer {endpoint.key}"} if endpoint.key else {}
        self._client = create_http_client(
            httpx.AsyncClient,
            headers={"User-Agent": USER_AGENT, "Accept": "text/event-stream, application/json", **authorization},
            timeout=httpx.Timeout(None, connect=settings.connect_seconds),
            follow_redirects=False,  # a redirect could send the prompt and the key to another host
        )

    async def complete(self, messages: list[dict[str, str]], on_text: OnText | None = None) -> ChatReply:
        """Return the completion of a chat; `on_text` is called with each piece of its text.

        A broken stream is retried only if `on_text` has not been called.

        Raises:
            FailedAttemptError: the request failed, and retries did not help.
        """
        async with self._slots:
            timeout_error = self._errors.timed_out("gave no whole answer", self._settings.whole_seconds)
            return await retry(self._settings, lambda: self._attempt(messages, on_text), timeout_error)

    async def close(self) -> None:
        """Close the connections."""
        await self._client.aclose()

    async def _attempt(self, messages: list[dict[str, str]], on_text: OnText | None) -> ChatReply:
        reply = ChatReply(KeyMask(self._endpoint.key))
        try:
            while not await self._stream(self._build_body(messages), reply, on_text):
                pass  # send the request again, without the field that the endpoint refused
        except FailedAttemptError as failed_attempt:
            if on_text is not None and reply.parts:
                raise FailedAttemptError(failed_attempt.error) from failed_attempt
            raise
        return reply

    async def _stream(self, body: Mapping[str, Any], reply: ChatReply, on_text: OnText | None) -> bool:
        """Send a request and read the reply.

        Return False if the endpoint refused a field that `_build_body` now leaves out or renames.
        """
        request = self._client.build_request("POST", f"{self._endpoint.url}/chat/completions", json=body)
        try:
            async with asyncio.timeout(self._settings.first_seconds) as first_timeout:
                response = await self._client.send(request, stream=True)
                try:
                    if not response.is_success:
                        return await self._handle_error_status(response, body)
                    async with aclosing(self._iter_texts(response, reply)) as texts:
                        async for text in texts:
                            if reply.has_begun:
                                first_timeout.reschedule(None)
                            if on_text is not None and text:
                                on_text(text)
                finally:
                    await response.aclose()
        except TimeoutError:
            raise self._errors.timed_out("wrote no word", self._settings.first_seconds) from None
        except ReplyTooLargeError as error:
            raise self._errors.reply_too_large(self._settings.reply_limit) from error
        except httpx.DecodingError as error:
            raise self._errors.not_expected(error) from error
        except (httpx.HTTPError, httpx.StreamError, httpx.InvalidURL, OSError) as error:
            raise (self._errors.reply_incomplete() if reply.has_begun else self._errors.unreachable(error)) from error
        if not reply.reason:
            raise self._errors.reply_incomplete()
        return True

    async def _iter_texts(self, response: httpx.Response, reply: ChatReply) -> AsyncGenerator[str]:
        """Yield the text pieces of the reply; "" for an event without text.

        The answer is complete when its `finish_reason` has arrived, so errors in the rest of the
        stream are ignored.
        """
        try:
            async with aclosing(self._iter_events(response)) as events:
                async for data in events:
                    if data == DONE:
                        reply.reason = reply.reason or "stop"
                        break
                    yield self._add_event(reply, data)
        except (httpx.HTTPError, httpx.StreamError, OSError, ReplyTooLargeError, FailedAttemptError):
            if not reply.reason:
                raise
        yield reply.flush()

    async def _handle_error_status(self, response: httpx.Response, request_body: Mapping[str, Any]) -> bool:
        """Raise an error for an error status.

        Return False instead if the endpoint only refuses a field that can be left out or renamed;
        the next request does so.
        """
        if response.is_redirect:
            raise self._errors.redirect(response.headers.get("location", ""))
        body = bytearray()
        with suppress(ReplyTooLargeError):
            async with aclosing(iter_body_async(response, _MAX_ERROR_BYTES)) as chunks:
                async for chunk in chunks:
                    body += chunk
        if response.status_code in _INVALID_REQUEST:
            if "stream_options" in request_body and b"stream_options" in body:
                self._requests_usage = False
                return False
            if "max_tokens" in request_body and b"max_completion_tokens" in body:
                self._length_field = "max_completion_tokens"
                return False
        raise self._errors.bad_status(
            response.status_code, bytes(body), parse_retry_after(response.headers.get("retry-after"))
        )

    async def _iter_events(self, response: httpx.Response) -> AsyncGenerator[str]:
        """Yield the data of each event; for an endpoint that does not stream, its whole reply."""
        is_streamed = "text/event-stream" in response.headers.get("content-type", "")
        parser, whole_reply = EventParser(), bytearray()
        async with aclosing(iter_body_async(response, self._settings.reply_limit)) as chunks:
            async for chunk in chunks:
                if not is_streamed:
                    whole_reply += chunk
                    continue
                for data in parser.feed(chunk):
                    yield data
        if not is_streamed:
            yield whole_reply.decode("utf-8", "replace")
            return
        for data in parser.end():
            yield data

    def _add_event(self, reply: ChatReply, data: str) -> str:
        try:
            return reply.add_event(data)
        except StreamedError as error:
            raise self._errors.streamed_error(str(error)) from None
        except (ArithmeticError, ValueError, LookupError, TypeError, AttributeError) as error:
            raise self._errors.not_expected(f"{type(error).__name__}: {error}") from error

    def _build_body(self, messages: list[dict[str, str]]) -> Mapping[str, Any]:
        settings = self._settings
        optional = {
            "temperature": settings.temperature,
            "top_p": settings.top_p if settings.temperature and settings.top_p < 1 else None,
            "seed": settings.seed,
            "logprobs": settings.logprobs or None,
        }
        return {
            "model": self._model,
            "messages": messages,
            self._length_field: settings.token_limit,
            "stream": True,
            # Without this option, a stream has no token counts.
            **({"stream_options": {"include_usage": True}} if self._requests_usage else {}),
            **{name: value for name, value in optional.items() if value is not None},
        }
