"""The protocol of generators, both encoder-decoder and decoder-only: contexts and targets in,
logits out.

A *context* is one question with one passage, as the generator reads them. For b questions with k
passages each there are n = b k contexts, question by question. Teacher forcing scores whole
targets. Decoding goes token by token from a `State`, whose rows can be selected and repeated, as
beam search needs.

`make_stoppable` and `report_tokens` wrap a generator: to stop decoding between two tokens, and to
report a text while it is generated.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

from torch import Tensor, nn

from rag_model.corpus.records import Passage
from rag_model.errors import StoppedError

State: TypeAlias = Any  # caches, masks, lengths; the type depends on the generator
_INCOMPLETE_CHARACTER = "\N{REPLACEMENT CHARACTER}"  # decoded for the first bytes of a character


@dataclass(frozen=True, slots=True)
class Contexts:
    """Tokenized and padded questions with passages."""

    tokens: Tensor  # (n, s) int64, n = b k
    mask: Tensor  # (n, s) bool: False where padded
    k: int  # contexts per question

    def to(self, device: Any) -> "Contexts":
        """Move to another device."""
        return Contexts(self.tokens.to(device), self.mask.to(device), self.k)


@dataclass(frozen=True, slots=True)
class Targets:
    """Padded answers to score: one target per question, which ends with the end token."""

    tokens: Tensor  # (b, t) int64
    mask: Tensor  # (b, t) bool: True where a token counts

    def to(self, device: Any) -> "Targets":
        """Move to another device."""
        return Targets(self.tokens.to(device), self.mask.to(device))


class Generator(Protocol):
    """Computes p(y_i | x, z, y_<i)."""

    @property
    def module(self) -> nn.Module:
        """The module that is trained and saved."""
        ...

    @property
    def first_token(self) -> int | None:
        """The token that begins every target, such as BART's `<s>`; None if there is none."""
        ...

    @property
    def end_token(self) -> int:
        """The token that ends an answer."""
        ...

    @property
    def pad_token(self) -> int:
        """The padding token; tokens after it are ignored."""
        ...

    @property
    def vocabulary_size(self) -> int:
        """Width v of the logits."""
        ...

    @property
    def max_answer(self) -> int:
        """Maximum tokens of an answer, the end token included; every context leaves room for
        them.
        """
        ...

    def encode_contexts(self, questions: Sequence[str], passages: Sequence[Sequence[Passage]]) -> Contexts:
        """Tokenize each question with each of its k passages.

        If both together are too long, the passage is truncated first. A question longer than the
        model's limit is truncated at its end.
        """
        ...

    def encode_targets(self, answers: Sequence[str]) -> Targets:
        """Tokenize one answer per question."""
        ...

    def logits(self, contexts: Contexts, targets: Targets) -> Tensor:
        """Return (b, k, t, v) logits, with gradient: position i predicts token i of the target.

        They have the dtype of the model; `likelihood` sums over v in float32 or wider.
        """
        ...

    def prefill(self, contexts: Contexts) -> tuple[Tensor, State]:
        """Run the contexts; return the (n, v) float32 logits of the first token, and the decoding
        state.
        """
        ...

    def step(self, state: State, tokens: Tensor) -> tuple[Tensor, State]:
        """Append one token per row, (m,) int64; return (m, v) float32 logits of the next token, and
        the new state.

        `state` must not be used again: continue from the returned state, or copy it with
        `select_rows` first.
        """
        ...

    def extend(self, state: State, tokens: Tensor) -> Tensor:
        """Append whole continuations in one pass, (m, t) int64; return (m, t, v) float32 logits.

        Position i predicts the token after token i; rows may be padded at their end. `state` must
        not be used again.
        """
        ...

    def select_rows(self, state: State, rows: Tensor) -> State:
        """Return a state of `rows`, (m,) int64: reorders, drops or repeats rows, as beam search
        does.

        The result is independent: steps from it do not change `state`.
        """
        ...

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of an answer's tokens, without special tokens."""
        ...


def make_stoppable(generator: Generator, stop: Callable[[], bool]) -> Generator:
    """Wrap a generator: before each forward pass `stop` is called, and `StoppedError` is raised if
    it returns True.
    """
    wrapped: Any = _StoppableGenerator(generator, stop)
    return wrapped  # type: ignore[no-any-return]


class _StoppableGenerator:
    def __init__(self, generator: Generator, stop: Callable[[], bool]) -> None:
        self._generator, self._stop = generator, stop

    def prefill(self, contexts: Contexts) -> tuple[Tensor, State]:
        self._check_stop()
        return self._generator.prefill(contexts)

    def step(self, state: State, tokens: Tensor) -> tuple[Tensor, State]:
        self._check_stop()
        return self._generator.step(state, tokens)

    def extend(self, state: State, tokens: Tensor) -> Tensor:
        self._check_stop()
        return self._generator.extend(state, tokens)

    def _check_stop(self) -> None:
        if self._stop():
            raise StoppedError("no caller waits for this answer any more, so it was cancelled")

    def __getattr__(self, name: str) -> Any:
        return getattr(self._generator, name)


def decode_new_text(generator: Generator, tokens: Sequence[int], emitted: str, *, is_last: bool) -> str:
    """Return the text of `tokens` after `emitted`; empty while the last token is an incomplete
    character.
    """
    text = generator.decode(tokens)
    if text.endswith(_INCOMPLETE_CHARACTER) and not is_last:
        return ""
    return text[len(emitted) :] if text.startswith(emitted) else ""


def report_tokens(generator: Generator, on_token: Callable[[int, Sequence[int]], None]) -> Generator:
    """Wrap a generator: `on_token` is called with the index and all tokens of a context after each
    new token.

    Only for searches with one hypothesis per context. They end without a step, so `on_token` does
    not get the last token.
    """
    wrapped: Any = _ReportingGenerator(generator, on_token)
    return wrapped  # type: ignore[no-any-return]


class _ReportingGenerator:
    """A state is the inner state with the context index and the tokens of each row."""

    reads_tokens = True  # at every step

    def __init__(self, generator: Generator, on_token: Callable[[int, Sequence[int]], None]) -> None:
        self._generator, self._on_token = generator, on_token

    def prefill(self, contexts: Contexts) -> tuple[Tensor, State]:
        logits, state = self._generator.prefill(contexts)
        return logits, (state, [(context, ()) for context in range(len(contexts.tokens))])

    def step(self, state: State, tokens: Tensor) -> tuple[Tensor, State]:
        inner, rows = state
        extended = [
            (context, (*previous_tokens, token))
            for (context, previous_tokens), token in zip(rows, tokens.tolist(), strict=True)
        ]
        for row_context, tokens_so_far in extended:
            self._on_token(row_context, tokens_so_far)
        logits, inner = self._generator.step(inner, tokens)
        return logits, (inner, extended)

    def select_rows(self, state: State, rows: Tensor) -> State:
        inner, histories = state
        return self._generator.select_rows(inner, rows), [histories[row] for row in rows.tolist()]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._generator, name)
