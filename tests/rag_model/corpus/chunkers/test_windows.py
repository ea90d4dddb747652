"""Chunkers split an article into disjoint passages that cover its words in order."""

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from rag_model.corpus.chunkers.article_words import SENTENCE, split_article
from rag_model.corpus.chunkers.chunker import create_anchor
from rag_model.corpus.chunkers.windows import Sections, Sentences, Words
from rag_model.corpus.records import Article, Passage, Section
from tests.fixtures.hostile_texts import ARTICLES as HOSTILE_ARTICLES

WORDS = ["a", "b.", "The", "end.", "1990", "Dr.", "x_y", "Życie", "Ωμέγα", "ab.cd", "...", "_", "٣", "éé"]
TEXTS = st.lists(st.sampled_from(WORDS), max_size=40).map(" ".join)
HEADINGS = st.sampled_from(["Life", "Works", "Early life", "Życie", "Life 2"])
SECTIONS = st.lists(st.builds(Section, HEADINGS, TEXTS), max_size=6).map(tuple)
ARTICLES = st.builds(Article, st.just("12"), st.just(7), st.just("Ada"), SECTIONS)
SIZES = st.integers(min_value=1, max_value=12)


def split_texts(*texts: str) -> list[str]:
    return " ".join(texts).split()


def test_words_chunker_splits_like_dpr() -> None:
    text = " ".join(f"w{i}" for i in range(250))
    article = Article(
        "12", 7, "Ada", (Section("", text[: text.index(" w150")]), Section("Life", text[text.index("w150") :]))
    )
    passages = list(Words()(article))
    assert [(p.id, p.section, p.start_word, p.n_words) for p in passages] == [
        ("12:0", "", 0, 100),
        ("12:1", "", 100, 100),
        ("12:2", "Life", 200, 50),
    ]
    assert passages[2].text == " ".join(f"w{i}" for i in range(200, 250))
    assert passages[0].title == "Ada"
    assert passages[0].hash == Passage.hash_of("Ada", passages[0].text)


def test_sections_chunker_restarts_at_each_heading() -> None:
    sections = (Section("", "a b c"), Section("Early life", "d e"), Section("Early life", "f"))
    passages = list(Sections(words=2)(Article("12", 7, "Ada", sections)))
    assert [(p.id, p.section, p.text, p.start_word) for p in passages] == [
        ("12:0", "", "a b", 0),
        ("12:1", "", "c", 2),
        ("12:Early_life.0", "Early life", "d e", 0),
        ("12:Early_life_2.0", "Early life", "f", 0),
    ]


@given(ARTICLES, SIZES)
def test_words_chunker_covers_all_words_in_order(article: Article, size: int) -> None:
    passages = list(Words(size)(article))
    assert split_texts(*(p.text for p in passages)) == split_texts(*(s.text for s in article.sections))
    assert all(p.n_words == size for p in passages[:-1])
    assert all(0 < p.n_words <= size and p.n_words == len(p.text.split()) for p in passages)
    assert [p.start_word for p in passages] == [i * size for i in range(len(passages))]


@given(ARTICLES, SIZES)
def test_sections_chunker_covers_all_sections_in_order(article: Article, size: int) -> None:
    passages = list(Sections(size)(article))
    assert split_texts(*(p.text for p in passages)) == split_texts(*(s.text for s in article.sections))
    assert all(0 < p.n_words <= size for p in passages)
    starts = [i for i, p in enumerate(passages) if p.start_word == 0]
    assert len(starts) == sum(bool(section.text) for section in article.sections)


@given(ARTICLES.filter(lambda article: article.sections), SIZES, TEXTS, st.data())
def test_edit_changes_only_its_own_section(article: Article, size: int, text: str, data: st.DataObject) -> None:
    edited_number = data.draw(st.integers(0, len(article.sections) - 1))
    sections = list(article.sections)
    sections[edited_number] = replace(sections[edited_number], text=text)
    edited_passages = list(Sections(size)(replace(article, sections=tuple(sections))))
    used_anchors: dict[str, int] = {}
    prefix = [create_anchor(section.heading, used_anchors) for section in sections][edited_number]
    other_passages = [p for p in Sections(size)(article) if not p.id.startswith(f"12:{prefix}.")]
    assert [p for p in edited_passages if not p.id.startswith(f"12:{prefix}.")] == other_passages


@given(ARTICLES, SIZES, TEXTS)
def test_inserted_section_changes_no_other_section(article: Article, size: int, text: str) -> None:
    longer = replace(article, sections=(Section("Brand new", text), *article.sections))
    passages_before = set(Sections(size)(article))
    assert passages_before <= set(Sections(size)(longer))


def test_passage_has_as_many_sentences_as_fit() -> None:
    text = "One two three. Four five. Six seven eight nine ten. Eleven."
    sections = (Section("", text), Section("Life", "Born. Died."))
    passages = list(Sentences(5)(Article("12", 7, "Ada", sections)))
    assert [(p.id, p.text, p.start_word) for p in passages] == [
        ("12:0", "One two three. Four five.", 0),
        ("12:1", "Six seven eight nine ten.", 5),
        ("12:2", "Eleven.", 10),
        ("12:Life.0", "Born. Died.", 11),
    ]


def test_long_sentence_is_split_between_words() -> None:
    passages = list(Sentences(3)(Article("12", 7, "Ada", (Section("", "All. One two three four five. End."),))))
    assert [p.text for p in passages] == ["All.", "One two three", "four five. End."]


@given(HOSTILE_ARTICLES, st.integers(1, 12))
def test_no_passage_ends_inside_a_sentence_that_fits(article: Article, words: int) -> None:
    article_words = split_article(article)
    sentences = list(article_words.split_at((0, len(article_words.words)), SENTENCE))
    ends = {end for _, end in sentences}
    long_sentences = [(start, end) for start, end in sentences if end - start > words]
    for passage in Sentences(words)(article):
        end = passage.start_word + passage.n_words
        assert end in ends or any(start < end < end_of_sentence for start, end_of_sentence in long_sentences)
