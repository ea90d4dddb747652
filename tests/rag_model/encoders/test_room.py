"""Batches that a GPU is too small for: torch's own error is raised above a number of tokens."""

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
MAX_TOKENS = 300  # tokens, padding included


def encode_dense(folder: Path) -> Any:
    return Encoder.load(save_bert(folder), device="cpu", dtype="float32").encode_passages(TITLES, TEXTS)


def encode_tokens(folder: Path) -> Any:
    return TokenEncoder.load(save_colbert(folder), device="cpu", dtype="float32").encode_passages(TITLES, TEXTS).vectors


def encode_sparse(folder: Path) -> Any:
    return SparseEncoder.load(save_splade(folder), device="cpu", dtype="float32").encode_passages(TITLES, TEXTS).terms


def score_pairs(folder: Path) -> Any:
    return CrossEncoder.load(save_cross_encoder(folder), device="cpu").scores(TEXTS, TITLES, TEXTS)


@pytest.mark.parametrize("encode", [encode_dense, encode_tokens, encode_sparse, score_pairs])
def test_batch_that_does_not_fit_is_encoded_in_halves(
    encode: Callable[[Path], Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected, embedding, failed_sizes = encode(tmp_path / "all"), torch.nn.functional.embedding, []

    def embed_with_limit(ids: Any, *arguments: Any, **options: Any) -> Any:
        if ids.numel() > MAX_TOKENS:
            failed_sizes.append(ids.numel())
            raise torch.OutOfMemoryError("CUDA out of memory")
        return embedding(ids, *arguments, **options)

    monkeypatch.setattr(torch.nn.functional, "embedding", embed_with_limit)
    np.testing.assert_allclose(encode(tmp_path / "all"), expected, atol=1e-5)
    assert 0 < len(failed_sizes) < 6, "few batches fail"


def test_batches_are_halved_until_they_fit_and_order_stays() -> None:
    sizes: list[int] = []

    def work(rows: np.ndarray) -> int:
        sizes.append(len(rows))
        if len(rows) > 3:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return int(rows.sum())

    batches = [np.arange(start, start + 10) for start in (0, 10)]
    results = list(run_batches(batches, work))
    assert np.concatenate([rows for rows, _ in results]).tolist() == list(range(20))
    assert [total for _, total in results] == [rows.sum() for rows, _ in results]
    assert sizes[:2] == [10, 5], "the second batch is split from the start"
    assert max(sizes[2:]) <= 3


def test_single_text_that_does_not_fit_is_a_resource_error() -> None:
    def run_out_of_memory(_: np.ndarray) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    with pytest.raises(ResourceError, match="one text do not fit into the GPU's memory: end other"):
        list(run_batches([np.arange(4)], run_out_of_memory))


def test_other_errors_pass() -> None:
    with pytest.raises(ZeroDivisionError):
        list(run_batches([np.arange(4)], lambda rows: 1 // (int(rows.sum()) - 6)))
