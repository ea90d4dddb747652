"""A bi-encoder in training: one encoder for questions and one for passages, or one for both."""

from collections.abc import Sequence
from pathlib import Path
from typing import Self

import torch
from torch import Tensor, nn

from rag_model.corpus.records import Passage
from rag_model.encoders.encoder import Vectors
from rag_model.encoders.space import Space
from rag_model.encoders.trainable import TrainableEncoder
from rag_model.encoders.weights import digest_weights
from rag_model.errors import UsageError


class BiEncoder(nn.Module):
    """A question and a passage encoder in one space; create it with `load`."""

    def __init__(self, question: TrainableEncoder, passage: TrainableEncoder, *, frozen: bool = False) -> None:
        """Combine two encoders, or one with itself; `frozen` freezes the passage encoder.

        Raises:
            UsageError: the dimensions differ, or a shared encoder is to be frozen.
        """
        super().__init__()
        if question.dim != passage.dim:
            raise UsageError(
                f"question encoder {question.folder} has {question.dim} dimensions, passage "
                f"encoder {passage.folder} {passage.dim}: use encoders of equal dimension"
            )
        if frozen and question is passage:
            raise UsageError("a shared encoder cannot be frozen for passages and trained for questions: use two")
        self.question, self.passage, self.frozen = question, passage, frozen
        self._cached_vectors: dict[str, Tensor] = {}  # of a frozen encoder, by passage hash
        if frozen:
            passage.requires_grad_(False)

    @classmethod
    def load(
        cls,
        question: str | Path,
        passage: str | Path | None = None,
        *,
        shared: bool = False,
        frozen: bool = False,
        device: str | None = None,
    ) -> Self:
        """Load two encoders from two folders or from one; `shared` uses one encoder for both.

        Raises:
            InputError: an encoder cannot be loaded.
            UsageError: see `__init__`, or a shared encoder has two folders.
        """
        question_encoder = TrainableEncoder.load(question, "question", device=device)
        is_shared = shared and passage in {None, question}
        if shared and not is_shared:
            raise UsageError(f"encoders {question} and {passage} cannot be shared: name one of them, or train two")
        passage_encoder = (
            question_encoder if is_shared else TrainableEncoder.load(passage or question, "passage", device=device)
        )
        return cls(question_encoder, passage_encoder, frozen=frozen)

    def embed_questions(self, questions: Sequence[str]) -> Tensor:
        """Return (b, d) float32 vectors of questions, with gradient."""
        vectors: Tensor = self.question(questions, "question")
        return vectors

    def embed_passages(self, passages: Sequence[Passage]) -> Tensor:
        """Return (m, d) float32 vectors of passages, with gradient.

        Vectors of a frozen encoder have no gradient and are computed once.
        """
        if not self.frozen:
            return self.passage.embed_passages(passages)
        if uncached := list(
            {passage.hash: passage for passage in passages if passage.hash not in self._cached_vectors}.values()
        ):
            encoded = torch.from_numpy(self.encode_passages(uncached)).to(self.passage.device)
            self._cached_vectors.update(zip([passage.hash for passage in uncached], encoded, strict=True))
        # m times (d,) -> (m, d)
        return torch.stack([self._cached_vectors[passage.hash] for passage in passages])

    def encode_questions(self, questions: Sequence[str]) -> Vectors:
        """Return (n, d) float32 vectors of questions, without gradient."""
        return self.question.encode(questions, "question")

    def encode_passages(self, passages: Sequence[Passage]) -> Vectors:
        """Return (n, d) float32 vectors of passages, without gradient."""
        return self.passage.encode([(passage.title, passage.text) for passage in passages], "passage")

    def digests(self) -> dict[str, str]:
        """Return the digests of the weights before training."""
        return {
            name: digest_weights(encoder.folder)
            for name, encoder in (("question", self.question), ("passage", self.passage))
        }

    def save(self, folder: Path) -> Space:
        """Write `passage/` and `question/`; return the space of the passages."""
        space = self.passage.save_passage_encoder(folder / "passage")
        self.question.save(folder / "question", target_space=space)
        return space
