"""Log-likelihood of an answer under RAG-Sequence and RAG-Token (Lewis et al. 2020, section 2.1).

Passages z are latent; p(z|x) is a softmax over the inner products of the k retrieved passages with
the question:

    RAG-Sequence  p(y|x) = Σ_z p(z|x) Π_i p(y_i|x,z,y_<i)      one passage explains the whole answer
    RAG-Token     p(y|x) = Π_i Σ_z p(z|x) p(y_i|x,z,y_<i)      each token has its own passage

For a target of one token, as in classification, both formulas are the same. Shapes: b questions, k
passages each, t tokens, v words in the vocabulary. A passage whose score is -inf contributes
nothing, so a question may have fewer than k passages.

This module follows the equations of the paper where transformers' RAG classes differ from them:
`RagSequenceForGeneration` adds log p(z|x) to the second token, so it is missing for a target of one
token.

Classification (section 3.4) compares the likelihoods of the labels as whole targets, including the
beginning and end tokens, because the training loss includes these tokens.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

from rag_model.generate.generator import Generator, State

# number of logits processed at a time on a CPU; so many fit into the cache of a core
_MAX_CPU_LOGITS = 1 << 17
# number of logits processed at a time on a GPU; with fewer, kernel launches would take most of the
# time
_MAX_CUDA_LOGITS = 1 << 26


@dataclass(frozen=True, slots=True)
class Likelihood:
    """Log-likelihoods of answers and log posteriors of passages, as natural logarithms."""

    log_p: Tensor  # (b,) log p(y|x)
    # (b, k) log p(z|x,y); for RAG-Token, log of the mean of p(z_i|x,y) over the tokens
    posterior: Tensor
    # (b, k, t) log p(z_i|x,y_≤i), undefined for padding; RAG-Token only
    token_posterior: Tensor | None


def log_prior(scores: Tensor, temperature: float = 1.0) -> Tensor:
    """Return (b, k) log p(z|x) = log softmax(score / temperature), at least float32.

    >>> log_prior(torch.tensor([[2.0, 2.0]])).exp()
    tensor([[0.5000, 0.5000]])
    """
    return (_to_wide_dtype(scores) / temperature).log_softmax(-1)


def sequence_likelihood(prior: Tensor, log_p: Tensor, mask: Tensor) -> Likelihood:
    """Return log Σ_z p(z|x) Π_i p(y_i|x,z,y_<i), and p(z|x,y) by Bayes' rule.

    Args:
        prior: (b, k) log p(z|x).
        log_p: (b, k, t) log p(y_i|x,z,y_<i).
        mask: (b, t) bool, False for tokens that are ignored.
    """
    log_joint = prior + _sum_tokens(log_p, mask)  # (b, k, t) -> (b, k)
    log_marginal_p = log_joint.logsumexp(1)
    return Likelihood(log_marginal_p, (log_joint - log_marginal_p[:, None]).detach(), None)


def token_likelihood(prior: Tensor, log_p: Tensor, mask: Tensor) -> Likelihood:
    """Return Σ_i log Σ_z p(z|x) p(y_i|x,z,y_<i), and the share of each passage in each token.

    The arguments are the same as those of `sequence_likelihood`.
    """
    log_joint = prior[..., None] + log_p  # (b, k) -> (b, k, 1) -> (b, k, t)
    log_marginals = log_joint.logsumexp(1)
    log_shares = (log_joint - log_marginals[:, None]).detach()  # marginals: (b, t) -> (b, 1, t)
    token_counts = mask.sum(1).clamp(min=1)[:, None]  # (b, t) -> (b, 1)
    # (b, k, t) -> (b, k)
    posterior = log_shares.masked_fill(~mask[:, None], -torch.inf).logsumexp(2) - token_counts.log()
    return Likelihood(log_marginals.masked_fill(~mask, 0).sum(1), posterior, log_shares)


def sequence_smoothing_term(prior: Tensor, totals: Tensor, mask: Tensor, vocabulary: int) -> Tensor:
    """Return the label smoothing term of RAG-Sequence, (b,), as in transformers'
    `RagSequenceForGeneration`.

    It is log Σ_z exp(v log p(z|x) + Σ_i Σ_w log p(w|x,z,y_<i)), where w are the words of the
    vocabulary; `totals` is (b, k, t) Σ_w log p(w|x,z,y_<i).
    """
    return (vocabulary * prior + _sum_tokens(totals, mask)).logsumexp(1)


def token_smoothing_term(prior: Tensor, logits: Tensor, mask: Tensor) -> Tensor:
    """Return the label smoothing term of RAG-Token, (b,): Σ_i Σ_w log Σ_z p(z|x) p(w|x,z,y_<i).

    `logits` are (b, k, t, v). The function processes one token at a time and recomputes it in the
    backward pass, so that the mixture for all tokens, (b, t, v), is never in memory.
    """
    step_log_p = [
        checkpoint(_sum_mixture_log_p, prior, step, use_reentrant=False, preserve_rng_state=False)
        for step in logits.unbind(2)  # (b, k, t, v) -> t times (b, k, v)
    ]
    return torch.stack(step_log_p, 1).masked_fill(~mask, 0).sum(1)  # t times (b,) -> (b, t) -> (b,)


def smooth_labels(log_p: Tensor, smoothing_term: Tensor, epsilon: float, vocabulary: int) -> Tensor:
    """Return the smoothed loss -(1 - ε) log p(y|x) - ε / v `smoothing_term`, (b,), as in fairseq
    and transformers.
    """
    return -(1 - epsilon) * log_p - epsilon / vocabulary * smoothing_term


def target_log_p(logits: Tensor, targets: Tensor, *, with_totals: bool = False) -> tuple[Tensor, Tensor]:
    """Return (log p(y_i|…), Σ_w log p(w|…)), each (b, k, t), at least float32, with gradient.

    `logits` are (b, k, t, v), and `targets` (b, t). Without `with_totals`, the sums Σ_w are zeros.
    The function processes a few rows of the logits at a time, so that the gradient is the only
    further tensor as large as the logits.
    """
    target_ids = targets[:, None].expand(logits.shape[:-1])  # (b, t) -> (b, 1, t) -> (b, k, t)
    logit_rows = logits.reshape(-1, logits.shape[-1])  # (b, k, t, v) -> (b k t, v)
    log_p_and_totals: tuple[Tensor, Tensor] = _TargetLogP.apply(logit_rows, target_ids.reshape(-1), with_totals)  # type: ignore[no-untyped-call]
    # (b k t,) -> (b, k, t)
    return log_p_and_totals[0].view(target_ids.shape), log_p_and_totals[1].view(target_ids.shape)


class _TargetLogP(torch.autograd.Function):
    """Log softmax at one word per row, and its sum over all words: (n, v), (n,) -> (n,), (n,)."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, totals: bool) -> tuple[Tensor, Tensor]:
        """Return the log softmax and the sums; save the logits unchanged, and log Σ exp of each
        row.
        """
        log_norms, logit_sums = (
            logits.new_zeros(len(logits), dtype=_choose_wide_dtype(logits.dtype)) for _ in range(2)
        )
        for rows in _split_rows(logits):
            row_logits = _to_wide_dtype(logits[rows])
            log_norms[rows] = row_logits.logsumexp(-1)
            if totals:
                logit_sums[rows] = row_logits.sum(-1) - logits.shape[-1] * log_norms[rows]
        ctx.save_for_backward(logits, targets, log_norms)
        ctx.totals = totals
        # (n, v) -> (n, 1) -> (n,)
        return _to_wide_dtype(logits.gather(1, targets[:, None])[:, 0]) - log_norms, logit_sums

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, target_gradient: Tensor, total_gradient: Tensor) -> tuple[Tensor, None, None]:
        """Return the gradient with respect to the logits l.

        ∂ log p(y) / ∂ l_w = [w = y] - p(w), and ∂ Σ log p / ∂ l_w = 1 - v p(w).
        """
        logits, targets, log_norms = ctx.saved_tensors
        logits_gradient = torch.empty_like(logits)
        for rows in _split_rows(logits):
            row_gradient = (_to_wide_dtype(logits[rows]) - log_norms[rows, None]).exp_()
            # (r,); row_gradient is (r, v), for r <= n rows at a time
            row_weight = target_gradient[rows] + (logits.shape[-1] * total_gradient[rows] if ctx.totals else 0)
            row_gradient.mul_(-row_weight[:, None])
            if ctx.totals:
                row_gradient.add_(total_gradient[rows, None])
            # (r, 1) added into (r, v)
            logits_gradient[rows] = row_gradient.scatter_add_(1, targets[rows, None], target_gradient[rows, None])
        return logits_gradient, None, None


def _split_rows(logits: Tensor) -> list[slice]:
    max_logits = _MAX_CUDA_LOGITS if logits.is_cuda else _MAX_CPU_LOGITS
    n_rows = max(1, max_logits // logits.shape[-1])
    return [slice(i, i + n_rows) for i in range(0, len(logits), n_rows)]


def _sum_mixture_log_p(prior: Tensor, logits: Tensor) -> Tensor:
    # (b, k, v) -> (b, v) -> (b,)
    return (_to_wide_dtype(logits).log_softmax(-1) + prior[..., None]).logsumexp(1).sum(-1)


def _to_wide_dtype(logits: Tensor) -> Tensor:
    return logits.to(_choose_wide_dtype(logits.dtype))


def _choose_wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype for sums over a vocabulary: float32 for half precision, else `dtype`."""
    return torch.promote_types(dtype, torch.float32)


def _sum_tokens(values: Tensor, mask: Tensor) -> Tensor:
    return values.masked_fill(~mask[:, None], 0).sum(2)  # (b, t) -> (b, 1, t); (b, k, t) -> (b, k)


def target_log_p_from_state(generator: Generator, first_logits: Tensor, state: State, tokens: Tensor, k: int) -> Tensor:
    """Return (b, k, t) log p(y_i|x,z,y_<i) of one target for all contexts, without gradient.

    Args:
        generator: the generator of the state.
        first_logits: (b k, v) logits of the first token, from `Generator.prefill`.
        state: the state from `Generator.prefill`, which is not changed.
        tokens: (t,) tokens of the target.
        k: contexts per question.
    """
    row_numbers = torch.arange(len(first_logits), device=tokens.device)
    steps = [first_logits[:, None]]  # (b k, v) -> (b k, 1, v)
    if len(tokens) > 1:
        continuation = tokens[:-1].expand(len(row_numbers), -1)  # (t,) -> (b k, t - 1)
        steps.append(generator.extend(generator.select_rows(state, row_numbers), continuation))
    logits = torch.cat(steps, 1)
    logits = logits.view(-1, k, *logits.shape[1:])  # (b k, t, v) -> (b, k, t, v)
    return target_log_p(logits, tokens.expand(len(logits), -1))[0]
