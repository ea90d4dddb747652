"""LM-supervised retrieval: a retriever's distribution over passages beside the one that a language model prefers.

Lin et al. 2023 (RA-DIT, arXiv 2310.01352), section 2.4, after Shi et al. 2023 (REPLUG):

    p_R(c|x)      = exp(s(x,c) / T) / Σ_c' exp(s(x,c') / T)                   eq. 2, T = 1
    p_LSR(c|x,y)  = exp(p_LM(y|c∘x) / τ) / Σ_c' exp(p_LM(y|c'∘x) / τ)         eq. 4, τ = .01
    L             = E_(x,y) KL( p_R(c|x) ‖ p_LSR(c|x,y) )                     eq. 5

So the retriever is the first argument: KL(p ‖ q) = Σ p log(p / q) is large where the retriever puts weight on a passage
that the language model does not want, and small where it only leaves a wanted one out. Distillation of a cross-encoder
(`late.distillation`) has the other direction. Lists may differ in length: their ends are masked.
"""

from typing import Literal

import torch
from torch import Tensor

Preference = Literal["probability", "mean_log_probability"]


def preference(log_p: Tensor, tokens: Tensor, kind: Preference) -> Tensor:
    """Return the (b, k) scores of eq. 4 from (b, k) log p_LM(y|c∘x) and the (b,) numbers of tokens of y.

    `probability` is the paper's. It underflows for long answers: of 50 tokens all are 0, and the target is uniform.
    `mean_log_probability` is log p / tokens, which does not.
    """
    return log_p.exp() if kind == "probability" else log_p / tokens[:, None].clamp(min=1)


def log_target(scores: Tensor, kept: Tensor, temperature: float) -> Tensor:
    """Return (b, k) log p_LSR, 0 where `kept`, (b, k) bool, is false; the scores are those of `preference`."""
    return (scores / temperature).masked_fill(~kept, -torch.inf).log_softmax(1).masked_fill(~kept, 0)


def retriever_loss(scores: Tensor, target: Tensor, kept: Tensor, temperature: float = 1.0) -> Tensor:
    """Return (b,) KL(p_R ‖ p_LSR) in nats, with gradient to `scores`, (b, k) of the retriever; `target` is log p_LSR.

    A list has one passage or more; of one passage the loss is 0. Computed in float32 or wider, also under autocast.
    """
    with torch.autocast(scores.device.type, enabled=False):
        wide = scores.to(torch.promote_types(scores.dtype, torch.float32)) / temperature
        own = wide.masked_fill(~kept, -torch.inf).log_softmax(1).masked_fill(~kept, 0)  # (b, k)
        return (own.exp() * (own - target)).masked_fill(~kept, 0).sum(1)  # (b, k) -> (b,)


def entropy(log_p: Tensor, kept: Tensor) -> Tensor:
    """Return (b,) the entropy in nats of distributions, (b, k) in logarithms: log k if uniform, 0 if one is chosen."""
    return -(log_p.exp() * log_p).masked_fill(~kept, 0).sum(1)
