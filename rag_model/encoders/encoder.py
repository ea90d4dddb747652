"""The dense bi-encoder, which encodes passages and questions as one vector each.

`Encoder.load` takes a folder or a hub name; `encode_passages` and `encode_questions` return float32
vectors in the order of the inputs. Texts are tokenized and sorted by length one window at a time,
so memory does not grow with the number of texts.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self, TypeVar, Union

import numpy as np
import numpy.typing as npt

from rag_model.encoders.files import CONFIG, ENDPOINT_PREFIX, list_tokenizer_files, read_optional_json, resolve_folder
from rag_model.encoders.space import Space, compute_space, read_declared_space
from rag_model.encoders.spec import (
    ENDPOINT_KEY,
    PROBES,
    EncoderSpec,
    TextInput,
    find_known_settings,
    is_bag_encoder,
    is_endpoint_encoder,
    is_muvera_encoder,
    is_sparse_encoder,
    is_token_encoder,
    read_encoder_spec,
    read_endpoint_record,
    write_encoder_record,
)
from rag_model.encoders.static_folder import StaticModel, StaticTable, find_static_body
from rag_model.encoders.tokens import TokenCounts, WordTokenizer, limit_tokenizer, load_tokenizer, tokenize_and_count
from rag_model.encoders.weights import list_weight_files
from rag_model.errors import InputError, UsageError
from rag_model.extras import require

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from rag_model.encoders.bag import BagEncoder
    from rag_model.encoders.endpoint_encoder import EndpointEncoder
    from rag_model.encoders.model import Model
    from rag_model.encoders.muvera import MuveraEncoder
    from rag_model.encoders.sparse_encoder import SparseEncoder
    from rag_model.encoders.token_encoder import TokenEncoder

Role = Literal["passage", "question"]
Vectors = npt.NDArray[np.float32]
_WINDOW = 4096  # number of inputs that are tokenized and sorted together on a CPU
_CUDA_WINDOW = 32_768  # a GPU has larger batches, so it needs a larger window to sort
_OTHER_ROLE_ARCHITECTURE = {"passage": "DPRQuestionEncoder", "question": "DPRContextEncoder"}
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Encoder:
    """A loaded encoder; create one with `load`."""

    name: str  # name that the user gave
    folder: Path
    spec: EncoderSpec
    tokenizer: "Tokenizer"
    model: "Model | StaticModel"  # `StaticModel` does not need torch
    # tokenizer of a static encoder; without it, `tokenizer` is used
    word_tokenizer: WordTokenizer | None = None

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
        """Load the encoder from a folder, or by its hub name.

        `overrides` replace fields of the spec. `device` is a name such as `cpu` or `cuda:1`; by
        default, each worker of a machine uses a different GPU, or the CPU if there is none. `dtype`
        is by default bf16 on GPUs and on CPUs with fast bf16, else float32. `threads` sets the
        threads of torch and tokenizers for the whole process; None does not change them.
        `trainable` loads the model with transformers, which can train and save it. A static encoder
        always runs on the CPU in float32.

        Raises:
            InputError: the model is not found, a file is missing or corrupt, or the model is not a
                dense encoder.
            MissingExtraError: the model extra is not installed.
            UsageError: an override is not a field of the spec, this machine has no such device, or
                `trainable` is set for a static encoder.
        """
        folder = resolve_folder(name)
        _check_role(folder, role)
        spec = read_encoder_spec(folder, {**find_known_settings(str(name)), **(overrides or {})})
        if threads is not None:
            limit_tokenizer(threads)
        if spec.is_endpoint:
            raise UsageError(
                f"encoder {folder} is behind an endpoint, so it cannot be used here: give the folder of a model"
            )
        if spec.is_static:
            if trainable:
                raise static_encoder_error(folder)
            return cls._load_static(str(name), folder, spec)
        torch = require("torch", "model")
        if threads is not None:
            torch.set_num_threads(threads)
        model_module = import_module("rag_model.encoders.model")
        model = model_module.load_model(folder, spec, device, dtype, trainable=trainable)
        return cls(str(name), folder, spec, load_tokenizer(folder, spec.max_length, spec.end_token), model)

    @classmethod
    def _load_static(cls, name: str, folder: Path, spec: EncoderSpec) -> Self:
        body = find_static_body(folder)
        static_table, word_tokenizer = StaticTable.open(body), WordTokenizer.load(body, spec)
        if word_tokenizer.vocabulary_size > static_table.size:
            raise InputError(
                f"the tokenizer of encoder {folder} has {word_tokenizer.vocabulary_size:,} tokens, "
                f"and {static_table.size:,} have a vector: use the model's own tokenizer"
            )
        model = StaticModel.from_table(static_table, truncate_dim=spec.truncate_dim, normalize=spec.normalize)
        return cls(name, folder, spec, word_tokenizer.tokenizer, model, word_tokenizer)

    @property
    def dim(self) -> int:
        """The dimension of a vector."""
        return self.model.dim

    @property
    def window(self) -> int:
        """The number of inputs that are sorted together, which is the best window size for
        `stream`.
        """
        return _CUDA_WINDOW if self._uses_gpu else _WINDOW

    @property
    def _uses_gpu(self) -> bool:
        return str(self.model.device).startswith("cuda")

    def space(self) -> Space:
        """Return the vector space of the encoder's questions: the space that the folder declares,
        or else the space of its own passages.

        Raises:
            InputError: the declaration or a file of the encoder is corrupt.
        """
        return read_declared_space(self.folder) or compute_space(self.folder, self.spec, self.name)

    def encode_passages(self, titles: Sequence[str], texts: Sequence[str]) -> Vectors:
        """Return the (n, d) float32 vectors of passages, in order.

        Raises:
            InputError: a vector is not finite; the message names its row.
        """
        return self._encode(list(map(self.spec.format_passage, titles, texts)))

    def encode_questions(self, questions: Sequence[str]) -> Vectors:
        """Return the (n, d) float32 vectors of questions, in order.

        Raises:
            InputError: a vector is not finite; the message names its row.
        """
        return self._encode([self.spec.format_question(question) for question in questions])

    def stream(
        self, windows: Iterable[Sequence[TextInput]], *, batch_invariant: bool = False
    ) -> Iterator[tuple[Vectors, TokenCounts]]:
        """Yield the (n, d) float32 vectors and the token counts of each window.

        Memory holds one window; on CUDA it also holds the next one, which is tokenized while the
        GPU computes. With `batch_invariant`, a vector does not depend on the other inputs (see
        `Model.encode`), at the cost of encoding a few inputs twice.

        Raises:
            InputError: a vector is not finite; the message names its row.
        """
        row = 0
        tokenize_window = (
            partial(tokenize_and_count, self.tokenizer)
            if self.word_tokenizer is None
            else self.word_tokenizer.tokenize_and_count
        )
        token_batches = map(tokenize_window, windows)
        for token_ids, n_truncated in prefetch(token_batches) if self._uses_gpu else token_batches:
            vectors = self.model.encode(token_ids, batch_invariant=batch_invariant)
            self._check_finite(vectors, row)
            row += len(vectors)
            yield vectors, TokenCounts(sum(len(text_ids) for text_ids in token_ids), n_truncated)

    def _encode(self, inputs: Sequence[TextInput]) -> Vectors:
        vectors_by_row = np.empty((len(inputs), self.dim), np.float32)
        row = 0
        windows = (inputs[i : i + self.window] for i in range(0, len(inputs), self.window))
        for vectors, _ in self.stream(windows):
            vectors_by_row[row : row + len(vectors)] = vectors
            row += len(vectors)
        return vectors_by_row

    def _check_finite(self, vectors: Vectors, first_row: int) -> None:
        bad_rows = np.flatnonzero(~np.isfinite(vectors).all(axis=1))
        if len(bad_rows):
            row = first_row + int(bad_rows[0])
            raise InputError(
                f"encoder {self.name} computed a vector that is not finite, of row {row}: its "
                "weights are damaged, fetch the model again"
            )


def read_passage_space(name: str | Path) -> Space:
    """Return the vector space of an encoder, by folder or hub name, without loading the model.

    The result is the space that the folder declares, or else the space of the encoder's own
    passages.

    Raises:
        InputError: the model is not found, a file is missing or corrupt, or it is DPR's question
            encoder and declares no space.
    """
    folder = resolve_folder(name)
    if (declared_space := read_declared_space(folder)) is not None:
        return declared_space
    _check_role(folder, "passage")
    return compute_space(folder, read_encoder_spec(folder, find_known_settings(str(name))), str(name))


def static_encoder_error(folder: Path) -> UsageError:
    """Return the error for an attempt to train a static encoder."""
    return UsageError(f"encoder {folder} is static and cannot be trained: give a transformer, such as BERT or E5")


def prefetch(items: Iterator[_T]) -> Iterator[_T]:
    """Yield `items`; a thread computes the next item while the caller uses the current one."""
    end_marker = object()
    with ThreadPoolExecutor(1) as thread:
        next_item = thread.submit(next, items, end_marker)
        while (item := next_item.result()) is not end_marker:
            next_item = thread.submit(next, items, end_marker)
            yield item  # type: ignore[misc]


def _check_role(folder: Path, role: Role) -> None:
    if _OTHER_ROLE_ARCHITECTURE[role] in (read_optional_json(folder / CONFIG).get("architectures") or []):
        other_role = "passage" if role == "question" else "question"
        raise InputError(f"encoder {folder} is DPR's {other_role} encoder: give the {role} encoder of the pair instead")


def collect_question_encoder_files(folder: Path, spec: EncoderSpec, space: Space, workdir: Path) -> dict[str, Path]:
    """Return the paths of the files of a question encoder for `space`, by file name.

    Writes the record `bookwheel.json` into `workdir`; the other files stay in `folder`.

    Raises:
        InputError: `folder` has no weights or no tokenizer.
    """
    endpoint_fields = {ENDPOINT_KEY: read_endpoint_record(folder)} if spec.is_endpoint else {}
    record_path = write_encoder_record(workdir, {"spec": spec.to_json(), **endpoint_fields}, space)
    if spec.is_endpoint:
        return {path.name: path for path in (record_path, folder / PROBES)}
    static_folder = find_static_body(folder) if spec.is_static else folder
    config_files = [] if spec.is_static and not (folder / CONFIG).is_file() else [folder / CONFIG]
    files = [*config_files, *list_tokenizer_files(static_folder), *list_weight_files(static_folder), record_path]
    return {path.name: path for path in files}


AnyEncoder = Union[Encoder, "EndpointEncoder", "TokenEncoder", "MuveraEncoder", "SparseEncoder"]


def load_any_encoder(folder: Path, role: Role = "question", name: str = "") -> AnyEncoder:
    """Load the dense, ColBERT, MUVERA or sparse encoder of a folder.

    `name` is the name of a dense encoder, by default its folder.

    Raises:
        InputError: a file is missing or corrupt.
        MissingExtraError: the model extra is not installed.
    """
    if is_muvera_encoder(folder):
        from rag_model.encoders.muvera import MuveraEncoder  # noqa: PLC0415 - this kind only

        return MuveraEncoder.load(folder)
    if is_endpoint_encoder(folder):
        from rag_model.encoders.endpoint_encoder import EndpointEncoder  # noqa: PLC0415 - this kind only

        return EndpointEncoder.load(folder)
    if is_token_encoder(folder):
        from rag_model.encoders.token_encoder import TokenEncoder  # noqa: PLC0415 - this kind only

        return TokenEncoder.load(folder)
    if is_sparse_encoder(folder):
        from rag_model.encoders.sparse_encoder import SparseEncoder  # noqa: PLC0415 - one kind only

        return SparseEncoder.load(folder)
    return Encoder.load(name or folder, role)


def load_passage_encoder(folder: Path) -> Union[AnyEncoder, "BagEncoder"]:
    """Load the passage encoder of a folder: an encoder of any kind, or a bag-of-tokens encoder.

    Raises:
        InputError: a file is missing or corrupt.
        MissingExtraError: the model extra is not installed.
    """
    if is_bag_encoder(folder):
        from rag_model.encoders.bag import BagEncoder  # noqa: PLC0415 - this kind only

        return BagEncoder.load(folder)
    return load_any_encoder(folder, "passage")


def load_question_encoder(name: str) -> AnyEncoder:
    """Load a question encoder by name: a folder with an encoder of any kind, or a hub name.

    Raises:
        InputError: the encoder is not found, or a file is missing or corrupt.
        MissingExtraError: the model extra is not installed.
        UsageError: `name` is a model behind an endpoint; a snapshot contains such an encoder.
    """
    if name.startswith(ENDPOINT_PREFIX):
        raise UsageError(f"the snapshots of {name} contain its encoder: omit it")
    return load_any_encoder(resolve_folder(name), name=name)
