"""Text to vectors: the bi-encoder that every stage uses.

`Encoder.load` takes a folder or a hub name; `encode_passages` and `encode_questions` return float32 vectors, row for row.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self

import numpy as np
import numpy.typing as npt

from rag_model.encoders.batches import by_length
from rag_model.encoders.resolve import resolve_folder
from rag_model.encoders.space import Space, asked_space, space_of
from rag_model.encoders.spec import EncoderSpec, known_prompts, read_spec
from rag_model.encoders.tokens import TokenIds, load_tokenizer, tokenize
from rag_model.errors import InputError
from rag_model.extras import require

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from rag_model.encoders.model import Model

Role = Literal["passage", "question"]
Vectors = npt.NDArray[np.float32]
WINDOW = 4096  # inputs tokenised and sorted together: memory does not grow with the number of texts
CPU_BATCH_TOKENS = 4096
CUDA_BATCH_TOKENS = 65_536


@dataclass(frozen=True, slots=True)
class Encoder:
    """A loaded encoder; make one with `load`."""

    name: str
    folder: Path
    spec: EncoderSpec
    tokenizer: "Tokenizer"
    model: "Model"
    batch_tokens: int

    @classmethod
    def load(
        cls,
        name: str | Path,
        role: Role = "passage",
        overrides: Mapping[str, Any] | None = None,
        *,
        device: str | None = None,
        dtype: str | None = None,
        threads: int | None = None,
    ) -> Self:
        """Load the encoder in folder `name`, or of that hub name, ready to encode.

        Raises:
            InputError: it is not to be found, a file of it is corrupt, or it is another kind of model.
            UsageError: an override is no field of `EncoderSpec`.
        """
        folder = resolve_folder(name)
        torch = require("torch", "model")
        if threads is not None:
            torch.set_num_threads(threads)
        spec = read_spec(folder, {**known_prompts(str(name)), **(overrides or {})})
        loaded = load_model_lazily(folder, device, dtype)
        budget = CUDA_BATCH_TOKENS if loaded.device.type == "cuda" else CPU_BATCH_TOKENS
        return cls(str(name), folder, spec, load_tokenizer(folder, spec.max_length), loaded, budget)

    @property
    def dim(self) -> int:
        """Length of a vector."""
        return self.model.dim

    def space(self) -> Space:
        """Return the space of its passages or, for a separate question encoder, the one that it asks into."""
        return asked_space(self.folder) or space_of(self.folder, self.spec, self.name)

    def encode_passages(self, titles: Sequence[str], texts: Sequence[str]) -> Vectors:
        """Return (n, d) float32 vectors of passages, in order."""
        inputs = [self.spec.passage(title, text) for title, text in zip(titles, texts, strict=True)]
        return self._encode(inputs)

    def encode_questions(self, questions: Sequence[str]) -> Vectors:
        """Return (n, d) float32 vectors of questions, in order."""
        return self._encode([self.spec.question(question) for question in questions])

    def encode_tokens(self, tokens: Sequence[TokenIds]) -> Vectors:
        """Return (n, d) float32 vectors of inputs that are already token ids, in order."""
        from rag_model.encoders.model import forward

        out = np.empty((len(tokens), self.dim), np.float32)
        for rows in by_length([len(ids) for ids in tokens], self.batch_tokens):
            batch = [tokens[row] for row in rows]
            out[rows] = (
                forward(self.model, batch, self.spec.pooling, normalize=self.spec.normalize).cpu().numpy()
            )
        bad = np.flatnonzero(~np.isfinite(out).all(1))
        if len(bad):
            raise InputError(
                f"encoder {self.name} made a vector that is not finite for input {bad[0]}: its weights are broken"
            )
        return out

    def _encode(self, inputs: Sequence[str | tuple[str, str]]) -> Vectors:
        out = np.empty((len(inputs), self.dim), np.float32)
        for start in range(0, len(inputs), WINDOW):
            out[start : start + WINDOW] = self.encode_tokens(
                tokenize(self.tokenizer, inputs[start : start + WINDOW])
            )
        return out


def load_model_lazily(folder: Path, device: str | None, dtype: str | None) -> "Model":
    """Load the model, importing torch only now."""
    require("transformers", "model")
    from rag_model.encoders.model import load_model

    return load_model(folder, device, dtype)
