"""An article's words are those of its sections, and the boundaries between them have a strength."""

from hypothesis import given

from rag_model.corpus.chunkers.running import HEADING, INSIDE, LINE, PARAGRAPH, SENTENCE, WORD, run_together
from rag_model.corpus.chunkers.words import split_words
from rag_model.corpus.records import Article, Section
from tests.fixtures.hostile_texts import ARTICLES


def test_each_boundary_has_its_strength() -> None:
    first = Section("", "\nOne two. Three\nFour\n \nFive\nsix")
    article = Article("1", 0, "T", (first, Section("h", "Seven " + "w" * 150)))
    running = run_together(article)
    told = {word.strip()[:5]: strength for word, strength in zip(running.words, running.breaks, strict=True)}
    assert told == {
        "One": HEADING,
        "two.": WORD,
        "Three": SENTENCE,
        "Four": LINE,
        "Five": PARAGRAPH,
        "six": WORD,
        "Seven": HEADING,
        "wwwww": INSIDE,
    }
    assert running.breaks[-2:] == [WORD, INSIDE]


@given(ARTICLES)
def test_words_are_those_of_the_sections(article: Article) -> None:
    running = run_together(article)
    split = [split_words(section.text) for section in article.sections]
    assert list(running.words) == [word for words in split for word in words]
    assert list(running.sections) == [number for number, words in enumerate(split) for _ in words]
    assert len(running.breaks) == len(running.words)
