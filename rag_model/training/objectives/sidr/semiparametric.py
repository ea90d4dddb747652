"""SiDR's loss: weights against weights, and weights against bags of tokens, so that either may be the index."""

import torch
from torch import Tensor, nn


def kept_terms(weights: Tensor, own: Tensor, count: int) -> Tensor:
    """Return (b, V) weights of each text's `count` heaviest terms and its own ones; others are 0.

    `weights` (b, V), `own` (b, V) bool. The gradient reaches what is kept.
    """
    best = weights.detach().topk(min(count, weights.shape[1]), dim=1).indices  # (b, count)
    return weights.where(own.scatter(1, best, True), 0)


def semi_parametric_loss(
    questions: tuple[Tensor, Tensor],
    passages: tuple[Tensor, Tensor],
    gold: Tensor,
    ignored: Tensor,
    terms: int,
    temperature: float = 1.0,
    *,
    both_ways: bool = True,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the mean of four losses, and the shares of questions whose positive is best, by weights and by bags.

    L = (N(K(q), V(p)) + N(V(q), K(p)) + N(B(q), V(p)) + N(V(q), B(p))) / 4, where V are the weights, K those of the
    heaviest and own terms, B the bags, and N is `two_way_loss`: Zhou et al. (arXiv 2405.01924), section 3, and
    github.com/jzhoubu/vsearch, src/ir/training/loss_utils.py. Scores are float32 at least, also under autocast.

    `questions`: (b, V) weights and (b, V) bool bags; `passages`: (m, V) both; `gold` (b,) and `ignored` (b, m) as of
    `contrastive.in_batch_loss`; `terms`: how many of the heaviest K keeps.
    """
    with torch.autocast(gold.device.type, enabled=False):
        (asked, asked_bag), (read, read_bag) = ((_wide(weights), bag) for weights, bag in (questions, passages))
        pairs = {
            "kept_asked": (kept_terms(asked, asked_bag, terms), read),
            "kept_read": (asked, kept_terms(read, read_bag, terms)),
            "bag_asked": (asked_bag.to(asked), read),
            "bag_read": (asked, read_bag.to(asked)),
        }
        scores = {name: (one @ other.T) / temperature for name, (one, other) in pairs.items()}  # (b, m)
        losses = [two_way_loss(one, gold, ignored, both_ways=both_ways) for one in scores.values()]
    by = {"accuracy": scores["kept_read"], "bag_accuracy": scores["bag_read"]}
    return torch.stack(losses).mean(), {name: _best(one, gold, ignored) for name, one in by.items()}


def two_way_loss(scores: Tensor, gold: Tensor, ignored: Tensor, *, both_ways: bool = True) -> Tensor:
    """Return the mean negative log likelihood of the positives, plus that of the questions given their positives.

    The first is over all passages of the batch, the second over its questions; what is ignored there is ignored here,
    and so is a question that shares the positive. `scores`, `ignored` (b, m), `gold` (b,).
    """
    own = nn.functional.cross_entropy(scores.masked_fill(ignored, -torch.inf), gold)
    if not both_ways:
        return own
    shared = (gold[:, None] == gold) & ~torch.eye(len(gold), dtype=torch.bool, device=gold.device)  # (b, b)
    # (b, m) -> (b, b): row i is the positive of question i, column j the question j
    asked = scores[:, gold].T.masked_fill(ignored[:, gold].T | shared, -torch.inf)
    return own + nn.functional.cross_entropy(asked, torch.arange(len(gold), device=gold.device))


def _best(scores: Tensor, gold: Tensor, ignored: Tensor) -> Tensor:
    return (scores.detach().masked_fill(ignored, -torch.inf).argmax(1) == gold).float().mean()


def _wide(weights: Tensor) -> Tensor:
    return weights.to(torch.promote_types(weights.dtype, torch.float32))
