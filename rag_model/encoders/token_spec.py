"""Settings of a ColBERT: mark tokens, lengths, masks and skipped tokens (Khattab and Zaharia 2020,
section 3.2).

Three folder layouts are read: bookwheel's record, Stanford's (`artifact.metadata`, with
`linear.weight` among the transformer's tensors) and PyLate's (`modules.json` with a Dense module in
a separate folder).
"""

import string
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, Self

from rag_model.digest import digest_json
from rag_model.encoders.files import CONFIG, MODULES, read_json, read_json_object, read_max_tokens, read_optional_json
from rag_model.encoders.spec import RECORD_FILE
from rag_model.errors import InputError, UsageError

METADATA = "artifact.metadata"  # Stanford's settings: JSON
PYLATE_CONFIG = "config_sentence_transformers.json"
TOKENS_KEY = "tokens"  # key in bookwheel.json
DIM = 128  # dimension of a token vector: ColBERT, section 4.1
_MAX_POOL = 8  # tokens per vector; in the paper quality falls beyond 6 (Clavié et al. 2024)
_MIN_TOKENS = 5  # [CLS], the mark, one token of text, [SEP] and one [MASK]


@dataclass(frozen=True, slots=True)
class TokenSpec:
    """Settings of a ColBERT; the fields that concern passages are part of its vector space."""

    # [Q] of the paper: a vocabulary token, second in every question.
    question_mark: str = "[unused0]"
    passage_mark: str = "[unused1]"  # [D] of the paper
    # Tokens, special tokens included; shorter questions are padded with [MASK].
    question_length: int = 32
    passage_length: int = 180  # tokens, special tokens included; longer passages are truncated
    # Whether question tokens attend to [MASK]s; masks always attend to tokens.
    attend_to_masks: bool = False
    # Passage tokens that are read but get no vector.
    skipped: tuple[str, ...] = tuple(string.punctuation)
    # Passage tokens per vector, on average; 2 halves the bytes (`token_encoder.pool_tokens`)
    pool: int = 1

    def __post_init__(self) -> None:
        for field in fields(self):
            value, expected_type = getattr(self, field.name), type(field.default)
            items = value if isinstance(value, tuple) else ()
            if type(value) is not expected_type or not all(isinstance(item, str) for item in items):
                raise UsageError(
                    f"{field.name} of a ColBERT is {value!r}: give a value of type {expected_type.__name__}"
                )
        for name in ("question_length", "passage_length"):
            if getattr(self, name) < _MIN_TOKENS:
                raise UsageError(f"{name} {getattr(self, name)} leaves no room for text: use {_MIN_TOKENS} or more")
        if not 1 <= self.pool <= _MAX_POOL:
            raise UsageError(
                f"pool of a ColBERT is {self.pool}: use 1, or 2 to halve the vectors of a passage; up to {_MAX_POOL}"
            )

    @property
    def space_pooling(self) -> str:
        """The `pooling` of the vector space: tokens per vector, and skipped tokens."""
        drops_punctuation = self.skipped == tuple(string.punctuation)
        label = "tokens" if drops_punctuation else f"tokens without {digest_json(list(self.skipped))[-8:]}"
        return label if self.pool == 1 else f"{label}, pooled by {self.pool}"

    def format_passage(self, title: str, text: str) -> str:
        """Return the tokenizer input for a passage."""
        return f"{title} {text}".strip()

    def to_json(self) -> dict[str, Any]:
        """Return the spec as JSON values; without pooling the key `pool` is left out, as in older
        records.
        """
        values = {**asdict(self), "skipped": list(self.skipped)}
        if self.pool == 1:
            del values["pool"]
        return values

    def to_stanford_metadata(self, dim: int) -> dict[str, Any]:
        """Return the settings in the format of Stanford's `artifact.metadata`."""
        return {
            "query_token_id": self.question_mark,
            "doc_token_id": self.passage_mark,
            "query_token": "[Q]",
            "doc_token": "[D]",
            "query_maxlen": self.question_length,
            "doc_maxlen": self.passage_length,
            "attend_to_mask_tokens": self.attend_to_masks,
            "mask_punctuation": bool(self.skipped),
            "similarity": "cosine",
            "dim": dim,
        }

    def with_fields(self, values: Mapping[str, Any]) -> Self:
        """Return a copy with these fields replaced.

        Raises:
            UsageError: a field is unknown or its value is wrong.
        """
        names = [field.name for field in fields(self)]
        for name in values:
            if name not in names:
                raise UsageError(f"{name!r} is not a setting of a ColBERT: use one of {', '.join(names)}")
        replacements: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value for name, value in values.items()
        }
        return replace(self, **replacements)


def is_token_encoder(folder: Path) -> bool:
    """Return whether a folder holds a ColBERT."""
    if TOKENS_KEY in read_optional_json(folder / RECORD_FILE) or (folder / METADATA).is_file():
        return True
    return find_dense_folder(folder) is not None and "query_length" in read_optional_json(folder / PYLATE_CONFIG)


def find_dense_folder(folder: Path) -> Path | None:
    """Return the folder of PyLate's projection; None for other layouts.

    Raises:
        InputError: `modules.json` is damaged.
    """
    if not (folder / MODULES).is_file():
        return None
    try:
        paths = [
            str(module["path"]) for module in read_json(folder / MODULES) if str(module["type"]).endswith(".Dense")
        ]
    except (TypeError, KeyError) as error:
        raise InputError(f"encoder file {folder / MODULES} is corrupt: fetch the model again") from error
    if len(paths) > 1 or any("/" in path or path.startswith(".") for path in paths):
        raise InputError(f"encoder {folder} has several projections: use a ColBERT with one")
    return folder / paths[0] if paths else None


def read_token_spec(folder: Path, overrides: Mapping[str, Any] | None = None) -> TokenSpec:
    """Read the settings of the ColBERT in `folder`; `overrides` replace single fields.

    Raises:
        InputError: the folder holds no ColBERT, or a file is missing or corrupt.
        UsageError: an override is unknown or wrong, or a length exceeds the model's limit.
    """
    if not is_token_encoder(folder):
        raise InputError(
            f"{folder} is no ColBERT (it has no {METADATA} and no Dense module): give the folder "
            "of one, or train one with `finetune colbert`"
        )
    spec = TokenSpec().with_fields(_read_folder_settings(folder)).with_fields(overrides or {})
    limit = min(read_max_tokens(folder), read_json_object(folder / CONFIG).get("max_position_embeddings") or 1 << 30)
    if max(spec.question_length, spec.passage_length) > limit:
        raise UsageError(f"encoder {folder} reads {limit} tokens: use no more for questions and passages")
    return spec


_STANFORD_FIELDS = {
    "query_token_id": "question_mark",
    "doc_token_id": "passage_mark",
    "query_maxlen": "question_length",
    "doc_maxlen": "passage_length",
    "attend_to_mask_tokens": "attend_to_masks",
}
_PYLATE_FIELDS = {
    "query_prefix": "question_mark",
    "document_prefix": "passage_mark",
    "query_length": "question_length",
    "document_length": "passage_length",
    "attend_to_expansion_tokens": "attend_to_masks",
    "skiplist_words": "skipped",
}


def _read_folder_settings(folder: Path) -> dict[str, Any]:
    recorded = read_optional_json(folder / RECORD_FILE).get(TOKENS_KEY)
    if isinstance(recorded, dict):
        return recorded
    if (folder / METADATA).is_file():
        stanford_settings = read_json_object(folder / METADATA)
        dropped = {} if stanford_settings.get("mask_punctuation", True) else {"skipped": ()}
        return _rename_keys(stanford_settings, _STANFORD_FIELDS) | dropped
    stanford_settings = read_optional_json(folder / PYLATE_CONFIG)
    if stanford_settings.get("do_query_expansion") is False:
        raise InputError(f"encoder {folder} does not pad its questions with [MASK]: use a ColBERT that does")
    return _rename_keys(stanford_settings, _PYLATE_FIELDS)


def _rename_keys(settings: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    return {field_name: settings[key] for key, field_name in names.items() if settings.get(key) is not None}
