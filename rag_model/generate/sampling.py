"""Draw the next token: temperature, then the likeliest k, then the nucleus, in the order that transformers uses.

Every group draws from a stream of its own, so that an answer depends on its seed and not on what else is answered
beside it.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from rag_model.generate.beam import Propose
from rag_model.generate.decoding import Sampling


def streams(seeds: Sequence[int]) -> list[torch.Generator]:
    """Return one stream of random numbers a seed; equal on every device, since it is the processor's."""
    return [torch.Generator().manual_seed(seed) for seed in seeds]


def uniform(generators: Sequence[torch.Generator]) -> Tensor:
    """Return one number of [0, 1) from each stream, (n,) float64."""
    return torch.stack([torch.rand((), generator=one, dtype=torch.float64) for one in generators])


def drawn(sampling: Sampling, generators: Sequence[torch.Generator]) -> Propose:
    """Propose one token a row, drawn from the stream of its group; its log p is the model's own, before any setting."""

    def propose(log_p: Tensor, groups: Sequence[int]) -> tuple[Tensor, Tensor]:
        numbers = uniform([generators[group] for group in groups]).to(log_p.device)
        tokens = draw(log_p, sampling, numbers)[:, None]
        return log_p.gather(-1, tokens), tokens

    return propose


def draw(log_p: Tensor, sampling: Sampling, numbers: Tensor) -> Tensor:
    """Return one token a row, (n,) int64: where the cumulative p, likeliest token first, passes the row's number.

    Args:
        log_p: (n, v) log p of the tokens.
        sampling: what to draw from.
        numbers: (n,) float64 of [0, 1).
    """
    p, order = (log_p.double() / sampling.temperature).softmax(-1).sort(-1, descending=True)
    if sampling.top_k:
        p[:, sampling.top_k :] = 0
    before = p.cumsum(-1) - p
    p = p.where(before < sampling.top_p * p.sum(-1, keepdim=True), 0)
    total = p.cumsum(-1)
    places = (total <= numbers[:, None] * total[:, -1:]).sum(-1)
    last = (p > 0).sum(-1) - 1  # a product may round up to the total
    return order.gather(-1, places.minimum(last).clamp(min=0)[:, None])[:, 0]
