"""Words that are looked up have the ids that the tokenizer gives to the whole text, or are not looked up."""

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
ODD = [*SPECIAL, " ", "  ", "\n", "\t", ".", "a<s>b", MARK, "é", "\u0301", "漢", "🙂", "\x00", "\xa0"]
TEXT = st.lists(st.sampled_from([*" ".join(CORPUS).split(), *ODD]) | st.text(max_size=3)).flatmap(
    lambda some: st.sampled_from([" ".join(some), "".join(some)])
)


def trained(model: Any, trainer: Any, normalizer: Any = None, splitter: Any = None) -> Tokenizer:
    tokenizer = Tokenizer(model)
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    if splitter is not None:
        tokenizer.pre_tokenizer = splitter
    tokenizer.train_from_iterator(CORPUS * 3, trainer)
    return tokenizer


def llama() -> Tokenizer:
    """SentencePiece's BPE as Llama 2 has it: nothing is split before the merges."""
    rules = json.loads(
        trained(
            models.BPE(unk_token="<unk>"),
            trainers.BpeTrainer(vocab_size=120, special_tokens=["<unk>", "<s>"], show_progress=False),
            splitter=pre_tokenizers.Metaspace(),
        ).to_str()
    )
    marks = [{"type": "Prepend", "prepend": MARK}, {"type": "Replace", "pattern": {"String": " "}, "content": MARK}]
    return Tokenizer.from_str(
        json.dumps({**rules, "pre_tokenizer": None, "normalizer": {"type": "Sequence", "normalizers": marks}})
    )


def wordpiece(**given: Any) -> Tokenizer:
    return trained(
        models.WordPiece(unk_token="[UNK]"),
        trainers.WordPieceTrainer(vocab_size=120, special_tokens=["[UNK]", "[SEP]"], show_progress=False),
        normalizers.BertNormalizer(**given),
        pre_tokenizers.BertPreTokenizer(),
    )


def levels() -> Tokenizer:
    return trained(
        models.WordLevel(unk_token="<unk>"),
        trainers.WordLevelTrainer(special_tokens=["<unk>"], show_progress=False),
        normalizers.Sequence([normalizers.NFKD(), normalizers.StripAccents(), normalizers.Lowercase()]),
        pre_tokenizers.Sequence([pre_tokenizers.Whitespace(), pre_tokenizers.Digits(individual_digits=True)]),
    )


def unigram() -> Tokenizer:
    return trained(
        models.Unigram(),
        trainers.UnigramTrainer(vocab_size=90, special_tokens=["<unk>", "<s>"], unk_token="<unk>", show_progress=False),
        normalizers.NFKC(),
        pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace()]),
    )


KINDS: dict[str, tuple[Callable[[], Tokenizer], str]] = {
    "uncased": (wordpiece, "spaces"),
    "cased": (lambda: wordpiece(lowercase=False, strip_accents=False), "spaces"),
    "levels": (levels, "spaces"),
    "llama": (llama, "marks"),
    "unigram": (unigram, "marks"),
}


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=150)
@given(texts=st.lists(TEXT, max_size=6))
def test_ids_are_those_of_the_whole_text(kind: str, texts: list[str]) -> None:
    tokenizer, words = KNOWN[kind]
    expected = [tokenizer.encode(text, add_special_tokens=False).ids for text in texts]
    assert [line.tolist() for line in words.tokenize(texts)] == expected


def made(kind: str) -> tuple[Tokenizer, WordTokenizer]:
    make, wanted = KINDS[kind]
    tokenizer = make()
    own = find_word_separation(json.loads(tokenizer.to_str()))
    assert own == wanted
    added = frozenset(tokenizer.get_added_tokens_decoder())
    return tokenizer, WordTokenizer(tokenizer, TextLimits(10**6), own, find_word_boundaries(tokenizer, own), added)


KNOWN = {kind: made(kind) for kind in KINDS}


def changed(make: Callable[[], Tokenizer], change: Callable[[Rules], Any]) -> Rules:
    rules: Rules = json.loads(make().to_str())
    change(rules)
    return rules


@pytest.mark.parametrize(
    "rules",
    [
        changed(wordpiece, lambda own: own["added_tokens"].append({"content": "New York"})),
        changed(wordpiece, lambda own: own.update(pre_tokenizer=None)),
        changed(wordpiece, lambda own: own.update(pre_tokenizer={"type": "ByteLevel", "add_prefix_space": True})),
        changed(wordpiece, lambda own: own.update(pre_tokenizer={"type": "Punctuation", "behavior": "Isolated"})),
        changed(wordpiece, lambda own: own.update(normalizer={"type": "Precompiled", "precompiled_charsmap": ""})),
        changed(llama, lambda own: own["model"]["vocab"].update({f"a{MARK}b": 999})),
        changed(llama, lambda own: own["model"].update(ignore_merges=True)),
        changed(llama, lambda own: own["model"]["vocab"].pop(MARK)),
        changed(llama, lambda own: own["normalizer"]["normalizers"].pop()),
        changed(unigram, lambda own: own["pre_tokenizer"]["pretokenizers"][1].update(prepend_scheme="never")),
        changed(unigram, lambda own: own["pre_tokenizer"]["pretokenizers"][1].update(split=False)),
    ],
)
def test_a_tokenizer_whose_words_touch_is_not_looked_up(rules: Rules) -> None:
    assert find_word_separation(rules) is None


def test_texts_of_such_a_tokenizer_are_split_whole() -> None:
    tokenizer = wordpiece()
    tokenizer.normalizer = normalizers.Replace(Regex(r"king of"), "war")
    tokenizer.add_tokens([AddedToken("the river")])
    assert find_word_separation(json.loads(tokenizer.to_str())) is None
    texts = ["the king of the river city", "music"]
    expected = [tokenizer.encode(text, add_special_tokens=False).ids for text in texts]
    assert [line.tolist() for line in WordTokenizer(tokenizer, TextLimits(99), None).tokenize(texts)] == expected


def test_texts_are_cut_and_unknown_tokens_left_out_in_model2vecs_order() -> None:
    tokenizer, _ = KNOWN["uncased"]
    unknown = tokenizer.token_to_id("[UNK]")
    words = WordTokenizer(tokenizer, TextLimits(3, 14, unknown), "spaces")
    ids = tokenizer.encode("☃ king river c", add_special_tokens=False).ids
    assert ids[0] == unknown
    assert words.tokenize(["☃ king river city", ("☃ king", "river city")])[0].tolist() == ids[1:4]
    assert words.tokenize([("☃ king", "river city")])[0].tolist() == ids[1:4]


def test_what_is_remembered_is_bounded_and_rare_words_are_forgotten_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MAX_CACHED_WORDS", 4)
    tokenizer, _ = KNOWN["uncased"]
    words = WordTokenizer(tokenizer, TextLimits(99), "spaces")
    for number in range(50):
        text = f"king {number} river{number}"
        assert words.tokenize([text])[0].tolist() == tokenizer.encode(text, add_special_tokens=False).ids
        held = {*words._recent_words, *words._older_words}
        assert len(held) < 12
        assert "king" in held


def test_new_words_are_split_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_WORDS_PER_TEXT", 3)
    for kind, make in KINDS.items():
        tokenizer, words = made(kind)
        assert words.boundaries is not None or make[0] is levels
        text = " ".join([*CORPUS, "[SEP] a[SEP]b <s> x<unk> rivers' zzz", *SPECIAL])
        for own in (text, "king"):
            assert words.tokenize([own])[0].tolist() == tokenizer.encode(own, add_special_tokens=False).ids


@pytest.mark.parametrize("kind", KINDS)
def test_unknown_tokens_of_words_that_are_split_together_are_left_out(kind: str) -> None:
    tokenizer, words = made(kind)
    text = "king river zzz city"
    unknown = tokenizer.encode(text, add_special_tokens=False).ids[1]  # any token serves
    own = WordTokenizer(tokenizer, TextLimits(99, None, unknown), words.separation, words.boundaries, words.added_ids)
    for one in (text, "king city"):
        ids = tokenizer.encode(one, add_special_tokens=False).ids
        assert own.tokenize([one])[0].tolist() == [number for number in ids if number != unknown]


def test_texts_without_spaces_are_not_remembered() -> None:
    tokenizer, _ = KNOWN["uncased"]
    words, text = WordTokenizer(tokenizer, TextLimits(99), "spaces"), "king" * 17
    assert words.tokenize([text])[0].tolist() == tokenizer.encode(text, add_special_tokens=False).ids
    words.tokenize(["king"])
    assert [*words._recent_words] == ["king"]


def test_a_tokenizer_that_fails_is_named(tmp_path: Path) -> None:
    file = tmp_path / "tokenizer.json"
    file.write_text(json.dumps(changed(levels, lambda own: own["model"].update(unk_token="absent"))))
    with pytest.raises(module.InputError, match="cannot split a text"):
        WordTokenizer(Tokenizer.from_file(str(file)), TextLimits(99), "spaces").tokenize(["absent words"])
