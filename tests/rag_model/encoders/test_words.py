"""Cached words have the ids that the tokenizer gives to the whole text; other tokenizers use no cache."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers, trainers

from rag_model.encoders import tokens as module
from rag_model.encoders.tokens import TextLimits, WordTokenizer, find_word_boundaries, find_word_separation

CORPUS = ["the king of the river city wrote music", "a theory, of war: the war's 12 rivers", "Ünïcodé kings (and 漢字)"]
SPECIAL = ["<unk>", "<s>", "[SEP]"]
MARK = "▁"
Rules = dict[str, Any]
UNUSUAL = [*SPECIAL, " ", "  ", "\n", "\t", ".", "a<s>b", MARK, "é", "\u0301", "漢", "🙂", "\x00", "\xa0"]
TEXT = st.lists(st.sampled_from([*" ".join(CORPUS).split(), *UNUSUAL]) | st.text(max_size=3)).flatmap(
    lambda words: st.sampled_from([" ".join(words), "".join(words)])
)


def train_tokenizer(model: Any, trainer: Any, normalizer: Any = None, splitter: Any = None) -> Tokenizer:
    tokenizer = Tokenizer(model)
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    if splitter is not None:
        tokenizer.pre_tokenizer = splitter
    tokenizer.train_from_iterator(CORPUS * 3, trainer)
    return tokenizer


def llama() -> Tokenizer:
    """Train SentencePiece's BPE like that of Llama 2, which does not split texts before the merges."""
    rules = json.loads(
        train_tokenizer(
            models.BPE(unk_token="<unk>"),
            trainers.BpeTrainer(vocab_size=120, special_tokens=["<unk>", "<s>"], show_progress=False),
            splitter=pre_tokenizers.Metaspace(),
        ).to_str()
    )
    marks = [{"type": "Prepend", "prepend": MARK}, {"type": "Replace", "pattern": {"String": " "}, "content": MARK}]
    return Tokenizer.from_str(
        json.dumps({**rules, "pre_tokenizer": None, "normalizer": {"type": "Sequence", "normalizers": marks}})
    )


def wordpiece(**options: Any) -> Tokenizer:
    return train_tokenizer(
        models.WordPiece(unk_token="[UNK]"),
        trainers.WordPieceTrainer(vocab_size=120, special_tokens=["[UNK]", "[SEP]"], show_progress=False),
        normalizers.BertNormalizer(**options),
        pre_tokenizers.BertPreTokenizer(),
    )


def word_level() -> Tokenizer:
    return train_tokenizer(
        models.WordLevel(unk_token="<unk>"),
        trainers.WordLevelTrainer(special_tokens=["<unk>"], show_progress=False),
        normalizers.Sequence([normalizers.NFKD(), normalizers.StripAccents(), normalizers.Lowercase()]),
        pre_tokenizers.Sequence([pre_tokenizers.Whitespace(), pre_tokenizers.Digits(individual_digits=True)]),
    )


def unigram() -> Tokenizer:
    return train_tokenizer(
        models.Unigram(),
        trainers.UnigramTrainer(vocab_size=90, special_tokens=["<unk>", "<s>"], unk_token="<unk>", show_progress=False),
        normalizers.NFKC(),
        pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace()]),
    )


KINDS: dict[str, tuple[Callable[[], Tokenizer], str]] = {
    "uncased": (wordpiece, "spaces"),
    "cased": (lambda: wordpiece(lowercase=False, strip_accents=False), "spaces"),
    "levels": (word_level, "spaces"),
    "llama": (llama, "marks"),
    "unigram": (unigram, "marks"),
}


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=150)
@given(texts=st.lists(TEXT, max_size=6))
def test_ids_are_those_of_the_whole_text(kind: str, texts: list[str]) -> None:
    tokenizer, words = TOKENIZERS[kind]
    expected = [tokenizer.encode(text, add_special_tokens=False).ids for text in texts]
    assert [ids.tolist() for ids in words.tokenize(texts)] == expected


def build_word_tokenizer(kind: str) -> tuple[Tokenizer, WordTokenizer]:
    train, expected_separation = KINDS[kind]
    tokenizer = train()
    separation = find_word_separation(json.loads(tokenizer.to_str()))
    assert separation == expected_separation
    added = frozenset(tokenizer.get_added_tokens_decoder())
    boundaries = find_word_boundaries(tokenizer, separation)
    return tokenizer, WordTokenizer(tokenizer, TextLimits(10**6), separation, boundaries, added)


TOKENIZERS = {kind: build_word_tokenizer(kind) for kind in KINDS}


def edit(train: Callable[[], Tokenizer], change: Callable[[Rules], Any]) -> Rules:
    rules: Rules = json.loads(train().to_str())
    change(rules)
    return rules


@pytest.mark.parametrize(
    "rules",
    [
        edit(wordpiece, lambda rules: rules["added_tokens"].append({"content": "New York"})),
        edit(wordpiece, lambda rules: rules.update(pre_tokenizer=None)),
        edit(wordpiece, lambda rules: rules.update(pre_tokenizer={"type": "ByteLevel", "add_prefix_space": True})),
        edit(wordpiece, lambda rules: rules.update(pre_tokenizer={"type": "Punctuation", "behavior": "Isolated"})),
        edit(wordpiece, lambda rules: rules.update(normalizer={"type": "Precompiled", "precompiled_charsmap": ""})),
        edit(llama, lambda rules: rules["model"]["vocab"].update({f"a{MARK}b": 999})),
        edit(llama, lambda rules: rules["model"].update(ignore_merges=True)),
        edit(llama, lambda rules: rules["model"]["vocab"].pop(MARK)),
        edit(llama, lambda rules: rules["normalizer"]["normalizers"].pop()),
        edit(unigram, lambda rules: rules["pre_tokenizer"]["pretokenizers"][1].update(prepend_scheme="never")),
        edit(unigram, lambda rules: rules["pre_tokenizer"]["pretokenizers"][1].update(split=False)),
    ],
)
def test_words_of_a_tokenizer_without_word_boundaries_are_not_cached(rules: Rules) -> None:
    assert find_word_separation(rules) is None


def test_texts_of_a_tokenizer_without_word_boundaries_are_split_whole() -> None:
    tokenizer = wordpiece()
    tokenizer.normalizer = normalizers.Replace(Regex(r"king of"), "war")
    tokenizer.add_tokens([AddedToken("the river")])
    assert find_word_separation(json.loads(tokenizer.to_str())) is None
    texts = ["the king of the river city", "music"]
    expected = [tokenizer.encode(text, add_special_tokens=False).ids for text in texts]
    assert [ids.tolist() for ids in WordTokenizer(tokenizer, TextLimits(99), None).tokenize(texts)] == expected


def test_texts_are_truncated_before_unknown_tokens_are_left_out() -> None:
    tokenizer, _ = TOKENIZERS["uncased"]
    unknown = tokenizer.token_to_id("[UNK]")
    words = WordTokenizer(tokenizer, TextLimits(3, 14, unknown), "spaces")
    ids = tokenizer.encode("☃ king river c", add_special_tokens=False).ids
    assert ids[0] == unknown
    assert words.tokenize(["☃ king river city", ("☃ king", "river city")])[0].tolist() == ids[1:4]
    assert words.tokenize([("☃ king", "river city")])[0].tolist() == ids[1:4]


def test_word_cache_is_bounded_and_drops_rare_words_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MAX_CACHED_WORDS", 4)
    tokenizer, _ = TOKENIZERS["uncased"]
    words = WordTokenizer(tokenizer, TextLimits(99), "spaces")
    for number in range(50):
        text = f"king {number} river{number}"
        assert words.tokenize([text])[0].tolist() == tokenizer.encode(text, add_special_tokens=False).ids
        cached_words = {*words._recent_words, *words._older_words}
        assert len(cached_words) < 12
        assert "king" in cached_words


def test_new_words_are_split_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_WORDS_PER_TEXT", 3)
    for kind, (train, _) in KINDS.items():
        tokenizer, words = build_word_tokenizer(kind)
        assert words.boundaries is not None or train is word_level
        text = " ".join([*CORPUS, "[SEP] a[SEP]b <s> x<unk> rivers' zzz", *SPECIAL])
        for line in (text, "king"):
            assert words.tokenize([line])[0].tolist() == tokenizer.encode(line, add_special_tokens=False).ids


@pytest.mark.parametrize("kind", KINDS)
def test_unknown_tokens_of_words_that_are_split_together_are_left_out(kind: str) -> None:
    tokenizer, words = build_word_tokenizer(kind)
    text = "king river zzz city"
    unknown = tokenizer.encode(text, add_special_tokens=False).ids[1]  # stands for the unknown token
    limits = TextLimits(99, None, unknown)
    known_words = WordTokenizer(tokenizer, limits, words.separation, words.boundaries, words.added_ids)
    for line in (text, "king city"):
        ids = tokenizer.encode(line, add_special_tokens=False).ids
        assert known_words.tokenize([line])[0].tolist() == [number for number in ids if number != unknown]


def test_long_words_are_not_cached() -> None:
    tokenizer, _ = TOKENIZERS["uncased"]
    words, text = WordTokenizer(tokenizer, TextLimits(99), "spaces"), "king" * 17
    assert words.tokenize([text])[0].tolist() == tokenizer.encode(text, add_special_tokens=False).ids
    words.tokenize(["king"])
    assert [*words._recent_words] == ["king"]


def test_a_tokenizer_that_fails_is_named(tmp_path: Path) -> None:
    file = tmp_path / "tokenizer.json"
    rules = edit(word_level, lambda rules: rules["model"].update(unk_token="absent"))
    file.write_text(json.dumps(rules))
    with pytest.raises(module.InputError, match="cannot split a text"):
        WordTokenizer(Tokenizer.from_file(str(file)), TextLimits(99), "spaces").tokenize(["absent words"])
