from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from rag_model.training.objectives.losses import gather_all_processes, in_batch_loss

B, M, D = 5, 12, 8


def vectors(seed: int, n: int) -> Tensor:
    return torch.randn(n, D, generator=torch.Generator().manual_seed(seed), requires_grad=True)


@pytest.mark.parametrize("temperature", [1.0, 0.05])
def test_it_is_the_cross_entropy_of_the_explicit_matrix(temperature: float) -> None:
    questions, passages = vectors(1, B), vectors(2, M)
    gold = torch.tensor([3, 0, 7, 3, 11])
    ours, accuracy = in_batch_loss(questions, passages, gold, temperature=temperature)
    scores = [[float(q @ p) / temperature for p in passages.detach()] for q in questions.detach()]
    expected = [np.logaddexp.reduce(row) - row[place] for row, place in zip(scores, gold.tolist(), strict=True)]
    assert ours.item() == pytest.approx(np.mean(expected), rel=1e-5)
    wins = [int(np.argmax(row)) == place for row, place in zip(scores, gold.tolist(), strict=True)]
    assert accuracy.item() == pytest.approx(np.mean(wins))


class Given(nn.Module):
    """Stands for a SentenceTransformer whose vectors are given."""

    def forward(self, features: dict[str, Tensor]) -> dict[str, Tensor]:
        return {"sentence_embedding": features["vectors"]}


@pytest.mark.parametrize("scale", [1.0, 20.0])
def test_it_is_sentence_transformers_multiple_negatives_ranking_loss(minilm: Path, scale: float) -> None:
    from sentence_transformers import SentenceTransformer, losses, util  # noqa: PLC0415 - takes a second

    questions, positives, negatives = vectors(1, B), vectors(2, B), vectors(3, B)
    model = SentenceTransformer(str(minilm), device="cpu")
    peer = losses.MultipleNegativesRankingLoss(model, scale, util.dot_score)
    peer.model = Given()  # type: ignore[assignment]
    reference = peer([{"vectors": one} for one in (questions, positives, negatives)], torch.empty(0))
    gradients = torch.autograd.grad(reference, [questions, positives, negatives])
    passages = torch.cat([positives, negatives])
    ours, _ = in_batch_loss(questions, passages, torch.arange(B), temperature=1 / scale)
    torch.testing.assert_close(ours, reference)
    for own, their in zip(torch.autograd.grad(ours, [questions, positives, negatives]), gradients, strict=True):
        torch.testing.assert_close(own, their)


def test_what_is_ignored_is_as_if_it_were_not_there() -> None:
    questions, passages = vectors(1, B), vectors(2, M)
    gold = torch.arange(B)
    ignored = torch.zeros(B, M, dtype=torch.bool)
    ignored[:, 7:9] = True
    there, _ = in_batch_loss(questions, passages, gold, ignored)
    (gradient,) = torch.autograd.grad(there, passages, retain_graph=True)
    kept = torch.cat([passages[:7], passages[9:]])
    torch.testing.assert_close(there, in_batch_loss(questions, kept, gold)[0])
    assert not gradient[7:9].any()


def test_scores_are_float32_whatever_the_precision_around() -> None:
    questions, passages = vectors(1, B), vectors(2, M)
    alone, _ = in_batch_loss(questions, passages, torch.arange(B))
    with torch.autocast("cpu", torch.bfloat16):
        around, _ = in_batch_loss(questions, passages, torch.arange(B))
    assert torch.equal(alone, around)


def test_one_process_has_its_own_rows() -> None:
    rows = vectors(1, 3)
    assert gather_all_processes(rows) == (rows, 0)
