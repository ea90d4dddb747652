"""Parse the server-sent events of a chat completion: bytes in, pieces of text and the whole reply
out.

The protocol has `data: {JSON}` lines, an empty line after each event, and `data: [DONE]` at the
end, which not every server sends. Lines that begin with a colon keep the connection alive.

A server may repeat the request headers, so `KeyMask` replaces the key in the reply.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from rag_model.untrusted_text import parse_json

# Characters; a shorter key, such as the `ollama` of a local server, may be a word of an answer.
MIN_KEY_LENGTH = 16
DONE = "[DONE]"


class KeyMask:
    """Replaces a key in a text that arrives in pieces, wherever they are split."""

    def __init__(self, key: str = "") -> None:
        """Begin a text; keys of fewer than `MIN_KEY_LENGTH` characters are not masked."""
        self._key, self._pending = key if len(key) >= MIN_KEY_LENGTH else "", ""

    def feed(self, piece: str) -> str:
        """Return the masked text so far, except for an end that may be the beginning of the key.

        >>> mask = KeyMask("sk-0123456789abcdef")
        >>> mask.feed("it is sk-0123"), mask.feed("456789abcdef."), mask.end()
        ('it is ', '***.', '')
        """
        if not self._key:
            return piece
        text = (self._pending + piece).replace(self._key, "***")
        self._pending = next(
            (self._key[:size] for size in range(len(self._key) - 1, 0, -1) if text.endswith(self._key[:size])), ""
        )
        return text.removesuffix(self._pending)

    def end(self) -> str:
        """Return the pending end."""
        pending, self._pending = self._pending, ""
        return pending


class EventParser:
    """Splits a stream of bytes into the data of its events."""

    def __init__(self) -> None:
        """Begin a stream."""
        self._rest = bytearray()  # an incomplete line
        self._data: list[str] = []

    def feed(self, piece: bytes) -> Iterator[str]:
        """Yield the data of each event that `piece` completes."""
        self._rest += piece
        if b"\n" not in piece:
            return
        *lines, self._rest = self._rest.split(b"\n")
        for line in (raw_line.removesuffix(b"\r") for raw_line in lines):
            if line:
                name, _, value = line.decode("utf-8", "replace").partition(":")
                if name == "data":
                    self._data.append(value.removeprefix(" "))
            elif self._data:
                yield self._take_event()

    def end(self) -> Iterator[str]:
        """Yield the last event if no empty line follows it."""
        yield from self.feed(b"\n\n")

    def _take_event(self) -> str:
        data, self._data = "\n".join(self._data), []
        return data


@dataclass(slots=True)
class ChatReply:
    """The part of a completion that has arrived; the key is masked."""

    mask: KeyMask = field(default_factory=KeyMask)
    parts: list[str] = field(default_factory=list)
    reason: str = ""  # finish reason; empty until the end
    usage: tuple[int, int] | None = None  # prompt tokens, completion tokens
    log_likelihoods: list[float] | None = None  # of the completion's tokens; None if not sent

    @property
    def text(self) -> str:
        """The text so far."""
        return "".join(self.parts)

    @property
    def ended(self) -> bool:
        """Whether the model ended the text, and not a length limit or a filter."""
        return self.reason not in {"length", "content_filter"}

    @property
    def log_likelihood(self) -> float | None:
        """Log-likelihood of the completion in nats, with the end token if it was sent; None if a
        token lacks one.

        llama.cpp streams no likelihood for a token that ends inside a character.
        """
        token_log_p = self.log_likelihoods
        if token_log_p is None:
            return None
        missing_tokens = 0 if self.usage is None else self.usage[1] - len(token_log_p)
        return math.fsum(token_log_p) if missing_tokens <= (self.reason == "stop") else None

    def add_event(self, data: str) -> str:
        """Add one event, or a whole reply; return the new text, except for an end that may be part
        of the key.

        Raises:
            ValueError: it is not JSON.
            StreamedError: it is an error of the endpoint.
            KeyError, TypeError, AttributeError: it violates the protocol.
        """
        value = parse_json(data)
        if error := value.get("error"):
            raise StreamedError(error)
        self._record_usage(value.get("usage"))
        if not value["choices"]:
            return ""
        choice = value["choices"][0]
        self.reason = _get_text(choice, "finish_reason") or self.reason
        self._record_log_likelihoods(choice.get("logprobs"))
        return self._append(self.mask.feed(_get_text(choice.get("delta") or choice.get("message") or {}, "content")))

    def flush(self) -> str:
        """Return the pending text."""
        return self._append(self.mask.end())

    def _append(self, text: str) -> str:
        if text:
            self.parts.append(text)
        return text

    def _record_usage(self, usage: Mapping[str, Any] | None) -> None:
        if usage:
            prompt_tokens, completion_tokens = usage.get("prompt_tokens"), usage.get("completion_tokens")
            if isinstance(prompt_tokens, int) and isinstance(completion_tokens, int):
                self.usage = (prompt_tokens, completion_tokens)

    def _record_log_likelihoods(self, logprobs: Mapping[str, Any] | None) -> None:
        if logprobs and logprobs.get("content"):
            self.log_likelihoods = (self.log_likelihoods or []) + [
                float(token["logprob"]) for token in logprobs["content"]
            ]


def _get_text(value: Mapping[str, Any], name: str) -> str:
    text = value.get(name) or ""
    if not isinstance(text, str):
        raise TypeError(f"{name} is no text")
    return text


class StreamedError(Exception):
    """The endpoint sent an error as an event."""

    def __init__(self, error: object) -> None:
        """Store the message of an error object."""
        super().__init__(get_error_message(error))


def get_error_message(error: object) -> str:
    """Return the message of an error object, in any of the formats of this protocol."""
    if isinstance(error, Mapping):
        return str(error.get("message") or error.get("detail") or error.get("error") or "")
    return str(error)
