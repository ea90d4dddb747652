"""One sentence for each way in which an endpoint fails, and whether a retry may help."""

import json
import re
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from rag_model.errors import BookwheelError, EndpointError, PromptTooLongError
from rag_model.reading.writers.chat_events import get_error_message
from rag_model.reading.writers.chat_settings import Endpoint
from rag_model.secrets import mask_secrets
from rag_model.untrusted_text import escape_controls, parse_json

_MAX_SHOWN = 300  # characters of an endpoint's message
_TRANSIENT_STATUSES = frozenset((408, 409, 425, 429, 500, 502, 503, 504, 529))
_PROMPT_TOO_LONG = re.compile(
    r"context.{0,20}(length|window|size)|too (long|large)|maximum.{0,20}tokens|exceed", re.IGNORECASE
)
_NO_QUOTA = "insufficient_quota"  # code of a 429 for which no retry helps


class FailedAttemptError(Exception):
    """A failed attempt; callers see its `error`."""

    def __init__(self, error: BookwheelError, is_transient: bool = False, wait_seconds: float | None = None) -> None:
        """Store the error; if it `is_transient`, a retry may succeed, after `wait_seconds` if the
        endpoint says so.
        """
        super().__init__(str(error))
        self.error, self.is_transient, self.wait_seconds = error, is_transient, wait_seconds


@dataclass(frozen=True, slots=True)
class EndpointErrors:
    """Creates the errors of one endpoint and one model."""

    endpoint: Endpoint
    model: str

    def unreachable(self, reason: object) -> FailedAttemptError:
        """Return the error for a failed or broken connection."""
        detail = self._sanitize(str(reason) or type(reason).__name__)
        return self._failed_attempt(
            f"cannot be reached ({detail}): check the base URL, and that it runs", is_transient=True
        )

    def timed_out(self, action: str, seconds: float) -> FailedAttemptError:
        """Return the error for a timeout."""
        return self._failed_attempt(
            f"{action} within {seconds:g} s: ask again later, or give it more time", is_transient=True
        )

    def redirect(self, location: str) -> FailedAttemptError:
        """Return the error for a redirect; key and prompt are not sent to another address."""
        host = self._sanitize(_get_host(location) or "another path")
        return self._failed_attempt(f"redirects to {host}, which is not followed: set that base URL if you trust it")

    def reply_too_large(self, max_bytes: int) -> FailedAttemptError:
        """Return the error for a reply with too many bytes."""
        return self._failed_attempt(
            f"sent more than {max_bytes} bytes for one answer: check that it is a chat-completions API"
        )

    def not_a_completion(self, reason: object) -> FailedAttemptError:
        """Return the error for a reply that violates the protocol."""
        return self._failed_attempt(
            f"sent what is not a chat completion ({self._sanitize(str(reason))}): check that the "
            "base URL ends as its API's, as in /v1"
        )

    def reply_incomplete(self) -> FailedAttemptError:
        """Return the error for a stream that ended too early."""
        return self._failed_attempt("ended its answer half-way: ask again", is_transient=True)

    def streamed_error(self, message: str) -> FailedAttemptError:
        """Return the error for an error object in a stream."""
        if _PROMPT_TOO_LONG.search(message):
            return self._prompt_too_long(message)
        return self._failed_attempt(f"failed while it wrote ({self._sanitize(message)}): ask again", is_transient=True)

    def bad_status(self, status: int, body: bytes, wait_seconds: float | None) -> FailedAttemptError:
        """Return the error for an HTTP status."""
        message, code = _parse_error_body(body)
        detail = self.quote(message)
        if status in {401, 403}:
            problem = "accepts no request without a key" if not self.endpoint.key else "does not accept the key"
            return self._failed_attempt(
                f"{problem} ({status}): set {self.endpoint.key_variable} to one that may use {self.model}"
            )
        if status == 404:
            return self._failed_attempt(
                f"has no model {self.model}, or no chat completions at this address{detail}: check both"
            )
        if status in {400, 413, 422} and _PROMPT_TOO_LONG.search(message or ("too large" if status == 413 else "")):
            return self._prompt_too_long(message)
        if status == 429 and code == _NO_QUOTA:
            return self._failed_attempt(f"has no budget left for this key{detail}: add to it, or use another one")
        if status in _TRANSIENT_STATUSES:
            problem = "is busy" if status == 429 else "failed"
            return self._failed_attempt(
                f"{problem} ({status}){detail}: ask again later", is_transient=True, wait_seconds=wait_seconds
            )
        return self._failed_attempt(f"refused the request ({status}){detail}: check the model's settings")

    def _prompt_too_long(self, message: str) -> FailedAttemptError:
        return FailedAttemptError(
            PromptTooLongError(
                f"the prompt is longer than {self.model} at {self.endpoint.host} "
                f"reads{self.quote(message)}: give fewer passages, or set "
                "BOOKWHEEL_LLM_CONTEXT to the tokens of its context"
            )
        )

    def _failed_attempt(
        self, problem: str, *, is_transient: bool = False, wait_seconds: float | None = None
    ) -> FailedAttemptError:
        return FailedAttemptError(
            EndpointError(f"the endpoint at {self.endpoint.host} {problem}"), is_transient, wait_seconds
        )

    def quote(self, message: str) -> str:
        """Return an endpoint's text in parentheses, shortened for a message; "" for an empty text."""
        return f" ({self._sanitize(message)})" if message else ""

    def _sanitize(self, text: str) -> str:
        """Return an endpoint's message for an error: without the key, in one line, at most 300
        characters.
        """
        sanitized = mask_secrets(self.endpoint.mask_key(" ".join(text.split())))
        return escape_controls(sanitized)[:_MAX_SHOWN].rstrip(" .:;")


def _get_host(location: str) -> str:
    """Return the host of a redirect's location."""
    try:
        return urlsplit(location).netloc
    except ValueError:
        return "an invalid address"


def _parse_error_body(body: bytes) -> tuple[str, str]:
    """Return the message and the code of an error body; both are empty if it is not JSON."""
    try:
        value: Any = parse_json(body)
    except ValueError:
        return "", ""
    error = value.get("error", value) if isinstance(value, dict) else value
    code = error.get("code") if isinstance(error, dict) else ""
    return get_error_message(error) if isinstance(error, dict | str) else json.dumps(error)[:_MAX_SHOWN], str(
        code or ""
    )
