"""The settings of a ColBERT: marks, lengths, masks and what is dropped (Khattab and Zaharia 2020, section 3.2).

Three layouts of folders are read: bookwheel's record, Stanford's (`artifact.metadata`; `linear.weight` beside the
transformer's tensors) and PyLate's (`modules.json` with a Dense module in a folder of its own).
"""

import string
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, Self

from rag_model.digest import digest_json
from rag_model.encoders.files import CONFIG, longest_input, optional_object, read_json, read_object
from rag_model.encoders.sentence_transformers import MODULES
from rag_model.encoders.spec import RECORD_FILE
from rag_model.errors import InputError, UsageError

METADATA = "artifact.metadata"  # Stanford's settings: JSON
PYLATE = "config_sentence_transformers.json"
RECORDED = "tokens"  # field of the record
DIM = 128  # components of a token's vector: ColBERT, section 4.1
_MOST_POOLED = 8  # tokens of a vector: beyond 6 the paper's quality falls (Clavié et al. 2024)
_SHORTEST = 5  # tokens: [CLS], the mark, one of text, [SEP], one [MASK]


@dataclass(frozen=True, slots=True)
class TokenSpec:
    """How a ColBERT reads a text; what concerns passages is part of its space."""

    question_mark: str = "[unused0]"  # [Q] of the paper: a token of the vocabulary, second in every question
    passage_mark: str = "[unused1]"  # [D] of the paper
    question_length: int = 32  # tokens, special ones included; shorter questions are padded with [MASK], which count
    passage_length: int = 180  # tokens, special ones included; longer passages are cut
    attend_to_masks: bool = False  # whether a question's tokens see its [MASK]s; masks see the tokens in any case
    skipped: tuple[str, ...] = tuple(string.punctuation)  # tokens of passages that are read and give no vector
    pool: int = 1  # tokens of a passage that become one vector, on average; 2 halves the bytes (`token_pooling`)

    def __post_init__(self) -> None:
        for field in fields(self):
            value, wanted = getattr(self, field.name), type(field.default)
            inside = value if isinstance(value, tuple) else ()
            if type(value) is not wanted or not all(isinstance(one, str) for one in inside):
                raise UsageError(f"{field.name} of a ColBERT is {value!r}: give a value of type {wanted.__name__}")
        for name in ("question_length", "passage_length"):
            if getattr(self, name) < _SHORTEST:
                raise UsageError(f"{name} {getattr(self, name)} leaves no room for text: use {_SHORTEST} or more")
        if not 1 <= self.pool <= _MOST_POOLED:
            raise UsageError(
                f"pool of a ColBERT is {self.pool}: use 1, or 2 to halve the vectors of a passage; up to {_MOST_POOLED}"
            )

    @property
    def pooling(self) -> str:
        """What the space of its passages says of pooling: how many tokens make a vector, and which are dropped."""
        usual = self.skipped == tuple(string.punctuation)
        named = "tokens" if usual else f"tokens without {digest_json(list(self.skipped))[-8:]}"
        return named if self.pool == 1 else f"{named}, pooled by {self.pool}"

    def passage(self, title: str, text: str) -> str:
        """Return the tokenizer's input for a passage."""
        return f"{title} {text}".strip()

    def to_json(self) -> dict[str, Any]:
        """Return the spec as JSON values; without pooling, those of a spec that knows none."""
        values = {**asdict(self), "skipped": list(self.skipped)}
        if self.pool == 1:
            del values["pool"]
        return values

    def metadata(self, dim: int) -> dict[str, Any]:
        """Return the settings as Stanford's `artifact.metadata` has them."""
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

    def changed(self, values: Mapping[str, Any]) -> Self:
        """Return the spec with some fields replaced.

        Raises:
            UsageError: a field is unknown or its value is wrong.
        """
        names = [field.name for field in fields(self)]
        for name in values:
            if name not in names:
                raise UsageError(f"{name!r} is not a setting of a ColBERT: use one of {', '.join(names)}")
        given: dict[str, Any] = {name: tuple(one) if isinstance(one, list) else one for name, one in values.items()}
        return replace(self, **given)


def is_token_encoder(folder: Path) -> bool:
    """Whether a folder holds a ColBERT: an encoder of many vectors a text."""
    if RECORDED in optional_object(folder / RECORD_FILE) or (folder / METADATA).is_file():
        return True
    return dense_folder(folder) is not None and "query_length" in optional_object(folder / PYLATE)


def dense_folder(folder: Path) -> Path | None:
    """Return the folder of PyLate's projection; None in another layout.

    Raises:
        InputError: `modules.json` is damaged.
    """
    if not (folder / MODULES).is_file():
        return None
    try:
        found = [str(one["path"]) for one in read_json(folder / MODULES) if str(one["type"]).endswith(".Dense")]
    except (TypeError, KeyError) as broken:
        raise InputError(f"encoder file {folder / MODULES} is corrupt: fetch the model again") from broken
    if len(found) > 1 or any("/" in path or path.startswith(".") for path in found):
        raise InputError(f"encoder {folder} has several projections: use a ColBERT with one")
    return folder / found[0] if found else None


def read_token_spec(folder: Path, overrides: Mapping[str, Any] | None = None) -> TokenSpec:
    """Read the spec of the ColBERT in `folder`; `overrides` replace single fields.

    Raises:
        InputError: it holds no ColBERT, or a file is missing or corrupt.
        UsageError: an override is unknown or wrong, or a length exceeds the model's limit.
    """
    if not is_token_encoder(folder):
        raise InputError(
            f"{folder} is no ColBERT (it has no {METADATA} and no Dense module): give the folder of one, or train one "
            "with `finetune colbert`"
        )
    spec = TokenSpec().changed(_told(folder)).changed(overrides or {})
    limit = min(longest_input(folder), read_object(folder / CONFIG).get("max_position_embeddings") or 1 << 30)
    if max(spec.question_length, spec.passage_length) > limit:
        raise UsageError(f"encoder {folder} reads {limit} tokens: use no more for questions and passages")
    return spec


_STANFORD = {
    "query_token_id": "question_mark",
    "doc_token_id": "passage_mark",
    "query_maxlen": "question_length",
    "doc_maxlen": "passage_length",
    "attend_to_mask_tokens": "attend_to_masks",
}
_PYLATE = {
    "query_prefix": "question_mark",
    "document_prefix": "passage_mark",
    "query_length": "question_length",
    "document_length": "passage_length",
    "attend_to_expansion_tokens": "attend_to_masks",
    "skiplist_words": "skipped",
}


def _told(folder: Path) -> dict[str, Any]:
    recorded = optional_object(folder / RECORD_FILE).get(RECORDED)
    if isinstance(recorded, dict):
        return recorded
    if (folder / METADATA).is_file():
        given = read_object(folder / METADATA)
        dropped = {} if given.get("mask_punctuation", True) else {"skipped": ()}
        return _renamed(given, _STANFORD) | dropped
    given = optional_object(folder / PYLATE)
    if given.get("do_query_expansion") is False:
        raise InputError(f"encoder {folder} does not pad its questions with [MASK]: use a ColBERT that does")
    return _renamed(given, _PYLATE)


def _renamed(given: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    return {ours: given[theirs] for theirs, ours in names.items() if given.get(theirs) is not None}
