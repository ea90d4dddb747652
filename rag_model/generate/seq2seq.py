"""Encoder-decoder generators: BART, T5 and whatever else `AutoModelForSeq2SeqLM` opens.

The encoder reads a question beside a passage once; the decoder begins with its start token, and what it is to say are
the tokens that its tokenizer makes of an answer: `<s> … </s>` for BART, `… </s>` for T5.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import EncoderDecoderCache

from rag_model.corpus.records import Passage
from rag_model.generate.caches import chosen
from rag_model.generate.generator import Contexts, Targets
from rag_model.generate.inputs import Form, encode, padded, with_end, write_all


@dataclass(frozen=True, slots=True)
class Reading:
    """Where decoding stands: what m rows have said, and what they read."""

    cache: EncoderDecoderCache
    hidden: Tensor  # (m, s, d): the encoder's
    mask: Tensor  # (m, s)
    context: Tensor  # (m,) int64: which context each row reads


@dataclass(frozen=True, slots=True)
class Seq2SeqGenerator:
    """A `Generator`; make one with `load_generator`."""

    module: Any  # a transformers model
    tokenizer: Any
    form: Form
    start: int  # what the decoder begins with
    first: int | None  # the token that begins every answer, as BART's <s>
    end: int
    pad: int
    longest: int  # tokens that the encoder reads

    @property
    def vocabulary(self) -> int:
        """Return the width of the logits."""
        return int(self.module.get_output_embeddings().weight.shape[0])

    @property
    def max_answer(self) -> int:
        """Return how many tokens an answer may have, its end included."""
        return min(self.form.max_answer, self.longest)

    def contexts(self, questions: Sequence[str], passages: Sequence[Sequence[Passage]]) -> Contexts:
        """Tokenise each question beside each of its passages, which are k for every question.

        Raises:
            UsageError: not all questions have as many, or the form alone is too long.
        """
        written, k = write_all(self.form, questions, passages)
        rows = encode(self.tokenizer, written, min(self.form.max_length, self.longest))
        return Contexts(*padded(rows, self.pad), k).to(self.module.device)

    def targets(self, answers: Sequence[str]) -> Targets:
        """Tokenise one answer a question."""
        rows = self.tokenizer(list(answers))["input_ids"]
        ended = [with_end(row, self.max_answer, self.end) for row in rows]
        return Targets(*padded(ended, self.pad)).to(self.module.device)

    def logits(self, contexts: Contexts, targets: Targets) -> Tensor:
        """Return (b, k, t, v) logits with gradient, by teacher forcing."""
        before = targets.tokens.new_full((len(targets.tokens), 1), self.start)
        said = torch.cat([before, targets.tokens[:, :-1]], 1).repeat_interleave(contexts.k, 0)
        found = self.module(
            input_ids=contexts.tokens,
            attention_mask=contexts.mask.long(),
            decoder_input_ids=said,
            use_cache=False,
        ).logits
        logits: Tensor = found.unflatten(0, (-1, contexts.k))
        return logits

    @torch.no_grad()
    def begin(self, contexts: Contexts) -> tuple[Tensor, Reading]:
        """Read the contexts; return (n, v) float32 logits of the first token, and where to go on from."""
        mask = contexts.mask.long()
        hidden = self.module.get_encoder()(input_ids=contexts.tokens, attention_mask=mask)[0]
        rows = torch.arange(len(hidden), device=hidden.device)
        found = self.module(
            encoder_outputs=(hidden,),
            attention_mask=mask,
            decoder_input_ids=torch.full_like(rows, self.start)[:, None],
            use_cache=True,
        )
        return found.logits[:, 0].float(), Reading(found.past_key_values, hidden, mask, rows)

    @torch.no_grad()
    def step(self, state: Reading, tokens: Tensor) -> tuple[Tensor, Reading]:
        """Append one token a row, (m,) int64; return (m, v) float32 logits of the next, and where to go on from."""
        return self.follow(state, tokens[:, None])[:, 0], state

    @torch.no_grad()
    def follow(self, state: Reading, tokens: Tensor) -> Tensor:
        """Append whole continuations in one pass, (m, t) int64; return (m, t, v) float32 logits."""
        logits: Tensor = self.module(
            encoder_outputs=(state.hidden,),
            attention_mask=state.mask,
            decoder_input_ids=tokens,
            past_key_values=state.cache,
            use_cache=True,
        ).logits
        return logits.float()

    @torch.no_grad()
    def choose(self, state: Reading, rows: Tensor) -> Reading:
        """Return the state of `rows`, (m,) int64, as one of its own."""
        context = state.context[rows]
        if torch.equal(context, state.context):
            return Reading(chosen(state.cache, rows, same_contexts=True), state.hidden, state.mask, context)
        return Reading(chosen(state.cache, rows), state.hidden[rows], state.mask[rows], context)

    def text(self, tokens: Sequence[int]) -> str:
        """Return the words of an answer's tokens, special ones left out."""
        return str(self.tokenizer.decode(list(tokens), skip_special_tokens=True)).strip()
