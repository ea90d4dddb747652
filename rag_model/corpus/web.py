"""Requests to servers that are not trusted: no other server, and none that sends a byte now and then for ever.

The standard library's time limit is between two bytes. Here waiting for bytes uses up a minute of patience, and every
byte gives some back, so a connection ends that brings less than `LEAST` bytes in that time: head and body alike.
"""

import io
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection
from typing import Any
from urllib.parse import urlsplit
from urllib.request import HTTPHandler, HTTPRedirectHandler, HTTPSHandler, Request, build_opener

from rag_model.errors import InputError

PATIENCE = 60.0  # seconds without a byte until a connection counts as dead
LEAST = 1 << 16  # bytes in that time
_AGENT = {"User-Agent": "bookwheel (https://pypi.org/project/bookwheel)"}  # Wikimedia refuses clients without a name


class UntrustedError(InputError):
    """The server sends what it must not: asking again does not help."""


class _SameServer(HTTPRedirectHandler):
    """Follows redirects within a server alone: what it is not trusted with, it must not send us to."""

    def redirect_request(self, req: Request, fp: Any, code: int, msg: str, headers: Any, newurl: str) -> Request | None:
        """Refuse another server; the same one may move from http to https."""
        asked, told = urlsplit(req.full_url), urlsplit(newurl)
        secured = (asked.scheme, told.scheme, asked.port) == ("http", "https", told.port)
        if told.netloc != asked.netloc or not (told.scheme == asked.scheme or secured):
            raise UntrustedError(
                f"{req.full_url} redirects to another server, {told.scheme}://{told.hostname}: give that one's address "
                "if you trust it"
            )
        return super().redirect_request(req, fp, code, msg, headers, newurl)


class _Rated(io.RawIOBase):
    """The bytes of a socket, as long as they come fast enough."""

    def __init__(self, raw: Any, sock: Any) -> None:
        """Read from `raw`, which reads from `sock`."""
        self._raw, self._sock, self._patience = raw, sock, PATIENCE

    def readable(self) -> bool:
        """Say that it can be read."""
        return True

    def readinto(self, room: Any) -> int | None:
        """Read some bytes.

        Raises:
            TimeoutError: too few came.
        """
        if self._patience <= 0:
            raise TimeoutError(f"the server sends less than {LEAST >> 10} KiB in {PATIENCE:.0f} s")
        self._sock.settimeout(self._patience)
        began = time.monotonic()
        count: int | None = self._raw.readinto(room)
        waited = time.monotonic() - began
        self._patience = min(PATIENCE, self._patience - waited + (count or 0) * PATIENCE / LEAST)
        return count

    def close(self) -> None:
        """Close the socket's file too."""
        self._raw.close()
        super().close()


class _Response(HTTPResponse):
    def __init__(self, sock: Any, *given: Any, **named: Any) -> None:
        super().__init__(sock, *given, **named)
        file: Any = self.fp
        self.fp = io.BufferedReader(_Rated(file.detach(), sock))


class _Connection(HTTPConnection):
    response_class = _Response


class _SecureConnection(HTTPSConnection):
    response_class = _Response


class _Plain(HTTPHandler):
    def http_open(self, req: Request) -> Any:
        return self.do_open(_Connection, req)


class _Secure(HTTPSHandler):
    def https_open(self, req: Request) -> Any:
        return self.do_open(_SecureConnection, req)


_OPENER = build_opener(_SameServer, _Plain, _Secure)


@contextmanager
def opened(url: str, headers: Mapping[str, str]) -> Iterator[Any]:
    """Ask for a URL; the answer is closed at the end of the block.

    Raises:
        InputError: it is no web address, or the server does not answer, or refuses, or sends its head too slowly.
        UntrustedError: it redirects to another server.
    """
    if urlsplit(url).scheme not in {"http", "https"}:
        raise InputError(f"{url} is not a web address: give one such as https://dumps.wikimedia.org/enwiki/")
    try:
        answer = _OPENER.open(Request(url, headers={**_AGENT, **headers}), timeout=PATIENCE)
    except (OSError, HTTPException, ValueError) as failed:
        raise InputError(f"{url} cannot be read ({getattr(failed, 'reason', failed)}): check the address") from failed
    with answer:
        yield answer
