"""Semantic passages end where the subject changes, and keep the contract of all chunkers."""

from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings

from rag_model.corpus.chunk import ChunkRecipe
from rag_model.corpus.chunkers.chunker import build_chunker
from rag_model.corpus.records import Article, Section
from rag_model.encoders.encoder import Encoder
from rag_model.errors import UsageError
from tests.fixtures.hostile_texts import ARTICLES
from tests.fixtures.tiny import save_bert
from tests.rag_model.corpus.chunkers.test_chunker import check_contract

CATS = "The cat sleeps on the sofa. Cats like to sleep all day. A kitten plays with its mother cat."
TAX = "Income tax is due in April. The tax office sends the forms. Late taxes cost a fine."
SEA = "The ship left the harbour. Sailors fear storms at sea. The sea was calm that day."


def test_cuts_where_the_subject_changes(minilm: Path) -> None:
    article = Article("12", 7, "Ada", (Section("", f"{CATS} {TAX} {SEA}"),))
    passages = list(build_chunker("semantic", {"encoder": str(minilm), "percentile": 74.0}).open()(article))
    assert [passage.text for passage in passages] == [CATS, TAX, SEA]


def test_cuts_follow_the_definition(minilm: Path) -> None:
    """Cuts are where the distance of neighboring sentences, 1 - cos, is above the percentile."""
    sentences = f"{CATS} {TAX} {SEA}".replace(". ", ".|").split("|")
    vectors = Encoder.load(minilm, device="cpu", dtype="float32").encode_passages([""] * len(sentences), sentences)
    distances = np.round([1 - a @ b for a, b in pairwise(vectors)], 3)
    cuts = np.flatnonzero(distances > np.percentile(distances, 50)) + 1
    expected = [" ".join(run) for run in np.split(sentences, cuts)]
    article = Article("12", 7, "Ada", (Section("", " ".join(sentences)),))
    passages = build_chunker("semantic", {"encoder": str(minilm), "percentile": 50.0}).open()(article)
    assert [passage.text for passage in passages] == expected


def test_headings_and_the_bound_are_cuts(minilm: Path) -> None:
    sections = (Section("", CATS), Section("Life", "word " * 30 + "end."))
    chunker = build_chunker("semantic", {"encoder": str(minilm), "percentile": 100.0, "words": 20})
    passages = list(chunker.open()(Article("12", 7, "Ada", sections)))
    assert [(passage.id, passage.n_words) for passage in passages] == [
        ("12:0", 19),
        ("12:Life.0", 20),
        ("12:Life.1", 11),
    ]


@settings(max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(article=ARTICLES)
def test_passages_keep_the_contract_of_chunkers(tiny_bert: Path, article: Article) -> None:
    passages = check_contract(build_chunker("semantic", {"encoder": str(tiny_bert), "words": 9}), article)
    assert all(0 < passage.n_words <= 9 for passage in passages)


def test_the_encoder_is_part_of_the_key(tiny_bert: Path, tmp_path: Path) -> None:
    def identity(folder: Path) -> dict[str, object]:
        return ChunkRecipe("semantic", settings={"encoder": str(folder)}).get_identity()

    assert identity(tiny_bert) == identity(tiny_bert)
    assert identity(save_bert(tmp_path, seed=5)) != identity(tiny_bert)
    assert "torch" in str(identity(tiny_bert)["version"])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, "needs an encoder"),
        ({"encoder": "e", "words": 0}, "at least 1"),
        ({"encoder": "e", "percentile": 101.0}, "0 to 100"),
    ],
)
def test_invalid_settings_are_refused(settings: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        build_chunker("semantic", settings)
