"""The marginals beside sums over every passage written out, on small tensors."""

import math
from dataclasses import dataclass
from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rag_model.generate import likelihood
from rag_model.generate.likelihood import (
    log_prior,
    sequence_likelihood,
    sequence_uniform,
    smooth_labels,
    target_log_p,
    token_likelihood,
    token_uniform,
)


@dataclass(frozen=True, slots=True)
class Case:
    """Random scores, logits, targets and lengths, in float64 but where the library takes float32."""

    scores: Tensor  # (b, k)
    logits: Tensor  # (b, k, t, v)
    targets: Tensor  # (b, t)
    mask: Tensor  # (b, t)


@st.composite
def cases(draw: st.DrawFn, longest: int = 4) -> Case:
    b, k, t, v = (draw(st.integers(1, most)) for most in (3, 4, longest, 5))
    source = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    lengths = torch.tensor(draw(st.lists(st.integers(1, t), min_size=b, max_size=b)))
    return Case(
        3 * torch.randn(b, k, generator=source),
        3 * torch.randn(b, k, t, v, generator=source),
        torch.randint(v, (b, t), generator=source),
        torch.arange(t) < lengths[:, None],
    )


def p_of(case: Case) -> tuple[Tensor, Tensor]:
    """Return p(z|x) (b, k) and p(w|x,z,y_<i) (b, k, t, v) in float64."""
    return case.scores.double().softmax(1), case.logits.double().softmax(-1)


def p_said(case: Case, row: int, z: int, i: int) -> float:
    return float(p_of(case)[1][row, z, i, case.targets[row, i]])


def close(found: Tensor, expected: list[float]) -> None:
    torch.testing.assert_close(found.double(), torch.tensor(expected).double(), atol=1e-4, rtol=1e-4)


def places(case: Case, row: int) -> range:
    return range(int(case.mask[row].sum()))


@settings(deadline=None, max_examples=60)
@given(cases())
def test_rag_sequence_is_the_sum_over_passages_that_said_it_all(case: Case) -> None:
    log_p, _ = target_log_p(case.logits, case.targets)
    found = sequence_likelihood(log_prior(case.scores), log_p, case.mask)
    prior, _ = p_of(case)
    for row in range(len(prior)):
        joint = [
            float(prior[row, z]) * math.prod(p_said(case, row, z, i) for i in places(case, row))
            for z in range(prior.shape[1])
        ]
        close(found.log_p[row : row + 1], [math.log(sum(joint))])
        close(found.posterior[row], [math.log(one / sum(joint)) for one in joint])
    assert found.tokens is None


@settings(deadline=None, max_examples=60)
@given(cases())
def test_rag_token_is_the_product_of_mixtures(case: Case) -> None:
    log_p, _ = target_log_p(case.logits, case.targets)
    found = token_likelihood(log_prior(case.scores), log_p, case.mask)
    prior, _ = p_of(case)
    assert found.tokens is not None
    for row in range(len(prior)):
        joint = [
            [float(prior[row, z]) * p_said(case, row, z, i) for z in range(prior.shape[1])] for i in places(case, row)
        ]
        close(found.log_p[row : row + 1], [sum(math.log(sum(token)) for token in joint)])
        shares = [[one / sum(token) for one in token] for token in joint]
        for i, share in enumerate(shares):
            close(found.tokens[row, :, i], [math.log(one) for one in share])
        close(found.posterior[row].exp(), [sum(column) / len(joint) for column in zip(*shares, strict=True)])


@settings(deadline=None, max_examples=20)
@given(cases(longest=3))
def test_an_answer_s_probabilities_sum_to_one(case: Case) -> None:
    """Over all answers of t tokens, each under logits that don't depend on what was said."""
    b, _, t, v = case.logits.shape
    whole = torch.ones(b, t, dtype=torch.bool)
    for marginal in (sequence_likelihood, token_likelihood):
        total = torch.zeros(b)
        for said in product(range(v), repeat=t):
            log_p, _ = target_log_p(case.logits, torch.tensor([said] * b))
            total += marginal(log_prior(case.scores), log_p, whole).log_p.exp()
        torch.testing.assert_close(total, torch.ones(b), atol=1e-4, rtol=1e-4)


@settings(deadline=None, max_examples=30)
@given(cases(longest=1))
def test_classification_is_the_one_token_case(case: Case) -> None:
    """p(label|x) = Σ_z p(z|x) p(label|x,z): what both marginals say of a target of one token."""
    log_p, _ = target_log_p(case.logits, case.targets)
    one, other = (
        marginal(log_prior(case.scores), log_p, case.mask) for marginal in (sequence_likelihood, token_likelihood)
    )
    prior, p = p_of(case)
    label = case.targets[:, 0]
    expected = torch.einsum("bk,bkv->bv", prior, p[:, :, 0])[torch.arange(len(label)), label]
    torch.testing.assert_close(one.log_p.double(), expected.log(), atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(one.log_p, other.log_p)
    torch.testing.assert_close(one.posterior, other.posterior, atol=1e-5, rtol=1e-5)


def straight(case: Case, kind: str, epsilon: float, prior: Tensor, logits: Tensor) -> Tensor:
    """Return the smoothed loss with everything held at once."""
    log_p = logits.log_softmax(-1)
    v = logits.shape[-1]
    expected = case.targets[:, None, :, None].expand(*logits.shape[:-1], 1)
    mask = case.mask[:, None, :]
    if kind == "sequence":
        nll = (prior + (log_p.gather(-1, expected)[..., 0] * mask).sum(2)).logsumexp(1)
        uniform = (v * prior + (log_p.sum(-1) * mask).sum(2)).logsumexp(1)
    else:
        mixed = (prior[..., None, None] + log_p).logsumexp(1)
        nll = (mixed.gather(-1, expected[:, 0])[..., 0] * case.mask).sum(1)
        uniform = (mixed.sum(-1) * case.mask).sum(1)
    return -(1 - epsilon) * nll - epsilon / v * uniform


@pytest.mark.parametrize("kind", ["sequence", "token"])
@settings(deadline=None, max_examples=40)
@given(case=cases(), epsilon=st.sampled_from([0.0, 0.1, 0.5]))
def test_loss_and_gradients_are_those_of_everything_held_at_once(kind: str, case: Case, epsilon: float) -> None:
    scores, logits = (part.clone().requires_grad_() for part in (case.scores, case.logits))
    prior = log_prior(scores, 2.0)
    log_p, totals = target_log_p(logits, case.targets, totals=kind == "sequence" and epsilon > 0)
    if kind == "sequence":
        said = sequence_likelihood(prior, log_p, case.mask).log_p
        uniform = sequence_uniform(prior, totals, case.mask, logits.shape[-1]) if epsilon else torch.zeros_like(said)
    else:
        said = token_likelihood(prior, log_p, case.mask).log_p
        uniform = token_uniform(prior, logits, case.mask)
    weights = torch.arange(1, len(said) + 1)
    loss = smooth_labels(said, uniform, epsilon, logits.shape[-1])
    (loss * weights).sum().backward()
    others = [part.double().clone().requires_grad_() for part in (case.scores, case.logits)]
    expected = straight(case, kind, epsilon, (others[0] / 2).log_softmax(1), others[1])
    (expected * weights).sum().backward()
    torch.testing.assert_close(loss.double(), expected, atol=1e-4, rtol=1e-4)
    for mine, other in zip((scores, logits), others, strict=True):
        assert mine.grad is not None
        torch.testing.assert_close(mine.grad.double(), other.grad, atol=1e-4, rtol=1e-4)


def test_logits_are_gone_through_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many pieces as memory asks for: the numbers are the same."""
    logits = torch.randn(2, 3, 4, 11, generator=torch.Generator().manual_seed(1))
    targets = torch.arange(8).view(2, 4)
    found = []
    for values in (1 << 20, 25, 1):
        monkeypatch.setattr(likelihood, "_MAX_CPU_LOGITS", values)
        given = logits.clone().requires_grad_()
        log_p, totals = target_log_p(given, targets, totals=True)
        (log_p.exp() + totals / 50).sum().backward()
        found.append((log_p, totals, given.grad))
    for other in found[1:]:
        torch.testing.assert_close(found[0], other)
    given = logits.clone().requires_grad_()
    expected = given.log_softmax(-1)
    said = expected.gather(-1, targets[:, None, :, None].expand(2, 3, 4, 1))[..., 0]
    (said.exp() + expected.sum(-1) / 50).sum().backward()
    torch.testing.assert_close(found[0], (said, expected.sum(-1), given.grad))


def test_half_precision_logits_are_summed_in_full(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = (10 * torch.randn(1, 2, 3, 500, generator=torch.Generator().manual_seed(1))).bfloat16().requires_grad_()
    targets = torch.tensor([[3, 4, 5]])
    log_p, _ = target_log_p(logits, targets)
    expected = logits.float().log_softmax(-1)[..., torch.arange(3), targets[0]]
    torch.testing.assert_close(log_p, expected)
    log_p.sum().backward()
    assert logits.grad is not None
    assert logits.grad.dtype == torch.bfloat16


@pytest.mark.parametrize("marginal", [sequence_likelihood, token_likelihood])
def test_a_passage_that_is_not_there_has_no_part(marginal: object) -> None:
    """Its score is -inf; gradients stay finite."""
    assert callable(marginal)
    scores = torch.tensor([[1.0, -torch.inf, 2.0], [0.0, 0.0, 0.0]], requires_grad=True)
    logits = torch.randn(2, 3, 4, 7, generator=torch.Generator().manual_seed(1)).requires_grad_()
    targets, mask = torch.zeros(2, 4, dtype=torch.int64), torch.ones(2, 4, dtype=torch.bool)
    found = marginal(log_prior(scores), target_log_p(logits, targets)[0], mask)
    few = marginal(log_prior(scores[:1, [0, 2]]), target_log_p(logits[:1, [0, 2]], targets[:1])[0], mask[:1])
    torch.testing.assert_close(found.log_p[:1], few.log_p)
    assert found.posterior[0, 1] == -torch.inf
    found.log_p.sum().backward()
    assert scores.grad is not None
    assert logits.grad is not None
    assert torch.isfinite(scores.grad).all()
    assert torch.isfinite(logits.grad).all()
    assert not logits.grad[0, 1].any()


def test_very_unlikely_answers_have_a_logarithm() -> None:
    """Σ_z e^-2000 has none but in log space."""
    scores, log_p = torch.zeros(1, 2), torch.full((1, 2, 4), -500.0)
    for marginal in (sequence_likelihood, token_likelihood):
        found = marginal(log_prior(scores), log_p, torch.ones(1, 4, dtype=torch.bool))
        torch.testing.assert_close(found.log_p, torch.tensor([-2000.0]))


def test_a_temperature_flattens_the_prior() -> None:
    scores = torch.tensor([[2.0, 0.0]])
    assert log_prior(scores, 2.0).exp()[0, 0] == pytest.approx(math.e / (math.e + 1))
    assert log_prior(scores, 1e6).exp()[0, 0] == pytest.approx(0.5, abs=1e-5)
