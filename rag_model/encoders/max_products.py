"""The best inner product of a text's tokens with each word of a vocabulary, without the products of all tokens at once.

A plain product keeps (b, t, V) numbers for the backward pass: a gigabyte for 32 texts of 256 tokens and BERT's
vocabulary. Here one text's products are made at a time, and only the place of each maximum is kept. So the backward
pass costs as much as one token a text, and not t.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


def max_products(hidden: Tensor, words: Tensor, lengths: Sequence[int]) -> Tensor:
    """Return (b, V) max over the first `lengths[i]` tokens t of hidden[i, t] · words[v], with gradient to both.

    `hidden` (b, t, h), `words` (V, h); of tokens with the same product the gradient goes to one.
    """
    found: Tensor = _MaxProducts.apply(hidden, words, tuple(lengths))  # type: ignore[no-untyped-call]
    return found


class _MaxProducts(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, words: Tensor, lengths: tuple[int, ...]) -> Tensor:
        best = hidden.new_empty(len(hidden), len(words))
        places = torch.empty(best.shape, dtype=torch.int16, device=hidden.device)
        for row, length in enumerate(lengths):
            products = hidden[row, :length] @ words.T  # (t, h) @ (h, V) -> (t, V)
            best[row], place = products.max(0)
            places[row] = place
        ctx.save_for_backward(hidden, words, places)
        return best

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        hidden, words, places = ctx.saved_tensors
        of_hidden, of_words = torch.zeros_like(hidden), torch.zeros_like(words)
        for row, own in enumerate(gradient):
            place = places[row].long()  # (V,)
            of_hidden[row].index_add_(0, place, own[:, None] * words)  # (V, h) -> (t, h)
            of_words.addcmul_(own[:, None], hidden[row][place])  # (V, 1) * (V, h)
        return of_hidden, of_words, None
