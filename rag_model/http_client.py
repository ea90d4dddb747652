"""Create httpx clients, and read replies with a bound on their decompressed size.

The clients read proxies and certificates from the environment.

A few kilobytes can decompress to gigabytes. So the clients accept only gzip, whose decompression
zlib can stop at any byte, and `iter_body` refuses every other encoding.
"""

import zlib
from collections.abc import AsyncGenerator, Iterator
from typing import Any, TypeVar

import httpx

from rag_model.errors import UsageError, format_error

_Client = TypeVar("_Client", httpx.Client, httpx.AsyncClient)
_ENCODING = "gzip"
_GZIP_WINDOW = 16 + zlib.MAX_WBITS  # makes zlib expect the gzip format


class ReplyTooLargeError(Exception):
    """The decompressed body of a reply is larger than its reader accepts."""


def create_http_client(client_class: type[_Client], **settings: Any) -> _Client:
    """Create a synchronous or asynchronous client.

    Raises:
        UsageError: A proxy or a certificate file from the environment is unusable.
    """
    settings["headers"] = {"Accept-Encoding": _ENCODING, **settings.get("headers", {})}
    try:
        return client_class(**settings)
    except (ValueError, ImportError, OSError, httpx.InvalidURL) as error:
        raise UsageError(
            "the proxy or the certificates from the environment are unusable "
            f"({format_error(error)}): correct HTTP_PROXY, HTTPS_PROXY, ALL_PROXY, NO_PROXY, "
            "SSL_CERT_FILE or SSL_CERT_DIR"
        ) from error


def iter_body(response: httpx.Response, max_bytes: int) -> Iterator[bytes]:
    """Yield the decompressed body of a streamed response, up to `max_bytes`.

    Raises:
        ReplyTooLargeError: The body is larger; its first `max_bytes` were yielded.
        httpx.DecodingError: The encoding is neither gzip nor identity, or the body is corrupt.
    """
    decoder = _BodyDecoder(response, max_bytes)
    for chunk in response.iter_raw():
        yield from decoder.decode(chunk)


async def iter_body_async(response: httpx.Response, max_bytes: int) -> AsyncGenerator[bytes]:
    """Yield the decompressed body of an asynchronous client's response, as `iter_body` does."""
    decoder = _BodyDecoder(response, max_bytes)
    async for chunk in response.aiter_raw():
        for decoded in decoder.decode(chunk):
            yield decoded


class _BodyDecoder:
    """Decompresses a body up to a number of bytes."""

    def __init__(self, response: httpx.Response, max_bytes: int) -> None:
        self._request, self._bytes_left = response.request, max_bytes
        encoding = response.headers.get("content-encoding", "identity").strip().lower()
        if encoding not in {"", "identity", "gzip", "x-gzip"}:
            raise httpx.DecodingError(f"it is encoded as {encoding[:40]}, not as gzip", request=self._request)
        self._decompressor = zlib.decompressobj(_GZIP_WINDOW) if encoding.endswith("gzip") else None

    def decode(self, chunk: bytes) -> Iterator[bytes]:
        """Yield the decompressed bytes of a chunk; raise `ReplyTooLargeError` beyond the limit."""
        while chunk:
            decoded, chunk = self._decode_part(chunk)
            if decoded:
                yield decoded[: self._bytes_left]
            self._bytes_left -= len(decoded)
            if self._bytes_left < 0:
                raise ReplyTooLargeError

    def _decode_part(self, chunk: bytes) -> tuple[bytes, bytes]:
        """Return decompressed bytes, at most one more than the limit, and the rest of the chunk."""
        if self._decompressor is None:
            return chunk, b""
        if self._decompressor.eof:  # another member follows
            self._decompressor = zlib.decompressobj(_GZIP_WINDOW)
        try:
            decoded = self._decompressor.decompress(chunk, self._bytes_left + 1)
        except zlib.error as error:
            raise httpx.DecodingError(f"its gzip is corrupt ({error})", request=self._request) from error
        return decoded, self._decompressor.unconsumed_tail or self._decompressor.unused_data
