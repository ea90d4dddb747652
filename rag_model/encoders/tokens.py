"""Tokenize texts with a model's fast tokenizer: truncated at `max_length`, not padded.

If there is a `tokenizer.json`, only this file is used, so that the digest of a vector space covers
all rules.

`WordTokenizer` caches the tokens of words for static encoders, whose time is mostly spent in the
tokenizer. Most tokenizers split every word independently of its neighbours, so the tokens of a
known word can be looked up. `find_word_separation` decides this from the tokenizer's rules; other
tokenizers split whole texts.

Inputs of similar length are batched up to a maximum number of tokens; batches that do not fit into
a GPU's memory are halved. Sorting by length makes padding rare. A maximum of tokens instead of
inputs keeps memory and speed constant, from short questions to long passages.
"""

import logging
import os
import shutil
import sys
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Self, TypeVar

import numpy as np
import numpy.typing as npt

from rag_model.encoders.files import (
    CONFIG,
    TOKENIZER,
    list_tokenizer_files,
    read_json_object,
    read_optional_json,
    read_position_limit,
)
from rag_model.encoders.spec import EncoderSpec, TextInput
from rag_model.errors import BookwheelError, InputError, ResourceError
from rag_model.extras import require
from rag_model.tokenizer import explain_tokenizer_errors, is_exception_or_panic, load_tokenizer_file

if TYPE_CHECKING:
    from tokenizers import Encoding, Tokenizer

# Number of texts per call; more would need memory, because the library's encodings take 20 times the memory of the ids.
_TEXTS_PER_CALL = 256
_TOKENIZER_SETTINGS = ("tokenizer_config.json", "special_tokens_map.json", "vocab.txt", "vocab.json", "merges.txt")
# Inputs are padded to a multiple of this length. With AMX, bf16 attention then takes 1.0 us per
# token and layer instead of 1.5; tensor cores need multiples of 8. Measured: 7 % more tokens, and a
# quarter less time.
LENGTH_MULTIPLE = 16
# In batches of at least this many tokens, a vector does not depend on the batch size. oneDNN uses
# different kernels for small matrices: in bf16 with AMX, values differed by up to 1e-3 below 384
# tokens per thread, also between padded lengths. Above that they did not differ, with one thread or
# two, with or without an attention mask.
BATCH_INVARIANT_TOKENS = 1024
_PAD_TOKENS = ("[PAD]", "<pad>")
TokenIds = npt.NDArray[np.int32]
Rows = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]
_Result = TypeVar("_Result")
WordSeparation = Literal["spaces", "marks"]
TokenCache = dict[str, bytes | None]
_SPACE_MARK = "▁"  # character by which SentencePiece marks the space before a word
_CHARACTER_NORMALIZERS = frozenset(("BertNormalizer", "Lowercase", "NFC", "NFD", "NFKC", "NFKD", "StripAccents"))
_SPACE_SPLITTERS = frozenset(("BertPreTokenizer", "Whitespace", "WhitespaceSplit"))
_WORD_INTERNAL_SPLITTERS = frozenset(("Punctuation", "Digits"))
_UNSUPPORTED_BPE_SETTINGS = ("dropout", "ignore_merges", "continuing_subword_prefix", "end_of_word_suffix")
_ID_BYTES = 4  # bytes per token id
# words per generation of the cache; each of the two generations takes 25 MB
_MAX_CACHED_WORDS = 1 << 17
# maximum characters of a cached word, so that texts without spaces are not cached as one word
_MAX_CACHED_LENGTH = 64
_WORDS_PER_TEXT = 64  # number of new words that are tokenized as one text
# Number of texts per batch, for the same reason as `_TEXTS_PER_CALL`.
_TEXTS_PER_BATCH = 1024
_log = logging.getLogger(__name__)


class TokenCounts(NamedTuple):
    """Token counts of the inputs of an encoder."""

    tokens: int  # number of tokens without padding; for ColBERT, of tokens that have a vector
    truncated: int  # number of inputs that are longer than the encoder's limit, and were truncated


def load_tokenizer(folder: Path, max_length: int, end_token: str = "") -> "Tokenizer":
    """Load the tokenizer of `folder`, truncating at `max_length` tokens, including special tokens.

    If the model has fewer positions than `max_length`, inputs are truncated at the number of
    positions. Every input ends with `end_token`, unless it is empty.

    Raises:
        InputError: the tokenizer's files are missing or corrupt, or `end_token` is not in its
            vocabulary.
    """
    files = list_tokenizer_files(folder)
    try:
        tokenizer = load_tokenizer_file(files[0]) if files[0].name == TOKENIZER else _load_legacy_tokenizer(folder)
        if end_token:
            _append_end_token(tokenizer, end_token, folder)
    except BookwheelError:
        raise
    except BaseException as error:
        if not is_exception_or_panic(error):
            raise
        raise InputError(
            f"the tokenizer of encoder {folder} cannot be read ({error}): fetch the model again"
        ) from error
    tokenizer.enable_truncation(min(max_length, read_position_limit(folder) or max_length))
    tokenizer.no_padding()
    return tokenizer


def _append_end_token(tokenizer: "Tokenizer", token: str, folder: Path) -> None:
    """Append an end token to the tokenizer's template, unless the template already ends with it."""
    if tokenizer.token_to_id(token) is None:
        raise InputError(
            f"the tokenizer of encoder {folder} has no end token {token!r}: fetch the model again, "
            "or change end_token of its spec"
        )
    single_encoding, pair_encoding = tokenizer.encode("a"), tokenizer.encode("a", "a")
    if single_encoding.tokens[-1:] == [token]:
        return
    special_tokens = {(name, tokenizer.token_to_id(name)) for name in (*_list_special_tokens(pair_encoding), token)}
    tokenizer.post_processor = import_module("tokenizers.processors").TemplateProcessing(
        single=[*_list_template_elements(single_encoding), f"{token}:0"],
        pair=[*_list_template_elements(pair_encoding), f"{token}:1"],
        special_tokens=sorted(special_tokens),
    )


def _list_special_tokens(encoding: "Encoding") -> list[str]:
    special_mask = encoding.special_tokens_mask
    return [token for token, is_special in zip(encoding.tokens, special_mask, strict=True) if is_special]


def _list_template_elements(encoding: "Encoding") -> list[str]:
    """Return the elements of the post-processor's template, given an encoding of `a` or of (`a`,
    `a`).
    """
    template_elements = list[str]()
    encoding_columns = encoding.tokens, encoding.special_tokens_mask, encoding.sequence_ids, encoding.type_ids
    for token, is_special, sequence_id, type_id in zip(*encoding_columns, strict=True):
        template_element = f"{token}:{type_id}" if is_special else f"${'AB'[sequence_id or 0]}:{type_id}"
        if is_special or template_elements[-1:] != [template_element]:
            template_elements.append(template_element)
    return template_elements


def tokenize(tokenizer: "Tokenizer", inputs: Sequence[TextInput]) -> list[TokenIds]:
    """Return the token ids of each input, including special tokens, in order.

    Raises:
        InputError: the tokenizer cannot tokenize an input.
    """
    return tokenize_and_count(tokenizer, inputs)[0]


def tokenize_and_count(tokenizer: "Tokenizer", inputs: Sequence[TextInput]) -> tuple[list[TokenIds], int]:
    """Return (token ids as from `tokenize`, number of inputs that were truncated).

    Raises:
        InputError: the tokenizer has no tokens for an input.
    """
    input_batches = (inputs[i : i + _TEXTS_PER_CALL] for i in range(0, len(inputs), _TEXTS_PER_CALL))
    token_ids, n_truncated = list[TokenIds](), 0
    with explain_tokenizer_errors():
        for batch in input_batches:
            for encoding in tokenizer.encode_batch_fast(list(batch)):
                token_ids.append(np.array(encoding.ids, np.int32))
                n_truncated += bool(encoding.overflowing)  # not empty if truncated
    return token_ids, n_truncated


def count_truncated(tokenizer: "Tokenizer", inputs: Sequence[TextInput]) -> int:
    """Return the number of inputs that are longer than the tokenizer's limit."""
    return tokenize_and_count(tokenizer, inputs)[1]


def copy_tokenizer(source: Path, folder: Path) -> None:
    """Copy the rules and the settings of a tokenizer from one model folder to another."""
    folder.mkdir(parents=True, exist_ok=True)
    for path in [*list_tokenizer_files(source), *(source / name for name in _TOKENIZER_SETTINGS)]:
        if path.is_file() and path.resolve() != (folder / path.name).resolve():
            shutil.copyfile(path, folder / path.name)


def limit_tokenizer(threads: int) -> None:
    """Limit the tokenizers library to one thread if `threads` is 1; otherwise its pool uses all
    cores.
    """
    os.environ["TOKENIZERS_PARALLELISM"] = "false" if threads == 1 else "true"


def _load_legacy_tokenizer(folder: Path) -> "Tokenizer":
    auto_tokenizer = require("transformers", "model").AutoTokenizer
    tokenizer: Tokenizer = auto_tokenizer.from_pretrained(
        str(folder), local_files_only=True, trust_remote_code=False
    ).backend_tokenizer
    return tokenizer


@dataclass(frozen=True, slots=True)
class TextLimits:
    """Length limits of the texts of a static encoder, and the token that it ignores."""

    max_tokens: int  # maximum tokens per text
    max_characters: int | None = None  # maximum characters of a text; None if there is no limit
    unknown_id: int | None = None  # id of the unknown token; None if it is not ignored


@dataclass(frozen=True, slots=True)
class WordBoundaries:
    """The rule that splits the token ids of a text of joined ASCII words into the ids of each word.

    An ASCII word cannot contain SentencePiece's space mark. If a word contains the joiner, or if
    the vocabulary has no space mark, `split_ids` returns more or fewer lists than there are words.
    """

    joiner: str  # text between two words
    # (v,) whether each token begins a word; None if `separator_id` separates words
    starts_word: npt.NDArray[np.bool_] | None = None
    separator_id: int = -1  # token id of the joiner; -1 if `starts_word` is used

    def split_ids(self, ids: Sequence[int]) -> list[bytes]:
        """Return the ids of each word as bytes. The result is invalid if it has more or fewer items
        than there are words.
        """
        id_array = np.array(ids, np.int32)
        if self.starts_word is None:
            word_ends = [*np.flatnonzero(id_array == self.separator_id).tolist(), len(id_array)]
            word_starts = [0, *(end + 1 for end in word_ends[:-1])]
        else:
            # The first id always begins a word.
            word_starts = [0, *(1 + np.flatnonzero(self.starts_word[id_array[1:]])).tolist()]
            word_ends = [*word_starts[1:], len(id_array)]
        id_bytes = id_array.tobytes()
        byte_ranges = (_ID_BYTES * np.array([word_starts, word_ends])).T.tolist()
        return [id_bytes[start:end] for start, end in byte_ranges]


@dataclass(slots=True)
class WordTokenizer:
    """A tokenizer with a cache of the tokens of words; create one with `load`."""

    tokenizer: "Tokenizer"
    limits: TextLimits
    separation: WordSeparation | None  # None if whole texts are tokenized
    boundaries: WordBoundaries | None = None  # None if words are not joined for tokenization
    # Ids of added tokens, which the tokenizer matches before it splits a text into words.
    added_ids: frozenset[int] = frozenset()
    # token ids of each word as bytes; None if the tokens depend on the neighbours of the word
    _recent_words: TokenCache = field(default_factory=dict)
    _older_words: TokenCache = field(default_factory=dict)

    @classmethod
    def load(cls, folder: Path, spec: EncoderSpec) -> Self:
        """Load the tokenizer of a static encoder from the folder of its tokenizer and weights.

        Raises:
            InputError: there is no `tokenizer.json`, or it is corrupt.
        """
        rules = read_json_object(folder / TOKENIZER)
        tokenizer = load_tokenizer(folder, spec.max_length)
        tokenizer.no_truncation()
        word_separation = find_word_separation(rules)
        added_ids = frozenset(tokenizer.get_added_tokens_decoder()) if word_separation == "marks" else frozenset[int]()
        return cls(
            tokenizer,
            derive_limits(tokenizer, rules, spec),
            word_separation,
            find_word_boundaries(tokenizer, word_separation),
            added_ids,
        )

    @property
    def vocabulary_size(self) -> int:
        """The largest token id plus 1."""
        return max(self.tokenizer.get_vocab().values(), default=-1) + 1

    def tokenize(self, inputs: Sequence[TextInput]) -> list[TokenIds]:
        """Return the token ids of each input without special tokens, in order; a pair is joined by
        a space.

        Raises:
            InputError: the tokenizer has no tokens for an input.
        """
        return self.tokenize_and_count(inputs)[0]

    def tokenize_and_count(self, inputs: Sequence[TextInput]) -> tuple[list[TokenIds], int]:
        """Return (token ids as from `tokenize`, number of inputs that were truncated).

        Raises:
            InputError: the tokenizer has no tokens for an input.
        """
        max_characters = self.limits.max_characters
        full_texts = [text if isinstance(text, str) else " ".join(text) for text in inputs]
        texts = [text[:max_characters] for text in full_texts]
        ids_per_text = self._tokenize_by_words(texts) if self.separation else self._tokenize_texts(texts)
        max_bytes = _ID_BYTES * self.limits.max_tokens
        n_truncated = sum(
            len(id_bytes) > max_bytes or len(text) < len(full_text)
            for id_bytes, text, full_text in zip(ids_per_text, texts, full_texts, strict=True)
        )
        return [np.frombuffer(id_bytes[:max_bytes], np.int32) for id_bytes in ids_per_text], n_truncated

    def _tokenize_by_words(self, texts: Sequence[str]) -> list[bytes]:
        # All texts share one list, because with one list per text, garbage collection would take a
        # sixth of the time.
        words, text_ends = list[str](), [0]
        for text in texts:
            words += text.split(" ")
            text_ends.append(len(words))
        ids_by_word = self._cache_words({*words})
        id_rows = [_concatenate_ids(ids_by_word, words[start:end]) for start, end in pairwise(text_ends)]
        whole_rows = [row for row, row_ids in enumerate(id_rows) if row_ids is None]
        whole_ids_by_row = dict(zip(whole_rows, self._tokenize_texts([texts[row] for row in whole_rows]), strict=True))
        return [whole_ids_by_row[row] if row_ids is None else row_ids for row, row_ids in enumerate(id_rows)]

    def _cache_words(self, words: set[str]) -> TokenCache:
        """Tokenize the new words and return the cache. Thread-safe."""
        if len(self._recent_words) >= _MAX_CACHED_WORDS:
            self._recent_words, self._older_words = {}, self._recent_words
        recent_words, older_words = self._recent_words, self._older_words
        missing_words = words.difference(recent_words)
        recent_words.update((word, older_words[word]) for word in missing_words & older_words.keys())
        new_words = [word for word in missing_words.difference(recent_words) if len(word) <= _MAX_CACHED_LENGTH]
        ascii_words = (
            [word for word in new_words if word and word.isascii() and word.isprintable()] if self.boundaries else []
        )
        other_words = [*{*new_words}.difference(ascii_words)]
        recent_words.update(zip(ascii_words, self._tokenize_joined_words(ascii_words), strict=True))
        recent_words.update(zip(other_words, self._tokenize_words(other_words), strict=True))
        return recent_words

    def _tokenize_words(self, words: Sequence[str]) -> Iterator[bytes | None]:
        return (self._to_cached_ids(word, ids) for word, ids in zip(words, self._encode_texts(words), strict=True))

    def _to_cached_ids(self, word: str, ids: list[int]) -> bytes | None:
        """Return the ids of a word for the cache; None if they depend on its neighbours, so that
        its text must be tokenized whole.
        """
        is_independent = self.separation == "spaces" or (word and self.added_ids.isdisjoint(ids))
        return self._remove_unknown_ids(ids) if is_independent else None

    def _tokenize_joined_words(self, words: Sequence[str]) -> Iterator[bytes | None]:
        """Yield the ids of each word as `_to_cached_ids` returns them.

        Tokenizing many words as one text takes a third of the time.
        """
        boundaries, unsafe_ids = self.boundaries or WordBoundaries(""), self.added_ids | {self.limits.unknown_id}
        word_groups = [words[i : i + _WORDS_PER_TEXT] for i in range(0, len(words), _WORDS_PER_TEXT)]
        for word_group, ids in zip(
            word_groups,
            self._encode_texts([boundaries.joiner.join(word_group) for word_group in word_groups]),
            strict=True,
        ):
            word_ids = boundaries.split_ids(ids)
            yield from (
                word_ids
                if len(word_ids) == len(word_group) and unsafe_ids.isdisjoint(ids)
                else self._tokenize_words(word_group)
            )

    def _tokenize_texts(self, texts: Sequence[str]) -> list[bytes]:
        return [self._remove_unknown_ids(ids) for ids in self._encode_texts(texts)]

    def _remove_unknown_ids(self, ids: list[int]) -> bytes:
        unknown_id = self.limits.unknown_id
        if unknown_id in ids:
            ids = [token_id for token_id in ids if token_id != unknown_id]
        return array("i", ids).tobytes()

    def _encode_texts(self, texts: Sequence[str]) -> Iterator[list[int]]:
        for first_text in range(0, len(texts), _TEXTS_PER_BATCH):
            batch = list(texts[first_text : first_text + _TEXTS_PER_BATCH])
            with explain_tokenizer_errors():
                encodings = self.tokenizer.encode_batch_fast(batch, add_special_tokens=False)
            yield from (encoding.ids for encoding in encodings)


def find_word_boundaries(tokenizer: "Tokenizer", separation: WordSeparation | None) -> WordBoundaries | None:
    """Return the rule that splits the token ids of joined words; None if there is none.

    The ids are split at a special token between the words, or before each token with a space mark.
    """
    if separation == "marks":
        vocabulary = tokenizer.get_vocab()
        starts_word = np.zeros(1 + max(vocabulary.values(), default=-1), np.bool_)
        starts_word[[token_id for token, token_id in vocabulary.items() if token.startswith(_SPACE_MARK)]] = True
        return WordBoundaries(" ", starts_word)
    if separation is None:
        return None
    unknown_token = getattr(tokenizer.model, "unk_token", None)
    for token_id, added_token in tokenizer.get_added_tokens_decoder().items():
        if added_token.content != unknown_token and not (added_token.normalized or added_token.single_word):
            return WordBoundaries(f" {added_token.content} ", separator_id=token_id)
    return None


def derive_limits(tokenizer: "Tokenizer", rules: Mapping[str, Any], spec: EncoderSpec) -> TextLimits:
    """Return the text limits of a spec.

    For `static-known`, as in model2vec, unknown tokens are ignored, and a text is first truncated
    to `max_length` times the median length of a token, in characters.
    """
    if spec.pooling != "static-known":
        return TextLimits(spec.max_length)
    vocabulary = tokenizer.get_vocab()
    max_characters = spec.max_length * int(np.median([len(token) for token in vocabulary]))
    unknown_token = rules["model"].get("unk_token")
    return TextLimits(
        spec.max_length, max_characters, vocabulary.get(unknown_token) if isinstance(unknown_token, str) else None
    )


def find_word_separation(rules: Mapping[str, Any]) -> WordSeparation | None:
    """Return how the rules of a `tokenizer.json` separate words that are tokenized independently.

    `spaces`: spaces separate words and become no tokens. `marks`: a space is part of the following
    word, and the first word of a text also gets one. None: the tokens of a word may depend on its
    neighbours.
    """
    if any(" " in str(token.get("content")) for token in rules.get("added_tokens") or []):
        return None
    normalizers = [*_iter_steps(rules.get("normalizer"), "normalizers")]
    splitters = [*_iter_steps(rules.get("pre_tokenizer"), "pretokenizers")]
    if not splitters:
        return "marks" if _normalizers_add_marks(normalizers) and _has_no_cross_word_merges(rules["model"]) else None
    if not _CHARACTER_NORMALIZERS.issuperset(normalizer["type"] for normalizer in normalizers):
        return None
    splitter_types = [splitter["type"] for splitter in splitters]
    if _splitter_adds_marks(splitters[-1]) and _SPACE_SPLITTERS.issuperset(splitter_types[:-1]):
        return "marks"
    splits_at_spaces = not _SPACE_SPLITTERS.isdisjoint(splitter_types) and (
        _SPACE_SPLITTERS | _WORD_INTERNAL_SPLITTERS
    ).issuperset(splitter_types)
    return "spaces" if splits_at_spaces else None


def _iter_steps(rule: Mapping[str, Any] | None, key: str) -> Iterator[Mapping[str, Any]]:
    """Yield the steps of a rule; sequences are flattened."""
    if rule and rule["type"] == "Sequence":
        for sub_rule in rule[key]:
            yield from _iter_steps(sub_rule, key)
    elif rule:
        yield rule


def _splitter_adds_marks(rule: Mapping[str, Any]) -> bool:
    """Return whether a pre-tokenizer puts a space mark before each word and separates all words."""
    always_prepends_mark = rule.get("prepend_scheme", "always" if rule.get("add_prefix_space") else "never") == "always"
    return bool(rule["type"] == "Metaspace" and always_prepends_mark and rule.get("split", True))


def _normalizers_add_marks(rules: Sequence[Mapping[str, Any]]) -> bool:
    """Return whether the normalizers only prepend a space mark, and replace spaces by it (Llama
    2).
    """
    steps = [(rule["type"], rule.get("prepend") or (rule.get("pattern"), rule.get("content"))) for rule in rules]
    return steps == [("Prepend", _SPACE_MARK), ("Replace", ({"String": " "}, _SPACE_MARK))]


def _has_no_cross_word_merges(model: Mapping[str, Any]) -> bool:
    """Return whether no BPE token has a space mark after its first character, so that no merge
    joins two words.
    """
    if (
        model.get("type") != "BPE"
        or any(model.get(name) for name in _UNSUPPORTED_BPE_SETTINGS)
        or _SPACE_MARK not in model["vocab"]
    ):
        return False
    return not any(_SPACE_MARK in token.lstrip(_SPACE_MARK) for token in model["vocab"])


def _concatenate_ids(cache: Mapping[str, bytes | None], words: Sequence[str]) -> bytes | None:
    """Concatenate the ids of words; None if a word is too long for the cache, or its tokens depend
    on its neighbours.
    """
    try:
        return b"".join(map(cache.__getitem__, words))  # type: ignore[arg-type]
    except (KeyError, TypeError):
        return None


def find_pad_id(tokenizer: "Tokenizer", folder: Path) -> int:
    """Return the padding id from the model's config, or else from the vocabulary, or else 0."""
    candidate_ids = [read_optional_json(folder / CONFIG).get("pad_token_id"), *map(tokenizer.token_to_id, _PAD_TOKENS)]
    return next((token_id for token_id in candidate_ids if token_id is not None), 0)


def pad_rows(rows: Sequence[Sequence[int] | Rows | TokenIds], width: int, fill_id: int) -> tuple[Rows, Flags]:
    """Return (b, `width`) int64 ids, padded at the end with `fill_id`, and the (b, `width`)
    mask of tokens.
    """
    # (t,) < (b, 1) -> (b, t)
    is_token = np.arange(width) < np.array([len(row) for row in rows])[:, None]
    ids = np.full(is_token.shape, fill_id, np.int64)
    ids[is_token] = np.concatenate(rows)  # ragged -> (b, t)
    return ids, is_token


def pad_length(length: int, multiple: int = LENGTH_MULTIPLE) -> int:
    """Return the smallest multiple of `multiple` that is at least `length`."""
    return -(-length // multiple) * multiple


def batch_by_length(
    lengths: Sequence[int], max_tokens: int, min_tokens: int = 0, *, mix_lengths: bool = False
) -> Iterator[npt.NDArray[np.int64]]:
    """Yield batches of row numbers, longest inputs first; every row is in one batch.

    A batch, padded to its longest input, has at most `max_tokens` tokens, or only one input. The
    longest inputs come first, so that a batch that does not fit into memory fails at once. Inputs
    of equal length keep their order.

    With `min_tokens`, all inputs of a batch have the same padded length, and the batch has at least
    that many tokens; if there are too few inputs, rows are repeated (see `BATCH_INVARIANT_TOKENS`).
    With `mix_lengths`, shorter inputs are added before rows are repeated, which is cheaper.
    """
    sorted_rows = np.argsort(-np.asarray(lengths, np.int64), kind="stable")
    # (n,) padded lengths, descending.
    widths = np.array([pad_length(int(lengths[row])) for row in sorted_rows], np.int64)
    first_row = 0
    while first_row < len(sorted_rows):
        width = int(widths[first_row])
        end = first_row + max(1, max_tokens // width)
        min_rows = -(-min_tokens // width)
        rows = sorted_rows[first_row:end][widths[first_row:end] == width] if min_tokens else sorted_rows[first_row:end]
        if mix_lengths and len(rows) < min_rows:
            rows = sorted_rows[first_row : min(end, first_row + min_rows)]
        first_row += len(rows)
        yield np.resize(rows, max(len(rows), min_rows))  # (b,) -> (>= b,), repeated


def batch_without_padding(lengths: Sequence[int], max_tokens: int) -> Iterator[npt.NDArray[np.int64]]:
    """Yield batches of row numbers for packed inputs, longest inputs first; every row is in one
    batch.

    A batch has at most `max_tokens` tokens without padding, or only one input. Inputs of equal
    length are adjacent.
    """
    sorted_rows = np.argsort(-np.asarray(lengths, np.int64), kind="stable")
    token_ends = np.cumsum(np.asarray(lengths, np.int64)[sorted_rows])  # (n,) cumulative number of tokens
    first_row, n_tokens_done = 0, 0
    while first_row < len(sorted_rows):
        end_row = max(first_row + 1, int(np.searchsorted(token_ends, n_tokens_done + max_tokens, side="right")))
        yield sorted_rows[first_row:end_row]
        first_row, n_tokens_done = end_row, int(token_ends[end_row - 1])


def run_batches(batches: Iterable[Rows], compute: Callable[[Rows], _Result]) -> Iterator[tuple[Rows, _Result]]:
    """Yield (row numbers, result of `compute`) for each batch, in order.

    If a batch does not fit into the GPU's memory, it and all later batches are halved. Because the
    longest inputs come first (`batch_by_length`), a few attempts find a size that fits.

    Raises:
        ResourceError: a batch of one input does not fit.
    """
    pending_batches = deque(batches)
    while pending_batches:
        batch_rows = pending_batches.popleft()
        try:
            batch_result = compute(batch_rows)
        except _get_out_of_memory_errors() as error:
            if len(batch_rows) == 1:
                raise ResourceError(
                    "the model and one text do not fit into the GPU's memory: end other programs "
                    "on this GPU, lower the encoder's max_length, or set CUDA_VISIBLE_DEVICES to "
                    "another GPU"
                ) from error
        else:
            yield batch_rows, batch_result
            continue
        # Done after the handler, because the exception keeps the tensors of the failed attempt
        # alive.
        sys.modules["torch"].cuda.empty_cache()
        _log.warning("a batch of %d texts does not fit into the GPU's memory: batches are halved", len(batch_rows))
        pending_batches = deque(
            half_batch
            for batch in (batch_rows, *pending_batches)
            for half_batch in np.array_split(batch, 2)
            if len(half_batch)
        )


def _get_out_of_memory_errors() -> tuple[type[Exception], ...]:
    """Return a tuple of torch's out-of-memory error class; empty if torch is not loaded."""
    torch = sys.modules.get("torch")
    return () if torch is None else (torch.OutOfMemoryError,)
