"""A GPU that is too small for a batch, at the driver's edge: torch's own error, above a number of tokens."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rag_model.encoders.cross_encoder import CrossEncoder
from rag_model.encoders.encoder import Encoder
from rag_model.encoders.sparse_encoder import SparseEncoder
from rag_model.encoders.token_encoder import TokenEncoder
from rag_model.encoders.tokens import run_batches
from rag_model.errors import ResourceError
from tests.fixtures.tiny import save_bert, save_cross_encoder
from tests.fixtures.tiny_colbert import save_colbert
from tests.fixtures.tiny_splade import save_splade

TITLES = ["River", "", "King", "War and the music"] * 12
TEXTS = [f"the river was born in the city of king {'and ' * (number % 7)}" for number in range(48)]
ROOM = 300  # tokens, padding included


def dense(folder: Path) -> Any:
    return Encoder.load(save_bert(folder), device="cpu", dtype="float32").encode_passages(TITLES, TEXTS)


def many(folder: Path) -> Any:
    return TokenEncoder.load(save_colbert(folder), device="cpu", dtype="float32").encode_passages(TITLES, TEXTS).vectors


def sparse(folder: Path) -> Any:
    return SparseEncoder.load(save_splade(folder), device="cpu", dtype="float32").encode_passages(TITLES, TEXTS).terms


def scores(folder: Path) -> Any:
    return CrossEncoder.load(save_cross_encoder(folder), device="cpu").scores(TEXTS, TITLES, TEXTS)


@pytest.mark.parametrize("encode", [dense, many, sparse, scores])
def test_what_does_not_fit_at_once_is_encoded_in_halves(
    encode: Callable[[Path], Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected, looked_up, failed = encode(tmp_path / "all"), torch.nn.functional.embedding, []

    def bounded(ids: Any, *given: Any, **named: Any) -> Any:
        if ids.numel() > ROOM:
            failed.append(ids.numel())
            raise torch.OutOfMemoryError("CUDA out of memory")
        return looked_up(ids, *given, **named)

    monkeypatch.setattr(torch.nn.functional, "embedding", bounded)
    np.testing.assert_allclose(encode(tmp_path / "all"), expected, atol=1e-5)
    assert 0 < len(failed) < 6, "few tries fail"


def test_batches_are_halved_until_they_fit_and_order_stays() -> None:
    tried: list[int] = []

    def work(rows: np.ndarray) -> int:
        tried.append(len(rows))
        if len(rows) > 3:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return int(rows.sum())

    batches = [np.arange(start, start + 10) for start in (0, 10)]
    found = list(run_batches(batches, work))
    assert np.concatenate([rows for rows, _ in found]).tolist() == list(range(20))
    assert [made for _, made in found] == [rows.sum() for rows, _ in found]
    assert tried[:2] == [10, 5], "the second batch is not tried whole"
    assert max(tried[2:]) <= 3


def test_one_text_that_does_not_fit_is_one_sentence() -> None:
    def full(_: np.ndarray) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    with pytest.raises(ResourceError, match="one text do not fit into the GPU's memory: end other"):
        list(run_batches([np.arange(4)], full))


def test_other_errors_pass() -> None:
    with pytest.raises(ZeroDivisionError):
        list(run_batches([np.arange(4)], lambda rows: 1 // (int(rows.sum()) - 6)))
