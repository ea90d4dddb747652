"""Rows of any length of a part: written in row order, and kept for passages that were encoded before."""

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
ALL = [*TEXTS, "x y z"]
CPU = {"device": "cpu", "dtype": "float32"}


@pytest.fixture(scope="module")
def colbert(tmp_path_factory: pytest.TempPathFactory) -> TokenEncoder:
    return TokenEncoder.load(save_colbert(tmp_path_factory.mktemp("c") / "colbert"), **CPU)


@pytest.fixture(scope="module")
def splade(tmp_path_factory: pytest.TempPathFactory) -> SparseEncoder:
    return SparseEncoder.load(save_mlm(tmp_path_factory.mktemp("s")), **CPU)


def passages(path: Path, texts: Sequence[str]) -> Path:
    with PassageWriter(path) as writer:
        for page, text in enumerate(texts):
            own = Passage(f"{page}-0", str(page), 1, "T", "", text, 0, len(text.split()), Passage.hash_of("T", text))
            writer.write(own)
    return path


def never() -> Any:
    raise AssertionError("everything is known")


def kept(form: Any, other: Any, encoder: Any, work: Path) -> tuple[Path, int]:
    """Encode parts in every way; return the file of all texts, and the lengths of its rows together."""
    before, whole = work / "before", work / "whole"
    old = passages(work / "old.parquet", [TEXTS[2], "gone", TEXTS[0]])
    new = passages(work / "new.parquet", ALL)
    form.embed(old, before, lambda: encoder)
    facts = form.embed(new, whole, lambda: encoder)
    assert (facts.rows, facts.encoded, facts.dim) == (9, 9, form.dim)

    assert facts.truncated == 0
    long_and_short = passages(work / "long.parquet", ["river " * 500, "river"])
    assert form.embed(long_and_short, work / "long", lambda: encoder).truncated == 1

    assert form.count_reusable(new, [(old, before)]) == 4
    some = form.embed(new, work / "part", lambda: encoder, [(old, before)])
    assert some.encoded == 5
    assert (work / "part").read_bytes() == whole.read_bytes()

    again = form.embed(new, work / "all", never, [(new, whole)])
    assert (again.encoded, (work / "all").read_bytes()) == (0, whole.read_bytes())
    assert other.count_reusable(new, [(new, whole)]) == 0
    return whole, facts.tokens


def test_known_passages_keep_their_token_vectors_wherever_they_stand(colbert: TokenEncoder, tmp_path: Path) -> None:
    whole, tokens = kept(TokenFormat(DIM, "float16"), TokenFormat(DIM, "float32"), colbert, tmp_path)
    expected = colbert.encode_passages(["T"] * 9, ALL)
    found = TokenVectors.concatenate(list(TokenFile(whole).iter_batches()))
    assert (found.offsets == expected.offsets).all()
    assert np.abs(found.vectors - expected.vectors).max() < 1e-3
    assert tokens == expected.offsets[-1]


def test_known_passages_keep_their_terms_wherever_they_stand(splade: SparseEncoder, tmp_path: Path) -> None:
    form = get_row_format("sparse", 128, "float16", 64)
    whole, terms = kept(form, SparseFormat(128, 32), splade, tmp_path)
    expected, found = splade.encode_passages(["T"] * 9, ALL), SparseFile(whole).take(np.arange(9))
    assert (found.offsets == expected.offsets).all()
    assert (found.terms == expected.terms).all()
    assert (found.weights == expected.weights).all()
    assert terms == expected.offsets[-1]
