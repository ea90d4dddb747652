"""What a model's files leave open: how text becomes input, and how hidden states become one vector.

`EncoderSpec` is the whole of it. It is read from what the folder says of itself, in this order: `bookwheel.json` (ours),
`modules.json` (sentence-transformers), DPR's `config.json`, else a plain Hugging Face folder.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal, Self, get_args

from rag_model.errors import InputError, UsageError

RECORD_FILE = "bookwheel.json"
Pooling = Literal["cls", "mean", "last"]
Layout = Literal["joined", "pair", "text"]
DPR_MAX_LENGTH = 256  # tokens; DPR's `sequence_length`
_UNBOUNDED = 100_000  # tokens; tokenizers write 1e30 for "no limit"
_DEFAULT_MAX_LENGTH = 512  # tokens
_ST_POOLING: Mapping[str, Pooling] = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_lasttoken": "last",
}
_ST_POOLING_NAMES: Mapping[str, Pooling] = {"cls": "cls", "mean": "mean", "lasttoken": "last"}
_ST_PASSAGE_PROMPTS = ("passage", "document", "corpus")
_ST_QUESTION_PROMPTS = ("query", "question")
_BGE_QUESTION = "Represent this sentence for searching relevant passages: "
# Families whose folders do not carry the prompts that their model cards ask for, by hub name.
_KNOWN_PROMPTS: tuple[tuple[str, Mapping[str, str]], ...] = (
    (
        r"intfloat/(multilingual-)?e5-(small|base|large)(-v2)?",
        {"passage_prompt": "passage: ", "question_prompt": "query: "},
    ),
    (r"BAAI/bge-(small|base|large)-en(-v1\.5)?", {"question_prompt": _BGE_QUESTION}),
)


@dataclass(frozen=True, slots=True)
class EncoderSpec:
    """How one encoder reads text and makes a vector; every field but `question_prompt` is part of its space."""

    pooling: Pooling = "mean"  # first token, mean over real tokens, or last real token of the last layer
    normalize: bool = True  # to unit length: inner product is then cosine
    max_length: int = 256  # tokens of one input, special tokens included; longer inputs are cut
    layout: Layout = (
        "joined"  # passage input: `title text`, the pair `[CLS] title [SEP] text [SEP]`, or text alone
    )
    passage_prompt: str = ""  # put before a passage, as is: E5's `passage: `
    question_prompt: str = ""  # put before a question, as is: E5's `query: `, BGE's instruction

    def __post_init__(self) -> None:
        if self.pooling not in get_args(Pooling):
            raise UsageError(
                f"pooling {self.pooling!r} is unknown: choose one of {', '.join(get_args(Pooling))}"
            )
        if self.layout not in get_args(Layout):
            raise UsageError(
                f"layout {self.layout!r} is unknown: choose one of {', '.join(get_args(Layout))}"
            )
        if self.max_length < 3:
            raise UsageError(f"max_length {self.max_length} leaves no room for text: use at least 3 tokens")

    def to_json(self) -> dict[str, Any]:
        """Return the spec as JSON values."""
        return asdict(self)

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Self:
        """Read back what `to_json` wrote.

        Raises:
            UsageError: a field is unknown or its value is none of the choices.
        """
        return cls(**_known(value))

    def passage(self, title: str, text: str) -> str | tuple[str, str]:
        """Return what the tokenizer reads for a passage: one string, or a pair."""
        if self.layout == "pair":
            return self.passage_prompt + title, text
        if self.layout == "text" or not title:
            return self.passage_prompt + text
        return f"{self.passage_prompt}{title} {text}"

    def question(self, question: str) -> str:
        """Return what the tokenizer reads for a question."""
        return self.question_prompt + question


def read_spec(folder: Path, overrides: Mapping[str, Any] | None = None) -> EncoderSpec:
    """Read the spec that `folder` implies; `overrides` replace single fields.

    Raises:
        InputError: a file is missing or not JSON, or it asks for something that is not supported here.
        UsageError: an override is no field of the spec.
    """
    if (folder / RECORD_FILE).is_file():
        spec = EncoderSpec.from_json(read_json(folder / RECORD_FILE)["spec"])
    elif (folder / "modules.json").is_file():
        spec = _sentence_transformers(folder)
    else:
        spec = _hugging_face(folder)
    return replace(spec, **_known(overrides or {}))


def known_prompts(name: str) -> dict[str, str]:
    """Return the prompts that the model card of hub name `name` asks for and its files do not carry; else nothing.

    >>> known_prompts("intfloat/e5-small-v2")["question_prompt"]
    'query: '
    """
    return next((dict(prompts) for pattern, prompts in _KNOWN_PROMPTS if re.fullmatch(pattern, name)), {})


def read_json(path: Path) -> Any:
    """Read a JSON file of an encoder folder.

    Raises:
        InputError: the file is missing or not JSON.
    """
    try:
        return json.loads(path.read_bytes())
    except FileNotFoundError as missing:
        raise InputError(
            f"encoder {path.parent} has no {path.name}: give the folder of a Hugging Face model"
        ) from missing
    except (ValueError, OSError) as broken:
        raise InputError(f"encoder file {path} is corrupt ({broken}): fetch the model again") from broken


def _known(values: Mapping[str, Any]) -> dict[str, Any]:
    names = [field.name for field in fields(EncoderSpec)]
    for name in values:
        if name not in names:
            raise UsageError(f"{name!r} is no setting of an encoder: use one of {', '.join(names)}")
    return dict(values)


def _hugging_face(folder: Path) -> EncoderSpec:
    config = read_json(folder / "config.json")
    if config.get("model_type") == "dpr":
        return EncoderSpec(pooling="cls", normalize=False, max_length=DPR_MAX_LENGTH, layout="pair")
    return EncoderSpec(max_length=_max_length(folder))


def _max_length(folder: Path) -> int:
    limits = [read_json(folder / "config.json").get("max_position_embeddings")]
    if (folder / "tokenizer_config.json").is_file():
        limits.append(read_json(folder / "tokenizer_config.json").get("model_max_length"))
    sane = [int(limit) for limit in limits if limit and limit < _UNBOUNDED]
    return min(sane, default=_DEFAULT_MAX_LENGTH)


def _sentence_transformers(folder: Path) -> EncoderSpec:
    modules = {
        str(module["type"]).rpartition(".")[2]: str(module["path"])
        for module in read_json(folder / "modules.json")
    }
    if unknown := sorted(set(modules) - {"Transformer", "Pooling", "Normalize"}):
        raise InputError(
            f"encoder {folder} has a {unknown[0]} module, which is not supported: use a model of Transformer, Pooling and Normalize"
        )
    if "Pooling" not in modules:
        raise InputError(
            f"encoder {folder} has no Pooling module in modules.json: it makes no sentence vectors"
        )
    prompts = _prompts(folder)
    return EncoderSpec(
        pooling=_pooling(folder / modules["Pooling"] / "config.json"),
        normalize="Normalize" in modules,
        max_length=_st_max_length(folder),
        passage_prompt=_first(prompts, _ST_PASSAGE_PROMPTS),
        question_prompt=_first(prompts, _ST_QUESTION_PROMPTS),
    )


def _pooling(path: Path) -> Pooling:
    config = read_json(path)
    modes = [name for name, on in config.items() if name.startswith("pooling_mode_") and on is True]
    if isinstance(named := config.get("pooling_mode"), str):
        modes.append(named)
    choices = [_ST_POOLING.get(mode) or _ST_POOLING_NAMES.get(mode) for mode in modes]
    if len(choices) != 1 or choices[0] is None:
        raise InputError(
            f"encoder file {path} asks for pooling {modes}, which is not supported: use cls, mean or last token"
        )
    return choices[0]


def _st_max_length(folder: Path) -> int:
    path = folder / "sentence_bert_config.json"
    given = read_json(path).get("max_seq_length") if path.is_file() else None
    return min(int(given), _max_length(folder)) if given else _max_length(folder)


def _prompts(folder: Path) -> Mapping[str, str]:
    path = folder / "config_sentence_transformers.json"
    return (read_json(path).get("prompts") or {}) if path.is_file() else {}


def _first(prompts: Mapping[str, str], names: tuple[str, ...]) -> str:
    return next((prompts[name] for name in names if prompts.get(name)), "")
