"""A writer in this process: any generator, in the chat template of its tokenizer where it has one.

A prompt is one context of the generator, so decoding is that of RAG-Token with one passage, whose weight is 1.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from typing import Any

import torch

from rag_model.errors import UsageError
from rag_model.generate.causal import CausalGenerator
from rag_model.generate.decoding import Decoded, Decoding
from rag_model.generate.generator import Contexts, Generator
from rag_model.generate.inputs import PromptForm
from rag_model.generate.likelihood import target_log_p
from rag_model.generate.load import chat_form
from rag_model.generate.sampling import seed_of
from rag_model.generate.seq2seq import Seq2SeqGenerator
from rag_model.generate.spelling import spelled
from rag_model.generate.stopping import stoppable
from rag_model.generate.telling import grown, telling
from rag_model.generate.token_beam import decode_token
from rag_model.reading.answer import CLOSED_BOOK, Usage
from rag_model.reading.reader import Stop, Tell
from rag_model.reading.writers.writer import Prompt, Written

Local = CausalGenerator | Seq2SeqGenerator
BATCH = 4  # prompts that are continued at once, unless a caller says otherwise
_SPARE = 4  # tokens: what stands between two texts may have some more there than alone
_FIRST = 2  # tokens of an answer that are not its text's: the one that begins it, and its end


class LocalWriter:
    """A `Writer` over a generator in memory."""

    def __init__(self, generator: Local, identity: str, decoding: Decoding | None = None, batch: int = BATCH) -> None:
        """Write with `generator`.

        Args:
            generator: an encoder-decoder reads the system message before the user's, as a decoder-only model does
                whose tokenizer has no chat template.
            identity: what names it in replies and records.
            decoding: how texts are looked for; an encoder-decoder cuts them where it has no room for more.
            batch: prompts that are continued at once.

        Raises:
            UsageError: texts of so many tokens leave no room for a prompt.
        """
        if batch < 1:
            raise UsageError(f"a batch of {batch} prompts is too small: give at least 1")
        decoding = decoding or Decoding()
        self.id, self._generator, self._batch = identity, generator, batch
        self._together = isinstance(generator, CausalGenerator)  # prompt and text share the room
        self._chats = self._together and bool(generator.tokenizer.chat_template)
        self.decoding = replace(decoding, max_new_tokens=min(decoding.max_new_tokens, generator.longest))
        self._around = self._tokens(Prompt("x", "x"), self._most) - sum(self.count(["x", "x"])) + _SPARE
        if self.room < 1:
            raise UsageError(
                f"{self._most} tokens of a text leave no room for a prompt in {identity}, which reads "
                f"{generator.longest}: ask for fewer"
            )

    @property
    def room(self) -> int:
        """Return the maximum tokens of a prompt's two messages together."""
        return self._limit(self._most) - self._around

    @property
    def decides(self) -> dict[str, Any]:
        """Return what determines a text besides the weights."""
        return {"decoding": asdict(self.decoding)}

    def count(self, texts: Sequence[str]) -> list[int]:
        """Return the tokens of each text, as a prompt has it: names of special tokens are text too."""
        whole = [((0, len(text)),) for text in texts]
        return (
            [len(one.ids) for one in spelled(self._generator.tokenizer, texts, whole, special=False)] if texts else []
        )

    def write(self, prompts: Sequence[Prompt], stop: Stop | None = None, tell: Tell | None = None) -> list[Written]:
        """Continue each prompt, in order; `tell` is given a text as it grows, with several beams at its end.

        Raises:
            UsageError: a prompt is too long.
            StoppedError: `stop` was true.
        """
        found: dict[int, Written] = {}
        for places in self._batches(prompts):
            found.update(zip(places, self._written(prompts, places, stop, tell), strict=True))
        return [found[place] for place in range(len(prompts))]

    @torch.inference_mode()
    def log_likelihood(self, prompts: Sequence[Prompt], texts: Sequence[str]) -> list[float]:
        """Return log p(text|prompt) of each pair in nats, the end token included, by teacher forcing.

        Raises:
            UsageError: there are not as many texts as prompts, or a pair is too long.
        """
        if len(prompts) != len(texts):
            raise UsageError(f"{len(prompts)} prompts and {len(texts)} texts: give one text a prompt")
        found: dict[int, float] = {}
        for places in self._batches(prompts):
            said = [texts[place] for place in places]
            reader, contexts = self._read([prompts[place] for place in places], max(self.count(said)) + _FIRST + _SPARE)
            targets = reader.targets(said)
            log_p = target_log_p(reader.logits(contexts, targets), targets.tokens)[0][:, 0]  # (b, 1, t) -> (b, t)
            found.update(zip(places, log_p.masked_fill(~targets.mask, 0).sum(1).tolist(), strict=True))
        return [found[place] for place in range(len(prompts))]

    def _written(
        self, prompts: Sequence[Prompt], places: Sequence[int], stop: Stop | None, tell: Tell | None
    ) -> list[Written]:
        asked = [prompts[place] for place in places]
        reader, contexts = self._read(asked, self._most)
        shown = [""] * len(places)

        def said(row: int, tokens: Sequence[int], *, last: bool = False) -> None:
            more = grown(reader, tokens, shown[row], last=last)
            if more and tell is not None:
                shown[row] += more
                tell(places[row], more)

        searched = reader if stop is None else stoppable(reader, stop)
        if tell is not None and self.decoding.beams == 1:
            searched = telling(searched, said)
        certain = torch.zeros(len(asked), 1, device=contexts.tokens.device)  # log p(z|x) of the one context
        seeds = [seed_of(self.decoding.sampling, one.user) for one in asked]
        decoded = decode_token(searched, contexts, certain, self.decoding, seeds)
        for row, one in enumerate(decoded):
            said(row, one.tokens, last=True)
        read = contexts.mask.sum(1).tolist()
        return [_text(reader, one, tokens) for one, tokens in zip(decoded, read, strict=True)]

    def _read(self, prompts: Sequence[Prompt], most: int) -> tuple[Generator, Contexts]:
        """Return the generator, and prompts with one system message as its contexts; `most` tokens fit behind each."""
        for prompt in prompts:
            if (tokens := self._tokens(prompt, most)) > self._limit(most):
                raise UsageError(
                    f"a prompt has {tokens} tokens, and {self.id} reads {max(0, self._limit(most))} before an answer "
                    f"of {most}: give fewer or shorter passages, or ask for a shorter answer"
                )
        reader: Generator = replace(self._generator, form=self._form(prompts[0].system, most))
        users = [prompt.user.strip() for prompt in prompts]
        return reader, reader.contexts(users, [[CLOSED_BOOK.passage]] * len(users))

    def _tokens(self, prompt: Prompt, most: int) -> int:
        form = self._form(prompt.system, most)
        written = form.write(prompt.user.strip(), CLOSED_BOOK.passage)
        special = form.special or not self._together
        return len(spelled(self._generator.tokenizer, [written.text], [written.cuts], special=special)[0].ids)

    def _form(self, system: str, most: int) -> PromptForm:
        """Return a form whose question is the user's whole message."""
        bare = PromptForm("{question}", max_length=self._generator.longest, max_answer=most)
        if self._chats:
            return chat_form(self._generator.tokenizer, bare, system.strip())
        return replace(bare, before=f"{system.strip()}\n\n" if system.strip() else "")

    @property
    def _most(self) -> int:
        return self.decoding.max_new_tokens

    def _limit(self, most: int) -> int:
        """Return the most tokens of a whole prompt with a text of `most` tokens behind it."""
        return self._generator.longest - most if self._together else self._generator.longest

    def _batches(self, prompts: Sequence[Prompt]) -> Iterator[list[int]]:
        """Yield the places of prompts with one system message, up to a batch at once."""
        alike: defaultdict[str, list[int]] = defaultdict(list)
        for place, prompt in enumerate(prompts):
            alike[prompt.system].append(place)
        for places in alike.values():
            for start in range(0, len(places), self._batch):
                yield places[start : start + self._batch]


def _text(generator: Generator, decoded: Decoded, read: int) -> Written:
    usage = Usage(read, len(decoded.tokens))
    ended = decoded.tokens[-1] == generator.end
    return Written(generator.text(decoded.tokens), usage, ended, decoded.log_likelihood)
