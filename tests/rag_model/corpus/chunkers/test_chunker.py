"""Every chunker keeps the contract, whatever the text."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from rag_model.corpus.chunkers.chunker import Chunker
from rag_model.corpus.chunkers.registry import build_chunker
from rag_model.corpus.chunkers.words import split_words
from rag_model.corpus.records import Article, Section
from tests.fixtures.overlapping import Overlapping, save_tokenizer

TEXTS = st.lists(st.from_regex(r"[\w.,]{1,9}", fullmatch=True) | st.just("日本の首都は東京である。日本"), max_size=30)
SECTIONS = st.builds(Section, st.sampled_from(["", "Life", "Early life"]), TEXTS.map(" \n".join))
ARTICLES = st.builds(Article, st.just("12"), st.just(7), st.just("Ada"), st.lists(SECTIONS, max_size=5).map(tuple))
SIZES = st.integers(1, 12)


def keeps(chunker: Chunker, article: Article) -> None:
    """Hold the passages of an article to the contract, but for the bound, whose unit is the chunker's own."""
    passages = list(chunker.open()(article))
    line = " ".join(" ".join(section.text for section in article.sections).split())
    reached = 0
    for passage in passages:
        assert passage.text
        at = line.rfind(passage.text, 0, reached + 1 + len(passage.text))  # words repeat: the last place that fits
        assert at >= 0
        assert not line[reached:at].strip(), "nothing is left out"
        reached = max(reached, at + len(passage.text))
    assert not line[reached:].strip()
    assert len({passage.id for passage in passages}) == len(passages)
    assert all(passage.id.split() == [passage.id] and passage.id.startswith("12:") for passage in passages)
    assert list(chunker.open()(article)) == passages


@pytest.mark.parametrize("name", ["words", "sections"])
@given(article=ARTICLES, size=SIZES)
def test_built_in_chunkers(name: str, article: Article, size: int) -> None:
    chunker = build_chunker(name, {"words": size})
    keeps(chunker, article)
    assert all(0 < passage.n_words <= size for passage in chunker.open()(article))


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    save_tokenizer(path, "[UNK]")
    return path


@given(article=ARTICLES, size=SIZES, overlap=st.integers(0, 11))
def test_overlapping_windows_of_tokens(tokenizer: Path, article: Article, size: int, overlap: int) -> None:
    chunker = Overlapping(tokenizer, size, min(overlap, size - 1))
    keeps(chunker, article)
    read = Tokenizer.from_file(str(tokenizer))
    counts = [len(read.encode(passage.text).ids) for passage in chunker.open()(article)]
    assert all(0 < count <= size for count in counts)
    words = [word for section in article.sections for word in split_words(section.text)]
    whole = sum(len(read.encode(word).ids) for word in words)
    assert sum(counts) <= whole + chunker.overlap * max(0, len(counts) - 1)
