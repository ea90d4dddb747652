"""A RAG model: a question encoder and a generator; it marginalizes answers over passages.

Usually the index does not change during training. If it is rebuilt, the passage encoder may be
trained too, and then p(z|x) is computed with the vectors of that encoder.

The gradient of log p(y|x) reaches the generator through p(y|x,z) and the question encoder through
p(z|x): the question's vector moves towards passages that make the answer more likely than the other
retrieved passages do.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Self

import torch
from torch import Tensor, nn

from rag_model.encoders.spec import check_choices
from rag_model.encoders.trainable import TrainableEncoder
from rag_model.errors import UsageError
from rag_model.generate.generator import Contexts, Generator, Targets
from rag_model.generate.likelihood import (
    Likelihood,
    log_prior,
    sequence_likelihood,
    sequence_smoothing_term,
    smooth_labels,
    target_log_p,
    target_log_p_from_state,
    token_likelihood,
    token_smoothing_term,
)

Variant = Literal["sequence", "token"]  # RAG-Sequence, RAG-Token
PassageWeighting = Literal["products", "scores"]


@dataclass(frozen=True, slots=True)
class RagSettings:
    """Settings of marginalization and loss; defaults are those of Lewis et al. and transformers."""

    kind: Variant = "sequence"
    k: int = 5  # passages per question; the paper trains with 5 or 10
    # Temperature of p(z|x); normalized vectors need a lower one, because cosines lie in [-1, 1].
    temperature: float = 1.0
    label_smoothing: float = 0.0  # ε of label smoothing; fairseq's RAG and BART fine-tuning use .1
    # exclude the first token of targets, such as BART's <s>, from the loss
    exclude_bos: bool = False
    # Logits of p(z|x): inner products of vectors (`products`), or scores of the retriever
    # (`scores`).
    weighed_by: PassageWeighting = "products"

    def __post_init__(self) -> None:
        check_choices(self, "a RAG model")
        if self.k < 1 or not self.temperature > 0 or not 0 <= self.label_smoothing < 1:
            raise UsageError(
                f"k {self.k}, temperature {self.temperature} and label_smoothing "
                f"{self.label_smoothing} of a RAG model are invalid: give k >= 1, temperature > 0 "
                "and 0 <= label_smoothing < 1"
            )


class Rag(nn.Module):
    """Model of p(y|x) over retrieved passages; the number k of passages per question may differ
    from `settings.k`, the default number to retrieve.
    """

    def __init__(
        self,
        question_encoder: nn.Module,
        generator: Generator,
        settings: RagSettings | None = None,
        passage_encoder: TrainableEncoder | None = None,
    ) -> None:
        """Combine a generator with a question encoder, whose `forward` maps b questions to (b, d)
        vectors.

        `passage_encoder` is the passage encoder if it is trained too; None: p(z|x) uses the vectors of a
        snapshot.
        """
        super().__init__()
        self.question, self.passage = question_encoder, passage_encoder
        self.body = generator.module  # register the generator's weights as a submodule
        self.generator = generator
        self.settings = settings or RagSettings()

    def train(self, mode: bool = True) -> Self:
        """Set training or evaluation mode; frozen modules stay in evaluation mode (no dropout)."""
        super().train(mode)
        for submodule in (self.question, self.passage, self.body):
            if submodule is not None and not any(parameter.requires_grad for parameter in submodule.parameters()):
                submodule.eval()
        return self

    def embed_questions(self, questions: Sequence[str]) -> Tensor:
        """Return the (b, d) vectors of questions with gradient."""
        vectors: Tensor = self.question(questions)
        return vectors

    def prior(self, scores: Tensor) -> Tensor:
        """Return (b, k) log p(z|x)."""
        return log_prior(scores, self.settings.temperature)

    def log_likelihood(self, scores: Tensor, contexts: Contexts, targets: Targets) -> Likelihood:
        """Return log p(y|x) of the targets, with gradient, and the posterior of the passages,
        without gradient.

        Raises:
            UsageError: the shapes of scores, contexts and targets do not fit together.
        """
        return self._compute_likelihood(scores, contexts, targets)[0]

    @torch.no_grad()
    def compute_label_likelihoods(
        self, generator: Generator, prior: Tensor, contexts: Contexts, labels: Sequence[Tensor]
    ) -> tuple[Tensor, Tensor]:
        """Return (b, l) log p(label|x), and the (b, k, l) posterior log p(z|x,label).

        A label is scored as a whole target, without the tokens that the loss excludes.

        Args:
            generator: the generator of this model, or the result of `make_stoppable` for it.
            prior: (b, k) log p(z|x).
            contexts: the b questions with k passages each.
            labels: l tensors of (t,) tokens, as `Generator.encode_targets` returns them.
        """
        first_logits, state = generator.prefill(contexts)
        likelihoods = []
        for tokens in labels:
            log_p = target_log_p_from_state(generator, first_logits, state, tokens, contexts.k)
            target = Targets(tokens[None], torch.ones_like(tokens, dtype=torch.bool)[None])
            mask = self._mask_scored_tokens(target).expand(len(prior), -1)  # (1, t) -> (b, t)
            likelihoods.append(self._compute_marginal(prior, log_p, mask))
        return (
            torch.stack([likelihood.log_p for likelihood in likelihoods], 1),
            torch.stack([likelihood.posterior for likelihood in likelihoods], 2),
        )

    def loss(self, scores: Tensor, contexts: Contexts, targets: Targets) -> Tensor:
        """Return -log p(y|x) of each question, (b,), at least float32, with the label smoothing of
        the settings.

        Raises:
            UsageError: as for `log_likelihood`.
        """
        likelihood, prior, logits, totals = self._compute_likelihood(scores, contexts, targets)
        smoothing, vocabulary_size = self.settings.label_smoothing, logits.shape[-1]
        if not smoothing:
            return -likelihood.log_p
        if self._is_sequence:
            smoothing_term = sequence_smoothing_term(prior, totals, targets.mask, vocabulary_size)
        else:
            smoothing_term = token_smoothing_term(prior, logits, targets.mask)
        return smooth_labels(likelihood.log_p, smoothing_term, smoothing, vocabulary_size)

    def _compute_likelihood(
        self, scores: Tensor, contexts: Contexts, targets: Targets
    ) -> tuple[Likelihood, Tensor, Tensor, Tensor]:
        _check_shapes(scores, contexts, targets)
        prior, logits = self.prior(scores), self.generator.logits(contexts, targets)
        needs_totals = self._is_sequence and self.settings.label_smoothing > 0
        log_p, totals = target_log_p(logits, targets.tokens, with_totals=needs_totals)
        return self._compute_marginal(prior, log_p, self._mask_scored_tokens(targets)), prior, logits, totals

    @property
    def _is_sequence(self) -> bool:
        return self.settings.kind == "sequence"

    def _compute_marginal(self, prior: Tensor, log_p: Tensor, mask: Tensor) -> Likelihood:
        return (sequence_likelihood if self._is_sequence else token_likelihood)(prior, log_p, mask)

    def _mask_scored_tokens(self, targets: Targets) -> Tensor:
        if not self.settings.exclude_bos or self.generator.first_token is None:
            return targets.mask
        scored_mask = targets.mask.clone()
        scored_mask[:, 0] &= targets.tokens[:, 0] != self.generator.first_token
        return scored_mask


def _check_shapes(scores: Tensor, contexts: Contexts, targets: Targets) -> None:
    b, k = scores.shape
    if (contexts.k, len(contexts.tokens), len(targets.tokens)) != (k, b * k, b):
        raise UsageError(
            f"{b} questions with {k} scores do not match {len(contexts.tokens)} contexts, "
            f"{contexts.k} per question, and {len(targets.tokens)} targets: give all three for "
            "the same questions and passages"
        )
