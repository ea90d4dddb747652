"""The best products beside a plain product of all tokens: values and gradients."""

import pytest
import torch

from rag_model.encoders.sparse_model import max_inner_products


@pytest.mark.parametrize("lengths", [(5, 5, 5), (5, 1, 3)])
def test_values_and_gradients_are_those_of_a_plain_product(lengths: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    hidden = torch.randn(3, 5, 4, dtype=torch.float64, requires_grad=True)
    words = torch.randn(11, 4, dtype=torch.float64, requires_grad=True)
    real = torch.arange(5) < torch.tensor(lengths)[:, None]
    plain = (hidden @ words.T).masked_fill(~real[..., None], -torch.inf).amax(1)
    actual = max_inner_products(hidden, words, lengths)
    assert torch.allclose(actual, plain, rtol=1e-12)
    expected = torch.autograd.grad(plain.square().sum(), (hidden, words))
    found = torch.autograd.grad(actual.square().sum(), (hidden, words))
    assert all(torch.allclose(*pair, rtol=1e-12) for pair in zip(found, expected, strict=True))


def test_gradients_are_those_of_finite_differences() -> None:
    torch.manual_seed(1)
    hidden = torch.randn(2, 3, 2, dtype=torch.float64, requires_grad=True)
    words = torch.randn(5, 2, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda *given: max_inner_products(*given, (3, 2)), (hidden, words))
