"""The bag of tokens of a text: which terms of a tokenizer's vocabulary it has, and not how much each one means.

No model decides it, so no training makes it stale: Zhou et al., "Semi-Parametric Retrieval via Binary Bag-of-Tokens
Index" (arXiv 2405.01924). Its space is the tokenizer's. Any sparse encoder that has this tokenizer asks the questions.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import numpy.typing as npt

from rag_model.corpus.ragged_file import offsets_of
from rag_model.corpus.sparse_file import SparseVectors
from rag_model.encoders.files import CONFIG, longest_input, optional_object
from rag_model.encoders.space import BAG, Space, digest_tokenizer, tokenizer_files
from rag_model.encoders.sparse_spec import RECORDED as SPARSE
from rag_model.encoders.sparse_spec import vocabulary_of
from rag_model.encoders.spec import RECORD_FILE
from rag_model.encoders.tokens import load_tokenizer, tokenize
from rag_model.errors import InputError, UsageError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

RECORDED = "bag"  # field of the record
_JOINED = "joined"  # the layout of a passage: `title text`
_UNUSED = re.compile(r"\[unused\d+\]")
_SHORTEST = 3  # tokens: two special ones and one of text
Flags = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class BagSpec:
    """How a passage becomes a bag; all of it is part of the space."""

    max_length: int = 256  # tokens of one passage, special ones included; the rest is cut
    passage_prompt: str = ""  # inserted unchanged before a passage

    def __post_init__(self) -> None:
        for field in fields(self):
            if type(getattr(self, field.name)) is not type(field.default):
                kind = type(field.default).__name__
                raise UsageError(f"{field.name} of a bag is {getattr(self, field.name)!r}: give a value of {kind}")
        if self.max_length < _SHORTEST:
            raise UsageError(f"max_length {self.max_length} of a bag leaves no room for text: use {_SHORTEST} or more")

    def passage(self, title: str, text: str) -> str:
        """Return the tokenizer's input for a passage."""
        return f"{self.passage_prompt}{title} {text}" if title else self.passage_prompt + text


@dataclass(frozen=True, slots=True)
class BagEncoder:
    """Passages to bags of tokens, by a tokenizer alone; make it with `load`."""

    folder: Path
    spec: BagSpec
    tokenizer: "Tokenizer"
    terms: Flags  # (V,) whether an id is a term

    @classmethod
    def load(cls, folder: Path) -> Self:
        """Load the tokenizer of a folder that `bag_files` forms.

        Raises:
            InputError: a file is missing or corrupt.
        """
        spec = read_bag_spec(folder)
        tokenizer = load_tokenizer(folder, spec.max_length)
        return cls(folder, spec, tokenizer, terms_of(tokenizer, vocabulary_of(folder)))

    @property
    def dim(self) -> int:
        """The number of ids of the vocabulary."""
        return len(self.terms)

    @property
    def arithmetic(self) -> tuple[str, str]:
        """The device and the arithmetic, which are recorded and never compared."""
        return "cpu", "bits"

    def encode_passages(self, titles: Sequence[str], texts: Sequence[str]) -> SparseVectors:
        """Return the bags of passages, in order: the terms of each, ascending, with weights of 1."""
        lines = tokenize(self.tokenizer, [self.spec.passage(*both) for both in zip(titles, texts, strict=True)])
        bags = [np.unique(line) for line in lines]
        held = [bag[self.terms[bag]] for bag in bags]
        terms = np.concatenate([np.zeros(0, np.int32), *held]).astype(np.int32)
        return SparseVectors(terms, np.ones(len(terms), np.uint8), offsets_of(np.array([*map(len, held)], np.int64)))


def is_bag(folder: Path) -> bool:
    """Whether a folder holds what makes bags of passages."""
    return RECORDED in optional_object(folder / RECORD_FILE)


def read_bag_spec(folder: Path, overrides: Mapping[str, Any] | None = None) -> BagSpec:
    """Read how the folder of an encoder makes bags: as its record says, else with the length of its inputs.

    Raises:
        InputError: its record is corrupt.
        UsageError: an override is unknown or wrong.
    """
    names = [one.name for one in fields(BagSpec)]
    if unknown := sorted({*(overrides or {})} - {*names}):
        raise UsageError(f"{unknown[0]!r} is not a setting of a bag: use one of {', '.join(names)}")
    record = optional_object(folder / RECORD_FILE)
    own = record.get(RECORDED, record.get(SPARSE, {}))
    try:
        told = BagSpec(**{"max_length": longest_input(folder)} | {name: own[name] for name in names if name in own})
    except (TypeError, UsageError) as wrong:
        raise InputError(f"the record of encoder {folder} is corrupt ({wrong}): fetch the model again") from wrong
    return replace(told, **(overrides or {}))


def bag_space(folder: Path, spec: BagSpec) -> Space:
    """Return the space of the bags of a folder's tokenizer; no weight is read.

    Raises:
        InputError: a file is missing or corrupt.
    """
    tokenizer, dim = digest_tokenizer(folder), vocabulary_of(folder)
    return Space(
        name=f"bag-{dim}-{tokenizer.partition(':')[2][:8]}",
        weights="",
        tokenizer=tokenizer,
        pooling=BAG,
        normalize=False,
        max_length=spec.max_length,
        layout=_JOINED,
        passage_prompt=spec.passage_prompt,
        dim=dim,
    )


def bag_files(folder: Path, spec: BagSpec, workdir: Path) -> dict[str, Path]:
    """Return, by name, the files that form, in one flat folder, what makes bags: its record and the tokenizer.

    The record, `bookwheel.json`, and a config with the size of the vocabulary are written into `workdir`.

    Raises:
        InputError: `folder` has no tokenizer.
    """
    written = {RECORD_FILE: {RECORDED: asdict(spec)}, CONFIG: {"vocab_size": vocabulary_of(folder)}}
    files = {path.name: path for path in tokenizer_files(folder)}
    for name, value in written.items():
        files[name] = workdir / name
        files[name].write_text(json.dumps(value, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    return files


def terms_of(tokenizer: "Tokenizer", size: int) -> Flags:
    """Return (size,) whether an id is a term: no special token, no `[unused…]`, no number without a token.

    With BERT's vocabulary these are the ids from 999 on, as the authors' code has it.
    """
    words: dict[str, int] = tokenizer.get_vocab()
    special = {number for number, added in tokenizer.get_added_tokens_decoder().items() if added.special}
    found = np.zeros(size, np.bool_)
    known = [number for word, number in words.items() if number < size and not _UNUSED.fullmatch(word)]
    found[[number for number in known if number not in special]] = True
    return found
