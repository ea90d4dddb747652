"""Parts that all clients of HTTP model endpoints share: address and key, retries, and errors.

`EventLoopThread` runs asyncio in a thread, so that any other thread can wait for its work and
cancel it.
"""

import asyncio
import json
import os
import random
import re
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping
from concurrent.futures import CancelledError
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from queue import Empty, SimpleQueue
from typing import Any, Protocol, Self, TypeVar
from urllib.parse import urlsplit

import httpx

from rag_model.errors import BookwheelError, EndpointError, PromptTooLongError, StoppedError, UsageError
from rag_model.http_client import USER_AGENT, ReplyTooLargeError, create_http_client, iter_body_async
from rag_model.secrets import mask_secrets, refuse_secret
from rag_model.untrusted_text import escape_controls, parse_json

INVALID_REQUEST_STATUSES = frozenset((400, 422))  # such as for an unsupported field
LLM_PREFIX = "BOOKWHEEL_LLM_"  # prefix of the environment variables of a generator's endpoint
_MAX_ERROR_BYTES = 1 << 16  # maximum bytes to read of an error's body
_MAX_QUOTED = 300  # maximum characters that an error quotes of an endpoint's message
_TRANSIENT_STATUSES = frozenset((408, 409, 425, 429, 500, 502, 503, 504, 529))
_PROMPT_TOO_LONG = re.compile(
    r"context.{0,20}(length|window|size)|too (long|large)|maximum.{0,20}tokens|exceed",
    re.IGNORECASE,
)
_INPUT_TOO_LARGE = re.compile(r"(input|prompt).{0,40}too (long|large)", re.IGNORECASE)
_NO_QUOTA = "insufficient_quota"  # error code of a 429 reply after which retries are useless
_OPENAI_URL = "https://api.openai.com/v1"  # default of OpenAI's own client
_HEADER_VALUE = re.compile(r"[!-~]+")  # printable ASCII without spaces, which a header can contain
_MAX_WAIT_SECONDS = 30.0  # longest wait between two attempts without a Retry-After
_POLL_SECONDS = 0.05  # time between two calls of `should_stop`
_Result = TypeVar("_Result")
_TextFragment = tuple[int, str]  # (position of the prompt in the request, text)


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Base URL and key of an endpoint. The key is not part of the object's repr."""

    url: str  # base URL without a trailing slash, such as http://localhost:8000/v1
    key: str = field(default="", repr=False)  # empty: no key is sent
    key_variable: str = "OPENAI_API_KEY"  # environment variable that holds the key, for messages

    def __post_init__(self) -> None:
        """Check the address and the key.

        Raises:
            UsageError: the URL is not an http(s) address or contains a user, a password or a
                query, or the key contains a space or a character that is not printable ASCII.
        """
        try:
            refuse_secret(self.url)
        except UsageError:  # the message of `refuse_secret` is about stores
            raise UsageError(
                "the endpoint's base URL contains a user, a password, a query or a port that is "
                "not a number, which may be a secret: set a base URL such as "
                "http://localhost:8000/v1, "
                f"and {self.key_variable} to the key"
            ) from None
        if not _is_usable_url(self.url):
            raise UsageError(
                f"{self.url!r} is not the base URL of an endpoint: set one such as http://localhost:8000/v1"
            )
        if self.key and not _HEADER_VALUE.fullmatch(self.key):
            raise UsageError(
                f"{self.key_variable} contains a space or a character that is not printable "
                "ASCII: set it to the key alone"
            )

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ, prefix: str = LLM_PREFIX) -> Self:
        """Read the base URL from BOOKWHEEL_LLM_BASE_URL, else from OPENAI_BASE_URL; the default is
        OpenAI's API. `prefix` replaces BOOKWHEEL_LLM_ in the names of the variables.

        The key is BOOKWHEEL_LLM_API_KEY if BOOKWHEEL_LLM_BASE_URL is set, else OPENAI_API_KEY.

        Raises:
            UsageError: the URL or the key cannot be used.
        """
        prefixed_url = environment.get(f"{prefix}BASE_URL", "").strip()
        base_url = prefixed_url or environment.get("OPENAI_BASE_URL", "").strip() or _OPENAI_URL
        key_variable = f"{prefix}API_KEY" if prefixed_url else "OPENAI_API_KEY"
        return cls(base_url.rstrip("/"), environment.get(key_variable, "").strip(), key_variable)

    @property
    def is_default(self) -> bool:
        """Whether this is OpenAI's API, the default if the environment sets no base URL."""
        return self.url == _OPENAI_URL

    @property
    def host(self) -> str:
        """Host and port, for messages."""
        return urlsplit(self.url).netloc

    def mask_key(self, text: str) -> str:
        """Replace the key in a text by `***`."""
        return text.replace(self.key, "***") if self.key else text


def _is_usable_url(url: str) -> bool:
    """Return whether a request can be sent to a URL.

    The URL is checked first, because the error of a failed connection would not name the cause.
    """
    try:
        parts = urlsplit(url)
        httpx.Request("POST", url)
        (parts.hostname or "").encode("idna")  # name servers are asked for names in this encoding
        is_http = parts.scheme in {"http", "https"} and bool(parts.hostname) and parts.port != 0
    except (ValueError, httpx.InvalidURL):
        return False
    return is_http and not parts.query and not parts.fragment


class FailedAttemptError(Exception):
    """The failure of one attempt of a request; callers of the request get only its `error`."""

    def __init__(self, error: BookwheelError, is_transient: bool = False, wait_seconds: float | None = None) -> None:
        """Store the error, whether a retry may succeed, and the seconds that the endpoint asks to
        wait before it (None if it does not).
        """
        super().__init__(str(error))
        self.error, self.is_transient, self.wait_seconds = error, is_transient, wait_seconds


@dataclass(frozen=True, slots=True)
class EndpointErrors:
    """Builds the errors for one endpoint and one model."""

    endpoint: Endpoint
    model: str
    product: str = "chat completions"  # plural noun for the objects that the API returns
    one_product: str = "a chat completion"  # the same noun in the singular, with its article
    input_name: str = "the prompt"  # noun for the request's input in messages
    # Advice in the message about an input that is too long.
    length_advice: str = "give fewer passages, or set BOOKWHEEL_LLM_CONTEXT to the tokens of its context"

    def with_input_name(self, input_name: str) -> Self:
        """Return a copy whose messages call the request's input `input_name`."""
        return replace(self, input_name=input_name)

    def network_error(self, reason: object) -> FailedAttemptError:
        """Return the error for a failed or broken connection."""
        detail = self._sanitize(str(reason) or type(reason).__name__)
        return self._create_failed_attempt(
            f"cannot be reached ({detail}): check the base URL, and that it runs", is_transient=True
        )

    def timeout_error(self, action: str, seconds: float) -> FailedAttemptError:
        """Return the error for a timeout."""
        return self._create_failed_attempt(
            f"{action} within {seconds:g} s: ask again later, or give it more time",
            is_transient=True,
        )

    def redirect_error(self, location: str) -> FailedAttemptError:
        """Return the error for a redirect; key and prompt are not sent to another address."""
        host = self._sanitize(_get_redirect_host(location) or "another path")
        return self._create_failed_attempt(
            f"redirects to {host}, which is not followed: set that base URL if you trust it"
        )

    def reply_size_error(self, max_bytes: int) -> FailedAttemptError:
        """Return the error for a reply with too many bytes."""
        return self._create_failed_attempt(
            f"sent more than {max_bytes} bytes for one answer: check that it is an API for {self.product}"
        )

    def protocol_error(self, reason: object) -> FailedAttemptError:
        """Return the error for a reply that violates the protocol."""
        return self._create_failed_attempt(
            f"sent a reply that is not {self.one_product} ({self._sanitize(str(reason))}): check "
            "that the base URL ends with the path of its API, such as /v1"
        )

    def truncated_error(self) -> FailedAttemptError:
        """Return the error for a stream that ended too early."""
        return self._create_failed_attempt("ended its answer half-way: ask again", is_transient=True)

    def stream_error(self, message: str) -> FailedAttemptError:
        """Return the error for an error object in a stream."""
        if _PROMPT_TOO_LONG.search(message):
            return self._create_prompt_error(message)
        return self._create_failed_attempt(
            f"failed while it wrote ({self._sanitize(message)}): ask again", is_transient=True
        )

    def status_error(self, status: int, body: bytes, wait_seconds: float | None) -> FailedAttemptError:
        """Return the error for an HTTP status."""
        message, code = _parse_error_body(body)
        detail = self.quote(message)
        if status in {401, 403}:
            problem = "accepts no request without a key" if not self.endpoint.key else "does not accept the key"
            return self._create_failed_attempt(
                f"{problem} ({status}): set {self.endpoint.key_variable} to a key that may use {self.model}"
            )
        if status == 404:
            return self._create_failed_attempt(
                f"has no model {self.model}, or no {self.product} at this address{detail}: check both"
            )
        is_too_large = status == 500 and _INPUT_TOO_LARGE.search(message)  # as llama.cpp replies
        if is_too_large or (
            status in {400, 413, 422} and _PROMPT_TOO_LONG.search(message or ("too large" if status == 413 else ""))
        ):
            return self._create_prompt_error(message)
        if status == 429 and code == _NO_QUOTA:
            return self._create_failed_attempt(
                f"has no budget left for this key{detail}: increase the budget, or use another key"
            )
        if status in _TRANSIENT_STATUSES:
            problem = "is busy" if status == 429 else "failed"
            return self._create_failed_attempt(
                f"{problem} ({status}){detail}: ask again later",
                is_transient=True,
                wait_seconds=wait_seconds,
            )
        return self._create_failed_attempt(f"refused the request ({status}){detail}: check the model's settings")

    def _create_prompt_error(self, message: str) -> FailedAttemptError:
        return FailedAttemptError(
            PromptTooLongError(
                f"{self.input_name} is longer than {self.model} at {self.endpoint.host} "
                f"accepts{self.quote(message)}: {self.length_advice}"
            )
        )

    def _create_failed_attempt(
        self, problem: str, *, is_transient: bool = False, wait_seconds: float | None = None
    ) -> FailedAttemptError:
        return FailedAttemptError(
            EndpointError(f"the endpoint at {self.endpoint.host} {problem}"),
            is_transient,
            wait_seconds,
        )

    def quote(self, message: str) -> str:
        """Return an endpoint's text in parentheses, shortened for a message; "" if it is empty."""
        return f" ({self._sanitize(message)})" if message else ""

    def _sanitize(self, text: str) -> str:
        """Return an endpoint's message for an error: without the key, in one line, at most 300
        characters.
        """
        masked_text = mask_secrets(self.endpoint.mask_key(" ".join(text.split())))
        return escape_controls(masked_text)[:_MAX_QUOTED].rstrip(" .:;")


def _get_redirect_host(location: str) -> str:
    try:
        return urlsplit(location).netloc
    except ValueError:
        return "an invalid address"


def _parse_error_body(body: bytes) -> tuple[str, str]:
    """Return the message and the code of an error body; both are empty if it is not JSON."""
    try:
        reply: Any = parse_json(body)
    except ValueError:
        return "", ""
    error = reply.get("error", reply) if isinstance(reply, dict) else reply
    error_code = error.get("code") if isinstance(error, dict) else ""
    message = get_error_message(error) if isinstance(error, dict | str) else json.dumps(error)[:_MAX_QUOTED]
    return message, str(error_code or "")


def get_error_message(error: object) -> str:
    """Return the message of an error object, in any of the formats that such endpoints use."""
    if isinstance(error, Mapping):
        return str(error.get("message") or error.get("detail") or error.get("error") or "")
    return str(error)


class RetrySettings(Protocol):
    """Settings of an endpoint that limit the attempts of a request."""

    @property
    def tries(self) -> int:
        """Maximum number of attempts per request, including the first."""
        ...

    @property
    def whole_seconds(self) -> float:
        """Maximum seconds per request, including all attempts and waits."""
        ...

    @property
    def backoff_seconds(self) -> float:
        """Seconds before the second attempt; doubled for each later one."""
        ...


def create_endpoint_client(endpoint: Endpoint, accept: str, connect_seconds: float) -> httpx.AsyncClient:
    """Create an HTTP client that sends the endpoint's key and accepts a content type; no request is
    sent yet.

    The client follows no redirects, because they could send the texts and the key to another host.
    """
    authorization = {"Authorization": f"Bearer {endpoint.key}"} if endpoint.key else {}
    return create_http_client(
        httpx.AsyncClient,
        headers={"User-Agent": USER_AGENT, "Accept": accept, **authorization},
        timeout=httpx.Timeout(None, connect=connect_seconds),
        follow_redirects=False,
    )


async def read_reply(response: httpx.Response, max_bytes: int) -> bytes:
    """Return the body of a reply, or the beginning of the body of an error.

    Raises:
        ReplyTooLargeError: The body of a successful reply has more than `max_bytes`.
    """
    body, limit = bytearray(), max_bytes if response.is_success else _MAX_ERROR_BYTES
    try:
        async with aclosing(iter_body_async(response, limit)) as chunks:
            async for chunk in chunks:
                body += chunk
    except ReplyTooLargeError:
        if response.is_success:
            raise
    return bytes(body)


async def gather_or_cancel(coroutines: Iterable[Coroutine[Any, Any, _Result]]) -> list[_Result]:
    """Return the results of coroutines, in order; the first failure cancels the others."""
    tasks = [asyncio.ensure_future(coroutine) for coroutine in coroutines]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()


async def retry(
    settings: RetrySettings,
    attempt: Callable[[], Awaitable[_Result]],
    timeout_error: FailedAttemptError,
) -> _Result:
    """Return the result of the first successful attempt.

    The pause before the next attempt is the endpoint's Retry-After; without one, it doubles for
    each attempt.

    Raises:
        FailedAttemptError: an attempt failed permanently, or the last attempt failed;
            `timeout_error` if the total time ran out.
    """
    deadline, last_error = time.monotonic() + settings.whole_seconds, timeout_error
    for attempt_number in range(settings.tries):
        try:
            async with asyncio.timeout_at(asyncio.get_running_loop().time() + deadline - time.monotonic()):
                return await attempt()
        except TimeoutError:
            raise timeout_error from None
        except FailedAttemptError as failed_attempt:
            last_error = failed_attempt
        wait_seconds = (
            _compute_backoff(settings, attempt_number) if last_error.wait_seconds is None else last_error.wait_seconds
        )
        if (
            not last_error.is_transient
            or attempt_number + 1 == settings.tries
            or time.monotonic() + wait_seconds >= deadline
        ):
            break
        await asyncio.sleep(wait_seconds)
    raise last_error


def _compute_backoff(settings: RetrySettings, attempt_number: int) -> float:
    """Return a wait of 50 to 100 % of the exponential backoff; the jitter keeps clients apart."""
    backoff: float = settings.backoff_seconds * 2.0**attempt_number
    return min(_MAX_WAIT_SECONDS, backoff) * random.uniform(0.5, 1.0)


class EventLoopThread:
    """An asyncio event loop in a thread; other threads wait for its coroutines. Thread-safe."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=_run_and_close, args=(self._loop,), name="endpoint", daemon=True)
        self._thread.start()

    def run(
        self,
        work: Callable[[Callable[[int, str], None]], Coroutine[Any, Any, _Result]],
        should_stop: Callable[[], bool] | None = None,
        on_text: Callable[[int, str], None] | None = None,
    ) -> _Result:
        """Run the coroutine `work(send_text)` and return its result.

        `work` sends each text fragment with the position of its prompt in the request:
        `send_text(position, text)`. The calling thread passes them to `on_text`.

        Raises:
            StoppedError: `should_stop` returned True; the work was cancelled.
        """
        fragments: SimpleQueue[_TextFragment | None] = SimpleQueue()
        future = asyncio.run_coroutine_threadsafe(
            work(lambda position, text: fragments.put((position, text))), self._loop
        )
        future.add_done_callback(lambda _: fragments.put(None))
        try:
            while (fragment := _get_next_fragment(fragments)) is not None:
                if should_stop is not None and should_stop():
                    raise StoppedError("no caller waits for this answer any more, so it was cancelled")
                if fragment and on_text is not None:
                    on_text(*fragment)
            return future.result()
        except CancelledError as error:
            raise StoppedError("the endpoint's connections were closed, so this answer was cancelled") from error
        finally:
            future.cancel()

    @property
    def is_current_thread(self) -> bool:
        """Whether the caller runs in the thread of the event loop."""
        return threading.current_thread() is self._thread

    def close(self, finish: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Cancel all work, run `finish`, and end the thread."""
        if self._loop.is_closed():
            return
        asyncio.run_coroutine_threadsafe(_cancel_and_finish(finish), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()


def _run_and_close(loop: asyncio.AbstractEventLoop) -> None:
    """Run a loop until it is stopped, and close it in the same thread.

    The garbage collector may call `EventLoopThread.close` in a thread that runs another loop.
    """
    loop.run_forever()
    loop.run_until_complete(_close_generators())
    loop.close()


def _get_next_fragment(fragments: "SimpleQueue[_TextFragment | None]") -> _TextFragment | tuple[()] | None:
    """Return the next fragment, () if there is none for `_POLL_SECONDS`, or None at the end."""
    try:
        return fragments.get(timeout=_POLL_SECONDS)
    except Empty:
        return ()


async def _cancel_and_finish(finish: Callable[[], Coroutine[Any, Any, None]]) -> None:
    other_tasks = _list_other_tasks()
    for task in other_tasks:
        task.cancel()
    await asyncio.gather(*other_tasks, return_exceptions=True)
    await finish()


async def _close_generators() -> None:
    """Close unfinished async generators, about which Python would warn when the loop closes."""
    await asyncio.get_running_loop().shutdown_asyncgens()
    await asyncio.gather(*_list_other_tasks(), return_exceptions=True)


def _list_other_tasks() -> set[asyncio.Task[Any]]:
    return asyncio.all_tasks() - {asyncio.current_task()}
