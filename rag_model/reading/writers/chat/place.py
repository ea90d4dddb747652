"""The base URL and the key of an endpoint, from the environment."""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Self
from urllib.parse import urlsplit

import httpx

from rag_model.errors import UsageError
from rag_model.secrets import refuse_secret

_PUBLIC = "https://api.openai.com/v1"  # the official client's own default
_HEADER = re.compile(r"[!-~]+")  # ASCII without space: what a header can hold
_PAIRS = (("BOOKWHEEL_LLM_BASE_URL", "BOOKWHEEL_LLM_API_KEY"), ("OPENAI_BASE_URL", "OPENAI_API_KEY"))


@dataclass(frozen=True, slots=True)
class Place:
    """Where an endpoint is, and who asks it. The key is in no text that this object is shown as."""

    url: str  # the base, without a slash at its end: /chat/completions follows
    key: str = field(default="", repr=False)  # empty: none is sent
    variable: str = _PAIRS[1][1]  # what the key is set by, for messages

    def __post_init__(self) -> None:
        """Refuse an address that cannot be asked, and a key that cannot be sent.

        Raises:
            UsageError: the URL is no http(s) address, or names a user, a password or a query; or the key has a space.
        """
        try:
            refuse_secret(self.url)
        except UsageError:  # its advice is for stores; what it refused is not repeated
            raise UsageError(
                "the endpoint's base URL has a user, a password, a query or a port that is no number, which may be a "
                f"secret: set a base URL such as http://localhost:8000/v1, and {self.variable} to the key"
            ) from None
        if not _can_be_asked(self.url):
            raise UsageError(
                f"{self.url!r} is not the base URL of an endpoint: set one such as http://localhost:8000/v1"
            )
        if self.key and not _HEADER.fullmatch(self.key):
            raise UsageError(f"{self.variable} holds a space or what is no printable ASCII: set it to the key alone")

    @classmethod
    def of(cls, environment: Mapping[str, str] = os.environ) -> Self:
        """Return what BOOKWHEEL_LLM_BASE_URL names, else what OPENAI_BASE_URL does, else OpenAI's own API.

        Each address is sent the key of its own pair alone: BOOKWHEEL_LLM_API_KEY or OPENAI_API_KEY.

        Raises:
            UsageError: the URL or the key cannot be used.
        """
        url, key = next((pair for pair in _PAIRS if environment.get(pair[0], "").strip()), _PAIRS[1])
        base = environment.get(url, "").strip() or _PUBLIC
        return cls(base.rstrip("/"), environment.get(key, "").strip(), key)

    @property
    def host(self) -> str:
        """The host and the port, as messages name the endpoint."""
        return urlsplit(self.url).netloc

    def hidden(self, text: str) -> str:
        """Return a text without the key."""
        return text.replace(self.key, "***") if self.key else text


def _can_be_asked(url: str) -> bool:
    """Return whether a request can be made of a URL; what fails only in the connection would be no sentence."""
    try:
        parts = urlsplit(url)
        httpx.Request("POST", url)
        (parts.hostname or "").encode("idna")  # as the name is looked up
        whole = parts.scheme in {"http", "https"} and bool(parts.hostname) and parts.port != 0
    except (ValueError, httpx.InvalidURL):
        return False
    return whole and not parts.query and not parts.fragment
