"""Words are bounded, and joined they are the text."""

from hypothesis import given

from rag_model.corpus.chunkers.registry import build_chunker
from rag_model.corpus.chunkers.words import LONGEST, split_token, split_words
from rag_model.corpus.records import Article, Section
from tests.fixtures.hostile_texts import TEXTS


def test_scripts_without_blanks_are_cut_too() -> None:
    text = "日本の首都は東京である。" * 30
    passages = list(build_chunker("words", {"words": 50}).open()(Article("1", 0, "東京", (Section("", text),))))
    assert "".join(p.text for p in passages) == text
    assert len(passages) > 3
    assert split_words("ein 東京 Wort") == [" ein", " 東京", " Wort"]


def test_a_word_of_two_megabytes_is_many() -> None:
    text = "w" * 2_000_000
    words = split_words(f"a {text}")
    assert (words[:2], words[2:]) == ([" a", " " + "w" * LONGEST], ["w" * LONGEST] * 19_999)
    passages = list(build_chunker("sections", {}).open()(Article("1", 0, "T", (Section("", text),))))
    assert max(len(passage.text) for passage in passages) == 100 * LONGEST


@given(TEXTS)
def test_joined_they_are_the_text(text: str) -> None:
    words = split_words(text)
    assert "".join(words).strip() == " ".join(text.split())
    assert all(0 < len(word.strip()) <= LONGEST for word in words)
    assert words == [word for token in text.split() for word in split_token(token)]
