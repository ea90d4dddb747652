"""The marginals, by adding up every case by hand: three passages, two tokens of a vocabulary of three."""

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


def enumerated(said: tuple[int, int], marginal: Marginal) -> float:
    """Return p(y|x) by sums over passages; `token` chooses a passage for each mask by itself."""
    weights = [math.exp(score) for score in SCORES[0].tolist()]
    p = [weight / sum(weights) for weight in weights]
    if marginal == "sequence":
        return sum(p[z] * float(WORDS[z, 0, said[0]]) * float(WORDS[z, 1, said[1]]) for z in range(3))
    return sum(
        p[one] * float(WORDS[one, 0, said[0]]) * p[two] * float(WORDS[two, 1, said[1]])
        for one, two in itertools.product(range(3), repeat=2)
    )


def likelihood(said: tuple[int, int]) -> torch.Tensor:
    return torch.stack([WORDS[:, place, word] for place, word in enumerate(said)], 1).log()[None]  # (1, 3, 2)


@pytest.mark.parametrize("marginal", ["sequence", "token"])
def test_each_marginal_is_its_sum_over_passages(marginal: Marginal) -> None:
    every = list(itertools.product(range(3), repeat=2))
    found = [
        compute_log_marginal(compute_log_prior(SCORES, ALL), likelihood(said), marginal).exp().item() for said in every
    ]
    assert found == pytest.approx([enumerated(said, marginal) for said in every], rel=1e-12)
    assert sum(found) == pytest.approx(1), "it is a distribution over all that y can be"


def test_the_marginals_differ_with_two_masks_and_agree_with_one() -> None:
    log_p = likelihood((0, 1))
    both = [compute_log_marginal(compute_log_prior(SCORES, ALL), log_p, kind).item() for kind in ("sequence", "token")]
    assert abs(both[0] - both[1]) > 1e-3
    alone = [
        compute_log_marginal(compute_log_prior(SCORES, ALL), log_p[:, :, :1], kind).item()
        for kind in ("sequence", "token")
    ]
    assert alone[0] == pytest.approx(alone[1], rel=1e-12)


@pytest.mark.parametrize(("marginal", "loss"), [("sequence", 5.5), ("token", 1.0)])
def test_the_loss_of_tokens_is_the_mean_over_the_masks_of_the_batch(marginal: Marginal, loss: float) -> None:
    """Texts of one and of ten masks, each of -1 nat, by the authors' `sum(log_p * weights) / sum(weights)`."""
    assert compute_nll(torch.tensor([-1.0, -10.0]), 11, marginal).item() == pytest.approx(loss)


@pytest.mark.parametrize("marginal", ["sequence", "token"])
def test_padding_changes_nothing(marginal: Marginal) -> None:
    log_p = likelihood((2, 0))
    plain = compute_log_marginal(compute_log_prior(SCORES, ALL), log_p, marginal)
    wide = torch.nn.functional.pad(log_p, (0, 3, 0, 2))  # no such masks, and no such candidates
    scores, kept = torch.nn.functional.pad(SCORES, (0, 2)), torch.tensor([[True] * 3 + [False] * 2])
    assert compute_log_marginal(compute_log_prior(scores, kept), wide, marginal).item() == pytest.approx(
        plain.item(), rel=1e-12
    )


@pytest.mark.parametrize("marginal", ["sequence", "token"])
def test_gradients_are_those_of_finite_differences(marginal: Marginal) -> None:
    kept = torch.tensor([[True, True, True, False]])
    scores = torch.randn(1, 4, dtype=torch.float64, requires_grad=True)
    log_p = (-torch.rand(1, 4, 2, dtype=torch.float64)).requires_grad_()

    def found(scores: torch.Tensor, log_p: torch.Tensor) -> torch.Tensor:
        return compute_log_marginal(compute_log_prior(scores, kept, 0.5), log_p, marginal).sum()

    assert torch.autograd.gradcheck(found, (scores, log_p))


@pytest.mark.parametrize("marginal", ["sequence", "token"])
def test_only_a_null_passage_gives_no_utility_and_no_gradient_to_the_scores(marginal: Marginal) -> None:
    scores = torch.tensor([[3.0, 0.0]], requires_grad=True)
    log_p = torch.tensor([[[-1.0, -2.0], [0.0, 0.0]]])
    log_y = compute_log_marginal(compute_log_prior(scores, torch.tensor([[True, False]])), log_p, marginal)
    assert (log_y.item(), compute_utility(log_y, log_p).item()) == (-3, 0)
    log_y.sum().backward()
    assert scores.grad is not None
    assert scores.grad.tolist() == [[0, 0]]


def test_utility_is_what_the_others_add_to_the_null_passage() -> None:
    log_p = likelihood((0, 1))
    log_y = compute_log_marginal(compute_log_prior(SCORES, ALL), log_p, "sequence")
    assert compute_utility(log_y, log_p).item() == pytest.approx(
        math.log(enumerated((0, 1), "sequence")) - math.log(0.7 * 0.8)
    )
