"""Decoder-only generators: Llama, SmolLM, GPT-2 and every other model that `AutoModelForCausalLM` opens.

A context is a prompt with the passage and the question; an answer is its continuation. Prompts are padded on
the left, so that all answers begin in the same column; positions are counted from each prompt's first token.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from inspect import signature
from typing import Any

import torch
from torch import Tensor
from transformers import Cache

from rag_model.corpus.records import Passage
from rag_model.generate.caches import cache_in, chosen, continuing
from rag_model.generate.generator import Contexts, Targets
from rag_model.generate.inputs import PromptForm, encode, padded, with_end, write_all


@dataclass(frozen=True, slots=True)
class Reading:
    """Decoding state: the m prompts and the tokens generated after them."""

    cache: Cache
    mask: Tensor  # (m, s + generated tokens) int64, 0 where padded


@dataclass(frozen=True, slots=True)
class CausalGenerator:
    """A `Generator`; make one with `load_generator`."""

    module: Any  # a transformers model
    tokenizer: Any
    form: PromptForm
    end: int
    pad: int  # the end token if the tokenizer has no padding token: the masks tell them apart
    longest: int  # maximum tokens of prompt and answer together
    first: int | None = field(default=None, init=False)  # no token precedes every answer

    @property
    def vocabulary(self) -> int:
        """Return the width of the logits."""
        return int(self.module.get_output_embeddings().weight.shape[0])

    @property
    def max_answer(self) -> int:
        """Return the maximum tokens of an answer, the end token included."""
        return self.form.max_answer

    def contexts(self, questions: Sequence[str], passages: Sequence[Sequence[Passage]]) -> Contexts:
        """Tokenise each question with each of its k passages.

        Raises:
            UsageError: the number of passages differs between questions, or the form alone is too long.
        """
        written, k = write_all(self.form, questions, passages)
        room = min(self.form.max_length, self.longest - self.form.max_answer)
        rows = encode(self.tokenizer, written, room, special=self.form.special)
        tokens, mask = padded([row or [self.end] for row in rows], self.pad, left=True)
        return Contexts(tokens, mask, k).to(self.module.device)

    def targets(self, answers: Sequence[str]) -> Targets:
        """Tokenise one answer per question."""
        texts = [self.form.answer_prefix + answer for answer in answers]
        rows = self.tokenizer(texts, add_special_tokens=False)["input_ids"]
        ended = [with_end(row, self.form.max_answer, self.end) for row in rows]
        return Targets(*padded(ended, self.pad)).to(self.module.device)

    def logits(self, contexts: Contexts, targets: Targets) -> Tensor:
        """Return (b, k, t, v) logits with gradient, by teacher forcing."""
        prompts, mask = _left(contexts)
        # (b, t) -> (b, t - 1) -> (b k, t - 1)
        said, real = (part[:, :-1].repeat_interleave(contexts.k, 0) for part in (targets.tokens, targets.mask))
        mask = torch.cat([mask, real.long()], 1)  # (b k, s) + (b k, t - 1) -> (b k, s + t - 1)
        found = self._run(torch.cat([prompts, said], 1), mask, targets.tokens.shape[1], use_cache=False)
        logits: Tensor = found.logits.unflatten(0, (-1, contexts.k))  # (b k, t, v) -> (b, k, t, v)
        return logits

    @torch.no_grad()
    def begin(self, contexts: Contexts) -> tuple[Tensor, Reading]:
        """Read the prompts; return (n, v) float32 logits of the first token, and the state to continue from."""
        prompts, mask = _left(contexts)
        found = self._run(prompts, mask, 1, use_cache=True)
        return found.logits[:, 0].float(), Reading(cache_in(found), mask)

    @torch.no_grad()
    def step(self, state: Reading, tokens: Tensor) -> tuple[Tensor, Reading]:
        """Append one token per row, (m,) int64; return (m, v) float32 logits of the next token, and the new state."""
        mask = torch.cat([state.mask, torch.ones_like(tokens)[:, None]], 1)  # (m, s) + (m, 1) -> (m, s + 1)
        # (m,) -> (m, 1); logits (m, 1, v)
        found = self._run(tokens[:, None], mask, 1, **continuing(self.module, state.cache))
        return found.logits[:, 0].float(), Reading(cache_in(found), mask)

    @torch.no_grad()
    def follow(self, state: Reading, tokens: Tensor) -> Tensor:
        """Append whole continuations in one pass, (m, t) int64; return (m, t, v) float32 logits."""
        mask = torch.cat([state.mask, torch.ones_like(tokens)], 1)  # (m, s) + (m, t) -> (m, s + t)
        found = self._run(tokens, mask, tokens.shape[1], **continuing(self.module, state.cache))
        logits: Tensor = found.logits.float()
        return logits

    @torch.no_grad()
    def choose(self, state: Reading, rows: Tensor) -> Reading:
        """Return an independent state of `rows`, (m,) int64."""
        return Reading(chosen(state.cache, rows), state.mask[rows])

    def text(self, tokens: Sequence[int]) -> str:
        """Return the text of an answer's tokens, without special tokens."""
        return str(self.tokenizer.decode(list(tokens), skip_special_tokens=True)).strip()

    def _run(self, tokens: Tensor, mask: Tensor, last: int, **going_on: Any) -> Any:
        """Run the model for the logits of the `last` tokens; the others are not computed if the model supports that."""
        given: dict[str, Any] = {
            "position_ids": (mask.cumsum(1) - 1).clamp(min=0)[:, -tokens.shape[1] :],  # (m, s + t) -> (m, t)
            "logits_to_keep": last,
        }
        known = signature(self.module.forward).parameters  # models with ALiBi take no position_ids
        given = {name: value for name, value in given.items() if name in known}
        found = self.module(input_ids=tokens, attention_mask=mask, **given, **going_on)
        found.logits = found.logits[:, -last:]  # (m, t, v) -> (m, last, v)
        return found


def _left(contexts: Contexts) -> tuple[Tensor, Tensor]:
    """Return tokens and int64 mask of contexts, both (n, s), with all padding moved to the left."""
    order = contexts.mask.long().argsort(dim=1, stable=True)  # (n, s): padding first, then the tokens in order
    return contexts.tokens.gather(1, order), contexts.mask.gather(1, order).long()
