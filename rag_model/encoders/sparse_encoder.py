"""The sparse encoder (SPLADE, SiDR): encode passages and questions as weighted vocabulary terms.

The settings determine how the logits of a masked language model become weighted terms. The default
is w_j = max over tokens i of log(1 + relu(logit_ij)): Formal et al. 2021, "SPLADE v2" (arXiv
2109.10086); with `sum` instead of max it is "SPLADE" (arXiv 2107.05720). `log1p_relu` applies the
logarithm twice (arXiv 2504.14839). `elu1p` is SiDR (Zhou et al., arXiv 2405.01924; see
`sparse_model.SidrModel`).

A passage weight is stored as a whole number of units, at most 255; `scale` units are a weight of 1.
The scale is a setting, not a statistic of the corpus, so that all parts and builds share it.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Final, Literal, Self

import numpy as np
import numpy.typing as npt

from rag_model.corpus.ragged_file import MAX_WEIGHT, QUERY_UNITS, SparseVectors, compute_offsets
from rag_model.digest import digest_json
from rag_model.encoders.encoder import Vectors
from rag_model.encoders.files import (
    CONFIG,
    has_splade_pooling,
    list_tokenizer_files,
    read_json_object,
    read_max_tokens,
    read_optional_json,
    read_splade,
    read_vocabulary_size,
    resolve_folder,
)
from rag_model.encoders.space import Space, describe_unusual_settings, digest_tokenizer, read_declared_space
from rag_model.encoders.spec import JOINED, RECORD_FILE, SPARSE_KEY, EncoderSettings, write_encoder_record
from rag_model.encoders.tokens import (
    BATCH_INVARIANT_TOKENS,
    batch_by_length,
    count_truncated,
    load_tokenizer,
    pad_length,
    pad_rows,
    run_batches,
    tokenize,
)
from rag_model.encoders.weights import digest_tensors, list_weight_files, read_tensor_headers
from rag_model.errors import InputError, UsageError
from rag_model.extras import require

if TYPE_CHECKING:
    import torch
    from tokenizers import Tokenizer

    from rag_model.encoders.sparse_model import SidrModel, SparseModel

# Tokens per batch, including padding. Each token has a logit for every term: 125 MB of float32 per
# batch with 30,522 terms.
_CPU_BATCH_TOKENS = BATCH_INVARIANT_TOKENS
_CUDA_BATCH_TOKENS = 16_384
_MAX_QUERY_UNITS = 1 << 24  # maximum units of a query term, which a float32 represents exactly
_HEADS = frozenset({"cls", "lm_head"})  # name parts of the tensors of a language-model head
IntArray = npt.NDArray[np.int64]
TermPooling = Literal["max", "sum"]
Activation = Literal["relu", "log1p_relu", "elu1p"]
SIDR: Final = "elu1p"  # the activation of SiDR
_HEAD_SUFFIX = "ForMaskedLM"  # suffix of architectures with logits over the vocabulary
_MIN_TERM_TOKENS = 3  # minimum of max_length: two special tokens and one token of text
_MAX_TERMS = 10_000  # maximum number of terms per text
_MAX_SCALE = 1 << 16


@dataclass(frozen=True, slots=True)
class SparseSpec(EncoderSettings):
    """Settings of a sparse encoder; the fields that concern passages are part of its vector
    space.
    """

    noun: ClassVar[str] = "a sparse encoder"
    # Pooling over the tokens of a text, including special tokens as in training, but not padding.
    pooling: TermPooling = "max"
    # Function of a logit before log(1 + …); `log1p_relu` is log(1 + relu(logit)), and `elu1p` is
    # SiDR.
    activation: Activation = "relu"
    max_length: int = 256  # maximum tokens per input, including special tokens
    passage_terms: int = 256  # maximum terms of a passage, those with the largest weights
    question_terms: int = 256  # maximum terms of a question, those with the largest weights
    # Units per passage weight of 1. With 64, the largest weight is 3.98; trained models stay below
    # 3.5.
    scale: int = 64
    passage_prompt: str = ""  # text before every passage
    question_prompt: str = ""  # text before every question

    def __post_init__(self) -> None:
        self.check()
        allowed_ranges = {
            "max_length": (_MIN_TERM_TOKENS, None),
            "passage_terms": (1, _MAX_TERMS),
            "question_terms": (1, _MAX_TERMS),
            "scale": (1, _MAX_SCALE),
        }
        if self.activation == SIDR and self.pooling != "max":
            raise UsageError(f"pooling {self.pooling} of a sparse encoder does not fit activation {SIDR}: use max")
        for name, (minimum, maximum) in allowed_ranges.items():
            setting = getattr(self, name)
            if setting < minimum or (maximum is not None and setting > maximum):
                limit = "or more" if maximum is None else f"to {maximum:,}"
                raise UsageError(f"{name} of a sparse encoder is {setting}: give {minimum} {limit}")

    @property
    def keeps_own_terms(self) -> bool:
        """Whether the terms of a text's own tokens are kept regardless of their weight."""
        return self.activation == SIDR

    @property
    def space_pooling(self) -> str:
        """The `pooling` of the vector space: all settings that determine a passage weight."""
        own_terms_suffix = " and its own" if self.keeps_own_terms else ""
        return f"{self.pooling} {self.activation}, {self.passage_terms} terms{own_terms_suffix}, {self.scale} units"

    def format_passage(self, title: str, text: str) -> str:
        """Return the tokenizer input for a passage."""
        return f"{self.passage_prompt}{title} {text}" if title else self.passage_prompt + text


def read_sparse_spec(folder: Path, overrides: Mapping[str, Any] | None = None) -> SparseSpec:
    """Read the settings of the sparse encoder in `folder`; `overrides` replace single fields.

    Raises:
        InputError: the folder contains no masked language model, the vocabularies of model and
            tokenizer differ, or a file is missing or corrupt.
        UsageError: an override is unknown or invalid, or `max_length` exceeds the model's limit.
    """
    config, folder_settings = read_json_object(folder / CONFIG), _read_term_settings(folder)
    architecture = next(iter(config.get("architectures") or [""]))
    if not architecture.endswith(_HEAD_SUFFIX) and folder_settings.get("activation") != SIDR:
        raise InputError(
            f"encoder {folder} is a {architecture or config.get('model_type')}, which has no "
            "weights over its vocabulary: give a masked-language model (a BertForMaskedLM), such "
            "as a SPLADE"
        )
    try:
        spec = SparseSpec(max_length=read_max_tokens(folder)).with_fields(folder_settings)
    except UsageError as error:
        raise InputError(f"encoder {folder} cannot be used: {error}") from error
    spec = spec.with_fields(overrides or {})
    max_positions = config.get("max_position_embeddings")
    if max_positions and spec.max_length > max_positions:
        raise UsageError(
            f"max_length {spec.max_length} is more than the limit of encoder {folder}: use {max_positions} or less"
        )
    _check_vocabulary(folder, read_vocabulary_size(folder), spec.max_length)
    return spec


def _read_term_settings(folder: Path) -> dict[str, Any]:
    recorded_settings = read_optional_json(folder / RECORD_FILE).get(SPARSE_KEY)
    if isinstance(recorded_settings, dict):
        return recorded_settings
    return read_splade(folder) if has_splade_pooling(folder) else {}


def _check_vocabulary(folder: Path, model_vocab_size: int, max_length: int) -> None:
    tokenizer_vocab_size = load_tokenizer(folder, max_length).get_vocab_size()
    if tokenizer_vocab_size > model_vocab_size:
        raise InputError(
            f"the tokenizer of encoder {folder} has {tokenizer_vocab_size:,} tokens, and its model "
            f"computes weights for {model_vocab_size:,}: use the tokenizer that the model was "
            "trained with"
        )


@dataclass(frozen=True, slots=True)
class SparseEncoder:
    """A loaded sparse encoder; create one with `load`."""

    name: str  # name that the user gave
    folder: Path
    spec: SparseSpec
    tokenizer: "Tokenizer"
    model: "SparseModel | SidrModel"
    batch_tokens: int  # maximum tokens per batch

    @classmethod
    def load(
        cls,
        name: str | Path,
        overrides: Mapping[str, Any] | None = None,
        *,
        device: str | None = None,
        dtype: str | None = None,
    ) -> Self:
        """Load the encoder from a folder, or by its hub name; for `device` and `dtype`, see
        `Encoder.load`.

        Raises:
            InputError: the model is not found, a file is missing or corrupt, or it is not a masked
                language model.
            MissingExtraError: the model extra is not installed.
            UsageError: an override is unknown, or this machine has no such device.
        """
        folder = resolve_folder(name)
        require("torch", "model")
        require("transformers", "model")
        spec = read_sparse_spec(folder, overrides)
        resolved_device, resolved_dtype = import_module("rag_model.encoders.model").resolve_device_and_dtype(
            device, dtype
        )
        sparse_model = import_module("rag_model.encoders.sparse_model")
        if spec.activation == SIDR:
            model = sparse_model.SidrModel.load(folder, device=device, dtype=resolved_dtype)
        else:
            model = sparse_model.SparseModel.load(folder, spec, device=device, dtype=resolved_dtype)
        return cls(
            str(name), folder, spec, load_tokenizer(folder, spec.max_length), model, get_batch_tokens(resolved_device)
        )

    @property
    def dim(self) -> int:
        """Vocabulary size V."""
        return read_vocabulary_size(self.folder)

    def space(self) -> Space:
        """Return the vector space of the encoder's questions: the space that the folder declares,
        or else the space of its own passages.

        Raises:
            InputError: the declaration or a file of the encoder is corrupt.
        """
        return read_declared_space(self.folder) or compute_sparse_space(self.folder, self.spec, self.name)

    def encode_questions(self, questions: Sequence[str], *, batch_invariant: bool = True) -> Vectors:
        """Return (q, l, 2) float32: the terms and weights of questions, in order, largest weights
        first.

        l is the maximum number of terms of a question, at least 1 and at most the spec's
        `question_terms`; rows with fewer terms end in weights of 0. Weights are multiples of 1 /
        4096. For `batch_invariant`, see `iter_weights`.

        Raises:
            InputError: a weight is not finite.
        """
        texts = [self.spec.format_question(question) for question in questions]
        terms, weight_units = self._select_top_terms(
            texts, self.spec.question_terms, QUERY_UNITS, _MAX_QUERY_UNITS, batch_invariant=batch_invariant
        )
        max_terms = max(1, int((weight_units > 0).sum(axis=1).max(initial=0)))
        weights = (weight_units / QUERY_UNITS)[:, :max_terms]
        return np.stack([np.where(weights > 0, terms[:, :max_terms], 0), weights], axis=2).astype(np.float32)

    def encode_passages(self, titles: Sequence[str], texts: Sequence[str]) -> SparseVectors:
        """Return the weighted terms of passages (`title text`), in order, independent of the other
        passages.

        Raises:
            InputError: a weight is not finite.
        """
        inputs = list(map(self.spec.format_passage, titles, texts))
        terms, units = self._select_top_terms(inputs, self.spec.passage_terms, self.spec.scale, MAX_WEIGHT)
        # Sort by term id, with empty entries at the end.
        term_order = np.argsort(np.where(units > 0, terms, self.dim), axis=1)
        terms, units = np.take_along_axis(terms, term_order, 1), np.take_along_axis(units, term_order, 1)
        is_kept = units > 0  # (n, c)
        lengths = is_kept.sum(axis=1, dtype=np.int64)
        return SparseVectors(terms[is_kept].astype(np.int32), units[is_kept].astype(np.uint8), compute_offsets(lengths))

    def count_truncated(self, titles: Sequence[str], texts: Sequence[str]) -> int:
        """Return the number of passages with more than `spec.max_length` tokens."""
        return count_truncated(self.tokenizer, list(map(self.spec.format_passage, titles, texts)))

    def _select_top_terms(
        self, texts: Sequence[str], max_terms: int, scale: int, max_units: int, *, batch_invariant: bool = True
    ) -> tuple[IntArray, IntArray]:
        """Return the (n, c) largest terms and their (n, c) units; see `find_top_terms`."""
        find_top_terms = import_module("rag_model.encoders.sparse_model").find_top_terms
        model: Any = self.model
        output_shape = len(texts), min(max_terms + (self.spec.max_length if self.spec.keeps_own_terms else 0), self.dim)
        terms, weight_units = np.zeros(output_shape, np.int64), np.zeros(output_shape, np.int64)
        for rows, weights, ids in self.iter_weights(texts, batch_invariant=batch_invariant):
            if not bool(weights.isfinite().all()):
                raise InputError(f"encoder {self.name} computed a weight that is not finite: fetch the model again")
            own_term_masks = model.bag_of_tokens(ids) if self.spec.keeps_own_terms else None
            for output_array, top_values in zip(
                (terms, weight_units), find_top_terms(weights, max_terms, scale, max_units, own_term_masks), strict=True
            ):
                output_array[rows, : top_values.shape[1]] = top_values.cpu().numpy()
        return terms, weight_units

    def iter_weights(
        self, texts: Sequence[str], *, batch_invariant: bool = True
    ) -> Iterator[tuple[IntArray, Any, Any]]:
        """Yield (row numbers, (b, V) float32 weights, (b, t) token ids), longest texts first,
        without prompts.

        With `batch_invariant`, weights do not depend on the other texts; small batches then repeat
        texts (see `tokens.BATCH_INVARIANT_TOKENS`). Weights may be NaN or infinite.
        """
        torch = require("torch", "model")
        token_ids = tokenize(self.tokenizer, texts)

        def compute_weights_and_ids(rows: IntArray) -> tuple[Any, Any]:
            id_batch = [token_ids[row] for row in rows]
            batch_ids, is_token = pad_rows(id_batch, pad_length(max(map(len, id_batch))), self.model.pad_id)
            with torch.inference_mode():
                inputs = [torch.from_numpy(array).to(self.model.device) for array in (batch_ids, is_token)]
                return self.model(*inputs), inputs[0]

        min_tokens = min(BATCH_INVARIANT_TOKENS, self.batch_tokens) if batch_invariant else 0
        for text_rows, (weights, ids) in run_batches(
            batch_by_length([len(ids) for ids in token_ids], self.batch_tokens, min_tokens), compute_weights_and_ids
        ):
            with torch.inference_mode():
                yield text_rows, weights, ids


def get_batch_tokens(device: "torch.device") -> int:
    """Return the maximum number of tokens per batch on a device, including padding."""
    return _CUDA_BATCH_TOKENS if device.type == "cuda" else _CPU_BATCH_TOKENS


def compute_sparse_space(folder: Path, spec: SparseSpec, name: str = "") -> Space:
    """Compute the vector space of a sparse encoder's passages; reads all weights once, including
    the head.

    Raises:
        InputError: a file of the encoder is missing or corrupt.
    """
    stored_tensors = read_tensor_headers(folder)
    head_tensors = {name: tensor for name, tensor in stored_tensors.items() if _HEADS & {*name.split(".")}}
    body_tensors = {name: tensor for name, tensor in stored_tensors.items() if name not in head_tensors}
    # The head may be tied to these embeddings.
    tied_digests = {tensor.digest() for name, tensor in body_tensors.items() if name.endswith("embeddings.weight")}
    # A set removes duplicates, because a bias may be stored twice.
    head_digests = sorted({tensor.digest() for tensor in head_tensors.values()} - tied_digests)
    return Space(
        name=name or folder.name,
        weights=digest_json([digest_tensors(body_tensors), head_digests]),
        tokenizer=digest_tokenizer(folder),
        pooling=spec.space_pooling,
        normalize=False,
        max_length=spec.max_length,
        layout=JOINED,
        passage_prompt=spec.passage_prompt,
        dim=read_vocabulary_size(folder),
        config=describe_unusual_settings(folder),
    )


def collect_sparse_encoder_files(folder: Path, spec: SparseSpec, space: Space, workdir: Path) -> dict[str, Path]:
    """Return the paths of the files of a sparse question encoder for `space`, by file name.

    Writes the record `bookwheel.json` into `workdir`; the other files stay in `folder`.

    Raises:
        InputError: `folder` has no weights or no tokenizer.
    """
    record_path = write_encoder_record(workdir, {SPARSE_KEY: spec.to_json()}, space)
    paths = [folder / CONFIG, *list_tokenizer_files(folder), *list_weight_files(folder), record_path]
    return {path.name: path for path in paths}
