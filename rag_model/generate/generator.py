"""What every generator is: contexts and targets in, logits out; encoder-decoder and decoder-only alike.

A *context* is one question beside one passage, as the generator reads them. Of b questions with k passages each there
are n = b k, question by question. Teacher forcing scores whole targets; decoding goes token by token from a `State`,
whose rows can be chosen anew, as a beam needs.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

from torch import Tensor, nn

from rag_model.corpus.records import Passage

State: TypeAlias = Any  # one generator's own: caches, masks, lengths; opaque to decoding


@dataclass(frozen=True, slots=True)
class Contexts:
    """Questions beside passages, tokenised and padded."""

    tokens: Tensor  # (n, s) int64, n = b k
    mask: Tensor  # (n, s) bool: False where padded
    k: int  # contexts a question

    def to(self, device: Any) -> "Contexts":
        """Return the same on another device."""
        return Contexts(self.tokens.to(device), self.mask.to(device), self.k)


@dataclass(frozen=True, slots=True)
class Targets:
    """What is to be said: one target a question, each ending with the end token, padded."""

    tokens: Tensor  # (b, t) int64
    mask: Tensor  # (b, t) bool: True where a token counts

    def to(self, device: Any) -> "Targets":
        """Return the same on another device."""
        return Targets(self.tokens.to(device), self.mask.to(device))


class Generator(Protocol):
    """Says p(y_i | x, z, y_<i)."""

    @property
    def module(self) -> nn.Module:
        """Return what is trained and saved."""
        ...

    @property
    def first(self) -> int | None:
        """Return the token that begins every target, as BART's `<s>`; None where there is none."""
        ...

    @property
    def end(self) -> int:
        """Return the token that ends an answer."""
        ...

    @property
    def pad(self) -> int:
        """Return the token that fills up; what comes after it means nothing."""
        ...

    @property
    def vocabulary(self) -> int:
        """Return v, the width of the logits."""
        ...

    @property
    def max_answer(self) -> int:
        """Return how many tokens an answer may have, its end included; there is room for them after any context."""
        ...

    def contexts(self, questions: Sequence[str], passages: Sequence[Sequence[Passage]]) -> Contexts:
        """Tokenise each question beside each of its passages, k of them for every question.

        The passage is cut first where the two are too long; a question longer than the model is cut at its end.
        """
        ...

    def targets(self, answers: Sequence[str]) -> Targets:
        """Tokenise one answer a question."""
        ...

    def logits(self, contexts: Contexts, targets: Targets) -> Tensor:
        """Return (b, k, t, v) logits, with gradient: position i predicts token i of the target.

        They have the dtype in which the model computes; likelihood.py takes sums over v at least in float32.
        """
        ...

    def begin(self, contexts: Contexts) -> tuple[Tensor, State]:
        """Read the contexts; return (n, v) float32 logits of the first token, and where to go on from."""
        ...

    def step(self, state: State, tokens: Tensor) -> tuple[Tensor, State]:
        """Append one token a row, (m,) int64; return (m, v) float32 logits of the next, and where to go on from.

        The state given is used up: go on from the one returned, or `choose` a copy first.
        """
        ...

    def follow(self, state: State, tokens: Tensor) -> Tensor:
        """Append whole continuations in one pass, (m, t) int64; return (m, t, v) float32 logits.

        Position i predicts what comes after token i; rows may be padded at their end. The state given is used up.
        """
        ...

    def choose(self, state: State, rows: Tensor) -> State:
        """Return the state of `rows`, (m,) int64: to reorder, to drop, or to repeat them, as a beam does.

        What is returned is a state of its own: stepping on from it leaves `state` as it was.
        """
        ...

    def text(self, tokens: Sequence[int]) -> str:
        """Return the words of an answer's tokens, special ones left out."""
        ...
