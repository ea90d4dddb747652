"""The interface of writers, which let a model complete prompts, and count the tokens.

A model's reasoning is removed from its answer, which may arrive in fragments. Some servers send
reasoning in a separate field, such as `reasoning_content`, whose text is ignored. Other servers,
and models in memory, leave reasoning in the text, between marker tokens of the model's chat
template. Some templates contain the opening marker, so that only the closing marker is in the text,
and some servers remove the markers of gpt-oss. In the last two cases the reasoning is removed from
the complete text, but not from a stream, which has already shown it.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from rag_model.reading.answer import AnswerProblem, TokenUsage
from rag_model.reading.reader import StopCheck, TextCallback

# Opening and closing marker tokens of reasoning at the beginning of a text.
_REASONING_MARKS = (
    ("<think>", "</think>"),
    ("<thinking>", "</thinking>"),
    ("<thought>", "</thought>"),
    ("<reasoning>", "</reasoning>"),
    ("<seed:think>", "</seed:think>"),
    ("[THINK]", "[/THINK]"),
    ("\u25c1think\u25b7", "\u25c1/think\u25b7"),
    ("<|START_THINKING|>", "<|END_THINKING|>"),
    # gpt-oss writes several channels, of which the last is the answer.
    ("<|channel|>", "final<|message|>"),
    ("<|start|>", "final<|message|>"),
)
_MAX_CLOSING_MARK_LENGTH = max(len(closing_mark) for _, closing_mark in _REASONING_MARKS)
_END_MARKS = re.compile(r"\s*<\|(?:end|return)\|>\s*\Z")
# Channels of gpt-oss after a server has removed the marker tokens.
_BARE_CHANNELS = re.compile(r"\Aanalysis(?=[^a-z\s]).*?assistantfinal", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Prompt:
    """A system message and a user message, which a writer renders in the format of its model."""

    system: str  # system message; may be empty
    user: str  # user message


@dataclass(frozen=True, slots=True)
class Completion:
    """The completion of one prompt."""

    text: str  # text without special tokens and reasoning
    usage: TokenUsage
    ended: bool  # False: truncated at the maximum number of tokens
    # log p(text|prompt) in nats, including the end token; None: unknown, for example after
    # reasoning.
    log_likelihood: float | None = None
    problem: AnswerProblem | None = None  # the reason why the text is empty or doubtful


class Writer(Protocol):
    """A model that completes prompts: `local.LocalWriter`, `endpoint.EndpointWriter`."""

    @property
    def id(self) -> str:
        """The name of the model in replies and records, such as an id of the store or a folder."""
        ...

    @property
    def max_prompt_tokens(self) -> int:
        """Maximum tokens of a prompt, after which the maximum answer still fits."""
        ...

    @property
    def decides(self) -> dict[str, Any]:
        """The settings that determine the texts in addition to the weights, for memo keys."""
        ...

    def count_tokens(self, texts: Sequence[str]) -> list[int]:
        """Count the tokens of each text; the result is an upper bound if the tokenizer is
        unknown.
        """
        ...

    def write(
        self, prompts: Sequence[Prompt], should_stop: StopCheck | None = None, on_text: TextCallback | None = None
    ) -> list[Completion]:
        """Complete each prompt, in order; for `should_stop` and `on_text`, see `AnswerCallbacks`.

        Raises:
            UsageError: a prompt is longer than `max_prompt_tokens`.
            StoppedError: `should_stop` returned True.
            BookwheelError: the model failed, and retries did not help.
        """
        ...

    def log_likelihood(self, prompts: Sequence[Prompt], texts: Sequence[str]) -> list[float]:
        """Return log p(text|prompt) of each pair in nats, including the end token.

        Raises:
            UsageError: this writer's model does not compute likelihoods.
        """
        ...


def describe_missing_answer(token_limit: int, *, ended: bool) -> AnswerProblem:
    """Return the problem of a text that is only reasoning; `ended` is False if it was truncated."""
    explanation = (
        "the model reasoned and gave no answer: ask again, or choose another model"
        if ended
        else f"the model reasoned for all of its {token_limit} tokens: allow more with --max-tokens"
    )
    return AnswerProblem("reasoning", explanation)


class ReasoningFilter:
    """Removes reasoning from the beginning of a text that arrives in fragments."""

    def __init__(self) -> None:
        """Create a filter for one text."""
        self.has_reasoning = False  # whether reasoning was removed
        self._pending, self._closing_mark, self._is_answering = "", "", False

    def feed(self, fragment: str) -> str:
        r"""Return the new text of the answer after this fragment.

        >>> reasoning = ReasoningFilter()
        >>> [reasoning.feed(piece) for piece in ("<th", "ink>Who?</thi", "nk>", "\n\nOrwell", ".")]
        ['', '', '', 'Orwell', '.']
        """
        if self._is_answering:
            return fragment
        self._pending += fragment
        while True:
            if self._closing_mark:
                _, closing_mark, remaining_text = self._pending.partition(self._closing_mark)
                if not closing_mark:
                    self._pending = self._pending[-_MAX_CLOSING_MARK_LENGTH:]
                    return ""
                self._pending, self._closing_mark = remaining_text, ""
            beginning = self._pending.lstrip()
            mark_pair = next((mark_pair for mark_pair in _REASONING_MARKS if beginning.startswith(mark_pair[0])), None)
            if mark_pair is None:
                break
            self.has_reasoning = True
            self._pending, self._closing_mark = beginning.removeprefix(mark_pair[0]), mark_pair[1]
        if any(opening_mark.startswith(beginning) for opening_mark, _ in _REASONING_MARKS):
            return ""  # the text may be the beginning of an opening marker
        self._is_answering = True
        return self.finish()

    def finish(self) -> str:
        """Return the rest of the answer, without a block of reasoning that was not closed."""
        pending_text, self._pending = self._pending, ""
        if self._closing_mark:
            return ""
        return pending_text.lstrip() if self.has_reasoning else pending_text


def remove_reasoning(text: str) -> tuple[str, bool]:
    """Return (complete text without its reasoning, whether it had reasoning).

    >>> remove_reasoning("Who was it?</think>Orwell"), remove_reasoning("<think>Who")
    (('Orwell', True), ('', True))
    """
    reasoning_filter = ReasoningFilter()
    answer_text = reasoning_filter.feed(text) + reasoning_filter.finish()
    reasoning_ends = [
        answer_text.index(closing) + len(closing)
        for opening, closing in _REASONING_MARKS
        if closing in answer_text and opening not in answer_text.partition(closing)[0]
    ]
    if channel_match := _BARE_CHANNELS.match(answer_text):
        reasoning_ends.append(channel_match.end())
    if reasoning_ends:
        answer_text = answer_text[max(reasoning_ends) :].lstrip()
    has_reasoning = reasoning_filter.has_reasoning or bool(reasoning_ends)
    return _END_MARKS.sub("", answer_text), has_reasoning
