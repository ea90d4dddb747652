"""Bearer tokens in a file: who asks with one of them is answered. The file is read again when it has changed."""

import hashlib
import hmac
import logging
import re
import time
from pathlib import Path

from rag_model.errors import UsageError

_LOG = logging.getLogger(__name__)
_SHORTEST = 16  # characters: fewer can be guessed
_LOOK = 1.0  # seconds between two looks at the file
_BEARER = b"bearer "
_PRINTABLE = re.compile(rb"[!-~]+")  # ASCII without space: what a header can hold


class Tokens:
    """The tokens in a file, one a line; empty lines and those that begin with # are left out.

    Without a restart, tokens are revoked by taking out their lines, and all of them by emptying the file.
    """

    def __init__(self, path: Path) -> None:
        """Read the file.

        Raises:
            UsageError: it cannot be read, holds no token, one that is too short, or bytes that are no text.
        """
        self._path = path
        self._seen = _stamp(path)
        self._known = _read(path)
        if not self._known:
            raise UsageError(
                f"the tokens' file {path} holds no token: write one a line, as `openssl rand -hex 32` makes"
            )
        self._next = time.monotonic() + _LOOK

    def allow(self, authorization: bytes | None) -> bool:
        """Return whether the value of a request's Authorization header holds a token of the file.

        All tokens are compared, each in constant time, so that the time tells nothing of them.
        """
        if time.monotonic() >= self._next:
            self._look()
        if authorization is None or authorization[: len(_BEARER)].lower() != _BEARER:
            return False
        given = hashlib.sha256(authorization[len(_BEARER) :].strip()).digest()
        return sum(hmac.compare_digest(given, known) for known in self._known) > 0

    def _look(self) -> None:
        """Read the file again if it has changed; one that cannot be used, or is gone, changes nothing."""
        self._next = time.monotonic() + _LOOK
        try:
            seen = _stamp(self._path)
            if seen != self._seen:
                self._seen, self._known = seen, _read(self._path)
                _LOG.info("%s was read again; tokens in it: %d", self._path, len(self._known))
                if not self._known:
                    _LOG.warning("%s holds no token any more: no request is answered", self._path)
        except UsageError as broken:
            _LOG.error("%s; the tokens that were read before are still taken", broken)


def _stamp(path: Path) -> tuple[int, int, int]:
    try:
        found = path.stat()
    except OSError as missing:
        raise UsageError(f"the tokens' file {path} cannot be read ({missing.strerror}): give one") from missing
    return found.st_ino, found.st_size, found.st_mtime_ns


def _read(path: Path) -> tuple[bytes, ...]:
    """Return the digests of a file's tokens; none where it is empty."""
    try:
        lines = path.read_bytes().splitlines()
    except OSError as missing:
        raise UsageError(f"the tokens' file {path} cannot be read ({missing.strerror}): give one") from missing
    found = {number: line.strip() for number, line in enumerate(lines, start=1)}
    tokens = {number: token for number, token in found.items() if token and not token.startswith(b"#")}
    if odd := next((number for number, token in tokens.items() if not _PRINTABLE.fullmatch(token)), None):
        raise UsageError(
            f"the token in line {odd} of {path} holds a space or what is no printable ASCII: use `openssl rand -hex 32`"
        )
    if short := next((number for number, token in tokens.items() if len(token) < _SHORTEST), None):
        raise UsageError(
            f"the token in line {short} of {path} has less than {_SHORTEST} characters, so it can be guessed: "
            "use `openssl rand -hex 32`"
        )
    return tuple(hashlib.sha256(token).digest() for token in tokens.values())
