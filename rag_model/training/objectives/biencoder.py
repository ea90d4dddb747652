"""Two encoders trained together, one for questions and one for passages; or one encoder for both."""

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
    """A question and a passage encoder in one space; make it with `load`."""

    def __init__(self, question: TrainableEncoder, passage: TrainableEncoder, *, frozen: bool = False) -> None:
        """Join two encoders, or one with itself; `frozen`: the passage encoder is not trained.

        Raises:
            UsageError: their vectors differ in length, or a shared encoder is to be frozen.
        """
        super().__init__()
        if question.dim != passage.dim:
            raise UsageError(
                f"question encoder {question.folder} has {question.dim} dimensions, passage encoder {passage.folder} "
                f"{passage.dim}: use encoders of equal dimension"
            )
        if frozen and question is passage:
            raise UsageError("one encoder for both cannot be frozen for passages and trained for questions: use two")
        self.question, self.passage, self.frozen = question, passage, frozen
        self._known: dict[str, Tensor] = {}  # cached vectors of a frozen encoder, by hash of the passage
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
        """Load two encoders from two folders or from one; `shared`: use one encoder for both.

        Raises:
            InputError: an encoder cannot be loaded.
            UsageError: as the class.
        """
        asking = TrainableEncoder.load(question, "question", device=device)
        same = shared and passage in {None, question}
        if shared and not same:
            raise UsageError(f"encoders {question} and {passage} cannot be shared: name one of them, or train two")
        reading = asking if same else TrainableEncoder.load(passage or question, "passage", device=device)
        return cls(asking, reading, frozen=frozen)

    def ask(self, questions: Sequence[str]) -> Tensor:
        """Return (b, d) float32 vectors of questions, with gradient."""
        vectors: Tensor = self.question(questions, "question")
        return vectors

    def read(self, passages: Sequence[Passage]) -> Tensor:
        """Return (m, d) float32 vectors of passages, with gradient; a frozen encoder's without, and computed once."""
        if not self.frozen:
            return self.passage.read(passages)
        if new := list({one.hash: one for one in passages if one.hash not in self._known}.values()):
            encoded = torch.from_numpy(self.encode_passages(new)).to(self.passage.device)
            self._known.update(zip([one.hash for one in new], encoded, strict=True))
        return torch.stack([self._known[one.hash] for one in passages])  # m times (d,) -> (m, d)

    def encode_questions(self, questions: Sequence[str]) -> Vectors:
        """Return (n, d) float32 vectors without gradient."""
        return self.question.encode(questions, "question")

    def encode_passages(self, passages: Sequence[Passage]) -> Vectors:
        """Return (n, d) float32 vectors without gradient."""
        return self.passage.encode([(one.title, one.text) for one in passages], "passage")

    def digests(self) -> dict[str, str]:
        """Return the digests of the weights before training."""
        return {
            name: digest_weights(one.folder) for name, one in (("question", self.question), ("passage", self.passage))
        }

    def save(self, folder: Path) -> Space:
        """Write `folder/passage`, and `folder/question` for the space of the first; return that space."""
        space = self.passage.save_passages(folder / "passage")
        self.question.save(folder / "question", asks=space)
        return space
