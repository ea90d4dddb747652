"""SiDR's four losses, compared with plain Python on two questions and three passages."""

import math

import pytest
import torch
from torch import Tensor

from rag_model.training.objectives.sidr import keep_terms, semi_parametric_loss, two_way_loss

QUESTIONS = torch.tensor([[3.0, 1.0, 0.5, 0.2], [0.1, 2.0, 1.0, 0.3]], dtype=torch.float64)
QUESTION_BAGS = torch.tensor([[True, False, False, True], [False, False, True, False]])
PASSAGES = torch.tensor([[2.0, 0.3, 1.0, 0.4], [0.2, 1.5, 0.6, 0.1], [1.0, 1.2, 0.2, 2.0]], dtype=torch.float64)
PASSAGE_BAGS = torch.tensor([[True, False, False, False], [False, True, False, True], [True, True, False, False]])
GOLD = torch.tensor([0, 1])
NONE = torch.zeros(2, 3, dtype=torch.bool)


def dot_product(first: list[float], second: list[float]) -> float:
    return sum(a * b for a, b in zip(first, second, strict=True))


def compute_two_way_loss(questions: list[list[float]], passages: list[list[float]], temperature: float) -> float:
    """Return the loss of both directions, computed without torch."""
    scores = [[dot_product(question, passage) / temperature for passage in passages] for question in questions]
    forward = [math.log(sum(map(math.exp, row))) - row[index] for index, row in enumerate(scores)]
    columns = [[row[index] for row in scores] for index in range(len(questions))]
    backward = [math.log(sum(map(math.exp, column))) - column[index] for index, column in enumerate(columns)]
    return sum(forward) / len(forward) + sum(backward) / len(backward)


@pytest.mark.parametrize("temperature", [1.0, 2.0])
def test_loss_is_the_mean_of_four_two_way_losses(temperature: float) -> None:
    # Each vector keeps its largest term and the terms of its bag.
    questions_kept = [[3.0, 0.0, 0.0, 0.2], [0.0, 2.0, 1.0, 0.0]]
    passages_kept = [[2.0, 0.0, 0.0, 0.0], [0.0, 1.5, 0.0, 0.1], [1.0, 1.2, 0.0, 2.0]]
    expected = (
        compute_two_way_loss(questions_kept, PASSAGES.tolist(), temperature)
        + compute_two_way_loss(QUESTIONS.tolist(), passages_kept, temperature)
        + compute_two_way_loss(QUESTION_BAGS.double().tolist(), PASSAGES.tolist(), temperature)
        + compute_two_way_loss(QUESTIONS.tolist(), PASSAGE_BAGS.double().tolist(), temperature)
    ) / 4
    questions, passages = (QUESTIONS, QUESTION_BAGS), (PASSAGES, PASSAGE_BAGS)
    loss, metrics = semi_parametric_loss(questions, passages, GOLD, NONE, 1, temperature)
    assert float(loss) == pytest.approx(expected, rel=1e-12)
    assert {name: float(value) for name, value in metrics.items()} == {"accuracy": 0.5, "bag_accuracy": 0.5}


def test_gradient_reaches_the_kept_weights() -> None:
    vectors = [weights.clone().requires_grad_() for weights in (QUESTIONS, PASSAGES)]

    def loss(questions: Tensor, passages: Tensor) -> Tensor:
        return semi_parametric_loss((questions, QUESTION_BAGS), (passages, PASSAGE_BAGS), GOLD, NONE, 2)[0]

    assert torch.autograd.gradcheck(loss, vectors)
    assert not keep_terms(vectors[0], QUESTION_BAGS, 1).detach()[0, 1:3].any()


def test_other_positives_and_a_shared_positive_are_no_negatives() -> None:
    scores = torch.tensor([[1.0, 5.0, 2.0], [3.0, 1.0, 0.0]], dtype=torch.float64)
    ignored = torch.tensor([[False, True, False], [False, False, False]])
    forward = (math.log(math.exp(1) + math.exp(2)) - 1 + math.log(math.exp(3) + math.exp(1) + 1) - 1) / 2
    backward = (math.log(math.exp(1) + math.exp(3)) - 1 + 0) / 2  # passage 1 is also a positive of question 0
    assert float(two_way_loss(scores, GOLD, ignored)) == pytest.approx(forward + backward, rel=1e-12)
    assert float(two_way_loss(scores, GOLD, ignored, both_ways=False)) == pytest.approx(forward, rel=1e-12)
    shared_positive = two_way_loss(scores, torch.tensor([0, 0]), torch.zeros(2, 3, dtype=torch.bool))
    one_way = two_way_loss(scores, torch.tensor([0, 0]), torch.zeros(2, 3, dtype=torch.bool), both_ways=False)
    assert float(shared_positive) == pytest.approx(float(one_way)), "a passage of both questions has no negative"


def test_equal_scores_are_finite() -> None:
    flat, bag = torch.ones(2, 4), torch.ones(2, 4, dtype=torch.bool)
    loss, _ = semi_parametric_loss((flat, bag), (torch.ones(3, 4), torch.ones(3, 4, dtype=torch.bool)), GOLD, NONE, 2)
    assert float(loss) == pytest.approx(math.log(3) + math.log(2))
