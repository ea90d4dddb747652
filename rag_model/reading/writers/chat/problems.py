"""One sentence for each way in which an endpoint fails, and whether it is worth asking again."""

import json
import re
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from rag_model.errors import BookwheelError, EndpointError, PromptTooLongError
from rag_model.json_text import parse_json
from rag_model.reading.writers.chat.events import said
from rag_model.reading.writers.chat.place import Place
from rag_model.secrets import without_secrets
from rag_model.terminal import printable

_SHOWN = 300  # characters of what an endpoint says
_PASSING = frozenset((408, 409, 425, 429, 500, 502, 503, 504, 529))
_TOO_LONG = re.compile(
    r"context.{0,20}(length|window|size)|too (long|large)|maximum.{0,20}tokens|exceed", re.IGNORECASE
)
_NO_MONEY = "insufficient_quota"  # a 429 that no waiting mends


class FailedTryError(Exception):
    """A try that failed; what callers see is its `error`."""

    def __init__(self, error: BookwheelError, passing: bool = False, wait: float | None = None) -> None:
        """Hold what it means; `passing`: another try may succeed, after `wait` seconds if the endpoint says so."""
        super().__init__(str(error))
        self.error, self.passing, self.wait = error, passing, wait


@dataclass(frozen=True, slots=True)
class Problems:
    """Failures of one endpoint and one model."""

    place: Place
    model: str

    def unreachable(self, why: object) -> FailedTryError:
        """No connection, or one that broke."""
        words = self._clean(str(why) or type(why).__name__)
        return self._failed(f"cannot be reached ({words}): check the base URL, and that it runs", passing=True)

    def late(self, what: str, seconds: float) -> FailedTryError:
        """Nothing came in time."""
        return self._failed(f"{what} within {seconds:g} s: ask again later, or give it more time", passing=True)

    def redirects(self, target: str) -> FailedTryError:
        """Another address is named, which may be another host: neither the key nor the prompt goes there."""
        place = self._clean(_host(target) or "another path")
        return self._failed(f"redirects to {place}, which is not followed: set that base URL if you trust it")

    def large(self, most: int) -> FailedTryError:
        """More bytes came than a reply may have."""
        return self._failed(f"sent more than {most} bytes for one answer: check that it is a chat-completions API")

    def malformed(self, why: object) -> FailedTryError:
        """What came is not of the protocol."""
        return self._failed(
            f"sent what is not a chat completion ({self._clean(str(why))}): check that the base URL ends as its API's, "
            "as in /v1"
        )

    def cut(self) -> FailedTryError:
        """The stream ended half-way."""
        return self._failed("ended its answer half-way: ask again", passing=True)

    def event(self, words: str) -> FailedTryError:
        """The stream holds an error."""
        if _TOO_LONG.search(words):
            return self._too_long(words)
        return self._failed(f"failed while it wrote ({self._clean(words)}): ask again", passing=True)

    def status(self, status: int, body: bytes, wait: float | None) -> FailedTryError:
        """Return what a reply of this status means."""
        words, code = _said(body)
        told = self._told(words)
        if status in {401, 403}:
            lacks = "accepts no request without a key" if not self.place.key else "does not accept the key"
            return self._failed(f"{lacks} ({status}): set {self.place.variable} to one that may use {self.model}")
        if status == 404:
            return self._failed(f"has no model {self.model}, or no chat completions at this address{told}: check both")
        if status in {400, 413, 422} and _TOO_LONG.search(words or ("too large" if status == 413 else "")):
            return self._too_long(words)
        if status == 429 and code == _NO_MONEY:
            return self._failed(f"has no budget left for this key{told}: add to it, or use another one")
        if status in _PASSING:
            busy = "is busy" if status == 429 else "failed"
            return self._failed(f"{busy} ({status}){told}: ask again later", passing=True, wait=wait)
        return self._failed(f"refused the request ({status}){told}: check the model's settings")

    def _too_long(self, words: str) -> FailedTryError:
        return FailedTryError(
            PromptTooLongError(
                f"the prompt is longer than {self.model} at {self.place.host} reads{self._told(words)}: give fewer "
                "passages, or set BOOKWHEEL_LLM_CONTEXT to the tokens of its context"
            )
        )

    def _failed(self, what: str, *, passing: bool = False, wait: float | None = None) -> FailedTryError:
        return FailedTryError(EndpointError(f"the endpoint at {self.place.host} {what}"), passing, wait)

    def _told(self, words: str) -> str:
        return f" ({self._clean(words)})" if words else ""

    def _clean(self, text: str) -> str:
        """Return what an endpoint says as a part of our sentence: without the key, in one line, and not long."""
        words = without_secrets(self.place.hidden(" ".join(text.split())))
        return printable(words)[:_SHOWN].rstrip(" .:;")


def _host(target: str) -> str:
    """Return the host that a redirect names; an address that cannot be parsed names none."""
    try:
        return urlsplit(target).netloc
    except ValueError:
        return "an invalid address"


def _said(body: bytes) -> tuple[str, str]:
    """Return the message and the code of an error's body; a body that is no JSON says nothing worth repeating."""
    try:
        value: Any = parse_json(body)
    except ValueError:
        return "", ""
    problem = value.get("error", value) if isinstance(value, dict) else value
    code = problem.get("code") if isinstance(problem, dict) else ""
    return said(problem) if isinstance(problem, dict | str) else json.dumps(problem)[:_SHOWN], str(code or "")
