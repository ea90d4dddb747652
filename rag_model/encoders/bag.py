"""Binary bags of tokens: the set of vocabulary terms in a passage, without weights.

Only the tokenizer determines a bag, so training a model never invalidates it: Zhou et al.,
"Semi-Parametric Retrieval via Binary Bag-of-Tokens Index" (arXiv 2405.01924). The vector space
depends only on the tokenizer, so any sparse encoder with the same tokenizer can encode the queries.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self

import numpy as np
import numpy.typing as npt

from rag_model.corpus.ragged_file import SparseVectors, compute_offsets
from rag_model.encoders.embed import Precision
from rag_model.encoders.files import (
    CONFIG,
    list_tokenizer_files,
    read_max_tokens,
    read_optional_json,
    read_vocabulary_size,
)
from rag_model.encoders.space import BAG_POOLING, Space, digest_tokenizer
from rag_model.encoders.spec import BAG_KEY, JOINED, RECORD_FILE, SPARSE_KEY, EncoderSettings
from rag_model.encoders.tokens import count_truncated, load_tokenizer, tokenize
from rag_model.errors import InputError, UsageError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_UNUSED_TOKEN = re.compile(r"\[unused\d+\]")
_MIN_TOKENS = 3  # minimum of max_length: two special tokens and one token of text
Flags = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class BagSpec(EncoderSettings):
    """Settings of the bags of passages; all settings are part of the vector space."""

    noun: ClassVar[str] = "a bag"
    max_length: int = 256  # maximum tokens per passage, including special tokens
    passage_prompt: str = ""  # prepended unchanged to every passage

    def __post_init__(self) -> None:
        self.check()
        if self.max_length < _MIN_TOKENS:
            raise UsageError(
                f"max_length {self.max_length} of a bag leaves no room for text: give {_MIN_TOKENS} or more"
            )

    def format_passage(self, title: str, text: str) -> str:
        """Return the tokenizer input for a passage."""
        return f"{self.passage_prompt}{title} {text}" if title else self.passage_prompt + text


@dataclass(frozen=True, slots=True)
class BagEncoder:
    """Turns passages into bags of tokens with a tokenizer and no model; create one with `load`."""

    model: ClassVar[Precision] = Precision("cpu", "bits")
    folder: Path
    spec: BagSpec
    tokenizer: "Tokenizer"
    term_mask: Flags  # (V,) whether each token id is a term

    @classmethod
    def load(cls, folder: Path) -> Self:
        """Load the tokenizer from a folder with the files of `collect_bag_files`.

        Raises:
            InputError: a file is missing or corrupt.
        """
        spec = read_bag_spec(folder)
        tokenizer = load_tokenizer(folder, spec.max_length)
        return cls(folder, spec, tokenizer, compute_term_mask(tokenizer, read_vocabulary_size(folder)))

    @property
    def dim(self) -> int:
        """Vocabulary size V."""
        return len(self.term_mask)

    def encode_passages(self, titles: Sequence[str], texts: Sequence[str]) -> SparseVectors:
        """Return the bags of passages, in order; term ids ascend, and every weight is 1."""
        ids_by_text = tokenize(self.tokenizer, list(map(self.spec.format_passage, titles, texts)))
        unique_ids_by_text = [np.unique(ids) for ids in ids_by_text]
        term_ids_by_text = [ids[self.term_mask[ids]] for ids in unique_ids_by_text]
        all_ids = np.concatenate([np.zeros(0, np.int32), *term_ids_by_text]).astype(np.int32)
        return SparseVectors(
            all_ids, np.ones(len(all_ids), np.uint8), compute_offsets(np.array([*map(len, term_ids_by_text)], np.int64))
        )

    def count_truncated(self, titles: Sequence[str], texts: Sequence[str]) -> int:
        """Return the number of passages with more than `spec.max_length` tokens."""
        return count_truncated(self.tokenizer, list(map(self.spec.format_passage, titles, texts)))


def read_bag_spec(folder: Path, overrides: Mapping[str, Any] | None = None) -> BagSpec:
    """Read the bag settings of an encoder folder.

    The settings are in the folder's record. If there are no settings, `max_length` is the input
    limit of the model.

    Raises:
        InputError: the record is corrupt.
        UsageError: an override is unknown or has a wrong type.
    """
    record = read_optional_json(folder / RECORD_FILE)
    recorded_settings = record.get(BAG_KEY, record.get(SPARSE_KEY, {}))
    try:
        bag_settings = {
            field.name: recorded_settings[field.name] for field in fields(BagSpec) if field.name in recorded_settings
        }
        spec = BagSpec(**{"max_length": read_max_tokens(folder)} | bag_settings)
    except (TypeError, UsageError) as error:
        raise InputError(f"the record of encoder {folder} is corrupt ({error}): fetch the model again") from error
    return spec.with_fields(overrides or {})


def compute_bag_space(folder: Path, spec: BagSpec) -> Space:
    """Return the vector space of the bags of a folder's tokenizer; reads no weights.

    Raises:
        InputError: a file is missing or corrupt.
    """
    tokenizer_digest, dim = digest_tokenizer(folder), read_vocabulary_size(folder)
    return Space(
        name=f"bag-{dim}-{tokenizer_digest.partition(':')[2][:8]}",
        weights="",
        tokenizer=tokenizer_digest,
        pooling=BAG_POOLING,
        normalize=False,
        max_length=spec.max_length,
        layout=JOINED,
        passage_prompt=spec.passage_prompt,
        dim=dim,
    )


def collect_bag_files(folder: Path, spec: BagSpec, workdir: Path) -> dict[str, Path]:
    """Return the paths of a bag encoder's files by file name.

    Writes the record `bookwheel.json` and a config with the vocabulary size into `workdir`; the
    tokenizer files stay in `folder`.

    Raises:
        InputError: `folder` has no tokenizer.
    """
    json_files = {RECORD_FILE: {BAG_KEY: spec.to_json()}, CONFIG: {"vocab_size": read_vocabulary_size(folder)}}
    file_by_name = {path.name: path for path in list_tokenizer_files(folder)}
    for name, content in json_files.items():
        file_by_name[name] = workdir / name
        file_by_name[name].write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    return file_by_name


def compute_term_mask(tokenizer: "Tokenizer", vocab_size: int) -> Flags:
    """Return a (vocab_size,) mask of the token ids that are terms.

    Special tokens, `[unused…]` tokens and ids without a token are not terms. With BERT's vocabulary
    the terms are the ids from 999 on, as in the authors' code.
    """
    vocabulary: dict[str, int] = tokenizer.get_vocab()
    special_ids = {token_id for token_id, token in tokenizer.get_added_tokens_decoder().items() if token.special}
    is_term = np.zeros(vocab_size, np.bool_)
    term_ids = [token_id for token, token_id in vocabulary.items() if not _UNUSED_TOKEN.fullmatch(token)]
    is_term[[token_id for token_id in term_ids if token_id < vocab_size and token_id not in special_ids]] = True
    return is_term
