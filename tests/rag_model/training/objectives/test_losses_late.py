"""Scores and losses of late interaction, compared with loops and with finite differences."""

import math

import torch
from torch.autograd import gradcheck

from rag_model.training.objectives.losses import compute_maxsim, distillation_loss, in_batch_cross_entropy


def build_inputs(seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return questions (2, 3, 4), passages (3, 5, 4) and a mask of the passages' tokens, in float64."""
    torch.manual_seed(seed)
    questions, passages = torch.randn(2, 3, 4).double(), torch.randn(3, 5, 4).double()
    mask = torch.tensor([[1, 1, 1, 1, 1], [1, 0, 1, 0, 0], [0, 1, 0, 0, 0]]).bool()
    return questions, passages, mask


def test_scores_are_sums_of_the_largest_products_of_kept_tokens() -> None:
    questions, passages, mask = build_inputs()
    for b, question in enumerate(questions):
        for m, passage in enumerate(passages):
            expected = sum(max(float(token @ unmasked) for unmasked in passage[mask[m]]) for token in question)
            assert math.isclose(float(compute_maxsim(questions, passages, mask)[b, m]), expected, rel_tol=1e-9)


def test_masked_token_never_has_the_largest_similarity() -> None:
    question = torch.tensor([[[1.0, 0.0]]])
    passages = torch.tensor([[[-1.0, 0.0], [0.0, 0.0]], [[-0.5, 0.0], [9.0, 0.0]]])
    mask = torch.tensor([[True, False], [True, False]])
    assert compute_maxsim(question, passages, mask).tolist() == [[-1.0, -0.5]]


def test_gradients_agree_with_finite_differences_and_are_0_for_masked_tokens() -> None:
    questions, passages, mask = build_inputs()
    questions.requires_grad_()
    passages.requires_grad_()
    teacher_scores = torch.tensor([[2.0, -1.0, 0.5], [0.0, 1.0, -torch.inf]]).double()
    gold, ignored = torch.tensor([0, 1]), torch.tensor([[0, 0, 1], [0, 0, 0]]).bool()

    def compute_distillation_loss(q: torch.Tensor, p: torch.Tensor) -> torch.Tensor:
        return distillation_loss(compute_maxsim(q, p, mask), teacher_scores)

    def compute_in_batch_loss(q: torch.Tensor, p: torch.Tensor) -> torch.Tensor:
        return in_batch_cross_entropy(compute_maxsim(q, p, mask), gold, ignored)[0]

    assert gradcheck(lambda q, p: compute_maxsim(q, p, mask), (questions, passages))
    assert gradcheck(compute_distillation_loss, (questions, passages))
    assert gradcheck(compute_in_batch_loss, (questions, passages))
    (compute_distillation_loss(questions, passages) + compute_in_batch_loss(questions, passages)).backward()
    assert passages.grad is not None
    assert passages.grad[~mask].abs().max() == 0
    assert passages.grad[0].abs().max() > 0


def test_distillation_loss_is_the_divergence_of_the_teacher_from_the_scores() -> None:
    scores, teacher_scores = torch.tensor([[1.0, 0.0, 5.0]]), torch.tensor([[3.0, 0.0, -torch.inf]])
    p, s = torch.softmax(teacher_scores[0, :2], 0), torch.softmax(scores[0, :2], 0)
    forward, backward = float((p * (p / s).log()).sum()), float((s * (s / p).log()).sum())
    assert math.isclose(float(distillation_loss(scores, teacher_scores)), forward, rel_tol=1e-5)
    assert abs(forward - backward) > 0.01
    assert (
        float(distillation_loss(teacher_scores.masked_fill(teacher_scores.isinf(), 7), teacher_scores)) < 1e-6
    )  # padding behind the end of a list does not count
