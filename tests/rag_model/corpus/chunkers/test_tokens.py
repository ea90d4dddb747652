"""Windows of tokens are bounded in the tokenizer's own tokens, whatever it makes of a text."""

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers

from rag_model.corpus.chunkers.article_words import split_article
from rag_model.corpus.chunkers.chunker import Chunker, build_chunker
from rag_model.corpus.records import Article, Section
from rag_model.errors import InputError, UsageError
from tests.fixtures.hostile_texts import ARTICLES
from tests.fixtures.work_counters import lines_run
from tests.rag_model.corpus.chunkers.test_chunker import HOSTILE, hostile, keeps

LEAST = 64


def bytes_of() -> Tokenizer:
    """A tokenizer that takes each byte for a token."""
    tokenizer = Tokenizer(
        models.BPE({one: at for at, one in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}, [])
    )
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def compatible_bytes() -> Tokenizer:
    """The same, of texts in NFKC: a letter may become eighteen."""
    tokenizer = bytes_of()
    tokenizer.normalizer = normalizers.NFKC()
    return tokenizer


def one_for_all() -> Tokenizer:
    """A tokenizer that takes a whole text for one token, whatever it is."""
    tokenizer = Tokenizer(models.WordLevel({"[UNK]": 0}, unk_token="[UNK]"))
    tokenizer.enable_truncation(8)
    return tokenizer


@pytest.fixture(
    scope="module",
    params=[bytes_of, compatible_bytes, one_for_all, None],
    ids=["bytes", "compatible bytes", "one for all", "own"],
)
def tokenizer(request: pytest.FixtureRequest, minilm: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Files of tokenizers, and the folder of a real one."""
    if request.param is None:
        return minilm
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    request.param().save(str(path))
    return path


def windows(tokenizer: Path, tokens: int, overlap: int) -> Chunker:
    return build_chunker("tokens", {"tokenizer": str(tokenizer), "tokens": tokens, "overlap": overlap})


def counts(tokenizer: Path, texts: list[str]) -> list[int]:
    read = Tokenizer.from_file(str(tokenizer / "tokenizer.json" if tokenizer.is_dir() else tokenizer))
    read.no_truncation()
    read.no_padding()
    return [len(read.encode(text, add_special_tokens=False).ids) for text in texts]


@settings(max_examples=40)
@given(article=ARTICLES, tokens=st.integers(LEAST, 120), overlap=st.integers(0, 32))
def test_the_contract(tokenizer: Path, article: Article, tokens: int, overlap: int) -> None:
    passages = keeps(windows(tokenizer, tokens, overlap), article)
    assert max(counts(tokenizer, [passage.text for passage in passages]), default=0) <= tokens
    assert max((passage.n_words for passage in passages), default=0) <= tokens


def test_neighbours_share_words_up_to_the_overlap(minilm: Path) -> None:
    words = [f"word{number}" for number in range(400)]
    article = Article("12", 7, "Ada", (Section("", " ".join(words[:150])), Section("Life", " ".join(words[150:]))))
    passages = list(windows(minilm, 64, 10).open()(article))
    spans = [(passage.start_word, passage.start_word + passage.n_words) for passage in passages]
    shares = [" ".join(words[start:end]) for (start, _), (_, end) in zip(spans[1:], spans, strict=False)]
    assert all(shares)
    assert max(counts(minilm, shares)) <= 10
    assert [" ".join(words[start:end]) for start, end in spans] == [passage.text for passage in passages]
    assert list(split_article(article).words) == [f" {word}" for word in words]
    assert {passage.id.partition(":")[2] for passage in passages} >= {"0", "1", "Life.0", "Life.1"}


@pytest.mark.parametrize("text", HOSTILE)
def test_twice_the_text_takes_twice_the_work(minilm: Path, text: str) -> None:
    cut, article = windows(minilm, 64, 10).open(), hostile(text)
    once, twice = (lines_run(lambda times=times: list(cut(article(times)))) for times in (100, 200))
    assert twice <= 2.2 * once


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({}, "needs a tokenizer"),
        ({"tokenizer": "t.json", "tokens": 63}, "give at least 64"),
        ({"tokenizer": "t.json", "overlap": 129}, "give 0 to 128, half of tokens"),
        ({"tokenizer": "t.json", "overlap": -1}, "give 0 to 128, half of tokens"),
    ],
)
def test_bad_settings_are_one_sentence(settings: dict[str, object], says: str) -> None:
    with pytest.raises(UsageError, match=says):
        build_chunker("tokens", settings)


def test_a_damaged_tokenizer_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(InputError, match="cannot be read"):
        windows(tmp_path, 64, 0).open()
