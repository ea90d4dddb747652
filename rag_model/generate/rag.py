"""A RAG model: a question encoder, a generator, and how passages are marginalised; the index does not change.

If the index is rebuilt during training, a passage encoder may be trained as well: p(z|x) is then computed with it.

The gradient of log p(y|x) reaches the generator through p(y|x,z) and the question encoder through p(z|x): a passage
that makes the answer more likely than the other passages do moves nearer to the question.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Self, get_args

from torch import Tensor, nn

from rag_model.encoders.trainable import TrainableEncoder
from rag_model.errors import UsageError
from rag_model.generate.generator import Contexts, Generator, Targets
from rag_model.generate.likelihood import (
    Likelihood,
    log_prior,
    sequence_likelihood,
    sequence_uniform,
    smoothed,
    target_log_p,
    token_likelihood,
    token_uniform,
)

Variant = Literal["sequence", "token"]  # RAG-Sequence, RAG-Token: how passages are marginalised
WeighedBy = Literal["products", "scores"]


@dataclass(frozen=True, slots=True)
class RagSettings:
    """How passages are marginalised, and the loss; defaults are those of Lewis et al. and transformers."""

    kind: Variant = "sequence"
    k: int = 5  # passages per question; the paper trains with 5 or 10
    temperature: float = 1.0  # of p(z|x); normalised encoders need less, because cosines lie in [-1, 1]
    label_smoothing: float = 0.0  # ε; fairseq's RAG and BART fine-tuning use .1
    exclude_bos: bool = False  # do not count the token that begins every target, such as BART's <s>
    weighed_by: WeighedBy = "products"  # logits of p(z|x): inner products of vectors, or the retriever's own scores

    def __post_init__(self) -> None:
        for name, known in (("kind", get_args(Variant)), ("weighed_by", get_args(WeighedBy))):
            if getattr(self, name) not in known:
                value = getattr(self, name)
                raise UsageError(f"{name} {value!r} of a RAG model is unknown: use one of {', '.join(known)}")
        if self.k < 1 or not self.temperature > 0 or not 0 <= self.label_smoothing < 1:
            raise UsageError(
                f"k {self.k}, temperature {self.temperature} and label_smoothing {self.label_smoothing} of a RAG "
                "model: need k >= 1, temperature > 0 and 0 <= label_smoothing < 1"
            )


class Rag(nn.Module):
    """p(y|x) over retrieved passages; their number is read from the scores, `settings.k` is the number requested."""

    def __init__(
        self,
        question: nn.Module,
        generator: Generator,
        settings: RagSettings | None = None,
        passage: TrainableEncoder | None = None,
    ) -> None:
        """Join a question encoder, whose forward takes b questions and gives (b, d) vectors, and a generator.

        `passage`: the encoder of the passages, if it is trained too; else p(z|x) uses the vectors of a snapshot.
        """
        super().__init__()
        self.question, self.passage = question, passage
        self.body = generator.module  # registered: its weights are the model's
        self.generator = generator
        self.settings = settings or RagSettings()

    def train(self, mode: bool = True) -> Self:
        """Set the mode; a part that does not learn computes as in evaluation, without dropout."""
        super().train(mode)
        for part in (self.question, self.passage, self.body):
            if part is not None and not any(weights.requires_grad for weights in part.parameters()):
                part.eval()
        return self

    def ask(self, questions: Sequence[str]) -> Tensor:
        """Return the (b, d) vectors of questions, with gradient."""
        vectors: Tensor = self.question(questions)
        return vectors

    def prior(self, scores: Tensor) -> Tensor:
        """Return (b, k) log p(z|x)."""
        return log_prior(scores, self.settings.temperature)

    def log_likelihood(self, scores: Tensor, contexts: Contexts, targets: Targets) -> Likelihood:
        """Return log p(y|x) of the targets, with gradient, and the passages' posterior, without gradient.

        Raises:
            UsageError: scores, contexts and targets do not belong to the same questions and passages.
        """
        return self._read(scores, contexts, targets)[0]

    def loss(self, scores: Tensor, contexts: Contexts, targets: Targets) -> Tensor:
        """Return -log p(y|x) of each question, (b,), at least float32, with the label smoothing of the settings.

        Raises:
            UsageError: as `log_likelihood`.
        """
        found, prior, logits, totals = self._read(scores, contexts, targets)
        epsilon, words = self.settings.label_smoothing, logits.shape[-1]
        if not epsilon:
            return -found.log_p
        if self.settings.kind == "sequence":
            uniform = sequence_uniform(prior, totals, targets.mask, words)
        else:
            uniform = token_uniform(prior, logits, targets.mask)
        return smoothed(found.log_p, uniform, epsilon, words)

    def _read(self, scores: Tensor, contexts: Contexts, targets: Targets) -> tuple[Likelihood, Tensor, Tensor, Tensor]:
        _check(scores, contexts, targets)
        sequence = self.settings.kind == "sequence"
        prior, logits = self.prior(scores), self.generator.logits(contexts, targets)
        log_p, totals = target_log_p(logits, targets.tokens, totals=sequence and self.settings.label_smoothing > 0)
        marginal = sequence_likelihood if sequence else token_likelihood
        return marginal(prior, log_p, self._counted(targets)), prior, logits, totals

    def _counted(self, targets: Targets) -> Tensor:
        if not self.settings.exclude_bos or self.generator.first is None:
            return targets.mask
        counted = targets.mask.clone()
        counted[:, 0] &= targets.tokens[:, 0] != self.generator.first
        return counted


def _check(scores: Tensor, contexts: Contexts, targets: Targets) -> None:
    b, k = scores.shape
    if (contexts.k, len(contexts.tokens), len(targets.tokens)) != (k, b * k, b):
        raise UsageError(
            f"{b} questions with {k} scores do not match {len(contexts.tokens)} contexts, {contexts.k} per question,  "
            f"and {len(targets.tokens)} targets: give all three for the same questions and passages"
        )
