"""Shared functions of polite HTTP clients: a User-Agent, retries after pauses, redirects, bounded replies.

If a server asks to wait (HTTP 429 or 503), the request is sent again after its `Retry-After`,
otherwise after growing pauses. So is a request to a server that answered before and cannot be
reached any more. A server that cannot be reached at first has a wrong address or does not run, so
its request is not sent again.
"""

import os
import re
import time
from collections.abc import Callable
from email.utils import parsedate_to_datetime
from typing import TypeVar
from urllib.parse import urljoin, urlsplit

import httpx

from rag_model.errors import InputError, UnreachableError, UsageError, format_error
from rag_model.http_client import create_http_client, iter_body

CONTACT = "BOOKWHEEL_WIKI_CONTACT"  # address or URL of the operator, for the User-Agent
MAX_REDIRECTS = 5
BUSY_STATUSES = {408, 425, 429, 500, 502, 503, 504}
_TIMEOUT = httpx.Timeout(60.0, connect=20.0)  # seconds without a byte
_CONNECT_ERRORS = (httpx.ConnectError, httpx.ConnectTimeout, httpx.ProxyError)  # before a request was sent
_LOOPBACK = {"127.0.0.1", "localhost", "[::1]"}
_MAX_REPLY_SECONDS = 300.0
MAX_TRIES = 8  # of one request
_MAX_PAUSE = 60.0  # seconds between two tries, unless the server asks for more
_MAX_RETRY_AFTER = 600.0  # a longer wait ends the run; the next run continues
T = TypeVar("T")


class BusyError(Exception):
    """The server asks to try again later.

    `seconds` is its `Retry-After`, if it sends one. `retry` gives up after `max_tries` requests.
    """

    def __init__(self, reason: str, seconds: float | None = None, max_tries: int = MAX_TRIES) -> None:
        super().__init__(reason)
        self.seconds, self.max_tries = seconds, max_tries


def open_polite_client(**headers: str) -> httpx.Client:
    """Return a client of one connection whose User-Agent names bookwheel and its operator.

    Raises:
        UsageError: The contact, a proxy or the certificates from the environment are unusable.
    """
    contact = os.environ.get(CONTACT, "")
    if not re.fullmatch(r"[\x20-\x7e]{0,200}", contact):
        raise UsageError(f"{CONTACT} has characters other than printable ASCII: give an address or a URL")
    agent = f"bookwheel (https://pypi.org/project/bookwheel{'; ' if contact else ''}{contact})"
    limits = httpx.Limits(max_connections=1)
    return create_http_client(httpx.Client, headers={"User-Agent": agent, **headers}, timeout=_TIMEOUT, limits=limits)


def is_confidential(scheme: str, host: str) -> bool:
    """Return whether requests to a host are encrypted, or stay on this machine."""
    host = host.lower()
    return scheme.lower() == "https" or host.rpartition(":")[0] in _LOOPBACK or host in _LOOPBACK


def retry(
    url: str, send: Callable[[], T], has_answered: Callable[[], bool], sleep: Callable[[float], None] = time.sleep
) -> T:
    """Call `send`, again after a pause while the server is busy, and return its result.

    Raises:
        UnreachableError: The server cannot be reached, asks to wait for too long, or is busy for several tries.
    """
    pause = 1.0
    for attempt in range(1, MAX_TRIES + 1):
        try:
            return send()
        except (BusyError, httpx.TransportError) as error:
            if isinstance(error, _CONNECT_ERRORS) and not has_answered():
                raise UnreachableError(
                    f"{url} cannot be reached ({format_error(error)}): check the address, and that the server runs"
                ) from error
            wait = getattr(error, "seconds", None)
            if attempt >= getattr(error, "max_tries", MAX_TRIES) or (wait or 0) > _MAX_RETRY_AFTER:
                requested_wait = f", and asks to wait {wait:.0f} s" if wait else ""
                raise UnreachableError(
                    f"{url} did not answer {attempt} requests in a row ({format_error(error)}{requested_wait}): "
                    "run the command again later to continue"
                ) from error
            sleep(wait if wait is not None else pause)
            pause = min(2 * pause, _MAX_PAUSE)
    raise AssertionError("unreachable")


def follow_redirect(url: str, response: httpx.Response) -> str:
    """Return the target of a redirect, without a fragment.

    Raises:
        InputError: The target is another server, to which credentials could be sent.
    """
    location, source = response.headers.get("location", ""), urlsplit(url)
    try:
        target = urlsplit(urljoin(url, location))
        is_same_server = (target.scheme, target.hostname, target.port) == (source.scheme, source.hostname, source.port)
    except ValueError as error:
        raise InputError(
            f"{url} redirects to {location!r:.100}, which is not a valid address: check the server"
        ) from error
    if not is_same_server:
        raise InputError(
            f"{url} redirects to another server, {target.scheme}://{target.netloc.rpartition('@')[2]}: use "
            "that address if you trust it"
        )
    return str(target._replace(fragment="").geturl())


def read_body(response: httpx.Response, max_bytes: int) -> bytes:
    """Return the body of a reply; raise a `BusyError` if the server sends it too slowly.

    Raises:
        ReplyTooLargeError: The body has more than `max_bytes`.
    """
    deadline, chunks = time.monotonic() + _MAX_REPLY_SECONDS, list[bytes]()
    for chunk in iter_body(response, max_bytes):
        chunks.append(chunk)
        if time.monotonic() > deadline:
            raise BusyError(f"a reply takes more than {_MAX_REPLY_SECONDS:.0f} s")
    return b"".join(chunks)


def get_retry_after(response: httpx.Response) -> float | None:
    """Return the seconds of `Retry-After`, which is a number or a date; None if there is none."""
    text = response.headers.get("retry-after", "").strip()
    if re.fullmatch(r"[0-9]{1,9}", text):
        return float(text)
    try:
        return max(0.0, parsedate_to_datetime(text).timestamp() - time.time())
    except ValueError:
        return None
