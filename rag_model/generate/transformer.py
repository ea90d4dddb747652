"""Generators that run transformers models, decoder-only and encoder-decoder.

`CausalGenerator` runs Llama, SmolLM, GPT-2 and all other models of `AutoModelForCausalLM`. A
context is a prompt with the passage and the question; an answer is its continuation. Prompts are
left-padded, so that all answers begin in the same column; position ids count from the first token
of each prompt.

`Seq2SeqGenerator` runs BART, T5 and all other models of `AutoModelForSeq2SeqLM`. The encoder reads
a question with a passage once. The first input of the decoder is its start token; the targets are
the tokens of an answer: `<s> … </s>` for BART, `… </s>` for T5.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from inspect import signature
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from rag_model.corpus.records import Passage
from rag_model.generate.decoding import build_continuation_arguments, get_cache, select_cache_rows, send_to
from rag_model.generate.generator import Contexts, Targets
from rag_model.generate.prompts import (
    InstructionTemplate,
    PromptTemplate,
    pad_rows,
    render_prompts,
    tokenize_prompts,
    truncate_with_end_token,
)

if TYPE_CHECKING:
    from transformers import Cache, EncoderDecoderCache


@dataclass(frozen=True, slots=True)
class _TransformerGenerator:
    module: Any  # a transformers model
    tokenizer: Any
    end_token: int
    end_tokens: frozenset[int]  # tokens that end a generated answer, among them `end_token`

    @property
    def vocabulary_size(self) -> int:
        """The number of logits per token."""
        return int(self.module.get_output_embeddings().weight.shape[0])

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of an answer's tokens, without special tokens and end tokens."""
        # An end token of a chat model need not be a special token of its tokenizer.
        text_tokens = [token for token in tokens if token not in self.end_tokens]
        # Cleaning up spaces would change the text of earlier tokens, which may have been streamed.
        text = self.tokenizer.decode(text_tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return str(text).strip()


@dataclass(frozen=True, slots=True)
class CausalState:
    """Decoding state of m rows: the cache of the prompts and of the tokens generated after them."""

    cache: "Cache"
    mask: Tensor  # (m, s + generated tokens) int64, 0 for padding


@dataclass(frozen=True, slots=True)
class CausalGenerator(_TransformerGenerator):
    """A decoder-only `Generator`; create one with `load_generator`."""

    prompt_template: InstructionTemplate
    pad_token: int  # may equal an end token; masks then tell padding from the end
    max_tokens: int  # maximum tokens of prompt and answer together
    # None, because answers of decoder-only models do not begin with a common token
    first_token: int | None = field(default=None, init=False)

    @property
    def max_answer(self) -> int:
        """Maximum tokens of an answer, including the end token."""
        return self.prompt_template.max_answer

    def encode_contexts(self, questions: Sequence[str], passages: Sequence[Sequence[Passage]]) -> Contexts:
        """Tokenize each question with each of its k passages.

        Raises:
            UsageError: the number of passages differs between questions, or the template alone
                exceeds the maximum length.
        """
        prompts, k = render_prompts(self.prompt_template, questions, passages)
        max_length = min(self.prompt_template.max_length, self.max_tokens - self.prompt_template.max_answer)
        token_rows = tokenize_prompts(
            self.tokenizer, prompts, max_length, add_special_tokens=self.prompt_template.special
        )
        tokens, mask = pad_rows([id_row or [self.end_token] for id_row in token_rows], self.pad_token, left=True)
        return Contexts(tokens, mask, k).to(self.module.device)

    def encode_targets(self, answers: Sequence[str]) -> Targets:
        """Tokenize one answer per question."""
        texts = [self.prompt_template.answer_prefix + answer for answer in answers]
        input_ids = self.tokenizer(texts, add_special_tokens=False)["input_ids"]
        token_rows = [
            truncate_with_end_token(row, self.prompt_template.max_answer, self.end_token) for row in input_ids
        ]
        return Targets(*pad_rows(token_rows, self.pad_token)).to(self.module.device)

    def logits(self, contexts: Contexts, targets: Targets) -> Tensor:
        """Return (b, k, t, v) logits with gradient, by teacher forcing."""
        prompt_ids, mask = _pad_left(contexts)
        # (b, t) -> (b, t - 1) -> (b k, t - 1)
        target_ids, target_mask = (
            tensor[:, :-1].repeat_interleave(contexts.k, 0) for tensor in (targets.tokens, targets.mask)
        )
        # (b k, s) + (b k, t - 1) -> (b k, s + t - 1)
        mask = torch.cat([mask, target_mask.long()], 1)
        outputs = self._run_module(
            torch.cat([prompt_ids, target_ids], 1), mask, targets.tokens.shape[1], use_cache=False
        )
        # (b k, t, v) -> (b, k, t, v)
        logits: Tensor = outputs.logits.unflatten(0, (-1, contexts.k))
        return logits

    @torch.no_grad()
    def prefill(self, contexts: Contexts) -> tuple[Tensor, CausalState]:
        """Process the prompts; return the (n, v) float32 logits of the first token, and the
        decoding state.
        """
        prompt_ids, mask = _pad_left(contexts)
        outputs = self._run_module(prompt_ids, mask, 1, use_cache=True)
        return outputs.logits[:, 0].float(), CausalState(get_cache(outputs), mask)

    @torch.no_grad()
    def step(self, state: CausalState, tokens: Tensor) -> tuple[Tensor, CausalState]:
        """Append one token per row, (m,) int64; return (m, v) float32 logits of the next token, and
        the new state.
        """
        # (m, s) + (m, 1) -> (m, s + 1)
        mask = torch.cat([state.mask, torch.ones_like(tokens)[:, None]], 1)
        # (m,) -> (m, 1); logits (m, 1, v)
        outputs = self._run_module(tokens[:, None], mask, 1, **build_continuation_arguments(self.module, state.cache))
        return outputs.logits[:, 0].float(), CausalState(get_cache(outputs), mask)

    @torch.no_grad()
    def extend(self, state: CausalState, tokens: Tensor) -> Tensor:
        """Append whole continuations in one pass, (m, t) int64; return (m, t, v) float32 logits."""
        mask = torch.cat([state.mask, torch.ones_like(tokens)], 1)  # (m, s) + (m, t) -> (m, s + t)
        outputs = self._run_module(
            tokens, mask, tokens.shape[1], **build_continuation_arguments(self.module, state.cache)
        )
        logits: Tensor = outputs.logits.float()
        return logits

    @torch.no_grad()
    def select_rows(self, state: CausalState, rows: Tensor) -> CausalState:
        """Return an independent state of `rows`, (m,) int64."""
        rows = send_to(rows, state.mask.device)
        return CausalState(select_cache_rows(state.cache, rows), state.mask[rows])

    def _run_module(self, tokens: Tensor, mask: Tensor, n_last: int, **cache_arguments: Any) -> Any:
        """Run the model; return its outputs with the logits of the last `n_last` tokens only."""
        optional_arguments: dict[str, Any] = {
            # (m, s + t) -> (m, t)
            "position_ids": (mask.cumsum(1) - 1).clamp(min=0)[:, -tokens.shape[1] :],
            "logits_to_keep": n_last,
        }
        # Models with ALiBi do not accept position_ids.
        forward_parameters = signature(self.module.forward).parameters
        optional_arguments = {name: value for name, value in optional_arguments.items() if name in forward_parameters}
        outputs = self.module(input_ids=tokens, attention_mask=mask, **optional_arguments, **cache_arguments)
        outputs.logits = outputs.logits[:, -n_last:]  # (m, t, v) -> (m, last, v)
        return outputs


def _pad_left(contexts: Contexts) -> tuple[Tensor, Tensor]:
    """Return (tokens, int64 mask) of contexts, (n, s) each, with all padding moved to the left."""
    # (n, s): padding first, then the tokens in order.
    padding_first = contexts.mask.long().argsort(dim=1, stable=True)
    return contexts.tokens.gather(1, padding_first), contexts.mask.gather(1, padding_first).long()


@dataclass(frozen=True, slots=True)
class Seq2SeqState:
    """Decoding state of m rows: the cache of the generated tokens, and the encoded contexts."""

    cache: "EncoderDecoderCache"
    hidden: Tensor  # (m, s, d) output of the encoder
    mask: Tensor  # (m, s) int64, 0 for padding
    # (m,) int64 position of each row's context among the contexts of `prefill`; on the CPU, so that
    # reading it waits for no GPU
    context_rows: Tensor


@dataclass(frozen=True, slots=True)
class Seq2SeqGenerator(_TransformerGenerator):
    """An encoder-decoder `Generator`; create one with `load_generator`."""

    prompt_template: PromptTemplate
    decoder_start_token: int  # the decoder's first input token
    # token with which every answer begins, such as BART's <s>; None if there is none
    first_token: int | None
    pad_token: int
    max_tokens: int  # maximum tokens of an encoder input

    @property
    def max_answer(self) -> int:
        """Maximum tokens of an answer, including the end token."""
        return min(self.prompt_template.max_answer, self.max_tokens)

    def encode_contexts(self, questions: Sequence[str], passages: Sequence[Sequence[Passage]]) -> Contexts:
        """Tokenize each question with each of its k passages.

        Raises:
            UsageError: the number of passages differs between questions, or the template alone
                exceeds the maximum length.
        """
        prompts, k = render_prompts(self.prompt_template, questions, passages)
        token_rows = tokenize_prompts(self.tokenizer, prompts, min(self.prompt_template.max_length, self.max_tokens))
        return Contexts(*pad_rows(token_rows, self.pad_token), k).to(self.module.device)

    def encode_targets(self, answers: Sequence[str]) -> Targets:
        """Tokenize one answer per question."""
        input_ids = self.tokenizer(list(answers))["input_ids"]
        token_rows = [truncate_with_end_token(row, self.max_answer, self.end_token) for row in input_ids]
        return Targets(*pad_rows(token_rows, self.pad_token)).to(self.module.device)

    def logits(self, contexts: Contexts, targets: Targets) -> Tensor:
        """Return (b, k, t, v) logits with gradient, by teacher forcing."""
        start_tokens = targets.tokens.new_full((len(targets.tokens), 1), self.decoder_start_token)
        # (b, 1) + (b, t - 1) -> (b, t) -> (b k, t)
        decoder_ids = torch.cat([start_tokens, targets.tokens[:, :-1]], 1).repeat_interleave(contexts.k, 0)
        all_logits = self.module(
            input_ids=contexts.tokens,
            attention_mask=contexts.mask.long(),
            decoder_input_ids=decoder_ids,
            use_cache=False,
        ).logits
        logits: Tensor = all_logits.unflatten(0, (-1, contexts.k))  # (b k, t, v) -> (b, k, t, v)
        return logits

    @torch.no_grad()
    def prefill(self, contexts: Contexts) -> tuple[Tensor, Seq2SeqState]:
        """Encode the contexts; return the (n, v) float32 logits of the first token, and the
        decoding state.
        """
        mask = contexts.mask.long()
        # (n, s) -> (n, s, d)
        hidden = self.module.get_encoder()(input_ids=contexts.tokens, attention_mask=mask)[0]
        context_rows = torch.arange(len(hidden), device=hidden.device)
        outputs = self.module(
            encoder_outputs=(hidden,),
            attention_mask=mask,
            decoder_input_ids=torch.full_like(context_rows, self.decoder_start_token)[:, None],
            use_cache=True,
        )
        # (n, 1, v) -> (n, v)
        return outputs.logits[:, 0].float(), Seq2SeqState(get_cache(outputs), hidden, mask, context_rows.cpu())

    @torch.no_grad()
    def step(self, state: Seq2SeqState, tokens: Tensor) -> tuple[Tensor, Seq2SeqState]:
        """Append one token per row, (m,) int64; return (m, v) float32 logits of the next token, and
        the new state.
        """
        # (m,) -> (m, 1); (m, 1, v) -> (m, v)
        return self.extend(state, tokens[:, None])[:, 0], state

    @torch.no_grad()
    def extend(self, state: Seq2SeqState, tokens: Tensor) -> Tensor:
        """Append whole continuations in one pass, (m, t) int64; return (m, t, v) float32 logits."""
        logits: Tensor = self.module(
            encoder_outputs=(state.hidden,),
            attention_mask=state.mask,
            decoder_input_ids=tokens,
            **build_continuation_arguments(self.module, state.cache),
        ).logits
        return logits.float()

    @torch.no_grad()
    def select_rows(self, state: Seq2SeqState, rows: Tensor) -> Seq2SeqState:
        """Return an independent state of `rows`, (m,) int64."""
        context_rows, rows = state.context_rows[rows.cpu()], send_to(rows, state.hidden.device)
        if torch.equal(context_rows, state.context_rows):
            cache = select_cache_rows(state.cache, rows, same_contexts=True)
            return Seq2SeqState(cache, state.hidden, state.mask, context_rows)
        return Seq2SeqState(select_cache_rows(state.cache, rows), state.hidden[rows], state.mask[rows], context_rows)


TransformersGenerator = CausalGenerator | Seq2SeqGenerator
