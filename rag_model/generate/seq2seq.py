"""Encoder-decoder generators: BART, T5 and every other model that `AutoModelForSeq2SeqLM` opens.

The encoder reads a question with a passage once; the decoder begins with its start token, and its targets are
the tokens of an answer: `<s> … </s>` for BART, `… </s>` for T5.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import EncoderDecoderCache

from rag_model.corpus.records import Passage
from rag_model.generate.caches import cache_in, chosen, continuing
from rag_model.generate.generator import Contexts, Targets
from rag_model.generate.inputs import Form, encode, padded, with_end, write_all


@dataclass(frozen=True, slots=True)
class Reading:
    """Decoding state of m rows: generated tokens and encoded contexts."""

    cache: EncoderDecoderCache
    hidden: Tensor  # (m, s, d): the encoder's output
    mask: Tensor  # (m, s)
    context: Tensor  # (m,) int64: the context of each row


@dataclass(frozen=True, slots=True)
class Seq2SeqGenerator:
    """A `Generator`; make one with `load_generator`."""

    module: Any  # a transformers model
    tokenizer: Any
    form: Form
    start: int  # the decoder's first input token
    first: int | None  # the token that begins every answer, such as BART's <s>
    end: int
    pad: int
    longest: int  # maximum tokens that the encoder reads

    @property
    def vocabulary(self) -> int:
        """Return the width of the logits."""
        return int(self.module.get_output_embeddings().weight.shape[0])

    @property
    def max_answer(self) -> int:
        """Return the maximum tokens of an answer, the end token included."""
        return min(self.form.max_answer, self.longest)

    def contexts(self, questions: Sequence[str], passages: Sequence[Sequence[Passage]]) -> Contexts:
        """Tokenise each question with each of its k passages.

        Raises:
            UsageError: the number of passages differs between questions, or the form alone is too long.
        """
        written, k = write_all(self.form, questions, passages)
        rows = encode(self.tokenizer, written, min(self.form.max_length, self.longest))
        return Contexts(*padded(rows, self.pad), k).to(self.module.device)

    def targets(self, answers: Sequence[str]) -> Targets:
        """Tokenise one answer per question."""
        rows = self.tokenizer(list(answers))["input_ids"]
        ended = [with_end(row, self.max_answer, self.end) for row in rows]
        return Targets(*padded(ended, self.pad)).to(self.module.device)

    def logits(self, contexts: Contexts, targets: Targets) -> Tensor:
        """Return (b, k, t, v) logits with gradient, by teacher forcing."""
        before = targets.tokens.new_full((len(targets.tokens), 1), self.start)
        # (b, 1) + (b, t - 1) -> (b, t) -> (b k, t)
        said = torch.cat([before, targets.tokens[:, :-1]], 1).repeat_interleave(contexts.k, 0)
        found = self.module(
            input_ids=contexts.tokens,
            attention_mask=contexts.mask.long(),
            decoder_input_ids=said,
            use_cache=False,
        ).logits
        logits: Tensor = found.unflatten(0, (-1, contexts.k))  # (b k, t, v) -> (b, k, t, v)
        return logits

    @torch.no_grad()
    def begin(self, contexts: Contexts) -> tuple[Tensor, Reading]:
        """Read the contexts; return (n, v) float32 logits of the first token, and the state to continue from."""
        mask = contexts.mask.long()
        hidden = self.module.get_encoder()(input_ids=contexts.tokens, attention_mask=mask)[0]  # (n, s) -> (n, s, d)
        rows = torch.arange(len(hidden), device=hidden.device)
        found = self.module(
            encoder_outputs=(hidden,),
            attention_mask=mask,
            decoder_input_ids=torch.full_like(rows, self.start)[:, None],
            use_cache=True,
        )
        return found.logits[:, 0].float(), Reading(cache_in(found), hidden, mask, rows)  # (n, 1, v) -> (n, v)

    @torch.no_grad()
    def step(self, state: Reading, tokens: Tensor) -> tuple[Tensor, Reading]:
        """Append one token per row, (m,) int64; return (m, v) float32 logits of the next token, and the new state."""
        return self.follow(state, tokens[:, None])[:, 0], state  # (m,) -> (m, 1); (m, 1, v) -> (m, v)

    @torch.no_grad()
    def follow(self, state: Reading, tokens: Tensor) -> Tensor:
        """Append whole continuations in one pass, (m, t) int64; return (m, t, v) float32 logits."""
        logits: Tensor = self.module(
            encoder_outputs=(state.hidden,),
            attention_mask=state.mask,
            decoder_input_ids=tokens,
            **continuing(self.module, state.cache),
        ).logits
        return logits.float()

    @torch.no_grad()
    def choose(self, state: Reading, rows: Tensor) -> Reading:
        """Return an independent state of `rows`, (m,) int64."""
        context = state.context[rows]
        if torch.equal(context, state.context):
            return Reading(chosen(state.cache, rows, same_contexts=True), state.hidden, state.mask, context)
        return Reading(chosen(state.cache, rows), state.hidden[rows], state.mask[rows], context)

    def text(self, tokens: Sequence[int]) -> str:
        """Return the text of an answer's tokens, without special tokens."""
        return str(self.tokenizer.decode(list(tokens), skip_special_tokens=True)).strip()
