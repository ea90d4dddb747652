"""The loss of LM-supervised retrieval beside its equation written out, its direction, and where it underflows."""

import math

import numpy as np
import pytest
import torch
from torch.distributions import Categorical, kl_divergence

from rag_model.training.objectives.ra_dit_tasks import (
    compute_entropy,
    compute_log_target,
    compute_preference_scores,
    retriever_loss,
)

EVERY = torch.ones(1, 3, dtype=torch.bool)


def written_out(scores: list[float], probabilities: list[float], tau: float, temperature: float) -> float:
    """Eq. 2, 4 and 5 of Lin et al. 2023 in numpy."""
    actual, reference = np.exp(np.array(scores) / temperature), np.exp(np.array(probabilities) / tau)
    actual, reference = actual / actual.sum(), reference / reference.sum()
    return float((actual * np.log(actual / reference)).sum())


def test_it_is_the_equation() -> None:
    scores, probabilities = [0.3, -0.2, 0.9], [0.02, 0.05, 0.01]
    log_p = torch.tensor([probabilities], dtype=torch.float64).log()
    target = compute_log_target(compute_preference_scores(log_p, torch.tensor([4]), "probability"), EVERY, 0.01)
    found = retriever_loss(torch.tensor([scores], dtype=torch.float64), target, EVERY, 0.5)
    assert found.item() == pytest.approx(written_out(scores, probabilities, 0.01, 0.5), rel=1e-12)
    oracle = kl_divergence(
        Categorical(logits=torch.tensor(scores, dtype=torch.float64) / 0.5), Categorical(logits=target[0])
    )
    assert found.item() == pytest.approx(oracle.item(), rel=1e-12)


def test_its_gradient_is_that_of_finite_differences() -> None:
    source = torch.Generator().manual_seed(1)
    asked = torch.randn(2, 5, dtype=torch.float64, generator=source, requires_grad=True)
    vectors = torch.randn(2, 4, 5, dtype=torch.float64, generator=source)
    kept = torch.tensor([[True] * 4, [True, True, False, False]])
    scores = torch.rand(2, 4, dtype=torch.float64, generator=source)
    target = compute_log_target(scores, kept, 0.1)

    def loss(questions: torch.Tensor) -> torch.Tensor:
        return retriever_loss((vectors * questions[:, None]).sum(-1), target, kept, 0.7)

    assert torch.autograd.gradcheck(loss, asked)
    assert not target.requires_grad


def test_the_retriever_is_the_first_argument() -> None:
    """A passage that only the retriever wants costs more than one that only the generator wants."""
    wants_one = torch.tensor([[math.log(0.98), math.log(0.01), math.log(0.01)]])
    even = torch.full((1, 3), -math.log(3))
    sharp = retriever_loss(wants_one, even, EVERY).item()
    spread = retriever_loss(even, wants_one, EVERY).item()
    assert spread > 1.5 * sharp, "KL(p_R ‖ p_LSR): probability where the target has none is what costs"
    assert spread == pytest.approx(sum(math.log(1 / 3 / p) / 3 for p in (0.98, 0.01, 0.01)), rel=1e-5)
    assert sharp == pytest.approx(sum(p * math.log(3 * p) for p in (0.98, 0.01, 0.01)), rel=1e-5)


def test_the_end_of_a_list_does_not_count() -> None:
    kept = torch.tensor([[True, True, False]])
    scores = torch.tensor([[1.0, 2.0, 7.0]], requires_grad=True)
    target = compute_log_target(torch.tensor([[0.1, 0.2, -math.inf]]), kept, 0.1)
    two = torch.ones(1, 2, dtype=torch.bool)
    same = retriever_loss(torch.tensor([[1.0, 2.0]]), compute_log_target(torch.tensor([[0.1, 0.2]]), two, 0.1), two)
    loss = retriever_loss(scores, target, kept)
    assert loss.item() == pytest.approx(same.item(), rel=1e-6)
    loss.sum().backward()
    assert scores.grad is not None
    assert scores.grad[0, 2] == 0
    assert scores.grad.isfinite().all()


def test_a_list_of_one_passage_teaches_nothing() -> None:
    one, scores = torch.ones(1, 1, dtype=torch.bool), torch.tensor([[3.0]], requires_grad=True)
    loss = retriever_loss(scores, compute_log_target(torch.tensor([[0.4]]), one, 0.01), one)
    loss.sum().backward()
    assert loss.item() == 0
    assert scores.grad is not None
    assert scores.grad.item() == 0


def test_a_long_answer_underflows_and_its_mean_does_not() -> None:
    """Fifty tokens at three nats: e^-150 and less, so that the passages differ by nothing; in the mean they differ."""
    log_p, tokens = torch.tensor([[-150.0, -160.0, -900.0]], dtype=torch.float64), torch.tensor([50])
    flat = compute_log_target(compute_preference_scores(log_p, tokens, "probability"), EVERY, 0.01)
    assert compute_entropy(flat, EVERY).item() == pytest.approx(math.log(3), rel=1e-12)
    clear = compute_log_target(compute_preference_scores(log_p, tokens, "mean_log_probability"), EVERY, 0.1)
    assert clear.exp()[0].tolist() == pytest.approx([1 / (1 + math.exp(-2)), 1 / (1 + math.exp(2)), 0], abs=1e-9)
    for target in (flat, clear):
        assert retriever_loss(torch.tensor([[5.0, 0.0, -5.0]]), target.float(), EVERY).isfinite().all()


def test_equal_scores_are_a_uniform_target() -> None:
    target = compute_log_target(
        compute_preference_scores(torch.full((1, 3), -2.0), torch.tensor([1]), "probability"), EVERY, 0.01
    )
    assert target.exp()[0].tolist() == pytest.approx([1 / 3] * 3)
    assert compute_entropy(target, EVERY).item() == pytest.approx(math.log(3))
    assert retriever_loss(torch.zeros(1, 3), target, EVERY).item() == pytest.approx(0, abs=1e-7)
    assert retriever_loss(torch.tensor([[2.0, 0.0, 0.0]]), target, EVERY).item() > 0


def test_half_precision_outside_does_not_reach_it() -> None:
    scores = torch.tensor([[1.0, 1.001, 0.5]])
    target = compute_log_target(torch.tensor([[0.1, 0.2, 0.3]]), EVERY, 0.1)
    with torch.autocast("cpu", torch.bfloat16):
        found = retriever_loss(scores, target, EVERY)
    assert torch.equal(found, retriever_loss(scores, target, EVERY))
