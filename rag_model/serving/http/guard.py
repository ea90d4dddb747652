"""What a request must be before an endpoint sees it: for this host, from this page, with a token, and JSON.

A page of another site that is open in a browser beside the service must not use it: its address can be made to name
this machine (DNS rebinding), so `Host` is checked; and it says where it is from in `Origin`, but not in a `GET` of its
own address. Where any host is answered, `Host` proves nothing: then an origin, and the host of a `GET`, must be one
that no other site can have, an IP address or a name without dots, or be allowed by name. Endpoints take only
`application/json`, which no page of another site may send without being asked first.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from ipaddress import ip_address
from typing import Any
from urllib.parse import urlsplit

from rag_model.serving.http.tokens import Tokens
from rag_model.serving.service_settings import ANY_HOST, LOOPBACK, ServiceSettings

_HEALTH = frozenset(("/healthz", "/readyz"))  # asked by machines under any name
_ASKED = frozenset(("/search", "/answer"))  # these take a body
_READ = frozenset(("GET", "HEAD"))
_JSON = b"application/json"


@dataclass(frozen=True, slots=True)
class Refused:
    """Why a request is not taken."""

    status: int
    sentence: str
    headers: Mapping[str, str] = field(default_factory=dict)


_HOST = Refused(
    421, "this service does not answer under that host name: ask it by another one, or start it with --allow-host NAME"
)
_NO_HOST = Refused(400, "the request names no host: send one Host header, such as Host: localhost:8000")
_HOSTS = Refused(421, "the request has several Host headers: send one")
_ORIGIN = Refused(
    403, "this page may not ask the service: start it with --allow-host NAME, the host name in the page's address"
)
_TOKEN = Refused(
    401,
    "give one of the service's tokens: Authorization: Bearer TOKEN",
    {"WWW-Authenticate": 'Bearer realm="bookwheel"'},
)
_TYPE = Refused(415, "the body is not declared as JSON: send it with Content-Type: application/json")


class Guard:
    """Decides by a request's head alone."""

    def __init__(self, settings: ServiceSettings, tokens: Tokens | None = None) -> None:
        """Let through what the settings allow, and with `tokens` only who has one."""
        self._any = ANY_HOST in settings.hosts
        self._hosts = {name.lower().encode() for name in (*settings.hosts, *LOOPBACK)}
        self._origins = {name.lower().encode() for name in settings.hosts if name not in LOOPBACK}
        self._tokens = tokens

    def refusal(self, scope: Mapping[str, Any]) -> Refused | None:
        """Return why a request is refused; None: it is not."""
        if scope["path"] in _HEALTH:
            return None
        host = origin = authorization = kind = None
        hosts = 0
        for name, value in scope["headers"]:
            if name == b"host":
                host, hosts = value, hosts + 1
            elif name == b"origin":
                origin = value
            elif name == b"authorization":
                authorization = value
            elif name == b"content-type":
                kind = value
        if wrong := self._wrong_host(host or b"", hosts, scope["method"] in _READ):
            return wrong
        if origin is not None and not self._is_ours(origin, host or b""):
            return _ORIGIN
        if self._tokens is not None and not self._tokens.allow(authorization):
            return _TOKEN
        if scope["method"] == "POST" and scope["path"] in _ASKED and not _is_json(kind):
            return _TYPE
        return None

    def _wrong_host(self, host: bytes, given: int, reads: bool) -> Refused | None:
        if given > 1:
            return _HOSTS
        if self._named(host.lower()) or (self._any and not (reads and not self._is_no_other_site(host.lower()))):
            return None
        return _HOST if host else _NO_HOST

    def _named(self, host: bytes) -> bool:
        return host in self._hosts or _without_port(host) in self._hosts

    def _is_ours(self, origin: bytes, host: bytes) -> bool:
        """Return whether a page's origin is this service, or a host that was allowed by name."""
        try:
            place = urlsplit(origin.decode("ascii").lower()).netloc.encode()
        except ValueError:
            return False
        return bool(place) and (place in self._origins or (place == host.lower() and self._is_no_other_site(place)))

    def _is_no_other_site(self, place: bytes) -> bool:
        """Return whether no other site can have a host's name: it was allowed, is an IP address, or has no dot."""
        name = _without_port(place)
        return not self._any or self._named(place) or _is_address(name) or (bool(name) and b"." not in name)


def _without_port(host: bytes) -> bytes:
    name, colon, port = host.rpartition(b":")
    return name if colon and port.isdigit() else host


def _is_address(name: bytes) -> bool:
    try:
        ip_address(name.decode().removeprefix("[").removesuffix("]"))
    except ValueError:
        return False
    return True


def _is_json(kind: bytes | None) -> bool:
    return kind is not None and kind.partition(b";")[0].strip().lower() == _JSON
