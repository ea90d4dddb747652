"""The marginals, compared with sums over every case: three passages, two masks, three words."""

import itertools
import math

import pytest
import torch

from rag_model.training.objectives.realm_model import (
    Marginal,
    compute_log_marginal,
    compute_log_prior,
    compute_nll,
    compute_utility,
)

SCORES = torch.tensor([[1.0, 2.0, -0.5]], dtype=torch.float64)
ALL = torch.ones(1, 3, dtype=torch.bool)
# p(y_j = v | z, x) of 3 passages, 2 masks, 3 words
WORDS = torch.tensor(
    [[[0.7, 0.2, 0.1], [0.1, 0.8, 0.1]], [[0.2, 0.5, 0.3], [0.6, 0.3, 0.1]], [[0.1, 0.1, 0.8], [0.3, 0.3, 0.4]]],
    dtype=torch.float64,
)


def enumerate_likelihood(answer: tuple[int, int], marginal: Marginal) -> float:
    """Return p(y|x) as a sum over passages; `token` chooses a passage for each mask separately."""
    weights = [math.exp(score) for score in SCORES[0].tolist()]
    p = [weight / sum(weights) for weight in weights]
    if marginal == "sequence":
        return sum(p[z] * float(WORDS[z, 0, answer[0]]) * float(WORDS[z, 1, answer[1]]) for z in range(3))
    return sum(
        p[first] * float(WORDS[first, 0, answer[0]]) * p[second] * float(WORDS[second, 1, answer[1]])
        for first, second in itertools.product(range(3), repeat=2)
    )


def log_likelihood(answer: tuple[int, int]) -> torch.Tensor:
    return torch.stack([WORDS[:, position, word] for position, word in enumerate(answer)], 1).log()[None]  # (1, 3, 2)


@pytest.mark.parametrize("marginal", ["sequence", "token"])
def test_marginals_are_sums_over_passages(marginal: Marginal) -> None:
    answers = list(itertools.product(range(3), repeat=2))
    log_prior = compute_log_prior(SCORES, ALL)
    probabilities = [math.exp(compute_log_marginal(log_prior, log_likelihood(a), marginal).item()) for a in answers]
    assert probabilities == pytest.approx([enumerate_likelihood(answer, marginal) for answer in answers], rel=1e-12)
    assert sum(probabilities) == pytest.approx(1), "the marginal is a distribution over all y"


def test_marginals_differ_with_two_masks_and_agree_with_one() -> None:
    log_p = log_likelihood((0, 1))
    log_prior = compute_log_prior(SCORES, ALL)
    sequence, token = (compute_log_marginal(log_prior, log_p, kind).item() for kind in ("sequence", "token"))
    assert abs(sequence - token) > 1e-3
    one_mask = [compute_log_marginal(log_prior, log_p[:, :, :1], kind).item() for kind in ("sequence", "token")]
    assert one_mask[0] == pytest.approx(one_mask[1], rel=1e-12)


@pytest.mark.parametrize(("marginal", "loss"), [("sequence", 5.5), ("token", 1.0)])
def test_token_loss_is_the_mean_over_the_masks_of_the_batch(marginal: Marginal, loss: float) -> None:
    """Texts with one and ten masks of -1 nat each; the authors compute `sum(log_p * weights) / sum(weights)`."""
    assert compute_nll(torch.tensor([-1.0, -10.0]), 11, marginal).item() == pytest.approx(loss)


@pytest.mark.parametrize("marginal", ["sequence", "token"])
def test_padding_changes_nothing(marginal: Marginal) -> None:
    log_p = log_likelihood((2, 0))
    expected = compute_log_marginal(compute_log_prior(SCORES, ALL), log_p, marginal)
    padded = torch.nn.functional.pad(log_p, (0, 3, 0, 2))  # two more candidates and three more masks
    scores, mask = torch.nn.functional.pad(SCORES, (0, 2)), torch.tensor([[True] * 3 + [False] * 2])
    assert compute_log_marginal(compute_log_prior(scores, mask), padded, marginal).item() == pytest.approx(
        expected.item(), rel=1e-12
    )


@pytest.mark.parametrize("marginal", ["sequence", "token"])
def test_gradients_agree_with_finite_differences(marginal: Marginal) -> None:
    mask = torch.tensor([[True, True, True, False]])
    scores = torch.randn(1, 4, dtype=torch.float64, requires_grad=True)
    log_p = (-torch.rand(1, 4, 2, dtype=torch.float64)).requires_grad_()

    def sum_log_marginal(scores: torch.Tensor, log_p: torch.Tensor) -> torch.Tensor:
        return compute_log_marginal(compute_log_prior(scores, mask, 0.5), log_p, marginal).sum()

    assert torch.autograd.gradcheck(sum_log_marginal, (scores, log_p))


@pytest.mark.parametrize("marginal", ["sequence", "token"])
def test_null_passage_alone_gives_no_utility_and_no_gradient(marginal: Marginal) -> None:
    scores = torch.tensor([[3.0, 0.0]], requires_grad=True)
    log_p = torch.tensor([[[-1.0, -2.0], [0.0, 0.0]]])
    log_y = compute_log_marginal(compute_log_prior(scores, torch.tensor([[True, False]])), log_p, marginal)
    assert (log_y.item(), compute_utility(log_y, log_p).item()) == (-3, 0)
    log_y.sum().backward()
    assert scores.grad is not None
    assert scores.grad.tolist() == [[0, 0]]


def test_utility_is_the_gain_over_the_null_passage() -> None:
    log_p = log_likelihood((0, 1))
    log_y = compute_log_marginal(compute_log_prior(SCORES, ALL), log_p, "sequence")
    assert compute_utility(log_y, log_p).item() == pytest.approx(
        math.log(enumerate_likelihood((0, 1), "sequence")) - math.log(0.7 * 0.8)
    )
