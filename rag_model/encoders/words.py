"""Text to token ids word by word: a word is split into tokens once, and remembered.

A static encoder costs little more than its tokenizer. Most tokenizers split each word alone, whatever stands around it;
then the tokens of a known word can be looked up, which gives the same ids. Whether a tokenizer does is read from its
rules (`separation`); the texts of all others are split whole.
"""

from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self

import numpy as np
import numpy.typing as npt

from rag_model.encoders.files import TOKENIZER, read_object
from rag_model.encoders.spec import EncoderSpec, TextInput
from rag_model.encoders.tokens import TokenIds, load_tokenizer
from rag_model.errors import InputError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

Separation = Literal["spaces", "marks"]
Known = dict[str, bytes | None]
_MARK = "▁"  # stands for the space before a word: SentencePiece's
_BY_CHARACTER = frozenset(("BertNormalizer", "Lowercase", "NFC", "NFD", "NFKC", "NFKD", "StripAccents"))
_AT_SPACES = frozenset(("BertPreTokenizer", "Whitespace", "WhitespaceSplit"))
_WITHIN_WORDS = frozenset(("Punctuation", "Digits"))
_ACROSS = ("dropout", "ignore_merges", "continuing_subword_prefix", "end_of_word_suffix")  # settings of a BPE
_ID = 4  # bytes of an id
_MOST_WORDS = 1 << 17  # remembered before the older half is forgotten: 25 MB each half
_LONGEST = 64  # characters of a word that is remembered: some languages put no spaces between words
_TOGETHER = 64  # new words that are split as one text
_AT_ONCE = 1024  # texts for the tokenizer, whose result takes 20 times the memory of the ids


@dataclass(frozen=True, slots=True)
class Reading:
    """How a static encoder's texts are cut, and which tokens count."""

    tokens: int  # most tokens of a text
    characters: int | None = None  # a longer text is cut before it is split
    unknown: int | None = None  # the id that does not count


@dataclass(frozen=True, slots=True)
class Parting:
    """How the ids of a text of ASCII words are parted into those of each.

    No such word has a mark of its own, or two. One that has a separator within it, or whose mark the tokenizer does not
    know, shows in the number of lines.
    """

    between: str  # stands between the words of the text
    begins: npt.NDArray[np.bool_] | None = None  # (v,) whether an id begins a word; None: there are separators
    separator: int = -1  # the id of what stands between two words

    def lines(self, ids: Sequence[int]) -> list[bytes]:
        """Return the ids of each word as bytes; where they are not as many as the words, no word's can be told."""
        row = np.array(ids, np.int32)
        if self.begins is None:
            ends = [*np.flatnonzero(row == self.separator).tolist(), len(row)]
            starts = [0, *(end + 1 for end in ends[:-1])]
        else:
            starts = [0, *(1 + np.flatnonzero(self.begins[row[1:]])).tolist()]  # the first id begins a word anyway
            ends = [*starts[1:], len(row)]
        held = row.tobytes()
        return [held[_ID * start : _ID * end] for start, end in zip(starts, ends, strict=True)]


@dataclass(slots=True)
class Words:
    """A tokenizer, and the tokens of the words that it has split; make it with `load`."""

    tokenizer: "Tokenizer"
    reading: Reading
    separation: Separation | None  # None: texts are split whole
    parting: Parting | None = None  # how the ids of words that were split together are parted; None: each is alone
    added: frozenset[int] = frozenset()  # ids of tokens that are found in a text before it is split into words
    _known: Known = field(default_factory=dict)  # ids of words, as bytes; None: see `_line`
    _older: Known = field(default_factory=dict)

    @classmethod
    def load(cls, folder: Path, spec: EncoderSpec) -> Self:
        """Load the tokenizer of the folder of a static encoder's tokenizer and weights.

        Raises:
            InputError: there is no `tokenizer.json`, or it is corrupt.
        """
        rules = read_object(folder / TOKENIZER)
        tokenizer = load_tokenizer(folder, spec.max_length)
        tokenizer.no_truncation()
        own = separation(rules)
        added = frozenset(tokenizer.get_added_tokens_decoder()) if own == "marks" else frozenset[int]()
        return cls(tokenizer, reading(tokenizer, rules, spec), own, parting_of(tokenizer, own), added)

    @property
    def size(self) -> int:
        """The number that is larger than every id."""
        return max(self.tokenizer.get_vocab().values(), default=-1) + 1

    def tokens(self, inputs: Sequence[TextInput]) -> list[TokenIds]:
        """Return the token ids of each input, without special ones, in order; a pair is one text.

        Raises:
            InputError: the tokenizer has no tokens for an input.
        """
        cut = self.reading.characters
        texts = [(one if isinstance(one, str) else " ".join(one))[:cut] for one in inputs]
        lines = self._looked_up(texts) if self.separation else self._whole(texts)
        most = _ID * self.reading.tokens
        return [np.frombuffer(line[:most], np.int32) for line in lines]

    def _looked_up(self, texts: Sequence[str]) -> list[bytes]:
        words, ends = list[str](), [0]  # one list: with one a text, a sixth of the time is Python's collector's
        for text in texts:
            words += text.split(" ")
            ends.append(len(words))
        known = self._learned({*words})
        lines = [_joined(known, words[start:end]) for start, end in pairwise(ends)]
        whole = [row for row, line in enumerate(lines) if line is None]
        again = dict(zip(whole, self._whole([texts[row] for row in whole]), strict=True))
        return [again[row] if line is None else line for row, line in enumerate(lines)]

    def _learned(self, words: set[str]) -> Known:
        """Return the ids of words, of which new ones are split; other threads may do so at the same time."""
        if len(self._known) >= _MOST_WORDS:
            self._known, self._older = {}, self._known
        known, older = self._known, self._older
        missing = words.difference(known)
        known.update((word, older[word]) for word in missing & older.keys())
        new = [word for word in missing.difference(known) if len(word) <= _LONGEST]
        plain = [word for word in new if word and word.isascii() and word.isprintable()] if self.parting else []
        for some, lines in ((plain, self._parted(plain)), (other := [*{*new}.difference(plain)], self._alone(other))):
            known.update(zip(some, lines, strict=True))
        return known

    def _alone(self, words: Sequence[str]) -> Iterator[bytes | None]:
        return (self._line(word, ids) for word, ids in zip(words, self._split(words), strict=True))

    def _line(self, word: str, ids: list[int]) -> bytes | None:
        """Return the ids of a word; None: they depend on its neighbours, so that its text must be split whole."""
        alone = self.separation == "spaces" or (word and self.added.isdisjoint(ids))
        return self._kept(ids) if alone else None

    def _parted(self, words: Sequence[str]) -> Iterator[bytes | None]:
        """Yield the ids of each word, as `_line`; several are split as one text, which takes a third of the time."""
        parting, rare = self.parting or Parting(""), self.added | {self.reading.unknown}
        pieces = [words[start : start + _TOGETHER] for start in range(0, len(words), _TOGETHER)]
        for piece, ids in zip(pieces, self._split([parting.between.join(piece) for piece in pieces]), strict=True):
            lines = parting.lines(ids)
            yield from lines if len(lines) == len(piece) and rare.isdisjoint(ids) else self._alone(piece)

    def _whole(self, texts: Sequence[str]) -> list[bytes]:
        return [self._kept(ids) for ids in self._split(texts)]

    def _kept(self, ids: list[int]) -> bytes:
        unknown = self.reading.unknown
        return array("i", ids if unknown not in ids else [own for own in ids if own != unknown]).tobytes()

    def _split(self, texts: Sequence[str]) -> Iterator[list[int]]:
        try:
            for start in range(0, len(texts), _AT_ONCE):
                piece = list(texts[start : start + _AT_ONCE])
                yield from [one.ids for one in self.tokenizer.encode_batch_fast(piece, add_special_tokens=False)]
        except Exception as failed:  # tokenizers raises only Exception
            raise InputError(f"the model's tokenizer cannot split a text ({failed}): fetch the model again") from failed


def parting_of(tokenizer: "Tokenizer", separation: Separation | None) -> Parting | None:
    """Return how ids are parted: at a special token between words, or before each token with a mark."""
    if separation == "marks":
        vocabulary = tokenizer.get_vocab()
        begins = np.zeros(1 + max(vocabulary.values(), default=-1), np.bool_)
        begins[[number for token, number in vocabulary.items() if token.startswith(_MARK)]] = True
        return Parting(" ", begins)
    if separation is None:
        return None
    unknown = getattr(tokenizer.model, "unk_token", None)
    for number, own in tokenizer.get_added_tokens_decoder().items():
        if own.content != unknown and not (own.normalized or own.single_word):
            return Parting(f" {own.content} ", separator=number)
    return None


def reading(tokenizer: "Tokenizer", rules: Mapping[str, Any], spec: EncoderSpec) -> Reading:
    """Return how a spec's texts are cut and counted.

    As model2vec does it, unknown tokens do not count, and a text is first cut at as many characters as its most tokens
    of median length have.
    """
    if spec.pooling != "static-known":
        return Reading(spec.max_length)
    vocabulary = tokenizer.get_vocab()
    characters = spec.max_length * int(np.median([len(token) for token in vocabulary]))
    unknown = rules["model"].get("unk_token")
    return Reading(spec.max_length, characters, vocabulary.get(unknown) if isinstance(unknown, str) else None)


def separation(rules: Mapping[str, Any]) -> Separation | None:
    """Return how the rules of a `tokenizer.json` separate words, if each is split alone.

    `spaces`: spaces separate words and leave no token. `marks`: a space belongs to the word behind it, and the text's
    first word has one as well. None: the rules may be others, and the tokens of a word may depend on its neighbours.
    """
    if any(" " in str(token.get("content")) for token in rules.get("added_tokens") or []):
        return None
    normalizers = [*_flat(rules.get("normalizer"), "normalizers")]
    splitters = [*_flat(rules.get("pre_tokenizer"), "pretokenizers")]
    if not splitters:
        return "marks" if _marks_by_normalizer(normalizers) and _merges_no_words(rules["model"]) else None
    if not _BY_CHARACTER.issuperset(one["type"] for one in normalizers):
        return None
    kinds = [one["type"] for one in splitters]
    if _marks_by_splitter(splitters[-1]) and _AT_SPACES.issuperset(kinds[:-1]):
        return "marks"
    spaced = not _AT_SPACES.isdisjoint(kinds) and (_AT_SPACES | _WITHIN_WORDS).issuperset(kinds)
    return "spaces" if spaced else None


def _flat(rule: Mapping[str, Any] | None, inside: str) -> Iterator[Mapping[str, Any]]:
    """Yield the steps of a rule, of which some may be sequences."""
    if rule and rule["type"] == "Sequence":
        for one in rule[inside]:
            yield from _flat(one, inside)
    elif rule:
        yield rule


def _marks_by_splitter(rule: Mapping[str, Any]) -> bool:
    """Whether it is SentencePiece's way to split: every word gets a mark, and is split from the others."""
    always = rule.get("prepend_scheme", "always" if rule.get("add_prefix_space") else "never") == "always"
    return bool(rule["type"] == "Metaspace" and always and rule.get("split", True))


def _marks_by_normalizer(rules: Sequence[Mapping[str, Any]]) -> bool:
    """Whether marks are put before the text and in the place of spaces, and nothing else is done (Llama 2)."""
    told = [(one["type"], one.get("prepend") or (one.get("pattern"), one.get("content"))) for one in rules]
    return told == [("Prepend", _MARK), ("Replace", ({"String": " "}, _MARK))]


def _merges_no_words(model: Mapping[str, Any]) -> bool:
    """Whether no token of a BPE has a mark behind another character, so that no merge joins two words."""
    if model.get("type") != "BPE" or any(model.get(name) for name in _ACROSS) or _MARK not in model["vocab"]:
        return False
    return not any(_MARK in token.lstrip(_MARK) for token in model["vocab"])


def _joined(known: Mapping[str, bytes | None], words: Sequence[str]) -> bytes | None:
    """Return the ids of words, one behind the other; None: one is too long, or has none of its own."""
    try:
        return b"".join(map(known.__getitem__, words))  # type: ignore[arg-type]
    except (KeyError, TypeError):
        return None
