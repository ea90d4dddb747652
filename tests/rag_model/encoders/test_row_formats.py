"""Formats of rows of any length: written in row order, and reused for passages that are encoded already."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rag_model.corpus.passages import PassageWriter
from rag_model.corpus.ragged_file import SparseFile, TokenFile, TokenVectors
from rag_model.corpus.records import Passage
from rag_model.encoders.row_formats import SparseFormat, TokenFormat, get_row_format
from rag_model.encoders.sparse_encoder import SparseEncoder
from rag_model.encoders.token_encoder import TokenEncoder
from tests.fixtures.tiny_colbert import DIM, save_colbert
from tests.fixtures.tiny_splade import save_mlm

TEXTS = ["the king was born in the city", "music", "a war of theory, of rivers", "the river is in the city"] * 2
ALL_TEXTS = [*TEXTS, "x y z"]
CPU = {"device": "cpu", "dtype": "float32"}


@pytest.fixture(scope="module")
def colbert(tmp_path_factory: pytest.TempPathFactory) -> TokenEncoder:
    return TokenEncoder.load(save_colbert(tmp_path_factory.mktemp("c") / "colbert"), **CPU)


@pytest.fixture(scope="module")
def splade(tmp_path_factory: pytest.TempPathFactory) -> SparseEncoder:
    return SparseEncoder.load(save_mlm(tmp_path_factory.mktemp("s")), **CPU)


def write_passages(path: Path, texts: Sequence[str]) -> Path:
    with PassageWriter(path) as writer:
        for page, text in enumerate(texts):
            text_hash = Passage.hash_of("T", text)
            writer.write(Passage(f"{page}-0", str(page), 1, "T", "", text, 0, len(text.split()), text_hash))
    return path


def refuse_encoder() -> Any:
    raise AssertionError("an encoder is loaded, but all passages are known")


def check_reuse(row_format: Any, other_format: Any, encoder: Any, work: Path) -> tuple[Path, int]:
    """Encode parts with and without reuse; return the file of all texts, and the total length of its rows."""
    old_rows, all_rows = work / "old", work / "all"
    old = write_passages(work / "old.parquet", [TEXTS[2], "gone", TEXTS[0]])
    part = write_passages(work / "new.parquet", ALL_TEXTS)
    row_format.embed(old, old_rows, lambda: encoder)
    stats = row_format.embed(part, all_rows, lambda: encoder)
    assert (stats.rows, stats.encoded, stats.dim) == (9, 9, row_format.dim)

    assert stats.truncated == 0
    long_and_short = write_passages(work / "long.parquet", ["river " * 500, "river"])
    assert row_format.embed(long_and_short, work / "long", lambda: encoder).truncated == 1

    assert row_format.count_reusable(part, [(old, old_rows)]) == 4
    partial_stats = row_format.embed(part, work / "part", lambda: encoder, [(old, old_rows)])
    assert partial_stats.encoded == 5
    assert (work / "part").read_bytes() == all_rows.read_bytes()

    reused_stats = row_format.embed(part, work / "reused", refuse_encoder, [(part, all_rows)])
    assert (reused_stats.encoded, (work / "reused").read_bytes()) == (0, all_rows.read_bytes())
    assert other_format.count_reusable(part, [(part, all_rows)]) == 0
    return all_rows, stats.tokens


def test_known_passages_keep_their_token_vectors_in_any_row(colbert: TokenEncoder, tmp_path: Path) -> None:
    path, tokens = check_reuse(TokenFormat(DIM, "float16"), TokenFormat(DIM, "float32"), colbert, tmp_path)
    expected = colbert.encode_passages(["T"] * 9, ALL_TEXTS)
    actual = TokenVectors.concatenate(list(TokenFile(path).iter_batches()))
    assert (actual.offsets == expected.offsets).all()
    assert np.abs(actual.vectors - expected.vectors).max() < 1e-3
    assert tokens == expected.offsets[-1]


def test_known_passages_keep_their_terms_in_any_row(splade: SparseEncoder, tmp_path: Path) -> None:
    row_format = get_row_format("sparse", 128, "float16", 64)
    path, terms = check_reuse(row_format, SparseFormat(128, 32), splade, tmp_path)
    expected, actual = splade.encode_passages(["T"] * 9, ALL_TEXTS), SparseFile(path).take(np.arange(9))
    assert (actual.offsets == expected.offsets).all()
    assert (actual.terms == expected.terms).all()
    assert (actual.weights == expected.weights).all()
    assert terms == expected.offsets[-1]
