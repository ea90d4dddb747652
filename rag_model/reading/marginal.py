"""Answer questions; each answer has its passages, their weights, and each token's share per passage.

p(z|x) is the weight that the retriever gives a passage, p(z|x,y) the share of the answer that comes from it. Where the
two differ, the generator disagrees with the retriever.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from typing import Any

import torch
from torch import nn

from rag_model.errors import UsageError
from rag_model.generate.decoding import Decoded, Decoding
from rag_model.generate.generator import Generator
from rag_model.generate.rag import Rag
from rag_model.generate.sampling import seed_of
from rag_model.generate.sequence_beam import decode_sequence
from rag_model.generate.stopping import stoppable
from rag_model.generate.telling import grown
from rag_model.generate.token_beam import decode_token
from rag_model.reading.answer import CLOSED_BOOK, Answer, Support, TokenSupport, Usage
from rag_model.reading.reader import Stop, Tell, check_lists, found_by
from rag_model.reading.stages import ASSEMBLY, GENERATION, Marks, timed
from rag_model.retrieve.retriever import Hit, Retriever

_DECODE = {"token": decode_token, "sequence": decode_sequence}


class MarginalReader:
    """Answers questions with a RAG model over what a retriever finds."""

    def __init__(
        self,
        retriever: Retriever | None,
        rag: Rag,
        decoding: Decoding | None = None,
        batch: int = 8,
        passages: int | None = None,
    ) -> None:
        """Read with `rag` what `retriever` finds; without one, only what it is given.

        Args:
            retriever: asks with the question encoder of `rag`, or p(z|x) means nothing, and gives inner products; for a
                model whose passages are weighed by scores, the retriever that it was trained with.
            rag: says whether passages are marginalised by sequence or by token, and how many.
            decoding: how answers are looked for; none gets longer than the generator has room for.
            batch: questions decoded at once, with all their passages.
            passages: that the retriever can find; a model that was trained with more is given all of them.
        """
        if batch < 1:
            raise UsageError(f"a batch of {batch} questions is too small: give at least 1")
        decoding = decoding or Decoding()
        room = min(decoding.max_new_tokens, rag.generator.max_answer)
        self.rag, self.decoding = rag, replace(decoding, max_new_tokens=room)
        self.retriever, self._batch = retriever, batch
        self.k = min(rag.settings.k, passages or rag.settings.k)  # as many as in training

    @property
    def decides(self) -> dict[str, Any]:
        """Return the settings of decoding: the model knows all others."""
        return {"decoding": asdict(self.decoding)}

    def answer(
        self, questions: Sequence[str], k: int | None = None, stop: Stop | None = None, tell: Tell | None = None
    ) -> list[Answer]:
        """Return the answer of each question, in order, from its best `k` passages; by default as many as in training.

        `stop` is called before each token; decoding ends once it is true. `tell` is given each whole answer.

        Raises:
            UsageError: a question is empty, `k` is below 1 or above the number of passages, or there is no retriever.
            StoppedError: `stop` was true.
        """
        hits = found_by(self.retriever, questions, self.k if k is None else k)
        return self.answer_from(questions, hits, stop, tell)

    def answer_from(
        self,
        questions: Sequence[str],
        hits: Sequence[Sequence[Hit]],
        stop: Stop | None = None,
        tell: Tell | None = None,
    ) -> list[Answer]:
        """Return the answer of each question, in order, from the passages given; closed book if there are none.

        Raises:
            UsageError: there are not as many lists of passages as questions, or a passage has no inner product.
            StoppedError: `stop`, which is called before each token, was true.
        """
        marks = Marks()
        check_lists(questions, hits)
        found: dict[int, Answer] = {}
        beside = [list(some) or [CLOSED_BOOK] for some in hits]
        generator = self.rag.generator if stop is None else stoppable(self.rag.generator, stop)
        with _at_rest(self.rag):
            for places in _batches([len(some) for some in beside], self._batch):
                asked, given = [questions[place] for place in places], [beside[place] for place in places]
                answers = self._read(generator, asked, given, marks)
                found.update(zip(places, answers, strict=True))
                if tell is not None:
                    for place, one in zip(places, answers, strict=True):
                        tell(place, one.text)
                marks.end(GENERATION)
        return timed([found[place] for place in range(len(questions))], marks)

    @torch.inference_mode()
    def log_likelihood(
        self, questions: Sequence[str], hits: Sequence[Sequence[Hit]], texts: Sequence[str]
    ) -> list[float]:
        """Return log p(text|question, passages) of each in nats, the end token included; closed book without passages.

        Raises:
            UsageError: there are not as many lists of passages or texts as questions, or one has no inner product.
        """
        check_lists(questions, hits)
        check_lists(texts, hits)
        found: dict[int, float] = {}
        beside = [list(some) or [CLOSED_BOOK] for some in hits]
        generator = self.rag.generator
        with _at_rest(self.rag):
            for places in _batches([len(some) for some in beside], self._batch):
                given = [beside[place] for place in places]
                asked = [questions[place] for place in places]
                contexts = generator.contexts(asked, [[hit.passage for hit in some] for some in given])
                scores = torch.tensor([self._logits(some) for some in given], device=contexts.tokens.device)
                targets = generator.targets([texts[place] for place in places])
                log_p = self.rag.log_likelihood(scores, contexts, targets).log_p
                found.update(zip(places, log_p.tolist(), strict=True))
        return [found[place] for place in range(len(questions))]

    @torch.inference_mode()
    def _read(
        self, generator: Generator, questions: Sequence[str], hits: Sequence[Sequence[Hit]], marks: Marks
    ) -> list[Answer]:
        """Answer questions together that have equally many passages; `marks` runs on at the end."""
        contexts = generator.contexts(questions, [[hit.passage for hit in some] for some in hits])
        prior = self.rag.prior(torch.tensor([self._logits(some) for some in hits], device=contexts.tokens.device))
        marks.end(ASSEMBLY)
        decode = _DECODE[self.rag.settings.kind]
        seeds = [seed_of(self.decoding.sampling, question) for question in questions]
        decoded = decode(generator, contexts, prior, self.decoding, seeds)
        weights = prior.exp().tolist()
        read = contexts.mask.view(len(questions), -1).sum(1).tolist()  # (b k, s) -> (b, k s) -> (b,)
        return [_answer(generator, *one) for one in zip(questions, hits, weights, decoded, read, strict=True)]

    def _logits(self, hits: Sequence[Hit]) -> list[float]:
        """Return what p(z|x) of a question's passages is made of."""
        return [hit.score for hit in hits] if self.rag.settings.weighed_by == "scores" else _products(hits)


def _products(hits: Sequence[Hit]) -> list[float]:
    """Return the inner products that p(z|x) is made of; a retriever's own score may be another quantity."""
    found = [hit.inner_product for hit in hits]
    if None in found:
        raise UsageError(
            f"passage {hits[found.index(None)].passage.id} has no inner product to weigh it by: open the retriever "
            "with products=True"
        )
    return [product for product in found if product is not None]


def _answer(
    generator: Generator, question: str, hits: Sequence[Hit], weights: Sequence[float], decoded: Decoded, read: int
) -> Answer:
    support = [Support(*one) for one in zip(hits, weights, decoded.posterior, strict=True)]
    pieces = _pieces(generator, decoded.tokens) if decoded.shares else []
    tokens = [TokenSupport(*one) for one in zip(pieces, decoded.shares, strict=True)]
    ended = decoded.tokens[-1] == generator.end
    text = generator.text(decoded.tokens)
    usage = Usage(read, len(decoded.tokens))
    return Answer(question, text, decoded.log_likelihood, tuple(support), tuple(tokens), ended, usage)


def _pieces(generator: Generator, tokens: Sequence[int]) -> list[str]:
    """Return what each token adds to the text; the last of a character's tokens adds it all."""
    pieces: list[str] = []
    for end in range(1, len(tokens) + 1):
        pieces.append(grown(generator, tokens[:end], "".join(pieces), last=end == len(tokens)))
    return pieces


def _batches(sizes: Sequence[int], most: int) -> Iterator[list[int]]:
    """Yield the places of `sizes`, up to `most` at once, all of one size."""
    alike: defaultdict[int, list[int]] = defaultdict(list)
    for place, size in enumerate(sizes):
        alike[size].append(place)
    for places in alike.values():
        for start in range(0, len(places), most):
            yield places[start : start + most]


@contextmanager
def _at_rest(module: nn.Module) -> Iterator[None]:
    """Turn dropout off, and back to what it was: answers are also asked for in the middle of training."""
    training = [one for one in module.modules() if one.training]
    module.eval()
    try:
        yield
    finally:
        for one in training:
            one.training = True
