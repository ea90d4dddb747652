"""The size of passages is limited in the tokens of any tokenizer."""

from functools import cache
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
from tests.fixtures.work_counters import count_lines
from tests.rag_model.corpus.chunkers.test_chunker import HOSTILE, build_hostile_article, check_contract

MIN_TOKENS = 64


def build_byte_tokenizer() -> Tokenizer:
    """Build a tokenizer with a token for each byte."""
    tokenizer = Tokenizer(
        models.BPE({byte: number for number, byte in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}, [])
    )
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def build_normalizing_tokenizer() -> Tokenizer:
    """Build a byte tokenizer that normalizes with NFKC, which may expand one letter to eighteen."""
    tokenizer = build_byte_tokenizer()
    tokenizer.normalizer = normalizers.NFKC()
    return tokenizer


def build_single_token_tokenizer() -> Tokenizer:
    """Build a tokenizer that reads any text as one token."""
    tokenizer = Tokenizer(models.WordLevel({"[UNK]": 0}, unk_token="[UNK]"))
    tokenizer.enable_truncation(8)
    return tokenizer


@pytest.fixture(
    scope="module",
    params=[build_byte_tokenizer, build_normalizing_tokenizer, build_single_token_tokenizer, None],
    ids=["bytes", "compatible bytes", "one for all", "own"],
)
def tokenizer(request: pytest.FixtureRequest, minilm: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a tokenizer's file, or the folder of a real one."""
    if request.param is None:
        return minilm
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    request.param().save(str(path))
    return path


def build_token_chunker(tokenizer: Path, tokens: int, overlap: int) -> Chunker:
    return build_chunker("tokens", {"tokenizer": str(tokenizer), "tokens": tokens, "overlap": overlap})


@cache
def load_tokenizer(path: Path) -> Tokenizer:
    tokenizer = Tokenizer.from_file(str(path / "tokenizer.json" if path.is_dir() else path))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def count_tokens(tokenizer: Path, texts: list[str]) -> list[int]:
    return [len(load_tokenizer(tokenizer).encode(text, add_special_tokens=False).ids) for text in texts]


@settings(max_examples=20)
@given(article=ARTICLES, tokens=st.integers(MIN_TOKENS, 120), overlap=st.integers(0, 32))
def test_contract_is_fulfilled(tokenizer: Path, article: Article, tokens: int, overlap: int) -> None:
    passages = check_contract(build_token_chunker(tokenizer, tokens, overlap), article)
    assert max(count_tokens(tokenizer, [passage.text for passage in passages]), default=0) <= tokens
    assert max((passage.n_words for passage in passages), default=0) <= tokens


def test_neighbouring_passages_share_words_up_to_the_overlap(minilm: Path) -> None:
    words = [f"word{number}" for number in range(400)]
    article = Article("12", 7, "Ada", (Section("", " ".join(words[:150])), Section("Life", " ".join(words[150:]))))
    passages = list(build_token_chunker(minilm, 64, 10).open()(article))
    spans = [(passage.start_word, passage.start_word + passage.n_words) for passage in passages]
    overlaps = [" ".join(words[start:end]) for (start, _), (_, end) in zip(spans[1:], spans, strict=False)]
    assert all(overlaps)
    assert max(count_tokens(minilm, overlaps)) <= 10
    assert [" ".join(words[start:end]) for start, end in spans] == [passage.text for passage in passages]
    assert list(split_article(article).words) == [f" {word}" for word in words]
    assert {passage.id.partition(":")[2] for passage in passages} >= {"0", "1", "Life.0", "Life.1"}


@pytest.mark.parametrize("text", HOSTILE)
def test_work_is_linear_in_the_text(minilm: Path, text: str) -> None:
    chunk, article = build_token_chunker(minilm, 64, 10).open(), build_hostile_article(text)
    once, twice = (count_lines(lambda times=times: list(chunk(article(times)))) for times in (100, 200))
    assert twice <= 2.2 * once


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, "needs a tokenizer"),
        ({"tokenizer": "t.json", "tokens": 63}, "give at least 64"),
        ({"tokenizer": "t.json", "overlap": 129}, "give 0 to 128, half of tokens"),
        ({"tokenizer": "t.json", "overlap": -1}, "give 0 to 128, half of tokens"),
    ],
)
def test_invalid_settings_are_reported(settings: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        build_chunker("tokens", settings)


def test_damaged_tokenizer_is_reported(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(InputError, match="cannot be read"):
        build_token_chunker(tmp_path, 64, 0).open()
