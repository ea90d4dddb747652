"""Two encoders that learn together: one reads questions, one reads passages; or one reads both."""

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
        """Join two encoders, or one with itself; `frozen`: the passage encoder does not learn.

        Raises:
            UsageError: their vectors differ in length, or one encoder is to learn and to be frozen.
        """
        super().__init__()
        if question.dim != passage.dim:
            raise UsageError(
                f"question encoder {question.folder} makes {question.dim} numbers and passage encoder {passage.folder} "
                f"{passage.dim}: take encoders of one dimension"
            )
        if frozen and question is passage:
            raise UsageError("one encoder for both can't be frozen for passages and learn questions: take two")
        self.question, self.passage, self.frozen = question, passage, frozen
        self._known: dict[str, Tensor] = {}  # vectors of a frozen encoder, by hash of the passage
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
        """Load the encoders of two folders, or of one that both begin from; `shared`: they stay one.

        Raises:
            InputError: an encoder can't be loaded.
            UsageError: as the class.
        """
        asking = TrainableEncoder.load(question, "question", device=device)
        same = shared and passage in {None, question}
        if shared and not same:
            raise UsageError(f"encoders {question} and {passage} can't be one: name one of them, or train two")
        reading = asking if same else TrainableEncoder.load(passage or question, "passage", device=device)
        return cls(asking, reading, frozen=frozen)

    def ask(self, questions: Sequence[str]) -> Tensor:
        """Return (b, d) float32 vectors of questions, with gradient."""
        vectors: Tensor = self.question(questions, "question")
        return vectors

    def read(self, passages: Sequence[Passage]) -> Tensor:
        """Return (m, d) float32 vectors of passages, with gradient; of a frozen encoder without, and made once."""
        if not self.frozen:
            return self.passage.read(passages)
        if new := list({one.hash: one for one in passages if one.hash not in self._known}.values()):
            encoded = torch.from_numpy(self.encode_passages(new)).to(self.passage.device)
            self._known.update(zip([one.hash for one in new], encoded, strict=True))
        return torch.stack([self._known[one.hash] for one in passages])

    def encode_questions(self, questions: Sequence[str]) -> Vectors:
        """Return (n, d) float32 vectors without gradient."""
        return self.question.encode(questions, "question")

    def encode_passages(self, passages: Sequence[Passage]) -> Vectors:
        """Return (n, d) float32 vectors without gradient."""
        return self.passage.encode([(one.title, one.text) for one in passages], "passage")

    def digests(self) -> dict[str, str]:
        """Return the digests of the weights that it was loaded with."""
        return {
            name: digest_weights(one.folder) for name, one in (("question", self.question), ("passage", self.passage))
        }

    def save(self, folder: Path) -> Space:
        """Write `folder/passage` and `folder/question`, which asks into the space of the first; return that space."""
        space = self.passage.save_passages(folder / "passage")
        self.question.save(folder / "question", asks=space)
        return space
