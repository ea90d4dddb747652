"""An article's words are those of its sections, and each boundary between words has a strength."""

import pytest
from hypothesis import given

from rag_model.corpus.chunkers.article_words import (
    HEADING,
    INSIDE,
    LINE,
    MAX_WORD_LENGTH,
    PARAGRAPH,
    SENTENCE,
    WORD,
    split_article,
    split_token,
    split_words,
)
from rag_model.corpus.chunkers.chunker import build_chunker
from rag_model.corpus.records import Article, Section
from tests.fixtures.hostile_texts import ARTICLES, TEXTS


def test_strength_of_a_boundary_depends_on_the_text_before_the_word() -> None:
    first = Section("", "\nOne two. Three\nFour\n \nFive\nsix")
    article = Article("1", 0, "T", (first, Section("h", "Seven " + "w" * 150)))
    article_words = split_article(article)
    pairs = zip(article_words.words, article_words.breaks, strict=True)
    strengths = {word.strip()[:5]: strength for word, strength in pairs}
    assert strengths == {
        "One": HEADING,
        "two.": WORD,
        "Three": SENTENCE,
        "Four": LINE,
        "Five": PARAGRAPH,
        "six": WORD,
        "Seven": HEADING,
        "wwwww": INSIDE,
    }
    assert article_words.breaks[-2:] == [WORD, INSIDE]


@given(ARTICLES)
def test_words_of_an_article_are_those_of_its_sections(article: Article) -> None:
    article_words = split_article(article)
    split = [split_words(section.text) for section in article.sections]
    assert list(article_words.words) == [word for words in split for word in words]
    assert list(article_words.section_numbers) == [number for number, words in enumerate(split) for _ in words]
    assert len(article_words.breaks) == len(article_words.words)


def test_scripts_without_spaces_are_split() -> None:
    text = "日本の首都は東京である。" * 30
    passages = list(build_chunker("words", {"words": 50}).open()(Article("1", 0, "東京", (Section("", text),))))
    assert "".join(p.text for p in passages) == text
    assert len(passages) > 3
    assert split_words("ein 東京 Wort") == [" ein", " 東京", " Wort"]


def test_word_of_two_megabytes_is_split() -> None:
    text = "w" * 2_000_000
    words = split_words(f"a {text}")
    assert (words[:2], words[2:]) == ([" a", " " + "w" * MAX_WORD_LENGTH], ["w" * MAX_WORD_LENGTH] * 19_999)
    passages = list(build_chunker("sections", {}).open()(Article("1", 0, "T", (Section("", text),))))
    assert max(len(passage.text) for passage in passages) == 100 * MAX_WORD_LENGTH


@given(TEXTS)
def test_joined_words_give_the_text(text: str) -> None:
    words = split_words(text)
    assert "".join(words).strip() == " ".join(text.split())
    assert all(0 < len(word.strip()) <= MAX_WORD_LENGTH for word in words)
    assert words == [word for token in text.split() for word in split_token(token)]


def split_sentences(text: str) -> list[str]:
    article_words = split_article(Article("1", 0, "T", (Section("", text),)))
    return [article_words.join_text(span) for span in article_words.split_at((0, len(article_words.words)), SENTENCE)]


@pytest.mark.parametrize(
    "expected",
    [
        ["It ended.", "Then it began."],
        ["Dr. Jones met Mrs. Smith on Sept. 5 in St. Louis.", "They left."],
        ["J. R. R. Tolkien and George W. Bush never met.", "(So it seems.)", "They might have!"],
        ["He moved to the U.S. Senate, e.g. in No. 12, cf. Fig. 3.4 of vol. 2."],
        ['"Is it?" she asked.', '"It is."', "He nodded."],
        ["Wait … what?", "Well...", "Perhaps.", "No."],
        ["It costs 3.5 million.", "In 1990.", "2000 came later."],
        ["Am 3. Oktober 1990 trat die DDR bei, bzw. sie trat aus.", "Das war z. B. in Berlin."],
        ["¿Dónde está?", "¡Aquí!", "«C'est vrai.»", "Il a dit : non."],
        ["Yahoo! is a company.", "Who? me?", "Yes."],
        ["Он родился в 1799 г. в Москве.", "Умер в 1837."],
        ["यह एक वाक्य है।", "यह दूसरा है।"],
        ["هل هذا صحيح؟", "نعم هذا صحيح۔", "انتهى"],
        ["ይህ ነው።", "ሌላ ነው።"],
    ],
    ids=lambda expected: expected[0][:20],
)
def test_scripts_with_spaces_are_split_into_sentences(expected: list[str]) -> None:
    assert split_sentences(" ".join(expected)) == expected


def test_scripts_without_spaces_are_split_into_sentences() -> None:
    expected = ["日本の首都は東京である。", "「本当ですか？」", "はい、そうです！", "次の文はここで終わります"]
    assert split_sentences("".join(expected)) == expected


def test_lines_end_sentences_unless_they_are_wrapped() -> None:
    text = "Cities:\nRome\nParis\n\nThe line was wrapped\nby an editor.\nthe next was not"
    expected = ["Cities:", "Rome", "Paris", "The line was wrapped by an editor.", "the next was not"]
    assert split_sentences(text) == expected
