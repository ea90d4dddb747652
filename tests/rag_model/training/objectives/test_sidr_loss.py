"""The four losses by hand on two questions and three passages, what the gradient reaches, and what is left out."""

import math

import pytest
import torch
from torch import Tensor

from rag_model.training.objectives.sidr import keep_terms, semi_parametric_loss, two_way_loss

ASKED = torch.tensor([[3.0, 1.0, 0.5, 0.2], [0.1, 2.0, 1.0, 0.3]], dtype=torch.float64)
ASKED_BAG = torch.tensor([[True, False, False, True], [False, False, True, False]])
READ = torch.tensor([[2.0, 0.3, 1.0, 0.4], [0.2, 1.5, 0.6, 0.1], [1.0, 1.2, 0.2, 2.0]], dtype=torch.float64)
READ_BAG = torch.tensor([[True, False, False, False], [False, True, False, True], [True, True, False, False]])
GOLD = torch.tensor([0, 1])
NONE = torch.zeros(2, 3, dtype=torch.bool)


def dot(one: list[float], other: list[float]) -> float:
    return sum(a * b for a, b in zip(one, other, strict=True))


def by_hand(asked: list[list[float]], read: list[list[float]], temperature: float) -> float:
    """Both directions, with nothing of torch."""
    scores = [[dot(one, other) / temperature for other in read] for one in asked]
    forth = [math.log(sum(map(math.exp, row))) - row[place] for place, row in enumerate(scores)]
    back = [math.log(sum(math.exp(row[place]) for row in scores)) - scores[place][place] for place in range(len(asked))]
    return sum(forth) / len(forth) + sum(back) / len(back)


@pytest.mark.parametrize("temperature", [1.0, 2.0])
def test_it_is_the_mean_of_four_losses_by_hand(temperature: float) -> None:
    # the heaviest term, and those of the bags
    asked_kept = [[3.0, 0.0, 0.0, 0.2], [0.0, 2.0, 1.0, 0.0]]
    read_kept = [[2.0, 0.0, 0.0, 0.0], [0.0, 1.5, 0.0, 0.1], [1.0, 1.2, 0.0, 2.0]]
    expected = (
        by_hand(asked_kept, READ.tolist(), temperature)
        + by_hand(ASKED.tolist(), read_kept, temperature)
        + by_hand(ASKED_BAG.double().tolist(), READ.tolist(), temperature)
        + by_hand(ASKED.tolist(), READ_BAG.double().tolist(), temperature)
    ) / 4
    loss, found = semi_parametric_loss((ASKED, ASKED_BAG), (READ, READ_BAG), GOLD, NONE, 1, temperature)
    assert float(loss) == pytest.approx(expected, rel=1e-12)
    assert {name: float(one) for name, one in found.items()} == {"accuracy": 0.5, "bag_accuracy": 0.5}


def test_the_gradient_reaches_weights_and_no_bag() -> None:
    given = [one.clone().requires_grad_() for one in (ASKED, READ)]

    def loss(asked: Tensor, read: Tensor) -> Tensor:
        return semi_parametric_loss((asked, ASKED_BAG), (read, READ_BAG), GOLD, NONE, 2)[0]

    assert torch.autograd.gradcheck(loss, given)
    assert not keep_terms(given[0], ASKED_BAG, 1).detach()[0, 1:3].any()


def test_another_positive_and_a_shared_one_are_no_negatives() -> None:
    scores = torch.tensor([[1.0, 5.0, 2.0], [3.0, 1.0, 0.0]], dtype=torch.float64)
    ignored = torch.tensor([[False, True, False], [False, False, False]])
    forth = (math.log(math.exp(1) + math.exp(2)) - 1 + math.log(math.exp(3) + math.exp(1) + 1) - 1) / 2
    back = (math.log(math.exp(1) + math.exp(3)) - 1 + 0) / 2  # question 0 has passage 1 as a positive too
    assert float(two_way_loss(scores, GOLD, ignored)) == pytest.approx(forth + back, rel=1e-12)
    assert float(two_way_loss(scores, GOLD, ignored, both_ways=False)) == pytest.approx(forth, rel=1e-12)
    same = two_way_loss(scores, torch.tensor([0, 0]), torch.zeros(2, 3, dtype=torch.bool))
    plain = two_way_loss(scores, torch.tensor([0, 0]), torch.zeros(2, 3, dtype=torch.bool), both_ways=False)
    assert float(same) == pytest.approx(float(plain)), "both ask for one passage: nothing to tell apart"


def test_equal_scores_are_finite() -> None:
    flat, bag = torch.ones(2, 4), torch.ones(2, 4, dtype=torch.bool)
    loss, _ = semi_parametric_loss((flat, bag), (torch.ones(3, 4), torch.ones(3, 4, dtype=torch.bool)), GOLD, NONE, 2)
    assert float(loss) == pytest.approx(math.log(3) + math.log(2))
