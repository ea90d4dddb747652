"""A trainable encoder: the weights, tokenizer and spec of `Encoder.load`, with gradient, and saving to a folder.

It computes the same as `Encoder`: both run `Model.vectors`. So training and retrieval see the same vectors, except for
dropout.
"""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

import torch
from tokenizers import Tokenizer
from torch import Tensor, nn

from rag_model.corpus.records import Passage
from rag_model.encoders.encoder import Encoder, Role, Vectors
from rag_model.encoders.files import CONFIG
from rag_model.encoders.model import Model, learning_multiple
from rag_model.encoders.space import Space, asked_space, named_by_content, space_of
from rag_model.encoders.spec import RECORD_FILE, EncoderSpec, TextInput
from rag_model.encoders.tokens import copy_tokenizer, tokenize
from rag_model.errors import InputError, UsageError

Text = str | tuple[str, str]  # a question or a passage without title; or a passage's title and text
_UNUSED = "pooler"  # BERT's: vectors do not depend on it, and several GPUs would wait for its gradient


class TrainableEncoder(nn.Module):
    """A question or passage encoder, or both in one; make it with `load`."""

    def __init__(self, encoder: Encoder, role: Role) -> None:
        """Wrap the transformers model that `encoder` runs.

        Raises:
            UsageError: it was not loaded as `trainable`.
        """
        super().__init__()
        if encoder.model.whole is None:
            raise UsageError(f"encoder {encoder.name} was loaded to encode alone: load it as trainable")
        self.whole = encoder.model.whole
        self.role = role
        self.folder = encoder.folder
        self.asks: Space | None = None  # the passage space, if its folder does not declare it
        self.spec: EncoderSpec = encoder.spec
        self.tokenizer: Tokenizer = encoder.tokenizer
        self._model: Model = encoder.model
        for name, parameter in self.whole.named_parameters():
            parameter.requires_grad_(_UNUSED not in name.split("."))

    @classmethod
    def load(
        cls, folder: str | Path, role: Role = "question", spec: EncoderSpec | None = None, device: str | None = None
    ) -> Self:
        """Load the encoder of a folder or hub name in float32, for training; `spec` replaces the folder's.

        Raises:
            InputError: as `Encoder.load`.
        """
        overrides = spec.to_json() if spec else None
        encoder = Encoder.load(folder, role, overrides, device=device, dtype="float32", trainable=True)
        return cls(encoder, role).train()

    @property
    def dim(self) -> int:
        """Return the length of a vector."""
        return self._model.dim

    @property
    def device(self) -> torch.device:
        """Return the current device of the weights."""
        return next(self.parameters()).device

    def forward(self, texts: Sequence[Text], role: Role | None = None) -> Tensor:
        """Return (b, d) float32 vectors with gradient, in order; the texts are one batch.

        A tuple is a passage's title and text. `role`, by default the encoder's own, determines prompt and layout.
        Longer texts are cut; an empty text has only special tokens.
        """
        tokens = tokenize(self.tokenizer, self._inputs(texts, role))
        return self._here().vectors(tokens, learning_multiple(self.device))

    def read(self, passages: Sequence[Passage]) -> Tensor:
        """Return (m, d) float32 vectors of passages with gradient, in order, whatever the encoder's own role."""
        vectors: Tensor = self([(one.title, one.text) for one in passages], "passage")
        return vectors

    def encode(self, texts: Sequence[Text], role: Role | None = None) -> Vectors:
        """Return (n, d) float32 vectors without gradient and without dropout, as `Encoder` would."""
        learning = self.training
        try:
            return self.eval()._here().encode(tokenize(self.tokenizer, self._inputs(texts, role)))
        finally:
            self.train(learning)

    def encode_questions(self, questions: Sequence[str]) -> Vectors:
        """Return (n, d) float32 vectors of questions, for retrieval."""
        return self.encode(questions, "question")

    def space(self) -> Space:
        """Return the space of its question vectors, unchanged by training: the passages do not change.

        Raises:
            InputError: its folder neither declares a space nor holds an encoder of passages.
        """
        if (declared := asked_space(self.folder) or self.asks) is not None:
            return declared
        if not (self.folder / CONFIG).is_file():
            raise InputError(
                f"question encoder {self.folder} does not declare its passage encoder: name "
                f"it with --asks, or put its space, as `show --json` prints it, into {RECORD_FILE} there as "
                "`asks`"
            )
        return named_by_content(space_of(self.folder, self.spec), self.folder)

    def save(self, folder: Path, asks: Space | None = None) -> None:
        """Write a folder that `Encoder.load` and transformers' `from_pretrained` open: safetensors, tokenizer, spec.

        `asks`: the space of the frozen passages that a question encoder was trained against.
        """
        self.save_reading(folder, asks)
        whole: Any = self.whole
        whole.save_pretrained(str(folder))

    def save_passages(self, folder: Path) -> Space:
        """Write a passage encoder as `save` does; return the space of the passages that it encodes."""
        self.save(folder)
        return named_by_content(space_of(folder, self.spec), folder)

    def save_reading(self, folder: Path, asks: Space | None = None) -> None:
        """Write everything except config and weights: tokenizer, spec, and the passage space."""
        copy_tokenizer(self.folder, folder)
        record = {"spec": self.spec.to_json(), **({"asks": asks.to_json()} if asks else {})}
        text = json.dumps(record, indent=2, sort_keys=True, ensure_ascii=False) + "\n"
        (folder / RECORD_FILE).write_text(text, encoding="utf-8")

    def _here(self) -> Model:
        """Return the model on the current device of the weights."""
        return replace(self._model, device=self.device)

    def _inputs(self, texts: Sequence[Text], role: Role | None) -> list[TextInput]:
        if (role or self.role) == "question":
            return [self.spec.question(_whole(text)) for text in texts]
        return [self.spec.passage(*_titled(text)) for text in texts]


def _whole(text: Text) -> str:
    return text if isinstance(text, str) else " ".join(text).strip()


def _titled(text: Text) -> tuple[str, str]:
    return ("", text) if isinstance(text, str) else text
