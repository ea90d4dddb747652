"""A trainable dense encoder: an `Encoder` with gradients, which can be saved.

Training runs `Model.forward` as `Encoder` does, so training and retrieval compute the same vectors,
except for dropout.
"""

from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Self

import torch
from tokenizers import Tokenizer
from torch import Tensor, nn

from rag_model.corpus.records import Passage
from rag_model.encoders.encoder import Encoder, Role, Vectors
from rag_model.encoders.files import CONFIG
from rag_model.encoders.model import Model, evaluation_mode, get_training_length_multiple
from rag_model.encoders.pretrained import freeze_pooler
from rag_model.encoders.space import Space, compute_space, name_space_by_content, read_declared_space
from rag_model.encoders.spec import RECORD_FILE, EncoderSpec, TextInput, write_encoder_record
from rag_model.encoders.tokens import copy_tokenizer, tokenize
from rag_model.errors import InputError, UsageError

# A question, a passage without title, or (title, text) of a passage.
Text = str | tuple[str, str]


class TrainableEncoder(nn.Module):
    """A trainable question encoder, passage encoder, or encoder of both; create one with `load`."""

    def __init__(self, encoder: Encoder, role: Role) -> None:
        """Wrap the transformers model that `encoder` runs.

        Raises:
            UsageError: `encoder` was not loaded as `trainable`.
        """
        super().__init__()
        if encoder.model.transformers_model is None:
            raise UsageError(f"encoder {encoder.name} was loaded for inference only: load it as trainable")
        self.whole = encoder.model.transformers_model
        self.role = role
        self.folder = encoder.folder
        # Space of the passages, if the folder does not declare it.
        self.target_space: Space | None = None
        self.spec: EncoderSpec = encoder.spec
        self.tokenizer: Tokenizer = encoder.tokenizer
        self._model: Model = encoder.model
        freeze_pooler(self.whole)

    @classmethod
    def load(
        cls, folder: str | Path, role: Role = "question", spec: EncoderSpec | None = None, device: str | None = None
    ) -> Self:
        """Load an encoder by folder or hub name in float32, to train it; `spec` replaces its
        settings.

        Raises:
            InputError: as for `Encoder.load`.
        """
        overrides = asdict(spec) if spec else None
        encoder = Encoder.load(folder, role, overrides, device=device, dtype="float32", trainable=True)
        return cls(encoder, role).train()

    @property
    def dim(self) -> int:
        """Dimension of a vector."""
        return self._model.dim

    @property
    def device(self) -> torch.device:
        """Current device of the weights."""
        return next(self.parameters()).device

    def forward(self, texts: Sequence[Text], role: Role | None = None) -> Tensor:
        """Return the (b, d) float32 vectors of one batch of texts, in order, with gradient.

        A tuple is a passage's title and text. `role`, by default the encoder's role, determines
        prompt and layout. Texts beyond the limit are truncated; an empty text consists of special
        tokens.
        """
        ids = tokenize(self.tokenizer, self._format_inputs(texts, role))
        return self._get_model_on_device().forward(ids, get_training_length_multiple(self.device))

    def embed_passages(self, passages: Sequence[Passage]) -> Tensor:
        """Return the (m, d) float32 vectors of passages with gradient, in order, for any role of
        the encoder.
        """
        vectors: Tensor = self([(passage.title, passage.text) for passage in passages], "passage")
        return vectors

    def encode(self, texts: Sequence[Text], role: Role | None = None) -> Vectors:
        """Return the (n, d) float32 vectors without gradient and dropout, as `Encoder` does."""
        with evaluation_mode(self):
            return self._get_model_on_device().encode(tokenize(self.tokenizer, self._format_inputs(texts, role)))

    def encode_questions(self, questions: Sequence[str]) -> Vectors:
        """Return the (n, d) float32 vectors of questions, for retrieval."""
        return self.encode(questions, "question")

    def space(self) -> Space:
        """Return the vector space of the questions.

        Training does not change this space, because the passage vectors are fixed.

        Raises:
            InputError: the encoder's folder neither declares a space nor contains a passage
                encoder.
        """
        if (declared_space := read_declared_space(self.folder) or self.target_space) is not None:
            return declared_space
        if not (self.folder / CONFIG).is_file():
            raise InputError(
                f"question encoder {self.folder} does not declare its passage encoder: name it "
                f"with --asks, or add its space, as `show --json` prints it, to {RECORD_FILE} "
                "there under the key `asks`"
            )
        return name_space_by_content(compute_space(self.folder, self.spec), self.folder)

    def save(self, folder: Path, target_space: Space | None = None) -> None:
        """Write a folder that `Encoder.load` and transformers' `from_pretrained` open: safetensors,
        tokenizer, spec.

        `target_space` is the space of the frozen passage vectors with which a question encoder was
        trained.
        """
        self.save_tokenizer_and_spec(folder, target_space)
        transformers_model: Any = self.whole
        transformers_model.save_pretrained(str(folder))

    def save_passage_encoder(self, folder: Path) -> Space:
        """Write a passage encoder like `save`; return the space of its passages."""
        self.save(folder)
        return name_space_by_content(compute_space(folder, self.spec), folder)

    def save_tokenizer_and_spec(self, folder: Path, target_space: Space | None = None) -> None:
        """Write all files except config and weights: tokenizer, spec and passage space."""
        copy_tokenizer(self.folder, folder)
        write_encoder_record(folder, {"spec": self.spec.to_json()}, target_space)

    def _get_model_on_device(self) -> Model:
        """Return the model on the current device of the weights."""
        return replace(self._model, device=self.device)

    def _format_inputs(self, texts: Sequence[Text], role: Role | None) -> list[TextInput]:
        if (role or self.role) == "question":
            return [self.spec.format_question(_join_title(text)) for text in texts]
        return [self.spec.format_passage(*_split_title(text)) for text in texts]


def _join_title(text: Text) -> str:
    return text if isinstance(text, str) else " ".join(text).strip()


def _split_title(text: Text) -> tuple[str, str]:
    return ("", text) if isinstance(text, str) else text
