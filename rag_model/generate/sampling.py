"""Draw the next token: temperature, then top-k, then the nucleus, in the order that transformers uses.

Every group has its own random stream, so that an answer depends on its seed and not on the other questions in
the batch.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from rag_model.digest import digest_json
from rag_model.generate.beam import Propose
from rag_model.generate.decoding import Sampling


def seed_of(sampling: Sampling | None, text: str) -> int:
    """Return the seed of the text that is to be continued, which does not depend on the other texts of its batch."""
    return int(digest_json([sampling.seed, text]).partition(":")[2][:15], 16) if sampling else 0


def streams(seeds: Sequence[int]) -> list[torch.Generator]:
    """Return one stream of random numbers per seed; equal for every device, since the CPU draws."""
    return [torch.Generator().manual_seed(seed) for seed in seeds]


def uniform(generators: Sequence[torch.Generator]) -> Tensor:
    """Return one number of [0, 1) from each stream, (n,) float64."""
    return torch.stack([torch.rand((), generator=one, dtype=torch.float64) for one in generators])


def drawn(sampling: Sampling, generators: Sequence[torch.Generator]) -> Propose:
    """Propose one token per row, drawn with the stream of its group; its log p is the model's, before any setting."""

    def propose(log_p: Tensor, groups: Sequence[int]) -> tuple[Tensor, Tensor]:
        numbers = uniform([generators[group] for group in groups]).to(log_p.device)
        tokens = draw(log_p, sampling, numbers)[:, None]
        return log_p.gather(-1, tokens), tokens  # (h, v) -> (h, 1)

    return propose


def draw(log_p: Tensor, sampling: Sampling, numbers: Tensor) -> Tensor:
    """Return one token per row, (n,) int64: where the cumulative p, most likely token first, exceeds the row's number.

    Args:
        log_p: (n, v) log p of the tokens.
        sampling: temperature, top_k and top_p.
        numbers: (n,) float64 of [0, 1).
    """
    p, order = (log_p.double() / sampling.temperature).softmax(-1).sort(-1, descending=True)
    if sampling.top_k:
        p[:, sampling.top_k :] = 0
    before = p.cumsum(-1) - p
    p = p.where(before < sampling.top_p * p.sum(-1, keepdim=True), 0)
    total = p.cumsum(-1)
    places = (total <= numbers[:, None] * total[:, -1:]).sum(-1)  # (n, v) -> (n,)
    last = (p > 0).sum(-1) - 1  # the product may round up to the total
    return order.gather(-1, places.minimum(last).clamp(min=0)[:, None])[:, 0]  # (n, 1) -> (n,)
