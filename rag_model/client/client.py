"""An HTTP client of a running service, with typed replies and retries.

All endpoints are read-only, so it is safe to repeat a request that may have reached the service.
"""

import json
import math
import os
import random
import re
import ssl
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from types import TracebackType
from typing import Any, NamedTuple, Self, TypeVar
from urllib.parse import urlsplit

import httpx

from rag_model.client.replies import AnswerReply, SearchReply, SnapshotReply, parse_reply
from rag_model.errors import ServiceError, UsageError, format_error
from rag_model.http_client import ReplyTooLargeError, create_http_client, iter_body, parse_retry_after
from rag_model.untrusted_text import parse_json

# HTTP statuses of a full queue, and of a service without a loaded snapshot; such replies have a
# Retry-After header.
RETRY_STATUSES = frozenset((429, 503))
TOKEN_VARIABLE = "BOOKWHEEL_TOKEN"  # environment variable with the bearer token
_PRINTABLE = re.compile(r"[!-~]+")
# HTTP statuses for errors in the request.
_CLIENT_ERRORS = frozenset((400, 403, 408, 413, 415, 421, 422))
_MAX_DETAIL = 300  # maximum characters of the service's message that an error quotes
_Record = TypeVar("_Record")


@dataclass(frozen=True, slots=True)
class ClientSettings:
    """Timeouts and retries of a client. The defaults exceed the time limits of the service."""

    # time limit of a connection attempt; a reachable host usually accepts within a second
    connect_seconds: float = 5.0
    reply_seconds: float = 60.0  # longest wait for a chunk; the service replies within 30 s
    # number of attempts, including the first; the pauses between five attempts take 4 to 8 seconds
    tries: int = 5
    # seconds before the second attempt; doubled before each further attempt
    first_pause: float = 0.5
    max_pause: float = 30.0  # maximum seconds of a pause; a longer Retry-After ends the attempts
    # Maximum bytes of a decompressed reply. The largest reply, to 64 questions with 100 passages
    # each, has about 5 MB.
    max_reply_bytes: int = 128 << 20

    def __post_init__(self) -> None:
        """Check the values.

        Raises:
            UsageError: A number is not finite, or is below its minimum.
        """
        for name in (field.name for field in fields(self)):
            value, minimum = getattr(self, name), 1 if name in {"tries", "max_reply_bytes"} else 0
            if not math.isfinite(value) or value < minimum:
                raise UsageError(f"{name} of the client is {value}: give a finite number of at least {minimum}")
            if name.endswith("_seconds") and value == 0:
                raise UsageError(f"{name} of the client is 0, so no reply can arrive in time: give a larger number")


def compute_pause(attempt: int, settings: ClientSettings, retry_after: str | None = None) -> float | None:
    """Return the seconds to wait before attempt `attempt` (2 or more); None to give up.

    The pause doubles with each attempt, and is randomized to spread the requests of many clients.
    If the previous reply has a `Retry-After` header, the pause is at least as long as it asks.

    >>> compute_pause(2, ClientSettings(first_pause=0), retry_after="3")
    3.0
    """
    if attempt > settings.tries:
        return None
    backoff = min(settings.max_pause, settings.first_pause * 2.0 ** min(attempt - 2, 60))
    pause = max(backoff * random.uniform(0.5, 1), parse_retry_after(retry_after) or 0.0)
    return pause if pause <= settings.max_pause else None


class _HttpReply(NamedTuple):
    """The status, headers and decompressed body of a reply."""

    status_code: int
    headers: httpx.Headers
    content: bytes  # decompressed


class Client:
    """A client of one service. Thread-safe; connections stay open until `close`."""

    def __init__(
        self,
        url: str,
        token: str | None = None,
        settings: ClientSettings | None = None,
        *,
        tls: ssl.SSLContext | None = None,
        pause: Callable[[float], object] = time.sleep,
    ) -> None:
        """Create a client; nothing is sent yet.

        >>> with Client("http://localhost:8000") as client:  # doctest: +SKIP
        ...     client.search(["who wrote animal farm?"], k=3).results[0].hits[0].text

        Args:
            url: URL of the service, such as `https://rag.example.com`; it may have a path, for
                example behind a proxy.
            token: Bearer token; None: `BOOKWHEEL_TOKEN` of the environment, if it is set.
            settings: Timeouts and retries.
            tls: Trusted certificates; None: the certificates of the machine or of `SSL_CERT_FILE`.
            pause: Function that waits for a number of seconds between two attempts.

        Raises:
            UsageError: The URL, the token or the proxy in the environment is invalid.
        """
        self.url, self.settings = _normalize_url(url), settings or ClientSettings()
        self._pause, bearer_token = pause, token or os.environ.get(TOKEN_VARIABLE)
        if bearer_token and not _PRINTABLE.fullmatch(bearer_token):
            raise UsageError(
                "the service's token contains a space or a character other than printable ASCII: "
                "give it as it was created"
            )
        self._http = create_http_client(
            httpx.Client,
            base_url=self.url,
            headers={"Authorization": f"Bearer {bearer_token}"} if bearer_token else {},
            timeout=httpx.Timeout(self.settings.reply_seconds, connect=self.settings.connect_seconds),
            verify=tls or True,
        )
        # close the connections when the client is garbage collected
        weakref.finalize(self, self._http.close)

    def search(self, questions: Sequence[str], k: int | None = None, retriever: str | None = None) -> SearchReply:
        """Return the best `k` passages of each question, best first, in the order of the questions.

        Without `k` the service chooses: 5, or all passages of a smaller snapshot.

        `retriever` is an expression of the service's indexes; None: the service's default
        retriever.

        Raises:
            UsageError: The service refuses the request or the token; the error has the service's
                message.
            ServiceError: The service is unreachable, stays busy, fails, or sends a reply in an
                unexpected format.
        """
        return self._request("search", SearchReply, _encode_body(questions, k, retriever))

    def answer(self, questions: Sequence[str], k: int | None = None, retriever: str | None = None) -> AnswerReply:
        """Let the service's model answer each question from its best `k` passages.

        If `k` is None, it is the number of passages that the model was trained with.

        Raises:
            UsageError: The service has no model, or refuses the request or the token.
            ServiceError: For the same reasons as `search`.
        """
        return self._request("answer", AnswerReply, _encode_body(questions, k, retriever))

    def snapshot(self) -> SnapshotReply:
        """Return the served snapshot, and the version that was refused, if any.

        Raises:
            UsageError: The service refuses the token.
            ServiceError: For the same reasons as `search`.
        """
        return self._request("snapshot", SnapshotReply, None)

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    def __enter__(self) -> Self:
        """Return this client; it is closed at the end of the `with` block."""
        return self

    def __exit__(
        self,
        error_type: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Close the connections."""
        self.close()

    def _request(self, endpoint: str, record_type: type[_Record], body: bytes | None) -> _Record:
        attempt = 1
        while True:
            try:
                reply = self._send(endpoint, body)
            except httpx.DecodingError as error:
                raise self._create_format_error(endpoint, error) from error
            except ReplyTooLargeError as error:
                reason = f"it has more than {self.settings.max_reply_bytes} bytes"
                raise self._create_format_error(endpoint, reason) from error
            except httpx.RequestError as error:
                pause = None if isinstance(error, httpx.ReadTimeout) else compute_pause(attempt + 1, self.settings)
                if pause is None:
                    raise self._create_connection_error(error, attempt) from error
            else:
                if reply.status_code == httpx.codes.OK:
                    return self._parse_reply(endpoint, record_type, reply)
                is_busy = reply.status_code in RETRY_STATUSES
                pause = compute_pause(attempt + 1, self.settings, reply.headers.get("Retry-After")) if is_busy else None
                if pause is None:
                    raise self._create_status_error(endpoint, reply, attempt)
            self._pause(pause)
            attempt += 1

    def _send(self, endpoint: str, body: bytes | None) -> _HttpReply:
        method, headers = ("GET", {}) if body is None else ("POST", {"Content-Type": "application/json"})
        with self._http.stream(method, endpoint, content=body, headers=headers) as response:
            reply_body = b"".join(iter_body(response, self.settings.max_reply_bytes))
        return _HttpReply(response.status_code, response.headers, reply_body)

    def _parse_reply(self, endpoint: str, record_type: type[_Record], reply: _HttpReply) -> _Record:
        try:
            return parse_reply(record_type, parse_json(reply.content))
        except ValueError as error:
            raise self._create_format_error(endpoint, error) from error

    def _create_format_error(self, endpoint: str, reason: object) -> ServiceError:
        return ServiceError(
            f"{self.url}/{endpoint} did not send a bookwheel reply ({reason}): check the "
            "address, and that the service is as new as this client"
        )

    def _create_status_error(self, endpoint: str, reply: _HttpReply, attempts: int) -> UsageError | ServiceError:
        """Create the error for an error status, with the service's message if there is one."""
        status, detail = reply.status_code, _parse_error_detail(reply)
        url = f"{self.url}/{endpoint}"
        if status == httpx.codes.UNAUTHORIZED:
            return UsageError(f"{url} requires one of its tokens: give Client a token, or set {TOKEN_VARIABLE}")
        if detail and status in _CLIENT_ERRORS:
            return UsageError(detail)
        tries_text = f" in {_format_tries(attempts)}" if status in RETRY_STATUSES else ""
        reason = detail or "it gives no reason; check the address"
        return ServiceError(f"{url} replied with {status}{tries_text}: {reason}")

    def _create_connection_error(self, error: httpx.RequestError, attempts: int) -> ServiceError:
        if isinstance(error, httpx.ReadTimeout):
            seconds = self.settings.reply_seconds
            return ServiceError(
                f"{self.url} sent nothing for {seconds:g} s: ask fewer questions at once, or allow more reply_seconds"
            )
        reason = format_error(error)[:_MAX_DETAIL]
        return ServiceError(
            f"{self.url} cannot be reached in {_format_tries(attempts)} ({reason}): check the "
            "address, and that the service runs"
        )


def _format_tries(attempts: int) -> str:
    return "1 try" if attempts == 1 else f"{attempts} tries"


def _normalize_url(url: str) -> str:
    """Check the URL of a service and return it without a trailing slash."""
    try:
        url_parts = urlsplit(url.strip())
        host, port = httpx.URL(url.strip()).host, url_parts.port
        host.encode("idna")  # raises UnicodeError for a host that DNS cannot represent
    except (ValueError, httpx.InvalidURL) as error:
        raise UsageError(
            f"the service's URL cannot be read ({error}): give one such as http://localhost:8000"
        ) from error
    if url_parts.username is not None or url_parts.query or url_parts.fragment:
        raise UsageError(
            "the service's URL contains a user or a parameter: omit it, and give a token if one is required"
        )
    if url_parts.scheme not in ("http", "https") or not host or port == 0:
        raise UsageError(f"{url!r} is not the URL of a service: give one such as http://localhost:8000")
    return url.strip().rstrip("/")


def _encode_body(questions: Sequence[str], k: int | None, retriever: str | None) -> bytes:
    if isinstance(questions, str):
        raise UsageError("questions is a single text: give a list of texts")
    body: dict[str, Any] = {"questions": list(questions)}
    body |= {name: value for name, value in (("k", k), ("retriever", retriever)) if value is not None}
    try:
        return json.dumps(body, ensure_ascii=False, allow_nan=False).encode()
    except (TypeError, ValueError) as error:  # UTF-8 cannot encode a lone surrogate
        raise UsageError(f"the questions cannot be sent ({error}): give texts, and a whole number as k") from error


def _parse_error_detail(reply: _HttpReply) -> str:
    """Return the message in an error reply, or "" if there is no message."""
    try:
        reply_json = parse_json(reply.content)
    except ValueError:
        return ""
    detail = reply_json.get("detail") if isinstance(reply_json, dict) else None
    return " ".join(detail.split())[:_MAX_DETAIL] if isinstance(detail, str) else ""
