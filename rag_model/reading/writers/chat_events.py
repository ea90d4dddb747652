"""Parse the server-sent events of a chat completion into text fragments and the whole reply.

An event consists of `data: {JSON}` lines and an empty line. The last event is `data: [DONE]`, which
some servers omit. Lines that begin with a colon only keep the connection alive.

Reasoning is not part of the text (see `writer`). Some servers put reasoning or a refusal into a
separate field, send the content as a list of parts, or omit the empty line after an event.

A server may repeat the request headers in its reply, so `KeyMask` masks the API key.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from rag_model.endpoint import get_error_message
from rag_model.reading.writers.writer import ReasoningFilter, remove_reasoning
from rag_model.untrusted_text import parse_json

# A key with fewer characters, such as `ollama` for a local server, may be a word of an answer.
MIN_KEY_LENGTH = 16
DONE = "[DONE]"
_REASONING_FIELDS = ("reasoning_content", "reasoning", "reasoning_details", "thinking")
_TEXT_PARTS = frozenset(("text", "output_text"))  # types of content parts that contain the answer
_MAX_TOKENS = 1 << 31  # token counts and log-likelihoods of this size or more are rejected


class KeyMask:
    """Masks a key in a text that arrives in fragments, even if the key is split between them."""

    def __init__(self, key: str = "") -> None:
        """Create a mask for one text; keys of fewer than `MIN_KEY_LENGTH` characters are not
        masked.
        """
        self._key, self._pending = key if len(key) >= MIN_KEY_LENGTH else "", ""

    def feed(self, fragment: str) -> str:
        """Return the new text, masked; hold back an end that may be the beginning of the key.

        >>> mask = KeyMask("sk-0123456789abcdef")
        >>> mask.feed("it is sk-0123"), mask.feed("456789abcdef."), mask.finish()
        ('it is ', '***.', '')
        """
        if not self._key:
            return fragment
        text = (self._pending + fragment).replace(self._key, "***")
        self._pending = next(
            (self._key[:size] for size in range(len(self._key) - 1, 0, -1) if text.endswith(self._key[:size])), ""
        )
        return text.removesuffix(self._pending)

    def finish(self) -> str:
        """Return the end of the text, which `feed` has held back."""
        pending_text, self._pending = self._pending, ""
        return pending_text


class EventParser:
    """Splits a stream of bytes into the data of the server-sent events in it."""

    def __init__(self) -> None:
        """Create a parser for one stream."""
        self._rest = bytearray()  # the last line, which is incomplete
        self._data: list[str] = []  # data lines of the current event

    def feed(self, chunk: bytes) -> Iterator[str]:
        """Yield the data of each event that `chunk` completes."""
        self._rest += chunk
        if b"\n" not in chunk:
            return
        *lines, self._rest = self._rest.split(b"\n")
        for line in (raw_line.removesuffix(b"\r") for raw_line in lines):
            if line:
                field_name, _, field_text = line.decode("utf-8", "replace").partition(":")
                if field_name == "data":
                    event_data = field_text.removeprefix(" ")
                    # Some servers omit the empty line between events. Each event is one JSON
                    # object.
                    if self._data and self._data[-1].endswith("}") and event_data.startswith(("{", DONE)):
                        yield self._take_event()
                    self._data.append(event_data)
            elif self._data:
                yield self._take_event()

    def finish(self) -> Iterator[str]:
        """Yield the last event if the stream ended without an empty line."""
        yield from self.feed(b"\n\n")

    def _take_event(self) -> str:
        event_text, self._data = "\n".join(self._data), []
        return event_text


@dataclass(slots=True)
class ChatReply:
    """The part of a completion that has arrived so far, with the API key masked."""

    mask: KeyMask = field(default_factory=KeyMask)  # mask of the API key
    text_parts: list[str] = field(default_factory=list)
    finish_reason: str = ""  # empty until it arrives
    usage: tuple[int, int] | None = None  # (prompt tokens, completion tokens)
    # log-likelihood in nats of each token; None if not sent
    log_likelihoods: list[float] | None = None
    refusal: str = ""  # the model's explanation of a refusal
    tool_names: list[str] = field(default_factory=list)  # names of the tools that the model called
    has_begun: bool = False  # whether the model has written anything, including reasoning
    _reasoning: ReasoningFilter = field(default_factory=ReasoningFilter)
    # whether the endpoint sent reasoning in a separate field, or only counted its tokens
    _has_hidden_reasoning: bool = False

    @property
    def text(self) -> str:
        """The text so far, without reasoning."""
        return remove_reasoning("".join(self.text_parts))[0]

    @property
    def has_reasoning(self) -> bool:
        """Whether the model reasoned before it answered."""
        return (
            self._has_hidden_reasoning or self._reasoning.has_reasoning or remove_reasoning("".join(self.text_parts))[1]
        )

    @property
    def ended(self) -> bool:
        """Whether the model itself ended the text, instead of a length limit or a filter."""
        return self.finish_reason not in {"length", "content_filter"}

    @property
    def log_likelihood(self) -> float | None:
        """Log-likelihood of the completion in nats, including the end token if it was sent; None if
        a token has no likelihood, or if the sum would include reasoning.

        llama.cpp streams no likelihood for a token that ends inside a character.
        """
        token_log_probs = self.log_likelihoods
        if token_log_probs is None or self.has_reasoning:
            return None
        # Some servers count the end token of a complete text, but send no likelihood for it.
        n_missing = 0 if self.usage is None else self.usage[1] - len(token_log_probs)
        return sum(token_log_probs) if n_missing <= (self.finish_reason == "stop") else None

    def add_event(self, data: str) -> str:
        """Add one event, or a whole reply; return the new text, but hold back an end that may be
        part of the key.

        Raises:
            ValueError: the event is not JSON.
            StreamedError: the event contains an error from the endpoint.
            KeyError, TypeError, AttributeError: the event violates the protocol.
        """
        chat_event = parse_json(data)
        if error_value := chat_event.get("error"):
            raise StreamedError(error_value)
        self._record_usage(chat_event.get("usage"))
        # The last event of some servers has `usage` but no `choices`.
        choices = chat_event.get("choices") if self.finish_reason or self.usage else chat_event["choices"]
        if not choices:
            return ""
        choice = choices[0]
        self._record_log_likelihoods(choice.get("logprobs"))
        message = choice.get("delta") or choice.get("message") or {}
        content = _get_content(message)
        self._record_reasoning_and_tools(message)
        self.has_begun = self.has_begun or bool(content)
        self.finish_reason = _get_text(choice, "finish_reason") or self.finish_reason
        return self._append_text(self.mask.feed(self._reasoning.feed(content)))

    def flush(self) -> str:
        """Return the rest of the text, which `add_event` has held back."""
        return self._append_text(self.mask.feed(self._reasoning.finish()) + self.mask.finish())

    def _record_reasoning_and_tools(self, message: Mapping[str, Any]) -> None:
        """Record reasoning, a refusal and tool calls."""
        self.refusal += _get_text(message, "refusal")
        tool_calls = message.get("tool_calls") or message.get("function_call") or []
        for tool_call in tool_calls if isinstance(tool_calls, list) else [tool_calls]:
            called_function = tool_call.get("function") or tool_call
            self.tool_names += [name] if (name := _get_text(called_function, "name")) else []
        if any(message.get(name) for name in _REASONING_FIELDS):
            self.has_begun = self._has_hidden_reasoning = True

    def _append_text(self, text: str) -> str:
        if text:
            self.text_parts.append(text)
        return text

    def _record_usage(self, usage: Mapping[str, Any] | None) -> None:
        if usage:
            prompt_tokens = _read_count(usage.get("prompt_tokens"))
            completion_tokens = _read_count(usage.get("completion_tokens"))
            # Some servers send zeros until the last event, or always, if they do not count tokens.
            if prompt_tokens and completion_tokens is not None:
                self.usage = (prompt_tokens, completion_tokens)
            usage_details = usage.get("completion_tokens_details")
            if isinstance(usage_details, Mapping) and usage_details.get("reasoning_tokens"):
                self._has_hidden_reasoning = True

    def _record_log_likelihoods(self, logprobs: Mapping[str, Any] | None) -> None:
        if logprobs and logprobs.get("content"):
            self.log_likelihoods = (self.log_likelihoods or []) + [
                _read_log_p(token["logprob"]) for token in logprobs["content"]
            ]


def _read_count(count: object) -> int | None:
    """Return a token count; None if the value is implausible."""
    return count if type(count) is int and 0 <= count < _MAX_TOKENS else None


def _read_log_p(log_p: object) -> float:
    """Return the log-likelihood of a token."""
    if not isinstance(log_p, int | float) or not -_MAX_TOKENS < log_p < _MAX_TOKENS:
        raise ValueError(f"the log-likelihood {log_p!r:.40} is not a number in nats")
    return float(log_p)


def _get_content(message: Mapping[str, Any]) -> str:
    """Return the text of a message, whose content may be a string or a list of parts."""
    parts = message.get("content")
    if not isinstance(parts, list):
        return _get_text(message, "content")
    return "".join(_get_text(part, "text") for part in parts if part.get("type") in _TEXT_PARTS)


def _get_text(json_object: Mapping[str, Any], name: str) -> str:
    text = json_object.get(name) or ""
    if not isinstance(text, str):
        raise TypeError(f"{name} is not a text")
    return text


class StreamedError(Exception):
    """An error that the endpoint sent as an event."""

    def __init__(self, error: object) -> None:
        """Create an exception with the message of an error object."""
        super().__init__(get_error_message(error))
