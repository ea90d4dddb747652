"""Answer questions by marginalizing over passages, as in the RAG paper.

p(z|x) is the weight that the retriever gives a passage, and p(z|x,y) is the passage's share of the
answer's likelihood. If they differ, the generator disagrees with the retriever. For RAG-Token, each
token of an answer has shares p(z|x,y) of its own.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

import torch

from rag_model.encoders.model import evaluation_mode
from rag_model.errors import UsageError
from rag_model.generate.decoding import DecodedAnswer, DecodingSettings, derive_seed
from rag_model.generate.generator import Contexts, Generator, decode_new_text, make_stoppable
from rag_model.generate.rag import Rag
from rag_model.generate.rag_decoding import decode_sequence, decode_token
from rag_model.reading.answer import CLOSED_BOOK, Answer, SupportingPassage, TokenSupport, TokenUsage
from rag_model.reading.reader import (
    ASSEMBLY,
    GENERATION,
    NO_CALLBACKS,
    AnswerCallbacks,
    AnswerTimer,
    RetrievingReader,
    add_stage_seconds,
    batch_by_key,
    check_hit_lists,
)
from rag_model.retrieve.hits import Hit, Retriever

_DECODERS = {"token": decode_token, "sequence": decode_sequence}


class MarginalReader(RetrievingReader):
    """A `Reader` that answers with a RAG model."""

    def __init__(
        self,
        retriever: Retriever | None,
        rag: Rag,
        decoding: DecodingSettings | None = None,
        batch_size: int = 8,
        max_passages: int | None = None,
    ) -> None:
        """Create a reader.

        Args:
            retriever: a retriever that computes inner products with the question encoder of `rag`,
                as p(z|x) requires; for a model that weights passages by scores, the retriever with
                which it was trained. None: only `answer_from` can be called.
            rag: the model; its settings choose RAG-Sequence or RAG-Token and the number of
                passages.
            decoding: settings of decoding; the generator limits the length of answers.
            batch_size: number of questions per batch.
            max_passages: maximum number of passages that the retriever returns; `k` is limited to
                it.
        """
        if batch_size < 1:
            raise UsageError(f"a batch of {batch_size} questions is too small: give at least 1")
        decoding = decoding or DecodingSettings()
        max_new_tokens = min(decoding.token_limit, rag.generator.max_answer)
        self.rag, self.decoding = rag, replace(decoding, max_new_tokens=max_new_tokens)
        self.retriever, self._batch_size = retriever, batch_size
        self.k = min(rag.settings.k, max_passages or rag.settings.k)  # as in training

    @property
    def decides(self) -> dict[str, Any]:
        """The settings of decoding, for memo keys; all other settings belong to the model."""
        return {"decoding": asdict(self.decoding)}

    def answer_from(
        self, questions: Sequence[str], hits: Sequence[Sequence[Hit]], callbacks: AnswerCallbacks = NO_CALLBACKS
    ) -> list[Answer]:
        """Return the answer to each question, in order, from the given hits, or without passages if
        there are none.

        Raises:
            UsageError: the number of hit lists differs from the number of questions, or a hit has
                no inner product.
            StoppedError: `callbacks.should_stop`, which is called before each token, returned True.
        """
        timer = AnswerTimer()
        check_hit_lists(questions, hits)
        answer_by_position: dict[int, Answer] = {}
        generator = self.rag.generator
        if callbacks.should_stop is not None:
            generator = make_stoppable(generator, callbacks.should_stop)
        with evaluation_mode(self.rag):  # answers are also generated during training
            for batch_positions, batch_hits in self._iter_batches(hits):
                batch_questions = [questions[position] for position in batch_positions]
                answers = self._answer_batch(generator, batch_questions, batch_hits, timer)
                answer_by_position.update(zip(batch_positions, answers, strict=True))
                callbacks.send_texts(zip(batch_positions, answers, strict=True))
                timer.end_stage(GENERATION)
        return add_stage_seconds([answer_by_position[position] for position in range(len(questions))], timer)

    @torch.inference_mode()
    def log_likelihood(
        self, questions: Sequence[str], hits: Sequence[Sequence[Hit]], texts: Sequence[str]
    ) -> list[float]:
        """Return log p(text|question, passages) of each text in nats, with the end token.

        Without hits it is log p(text|question).

        Raises:
            UsageError: the numbers of questions, hit lists and texts differ, or a hit has no inner
                product.
        """
        check_hit_lists(questions, hits)
        check_hit_lists(texts, hits)
        likelihood_by_position: dict[int, float] = {}
        generator = self.rag.generator
        with evaluation_mode(self.rag):
            for positions, batch_hits in self._iter_batches(hits):
                batch_questions = [questions[position] for position in positions]
                contexts, scores = self._encode(generator, batch_questions, batch_hits)
                targets = generator.encode_targets([texts[position] for position in positions])
                log_likelihoods = self.rag.log_likelihood(scores, contexts, targets).log_p
                likelihood_by_position.update(zip(positions, log_likelihoods.tolist(), strict=True))
        return [likelihood_by_position[position] for position in range(len(questions))]

    def _iter_batches(self, hits: Sequence[Sequence[Hit]]) -> Iterator[tuple[list[int], list[list[Hit]]]]:
        """Yield positions and hits of questions that have equally many hits; a question without
        hits gets the one hit `CLOSED_BOOK`.
        """
        hit_lists = [list(question_hits) or [CLOSED_BOOK] for question_hits in hits]
        for positions in batch_by_key(list(map(len, hit_lists)), self._batch_size):
            yield positions, [hit_lists[position] for position in positions]

    @torch.inference_mode()
    def _answer_batch(
        self, generator: Generator, questions: Sequence[str], hits: Sequence[Sequence[Hit]], timer: AnswerTimer
    ) -> list[Answer]:
        """Answer questions with equal numbers of passages; the caller ends the timer's stage
        `GENERATION`.
        """
        contexts, scores = self._encode(generator, questions, hits)
        log_prior = self.rag.prior(scores)
        timer.end_stage(ASSEMBLY)
        decode = _DECODERS[self.rag.settings.kind]
        seeds = [derive_seed(self.decoding.sampling, question) for question in questions]
        decoded_answers = decode(generator, contexts, log_prior, self.decoding, seeds)
        weights = log_prior.exp().tolist()
        # (b k, s) -> (b, k s) -> (b,).
        prompt_tokens = contexts.mask.view(len(questions), -1).sum(1).tolist()
        return [
            _build_answer(generator, *parts)
            for parts in zip(questions, hits, weights, decoded_answers, prompt_tokens, strict=True)
        ]

    def _encode(
        self, generator: Generator, questions: Sequence[str], hits: Sequence[Sequence[Hit]]
    ) -> tuple[Contexts, torch.Tensor]:
        """Return (contexts, (b, k) logits of p(z|x)) of questions with equal numbers of
        passages.
        """
        contexts = generator.encode_contexts(
            questions, [[hit.passage for hit in question_hits] for question_hits in hits]
        )
        prior_logits = [self._get_prior_logits(question_hits) for question_hits in hits]
        return contexts, torch.tensor(prior_logits, device=contexts.tokens.device)

    def _get_prior_logits(self, hits: Sequence[Hit]) -> list[float]:
        """Return the logits of p(z|x) of the passages of one question."""
        return [hit.score for hit in hits] if self.rag.settings.weighed_by == "scores" else _get_inner_products(hits)


def _get_inner_products(hits: Sequence[Hit]) -> list[float]:
    """Return the inner products of the hits, which may differ from the retriever's scores."""
    inner_products = [hit.inner_product for hit in hits]
    if None in inner_products:
        raise UsageError(
            f"passage {hits[inner_products.index(None)].passage.id} has no inner product: "
            "open the retriever with products=True"
        )
    return [inner_product for inner_product in inner_products if inner_product is not None]


def _build_answer(
    generator: Generator,
    question: str,
    hits: Sequence[Hit],
    weights: Sequence[float],
    decoded: DecodedAnswer,
    n_prompt_tokens: int,
) -> Answer:
    support = [SupportingPassage(*fields) for fields in zip(hits, weights, decoded.posterior, strict=True)]
    token_texts = _decode_token_texts(generator, decoded.tokens) if decoded.shares else []
    tokens = [TokenSupport(*parts) for parts in zip(token_texts, decoded.shares, strict=True)]
    is_complete = decoded.tokens[-1] in generator.end_tokens
    text = generator.decode(decoded.tokens)
    usage = TokenUsage(n_prompt_tokens, len(decoded.tokens))
    return Answer(question, text, decoded.log_likelihood, tuple(support), tuple(tokens), is_complete, usage)


def _decode_token_texts(generator: Generator, tokens: Sequence[int]) -> list[str]:
    """Return the text that each token adds; of several tokens of a character, only the last adds
    text.
    """
    texts: list[str] = []
    for n_tokens in range(1, len(tokens) + 1):
        texts.append(decode_new_text(generator, tokens[:n_tokens], "".join(texts), is_last=n_tokens == len(tokens)))
    return texts


class LabelReader(MarginalReader):
    """A `MarginalReader` that answers with the most likely one of several given labels."""

    def __init__(
        self,
        retriever: Retriever | None,
        rag: Rag,
        labels: Mapping[str, str],
        batch_size: int = 8,
        max_passages: int | None = None,
    ) -> None:
        """Create a reader; `labels` maps each label to the word that the model was trained to
        generate.

        Raises:
            UsageError: there are fewer than two labels, or two words have the same tokens.
        """
        if len(labels) < 2:
            raise UsageError(f"{len(labels)} labels are too few to choose from: give at least two")
        super().__init__(retriever, rag, batch_size=batch_size, max_passages=max_passages)
        self._labels = dict(labels)
        self._targets = _encode_labels(rag.generator, list(labels.values()))

    @property
    def decides(self) -> dict[str, Any]:
        """The labels, their words and how they are scored, for memo keys."""
        return {"labels": self._labels, "scored": "whole targets"}

    def log_likelihood(
        self, questions: Sequence[str], hits: Sequence[Sequence[Hit]], texts: Sequence[str]
    ) -> list[float]:
        """Return the log-likelihood of each text, as `MarginalReader` does; for a label, return that of
        its word, which the model generates.
        """
        return super().log_likelihood(questions, hits, [self._labels.get(text, text) for text in texts])

    @torch.inference_mode()
    def _answer_batch(
        self, generator: Generator, questions: Sequence[str], hits: Sequence[Sequence[Hit]], timer: AnswerTimer
    ) -> list[Answer]:
        """Choose labels for questions with equal numbers of passages."""
        contexts, scores = self._encode(generator, questions, hits)
        log_prior = self.rag.prior(scores)
        timer.end_stage(ASSEMBLY)
        label_tokens = [tokens.to(contexts.tokens.device) for tokens in self._targets]
        label_log_probs, posteriors = self.rag.compute_label_likelihoods(generator, log_prior, contexts, label_tokens)
        best_labels = label_log_probs.argmax(1).tolist()
        # (b k, s) -> (b, k s) -> (b,).
        prompt_tokens = contexts.mask.view(len(questions), -1).sum(1).tolist()
        label_names, prior_weights = list(self._labels), log_prior.exp().tolist()
        answers = []
        for i, (question, question_hits) in enumerate(zip(questions, hits, strict=True)):
            log_p = label_log_probs[i, best_labels[i]]
            posterior_probs = posteriors[i, :, best_labels[i]].exp().tolist()
            support = tuple(
                SupportingPassage(*parts)
                for parts in zip(question_hits, prior_weights[i], posterior_probs, strict=True)
            )
            usage = TokenUsage(prompt_tokens[i], len(self._targets[best_labels[i]]))
            answers.append(Answer(question, label_names[best_labels[i]], float(log_p), support, usage=usage))
        return answers


def _encode_labels(generator: Generator, words: Sequence[str]) -> list[torch.Tensor]:
    """Return for each label the (t,) tokens of its word as a target.

    Raises:
        UsageError: two words have the same tokens.
    """
    label_targets = [generator.encode_targets([word]) for word in words]
    label_tokens = [label_target.tokens[0][label_target.mask[0]] for label_target in label_targets]
    if len({tuple(tokens.tolist()) for tokens in label_tokens}) < len(label_tokens):
        raise UsageError(
            f"two of the labels' words {', '.join(map(repr, words))} have the same tokens in this "
            "model: give different words"
        )
    return label_tokens
