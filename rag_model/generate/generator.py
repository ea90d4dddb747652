"""The protocol of generators: contexts and targets in, logits out; encoder-decoder and decoder-only alike.

A *context* is one question with one passage, as the generator reads them. For b questions with k passages each there
are n = b k contexts, question by question. Teacher forcing scores whole targets; decoding goes token by token from a
`State`, whose rows can be selected again, as beam search needs.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

from torch import Tensor, nn

from rag_model.corpus.records import Passage

State: TypeAlias = Any  # caches, masks, lengths; its form depends on the generator


@dataclass(frozen=True, slots=True)
class Contexts:
    """Questions with passages, tokenised and padded."""

    tokens: Tensor  # (n, s) int64, n = b k
    mask: Tensor  # (n, s) bool: False where padded
    k: int  # contexts per question

    def to(self, device: Any) -> "Contexts":
        """Return the same on another device."""
        return Contexts(self.tokens.to(device), self.mask.to(device), self.k)


@dataclass(frozen=True, slots=True)
class Targets:
    """The answers to score: one target per question, each ending with the end token, padded."""

    tokens: Tensor  # (b, t) int64
    mask: Tensor  # (b, t) bool: True where a token counts

    def to(self, device: Any) -> "Targets":
        """Return the same on another device."""
        return Targets(self.tokens.to(device), self.mask.to(device))


class Generator(Protocol):
    """Computes p(y_i | x, z, y_<i)."""

    @property
    def module(self) -> nn.Module:
        """Return the module that is trained and saved."""
        ...

    @property
    def first(self) -> int | None:
        """Return the token that begins every target, such as BART's `<s>`; None if there is none."""
        ...

    @property
    def end(self) -> int:
        """Return the token that ends an answer."""
        ...

    @property
    def pad(self) -> int:
        """Return the padding token; tokens after it are ignored."""
        ...

    @property
    def vocabulary(self) -> int:
        """Return v, the width of the logits."""
        ...

    @property
    def max_answer(self) -> int:
        """Return the maximum tokens of an answer, the end token included; any context leaves room for them."""
        ...

    def contexts(self, questions: Sequence[str], passages: Sequence[Sequence[Passage]]) -> Contexts:
        """Tokenise each question with each of its k passages.

        If both are too long together, the passage is cut first; a question longer than the model's limit is cut at its
        end.
        """
        ...

    def targets(self, answers: Sequence[str]) -> Targets:
        """Tokenise one answer per question."""
        ...

    def logits(self, contexts: Contexts, targets: Targets) -> Tensor:
        """Return (b, k, t, v) logits, with gradient: position i predicts token i of the target.

        They have the dtype in which the model computes; likelihood.py sums over v in float32 or wider.
        """
        ...

    def begin(self, contexts: Contexts) -> tuple[Tensor, State]:
        """Read the contexts; return (n, v) float32 logits of the first token, and the state to continue from."""
        ...

    def step(self, state: State, tokens: Tensor) -> tuple[Tensor, State]:
        """Append one token per row, (m,) int64; return (m, v) float32 logits of the next token, and the new state.

        `state` must not be used again: continue from the returned one, or `choose` a copy first.
        """
        ...

    def follow(self, state: State, tokens: Tensor) -> Tensor:
        """Append whole continuations in one pass, (m, t) int64; return (m, t, v) float32 logits.

        Position i predicts the token after token i; rows may be padded at their end. `state` must not be used again.
        """
        ...

    def choose(self, state: State, rows: Tensor) -> State:
        """Return the state of `rows`, (m,) int64: reorders, drops or repeats rows, as beam search does.

        The result is independent: steps from it do not change `state`.
        """
        ...

    def text(self, tokens: Sequence[int]) -> str:
        """Return the text of an answer's tokens, without special tokens."""
        ...
