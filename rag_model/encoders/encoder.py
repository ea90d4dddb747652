"""Text to vectors: the bi-encoder of all stages.

`Encoder.load` takes a folder or a hub name; `encode_passages` and `encode_questions` return float32 vectors,
row for row. Texts are tokenised and sorted by length one window at a time, so memory does not grow with the texts.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self, TypeVar

import numpy as np
import numpy.typing as npt

from rag_model.encoders.files import CONFIG, optional_object
from rag_model.encoders.resolve import resolve_folder
from rag_model.encoders.space import Space, asked_space, space_of
from rag_model.encoders.spec import EncoderSpec, TextInput, known_prompts, read_spec
from rag_model.encoders.static_folder import StaticTable, static_body
from rag_model.encoders.tokens import limit_tokenizer, load_tokenizer, tokenize
from rag_model.encoders.words import Words
from rag_model.errors import InputError, UsageError
from rag_model.extras import require

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from rag_model.encoders.model import Model
    from rag_model.encoders.static_model import StaticModel

Role = Literal["passage", "question"]
Vectors = npt.NDArray[np.float32]
_WINDOW = 4096  # inputs tokenised and sorted together on a CPU
_CUDA_WINDOW = 32_768  # a GPU has larger batches, and so needs a larger window to sort
_WRONG_ROLE = {"passage": "DPRQuestionEncoder", "question": "DPRContextEncoder"}
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Encoder:
    """A loaded encoder; make one with `load`."""

    name: str  # as the user gave it
    folder: Path
    spec: EncoderSpec
    tokenizer: "Tokenizer"
    model: "Model | StaticModel"
    words: Words | None = None  # splits the texts of a static encoder; None: `tokenizer` does

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
        trainable: bool = False,
    ) -> Self:
        """Load the encoder in folder `name`, or of that hub name.

        `overrides` replace fields of the spec. `device` (`cpu`, `cuda:1`): by default a GPU, a different one for each
        worker of a machine, else the CPU. `dtype`: by default bf16 on GPUs and on CPUs with fast bf16, else float32.
        `threads` sets torch's and tokenizers' for the whole process; None does not change them. `trainable`: with the
        model as transformers trains and saves it. A static encoder always runs on the CPU in float32.

        Raises:
            InputError: it is not found, a file is missing or corrupt, or it is another kind of model.
            MissingExtraError: the model extra is not installed.
            UsageError: an override is not a field of the spec, this machine has no such device, or a static encoder
                is to be trained.
        """
        folder = resolve_folder(name)
        _check_role(folder, role)
        spec = read_spec(folder, {**known_prompts(str(name)), **(overrides or {})})
        torch = require("torch", "model")
        if threads is not None:
            torch.set_num_threads(threads)
            limit_tokenizer(threads)
        if spec.is_static:
            if trainable:
                raise untrainable(folder)
            return cls._static(str(name), folder, spec)
        models = import_module("rag_model.encoders.model")
        model = models.load_model(folder, spec, device, dtype, trainable=trainable)
        return cls(str(name), folder, spec, load_tokenizer(folder, spec.max_length), model)

    @classmethod
    def _static(cls, name: str, folder: Path, spec: EncoderSpec) -> Self:
        body = static_body(folder)
        table, words = StaticTable.open(body), Words.load(body, spec)
        if words.size > table.size:
            raise InputError(
                f"the tokenizer of encoder {folder} has {words.size:,} tokens, and {table.size:,} have a vector: use "
                "the tokenizer that the model was made with"
            )
        model = import_module("rag_model.encoders.static_model").StaticModel.of(table, normalize=spec.normalize)
        return cls(name, folder, spec, words.tokenizer, model, words)

    @property
    def dim(self) -> int:
        """Return the length of a vector."""
        return self.model.dim

    @property
    def window(self) -> int:
        """Return how many inputs are sorted together: the best window size for `stream`."""
        return _CUDA_WINDOW if self.model.device.type == "cuda" else _WINDOW

    def space(self) -> Space:
        """Return the space of its question vectors: the one that its folder declares, else that of its own passages.

        Raises:
            InputError: the declaration or a file of the encoder is corrupt.
        """
        return asked_space(self.folder) or space_of(self.folder, self.spec, self.name)

    def encode_passages(self, titles: Sequence[str], texts: Sequence[str]) -> Vectors:
        """Return the (n, d) float32 vectors of passages, in order.

        Raises:
            InputError: a vector is not finite; the sentence names its row.
        """
        return self._encode([self.spec.passage(title, text) for title, text in zip(titles, texts, strict=True)])

    def encode_questions(self, questions: Sequence[str]) -> Vectors:
        """Return the (n, d) float32 vectors of questions, in order.

        Raises:
            InputError: a vector is not finite; the sentence names its row.
        """
        return self._encode([self.spec.question(question) for question in questions])

    def stream(self, windows: Iterable[Sequence[TextInput]], *, steady: bool = False) -> Iterator[tuple[Vectors, int]]:
        """Yield each window's (n, d) float32 vectors and its number of tokens.

        Holds one window; on CUDA a second, which is read and tokenised while the GPU works. `steady` vectors do not
        depend on the other inputs (`Model.encode`), which costs a few more inputs.

        Raises:
            InputError: a vector is not finite; the sentence names its row.
        """
        row = 0
        split = partial(tokenize, self.tokenizer) if self.words is None else self.words.tokens
        tokenized = map(split, windows)
        for tokens in one_ahead(tokenized) if self.model.device.type == "cuda" else tokenized:
            vectors = self.model.encode(tokens, steady=steady)
            self._check_finite(vectors, row)
            row += len(vectors)
            yield vectors, sum(len(ids) for ids in tokens)

    def _encode(self, inputs: Sequence[TextInput]) -> Vectors:
        out = np.empty((len(inputs), self.dim), np.float32)
        row = 0
        for vectors, _ in self.stream(_windows(inputs, self.window)):
            out[row : row + len(vectors)] = vectors
            row += len(vectors)
        return out

    def _check_finite(self, vectors: Vectors, first_row: int) -> None:
        bad = np.flatnonzero(~np.isfinite(vectors).all(axis=1))
        if len(bad):
            row = first_row + int(bad[0])
            raise InputError(
                f"encoder {self.name} made a vector that is not finite, of row {row}: its weights are damaged, "
                "fetch the model again"
            )


def passage_space(name: str | Path) -> Space:
    """Return the space of the encoder in folder `name`, or of that hub name, without loading the model.

    It is the one that its folder declares, else that of its own passages.

    Raises:
        InputError: it is not found, a file is missing or corrupt, or it is DPR's question encoder and declares no
        space.
    """
    folder = resolve_folder(name)
    if (declared := asked_space(folder)) is not None:
        return declared
    _check_role(folder, "passage")
    return space_of(folder, read_spec(folder, known_prompts(str(name))), str(name))


def untrainable(folder: Path) -> UsageError:
    """Return the error of a static encoder that is to be trained."""
    return UsageError(f"encoder {folder} is static, and cannot be trained here: give a transformer, such as BERT or E5")


def _windows(inputs: Sequence[TextInput], size: int) -> Iterator[Sequence[TextInput]]:
    return (inputs[start : start + size] for start in range(0, len(inputs), size))


def one_ahead(items: Iterator[_T]) -> Iterator[_T]:
    """Yield `items`; a thread computes the next item while the current one is used."""
    end = object()
    with ThreadPoolExecutor(1) as thread:
        coming = thread.submit(next, items, end)
        while (item := coming.result()) is not end:
            coming = thread.submit(next, items, end)
            yield item  # type: ignore[misc]


def _check_role(folder: Path, role: Role) -> None:
    if _WRONG_ROLE[role] in (optional_object(folder / CONFIG).get("architectures") or []):
        other = "passage" if role == "question" else "question"
        raise InputError(f"encoder {folder} is DPR's {other} encoder: give the {role} encoder of the pair instead")
