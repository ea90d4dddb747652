"""Losses over lists of passages, whose first is the positive."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn


def as_lists(flat: Tensor, lengths: Sequence[int]) -> Tensor:
    """Return (b, l) scores of lists from their (n,) scores end to end; shorter lists end in -inf."""
    lists = list(torch.split(flat, list(lengths)))
    return nn.utils.rnn.pad_sequence(lists, batch_first=True, padding_value=-torch.inf)  # b times (l,) -> (b, l)


def list_loss(scores: Tensor) -> tuple[Tensor, Tensor]:
    """Return the mean negative log likelihood of each list's positive, and the share of lists where it is best.

    L = -log (exp s_0 / sum_j exp s_j): the localized contrastive estimation of Gao, Dai and Callan 2021, "Rethink
    Training of BERT Rerankers in Multi-Stage Retrieval Pipeline", whose negatives are a retriever's best passages.

    `scores` (b, l): the positive first; -inf where a list has ended. A positive that ties is not best.
    """
    gold = torch.zeros(len(scores), dtype=torch.int64, device=scores.device)
    best = (scores[:, 0] > scores[:, 1:].max(1).values).to(scores.dtype).mean()
    return nn.functional.cross_entropy(scores, gold), best.detach()


def margin_mse(scores: Tensor, told: Tensor) -> Tensor:
    """Return the mean squared difference of a student's and its teacher's margins, over all pairs.

    L = mean over (q, d-) of ((s(q, d+) - s(q, d-)) - (t(q, d+) - t(q, d-)))^2: Hofstätter et al. 2020, "Improving
    Efficient Neural Ranking Models with Cross-Architecture Knowledge Distillation", section 3.

    `scores`, `told` (b, l): of the student and the teacher, the positive first; -inf in `told` where a list has ended.
    """
    kept = told[:, 1:].isfinite()
    margins = scores[:, :1] - scores[:, 1:]  # (b, 1) - (b, l - 1) -> (b, l - 1)
    wanted = told[:, :1] - told[:, 1:]
    return nn.functional.mse_loss(margins[kept], wanted[kept])
