"""MaxSim with gradient, and the losses of late interaction: in-batch cross-entropy, and distillation by lists."""

import torch
from torch import Tensor, nn


def maxsim(questions: Tensor, passages: Tensor, kept: Tensor) -> Tensor:
    """Return the (b, m) float32 scores of all questions with all passages.

    S(q, d) = sum_i max_j <q_i, d_j> (Khattab and Zaharia 2020, section 3.3), over the tokens j that are kept. Others
    (padding, punctuation) score -inf before the maximum: with 0 they would win wherever all similarities are negative.

    `questions` (b, l, d), of which every token counts; `passages` (m, t, d); `kept` (m, t) bool, one or more a passage.
    """
    with torch.autocast(questions.device.type, enabled=False):
        similar = torch.einsum("bld,mtd->bmlt", _exact(questions), _exact(passages))
        similar = similar.masked_fill(~kept[None, :, None, :], -torch.inf)  # (m, t) -> (1, m, 1, t)
        return similar.amax(3).sum(2)  # (b, m, l, t) -> (b, m, l) -> (b, m)


def _exact(vectors: Tensor) -> Tensor:
    """Return vectors in float32, also under autocast; float64 stays."""
    return vectors.to(torch.promote_types(vectors.dtype, torch.float32))


def distillation(scores: Tensor, told: Tensor) -> Tensor:
    """Return the mean Kullback-Leibler divergence of a student's distributions from a teacher's, over lists.

    L = mean over q of sum_d p(d) (log p(d) - log s(d)), p the softmax of the teacher's scores of q's passages, s that
    of the student's: Santhanam et al. 2022 (ColBERTv2), section 3.2.

    `scores`, `told` (b, w): of the student and the teacher; -inf in `told` where a list has ended.
    """
    kept = told.isfinite()
    student = nn.functional.log_softmax(scores.masked_fill(~kept, -torch.inf), 1).masked_fill(~kept, 0)
    teacher = nn.functional.log_softmax(told, 1)
    return (teacher.exp() * (teacher.masked_fill(~kept, 0) - student)).sum(1).mean()


def cross_entropy(scores: Tensor, gold: Tensor, ignored: Tensor) -> tuple[Tensor, Tensor]:
    """Return the mean negative log likelihood of the positives, and the share of questions whose positive is best.

    `scores` (b, m), `gold` (b,) the positives' places, `ignored` (b, m) bool: left out, as other positives are.
    """
    scores = scores.masked_fill(ignored, -torch.inf)
    best = (scores.detach().argmax(1) == gold).float().mean()
    return nn.functional.cross_entropy(scores, gold), best
