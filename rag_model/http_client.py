"""Create httpx clients, read replies with a bound on their decompressed size, and retry busy
servers.

The clients read proxies and certificates from the environment.

A few kilobytes can decompress to gigabytes. So the clients accept only gzip, whose decompression
zlib can stop at any byte, and `iter_body` refuses every other encoding.

A polite client names itself and its operator. If a server is busy (`BUSY_STATUSES`) or sends a
reply too slowly, the request is sent again after the time in the reply's `Retry-After`, or else
after growing pauses. A request is also repeated if a server that answered before can no longer be
reached. If a server never answered, its address is probably wrong, so the request fails at once.
"""

import os
import re
import ssl
import time
import zlib
from collections.abc import AsyncGenerator, Callable, Iterator
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from functools import cache
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urljoin, urlsplit

import httpx

from rag_model.errors import InputError, UnreachableError, UsageError, format_error
from rag_model.secrets import LOOPBACK

USER_AGENT = "bookwheel"  # Wikimedia rejects clients without a User-Agent
CONTACT_VARIABLE = "BOOKWHEEL_WIKI_CONTACT"  # variable with the operator's address or URL
MAX_REDIRECTS = 5
BUSY_STATUSES = {408, 425, 429, 500, 502, 503, 504}
MAX_TRIES = 8  # maximum attempts of one request
_TIMEOUT = httpx.Timeout(60.0, connect=20.0)  # maximum seconds without receiving a byte
_MAX_REPLY_SECONDS = 300.0  # maximum time to receive one reply
_MAX_PAUSE = 60.0  # maximum seconds of a pause, unless the server asks for a longer one
_MAX_RETRY_AFTER = 600.0  # seconds; `retry` gives up if a server asks to wait longer
# httpx raises these errors before it sends a request.
_CONNECT_ERRORS = (httpx.ConnectError, httpx.ConnectTimeout, httpx.ProxyError)
_SECONDS_PATTERN = re.compile(r"[0-9]{1,9}(\.[0-9]+)?")
_ENCODING = "gzip"
_GZIP_WINDOW = 16 + zlib.MAX_WBITS  # tells zlib to expect the gzip format
T = TypeVar("T")
_Client = TypeVar("_Client", httpx.Client, httpx.AsyncClient)


class ReplyTooLargeError(Exception):
    """The decompressed body of a reply is larger than its reader accepts."""


def create_http_client(client_class: type[_Client], **settings: Any) -> _Client:
    """Create a synchronous or asynchronous client.

    Raises:
        UsageError: A proxy or a certificate file from the environment is unusable.
    """
    settings["headers"] = {"Accept-Encoding": _ENCODING, **settings.get("headers", {})}
    try:
        if settings.get("verify", True) is True:
            cert_file, cert_folder = os.environ.get("SSL_CERT_FILE"), os.environ.get("SSL_CERT_DIR")
            change_time = Path(cert_file).stat().st_mtime_ns if cert_file else 0
            settings["verify"] = _create_tls_context(cert_file, cert_folder, change_time)
        return client_class(**settings)
    except (ValueError, ImportError, OSError, httpx.InvalidURL) as error:
        raise UsageError(
            "the proxy or the certificates from the environment are unusable "
            f"({format_error(error)}): correct HTTP_PROXY, HTTPS_PROXY, ALL_PROXY, NO_PROXY, "
            "SSL_CERT_FILE or SSL_CERT_DIR"
        ) from error


@cache
def _create_tls_context(cert_file: str | None, cert_folder: str | None, change_time: int) -> ssl.SSLContext:
    """Load the certificates from the environment once for all clients, because this takes 20 ms.

    httpx reads the two variables itself; the arguments are the cache's key. A file that changed has
    another `change_time` (in ns), so it is loaded again.
    """
    return httpx.create_ssl_context()


def iter_body(response: httpx.Response, max_bytes: int) -> Iterator[bytes]:
    """Yield the decompressed body of a streamed response, up to `max_bytes`.

    Raises:
        ReplyTooLargeError: The body is larger; its first `max_bytes` were yielded.
        httpx.DecodingError: The encoding is neither gzip nor identity, or the body is corrupt.
        httpx.RemoteProtocolError: The gzip of the body is cut off; the bytes before that were yielded.
    """
    decoder = _BodyDecoder(response, max_bytes)
    for chunk in response.iter_raw():
        yield from decoder.decode(chunk)
    decoder.finish()


async def iter_body_async(response: httpx.Response, max_bytes: int) -> AsyncGenerator[bytes]:
    """Yield the decompressed body of an asynchronous client's response, as `iter_body` does."""
    decoder = _BodyDecoder(response, max_bytes)
    async for chunk in response.aiter_raw():
        for decoded_bytes in decoder.decode(chunk):
            yield decoded_bytes
    decoder.finish()


class _BodyDecoder:
    """Decompresses a body up to a number of bytes."""

    def __init__(self, response: httpx.Response, max_bytes: int) -> None:
        self._request, self._bytes_left = response.request, max_bytes
        encoding = response.headers.get("content-encoding", "identity").strip().lower()
        if encoding not in {"", "identity", "gzip", "x-gzip"}:
            raise httpx.DecodingError(f"it is encoded as {encoding[:40]}, not as gzip", request=self._request)
        self._decompressor = zlib.decompressobj(_GZIP_WINDOW) if encoding.endswith("gzip") else None
        self._is_complete = True  # an empty body, such as that of a redirect, has no gzip

    def decode(self, chunk: bytes) -> Iterator[bytes]:
        """Yield the decompressed bytes of a chunk; raise `ReplyTooLargeError` beyond the limit."""
        while chunk:
            decoded_bytes, chunk = self._decompress_chunk(chunk)
            if decoded_bytes:
                yield decoded_bytes[: self._bytes_left]
            self._bytes_left -= len(decoded_bytes)
            if self._bytes_left < 0:
                raise ReplyTooLargeError

    def finish(self) -> None:
        """Check that the gzip of the body was not cut off.

        httpx notices this only if the server announced the length of the body.

        Raises:
            httpx.RemoteProtocolError: It was cut off; `retry` sends the request again.
        """
        if not self._is_complete:
            raise httpx.RemoteProtocolError("the gzip of the reply is cut off", request=self._request)

    def _decompress_chunk(self, chunk: bytes) -> tuple[bytes, bytes]:
        """Return decompressed bytes (at most one beyond the limit), and the unread rest of the
        chunk.
        """
        if self._decompressor is None:
            return chunk, b""
        if self._decompressor.eof:  # another gzip member follows
            self._decompressor = zlib.decompressobj(_GZIP_WINDOW)
        try:
            decoded_bytes = self._decompressor.decompress(chunk, self._bytes_left + 1)
        except zlib.error as error:
            raise httpx.DecodingError(f"its gzip is corrupt ({error})", request=self._request) from error
        self._is_complete = self._decompressor.eof
        return decoded_bytes, self._decompressor.unconsumed_tail or self._decompressor.unused_data


class BusyError(Exception):
    """A request should be sent again later.

    `seconds` is the server's `Retry-After`, if it sent one. `retry` gives up after `max_tries`
    requests.
    """

    def __init__(self, reason: str, seconds: float | None = None, max_tries: int = MAX_TRIES) -> None:
        super().__init__(reason)
        self.seconds, self.max_tries = seconds, max_tries


def open_polite_client(**headers: str) -> httpx.Client:
    """Return a client with a single connection, whose User-Agent names bookwheel and its operator.

    Raises:
        UsageError: The contact, a proxy or the certificates from the environment are unusable.
    """
    contact = os.environ.get(CONTACT_VARIABLE, "")
    if not re.fullmatch(r"[\x20-\x7e]{0,200}", contact):
        raise UsageError(f"{CONTACT_VARIABLE} has characters other than printable ASCII: give an address or a URL")
    user_agent = f"{USER_AGENT} ({contact})" if contact else USER_AGENT
    limits = httpx.Limits(max_connections=1)
    return create_http_client(
        httpx.Client, headers={"User-Agent": user_agent, **headers}, timeout=_TIMEOUT, limits=limits
    )


def is_encrypted_or_local(scheme: str, host: str) -> bool:
    """Return whether requests to a host are encrypted, or stay on this machine."""
    host = host.lower()
    return scheme.lower() == "https" or host.rpartition(":")[0] in LOOPBACK or host in LOOPBACK


def retry(
    url: str,
    send: Callable[[], T],
    has_answered: Callable[[], bool],
    sleep: Callable[[float], None] = time.sleep,
) -> T:
    """Call `send` and return its result; while the server is busy, call it again after a pause.

    `has_answered` returns whether the server has answered an earlier request; if it has not, a
    failed connection is not tried again.

    Raises:
        UnreachableError: The server cannot be reached, asks to wait for too long, or stays busy.
    """
    pause_seconds = 1.0
    for attempt in range(1, MAX_TRIES + 1):
        try:
            return send()
        except (BusyError, httpx.TransportError) as error:
            if isinstance(error, _CONNECT_ERRORS) and not has_answered():
                raise UnreachableError(
                    f"{url} cannot be reached ({format_error(error)}): check the address, and that the server runs"
                ) from error
            wait_seconds = getattr(error, "seconds", None)
            if attempt >= getattr(error, "max_tries", MAX_TRIES) or (wait_seconds or 0) > _MAX_RETRY_AFTER:
                requested_wait = f", and asks to wait {wait_seconds:.0f} s" if wait_seconds else ""
                raise UnreachableError(
                    f"{url} did not answer {attempt} requests in a row "
                    f"({format_error(error)}{requested_wait}): "
                    "run the command again later to continue"
                ) from error
            sleep(wait_seconds if wait_seconds is not None else pause_seconds)
            pause_seconds = min(2 * pause_seconds, _MAX_PAUSE)
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
            f"{url} redirects to another server, "
            f"{target.scheme}://{target.netloc.rpartition('@')[2]}: use "
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


def parse_retry_after(value: str | None, now: datetime | None = None) -> float | None:
    """Parse a Retry-After header, a number or a date, to seconds; None if it is missing or invalid.

    >>> parse_retry_after("3"), parse_retry_after("soon")
    (3.0, None)
    """
    if value is None:
        return None
    if _SECONDS_PATTERN.fullmatch(value.strip()):
        return float(value)
    try:
        retry_time = parsedate_to_datetime(value)
    except ValueError:
        return None
    return max(0.0, (retry_time.replace(tzinfo=retry_time.tzinfo or UTC) - (now or datetime.now(UTC))).total_seconds())
