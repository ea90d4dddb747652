"""Token vectors of a part: written in row order, and kept for passages that were encoded before."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from rag_model.corpus.passages import PassageWriter
from rag_model.corpus.records import Passage
from rag_model.corpus.token_file import TokenFile, TokenVectors
from rag_model.encoders.embed_tokens import count_known_tokens, embed_tokens
from rag_model.encoders.token_encoder import TokenEncoder
from tests.fixtures.tiny_colbert import DIM, save_colbert

TEXTS = ["the king was born in the city", "music", "a war of theory, of rivers", "the river is in the city"] * 2


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> TokenEncoder:
    return TokenEncoder.load(save_colbert(tmp_path_factory.mktemp("c") / "colbert"), device="cpu", dtype="float32")


def passages(path: Path, texts: Sequence[str]) -> Path:
    with PassageWriter(path) as writer:
        for page, text in enumerate(texts):
            own = Passage(f"{page}-0", str(page), 1, "T", "", text, 0, len(text.split()), Passage.hash_of("T", text))
            writer.write(own)
    return path


def read(path: Path) -> TokenVectors:
    return TokenVectors.joined(list(TokenFile(path).blocks()))


def test_known_passages_keep_their_vectors_wherever_they_stand(encoder: TokenEncoder, tmp_path: Path) -> None:
    before, whole = tmp_path / "before", tmp_path / "whole"
    old = passages(tmp_path / "old.parquet", [TEXTS[2], "gone", TEXTS[0]])
    new = passages(tmp_path / "new.parquet", [*TEXTS, "x y z"])
    embed_tokens(old, before, lambda: encoder, DIM, "float16")
    facts = embed_tokens(new, whole, lambda: encoder, DIM, "float16")
    wanted = encoder.encode_passages(["T"] * 9, [*TEXTS, "x y z"])
    assert (read(whole).offsets == wanted.offsets).all()
    assert np.abs(read(whole).vectors - wanted.vectors).max() < 1e-3
    assert (facts.rows, facts.encoded, facts.tokens) == (9, 9, wanted.offsets[-1])

    assert count_known_tokens(new, [(old, before)], DIM, "float16") == 4
    facts = embed_tokens(new, tmp_path / "part", lambda: encoder, DIM, "float16", [(old, before)])
    assert facts.encoded == 5
    assert (read(tmp_path / "part").vectors == read(whole).vectors).all()

    def never() -> TokenEncoder:
        raise AssertionError("everything is known")

    facts = embed_tokens(new, tmp_path / "all", never, DIM, "float16", [(new, whole)])
    assert (facts.encoded, (tmp_path / "all").read_bytes()) == (0, whole.read_bytes())
    assert count_known_tokens(new, [(new, whole)], DIM, "float32") == 0
