"""The protocol of writers: prompts in, completions out, with their token counts.

A model's reasoning is removed from the text of its answer, which may arrive in pieces. A server
that knows its model sends reasoning in a field of its own, such as `reasoning_content`, which is
not read. Other servers, and models in memory, leave reasoning in the text, between the marks of the
model's chat template. Some templates open the block themselves, so that only the closing mark is in
the text, and some servers drop the marks of gpt-oss. In these cases the reasoning is removed from
the complete text, but a stream has already shown it.
"""

import re
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


# Opening and closing marks of reasoning at the beginning of a text.
_BLOCKS = (
    ("<think>", "</think>"),
    ("<thinking>", "</thinking>"),
    ("<thought>", "</thought>"),
    ("<reasoning>", "</reasoning>"),
    ("<seed:think>", "</seed:think>"),
    ("[THINK]", "[/THINK]"),
    ("\u25c1think\u25b7", "\u25c1/think\u25b7"),
    ("<|START_THINKING|>", "<|END_THINKING|>"),
    # gpt-oss writes channels; the last one is the answer.
    ("<|channel|>", "final<|message|>"),
    ("<|start|>", "final<|message|>"),
)
_MAX_MARK = max(len(closing) for _, closing in _BLOCKS)
_END_MARKS = re.compile(r"\s*<\|(?:end|return)\|>\s*\Z")
# Channels of gpt-oss whose marks the server has dropped.
_BARE_CHANNELS = re.compile(r"\Aanalysis(?=[^a-z\s]).*?assistantfinal", re.DOTALL)


def describe_missing_answer(token_limit: int, *, ended: bool) -> AnswerProblem:
    """Return the problem of a text that is only reasoning; `ended` says that it was not truncated."""
    message = (
        "the model reasoned and gave no answer: ask again, or choose another model"
        if ended
        else f"the model reasoned for all of its {token_limit} tokens: allow more with --max-tokens"
    )
    return AnswerProblem("reasoning", message)


class ReasoningFilter:
    """Drops reasoning at the beginning of a text that arrives in pieces."""

    def __init__(self) -> None:
        """Begin a text."""
        self.has_reasoning = False  # whether reasoning was dropped
        self._pending, self._closing_mark, self._is_answering = "", "", False

    def feed(self, piece: str) -> str:
        r"""Return the part of the answer that this piece completes.

        >>> reasoning = ReasoningFilter()
        >>> [reasoning.feed(piece) for piece in ("<th", "ink>Who?</thi", "nk>", "\n\nOrwell", ".")]
        ['', '', '', 'Orwell', '.']
        """
        if self._is_answering:
            return piece
        self._pending += piece
        while True:
            if self._closing_mark:
                _, mark, rest = self._pending.partition(self._closing_mark)
                if not mark:
                    self._pending = self._pending[-_MAX_MARK:]
                    return ""
                self._pending, self._closing_mark = rest, ""
            start = self._pending.lstrip()
            block = next((block for block in _BLOCKS if start.startswith(block[0])), None)
            if block is None:
                break
            self.has_reasoning = True
            self._pending, self._closing_mark = start.removeprefix(block[0]), block[1]
        if any(opening.startswith(start) for opening, _ in _BLOCKS):
            return ""  # an opening mark may follow
        self._is_answering = True
        return self.end()

    def end(self) -> str:
        """Return the rest of the answer; drop an unfinished block of reasoning."""
        pending, self._pending = self._pending, ""
        if self._closing_mark:
            return ""
        return pending.lstrip() if self.has_reasoning else pending


def remove_reasoning(text: str) -> tuple[str, bool]:
    """Return a complete text without its reasoning, and whether it had any.

    >>> remove_reasoning("Who was it?</think>Orwell"), remove_reasoning("<think>Who")
    (('Orwell', True), ('', True))
    """
    reasoning = ReasoningFilter()
    answer = reasoning.feed(text) + reasoning.end()
    unopened_ends = [
        answer.index(closing) + len(closing)
        for opening, closing in _BLOCKS
        if closing in answer and opening not in answer.partition(closing)[0]
    ]
    if bare_channels := _BARE_CHANNELS.match(answer):
        unopened_ends.append(bare_channels.end())
    if unopened_ends:
        answer = answer[max(unopened_ends) :].lstrip()
    has_reasoning = reasoning.has_reasoning or bool(unopened_ends)
    return _END_MARKS.sub("", answer), has_reasoning
