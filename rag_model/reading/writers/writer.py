"""The protocol of writers: prompts in, texts out, with the tokens that each took."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from rag_model.reading.answer import Usage
from rag_model.reading.reader import Stop, Tell

ENDPOINT = "openai:"  # before the name of a model behind an HTTP API


@dataclass(frozen=True, slots=True)
class Prompt:
    """What a writer continues: an instruction, and the user's message; a writer puts them into its own format."""

    system: str  # may be empty
    user: str


@dataclass(frozen=True, slots=True)
class Written:
    """A writer's continuation of one prompt."""

    text: str  # without special tokens
    usage: Usage
    ended: bool  # False: cut at the most tokens
    log_likelihood: float | None = None  # log p(text|prompt) in nats, the end token included; None: not known


class Writer(Protocol):
    """Continues prompts: `local.LocalWriter`, `endpoint.EndpointWriter`."""

    @property
    def id(self) -> str:
        """Return what names the model in replies and records, such as an id of the store or a folder."""
        ...

    @property
    def room(self) -> int:
        """Return the maximum tokens of a prompt, so that an answer still fits behind it."""
        ...

    @property
    def decides(self) -> dict[str, Any]:
        """Return what determines this writer's texts besides its weights, for memo keys."""
        ...

    def count(self, texts: Sequence[str]) -> list[int]:
        """Return the tokens of each text; an estimate that is never below the truth where the tokenizer is not here."""
        ...

    def write(self, prompts: Sequence[Prompt], stop: Stop | None = None, tell: Tell | None = None) -> list[Written]:
        """Continue each prompt, in order; for `stop` and `tell` see `Reader.answer`.

        Raises:
            UsageError: a prompt is longer than `room`.
            StoppedError: `stop` was true.
            BookwheelError: the model could not be asked, and trying again did not help.
        """
        ...

    def log_likelihood(self, prompts: Sequence[Prompt], texts: Sequence[str]) -> list[float]:
        """Return log p(text|prompt) of each pair in nats, the end token included.

        Raises:
            UsageError: this writer's model does not tell likelihoods.
        """
        ...
