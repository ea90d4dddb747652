"""Every chunker keeps the contract, whatever the text."""

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from rag_model.corpus.chunkers.chunker import MAX_HEADING, Chunker
from rag_model.corpus.chunkers.registry import build_chunker
from rag_model.corpus.chunkers.words import LONGEST, split_words
from rag_model.corpus.records import Article, Passage, Section
from tests.fixtures.counted import lines_run
from tests.fixtures.hostile_texts import ARTICLES
from tests.fixtures.overlapping import Overlapping, save_tokenizer

SIZES = st.integers(1, 12)
BY_WORDS = ["words", "sections", "sentences", "recursive"]


def keeps(chunker: Chunker, article: Article) -> list[Passage]:
    """Hold the passages of an article to the contract, but for the bound, whose unit is the chunker's own."""
    passages = list(chunker.open()(article))
    line = " ".join(" ".join(section.text for section in article.sections).split())
    reached = 0
    for passage in passages:
        assert passage.text
        furthest = reached + line.startswith(" ", reached)  # words repeat: the last place that fits is right
        at = line.rfind(passage.text, 0, furthest + len(passage.text))
        assert at >= 0
        assert not line[reached:at].strip(), "nothing is left out"
        assert len(passage.text) <= passage.n_words * (LONGEST + 1), "bounded in characters"
        assert len(passage.section) <= MAX_HEADING
        reached = max(reached, at + len(passage.text))
    assert not line[reached:].strip()
    assert len({passage.id for passage in passages}) == len(passages)
    assert all(passage.id.split() == [passage.id] and passage.id.startswith("12:") for passage in passages)
    assert list(chunker.open()(article)) == passages
    return passages


@pytest.mark.parametrize("name", BY_WORDS)
@given(article=ARTICLES, size=SIZES)
def test_chunkers_by_words(name: str, article: Article, size: int) -> None:
    passages = keeps(build_chunker(name, {"words": size}), article)
    assert all(0 < passage.n_words <= size for passage in passages)


@pytest.mark.parametrize("name", ["words", "sentences", "recursive"])
@given(article=ARTICLES, size=SIZES)
def test_word_numbers_give_the_text_back(name: str, article: Article, size: int) -> None:
    words = [word for section in article.sections for word in split_words(section.text)]
    passages = list(build_chunker(name, {"words": size}).open()(article))
    spans = [(passage.start_word, passage.start_word + passage.n_words) for passage in passages]
    assert [at for span in spans for at in range(*span)] == list(range(len(words))), "disjoint, and all words"
    assert ["".join(words[start:end]).strip() for start, end in spans] == [passage.text for passage in passages]


def hostile(name: str) -> Callable[[int], Article]:
    """Return a function that makes an article of a size in proportion to a number."""

    def article(times: int) -> Article:
        texts: dict[str, Sequence[Section]] = {
            "equal headings": [Section("a", "x")] * times,
            "a long word": [Section("", "w" * 100 * times)],
            "a run of marks": [Section("", "日" * 12 + "。" * 50 * times)],
            "short sentences": [Section("", "He is. " * times)],
            "short and long": [Section("", ("Yes. " + "word " * 150 + "end. ") * (times // 10))],
            "blank lines": [Section("", "\n" * 100 * times + "x")],
            "nested boundaries": [Section("h", "One two. Three.\nFour\n\n")] * times,
        }
        return Article("12", 0, "Ada", tuple(texts[name]))

    return article


HOSTILE = ["equal headings", "a long word", "a run of marks", "short sentences", "short and long", "blank lines"]


@pytest.mark.parametrize("text", [*HOSTILE, "nested boundaries"])
@pytest.mark.parametrize("name", BY_WORDS)
def test_twice_the_text_takes_twice_the_work(name: str, text: str) -> None:
    cut, article = build_chunker(name, {}).open(), hostile(text)
    once, twice = (lines_run(lambda times=times: list(cut(article(times)))) for times in (400, 800))
    assert twice <= 2.2 * once


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    save_tokenizer(path, "[UNK]")
    return path


@given(article=ARTICLES, size=SIZES, overlap=st.integers(0, 11))
def test_overlapping_windows_of_tokens(tokenizer: Path, article: Article, size: int, overlap: int) -> None:
    chunker = Overlapping(tokenizer, size, min(overlap, size - 1))
    passages = keeps(chunker, article)
    read = Tokenizer.from_file(str(tokenizer))
    counts = [len(read.encode(passage.text).ids) for passage in passages]
    assert all(count <= size for count in counts)
    words = [word for section in article.sections for word in split_words(section.text)]
    whole = sum(len(read.encode(word).ids) for word in words)
    assert sum(counts) <= whole + chunker.overlap * max(0, len(counts) - 1)
