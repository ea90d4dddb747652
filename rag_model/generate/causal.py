"""Decoder-only generators: Llama, SmolLM, GPT-2 and whatever else `AutoModelForCausalLM` opens.

A context is a prompt that holds passage and question, an answer is what is said after it. Prompts are filled up on
their left, so that all answers begin in one column; positions are counted from each prompt's first token.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from inspect import signature
from typing import Any

import torch
from torch import Tensor
from transformers import Cache

from rag_model.corpus.records import Passage
from rag_model.generate.caches import chosen
from rag_model.generate.generator import Contexts, Targets
from rag_model.generate.inputs import PromptForm, encode, padded, with_end, write_all


@dataclass(frozen=True, slots=True)
class Reading:
    """Where decoding stands: the m prompts and what has been said after them."""

    cache: Cache
    mask: Tensor  # (m, s + tokens said) int64, 0 where padded


@dataclass(frozen=True, slots=True)
class CausalGenerator:
    """A `Generator`; make one with `load_generator`."""

    module: Any  # a transformers model
    tokenizer: Any
    form: PromptForm
    end: int
    pad: int  # the end token where the tokenizer has none to pad with: masks say what is real
    longest: int  # tokens that the model reads, prompt and answer together
    first: int | None = field(default=None, init=False)  # an answer begins with its own first word

    @property
    def vocabulary(self) -> int:
        """Return the width of the logits."""
        return int(self.module.get_output_embeddings().weight.shape[0])

    @property
    def max_answer(self) -> int:
        """Return how many tokens an answer may have, its end included."""
        return self.form.max_answer

    def contexts(self, questions: Sequence[str], passages: Sequence[Sequence[Passage]]) -> Contexts:
        """Tokenise each question beside each of its passages, which are k for every question.

        Raises:
            UsageError: not all questions have as many, or the form alone is too long.
        """
        written, k = write_all(self.form, questions, passages)
        room = min(self.form.max_length, self.longest - self.form.max_answer)
        rows = encode(self.tokenizer, written, room, special=self.form.special)
        tokens, mask = padded([row or [self.end] for row in rows], self.pad, left=True)
        return Contexts(tokens, mask, k).to(self.module.device)

    def targets(self, answers: Sequence[str]) -> Targets:
        """Tokenise one answer a question."""
        texts = [self.form.answer_prefix + answer for answer in answers]
        rows = self.tokenizer(texts, add_special_tokens=False)["input_ids"]
        ended = [with_end(row, self.form.max_answer, self.end) for row in rows]
        return Targets(*padded(ended, self.pad)).to(self.module.device)

    def logits(self, contexts: Contexts, targets: Targets) -> Tensor:
        """Return (b, k, t, v) logits with gradient, by teacher forcing."""
        prompts, mask = _left(contexts)
        said, real = (part[:, :-1].repeat_interleave(contexts.k, 0) for part in (targets.tokens, targets.mask))
        mask = torch.cat([mask, real.long()], 1)
        found = self._run(torch.cat([prompts, said], 1), mask, targets.tokens.shape[1], use_cache=False)
        logits: Tensor = found.logits.unflatten(0, (-1, contexts.k))
        return logits

    @torch.no_grad()
    def begin(self, contexts: Contexts) -> tuple[Tensor, Reading]:
        """Read the prompts; return (n, v) float32 logits of the first token, and where to go on from."""
        prompts, mask = _left(contexts)
        found = self._run(prompts, mask, 1, use_cache=True)
        return found.logits[:, 0].float(), Reading(found.past_key_values, mask)

    @torch.no_grad()
    def step(self, state: Reading, tokens: Tensor) -> tuple[Tensor, Reading]:
        """Append one token a row, (m,) int64; return (m, v) float32 logits of the next, and where to go on from."""
        mask = torch.cat([state.mask, torch.ones_like(tokens)[:, None]], 1)
        found = self._run(tokens[:, None], mask, 1, past_key_values=state.cache, use_cache=True)
        return found.logits[:, 0].float(), Reading(found.past_key_values, mask)

    @torch.no_grad()
    def follow(self, state: Reading, tokens: Tensor) -> Tensor:
        """Append whole continuations in one pass, (m, t) int64; return (m, t, v) float32 logits."""
        mask = torch.cat([state.mask, torch.ones_like(tokens)], 1)
        found = self._run(tokens, mask, tokens.shape[1], past_key_values=state.cache, use_cache=True)
        logits: Tensor = found.logits.float()
        return logits

    @torch.no_grad()
    def choose(self, state: Reading, rows: Tensor) -> Reading:
        """Return the state of `rows`, (m,) int64, as one of its own."""
        return Reading(chosen(state.cache, rows), state.mask[rows])

    def text(self, tokens: Sequence[int]) -> str:
        """Return the words of an answer's tokens, special ones left out."""
        return str(self.tokenizer.decode(list(tokens), skip_special_tokens=True)).strip()

    def _run(self, tokens: Tensor, mask: Tensor, last: int, **going_on: Any) -> Any:
        """Run the model for the logits of the `last` tokens; the others' are not computed where it can be told so."""
        given: dict[str, Any] = {
            "position_ids": (mask.cumsum(1) - 1).clamp(min=0)[:, -tokens.shape[1] :],
            "logits_to_keep": last,
        }
        known = signature(self.module.forward).parameters  # models with ALiBi take no positions
        given = {name: value for name, value in given.items() if name in known}
        found = self.module(input_ids=tokens, attention_mask=mask, **given, **going_on)
        found.logits = found.logits[:, -last:]
        return found


def _left(contexts: Contexts) -> tuple[Tensor, Tensor]:
    """Return tokens and int64 mask of contexts, whatever their padding, with the padding first."""
    order = contexts.mask.long().argsort(dim=1, stable=True)
    return contexts.tokens.gather(1, order), contexts.mask.gather(1, order).long()
