"""The likelihood of masked tokens with the passage marginalised, in both forms, and the utility of retrieval.

p(y|x) = sum_z p(z|x) p(y|z,x): Guu et al. 2020, section 3.1. x is a text with masks, y the tokens that they hide, z one
of the candidates.
"""

from typing import Literal

import torch
from torch import Tensor

Marginal = Literal["sequence", "token"]


def prior(scores: Tensor, kept: Tensor, temperature: float = 1.0) -> Tensor:
    """Return the (b, c) float32 log p(z|x) of candidates: the softmax of their scores (section 3.2).

    `scores` (b, c) inner products; `kept` (b, c) bool: which of them there are, one or more a text. Others have -inf.
    """
    with torch.autocast(scores.device.type, enabled=False):
        exact = scores.to(torch.promote_types(scores.dtype, torch.float32)) / temperature
        return exact.masked_fill(~kept, -torch.inf).log_softmax(1)


def log_marginal(log_prior: Tensor, log_p: Tensor, marginal: Marginal) -> Tensor:
    """Return the (b,) log p(y|x) of all masked tokens of each text.

    `sequence`: log sum_z p(z|x) prod_j p(y_j|z,x): the paper's: one passage explains all masks.
    `token`: sum_j log sum_z p(z|x) p(y_j|z,x): the authors' code: each mask has its own sum.
    With one mask a text both are the same.

    `log_prior` (b, c), with -inf where there is no candidate; `log_p` (b, c, m) log p(y_j|z,x), 0 where there is no
    mask: there the sum over z is 1, and adds 0.
    """
    if marginal == "sequence":
        return (log_prior + log_p.sum(2)).logsumexp(1)  # (b, c) -> (b,)
    return (log_prior[:, :, None] + log_p).logsumexp(1).sum(1)  # (b, c, m) -> (b, m) -> (b,)


def utility(log_y: Tensor, log_p: Tensor) -> Tensor:
    """Return the (b,) retrieval utility, log p(y|x) - log p(y|x, null), in nats.

    Guu et al. 2020 define it for one passage z, in place of x's marginal here.

    `log_y` (b,) of `log_marginal`; `log_p` (b, c, m), whose first candidate is the null passage. Above 0, what is
    retrieved helps.
    """
    return log_y - log_p[:, 0].sum(1)  # (b, m) -> (b,)
