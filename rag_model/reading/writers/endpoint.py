"""A writer that uses a model behind a chat-completions endpoint, such as OpenAI's, vLLM's or
llama.cpp's.

The writer needs only an HTTP client. The base URL and the key come from the environment
(`rag_model.endpoint`). The key never appears in a message, a record or a log, because it is masked
if the endpoint repeats it.
"""

import asyncio
import secrets
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from functools import partial
from typing import Any

import httpx

from rag_model.encoders.files import ENDPOINT_PREFIX
from rag_model.endpoint import (
    INVALID_REQUEST_STATUSES,
    Endpoint,
    EndpointErrors,
    EventLoopThread,
    FailedAttemptError,
    create_endpoint_client,
    gather_or_cancel,
    read_reply,
    retry,
)
from rag_model.errors import UsageError
from rag_model.http_client import ReplyTooLargeError, iter_body_async, parse_retry_after
from rag_model.reading.answer import AnswerProblem, TokenUsage
from rag_model.reading.reader import StopCheck, TextCallback
from rag_model.reading.writers.chat_events import DONE, ChatReply, EventParser, KeyMask, StreamedError
from rag_model.reading.writers.chat_settings import CHAT_TEMPLATE_TOKENS, ChatSettings
from rag_model.reading.writers.writer import Completion, Prompt, describe_missing_answer
from rag_model.tokenizer import explain_tokenizer_errors, load_tokenizer_file

# If a server counts less than this share of a prompt's tokens, it has truncated the prompt.
_MIN_READ_SHARE = 0.8
OnText = Callable[[str], None]


class EndpointWriter:
    """A `Writer` with a chat-completions endpoint. Thread-safe; `close` closes the connections."""

    def __init__(self, model: str, settings: ChatSettings | None = None, endpoint: Endpoint | None = None) -> None:
        """Prepare requests for `model`, the name that the endpoint uses; nothing is sent yet.

        Raises:
            UsageError: the address, key or proxy in the environment is invalid, or the model has no
                name.
            InputError: the tokenizer cannot be read.
        """
        if not model.strip():
            raise UsageError("the endpoint's model has no name: give one such as openai:gpt-4o-mini")
        self.model, self.settings = model, settings or ChatSettings.from_environment()
        self.endpoint = endpoint or Endpoint.from_environment()
        tokenizer_file = self.settings.tokenizer
        self._tokenizer: Any = None if tokenizer_file is None else load_tokenizer_file(tokenizer_file)
        self._instance_id = secrets.token_hex(8)
        self._errors = EndpointErrors(self.endpoint, model)
        self._chat = ChatClient(self.endpoint, model, self.settings)
        self._loop = EventLoopThread()

    @property
    def id(self) -> str:
        """The name of the model, with the prefix of endpoint models, as a user gives it."""
        return f"{ENDPOINT_PREFIX}{self.model}"

    @property
    def max_prompt_tokens(self) -> int:
        """Maximum tokens of a prompt: the context without the answer and the chat template."""
        return self.settings.context - self.settings.token_limit - CHAT_TEMPLATE_TOKENS

    @property
    def decides(self) -> dict[str, Any]:
        """The settings that determine this writer's answers, for memo keys; without the API key."""
        # A sampled answer must not be reused for another writer, so the memo key contains the id of
        # this object.
        instance_fields = {} if self.settings.is_repeatable else {"once": self._instance_id}
        return {**describe_endpoint(self.model, self.settings, self.endpoint), **instance_fields}

    @explain_tokenizer_errors()
    def count_tokens(self, texts: Sequence[str]) -> list[int]:
        """Count the tokens of each text with the model's tokenizer; without a tokenizer, return the
        number of bytes, which is an upper bound.
        """
        if self._tokenizer is None:
            return [len(text.encode("utf-8", "replace")) for text in texts]
        return [len(encoding.ids) for encoding in self._tokenizer.encode_batch(list(texts), add_special_tokens=False)]

    def write(
        self, prompts: Sequence[Prompt], should_stop: StopCheck | None = None, on_text: TextCallback | None = None
    ) -> list[Completion]:
        """Complete each prompt, in order, with concurrent requests.

        Raises:
            UsageError: a prompt is longer than `max_prompt_tokens`, or than the model's context.
            StoppedError: `should_stop` returned True.
            EndpointError: the endpoint failed, and retries did not help.
        """
        self._check_prompt_lengths(prompts)
        try:
            replies = self._loop.run(partial(self._complete_all, prompts, on_text is not None), should_stop, on_text)
        except FailedAttemptError as failed_attempt:
            raise failed_attempt.error from failed_attempt.__cause__
        return [self._to_completion(prompt, reply) for prompt, reply in zip(prompts, replies, strict=True)]

    def log_likelihood(self, prompts: Sequence[Prompt], texts: Sequence[str]) -> list[float]:
        """Raise an error, because a chat endpoint returns likelihoods only of texts that it
        generates.

        Raises:
            UsageError: always.
        """
        raise UsageError(f"{self.id} gives no likelihood of a given text: use a model in memory")

    def close(self) -> None:
        """Cancel all requests and close the connections."""
        self._loop.close(self._chat.close)

    def _check_prompt_lengths(self, prompts: Sequence[Prompt]) -> None:
        n_tokens = max(self._count_prompt_tokens(prompts), default=0)
        if n_tokens > self.max_prompt_tokens:
            raise UsageError(
                f"a prompt of {n_tokens} tokens is longer than the {self.max_prompt_tokens} that "
                f"{self.id} has room for: give fewer passages, or set BOOKWHEEL_LLM_CONTEXT, or "
                "BOOKWHEEL_LLM_TOKENIZER for an exact count"
            )

    def _count_prompt_tokens(self, prompts: Sequence[Prompt]) -> list[int]:
        token_counts = self.count_tokens([text for prompt in prompts for text in (prompt.system, prompt.user)])
        return [system + user for system, user in zip(token_counts[::2], token_counts[1::2], strict=True)]

    async def _complete_all(
        self, prompts: Sequence[Prompt], streams_text: bool, send_text: Callable[[int, str], None]
    ) -> list[ChatReply]:
        return await gather_or_cancel(
            self._chat.complete(_to_messages(prompt), partial(send_text, i) if streams_text else None)
            for i, prompt in enumerate(prompts)
        )

    def _to_completion(self, prompt: Prompt, reply: ChatReply) -> Completion:
        prompt_tokens, new_tokens = reply.usage or self.count_tokens([prompt.system + prompt.user, reply.text])
        prices = self.settings.prices
        usage = TokenUsage(
            prompt_tokens,
            new_tokens,
            None if prices is None else prices.compute_cost(prompt_tokens, new_tokens),
            estimated=reply.usage is None,
        )
        text = reply.text
        answer_problem = self._find_problem(prompt, reply, text)
        return Completion(text if text.strip() else "", usage, reply.ended, reply.log_likelihood, answer_problem)

    def _find_problem(self, prompt: Prompt, reply: ChatReply, text: str) -> AnswerProblem | None:
        """Return the reason why the text is empty or doubtful; None for a good answer."""
        if reply.tool_names or reply.finish_reason in {"tool_calls", "function_call"}:
            tool_names = self._errors.quote(", ".join(dict.fromkeys(reply.tool_names)))
            return AnswerProblem("tool_call", f"the model called a tool{tool_names} instead of answering")
        if reply.refusal:
            return AnswerProblem("refused", f"the model refused to answer{self._errors.quote(reply.refusal)}")
        if reply.finish_reason == "content_filter":
            return AnswerProblem("filtered", "the endpoint's content filter stopped the answer")
        if text.strip():
            return self._detect_truncation(prompt, reply)
        if reply.has_reasoning or not reply.ended:
            return describe_missing_answer(self.settings.token_limit, ended=reply.ended)
        return AnswerProblem("empty", "the model generated nothing: ask again, or choose another model")

    def _detect_truncation(self, prompt: Prompt, reply: ChatReply) -> AnswerProblem | None:
        """Return a problem if the endpoint counted far fewer tokens than the prompt has; otherwise
        None.
        """
        min_tokens = _count_min_tokens(prompt) if self._tokenizer is None else self._count_prompt_tokens([prompt])[0]
        if reply.usage is None or reply.usage[0] >= _MIN_READ_SHARE * min_tokens:
            return None
        return AnswerProblem(
            "prompt_truncated",
            f"the endpoint read {reply.usage[0]} tokens of a prompt of at least {min_tokens}: give "
            "its server a larger context, or set BOOKWHEEL_LLM_CONTEXT to the server's context",
        )


def _count_min_tokens(prompt: Prompt) -> int:
    """Return a minimum number of tokens of a prompt: one per word, as tokens rarely span words."""
    return len(prompt.system.split()) + len(prompt.user.split())


def describe_endpoint(model: str, settings: ChatSettings, endpoint: Endpoint) -> dict[str, Any]:
    """Return the identity of an endpoint's model: its address, its name and the settings of
    requests.
    """
    return {"endpoint": endpoint.url, "model": model, "settings": settings.decides()}


def _to_messages(prompt: Prompt) -> list[dict[str, str]]:
    system_messages = [{"role": "system", "content": prompt.system}] if prompt.system else []
    return [*system_messages, {"role": "user", "content": prompt.user}]


class ChatClient:
    """Sends requests to one model of an endpoint. All calls must come from one event loop."""

    def __init__(self, endpoint: Endpoint, model: str, settings: ChatSettings) -> None:
        """Create the HTTP client; nothing is sent yet."""
        self._endpoint, self._model, self._settings = endpoint, model, settings
        self._errors = EndpointErrors(endpoint, model)
        self._length_field, self._requests_usage = settings.length_field, True
        self._semaphore = asyncio.Semaphore(settings.concurrency)
        accepted_types = "text/event-stream, application/json"
        self._client = create_endpoint_client(endpoint, accepted_types, settings.connect_seconds)

    async def complete(self, messages: list[dict[str, str]], on_text: OnText | None = None) -> ChatReply:
        """Return the completion of a chat; `on_text` is called with each fragment of its text.

        A broken stream is retried only if `on_text` has not been called.

        Raises:
            FailedAttemptError: the request failed, and retries did not help.
        """
        async with self._semaphore:
            timeout_error = self._errors.timeout_error("gave no whole answer", self._settings.whole_seconds)
            return await retry(self._settings, lambda: self._attempt_completion(messages, on_text), timeout_error)

    async def close(self) -> None:
        """Close the connections."""
        await self._client.aclose()

    async def _attempt_completion(self, messages: list[dict[str, str]], on_text: OnText | None) -> ChatReply:
        reply = ChatReply(KeyMask(self._endpoint.key))
        try:
            while not await self._stream_reply(self._build_body(messages), reply, on_text):
                pass  # repeat the request without the refused field
        except FailedAttemptError as failed_attempt:
            if on_text is not None and reply.text_parts:
                raise FailedAttemptError(failed_attempt.error) from failed_attempt
            raise
        return reply

    async def _stream_reply(self, body: Mapping[str, Any], reply: ChatReply, on_text: OnText | None) -> bool:
        """Send a request and read the reply.

        Return False if the endpoint refused a field that `_build_body` now omits or renames.
        """
        request = self._client.build_request("POST", f"{self._endpoint.url}/chat/completions", json=body)
        try:
            async with asyncio.timeout(self._settings.first_seconds) as first_text_timeout:
                response = await self._client.send(request, stream=True)
                try:
                    if not response.is_success:
                        return await self._handle_error_status(response, body)
                    async with aclosing(self._iter_texts(response, reply)) as streamed_texts:
                        async for text in streamed_texts:
                            if reply.has_begun:
                                first_text_timeout.reschedule(None)
                            if on_text is not None and text:
                                on_text(text)
                finally:
                    await response.aclose()
        except TimeoutError:
            raise self._errors.timeout_error("sent no text", self._settings.first_seconds) from None
        except ReplyTooLargeError as error:
            raise self._errors.reply_size_error(self._settings.reply_limit) from error
        except httpx.DecodingError as error:
            raise self._errors.protocol_error(error) from error
        except (httpx.HTTPError, httpx.StreamError, httpx.InvalidURL, OSError) as error:
            raise (self._errors.truncated_error() if reply.has_begun else self._errors.network_error(error)) from error
        if not reply.finish_reason:
            raise self._errors.truncated_error()
        return True

    async def _iter_texts(self, response: httpx.Response, reply: ChatReply) -> AsyncGenerator[str]:
        """Yield the text fragments of the reply; "" for an event without text.

        The answer is complete when its `finish_reason` has arrived, so errors in the rest of the
        stream are ignored.
        """
        try:
            async with aclosing(self._iter_events(response)) as event_texts:
                async for event_text in event_texts:
                    if event_text == DONE:
                        reply.finish_reason = reply.finish_reason or "stop"
                        break
                    yield self._add_event(reply, event_text)
        except (httpx.HTTPError, httpx.StreamError, OSError, ReplyTooLargeError, FailedAttemptError):
            if not reply.finish_reason:
                raise
        yield reply.flush()

    async def _handle_error_status(self, response: httpx.Response, request_body: Mapping[str, Any]) -> bool:
        """Raise an error for an error status.

        Return False instead if the endpoint only refuses a field that the next request omits or
        renames.
        """
        if response.is_redirect:
            raise self._errors.redirect_error(response.headers.get("location", ""))
        error_body = await read_reply(response, 0)
        if response.status_code in INVALID_REQUEST_STATUSES:
            if "stream_options" in request_body and b"stream_options" in error_body:
                self._requests_usage = False
                return False
            if "max_tokens" in request_body and b"max_completion_tokens" in error_body:
                self._length_field = "max_completion_tokens"
                return False
        wait_seconds = parse_retry_after(response.headers.get("retry-after"))
        raise self._errors.status_error(response.status_code, error_body, wait_seconds)

    async def _iter_events(self, response: httpx.Response) -> AsyncGenerator[str]:
        """Yield the data of each event, or the whole reply of an endpoint that does not stream."""
        is_streamed = "text/event-stream" in response.headers.get("content-type", "")
        parser, whole_reply = EventParser(), bytearray()
        async with aclosing(iter_body_async(response, self._settings.reply_limit)) as body_chunks:
            async for body_chunk in body_chunks:
                if not is_streamed:
                    whole_reply += body_chunk
                    continue
                for event_text in parser.feed(body_chunk):
                    yield event_text
        if not is_streamed:
            yield whole_reply.decode("utf-8", "replace")
            return
        for event_text in parser.finish():
            yield event_text

    def _add_event(self, reply: ChatReply, event_text: str) -> str:
        try:
            return reply.add_event(event_text)
        except StreamedError as error:
            raise self._errors.stream_error(str(error)) from None
        except (ArithmeticError, ValueError, LookupError, TypeError, AttributeError) as error:
            raise self._errors.protocol_error(f"{type(error).__name__}: {error}") from error

    def _build_body(self, messages: list[dict[str, str]]) -> Mapping[str, Any]:
        settings = self._settings
        optional_fields = {
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
            **{name: value for name, value in optional_fields.items() if value is not None},
        }
