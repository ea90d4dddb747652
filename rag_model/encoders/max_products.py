"""The best inner product of a text's tokens with each word of a vocabulary, without the products of all tokens at once.

A plain product keeps (b, t, V) numbers for the backward pass: a gigabyte for 32 texts of 256 tokens and BERT's
vocabulary. Here one text's products are made at a time, and only the place of each maximum is kept. So the backward
pass costs as much as one token a text, and not t: a word's gradient is a weighted sum of one token of each text, and a
token's one of the words that it is the best of. `embedding_bag` sums without the (b, V, h) products.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
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
        texts, length, _ = hidden.shape
        starts = torch.arange(0, texts * length, length, device=hidden.device)
        tokens = places + starts[:, None]  # (b, V): rows of the (b * t, h) tokens
        of_words = _sums(hidden.flatten(0, 1), tokens.T, gradient.T)  # (V, b) -> (V, h)
        order = tokens.flatten().argsort(stable=True)  # (b * V,): token by token
        counts = tokens.flatten().bincount(minlength=texts * length)  # words of each token
        of_hidden = _sums(words, order % len(words), gradient.flatten()[order], counts.cumsum(0) - counts)  # (b * t, h)
        return of_hidden.view_as(hidden), of_words, None


def _sums(rows: Tensor, chosen: Tensor, factors: Tensor, starts: Tensor | None = None) -> Tensor:
    """Return a weighted sum of rows for each row of `chosen`, or for each part of it that begins at one of `starts`."""
    chosen, factors = chosen.contiguous(), factors.to(rows.dtype).contiguous()
    return nn.functional.embedding_bag(chosen, rows, starts, mode="sum", per_sample_weights=factors)
