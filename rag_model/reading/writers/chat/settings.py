"""How an endpoint is asked: what it writes, how long it may take, what it costs."""

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal, Self

from rag_model.errors import UsageError

AROUND = 32  # tokens that a chat's format puts around two messages, at most
_PREFIX = "BOOKWHEEL_LLM_"
_NUMBERS = ("context", "concurrency", "tries", "whole_seconds", "first_seconds", "connect_seconds")
_FLAGS = {"yes": True, "true": True, "1": True, "no": False, "false": False, "0": False}
_WANTED = {
    "logprobs": "yes or no",
    "temperature": "a number, or `default`",
    "prices": "two prices such as 0.15,0.60",
    "length_field": "max_tokens or max_completion_tokens",
}


@dataclass(frozen=True, slots=True)
class Prices:
    """What a million tokens cost, in any one currency."""

    prompt: float
    new: float

    def __post_init__(self) -> None:
        """Refuse what is no price.

        Raises:
            UsageError: one is below 0, or no number.
        """
        if not all(math.isfinite(one) and one >= 0 for one in (self.prompt, self.new)):
            raise UsageError(f"prices of {self.prompt} and {self.new} cannot be: give two of 0 or more")

    def of(self, prompt_tokens: int, new_tokens: int) -> float:
        """Return what a prompt and its answer cost."""
        return (self.prompt * prompt_tokens + self.new * new_tokens) / 1e6


@dataclass(frozen=True, slots=True)
class ChatSettings:
    """How an endpoint is asked; the environment sets what belongs to the endpoint (`of`)."""

    # what is written
    max_new_tokens: int = 50  # as `Decoding`
    temperature: float | None = 0.0  # 0: the likeliest token each time; None: not sent, for models that refuse it
    top_p: float = 1.0  # probability mass to draw from
    seed: int | None = None  # sent where given; most endpoints promise nothing
    length_field: Literal["max_tokens", "max_completion_tokens"] = "max_tokens"  # OpenAI's reasoning models: the other
    logprobs: bool = False  # ask for the likelihood of what was written; not every endpoint gives it, some refuse
    # the model
    context: int = 32_768  # tokens of prompt and answer together: not every endpoint tells it
    tokenizer: Path | None = None  # its tokenizer.json: exact counts; without it a token a byte is assumed
    prices: Prices | None = None  # None: costs are not told
    # the connection
    concurrency: int = 4  # requests at once
    tries: int = 4  # of one request, the first included
    backoff_seconds: float = 0.5  # before the second try; twice as long before each later one, with jitter
    connect_seconds: float = 10.0  # until the connection stands
    first_seconds: float = 60.0  # from the request to its first piece: a model may have to be loaded first
    whole_seconds: float = 300.0  # of one prompt, with all its tries and waits
    max_reply_bytes: int = 4 << 20  # an event for each token takes some 300 bytes

    def __post_init__(self) -> None:
        """Refuse what cannot work.

        Raises:
            UsageError: a bound is not above 0, or the answer leaves no room for a prompt.
        """
        names = (*_NUMBERS, "max_new_tokens", "max_reply_bytes")
        for name in names:
            value = getattr(self, name)
            if not (math.isfinite(value) and value > 0):
                raise UsageError(f"{name} is {value}: give a number above 0")
        if self.temperature is not None and not 0 <= self.temperature <= 2:
            raise UsageError(f"the temperature is {self.temperature}: give one from 0 to 2")
        if self.max_new_tokens + AROUND >= self.context:
            raise UsageError(
                f"an answer of {self.max_new_tokens} tokens, with {AROUND} for the chat's format, leaves no room in a "
                f"context of {self.context}: ask for a shorter answer, or set BOOKWHEEL_LLM_CONTEXT"
            )

    @classmethod
    def of(cls, environment: Mapping[str, str] = os.environ, **given: Any) -> Self:
        """Return the settings that the environment makes, but for those that are `given`.

        BOOKWHEEL_LLM_CONTEXT, _CONCURRENCY, _TRIES, _WHOLE_SECONDS, _FIRST_SECONDS, _CONNECT_SECONDS, _LENGTH_FIELD,
        _LOGPROBS (yes or no), _TEMPERATURE (`default`: it is not sent), _TOKENIZER (a file) and _PRICES (of a million
        tokens read, and written: 0.15,0.60).

        Raises:
            UsageError: one cannot be used.
        """
        kinds = {one.name: one.type for one in fields(cls)}
        found: dict[str, Any] = {}
        for name in (*_NUMBERS, "length_field", "logprobs", "temperature", "tokenizer", "prices"):
            variable = f"{_PREFIX}{name.upper()}"
            if text := environment.get(variable, "").strip():
                found[name] = _value(variable, name, kinds[name], text)
        return cls(**{**found, **given})

    @property
    def repeatable(self) -> bool:
        """Whether an answer may stand for a later one: only the likeliest tokens are no chance."""
        return self.temperature == 0

    def decides(self) -> dict[str, Any]:
        """Return what of this determines an answer, for memo keys."""
        names = ("max_new_tokens", "temperature", "top_p", "seed", "length_field", "logprobs", "context")
        return {name: getattr(self, name) for name in names} | {"counted by": self.tokenizer and self.tokenizer.name}


def _value(variable: str, name: str, kind: Any, text: str) -> Any:
    try:
        if name == "prices":
            prompt, new = text.split(",")
            return Prices(float(prompt), float(new))
        if name == "temperature" and text == "default":
            return None
        if name == "tokenizer":
            return Path(text)
        if name == "logprobs":
            return _FLAGS[text.lower()]
        if name == "length_field":
            return {one: one for one in ("max_tokens", "max_completion_tokens")}[text]
        return int(text) if kind is int else float(text)
    except (ValueError, KeyError) as wrong:
        wanted = _WANTED.get(name, "a number")
        raise UsageError(f"{variable} is {text!r}: set it to {wanted}") from wrong
