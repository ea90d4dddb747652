"""A trainable cross-encoder: the logits of `CrossEncoder`, with gradient, and saving to a folder."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

import numpy as np
import numpy.typing as npt
from torch import Tensor, nn

from rag_model.corpus.records import Passage
from rag_model.encoders.crossencoder import CrossEncoder
from rag_model.encoders.pairs.classifier import TorchModel, load_classifier
from rag_model.encoders.pairs.tokens import PairTokens
from rag_model.encoders.resolve import resolve_folder
from rag_model.encoders.tokens import copy_tokenizer
from rag_model.errors import InputError

_NEW = "pooler"  # part of the head of a BERT that came without one


class TrainableCrossEncoder(nn.Module):
    """A transformer with a head of one score; make it with `load`."""

    def __init__(self, whole: nn.Module, tokens: PairTokens, folder: Path) -> None:
        """Wrap a transformers model; `folder` has its tokenizer."""
        super().__init__()
        self.whole, self.folder = whole, folder
        self._tokens, self._model = tokens, TorchModel(whole)

    @classmethod
    def load(cls, name: str | Path) -> Self:
        """Load a cross-encoder, or any transformer, which gets a new head drawn with torch's seed; float32, on the CPU.

        Raises:
            InputError: it is not found, a file is missing or corrupt, or transformers has no such head for it.
        """
        folder = resolve_folder(name)
        whole, missing = load_classifier(folder)
        body = f"{whole.base_model_prefix}."
        if lost := [one for one in missing if one.startswith(body) and _NEW not in one.split(".")]:
            raise InputError(f"model {folder} lacks {len(lost)} tensors, the first is {lost[0]}: fetch it again")
        return cls(whole, PairTokens.load(folder), folder).train()

    def forward(self, questions: Sequence[str], passages: Sequence[Passage]) -> Tensor:
        """Return the (n,) float32 logits of n pairs with gradient, in order; the pairs are one batch."""
        titles, texts = [one.title for one in passages], [one.text for one in passages]
        return self._model.forward(self._tokens.batch(self._tokens.encode(questions, titles, texts)))

    def scores(self, questions: Sequence[str], passages: Sequence[Passage]) -> npt.NDArray[np.float32]:
        """Return the (n,) float32 logits of n pairs without gradient and without dropout, as `CrossEncoder` would."""
        learning = self.training
        scorer = CrossEncoder(self._tokens, self._model)
        try:
            self.eval()
            return scorer.scores(questions, [one.title for one in passages], [one.text for one in passages])
        finally:
            self.train(learning)

    def save(self, folder: Path) -> None:
        """Write a folder that `CrossEncoder.load` and transformers' `from_pretrained` open."""
        copy_tokenizer(self.folder, folder)
        whole: Any = self.whole
        whole.save_pretrained(str(folder))
