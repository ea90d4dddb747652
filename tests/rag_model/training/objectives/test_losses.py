from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from rag_model.training.objectives.losses import gather_all_processes, in_batch_loss

B, M, D = 5, 12, 8


def draw_vectors(seed: int, n: int) -> Tensor:
    return torch.randn(n, D, generator=torch.Generator().manual_seed(seed), requires_grad=True)


@pytest.mark.parametrize("temperature", [1.0, 0.05])
def test_in_batch_loss_is_the_cross_entropy_of_the_score_matrix(temperature: float) -> None:
    questions, passages = draw_vectors(1, B), draw_vectors(2, M)
    gold = torch.tensor([3, 0, 7, 3, 11])
    ours, accuracy = in_batch_loss(questions, passages, gold, temperature=temperature)
    scores = [[float(q @ p) / temperature for p in passages.detach()] for q in questions.detach()]
    expected = [np.logaddexp.reduce(row) - row[column] for row, column in zip(scores, gold.tolist(), strict=True)]
    assert ours.item() == pytest.approx(np.mean(expected), rel=1e-5)
    wins = [int(np.argmax(row)) == column for row, column in zip(scores, gold.tolist(), strict=True)]
    assert accuracy.item() == pytest.approx(np.mean(wins))


class IdentityModel(nn.Module):
    """Returns the vectors that it is given, in place of a SentenceTransformer."""

    def forward(self, features: dict[str, Tensor]) -> dict[str, Tensor]:
        return {"sentence_embedding": features["vectors"]}


@pytest.mark.parametrize("scale", [1.0, 20.0])
def test_in_batch_loss_equals_sentence_transformers_multiple_negatives_ranking_loss(minilm: Path, scale: float) -> None:
    from sentence_transformers import SentenceTransformer, losses, util  # noqa: PLC0415 - takes a second

    questions, positives, negatives = draw_vectors(1, B), draw_vectors(2, B), draw_vectors(3, B)
    model = SentenceTransformer(str(minilm), device="cpu")
    peer = losses.MultipleNegativesRankingLoss(model, scale, util.dot_score)
    peer.model = IdentityModel()  # type: ignore[assignment]
    reference = peer([{"vectors": vectors} for vectors in (questions, positives, negatives)], torch.empty(0))
    gradients = torch.autograd.grad(reference, [questions, positives, negatives])
    passages = torch.cat([positives, negatives])
    ours, _ = in_batch_loss(questions, passages, torch.arange(B), temperature=1 / scale)
    torch.testing.assert_close(ours, reference)
    for gradient, expected in zip(torch.autograd.grad(ours, [questions, positives, negatives]), gradients, strict=True):
        torch.testing.assert_close(gradient, expected)


def test_ignored_passages_do_not_change_the_loss() -> None:
    questions, passages = draw_vectors(1, B), draw_vectors(2, M)
    gold = torch.arange(B)
    ignored = torch.zeros(B, M, dtype=torch.bool)
    ignored[:, 7:9] = True
    loss, _ = in_batch_loss(questions, passages, gold, ignored)
    (gradient,) = torch.autograd.grad(loss, passages, retain_graph=True)
    other_passages = torch.cat([passages[:7], passages[9:]])
    torch.testing.assert_close(loss, in_batch_loss(questions, other_passages, gold)[0])
    assert not gradient[7:9].any()


def test_scores_are_float32_under_autocast() -> None:
    questions, passages = draw_vectors(1, B), draw_vectors(2, M)
    loss, _ = in_batch_loss(questions, passages, torch.arange(B))
    with torch.autocast("cpu", torch.bfloat16):
        autocast_loss, _ = in_batch_loss(questions, passages, torch.arange(B))
    assert torch.equal(loss, autocast_loss)


def test_one_process_has_its_own_rows() -> None:
    rows = draw_vectors(1, 3)
    assert gather_all_processes(rows) == (rows, 0)
