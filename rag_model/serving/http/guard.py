"""Check the head of a request: host, origin, bearer token and content type.

A web page of another site, open in the user's browser, must not use the service. The host name of
that site can be made to resolve to this machine (DNS rebinding), so `Host` is checked. Browsers
send the site of the page in `Origin`, except in a `GET` to the page's own host. If any host is
allowed, `Host` proves nothing. Then an origin, and the host of a `GET`, must be allowed by name, or
be a host that no other site can have: an IP address or a name without dots. Endpoints accept only
`application/json`, which a page of another site may not send without a CORS preflight request.
`/retrieve` also accepts MessagePack, with its content type or without any, as GEM's client sends
it; `Origin` is checked there too.
"""

import hashlib
import hmac
import logging
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from ipaddress import ip_address
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from rag_model.errors import UsageError
from rag_model.secrets import LOOPBACK
from rag_model.serving.settings import ANY_HOST, ServiceSettings

_LOG = logging.getLogger(__name__)
_MIN_TOKEN_LENGTH = 16  # characters; shorter tokens can be guessed
_RELOAD_SECONDS = 1.0  # seconds between two checks whether the file has changed
_BEARER = b"bearer "
_PRINTABLE = re.compile(rb"[!-~]+")  # ASCII without spaces, as a header requires
_HEALTH_PATHS = frozenset(("/healthz", "/readyz"))  # health checks may use any host name
_BODY_PATHS = frozenset(("/search", "/answer"))  # endpoints with a JSON body
_RETRIEVE_PATH = "/retrieve"
_READ_METHODS = frozenset(("GET", "HEAD"))
JSON_TYPE, MSGPACK_TYPE = "application/json", "application/msgpack"
MSGPACK_TYPES = ("", MSGPACK_TYPE, "application/x-msgpack", "application/vnd.msgpack")


class BearerTokens:
    """The bearer tokens in a file, one a line; empty lines and lines that begin with # are ignored.

    The file is reloaded when it changes: deleting a line revokes its token without a restart.
    """

    def __init__(self, path: Path) -> None:
        """Read the file.

        Raises:
            UsageError: The file cannot be read, has no token, or has a malformed or short token.
        """
        self._path = path
        self._file_stamp = _read_file_stamp(path)
        self._token_digests = _read_token_digests(path)
        if not self._token_digests:
            raise UsageError(
                f"the tokens' file {path} holds no token: write one a line, as `openssl rand -hex 32` makes"
            )
        self._next_check = time.monotonic() + _RELOAD_SECONDS

    def is_valid(self, authorization: bytes | None) -> bool:
        """Return whether an Authorization header contains a token of the file.

        The header is compared with all tokens, each in constant time, so that timing reveals
        nothing.
        """
        if time.monotonic() >= self._next_check:
            self._reload_if_changed()
        if authorization is None or authorization[: len(_BEARER)].lower() != _BEARER:
            return False
        token_digest = hashlib.sha256(authorization[len(_BEARER) :].strip()).digest()
        return sum(hmac.compare_digest(token_digest, valid_digest) for valid_digest in self._token_digests) > 0

    def _reload_if_changed(self) -> None:
        """Reload the file if it changed; a missing or unusable file is logged and ignored."""
        self._next_check = time.monotonic() + _RELOAD_SECONDS
        try:
            file_stamp = _read_file_stamp(self._path)
            if file_stamp != self._file_stamp:
                self._file_stamp, self._token_digests = file_stamp, _read_token_digests(self._path)
                _LOG.info("%s was read again; tokens in it: %d", self._path, len(self._token_digests))
                if not self._token_digests:
                    _LOG.warning("%s holds no token any more: no request is answered", self._path)
        except UsageError as error:
            _LOG.error("%s; the tokens that were read before stay valid", error)


def _read_file_stamp(path: Path) -> tuple[int, int, int]:
    try:
        file_status = path.stat()
    except OSError as error:
        raise UsageError(f"the tokens' file {path} cannot be read ({error.strerror}): give a readable file") from error
    return file_status.st_ino, file_status.st_size, file_status.st_mtime_ns


def _read_token_digests(path: Path) -> tuple[bytes, ...]:
    """Return the digests of the tokens in a file; () if the file has no tokens."""
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise UsageError(f"the tokens' file {path} cannot be read ({error.strerror}): give a readable file") from error
    digests: list[bytes] = []
    for line_number, token in enumerate(map(bytes.strip, lines), start=1):
        if not token or token.startswith(b"#"):
            continue
        if not _PRINTABLE.fullmatch(token):
            raise UsageError(
                f"the token in line {line_number} of {path} holds a space or a character other than "
                "printable ASCII: use `openssl rand -hex 32`"
            )
        if len(token) < _MIN_TOKEN_LENGTH:
            raise UsageError(
                f"the token in line {line_number} of {path} has less than {_MIN_TOKEN_LENGTH} "
                "characters, so it can be guessed: use `openssl rand -hex 32`"
            )
        digests.append(hashlib.sha256(token).digest())
    return tuple(digests)


@dataclass(frozen=True, slots=True)
class Rejection:
    """The reply to a rejected request."""

    status: int
    detail: str
    headers: Mapping[str, str] = field(default_factory=dict)


_WRONG_HOST = Rejection(
    421,
    "the service does not accept this host name: use another one, or start it with --allow-host NAME",
)
_MISSING_HOST = Rejection(400, "the request names no host: send one Host header, such as Host: localhost:8000")
_SEVERAL_HOSTS = Rejection(421, "the request has several Host headers: send one")
_WRONG_ORIGIN = Rejection(
    403,
    "the service does not accept requests from this page: start it with --allow-host NAME, the page's host name",
)
_MISSING_TOKEN = Rejection(
    401,
    "give one of the service's tokens: Authorization: Bearer TOKEN",
    {"WWW-Authenticate": 'Bearer realm="bookwheel"'},
)
_WRONG_RETRIEVE_TYPE = Rejection(
    415,
    "the body is declared as neither JSON nor MessagePack: send it with Content-Type: "
    "application/json or application/msgpack",
)
_WRONG_CONTENT_TYPE = Rejection(415, "the body is not declared as JSON: send it with Content-Type: application/json")


class RequestGuard:
    """Accepts or rejects requests by their heads."""

    def __init__(self, settings: ServiceSettings, tokens: BearerTokens | None = None) -> None:
        """Accept requests to the hosts in the settings; with `tokens`, require a valid token."""
        self._allows_any_host = ANY_HOST in settings.allowed_hosts
        self._hosts = {name.lower().encode() for name in (*settings.allowed_hosts, *LOOPBACK)}
        self._origins = {name.lower().encode() for name in settings.allowed_hosts if name not in LOOPBACK}
        self._tokens = tokens

    def find_rejection(self, scope: Mapping[str, Any]) -> Rejection | None:
        """Return the rejection of a request; None if it is accepted."""
        if scope["path"] in _HEALTH_PATHS:
            return None
        host = origin = authorization = content_type = None
        host_count = 0
        for name, header in scope["headers"]:
            if name == b"host":
                host, host_count = header, host_count + 1
            elif name == b"origin":
                origin = header
            elif name == b"authorization":
                authorization = header
            elif name == b"content-type":
                content_type = header
        if rejection := self._check_host(host or b"", host_count, scope["method"] in _READ_METHODS):
            return rejection
        if origin is not None and not self._is_own_origin(origin, host or b""):
            return _WRONG_ORIGIN
        if self._tokens is not None and not self._tokens.is_valid(authorization):
            return _MISSING_TOKEN
        return _check_content_type(scope["path"], content_type or b"") if scope["method"] == "POST" else None

    def _check_host(self, host: bytes, host_count: int, is_read_request: bool) -> Rejection | None:
        if host_count > 1:
            return _SEVERAL_HOSTS
        if self._is_allowed_host(host.lower()) or (
            self._allows_any_host and not (is_read_request and not self._cannot_be_another_site(host.lower()))
        ):
            return None
        return _WRONG_HOST if host else _MISSING_HOST

    def _is_allowed_host(self, host: bytes) -> bool:
        return host in self._hosts or _strip_port(host) in self._hosts

    def _is_own_origin(self, origin: bytes, host: bytes) -> bool:
        """Return whether a page's origin is this service or a host that is allowed by name."""
        try:
            origin_host = urlsplit(origin.decode("ascii").lower()).netloc.encode()
        except ValueError:
            return False
        return bool(origin_host) and (
            origin_host in self._origins or (origin_host == host.lower() and self._cannot_be_another_site(origin_host))
        )

    def _cannot_be_another_site(self, host: bytes) -> bool:
        """Return whether a host is allowed by name, is an IP address, or has no dot."""
        host_name = _strip_port(host)
        return (
            not self._allows_any_host
            or self._is_allowed_host(host)
            or _is_address(host_name)
            or (bool(host_name) and b"." not in host_name)
        )


def _check_content_type(path: str, content_type: bytes) -> Rejection | None:
    media_type = content_type.partition(b";")[0].strip().lower().decode("latin-1")
    if path == _RETRIEVE_PATH and media_type not in (JSON_TYPE, *MSGPACK_TYPES):
        return _WRONG_RETRIEVE_TYPE
    return _WRONG_CONTENT_TYPE if path in _BODY_PATHS and media_type != JSON_TYPE else None


def _strip_port(host: bytes) -> bytes:
    name, separator, port = host.rpartition(b":")
    return name if separator and port.isdigit() else host


def _is_address(host_name: bytes) -> bool:
    try:
        ip_address(host_name.decode().removeprefix("[").removesuffix("]"))
    except ValueError:
        return False
    return True
