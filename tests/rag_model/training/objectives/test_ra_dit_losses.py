"""The loss of LM-supervised retrieval, compared with its equations."""

import math

import numpy as np
import pytest
import torch
from torch.distributions import Categorical, kl_divergence

from rag_model.training.objectives.ra_dit_tasks import (
    compute_entropy,
    compute_log_softmax,
    compute_preference_scores,
    retriever_loss,
)

ALL = torch.ones(1, 3, dtype=torch.bool)


def compute_loss_in_numpy(scores: list[float], probabilities: list[float], tau: float, temperature: float) -> float:
    """Return the loss by equations 2, 4 and 5 of Lin et al. 2023."""
    actual, reference = np.exp(np.array(scores) / temperature), np.exp(np.array(probabilities) / tau)
    actual, reference = actual / actual.sum(), reference / reference.sum()
    return float((actual * np.log(actual / reference)).sum())


def test_loss_follows_the_equations() -> None:
    scores, probabilities = [0.3, -0.2, 0.9], [0.02, 0.05, 0.01]
    log_p = torch.tensor([probabilities], dtype=torch.float64).log()
    target = compute_log_softmax(compute_preference_scores(log_p, torch.tensor([4]), "probability"), ALL, 0.01)
    loss = retriever_loss(torch.tensor([scores], dtype=torch.float64), target, ALL, 0.5)
    assert loss.item() == pytest.approx(compute_loss_in_numpy(scores, probabilities, 0.01, 0.5), rel=1e-12)
    oracle = kl_divergence(
        Categorical(logits=torch.tensor(scores, dtype=torch.float64) / 0.5), Categorical(logits=target[0])
    )
    assert loss.item() == pytest.approx(oracle.item(), rel=1e-12)


def test_gradient_agrees_with_finite_differences() -> None:
    source = torch.Generator().manual_seed(1)
    query_vectors = torch.randn(2, 5, dtype=torch.float64, generator=source, requires_grad=True)
    vectors = torch.randn(2, 4, 5, dtype=torch.float64, generator=source)
    mask = torch.tensor([[True] * 4, [True, True, False, False]])
    scores = torch.rand(2, 4, dtype=torch.float64, generator=source)
    target = compute_log_softmax(scores, mask, 0.1)

    def loss(questions: torch.Tensor) -> torch.Tensor:
        return retriever_loss((vectors * questions[:, None]).sum(-1), target, mask, 0.7)

    assert torch.autograd.gradcheck(loss, query_vectors)
    assert not target.requires_grad


def test_divergence_is_of_the_retriever_from_the_target() -> None:
    """A passage that only the retriever prefers costs more than one that only the generator prefers."""
    peaked = torch.tensor([[math.log(0.98), math.log(0.01), math.log(0.01)]])
    uniform = torch.full((1, 3), -math.log(3))
    peaked_loss = retriever_loss(peaked, uniform, ALL).item()
    uniform_loss = retriever_loss(uniform, peaked, ALL).item()
    assert uniform_loss > 1.5 * peaked_loss, "KL(p_R ‖ p_LSR) is large where only the target is small"
    assert uniform_loss == pytest.approx(sum(math.log(1 / 3 / p) / 3 for p in (0.98, 0.01, 0.01)), rel=1e-5)
    assert peaked_loss == pytest.approx(sum(p * math.log(3 * p) for p in (0.98, 0.01, 0.01)), rel=1e-5)


def test_padding_of_a_list_does_not_count() -> None:
    mask = torch.tensor([[True, True, False]])
    scores = torch.tensor([[1.0, 2.0, 7.0]], requires_grad=True)
    target = compute_log_softmax(torch.tensor([[0.1, 0.2, -math.inf]]), mask, 0.1)
    unpadded = ALL[:, :2]
    unpadded_target = compute_log_softmax(torch.tensor([[0.1, 0.2]]), unpadded, 0.1)
    expected = retriever_loss(torch.tensor([[1.0, 2.0]]), unpadded_target, unpadded)
    loss = retriever_loss(scores, target, mask)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)
    loss.sum().backward()
    assert scores.grad is not None
    assert scores.grad[0, 2] == 0
    assert scores.grad.isfinite().all()


def test_list_of_one_passage_has_no_loss() -> None:
    mask, scores = torch.ones(1, 1, dtype=torch.bool), torch.tensor([[3.0]], requires_grad=True)
    loss = retriever_loss(scores, compute_log_softmax(torch.tensor([[0.4]]), mask, 0.01), mask)
    loss.sum().backward()
    assert loss.item() == 0
    assert scores.grad is not None
    assert scores.grad.item() == 0


def test_probability_of_a_long_answer_underflows_and_its_mean_does_not() -> None:
    """Fifty tokens of three nats have a probability below e^-150, equal for all passages; their means differ."""
    log_p, tokens = torch.tensor([[-150.0, -160.0, -900.0]], dtype=torch.float64), torch.tensor([50])
    uniform = compute_log_softmax(compute_preference_scores(log_p, tokens, "probability"), ALL, 0.01)
    assert compute_entropy(uniform, ALL).item() == pytest.approx(math.log(3), rel=1e-12)
    peaked = compute_log_softmax(compute_preference_scores(log_p, tokens, "mean_log_probability"), ALL, 0.1)
    assert peaked.exp()[0].tolist() == pytest.approx([1 / (1 + math.exp(-2)), 1 / (1 + math.exp(2)), 0], abs=1e-9)
    for target in (uniform, peaked):
        assert retriever_loss(torch.tensor([[5.0, 0.0, -5.0]]), target.float(), ALL).isfinite().all()


def test_equal_scores_give_a_uniform_target() -> None:
    target = compute_log_softmax(
        compute_preference_scores(torch.full((1, 3), -2.0), torch.tensor([1]), "probability"), ALL, 0.01
    )
    assert target.exp()[0].tolist() == pytest.approx([1 / 3] * 3)
    assert compute_entropy(target, ALL).item() == pytest.approx(math.log(3))
    assert retriever_loss(torch.zeros(1, 3), target, ALL).item() == pytest.approx(0, abs=1e-7)
    assert retriever_loss(torch.tensor([[2.0, 0.0, 0.0]]), target, ALL).item() > 0


def test_loss_is_float32_under_autocast() -> None:
    scores = torch.tensor([[1.0, 1.001, 0.5]])
    target = compute_log_softmax(torch.tensor([[0.1, 0.2, 0.3]]), ALL, 0.1)
    with torch.autocast("cpu", torch.bfloat16):
        loss = retriever_loss(scores, target, ALL)
    assert torch.equal(loss, retriever_loss(scores, target, ALL))
