"""Late interaction's scores and losses: beside loops, by finite differences, and where a mask decides."""

import math

import torch
from torch.autograd import gradcheck

from rag_model.training.objectives.losses import compute_maxsim, distillation_loss, in_batch_cross_entropy


def given(seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return questions (2, 3, 4), passages (3, 5, 4) and what is kept of them, in float64."""
    torch.manual_seed(seed)
    questions, passages = torch.randn(2, 3, 4).double(), torch.randn(3, 5, 4).double()
    kept = torch.tensor([[1, 1, 1, 1, 1], [1, 0, 1, 0, 0], [0, 1, 0, 0, 0]]).bool()
    return questions, passages, kept


def test_scores_are_sums_of_the_largest_products_of_kept_tokens() -> None:
    questions, passages, kept = given()
    for b, question in enumerate(questions):
        for m, passage in enumerate(passages):
            expected = sum(
                max(float(token @ own) for own, k in zip(passage, kept[m], strict=True) if k) for token in question
            )
            assert math.isclose(float(compute_maxsim(questions, passages, kept)[b, m]), expected, rel_tol=1e-9)


def test_a_masked_token_does_not_win_where_all_similarities_are_negative() -> None:
    question = torch.tensor([[[1.0, 0.0]]])
    passages = torch.tensor([[[-1.0, 0.0], [0.0, 0.0]], [[-0.5, 0.0], [9.0, 0.0]]])
    kept = torch.tensor([[True, False], [True, False]])
    assert compute_maxsim(question, passages, kept).tolist() == [[-1.0, -0.5]]


def test_gradients_agree_with_finite_differences_and_leave_masked_tokens_alone() -> None:
    questions, passages, kept = given()
    questions.requires_grad_()
    passages.requires_grad_()
    told = torch.tensor([[2.0, -1.0, 0.5], [0.0, 1.0, -torch.inf]]).double()
    gold, ignored = torch.tensor([0, 1]), torch.tensor([[0, 0, 1], [0, 0, 0]]).bool()

    def taught(q: torch.Tensor, p: torch.Tensor) -> torch.Tensor:
        return distillation_loss(compute_maxsim(q, p, kept), told)

    def in_batch(q: torch.Tensor, p: torch.Tensor) -> torch.Tensor:
        return in_batch_cross_entropy(compute_maxsim(q, p, kept), gold, ignored)[0]

    assert gradcheck(lambda q, p: compute_maxsim(q, p, kept), (questions, passages))
    assert gradcheck(taught, (questions, passages))
    assert gradcheck(in_batch, (questions, passages))
    (taught(questions, passages) + in_batch(questions, passages)).backward()
    assert passages.grad is not None
    assert passages.grad[~kept].abs().max() == 0
    assert passages.grad[0].abs().max() > 0


def test_distillation_is_the_divergence_from_the_teacher_and_not_to_it() -> None:
    scores, told = torch.tensor([[1.0, 0.0, 5.0]]), torch.tensor([[3.0, 0.0, -torch.inf]])
    p, s = torch.softmax(told[0, :2], 0), torch.softmax(scores[0, :2], 0)
    forward, backward = float((p * (p / s).log()).sum()), float((s * (s / p).log()).sum())
    assert math.isclose(float(distillation_loss(scores, told)), forward, rel_tol=1e-5)
    assert abs(forward - backward) > 0.01
    assert (
        float(distillation_loss(told.masked_fill(told.isinf(), 7), told)) < 1e-6
    )  # what lies behind a list's end is nothing
