"""Settings of an endpoint: how it generates, limits of time and size, and prices."""

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal, Self

from rag_model.endpoint import LLM_PREFIX
from rag_model.errors import UsageError

CHAT_TEMPLATE_TOKENS = 32  # maximum tokens that a chat template adds around two messages
# default maximum tokens of an answer; some models generate thousands of tokens of reasoning
_DEFAULT_NEW_TOKENS = 4_096
_REPLY_BYTES_PER_TOKEN = 1_024  # maximum bytes of a stream per token; usual events have about 300
_NUMBER_FIELDS = ("context", "concurrency", "tries", "whole_seconds", "first_seconds", "connect_seconds")
_BOOLEANS = {"yes": True, "true": True, "1": True, "no": False, "false": False, "0": False}
_EXPECTED_VALUES = {
    "logprobs": "yes or no",
    "temperature": "a number, or `default`",
    "prices": "two prices such as 0.15,0.60",
    "length_field": "max_tokens or max_completion_tokens",
}


@dataclass(frozen=True, slots=True)
class TokenPrices:
    """Prices of a million prompt tokens and of a million new tokens, in one currency."""

    prompt: float
    completion: float

    def __post_init__(self) -> None:
        """Check the prices.

        Raises:
            UsageError: a price is below 0, or not finite.
        """
        if not all(math.isfinite(price) and price >= 0 for price in (self.prompt, self.completion)):
            raise UsageError(
                f"prices of {self.prompt} and {self.completion} are invalid: give two numbers of 0 or more"
            )

    def compute_cost(self, prompt_tokens: int, new_tokens: int) -> float:
        """Return the cost of a prompt and its answer."""
        return (self.prompt * prompt_tokens + self.completion * new_tokens) / 1e6


@dataclass(frozen=True, slots=True)
class ChatSettings:
    """Settings of requests to an endpoint; `from_environment` reads most of them."""

    # generation
    # Maximum tokens of an answer with its reasoning; None: 4,096 or, if less, a quarter of the
    # context.
    max_new_tokens: int | None = None
    # Sampling temperature, 0 for greedy decoding; None: not sent, for models that reject it.
    temperature: float | None = 0.0
    top_p: float = 1.0  # probability mass of the most likely tokens to draw from
    seed: int | None = None  # random seed; most endpoints do not guarantee equal answers
    # Name of the field for `max_new_tokens`; OpenAI's reasoning models require
    # max_completion_tokens.
    length_field: Literal["max_tokens", "max_completion_tokens"] = "max_tokens"
    # Whether to request token likelihoods; some endpoints ignore this, and some reject it.
    logprobs: bool = False
    # model
    context: int = 32_768  # maximum tokens of prompt and answer together
    # Path of the model's tokenizer.json, for exact counts; None: one token per byte is assumed.
    tokenizer: Path | None = None
    prices: TokenPrices | None = None  # prices of tokens; None: no costs are computed
    # connection
    concurrency: int = 4  # maximum number of concurrent requests
    tries: int = 4  # maximum number of attempts per request, including the first
    # Wait before the second attempt; doubled for each later attempt, and randomized.
    backoff_seconds: float = 0.5
    connect_seconds: float = 10.0  # maximum time to establish a connection
    # Maximum time until the first text; the server may have to load the model.
    first_seconds: float = 60.0
    whole_seconds: float = 300.0  # maximum time per prompt, including all attempts and waits
    # maximum bytes of a reply; None: 1 KiB per token of an answer, at least 4 MiB
    max_reply_bytes: int | None = None

    def __post_init__(self) -> None:
        """Check the settings.

        Raises:
            UsageError: a limit is not above 0, or the maximum answer takes the whole context.
        """
        positive_fields = (*_NUMBER_FIELDS, "max_new_tokens", "max_reply_bytes")
        for name in positive_fields:
            setting = getattr(self, name)
            if setting is not None and not (math.isfinite(setting) and setting > 0):
                raise UsageError(f"{name} is {setting}: give a number above 0")
        if self.temperature is not None and not 0 <= self.temperature <= 2:
            raise UsageError(f"the temperature is {self.temperature}: give a number from 0 to 2")
        if self.token_limit + CHAT_TEMPLATE_TOKENS >= self.context:
            raise UsageError(
                f"an answer of {self.token_limit} tokens, with {CHAT_TEMPLATE_TOKENS} for the "
                f"chat's format, leaves no room in a context of {self.context}: request a shorter "
                "answer, or set BOOKWHEEL_LLM_CONTEXT"
            )

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ, **overrides: Any) -> Self:
        """Read the settings from the environment; the settings in `overrides` take precedence.

        The variables are BOOKWHEEL_LLM_CONTEXT, _CONCURRENCY, _TRIES, _WHOLE_SECONDS,
        _FIRST_SECONDS, _CONNECT_SECONDS, _LENGTH_FIELD, _LOGPROBS (yes or no), _TEMPERATURE (a
        number, or `default` to send none), _TOKENIZER (a file) and _PRICES (of a million prompt
        tokens and of a million new tokens, such as 0.15,0.60).

        Raises:
            UsageError: a value is invalid.
        """
        field_types = {field.name: field.type for field in fields(cls)}
        settings: dict[str, Any] = {}
        for name in (*_NUMBER_FIELDS, "length_field", "logprobs", "temperature", "tokenizer", "prices"):
            variable = f"{LLM_PREFIX}{name.upper()}"
            if text := environment.get(variable, "").strip():
                settings[name] = _parse_value(variable, name, field_types[name], text)
        return cls(**{**settings, **overrides})

    @property
    def token_limit(self) -> int:
        """Maximum tokens of an answer, including its reasoning."""
        if self.max_new_tokens is not None:
            return self.max_new_tokens
        return max(1, min(_DEFAULT_NEW_TOKENS, self.context // 4))

    @property
    def reply_limit(self) -> int:
        """Maximum bytes of a decompressed reply."""
        if self.max_reply_bytes is not None:
            return self.max_reply_bytes
        return _REPLY_BYTES_PER_TOKEN * max(_DEFAULT_NEW_TOKENS, self.token_limit)

    @property
    def is_repeatable(self) -> bool:
        """Whether an answer may be reused for a later request: only greedy decoding is
        deterministic.
        """
        return self.temperature == 0

    def decides(self) -> dict[str, Any]:
        """Return the settings that determine an answer, for memo keys."""
        decisive_names = ("temperature", "top_p", "seed", "length_field", "logprobs", "context")
        decisive_settings = {name: getattr(self, name) for name in decisive_names}
        tokenizer = self.tokenizer and self.tokenizer.name
        return {"max_new_tokens": self.token_limit, **decisive_settings, "counted by": tokenizer}


def _parse_value(variable: str, name: str, field_type: Any, text: str) -> Any:
    try:
        if name == "prices":
            prompt_price, completion_price = text.split(",")
            return TokenPrices(float(prompt_price), float(completion_price))
        if name == "temperature" and text == "default":
            return None
        if name == "tokenizer":
            return Path(text)
        if name == "logprobs":
            return _BOOLEANS[text.lower()]
        if name == "length_field":
            return {choice: choice for choice in ("max_tokens", "max_completion_tokens")}[text]
        return int(text) if field_type is int else float(text)
    except (ValueError, KeyError) as error:
        expected_value = _EXPECTED_VALUES.get(name, "a number")
        raise UsageError(f"{variable} is {text!r}: set it to {expected_value}") from error
