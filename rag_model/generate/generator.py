"""The `Generator` protocol, which encoder-decoder and decoder-only models implement.

A *context* is the tokenized input of a generator: one question with one passage. For b questions
with k passages each there are n = b k contexts, question by question. Teacher forcing scores whole
targets. Decoding appends one token at a time to a `State`, whose rows beam search can select and
repeat.

`make_stoppable` wraps a generator so that decoding can be stopped between two tokens;
`report_tokens` wraps it so that a text is reported while it is generated.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

from torch import Tensor, nn

from rag_model.corpus.records import Passage
from rag_model.errors import StoppedError

# state of decoding, such as caches and masks; each generator has its own type
State: TypeAlias = Any
# text that a tokenizer returns for incomplete bytes of a character
_INCOMPLETE_CHARACTER = "\N{REPLACEMENT CHARACTER}"


@dataclass(frozen=True, slots=True)
class Contexts:
    """Tokenized and padded contexts of b questions with k passages each."""

    tokens: Tensor  # (n, s) int64 token ids, n = b k
    mask: Tensor  # (n, s) bool, False for padding
    k: int  # contexts per question

    def to(self, device: Any) -> "Contexts":
        """Return a copy on a device."""
        return Contexts(self.tokens.to(device), self.mask.to(device), self.k)


@dataclass(frozen=True, slots=True)
class Targets:
    """Tokenized and padded answers to score, one per question; each ends with the end token."""

    tokens: Tensor  # (b, t) int64 token ids
    mask: Tensor  # (b, t) bool, False for padding

    def to(self, device: Any) -> "Targets":
        """Return a copy on a device."""
        return Targets(self.tokens.to(device), self.mask.to(device))


class Generator(Protocol):
    """A model that computes p(y_i | x, z, y_<i)."""

    @property
    def module(self) -> nn.Module:
        """The torch module that is trained and saved."""
        ...

    @property
    def first_token(self) -> int | None:
        """The token that begins every target, such as BART's `<s>`; None if there is none."""
        ...

    @property
    def end_token(self) -> int:
        """The token that ends every target."""
        ...

    @property
    def end_tokens(self) -> frozenset[int]:
        """The tokens that end a generated answer; `end_token` is one of them."""
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
        """Maximum tokens of an answer, including the end token; contexts are truncated to leave
        room.
        """
        ...

    def encode_contexts(self, questions: Sequence[str], passages: Sequence[Sequence[Passage]]) -> Contexts:
        """Tokenize each question with each of its k passages.

        If question and passage are too long together, the passage is truncated first. A question
        longer than the model's limit is truncated at its end.
        """
        ...

    def encode_targets(self, answers: Sequence[str]) -> Targets:
        """Tokenize one answer per question."""
        ...

    def logits(self, contexts: Contexts, targets: Targets) -> Tensor:
        """Return (b, k, t, v) logits, with gradient; position i predicts token i of the target.

        The logits have the dtype of the model; `likelihood` sums over v in float32 or float64.
        """
        ...

    def prefill(self, contexts: Contexts) -> tuple[Tensor, State]:
        """Process the contexts; return the (n, v) float32 logits of the first token and the
        decoding state.
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
        """Append (m, t) int64 continuations in one forward pass; return (m, t, v) float32 logits.

        Position i predicts the token after token i. Rows may be padded at their end. `state` must
        not be used again.
        """
        ...

    def select_rows(self, state: State, rows: Tensor) -> State:
        """Return a state with the given `rows`, (m,) int64, which may reorder, drop or repeat rows.

        Decoding with the result does not change `state`.
        """
        ...

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of an answer's tokens, without special tokens and end tokens."""
        ...


def make_stoppable(generator: Generator, should_stop: Callable[[], bool]) -> Generator:
    """Wrap a generator so that each forward pass first raises `StoppedError` if `should_stop`
    returns True.
    """
    stoppable_generator: Any = _StoppableGenerator(generator, should_stop)
    return stoppable_generator  # type: ignore[no-any-return]


class _StoppableGenerator:
    def __init__(self, generator: Generator, should_stop: Callable[[], bool]) -> None:
        self._generator, self._should_stop = generator, should_stop

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
        if self._should_stop():
            raise StoppedError("no caller waits for this answer any more, so it was cancelled")

    def __getattr__(self, name: str) -> Any:
        return getattr(self._generator, name)


def decode_new_text(generator: Generator, tokens: Sequence[int], emitted: str, *, is_last: bool) -> str:
    """Return the text of `tokens` that follows `emitted`, the part that has been reported already.

    The result is empty while the last token ends inside a character, or while the decoded text does
    not begin with `emitted`. If it does not at the last token either, return what follows the common
    beginning of both.
    """
    text = generator.decode(tokens)
    if not is_last and (text.endswith(_INCOMPLETE_CHARACTER) or not text.startswith(emitted)):
        return ""
    n_common = 0
    while n_common < len(emitted) and emitted[n_common] == text[n_common : n_common + 1]:
        n_common += 1
    return text[n_common:]


def report_tokens(generator: Generator, on_token: Callable[[int, Sequence[int]], None]) -> Generator:
    """Wrap a generator so that `on_token` is called for each new token of a context, with the index
    of the context and all its tokens.

    Use it only for searches with one hypothesis per context. `on_token` is not called for the last
    token of an answer, because no step follows it.
    """
    reporting_generator: Any = _ReportingGenerator(generator, on_token)
    return reporting_generator  # type: ignore[no-any-return]


class _ReportingGenerator:
    """Generator whose state is (inner state, list of (context index, tokens so far) per row)."""

    reads_tokens = True  # lets `beam_search` read the tokens after every step, also on a GPU

    def __init__(self, generator: Generator, on_token: Callable[[int, Sequence[int]], None]) -> None:
        self._generator, self._on_token = generator, on_token

    def prefill(self, contexts: Contexts) -> tuple[Tensor, State]:
        logits, state = self._generator.prefill(contexts)
        return logits, (state, [(context_row, ()) for context_row in range(len(contexts.tokens))])

    def step(self, state: State, tokens: Tensor) -> tuple[Tensor, State]:
        inner_state, histories = state
        new_histories = [
            (context, (*previous_tokens, token))
            for (context, previous_tokens), token in zip(histories, tokens.tolist(), strict=True)
        ]
        for context, tokens_so_far in new_histories:
            self._on_token(context, tokens_so_far)
        logits, inner_state = self._generator.step(inner_state, tokens)
        return logits, (inner_state, new_histories)

    def select_rows(self, state: State, rows: Tensor) -> State:
        inner_state, histories = state
        return self._generator.select_rows(inner_state, rows), [histories[row] for row in rows.tolist()]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._generator, name)
