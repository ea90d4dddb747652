"""The settings around a model: how text becomes input, and how hidden states become one vector.

`EncoderSpec` holds all of them, read from the files of the folder: `bookwheel.json`, else
`modules.json` (sentence-transformers) or the tensors of a static encoder, else DPR's `config.json`, else a plain
Hugging Face folder.
"""

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal, Self, get_args

from rag_model.encoders.files import CONFIG, longest_input, optional_object, position_limit, read_object
from rag_model.encoders.sentence_transformers import MODULES, read_sentence_transformers
from rag_model.encoders.static_folder import STATIC, has_static_layout, read_static
from rag_model.errors import UsageError

RECORD_FILE = "bookwheel.json"
Pooling = Literal["cls", "mean", "last", "static", "static-known"]
Layout = Literal["joined", "pair", "text"]
TextInput = str | tuple[str, str]  # the tokenizer's input: one text, or a pair
DPR_MAX_LENGTH = 256  # tokens: `sequence_length` of github.com/facebookresearch/DPR
_SHORTEST = 3  # tokens: two special ones and one of text
_BGE_QUESTION = "Represent this sentence for searching relevant passages: "
# Families, by hub name, whose folders lack the prompts of their model cards.
_KNOWN_PROMPTS = (
    (
        r"intfloat/(multilingual-)?e5-(small|base|large)(-v2)?",
        {"passage_prompt": "passage: ", "question_prompt": "query: "},
    ),
    (r"BAAI/bge-(small|base|large)-en(-v1\.5)?", {"question_prompt": _BGE_QUESTION}),
)


@dataclass(frozen=True, slots=True)
class EncoderSpec:
    """How an encoder reads text and makes a vector; all fields except `question_prompt` are part of its space."""

    pooling: Pooling = "mean"  # of the last layer: the first token, the mean, or the last token; of a static encoder's
    # token vectors the mean, with unknown tokens or without
    normalize: bool = True  # to unit length: the inner product is then the cosine
    max_length: int = 256  # tokens of one input, special ones included; longer inputs are cut
    layout: Layout = "joined"  # of a passage: `title text`, `[CLS] title [SEP] text [SEP]`, or the text alone
    passage_prompt: str = ""  # inserted unchanged before a passage: E5's `passage: `
    question_prompt: str = ""  # inserted unchanged before a question: E5's `query: `, BGE's instruction

    def __post_init__(self) -> None:
        for field in fields(self):
            if type(getattr(self, field.name)) is not type(field.default):
                kind = type(field.default).__name__
                raise UsageError(
                    f"{field.name} of an encoder is {getattr(self, field.name)!r}: give a value of type {kind}"
                )
        for name, choices in (("pooling", get_args(Pooling)), ("layout", get_args(Layout))):
            if getattr(self, name) not in choices:
                raise UsageError(f"{name} {getattr(self, name)!r} is unknown: use one of {', '.join(choices)}")
        if self.max_length < _SHORTEST:
            raise UsageError(f"max_length {self.max_length} leaves no room for text: use {_SHORTEST} or more")

    @property
    def is_static(self) -> bool:
        """Whether it is of a static encoder, which has a vector for each token and no transformer."""
        return self.pooling in STATIC

    def to_json(self) -> dict[str, Any]:
        """Return the spec as JSON values."""
        return asdict(self)

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Self:
        """Read back what `to_json` wrote.

        Raises:
            UsageError: a field is unknown, or its value is not one of the choices.
        """
        return cls(**_checked(value))

    def passage(self, title: str, text: str) -> TextInput:
        """Return the tokenizer's input for a passage: one string, or a pair."""
        if not title or self.layout == "text":
            return self.passage_prompt + text
        if self.layout == "pair":
            return self.passage_prompt + title, text
        return f"{self.passage_prompt}{title} {text}"

    def question(self, question: str) -> str:
        """Return the tokenizer's input for a question."""
        return self.question_prompt + question


def read_spec(folder: Path, overrides: Mapping[str, Any] | None = None) -> EncoderSpec:
    """Read the spec that `folder` implies; `overrides` replace single fields.

    Raises:
        InputError: a file is missing or corrupt, or the model has an unsupported part.
        UsageError: an override is not a field of the spec, or `max_length` exceeds the model's limit.
    """
    own = _own_spec(folder)
    spec = replace(own, **_checked(overrides or {}))
    if spec.is_static != own.is_static:
        raise UsageError(f"pooling {spec.pooling!r} does not apply to encoder {folder}: leave it out")
    if spec.is_static:
        return spec
    asked = "max_length" in (overrides or {})  # a record may have some more: then the tokenizer cuts
    limit = position_limit(folder) if asked else read_object(folder / CONFIG).get("max_position_embeddings")
    if limit and spec.max_length > limit:
        raise UsageError(f"max_length {spec.max_length} is more than encoder {folder} reads: use {limit} or less")
    return spec


def is_static(folder: Path) -> bool:
    """Whether a folder holds a static encoder, by its record, its modules or its tensors.

    Raises:
        InputError: a file is corrupt.
    """
    recorded = optional_object(folder / RECORD_FILE).get("spec")
    if isinstance(recorded, dict) and "pooling" in recorded:
        return recorded["pooling"] in STATIC
    return has_static_layout(folder)


def known_prompts(name: str) -> dict[str, str]:
    """Return the prompts of the model card of hub name `name` that its files lack; else an empty dict.

    >>> known_prompts("intfloat/e5-small-v2")["question_prompt"]
    'query: '
    """
    return next((dict(prompts) for family, prompts in _KNOWN_PROMPTS if re.fullmatch(family, name)), {})


def _own_spec(folder: Path) -> EncoderSpec:
    if recorded := optional_object(folder / RECORD_FILE).get("spec"):
        return EncoderSpec.from_json(recorded)
    if has_static_layout(folder):
        return EncoderSpec(**read_static(folder))
    if (folder / MODULES).is_file():
        return EncoderSpec(**read_sentence_transformers(folder))
    if read_object(folder / CONFIG).get("model_type") == "dpr":
        length = min(DPR_MAX_LENGTH, longest_input(folder))
        return EncoderSpec(pooling="cls", normalize=False, max_length=length, layout="pair")
    return EncoderSpec(max_length=longest_input(folder))


def _checked(values: Mapping[str, Any]) -> dict[str, Any]:
    names = [field.name for field in fields(EncoderSpec)]
    for name in values:
        if name not in names:
            raise UsageError(f"{name!r} is not a setting of an encoder: use one of {', '.join(names)}")
    return dict(values)
