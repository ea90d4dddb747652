"""A writer that runs a generator in this process, with the tokenizer's chat template if it has one.

A prompt is one context of the generator, so it is decoded like RAG-Token with one passage of weight
1.
"""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from typing import Any

import torch

from rag_model.errors import UsageError
from rag_model.generate.decoding import DecodedAnswer, DecodingSettings, derive_seed
from rag_model.generate.generator import Contexts, Generator, decode_new_text, make_stoppable, report_tokens
from rag_model.generate.likelihood import target_log_p
from rag_model.generate.load import apply_chat_template
from rag_model.generate.prompts import InstructionTemplate, tokenize_untrusted
from rag_model.generate.rag_decoding import decode_token
from rag_model.generate.transformer import CausalGenerator, TransformersGenerator
from rag_model.reading.answer import CLOSED_BOOK, TokenUsage
from rag_model.reading.reader import StopCheck, TextCallback, batch_by_key
from rag_model.reading.writers.writer import (
    Completion,
    Prompt,
    ReasoningFilter,
    describe_missing_answer,
    remove_reasoning,
)

BATCH_SIZE = 4  # default number of prompts per batch
_SPARE_TOKENS = 4  # spare tokens, because joined texts may have more tokens than the two texts
_SPECIAL_TOKENS = 2  # number of special tokens of an answer: its first token and its end token


class LocalWriter:
    """A `Writer` that runs a generator in this process."""

    def __init__(
        self,
        generator: TransformersGenerator,
        model_id: str,
        decoding: DecodingSettings | None = None,
        batch_size: int = BATCH_SIZE,
    ) -> None:
        """Create a writer that uses `generator`.

        Args:
            generator: the model; without a chat template, and for an encoder-decoder, the system
                message is put before the user message.
            model_id: the name of the model in replies and records.
            decoding: settings of decoding; `max_new_tokens` is limited to the maximum of the model.
            batch_size: number of prompts per batch.

        Raises:
            UsageError: the maximum answer, `max_new_tokens`, takes the whole context of the model.
        """
        if batch_size < 1:
            raise UsageError(f"a batch of {batch_size} prompts is too small: give at least 1")
        decoding = decoding or DecodingSettings()
        self.id, self._generator, self._batch_size = model_id, generator, batch_size
        # Whether prompt and answer together must fit into the context.
        self._shares_context = isinstance(generator, CausalGenerator)
        self._has_chat_template = self._shares_context and bool(generator.tokenizer.chat_template)
        self.decoding = replace(decoding, max_new_tokens=min(decoding.token_limit, generator.max_tokens))
        self._template_tokens = (
            self._count_prompt_tokens(Prompt("x", "x"), self._max_new_tokens)
            - sum(self.count_tokens(["x", "x"]))
            + _SPARE_TOKENS
        )
        if self.max_prompt_tokens < 1:
            raise UsageError(
                f"{self._max_new_tokens} tokens of an answer leave no room for a prompt in "
                f"{model_id}, whose context is {generator.max_tokens} tokens: request a shorter "
                "answer"
            )

    @property
    def max_prompt_tokens(self) -> int:
        """Maximum tokens of the system message and the user message of a prompt together."""
        return self._get_max_context_tokens(self._max_new_tokens) - self._template_tokens

    @property
    def decides(self) -> dict[str, Any]:
        """The settings that determine an answer in addition to the weights."""
        return {"decoding": asdict(self.decoding)}

    def count_tokens(self, texts: Sequence[str]) -> list[int]:
        """Count the tokens of each text in a prompt, in which names of special tokens are ordinary
        text.
        """
        if not texts:
            return []
        text_spans = [((0, len(text)),) for text in texts]
        encodings = tokenize_untrusted(self._generator.tokenizer, texts, text_spans, add_special_tokens=False)
        return [len(encoding.ids) for encoding in encodings]

    def write(
        self, prompts: Sequence[Prompt], should_stop: StopCheck | None = None, on_text: TextCallback | None = None
    ) -> list[Completion]:
        """Complete each prompt, in order; `on_text` gets new text at each token, or with several
        beams the whole text at its end.

        Raises:
            UsageError: a prompt is longer than the model accepts.
            StoppedError: `should_stop` returned True.
        """
        completion_by_position: dict[int, Completion] = {}
        for batch_positions in self._iter_batches(prompts):
            completion_by_position.update(
                zip(batch_positions, self._complete_batch(prompts, batch_positions, should_stop, on_text), strict=True)
            )
        return [completion_by_position[position] for position in range(len(prompts))]

    @torch.inference_mode()
    def log_likelihood(self, prompts: Sequence[Prompt], texts: Sequence[str]) -> list[float]:
        """Return log p(text|prompt) of each pair in nats, including the end token, by teacher
        forcing.

        Raises:
            UsageError: the numbers of texts and prompts differ, or a pair is longer than the model
                accepts.
        """
        if len(prompts) != len(texts):
            raise UsageError(f"{len(prompts)} prompts and {len(texts)} texts: give one text per prompt")
        log_likelihood_by_position: dict[int, float] = {}
        for positions in self._iter_batches(prompts):
            batch_texts = [texts[position] for position in positions]
            generator, contexts = self._encode_prompts(
                [prompts[position] for position in positions],
                max(self.count_tokens(batch_texts)) + _SPECIAL_TOKENS + _SPARE_TOKENS,
            )
            targets = generator.encode_targets(batch_texts)
            # (b, 1, t) -> (b, t)
            log_probs = target_log_p(generator.logits(contexts, targets), targets.tokens)[0][:, 0]
            log_likelihood_by_position.update(
                zip(positions, log_probs.masked_fill(~targets.mask, 0).sum(1).tolist(), strict=True)
            )
        return [log_likelihood_by_position[position] for position in range(len(prompts))]

    def _complete_batch(
        self,
        prompts: Sequence[Prompt],
        positions: Sequence[int],
        should_stop: StopCheck | None,
        on_text: TextCallback | None,
    ) -> list[Completion]:
        batch_prompts = [prompts[position] for position in positions]
        generator, contexts = self._encode_prompts(batch_prompts, self._max_new_tokens)
        emitted_texts = [""] * len(positions)
        text_filters = [ReasoningFilter() for _ in positions]

        def emit_new_text(row: int, tokens: Sequence[int], *, is_last: bool = False) -> None:
            new_text = decode_new_text(generator, tokens, emitted_texts[row], is_last=is_last)
            if on_text is None:
                return
            emitted_texts[row] += new_text
            answer_text = text_filters[row].feed(new_text) + (text_filters[row].finish() if is_last else "")
            if answer_text:
                on_text(positions[row], answer_text)

        wrapped_generator = generator if should_stop is None else make_stoppable(generator, should_stop)
        if on_text is not None and self.decoding.beams == 1:
            wrapped_generator = report_tokens(wrapped_generator, emit_new_text)
        # log p(z|x) of the single context is 0.
        log_prior = torch.zeros(len(batch_prompts), 1, device=contexts.tokens.device)
        seeds = [derive_seed(self.decoding.sampling, prompt.user) for prompt in batch_prompts]
        decoded_answers = decode_token(wrapped_generator, contexts, log_prior, self.decoding, seeds)
        for row, answer in enumerate(decoded_answers):
            emit_new_text(row, answer.tokens, is_last=True)
        prompt_tokens = contexts.mask.sum(1).tolist()
        return [
            _to_completion(generator, answer, n_prompt_tokens)
            for answer, n_prompt_tokens in zip(decoded_answers, prompt_tokens, strict=True)
        ]

    def _encode_prompts(self, prompts: Sequence[Prompt], max_new_tokens: int) -> tuple[Generator, Contexts]:
        """Return (generator with the prompt template, contexts) for prompts with equal system
        messages.

        After each context, `max_new_tokens` fit into the model's maximum.
        """
        for prompt in prompts:
            if (n_tokens := self._count_prompt_tokens(prompt, max_new_tokens)) > self._get_max_context_tokens(
                max_new_tokens
            ):
                max_tokens = max(0, self._get_max_context_tokens(max_new_tokens))
                raise UsageError(
                    f"a prompt has {n_tokens} tokens, and {self.id} accepts {max_tokens} before an "
                    f"answer of {max_new_tokens}: give fewer or shorter passages, or request a "
                    "shorter answer"
                )
        generator: Generator = replace(
            self._generator, prompt_template=self._build_template(prompts[0].system, max_new_tokens)
        )
        user_messages = [prompt.user.strip() for prompt in prompts]
        return generator, generator.encode_contexts(user_messages, [[CLOSED_BOOK.passage]] * len(user_messages))

    def _count_prompt_tokens(self, prompt: Prompt, max_new_tokens: int) -> int:
        template = self._build_template(prompt.system, max_new_tokens)
        rendered_prompt = template.render(prompt.user.strip(), CLOSED_BOOK.passage)
        has_special_tokens = template.special or not self._shares_context
        return len(
            tokenize_untrusted(
                self._generator.tokenizer,
                [rendered_prompt.text],
                [rendered_prompt.truncatable],
                add_special_tokens=has_special_tokens,
            )[0].ids
        )

    def _build_template(self, system: str, max_new_tokens: int) -> InstructionTemplate:
        """Return a template in which the field `question` is the whole user message."""
        bare_template = InstructionTemplate(
            "{question}", max_length=self._generator.max_tokens, max_answer=max_new_tokens
        )
        if self._has_chat_template:
            return apply_chat_template(self._generator.tokenizer, bare_template, system.strip())
        return replace(bare_template, before=f"{system.strip()}\n\n" if system.strip() else "")

    @property
    def _max_new_tokens(self) -> int:
        return self.decoding.token_limit

    def _get_max_context_tokens(self, max_new_tokens: int) -> int:
        """Return the maximum tokens of a whole prompt that is followed by `max_new_tokens`."""
        return self._generator.max_tokens - max_new_tokens if self._shares_context else self._generator.max_tokens

    def _iter_batches(self, prompts: Sequence[Prompt]) -> Iterator[list[int]]:
        """Yield batches of positions of prompts that have equal system messages."""
        return batch_by_key([prompt.system for prompt in prompts], self._batch_size)


def _to_completion(generator: Generator, decoded: DecodedAnswer, prompt_tokens: int) -> Completion:
    usage = TokenUsage(prompt_tokens, len(decoded.tokens))
    is_complete = decoded.tokens[-1] in generator.end_tokens
    text, has_reasoning = remove_reasoning(generator.decode(decoded.tokens))
    if not has_reasoning:
        return Completion(text, usage, is_complete, decoded.log_likelihood)
    problem = None if text else describe_missing_answer(len(decoded.tokens), ended=is_complete)
    return Completion(text, usage, is_complete, None, problem)
