"""Losses of retrievers: with in-batch negatives, over lists of passages, and for distillation.

`gather_all_processes` concatenates the rows of all processes for in-batch negatives.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Function

from rag_model.corpus.records import Passage
from rag_model.training.data.batches import hash_passages, mask_other_positives
from rag_model.training.data.examples import Example
from rag_model.training.loop.processes import exchange_counts, find_processes


def in_batch_loss(
    questions: Tensor, passages: Tensor, gold: Tensor, ignored: Tensor | None = None, temperature: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Return DPR's loss with in-batch negatives, and the in-batch accuracy.

    L = -log (exp(q . p+ / T) / sum_j exp(q . p_j / T)), where the sum is over all passages of the
    batch (Karpukhin et al. 2020, eq. 2). The temperature T is needed for vectors of unit length,
    because their scores are in [-1, 1]. The loss is the mean over the questions. The accuracy is
    the share of questions whose positive has the highest score.

    The shapes are: `questions` (b, d); `passages` (m, d); `gold` (b,) int64, the rows of the
    positives; `ignored` (b, m) bool, the passages to leave out of the sum, such as further
    positives of a question. Scores are computed in float32, even under autocast.
    """
    with torch.autocast(questions.device.type, enabled=False):
        scores = questions.float() @ passages.float().T / temperature  # (b, d) @ (d, m) -> (b, m)
        return in_batch_cross_entropy(scores, gold, ignored)


def gather_all_processes(rows: Tensor) -> tuple[Tensor, int]:
    """Return the rows (n, ...) of all processes, and the position of the first row of this process.

    n may differ between processes. The gradient of a row is the sum over the losses of all
    processes. Gradients of weights are averaged over processes, so they are those of the mean loss
    of one large batch.
    """
    processes = find_processes()
    if processes.count == 1:
        return rows, 0
    if rows.dtype is torch.bool:  # gloo cannot gather tensors of bool.
        gathered_bytes, first_row = gather_all_processes(rows.byte())
        return gathered_bytes.bool(), first_row
    row_counts = exchange_counts(len(rows))
    # (n, ...) -> (max n, ...)
    padded_rows = torch.cat([rows, rows.new_zeros(max(row_counts) - len(rows), *rows.shape[1:])])
    # (processes, max n, ...)
    rows_by_process = _AllGather.apply(padded_rows)  # type: ignore[no-untyped-call]
    # (sum of n, ...)
    gathered_rows = torch.cat([rows_by_process[process, :n_rows] for process, n_rows in enumerate(row_counts)])
    return gathered_rows, sum(row_counts[: processes.rank])


def locate_positives(
    examples: Sequence[Example],
    passages: Sequence[Passage],
    gold: Sequence[int],
    device: torch.device,
    *,
    deduplicate: bool = True,
) -> tuple[Tensor, Tensor]:
    """Return the (b,) rows of the positives among the m passages of all processes, and a mask.

    The (b, m) bool mask marks the passages that must not be negatives of a question, as in
    `mask_other_positives`. If `deduplicate` is True, it also marks all but the first of equal
    passages, because a `DprBatch` contains each passage only once. `passages` are the passages of
    this process, and `gold` has the position of each question's positive in them.
    """
    keys, first_row = gather_all_processes(hash_passages(passages).to(device))
    rows = torch.tensor(gold, device=device) + first_row
    if not deduplicate:
        return rows, mask_other_positives(examples, keys, rows)
    positions = torch.arange(len(keys), device=device)
    distinct_keys, group_ids = keys.unique(return_inverse=True)  # type: ignore[no-untyped-call]
    # (distinct,) -> (m,): position of the first equal passage
    first_rows = torch.full_like(distinct_keys, len(keys)).scatter_reduce(0, group_ids, positions, "amin")[group_ids]
    rows = first_rows[rows]
    return rows, mask_other_positives(examples, keys, rows) | (first_rows != positions)


def mean_over_processes(total: Tensor, count: int) -> Tensor:
    """Scale a sum so that its mean over the processes is the mean over the elements of all
    processes.

    `total` is the sum over the `count` elements of this process. Its gradient is scaled in the same
    way; it is 0 if no process has an element.
    """
    process_counts = exchange_counts(count)
    return total * (len(process_counts) / max(1, sum(process_counts)))


class _AllGather(Function):
    """Gathers tensors of equal shape from all processes into (processes, ...), with a gradient."""

    @staticmethod
    def forward(_: object, rows: Tensor) -> Tensor:
        rows = rows.contiguous()
        gathered_rows = rows.new_empty(dist.get_world_size(), *rows.shape)
        exchange_counts()
        dist.all_gather(list(gathered_rows.unbind()), rows)
        return gathered_rows

    @staticmethod
    def backward(_: object, gradient: Tensor) -> Tensor:
        total_gradient = gradient.contiguous()
        exchange_counts()
        dist.all_reduce(total_gradient)
        return total_gradient[dist.get_rank()]


def compute_maxsim(questions: Tensor, passages: Tensor, token_mask: Tensor) -> Tensor:
    """Return the (b, m) float32 MaxSim scores of all questions with all passages.

    S(q, d) = sum_i max_j <q_i, d_j> (Khattab and Zaharia 2020, section 3.3), where the maximum is
    over the passage tokens j in the mask. All other tokens (padding, punctuation) have the
    similarity -inf. With 0, they would be the maximum wherever all similarities are negative.

    The shapes are: `questions` (b, l, d), of which every token counts; `passages` (m, t, d);
    `token_mask` (m, t) bool, with one token or more per passage.
    """
    with torch.autocast(questions.device.type, enabled=False):
        similarities = torch.einsum("bld,mtd->bmlt", to_float32(questions), to_float32(passages))
        # (m, t) -> (1, m, 1, t)
        similarities = similarities.masked_fill(~token_mask[None, :, None, :], -torch.inf)
        return similarities.amax(3).sum(2)  # (b, m, l, t) -> (b, m, l) -> (b, m)


def to_float32(vectors: Tensor) -> Tensor:
    """Return vectors in float32, even under autocast; float64 is not converted."""
    return vectors.to(torch.promote_types(vectors.dtype, torch.float32))


def distillation_loss(scores: Tensor, teacher_scores: Tensor) -> Tensor:
    """Return the mean of KL(teacher ‖ student) over lists of passages.

    L = mean over q of sum_d p(d) (log p(d) - log s(d)), where p is the softmax of the teacher's
    scores of the passages in the list of q, and s is the softmax of the student's scores:
    Santhanam et al. 2022 (ColBERTv2), section 3.2.

    `scores` and `teacher_scores` are (b, w); `teacher_scores` is -inf after the end of a list.
    """
    mask = teacher_scores.isfinite()
    student_log_p = nn.functional.log_softmax(scores.masked_fill(~mask, -torch.inf), 1).masked_fill(~mask, 0)
    teacher_log_p = nn.functional.log_softmax(teacher_scores, 1)
    return (teacher_log_p.exp() * (teacher_log_p.masked_fill(~mask, 0) - student_log_p)).sum(1).mean()


def in_batch_cross_entropy(scores: Tensor, gold: Tensor, ignored: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return the mean negative log-likelihood of the positives, and the in-batch accuracy.

    The shapes are: `scores` (b, m); `gold` (b,), the columns of the positives; `ignored` (b, m)
    bool, the passages to leave out, such as further positives of a question.
    """
    if ignored is not None:
        scores = scores.masked_fill(ignored, -torch.inf)
    accuracy = (scores.detach().argmax(1) == gold).float().mean()
    return nn.functional.cross_entropy(scores, gold), accuracy


def pad_lists(flat_scores: Tensor, lengths: Sequence[int]) -> Tensor:
    """Split (n,) concatenated scores into (b, l) scores of lists, padded with -inf."""
    score_lists = list(torch.split(flat_scores, list(lengths)))
    # b times (l,) -> (b, l)
    return nn.utils.rnn.pad_sequence(score_lists, batch_first=True, padding_value=-torch.inf)


def listwise_loss(scores: Tensor) -> tuple[Tensor, Tensor]:
    """Return the mean negative log-likelihood of the positives of lists, and the accuracy.

    L = -log (exp s_0 / sum_j exp s_j) is the localized contrastive estimation of Gao, Dai and
    Callan 2021, "Rethink Training of BERT Rerankers in Multi-Stage Retrieval Pipeline", whose
    negatives are the best passages of a retriever.

    `scores` are (b, l), with the positive first and -inf after the end of a list. The accuracy is
    the share of lists whose positive scores higher than all negatives.
    """
    gold = torch.zeros(len(scores), dtype=torch.int64, device=scores.device)
    accuracy = (scores[:, 0] > scores[:, 1:].max(1).values).to(scores.dtype).mean()
    return nn.functional.cross_entropy(scores, gold), accuracy.detach()


def margin_mse_loss(scores: Tensor, teacher_scores: Tensor) -> Tensor:
    """Return the mean squared difference between the margins of the student and the teacher.

    A margin is the score of the positive minus that of a negative: L = mean over (q, d-) of
    ((s(q, d+) - s(q, d-)) - (t(q, d+) - t(q, d-)))^2 (Hofstätter et al. 2020, "Improving Efficient
    Neural Ranking Models with Cross-Architecture Knowledge Distillation", section 3).

    `scores` and `teacher_scores` are (b, l), with the positive first; `teacher_scores` is -inf
    after the end of a list.
    """
    mask = teacher_scores[:, 1:].isfinite()
    margins = scores[:, :1] - scores[:, 1:]  # (b, 1) - (b, l - 1) -> (b, l - 1)
    teacher_margins = teacher_scores[:, :1] - teacher_scores[:, 1:]
    return nn.functional.mse_loss(margins[mask], teacher_margins[mask])
