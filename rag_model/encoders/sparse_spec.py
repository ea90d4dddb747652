"""Settings of a sparse encoder: how the logits of a masked language model become weighted terms
(SPLADE).

w_j = max over tokens i of log(1 + relu(logit_ij)): Formal et al. 2021, "SPLADE v2" (arXiv
2109.10086); with `sum` instead of max: "SPLADE" (arXiv 2107.05720). `log1p_relu` applies the
logarithm twice (arXiv 2504.14839). `elu1p` is SiDR (Zhou et al., arXiv 2405.01924; see
`sparse_model.SidrModel`).

A passage weight is stored as a whole number of units, at most 255; `scale` units are a weight of 1.
The scale is a setting and not a statistic of the corpus, so that it is equal in all parts and
builds.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, Final, Literal, Self, get_args

from rag_model.encoders.files import (
    CONFIG,
    has_splade_pooling,
    read_json_object,
    read_max_tokens,
    read_optional_json,
    read_splade,
)
from rag_model.encoders.spec import RECORD_FILE
from rag_model.encoders.tokens import load_tokenizer
from rag_model.errors import InputError, UsageError

SPARSE_KEY = "sparse"  # key in bookwheel.json
Pooling = Literal["max", "sum"]
Activation = Literal["relu", "log1p_relu", "elu1p"]
SIDR: Final = "elu1p"
_HEAD_SUFFIX = "ForMaskedLM"  # suffix of architectures with logits over the vocabulary
_MIN_TOKENS = 3  # two special tokens and one token of text
_MAX_TERMS = 10_000  # per text
_MAX_SCALE = 1 << 16


@dataclass(frozen=True, slots=True)
class SparseSpec:
    """Settings of a sparse encoder; the fields that concern passages are part of its vector
    space.
    """

    # Over the tokens of a text, special ones included as in training; never over padding.
    pooling: Pooling = "max"
    # Of a logit, before log(1 + …); `log1p_relu`: log(1 + relu(logit)); `elu1p`: SiDR.
    activation: Activation = "relu"
    max_length: int = 256  # tokens per input, special tokens included; longer inputs are truncated
    passage_terms: int = 256  # heaviest terms kept of a passage; trained models give 100 to 200
    question_terms: int = 256  # heaviest terms kept of a question
    # Units per passage weight of 1: up to 3.98, a logit of 53; trained models stay below 3.5.
    scale: int = 64
    passage_prompt: str = ""  # prepended unchanged to every passage
    question_prompt: str = ""  # prepended unchanged to every question

    def __post_init__(self) -> None:
        for field in fields(self):
            value, expected_type = getattr(self, field.name), type(field.default)
            if type(value) is not expected_type:
                raise UsageError(
                    f"{field.name} of a sparse encoder is {value!r}: give a value of {expected_type.__name__}"
                )
        for name, choices in (("pooling", get_args(Pooling)), ("activation", get_args(Activation))):
            if getattr(self, name) not in choices:
                raise UsageError(
                    f"{name} {getattr(self, name)!r} of a sparse encoder is unknown: use one of {', '.join(choices)}"
                )
        bounds = {
            "max_length": (_MIN_TOKENS, None),
            "passage_terms": (1, _MAX_TERMS),
            "question_terms": (1, _MAX_TERMS),
            "scale": (1, _MAX_SCALE),
        }
        if self.activation == SIDR and self.pooling != "max":
            raise UsageError(f"pooling {self.pooling} of a sparse encoder does not go with {SIDR}: use max")
        for name, (minimum, maximum) in bounds.items():
            value = getattr(self, name)
            if value < minimum or (maximum is not None and value > maximum):
                limit = "or more" if maximum is None else f"to {maximum:,}"
                raise UsageError(f"{name} of a sparse encoder is {value}: give {minimum} {limit}")

    @property
    def keeps_own_terms(self) -> bool:
        """Whether the terms of a text's own tokens are kept too, whatever their weight."""
        return self.activation == SIDR

    @property
    def space_pooling(self) -> str:
        """The `pooling` of the vector space: all settings that determine a passage weight."""
        own_terms_label = " and its own" if self.keeps_own_terms else ""
        return f"{self.pooling} {self.activation}, {self.passage_terms} terms{own_terms_label}, {self.scale} units"

    def format_passage(self, title: str, text: str) -> str:
        """Return the tokenizer input for a passage."""
        return f"{self.passage_prompt}{title} {text}" if title else self.passage_prompt + text

    def format_question(self, question: str) -> str:
        """Return the tokenizer input for a question."""
        return self.question_prompt + question

    def to_json(self) -> dict[str, Any]:
        """Return the spec as JSON values."""
        return asdict(self)

    def with_fields(self, values: Mapping[str, Any]) -> Self:
        """Return a copy with these fields replaced.

        Raises:
            UsageError: a field is unknown or its value is wrong.
        """
        names = [field.name for field in fields(self)]
        for name in values:
            if name not in names:
                raise UsageError(f"{name!r} is not a setting of a sparse encoder: use one of {', '.join(names)}")
        return replace(self, **values)


def is_sparse_encoder(folder: Path) -> bool:
    """Return whether a folder declares a sparse encoder, by its record or by sentence-transformers'
    modules.

    A plain folder of a masked language model does not declare its purpose.
    """
    return SPARSE_KEY in read_optional_json(folder / RECORD_FILE) or has_splade_pooling(folder)


def read_sparse_spec(folder: Path, overrides: Mapping[str, Any] | None = None) -> SparseSpec:
    """Read the settings of the sparse encoder in `folder`; `overrides` replace single fields.

    Raises:
        InputError: it holds no masked language model, the vocabularies of model and tokenizer
            differ, or a file is missing or corrupt.
        UsageError: an override is unknown or wrong, or `max_length` exceeds the model's limit.
    """
    config, folder_settings = read_json_object(folder / CONFIG), _read_folder_settings(folder)
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
    limit = config.get("max_position_embeddings")
    if limit and spec.max_length > limit:
        raise UsageError(f"max_length {spec.max_length} is more than encoder {folder} reads: use {limit} or less")
    _check_vocabulary(folder, read_vocabulary_size(folder), spec.max_length)
    return spec


def read_vocabulary_size(folder: Path) -> int:
    """Return the vocabulary size of the model in `folder`.

    Raises:
        InputError: its config has none.
    """
    size = read_json_object(folder / CONFIG).get("vocab_size")
    if type(size) is not int or size < 1:
        raise InputError(
            f"model file {folder / CONFIG} names no vocab_size: give the folder of a masked-language model"
        )
    return size


def _read_folder_settings(folder: Path) -> dict[str, Any]:
    recorded = read_optional_json(folder / RECORD_FILE).get(SPARSE_KEY)
    if isinstance(recorded, dict):
        return recorded
    return read_splade(folder) if has_splade_pooling(folder) else {}


def _check_vocabulary(folder: Path, model_size: int, length: int) -> None:
    tokenizer_size = load_tokenizer(folder, length).get_vocab_size()
    if tokenizer_size > model_size:
        raise InputError(
            f"the tokenizer of encoder {folder} has {tokenizer_size:,} tokens, and its model "
            f"weighs {model_size:,}: use the tokenizer that the model was trained with"
        )
