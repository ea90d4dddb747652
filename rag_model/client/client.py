"""Ask a running service over HTTP: typed replies, further tries where it is busy or away, one sentence for a failure.

All endpoints only read, so a request that may have reached the service is sent again without harm.
"""

import json
import os
import re
import ssl
import time
import weakref
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, Self, TypeVar
from urllib.parse import urlsplit

import httpx

from rag_model.client.replies import AnswerReply, SearchReply, SnapshotReply, read_reply
from rag_model.client.retries import BUSY, pause_before
from rag_model.client.settings import ClientSettings
from rag_model.errors import ServiceError, UsageError, reason
from rag_model.http_client import http_client
from rag_model.json_text import parse_json

TOKEN = "BOOKWHEEL_TOKEN"  # the environment variable that holds one
_PRINTABLE = re.compile(r"[!-~]+")
_WRONG = frozenset((400, 403, 408, 413, 415, 421, 422))  # what a service says of a request
_SHOWN = 300  # characters of a sentence that another program wrote
T = TypeVar("T")


class Client:
    """Asks one service. Safe among threads; connections stay open until `close`."""

    def __init__(
        self,
        url: str,
        token: str | None = None,
        settings: ClientSettings | None = None,
        *,
        tls: ssl.SSLContext | None = None,
        pause: Callable[[float], object] = time.sleep,
    ) -> None:
        """Prepare to ask; nothing is sent yet.

        >>> with Client("http://localhost:8000") as client:  # doctest: +SKIP
        ...     client.search(["who wrote animal farm?"], k=3).results[0].hits[0].text

        Args:
            url: of the service, such as `https://rag.example.com`; a path is kept, as of a proxy.
            token: one of the service's; None: the environment's `BOOKWHEEL_TOKEN`, if there is one.
            settings: how long to wait, and how often to try.
            tls: whose certificates are trusted; None: the machine's, or those of `SSL_CERT_FILE`.
            pause: waits for a number of seconds between two tries.

        Raises:
            UsageError: the URL is not that of a service, or the token or the environment's proxy cannot be used.
        """
        self.url, self.settings = _checked_url(url), settings or ClientSettings()
        self._pause, given = pause, token or os.environ.get(TOKEN)
        if given and not _PRINTABLE.fullmatch(given):
            raise UsageError("the service's token holds a space or what is no printable ASCII: give it as it was made")
        self._http = http_client(
            httpx.Client,
            base_url=self.url,
            headers={"Authorization": f"Bearer {given}"} if given else {},
            timeout=httpx.Timeout(self.settings.reply_seconds, connect=self.settings.connect_seconds),
            verify=tls or True,
        )
        weakref.finalize(self, self._http.close)  # a retriever that is dropped leaves no connection open

    def search(self, questions: Sequence[str], k: int = 5, retriever: str | None = None) -> SearchReply:
        """Return the best `k` passages of each question, best first, in the order of the questions.

        `retriever` is one of the service's, or another one made of its indexes; None: the service's first.

        Raises:
            UsageError: the service refuses the request, or the token; the sentence is its own.
            ServiceError: it cannot be reached, is busy in every try, fails, or is no service of this kind.
        """
        return self._asked("search", SearchReply, _body(questions, k, retriever))

    def answer(self, questions: Sequence[str], k: int | None = None, retriever: str | None = None) -> AnswerReply:
        """Return the answer of each question by the service's model, from its best `k` passages; None: as in training.

        Raises:
            UsageError: the service has no model, or `search` would raise it.
            ServiceError: as `search`.
        """
        return self._asked("answer", AnswerReply, _body(questions, k, retriever))

    def snapshot(self) -> SnapshotReply:
        """Return what is served, and what was refused.

        Raises:
            UsageError: the token is refused.
            ServiceError: as `search`.
        """
        return self._asked("snapshot", SnapshotReply, None)

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    def __enter__(self) -> Self:
        """Close on leaving."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close the connections."""
        self.close()

    def _asked(self, endpoint: str, kind: type[T], body: bytes | None) -> T:
        attempt = 1
        while True:
            try:
                reply = self._sent(endpoint, body)
            except httpx.RequestError as broken:
                wait = None if isinstance(broken, httpx.ReadTimeout) else pause_before(attempt + 1, self.settings)
                if wait is None:
                    raise self._unreachable(broken, attempt) from broken
            else:
                if reply.status_code == httpx.codes.OK:
                    return self._read(endpoint, kind, reply)
                busy = reply.status_code in BUSY
                wait = pause_before(attempt + 1, self.settings, reply.headers.get("Retry-After")) if busy else None
                if wait is None:
                    raise self._refused(endpoint, reply, attempt)
            self._pause(wait)
            attempt += 1

    def _sent(self, endpoint: str, body: bytes | None) -> httpx.Response:
        if body is None:
            return self._http.get(endpoint)
        return self._http.post(endpoint, content=body, headers={"Content-Type": "application/json"})

    def _read(self, endpoint: str, kind: type[T], reply: httpx.Response) -> T:
        try:
            return read_reply(kind, parse_json(reply.content))
        except ValueError as wrong:
            raise ServiceError(
                f"{self.url}/{endpoint} sent what is no reply of bookwheel ({wrong}): check the address, and that the "
                "service is as new as this client"
            ) from wrong

    def _refused(self, endpoint: str, reply: httpx.Response, attempts: int) -> UsageError | ServiceError:
        """Return the error for a reply that gives nothing; where the service says why, in its words."""
        status, said = reply.status_code, _detail(reply)
        at = f"{self.url}/{endpoint}"
        if status == httpx.codes.UNAUTHORIZED:
            return UsageError(f"{at} takes no request without one of its tokens: give Client one, or set {TOKEN}")
        if said and status in _WRONG:
            return UsageError(said)
        tries = f" in {_tries(attempts)}" if status in BUSY else ""
        return ServiceError(f"{at} answers {status}{tries}: {said or 'it does not say why; check the address'}")

    def _unreachable(self, broken: httpx.RequestError, attempts: int) -> ServiceError:
        if isinstance(broken, httpx.ReadTimeout):
            seconds = self.settings.reply_seconds
            return ServiceError(
                f"{self.url} sent nothing for {seconds:g} s: ask fewer questions at once, or allow more reply_seconds"
            )
        why = reason(broken)[:_SHOWN]
        return ServiceError(
            f"{self.url} cannot be reached in {_tries(attempts)} ({why}): check the address, and that the service runs"
        )


def _tries(attempts: int) -> str:
    return "1 try" if attempts == 1 else f"{attempts} tries"


def _checked_url(url: str) -> str:
    """Return a service's URL without a slash at its end."""
    try:
        parts = urlsplit(url.strip())
        host, port = httpx.URL(url.strip()).host, parts.port
        host.encode("idna")  # as the name is looked up
    except (ValueError, httpx.InvalidURL) as wrong:
        raise UsageError(
            f"the service's URL cannot be read ({wrong}): give one such as http://localhost:8000"
        ) from wrong
    if parts.username is not None or parts.query or parts.fragment:
        raise UsageError(
            "the service's URL names a user or a parameter: leave it out, and give a token if one is asked"
        )
    if parts.scheme not in ("http", "https") or not host or port == 0:
        raise UsageError(f"{url!r} is not the URL of a service: give one such as http://localhost:8000")
    return url.strip().rstrip("/")


def _body(questions: Sequence[str], k: int | None, retriever: str | None) -> bytes:
    if isinstance(questions, str):
        raise UsageError("questions is one text: give a list of them")
    asked: dict[str, Any] = {"questions": list(questions)}
    asked |= {name: value for name, value in (("k", k), ("retriever", retriever)) if value is not None}
    try:
        return json.dumps(asked, ensure_ascii=False, allow_nan=False).encode()
    except (TypeError, ValueError) as wrong:  # of which half a character is one
        raise UsageError(f"the questions cannot be sent ({wrong}): give texts, and a whole number as k") from wrong


def _detail(reply: httpx.Response) -> str:
    """Return the sentence of a failure; empty where the reply holds none."""
    try:
        said = parse_json(reply.content)
    except ValueError:
        return ""
    detail = said.get("detail") if isinstance(said, dict) else None
    return " ".join(detail.split())[:_SHOWN] if isinstance(detail, str) else ""
