"""Text to token ids word by word: a word is split into tokens once, and remembered.

A static encoder costs little more than its tokenizer. Most tokenizers split each word alone, whatever stands around it;
then the tokens of a known word can be looked up, which gives the same ids. Whether a tokenizer does is read from its
rules (`separation`); the texts of all others are split whole.
"""

from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self

import numpy as np

from rag_model.encoders.files import TOKENIZER, read_object
from rag_model.encoders.spec import EncoderSpec, TextInput
from rag_model.encoders.tokens import TokenIds, load_tokenizer
from rag_model.errors import InputError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

Separation = Literal["spaces", "marks"]
_MARK = "▁"  # stands for the space before a word: SentencePiece's
_BY_CHARACTER = frozenset(("BertNormalizer", "Lowercase", "NFC", "NFD", "NFKC", "NFKD", "StripAccents"))
_AT_SPACES = frozenset(("BertPreTokenizer", "Whitespace", "WhitespaceSplit"))
_WITHIN_WORDS = frozenset(("Punctuation", "Digits"))
_ACROSS = ("dropout", "ignore_merges", "continuing_subword_prefix", "end_of_word_suffix")  # settings of a BPE
_ID = 4  # bytes of an id
_MOST_WORDS = 1 << 17  # remembered before the older half is forgotten: 25 MB each half
_LONGEST = 64  # characters of a word that is remembered: some languages put no spaces between words
_AT_ONCE = 1024  # words or texts for the tokenizer, whose result takes 20 times the memory of the ids


@dataclass(frozen=True, slots=True)
class Reading:
    """How a static encoder's texts are cut, and which tokens count."""

    tokens: int  # most tokens of a text
    characters: int | None = None  # a longer text is cut before it is split
    unknown: int | None = None  # the id that does not count


class _Known(dict[str, bytes | None]):
    """Ids of words, as bytes; a new word's are made when it is looked up. None: see `Words.line`."""

    def __init__(self, line: Callable[[str], bytes | None], older: Mapping[str, bytes | None]) -> None:
        super().__init__()
        self._line, self._older = line, older

    def __missing__(self, word: str) -> bytes | None:
        older = self._older
        line = older[word] if word in older else self._line(word)
        if len(word) <= _LONGEST:
            self[word] = line
        return line

    def next(self) -> "_Known":
        """Return an empty one that finds the words of this one, and not those of the one before."""
        self._older = {}
        return _Known(self._line, self)


@dataclass(slots=True)
class Words:
    """A tokenizer, and the tokens of the words that it has split; make it with `load`."""

    tokenizer: "Tokenizer"
    reading: Reading
    separation: Separation | None  # None: texts are split whole
    added: frozenset[int] = frozenset()  # ids of tokens that are found in a text before it is split into words
    _known: _Known = field(init=False)

    def __post_init__(self) -> None:
        self._known = _Known(self.line, {})

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
        return cls(tokenizer, reading(tokenizer, rules, spec), own, added)

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

    def line(self, word: str) -> bytes | None:
        """Return the ids of a word, as bytes; None: they depend on its neighbours, so that its text is split whole.

        Raises:
            InputError: the tokenizer has no tokens for it.
        """
        ids = next(self._split([word]))
        alone = self.separation == "spaces" or (word and self.added.isdisjoint(ids))
        return self._kept(ids) if alone else None

    def _looked_up(self, texts: Sequence[str]) -> list[bytes]:
        known = self._known  # another thread may begin a new one meanwhile
        lines = [_joined(known, text.split(" ")) for text in texts]
        if len(known) >= _MOST_WORDS:
            self._known = known.next()
        whole = [row for row, line in enumerate(lines) if line is None]
        again = dict(zip(whole, self._whole([texts[row] for row in whole]), strict=True))
        return [again[row] if line is None else line for row, line in enumerate(lines)]

    def _whole(self, texts: Sequence[str]) -> list[bytes]:
        return [self._kept(ids) for ids in self._split(texts)]

    def _kept(self, ids: list[int]) -> bytes:
        unknown = self.reading.unknown
        return array("i", ids if unknown not in ids else [own for own in ids if own != unknown]).tobytes()

    def _split(self, texts: Sequence[str]) -> Iterator[list[int]]:
        try:
            if len(texts) == 1:  # half as slow as a batch of one
                yield self.tokenizer.encode(texts[0], add_special_tokens=False).ids
                return
            for start in range(0, len(texts), _AT_ONCE):
                piece = list(texts[start : start + _AT_ONCE])
                yield from [one.ids for one in self.tokenizer.encode_batch_fast(piece, add_special_tokens=False)]
        except Exception as failed:  # tokenizers raises only Exception
            raise InputError(f"the model's tokenizer cannot split a text ({failed}): fetch the model again") from failed


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
    """Return the ids of words, one behind the other; None: one has none of its own."""
    try:
        return b"".join(map(known.__getitem__, words))  # type: ignore[arg-type]
    except TypeError:
        return None
