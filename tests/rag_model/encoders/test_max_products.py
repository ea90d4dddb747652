"""Maximum inner products have the values and the gradients of a plain product of all tokens."""

import pytest
import torch

from rag_model.encoders.sparse_model import max_inner_products


@pytest.mark.parametrize("lengths", [(5, 5, 5), (5, 1, 3)])
def test_values_and_gradients_are_those_of_a_plain_product(lengths: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    hidden = torch.randn(3, 5, 4, dtype=torch.float64, requires_grad=True)
    words = torch.randn(11, 4, dtype=torch.float64, requires_grad=True)
    is_token = torch.arange(5) < torch.tensor(lengths)[:, None]
    products = (hidden @ words.T).masked_fill(~is_token[..., None], -torch.inf).amax(1)
    actual = max_inner_products(hidden, words, lengths)
    assert torch.allclose(actual, products, rtol=1e-12)
    expected_gradients = torch.autograd.grad(products.square().sum(), (hidden, words))
    gradients = torch.autograd.grad(actual.square().sum(), (hidden, words))
    assert all(torch.allclose(*pair, rtol=1e-12) for pair in zip(gradients, expected_gradients, strict=True))


def test_gradients_are_those_of_finite_differences() -> None:
    torch.manual_seed(1)
    hidden = torch.randn(2, 3, 2, dtype=torch.float64, requires_grad=True)
    words = torch.randn(5, 2, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda *inputs: max_inner_products(*inputs, (3, 2)), (hidden, words))
