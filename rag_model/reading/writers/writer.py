"""The protocol of writers: prompts in, completions out, with their token counts."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from rag_model.reading.answer import AnswerProblem, TokenUsage
from rag_model.reading.reader import StopCheck, TextCallback


@dataclass(frozen=True, slots=True)
class Prompt:
    """A system message and a user message; a writer renders them in its own format."""

    system: str  # may be empty
    user: str


@dataclass(frozen=True, slots=True)
class Completion:
    """The completion of one prompt."""

    text: str  # without special tokens and reasoning
    usage: TokenUsage
    ended: bool  # False if it was truncated at the maximum tokens
    # log p(text|prompt) in nats, the end token included; None if unknown, as after reasoning.
    log_likelihood: float | None = None
    problem: AnswerProblem | None = None  # the reason why the text is empty or doubtful


class Writer(Protocol):
    """Continues prompts: `local.LocalWriter`, `endpoint.EndpointWriter`."""

    @property
    def id(self) -> str:
        """The name of the model in replies and records, such as an id of the store or a folder."""
        ...

    @property
    def max_prompt_tokens(self) -> int:
        """Maximum tokens of a prompt that leave room for an answer."""
        ...

    @property
    def decides(self) -> dict[str, Any]:
        """The settings that determine this writer's texts, besides the weights, for memo keys."""
        ...

    def count_tokens(self, texts: Sequence[str]) -> list[int]:
        """Count the tokens of each text; without the tokenizer an upper bound."""
        ...

    def write(
        self, prompts: Sequence[Prompt], should_stop: StopCheck | None = None, on_text: TextCallback | None = None
    ) -> list[Completion]:
        """Continue each prompt, in order; for `should_stop` and `on_text` see `Reader.answer`.

        Raises:
            UsageError: a prompt is longer than `room`.
            StoppedError: `should_stop` returned True.
            BookwheelError: the model failed, and retries did not help.
        """
        ...

    def log_likelihood(self, prompts: Sequence[Prompt], texts: Sequence[str]) -> list[float]:
        """Return log p(text|prompt) of each pair in nats, the end token included.

        Raises:
            UsageError: this writer's model does not compute likelihoods.
        """
        ...
