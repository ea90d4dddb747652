"""The likelihood of an answer under RAG-Sequence and RAG-Token (Lewis et al. 2020, section 2.1), in log space.

Passages z are latent; p(z|x) is a softmax over the inner products of the k retrieved passages with the question:

    RAG-Sequence  p(y|x) = Σ_z p(z|x) Π_i p(y_i|x,z,y_<i)      one passage explains the whole answer
    RAG-Token     p(y|x) = Π_i Σ_z p(z|x) p(y_i|x,z,y_<i)      each token has its own passage

For a target of one token, as in classification, both are the same. Shapes: b questions, k passages each, t tokens, a
vocabulary of v. A passage whose score is -inf contributes nothing, so a question may have fewer than k passages.

Where transformers' RAG classes differ from the equations, this file follows the equations: `RagSequenceForGeneration`
adds log p(z|x) to the second token, and so loses it if a target has only one token.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

_CPU_VALUES = 1 << 17  # logits processed at a time: fits a core's cache
_CUDA_VALUES = 1 << 26  # large enough that kernel launches cost little compared with kernels


@dataclass(frozen=True, slots=True)
class Likelihood:
    """The log-likelihood of given answers, and the posterior of the passages. Natural logarithms."""

    log_p: Tensor  # (b,) log p(y|x)
    posterior: Tensor  # (b, k) log p(z|x,y); for RAG-Token log of the mean over the tokens
    tokens: Tensor | None  # (b, k, t) log p(z_i|x,y_≤i) of RAG-Token; undefined where padded


def log_prior(scores: Tensor, temperature: float = 1.0) -> Tensor:
    """Return (b, k) log p(z|x) = log softmax(score / temperature), at least float32.

    >>> log_prior(torch.tensor([[2.0, 2.0]])).exp()
    tensor([[0.5000, 0.5000]])
    """
    return (_wide(scores) / temperature).log_softmax(-1)


def sequence_likelihood(prior: Tensor, log_p: Tensor, mask: Tensor) -> Likelihood:
    """Return log Σ_z p(z|x) Π_i p(y_i|x,z,y_<i), and p(z|x,y) by Bayes' rule.

    Args:
        prior: (b, k) log p(z|x).
        log_p: (b, k, t) log p(y_i|x,z,y_<i).
        mask: (b, t) bool, False for tokens that do not count.
    """
    joint = prior + _sum(log_p, mask)  # (b, k, t) -> (b, k)
    total = joint.logsumexp(1)
    return Likelihood(total, (joint - total[:, None]).detach(), None)


def token_likelihood(prior: Tensor, log_p: Tensor, mask: Tensor) -> Likelihood:
    """Return Σ_i log Σ_z p(z|x) p(y_i|x,z,y_<i), and each passage's share in each token.

    The arguments are those of `sequence_likelihood`.
    """
    joint = prior[..., None] + log_p  # (b, k) -> (b, k, 1) -> (b, k, t)
    total = joint.logsumexp(1)
    shares = (joint - total[:, None]).detach()  # total: (b, t) -> (b, 1, t)
    counted = mask.sum(1).clamp(min=1)[:, None]  # (b, t) -> (b, 1)
    posterior = shares.masked_fill(~mask[:, None], -torch.inf).logsumexp(2) - counted.log()  # (b, k, t) -> (b, k)
    return Likelihood(total.masked_fill(~mask, 0).sum(1), posterior, shares)


def sequence_uniform(prior: Tensor, totals: Tensor, mask: Tensor, vocabulary: int) -> Tensor:
    """Return the label smoothing term of RAG-Sequence, (b,), as in transformers' `RagSequenceForGeneration`.

    log Σ_z exp(v log p(z|x) + Σ_i Σ_w log p(w|x,z,y_<i)) over words w; `totals` is (b, k, t) Σ_w log p(w|x,z,y_<i).
    """
    return (vocabulary * prior + _sum(totals, mask)).logsumexp(1)


def token_uniform(prior: Tensor, logits: Tensor, mask: Tensor) -> Tensor:
    """Return the label smoothing term of RAG-Token, (b,): Σ_i Σ_w log Σ_z p(z|x) p(w|x,z,y_<i); logits (b, k, t, v).

    Goes token by token and recomputes in the backward pass: the (b, t, v) mixture is never held in memory.
    """
    steps = [
        checkpoint(_mixture_total, prior, step, use_reentrant=False, preserve_rng_state=False)
        for step in logits.unbind(2)  # (b, k, t, v) -> t times (b, k, v)
    ]
    return torch.stack(steps, 1).masked_fill(~mask, 0).sum(1)  # t times (b,) -> (b, t) -> (b,)


def smoothed(log_p: Tensor, uniform: Tensor, epsilon: float, vocabulary: int) -> Tensor:
    """Return the loss (1 - ε) (-log p(y|x)) + ε / v (-uniform), (b,), as fairseq and transformers smooth labels."""
    return -(1 - epsilon) * log_p - epsilon / vocabulary * uniform


def target_log_p(logits: Tensor, targets: Tensor, *, totals: bool = False) -> tuple[Tensor, Tensor]:
    """Return (b, k, t) log p(y_i|…) of (b, k, t, v) logits for targets (b, t), at least float32, with gradient.

    With `totals`, return (b, k, t) Σ_w log p(w|…) as well, else zeros. Processes some rows of the logits at a
    time; the only tensor of their size is their gradient, in the backward pass.
    """
    wanted = targets[:, None].expand(logits.shape[:-1])  # (b, t) -> (b, 1, t) -> (b, k, t)
    rows = logits.reshape(-1, logits.shape[-1])  # (b, k, t, v) -> (b k t, v)
    found: tuple[Tensor, Tensor] = _TargetLogP.apply(rows, wanted.reshape(-1), totals)  # type: ignore[no-untyped-call]
    return found[0].view(wanted.shape), found[1].view(wanted.shape)  # (b k t,) -> (b, k, t)


class _TargetLogP(torch.autograd.Function):
    """log softmax at one word per row, and its sum over all words; (n, v), (n,) -> (n,), (n,)."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, totals: bool) -> tuple[Tensor, Tensor]:
        """Save the logits unchanged, and log Σ exp of each row."""
        norms, sums = (logits.new_zeros(len(logits), dtype=_widened(logits.dtype)) for _ in range(2))
        for rows in _pieces(logits):
            piece = _wide(logits[rows])
            norms[rows] = piece.logsumexp(-1)
            if totals:
                sums[rows] = piece.sum(-1) - logits.shape[-1] * norms[rows]
        ctx.save_for_backward(logits, targets, norms)
        ctx.totals = totals
        return _wide(logits.gather(1, targets[:, None])[:, 0]) - norms, sums  # (n, v) -> (n, 1) -> (n,)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, of_target: Tensor, of_total: Tensor) -> tuple[Tensor, None, None]:
        """Return the gradient by the logits l: ∂ log p(y) / ∂ l_w = [w = y] - p(w), ∂ Σ log p / ∂ l_w = 1 - v p(w)."""
        logits, targets, norms = ctx.saved_tensors
        gradient = torch.empty_like(logits)
        for rows in _pieces(logits):
            piece = (_wide(logits[rows]) - norms[rows, None]).exp_()
            # (r,); piece is (r, v), r <= n rows at a time
            weight = of_target[rows] + (logits.shape[-1] * of_total[rows] if ctx.totals else 0)
            piece.mul_(-weight[:, None])
            if ctx.totals:
                piece.add_(of_total[rows, None])
            # (r, 1) added into (r, v)
            gradient[rows] = piece.scatter_add_(1, targets[rows, None], of_target[rows, None])
        return gradient, None, None


def _pieces(logits: Tensor) -> list[slice]:
    values = _CUDA_VALUES if logits.is_cuda else _CPU_VALUES
    size = max(1, values // logits.shape[-1])
    return [slice(start, start + size) for start in range(0, len(logits), size)]


def _mixture_total(prior: Tensor, logits: Tensor) -> Tensor:
    return (_wide(logits).log_softmax(-1) + prior[..., None]).logsumexp(1).sum(-1)  # (b, k, v) -> (b, v) -> (b,)


def _wide(values: Tensor) -> Tensor:
    return values.to(_widened(values.dtype))


def _widened(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype for sums over a vocabulary: float32 for half precision, else the dtype itself."""
    return torch.promote_types(dtype, torch.float32)


def _sum(values: Tensor, mask: Tensor) -> Tensor:
    return values.masked_fill(~mask[:, None], 0).sum(2)  # (b, t) -> (b, 1, t); (b, k, t) -> (b, k)
