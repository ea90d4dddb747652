"""The losses over lists, compared with their equations in float64."""

import math

import pytest
import torch

from rag_model.training.objectives.losses import listwise_loss, margin_mse_loss, pad_lists

SCORES = [2.0, 1.0, -3.0, 0.5, 4.0]
TEACHER_SCORES = [5.0, -1.0, 2.0, 8.0, 7.5]
LENGTHS = [3, 2]


def split_lists(values: list[float]) -> list[list[float]]:
    return [values[:3], values[3:]]


def double(values: list[float]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64, requires_grad=True)


def test_listwise_loss_is_the_cross_entropy_over_each_list() -> None:
    scores = double(SCORES)
    loss, best = listwise_loss(pad_lists(scores, LENGTHS))
    expected = [-math.log(math.exp(values[0]) / sum(map(math.exp, values))) for values in split_lists(SCORES)]
    assert loss.item() == pytest.approx(sum(expected) / 2, rel=1e-12)
    assert best.item() == 0.5
    loss.backward()  # type: ignore[no-untyped-call]
    gold = [1.0, 0.0, 0.0, 1.0, 0.0]
    shares = [math.exp(value) / sum(map(math.exp, values)) for values in split_lists(SCORES) for value in values]
    assert scores.grad is not None
    assert scores.grad.tolist() == pytest.approx([(p - y) / 2 for p, y in zip(shares, gold, strict=True)], rel=1e-9)


def test_positive_with_a_tied_score_is_not_best() -> None:
    assert listwise_loss(torch.zeros(3, 4))[1] == 0


def test_margin_mse_is_the_mean_squared_error_over_pairs() -> None:
    scores, teacher_scores = double(SCORES), torch.tensor(TEACHER_SCORES, dtype=torch.float64)
    loss = margin_mse_loss(pad_lists(scores, LENGTHS), pad_lists(teacher_scores, LENGTHS))
    list_pairs = zip(split_lists(SCORES), split_lists(TEACHER_SCORES), strict=True)
    errors = [(s[0] - s[j]) - (t[0] - t[j]) for s, t in list_pairs for j in range(1, len(s))]
    assert loss.item() == pytest.approx(sum(error**2 for error in errors) / 3, rel=1e-12)
    loss.backward()  # type: ignore[no-untyped-call]
    a, b, c = (2 * error / 3 for error in errors)
    assert scores.grad is not None
    assert scores.grad.tolist() == pytest.approx([a + b, -a, -b, c, -c], rel=1e-12)


def test_margin_mse_ignores_a_constant_added_to_the_scores() -> None:
    teacher_scores = pad_lists(torch.tensor(TEACHER_SCORES), LENGTHS)
    assert margin_mse_loss(teacher_scores + 3, teacher_scores) == 0
