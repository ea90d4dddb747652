"""Losses and scores of retrievers: in-batch negatives, MaxSim, lists, distillation.

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

    L = -log (exp(q . p+ / T) / sum_j exp(q . p_j / T)), the sum over all passages of the batch:
    Karpukhin et al. 2020, eq. 2, with a temperature T, which vectors of unit length need (their
    scores are in [-1, 1]). The loss is the mean over the questions. The accuracy is the share of
    questions whose positive has the highest score.

    `questions` (b, d), `passages` (m, d), `gold` (b,) int64: the positive's row; `ignored` (b, m)
    bool: passages to leave out of the sum, such as a question's other positives. Scores are
    float32, also under autocast.
    """
    with torch.autocast(questions.device.type, enabled=False):
        scores = questions.float() @ passages.float().T / temperature  # (b, d) @ (d, m) -> (b, m)
        return in_batch_cross_entropy(scores, gold, ignored)


def gather_all_processes(rows: Tensor) -> tuple[Tensor, int]:
    """Return the rows (n, ...) of all processes, and the position of this process's first row.

    n may differ between processes. The gradient of each process's rows is the sum over the losses
    of all processes; because gradients of weights are averaged over processes, the result is the
    gradient of the mean loss of one large batch.
    """
    processes = find_processes()
    if processes.count == 1:
        return rows, 0
    if rows.dtype is torch.bool:  # gloo cannot gather bool
        gathered_bytes, first_row = gather_all_processes(rows.byte())
        return gathered_bytes.bool(), first_row
    row_counts = exchange_counts(len(rows))
    # (n, ...) -> (max n, ...)
    padded_rows = torch.cat([rows, rows.new_zeros(max(row_counts) - len(rows), *rows.shape[1:])])
    # (processes, max n, ...)
    rows_by_process = _AllGather.apply(padded_rows)  # type: ignore[no-untyped-call]
    # (sum of n, ...)
    gathered_rows = torch.cat([rows_by_process[process, :n_rows] for process, n_rows in enumerate(row_counts)])
    return gathered_rows, sum(row_counts[: processes.index])


def locate_positives(
    examples: Sequence[Example],
    passages: Sequence[Passage],
    gold: Sequence[int],
    device: torch.device,
    *,
    counts_once: bool = True,
) -> tuple[Tensor, Tensor]:
    """Return the (b,) rows of the positives among the m passages of all processes, and a mask.

    The (b, m) bool mask marks the passages that must not be negatives of a question, as in
    `mask_other_positives`. With `counts_once` it also marks all but the first of equal passages, as
    in a `DprBatch`, which holds each passage once. `passages` are this process's passages, and
    `gold` are the positions of the positives in them.
    """
    keys, first_row = gather_all_processes(hash_passages(passages).to(device))
    rows = torch.tensor(gold, device=device) + first_row
    if not counts_once:
        return rows, mask_other_positives(examples, keys, rows)
    positions = torch.arange(len(keys), device=device)
    distinct_keys, group_ids = keys.unique(return_inverse=True)  # type: ignore[no-untyped-call]
    # (distinct,) -> (m,): position of the first equal passage
    first_rows = torch.full_like(distinct_keys, len(keys)).scatter_reduce(0, group_ids, positions, "amin")[group_ids]
    rows = first_rows[rows]
    return rows, mask_other_positives(examples, keys, rows) | (first_rows != positions)


def mean_over_processes(total: Tensor, count: int) -> Tensor:
    """Return a loss whose mean over the processes is the mean over the elements of all processes.

    `total` is the sum over the `count` elements of this process. The gradient is also that of the
    mean over the elements of all processes. The gradient is 0 if no process has an element.
    """
    process_counts = exchange_counts(count)
    return total * (len(process_counts) / max(1, sum(process_counts)))


class _AllGather(Function):
    """Gathers tensors of equal shape into (processes, ...), with a gradient."""

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

    S(q, d) = sum_i max_j <q_i, d_j> (Khattab and Zaharia 2020, section 3.3), over the tokens j in
    the mask. Other tokens (padding, punctuation) score -inf before the maximum: with 0 they would
    win wherever all similarities are negative.

    `questions` (b, l, d), of which every token counts; `passages` (m, t, d); `token_mask` (m, t)
    bool with one token or more per passage.
    """
    with torch.autocast(questions.device.type, enabled=False):
        similarities = torch.einsum("bld,mtd->bmlt", to_float32(questions), to_float32(passages))
        # (m, t) -> (1, m, 1, t)
        similarities = similarities.masked_fill(~token_mask[None, :, None, :], -torch.inf)
        return similarities.amax(3).sum(2)  # (b, m, l, t) -> (b, m, l) -> (b, m)


def to_float32(vectors: Tensor) -> Tensor:
    """Return vectors in float32, also under autocast; float64 stays."""
    return vectors.to(torch.promote_types(vectors.dtype, torch.float32))


def distillation_loss(scores: Tensor, teacher_scores: Tensor) -> Tensor:
    """Return the mean over the lists of KL(teacher ‖ student).

    L = mean over q of sum_d p(d) (log p(d) - log s(d)), where p is the softmax of the teacher's
    scores of q's passages and s that of the student's: Santhanam et al. 2022 (ColBERTv2), section
    3.2.

    `scores`, `teacher_scores` (b, w); `teacher_scores` is -inf after the end of a list.
    """
    mask = teacher_scores.isfinite()
    student_log_p = nn.functional.log_softmax(scores.masked_fill(~mask, -torch.inf), 1).masked_fill(~mask, 0)
    teacher_log_p = nn.functional.log_softmax(teacher_scores, 1)
    return (teacher_log_p.exp() * (teacher_log_p.masked_fill(~mask, 0) - student_log_p)).sum(1).mean()


def in_batch_cross_entropy(scores: Tensor, gold: Tensor, ignored: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return the mean negative log-likelihood of the positives, and the in-batch accuracy.

    `scores` (b, m); `gold` (b,): columns of the positives; `ignored` (b, m) bool: passages to leave
    out, such as a question's other positives.
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
    """Return the mean negative log-likelihood of each list's positive, and the accuracy.

    L = -log (exp s_0 / sum_j exp s_j): the localized contrastive estimation of Gao, Dai and Callan
    2021, "Rethink Training of BERT Rerankers in Multi-Stage Retrieval Pipeline", whose negatives
    are a retriever's best passages.

    `scores` (b, l): the positive first, -inf after the end of a list. The accuracy is the share of
    lists whose positive is strictly best.
    """
    gold = torch.zeros(len(scores), dtype=torch.int64, device=scores.device)
    accuracy = (scores[:, 0] > scores[:, 1:].max(1).values).to(scores.dtype).mean()
    return nn.functional.cross_entropy(scores, gold), accuracy.detach()


def margin_mse_loss(scores: Tensor, teacher_scores: Tensor) -> Tensor:
    """Return the mean squared difference of the student's and teacher's margins, over all pairs.

    L = mean over (q, d-) of ((s(q, d+) - s(q, d-)) - (t(q, d+) - t(q, d-)))^2: Hofstätter et al.
    2020, "Improving Efficient Neural Ranking Models with Cross-Architecture Knowledge
    Distillation", section 3.

    `scores`, `teacher_scores` (b, l): the positive first; `teacher_scores` is -inf after the end of
    a list.
    """
    mask = teacher_scores[:, 1:].isfinite()
    margins = scores[:, :1] - scores[:, 1:]  # (b, 1) - (b, l - 1) -> (b, l - 1)
    teacher_margins = teacher_scores[:, :1] - teacher_scores[:, 1:]
    return nn.functional.mse_loss(margins[mask], teacher_margins[mask])
