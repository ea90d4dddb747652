"""DPR's loss: the positive against all passages of the batch, over all processes."""

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Function


def in_batch_loss(
    questions: Tensor, passages: Tensor, gold: Tensor, ignored: Tensor | None = None, temperature: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Return the mean negative log likelihood of each question's positive, and the share of questions whose positive
    has the best score.

    L = -log (exp(q . p+ / T) / sum_j exp(q . p_j / T)), the sum over all passages of the batch: Karpukhin et al. 2020,
    eq. 2, with a temperature T, which vectors of unit length need (their scores lie in [-1, 1]).

    `questions` (b, d), `passages` (m, d), `gold` (b,) int64: the positive's row; `ignored` (b, m) bool: passages to
    leave out of the sum, such as a question's other positives. Scores are float32, also under autocast.
    """
    with torch.autocast(questions.device.type, enabled=False):
        scores = questions.float() @ passages.float().T / temperature  # (b, d) @ (d, m) -> (b, m)
        if ignored is not None:
            scores = scores.masked_fill(ignored, -torch.inf)
        # (b, m), (b,) -> scalars
        return nn.functional.cross_entropy(scores, gold), (scores.detach().argmax(1) == gold).float().mean()


def of_all_processes(rows: Tensor) -> tuple[Tensor, int]:
    """Return the rows (n, ...) of all processes end to end, with gradient, and the start of this process's own rows.

    n may differ between processes. The gradient of each process's rows is the sum over the losses of all processes;
    because gradients of weights are averaged over processes, the result is the gradient of the mean loss of one large
    batch.
    """
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return rows, 0
    own = torch.tensor([len(rows)], device=rows.device)
    counts = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(counts, own)
    sizes = [int(count) for count in counts]
    padded = torch.cat([rows, rows.new_zeros(max(sizes) - len(rows), *rows.shape[1:])])  # (n, ...) -> (max n, ...)
    gathered = _AllGather.apply(padded)  # type: ignore[no-untyped-call]  # (processes, max n, ...)
    every = torch.cat([gathered[process, :size] for process, size in enumerate(sizes)])  # (sum of n, ...)
    return every, sum(sizes[: dist.get_rank()])


class _AllGather(Function):
    """Gather equal shapes into (processes, ...); torch's own function lacks a gradient on some backends."""

    @staticmethod
    def forward(_: object, rows: Tensor) -> Tensor:
        parts = [torch.empty_like(rows) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, rows.contiguous())
        return torch.stack(parts)

    @staticmethod
    def backward(_: object, gradient: Tensor) -> Tensor:
        total = gradient.contiguous()
        dist.all_reduce(total)
        return total[dist.get_rank()]
