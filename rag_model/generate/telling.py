"""Tell how a text grows while a generator says it: whole characters, as soon as they are known."""

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from rag_model.generate.generator import Contexts, Generator, State

_UNFINISHED = "\N{REPLACEMENT CHARACTER}"  # what a tokenizer makes of a part of a character


def grown(generator: Generator, tokens: Sequence[int], shown: str, *, last: bool) -> str:
    """Return what `tokens` say beyond `shown`; empty while the last of them is only a part of a character."""
    text = generator.text(tokens)
    if text.endswith(_UNFINISHED) and not last:
        return ""
    return text[len(shown) :] if text.startswith(shown) else ""


def telling(generator: Generator, said: Callable[[int, Sequence[int]], None]) -> Generator:
    """Return `generator` that calls `said` with a context's place and its tokens so far, whenever there is one more.

    It is for searches with one hypothesis a context, which end without a step; so `said` never gets the last token.
    """
    made: Any = _Telling(generator, said)
    return made  # type: ignore[no-any-return]


class _Telling:
    """A state is the generator's own, with what each of its rows has said, and the place of its context."""

    def __init__(self, generator: Generator, said: Callable[[int, Sequence[int]], None]) -> None:
        self._generator, self._said = generator, said

    def begin(self, contexts: Contexts) -> tuple[Tensor, State]:
        logits, state = self._generator.begin(contexts)
        return logits, (state, [(place, ()) for place in range(len(contexts.tokens))])

    def step(self, state: State, tokens: Tensor) -> tuple[Tensor, State]:
        inner, rows = state
        longer = [(place, (*before, token)) for (place, before), token in zip(rows, tokens.tolist(), strict=True)]
        for place, so_far in longer:
            self._said(place, so_far)
        logits, inner = self._generator.step(inner, tokens)
        return logits, (inner, longer)

    def choose(self, state: State, rows: Tensor) -> State:
        inner, said = state
        return self._generator.choose(inner, rows), [said[row] for row in rows.tolist()]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._generator, name)
