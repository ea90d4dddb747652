"""The losses over lists, against their equations, in float64."""

import math

import pytest
import torch

from rag_model.training.objectives.losses import listwise_loss, margin_mse_loss, pad_lists

FLAT = [2.0, 1.0, -3.0, 0.5, 4.0]
TOLD = [5.0, -1.0, 2.0, 8.0, 7.5]
LENGTHS = [3, 2]


def lists(values: list[float]) -> list[list[float]]:
    return [values[:3], values[3:]]


def double(values: list[float]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64, requires_grad=True)


def test_the_list_loss_is_the_softmax_over_each_list() -> None:
    flat = double(FLAT)
    loss, best = listwise_loss(pad_lists(flat, LENGTHS))
    expected = [-math.log(math.exp(some[0]) / sum(map(math.exp, some))) for some in lists(FLAT)]
    assert loss.item() == pytest.approx(sum(expected) / 2, rel=1e-12)
    assert best.item() == 0.5
    loss.backward()  # type: ignore[no-untyped-call]
    gold = [1.0, 0.0, 0.0, 1.0, 0.0]
    shares = [math.exp(one) / sum(map(math.exp, some)) for some in lists(FLAT) for one in some]
    assert flat.grad is not None
    assert flat.grad.tolist() == pytest.approx([(p - y) / 2 for p, y in zip(shares, gold, strict=True)], rel=1e-9)


def test_a_positive_that_ties_is_not_best() -> None:
    assert listwise_loss(torch.zeros(3, 4))[1] == 0


def test_margin_mse_is_the_mean_over_pairs() -> None:
    flat, told = double(FLAT), torch.tensor(TOLD, dtype=torch.float64)
    loss = margin_mse_loss(pad_lists(flat, LENGTHS), pad_lists(told, LENGTHS))
    both = zip(lists(FLAT), lists(TOLD), strict=True)
    errors = [(s[0] - s[j]) - (t[0] - t[j]) for s, t in both for j in range(1, len(s))]
    assert loss.item() == pytest.approx(sum(error**2 for error in errors) / 3, rel=1e-12)
    loss.backward()  # type: ignore[no-untyped-call]
    a, b, c = (2 * error / 3 for error in errors)
    assert flat.grad is not None
    assert flat.grad.tolist() == pytest.approx([a + b, -a, -b, c, -c], rel=1e-12)


def test_margin_mse_of_the_teachers_own_scores_is_nothing() -> None:
    told = pad_lists(torch.tensor(TOLD), LENGTHS)
    assert margin_mse_loss(told + 3, told) == 0, "a constant of the question changes no margin"
