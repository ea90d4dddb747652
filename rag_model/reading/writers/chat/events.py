"""Server-sent events of a chat completion: bytes in, pieces of text out, and what the whole came to.

The protocol: `data: {JSON}` a line, an empty line behind each event, `data: [DONE]` at the end, which not every server
sends. Lines that begin with a colon keep the connection alive.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from rag_model.json_text import parse_json
from rag_model.reading.writers.chat.mask import Mask

DONE = "[DONE]"


class Events:
    """Cuts a stream of bytes into the data of its events."""

    def __init__(self) -> None:
        """Begin with nothing."""
        self._rest = bytearray()  # of a line
        self._data: list[str] = []

    def feed(self, piece: bytes) -> Iterator[str]:
        """Yield the data of each event that `piece` completes."""
        self._rest += piece
        if b"\n" not in piece:
            return
        *lines, self._rest = self._rest.split(b"\n")
        for line in (one.removesuffix(b"\r") for one in lines):
            if line:
                name, _, value = line.decode("utf-8", "replace").partition(":")
                if name == "data":
                    self._data.append(value.removeprefix(" "))
            elif self._data:
                yield self._taken()

    def end(self) -> Iterator[str]:
        """Yield the last event, where no empty line follows it."""
        yield from self.feed(b"\n\n")

    def _taken(self) -> str:
        data, self._data = "\n".join(self._data), []
        return data


@dataclass(slots=True)
class Reply:
    """What has come of one completion so far, without the key that it may repeat."""

    mask: Mask = field(default_factory=Mask)
    parts: list[str] = field(default_factory=list)
    reason: str = ""  # why it ended; empty: it has not
    usage: tuple[int, int] | None = None  # tokens read and written
    log_likelihoods: list[float] | None = None  # of the tokens written; None: not given

    @property
    def text(self) -> str:
        """All that was written."""
        return "".join(self.parts)

    @property
    def ended(self) -> bool:
        """Whether the model ended it, and not a bound or a filter."""
        return self.reason not in {"length", "content_filter"}

    @property
    def log_likelihood(self) -> float | None:
        """The likelihood of what was written, nats, with its end where that is told; None: of some token it is not.

        llama.cpp streams no likelihood of a token that ends inside a character.
        """
        known = self.log_likelihoods
        if known is None:
            return None
        untold = 0 if self.usage is None else self.usage[1] - len(known)
        return math.fsum(known) if untold <= (self.reason == "stop") else None

    def take(self, data: str) -> str:
        """Take one event, or a whole reply, and return the text that it adds; an end that may be the key's waits.

        Raises:
            ValueError: it is not JSON.
            EventError: the endpoint says that it failed.
            KeyError, TypeError, AttributeError: it is not of this protocol.
        """
        value = parse_json(data)
        if problem := value.get("error"):
            raise EventError(problem)
        self._count(value.get("usage"))
        if not value["choices"]:
            return ""
        choice = value["choices"][0]
        self.reason = _text(choice, "finish_reason") or self.reason
        self._weigh(choice.get("logprobs"))
        return self._add(self.mask.feed(_text(choice.get("delta") or choice.get("message") or {}, "content")))

    def end(self) -> str:
        """Return the text that waited."""
        return self._add(self.mask.end())

    def _add(self, text: str) -> str:
        if text:
            self.parts.append(text)
        return text

    def _count(self, usage: Mapping[str, Any] | None) -> None:
        if usage:
            read, written = usage.get("prompt_tokens"), usage.get("completion_tokens")
            if isinstance(read, int) and isinstance(written, int):
                self.usage = (read, written)

    def _weigh(self, given: Mapping[str, Any] | None) -> None:
        if given and given.get("content"):
            self.log_likelihoods = (self.log_likelihoods or []) + [float(one["logprob"]) for one in given["content"]]


def _text(value: Mapping[str, Any], name: str) -> str:
    text = value.get(name) or ""
    if not isinstance(text, str):
        raise TypeError(f"{name} is no text")
    return text


class EventError(Exception):
    """The endpoint sends an error in the place of an event."""

    def __init__(self, problem: object) -> None:
        """Hold what it says."""
        super().__init__(said(problem))


def said(problem: object) -> str:
    """Return the sentence of an error object of this protocol, whichever of its forms it has."""
    if isinstance(problem, Mapping):
        return str(problem.get("message") or problem.get("detail") or problem.get("error") or "")
    return str(problem)
