"""The settings of a sparse encoder: how a masked-language model's logits become weighted terms (SPLADE).

w_j = max over tokens i of log(1 + relu(logit_ij)): Formal et al. 2021, "SPLADE v2" (arXiv 2109.10086); with `sum` in
place of max: "SPLADE" (arXiv 2107.05720). `log1p_relu` takes the logarithm twice (arXiv 2504.14839). `elu1p` is SiDR's,
whose weights are those of `sidr_model`: Zhou et al. (arXiv 2405.01924).

A weight is kept as a whole number of units, `scale` of them a weight of 1, 255 at most. The scale is a setting and not
a statistic of the corpus, so that parts, and builds, agree.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, Final, Literal, Self, get_args

from rag_model.encoders.files import CONFIG, longest_input, optional_object, read_object
from rag_model.encoders.sentence_transformers import has_splade_pooling, read_splade
from rag_model.encoders.spec import RECORD_FILE
from rag_model.encoders.tokens import load_tokenizer
from rag_model.errors import InputError, UsageError

RECORDED = "sparse"  # field of the record
Pooling = Literal["max", "sum"]
Activation = Literal["relu", "log1p_relu", "elu1p"]
SIDR: Final = "elu1p"
_HEAD = "ForMaskedLM"  # how the architectures end whose logits are over the vocabulary
_SHORTEST = 3  # tokens: two special ones and one of text
_MOST_TERMS = 10_000  # of a text
_MOST_SCALE = 1 << 16


@dataclass(frozen=True, slots=True)
class SparseSpec:
    """How a sparse encoder reads text and weighs terms; what concerns passages is part of its space."""

    pooling: Pooling = "max"  # over the tokens of a text, special ones included as in training; never over padding
    activation: Activation = "relu"  # of a logit, before log(1 + …); `log1p_relu`: log(1 + relu(logit)); `elu1p`: SiDR
    max_length: int = 256  # tokens of one input, special ones included; longer inputs are cut
    passage_terms: int = 256  # heaviest terms that a passage keeps; trained models give 100 to 200
    question_terms: int = 256  # heaviest terms that a question is asked by
    scale: int = 64  # units of a passage's weight of 1: up to 3.98, a logit of 53; trained models stay below 3.5
    passage_prompt: str = ""  # inserted unchanged before a passage
    question_prompt: str = ""  # inserted unchanged before a question

    def __post_init__(self) -> None:
        for field in fields(self):
            value, wanted = getattr(self, field.name), type(field.default)
            if type(value) is not wanted:
                raise UsageError(f"{field.name} of a sparse encoder is {value!r}: give a value of {wanted.__name__}")
        for name, choices in (("pooling", get_args(Pooling)), ("activation", get_args(Activation))):
            if getattr(self, name) not in choices:
                raise UsageError(
                    f"{name} {getattr(self, name)!r} of a sparse encoder is unknown: use one of {', '.join(choices)}"
                )
        bounds = {
            "max_length": (_SHORTEST, None),
            "passage_terms": (1, _MOST_TERMS),
            "question_terms": (1, _MOST_TERMS),
            "scale": (1, _MOST_SCALE),
        }
        if self.activation == SIDR and self.pooling != "max":
            raise UsageError(f"pooling {self.pooling} of a sparse encoder does not go with {SIDR}: use max")
        for name, (least, most) in bounds.items():
            value = getattr(self, name)
            if value < least or (most is not None and value > most):
                limit = "or more" if most is None else f"to {most:,}"
                raise UsageError(f"{name} of a sparse encoder is {value}: give {least} {limit}")

    @property
    def own_terms(self) -> bool:
        """Whether a text keeps the terms of its own tokens too, however light."""
        return self.activation == SIDR

    @property
    def weighing(self) -> str:
        """Return what the space of its passages says of pooling: all that decides a weight beside the model."""
        own = " and its own" if self.own_terms else ""
        return f"{self.pooling} {self.activation}, {self.passage_terms} terms{own}, {self.scale} units"

    def passage(self, title: str, text: str) -> str:
        """Return the tokenizer's input for a passage."""
        return f"{self.passage_prompt}{title} {text}" if title else self.passage_prompt + text

    def question(self, question: str) -> str:
        """Return the tokenizer's input for a question."""
        return self.question_prompt + question

    def to_json(self) -> dict[str, Any]:
        """Return the spec as JSON values."""
        return asdict(self)

    def changed(self, values: Mapping[str, Any]) -> Self:
        """Return the spec with some fields replaced.

        Raises:
            UsageError: a field is unknown or its value is wrong.
        """
        names = [field.name for field in fields(self)]
        for name in values:
            if name not in names:
                raise UsageError(f"{name!r} is not a setting of a sparse encoder: use one of {', '.join(names)}")
        return replace(self, **values)


def is_sparse_encoder(folder: Path) -> bool:
    """Whether a folder says that it holds a sparse encoder: by its record, or by sentence-transformers' modules.

    A plain folder of a masked-language model does not say what it is for.
    """
    return RECORDED in optional_object(folder / RECORD_FILE) or has_splade_pooling(folder)


def read_sparse_spec(folder: Path, overrides: Mapping[str, Any] | None = None) -> SparseSpec:
    """Read the spec of the sparse encoder in `folder`; `overrides` replace single fields.

    Raises:
        InputError: it holds no masked-language model, its vocabularies differ, or a file is missing or corrupt.
        UsageError: an override is unknown or wrong, or `max_length` exceeds the model's limit.
    """
    config, told = read_object(folder / CONFIG), _told(folder)
    architecture = next(iter(config.get("architectures") or [""]))
    if not architecture.endswith(_HEAD) and told.get("activation") != SIDR:
        raise InputError(
            f"encoder {folder} is a {architecture or config.get('model_type')}, which has no weights over its "
            f"vocabulary: give a masked-language model (a BertForMaskedLM), such as a SPLADE"
        )
    try:
        spec = SparseSpec(max_length=longest_input(folder)).changed(told)
    except UsageError as wrong:
        raise InputError(f"encoder {folder} cannot be used: {wrong}") from wrong
    spec = spec.changed(overrides or {})
    limit = config.get("max_position_embeddings")
    if limit and spec.max_length > limit:
        raise UsageError(f"max_length {spec.max_length} is more than encoder {folder} reads: use {limit} or less")
    _check_vocabulary(folder, vocabulary_of(folder), spec.max_length)
    return spec


def vocabulary_of(folder: Path) -> int:
    """Return how many terms the model in `folder` weighs.

    Raises:
        InputError: its config does not say it.
    """
    size = read_object(folder / CONFIG).get("vocab_size")
    if type(size) is not int or size < 1:
        raise InputError(
            f"model file {folder / CONFIG} names no vocab_size: give the folder of a masked-language model"
        )
    return size


def _told(folder: Path) -> dict[str, Any]:
    recorded = optional_object(folder / RECORD_FILE).get(RECORDED)
    if isinstance(recorded, dict):
        return recorded
    return read_splade(folder) if has_splade_pooling(folder) else {}


def _check_vocabulary(folder: Path, size: int, length: int) -> None:
    known = load_tokenizer(folder, length).get_vocab_size()
    if known > size:
        raise InputError(
            f"the tokenizer of encoder {folder} has {known:,} tokens, and its model weighs {size:,}: use the tokenizer "
            "that the model was trained with"
        )
