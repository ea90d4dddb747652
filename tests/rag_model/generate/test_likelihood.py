"""The marginals, compared with explicit sums over the passages of small tensors."""

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
    sequence_smoothing_term,
    smooth_labels,
    target_log_p,
    token_likelihood,
    token_smoothing_term,
)


@dataclass(frozen=True, slots=True)
class Case:
    """Random scores, logits, targets and lengths."""

    scores: Tensor  # (b, k)
    logits: Tensor  # (b, k, t, v)
    targets: Tensor  # (b, t)
    mask: Tensor  # (b, t)


@st.composite
def draw_cases(draw: st.DrawFn, max_tokens: int = 4) -> Case:
    b, k, t, v = (draw(st.integers(1, upper)) for upper in (3, 4, max_tokens, 5))
    source = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    lengths = torch.tensor(draw(st.lists(st.integers(1, t), min_size=b, max_size=b)))
    return Case(
        3 * torch.randn(b, k, generator=source),
        3 * torch.randn(b, k, t, v, generator=source),
        torch.randint(v, (b, t), generator=source),
        torch.arange(t) < lengths[:, None],
    )


def compute_probabilities(case: Case) -> tuple[Tensor, Tensor]:
    """Return p(z|x) (b, k) and p(w|x,z,y_<i) (b, k, t, v) in float64."""
    return case.scores.double().softmax(1), case.logits.double().softmax(-1)


def get_target_probability(case: Case, row: int, z: int, i: int) -> float:
    return float(compute_probabilities(case)[1][row, z, i, case.targets[row, i]])


def assert_close(actual: Tensor, expected: list[float]) -> None:
    torch.testing.assert_close(actual.double(), torch.tensor(expected).double(), atol=1e-4, rtol=1e-4)


def list_positions(case: Case, row: int) -> range:
    return range(int(case.mask[row].sum()))


@settings(deadline=None, max_examples=30)
@given(draw_cases())
def test_rag_sequence_is_the_sum_over_passages_of_whole_answers(case: Case) -> None:
    log_p, _ = target_log_p(case.logits, case.targets)
    result = sequence_likelihood(log_prior(case.scores), log_p, case.mask)
    prior, _ = compute_probabilities(case)
    for row in range(len(prior)):
        positions = list_positions(case, row)
        joint = [
            weight * math.prod(get_target_probability(case, row, z, i) for i in positions)
            for z, weight in enumerate(prior[row].tolist())
        ]
        assert_close(result.log_p[row : row + 1], [math.log(sum(joint))])
        assert_close(result.posterior[row], [math.log(p / sum(joint)) for p in joint])
    assert result.token_posterior is None


@settings(deadline=None, max_examples=30)
@given(draw_cases())
def test_rag_token_is_the_product_of_mixtures(case: Case) -> None:
    log_p, _ = target_log_p(case.logits, case.targets)
    result = token_likelihood(log_prior(case.scores), log_p, case.mask)
    prior, _ = compute_probabilities(case)
    assert result.token_posterior is not None
    for row in range(len(prior)):
        weights = prior[row].tolist()
        joint = [
            [weight * get_target_probability(case, row, z, i) for z, weight in enumerate(weights)]
            for i in list_positions(case, row)
        ]
        assert_close(result.log_p[row : row + 1], [sum(math.log(sum(token)) for token in joint)])
        shares = [[p / sum(token) for p in token] for token in joint]
        for i, share in enumerate(shares):
            assert_close(result.token_posterior[row, :, i], [math.log(p) for p in share])
        means = [sum(column) / len(joint) for column in zip(*shares, strict=True)]
        assert_close(result.posterior[row].exp(), means)


@settings(deadline=None, max_examples=20)
@given(draw_cases(max_tokens=3))
def test_probabilities_of_all_answers_sum_to_one(case: Case) -> None:
    """The logits of a position do not depend on the previous tokens here."""
    b, _, t, v = case.logits.shape
    mask = torch.ones(b, t, dtype=torch.bool)
    for marginal in (sequence_likelihood, token_likelihood):
        total = torch.zeros(b)
        for answer in product(range(v), repeat=t):
            log_p, _ = target_log_p(case.logits, torch.tensor([answer] * b))
            total += marginal(log_prior(case.scores), log_p, mask).log_p.exp()
        torch.testing.assert_close(total, torch.ones(b), atol=1e-4, rtol=1e-4)


@settings(deadline=None, max_examples=30)
@given(draw_cases(max_tokens=1))
def test_marginals_of_one_token_are_a_classification(case: Case) -> None:
    """For a target of one token, both marginals are p(label|x) = Σ_z p(z|x) p(label|x,z)."""
    log_p, _ = target_log_p(case.logits, case.targets)
    sequence, token = (
        marginal(log_prior(case.scores), log_p, case.mask) for marginal in (sequence_likelihood, token_likelihood)
    )
    prior, p = compute_probabilities(case)
    label = case.targets[:, 0]
    expected = torch.einsum("bk,bkv->bv", prior, p[:, :, 0])[torch.arange(len(label)), label]
    torch.testing.assert_close(sequence.log_p.double(), expected.log(), atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(sequence.log_p, token.log_p)
    torch.testing.assert_close(sequence.posterior, token.posterior, atol=1e-5, rtol=1e-5)


def compute_loss_directly(case: Case, kind: str, epsilon: float, prior: Tensor, logits: Tensor) -> Tensor:
    """Return the smoothed loss, computed from the log-probabilities of all words at once."""
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
@given(case=draw_cases(), epsilon=st.sampled_from([0.0, 0.1, 0.5]))
def test_loss_and_gradients_equal_the_direct_computation(kind: str, case: Case, epsilon: float) -> None:
    scores, logits = (part.clone().requires_grad_() for part in (case.scores, case.logits))
    prior = log_prior(scores, 2.0)
    log_p, totals = target_log_p(logits, case.targets, with_totals=kind == "sequence" and epsilon > 0)
    if kind == "sequence":
        marginal = sequence_likelihood(prior, log_p, case.mask).log_p
        uniform = sequence_smoothing_term(prior, totals, case.mask, logits.shape[-1]) if epsilon else 0 * marginal
    else:
        marginal = token_likelihood(prior, log_p, case.mask).log_p
        uniform = token_smoothing_term(prior, logits, case.mask)
    weights = torch.arange(1, len(marginal) + 1)
    loss = smooth_labels(marginal, uniform, epsilon, logits.shape[-1])
    (loss * weights).sum().backward()
    copies = [part.double().clone().requires_grad_() for part in (case.scores, case.logits)]
    expected = compute_loss_directly(case, kind, epsilon, (copies[0] / 2).log_softmax(1), copies[1])
    (expected * weights).sum().backward()
    torch.testing.assert_close(loss.double(), expected, atol=1e-4, rtol=1e-4)
    for part, copy in zip((scores, logits), copies, strict=True):
        assert part.grad is not None
        torch.testing.assert_close(part.grad.double(), copy.grad, atol=1e-4, rtol=1e-4)


def test_result_does_not_depend_on_the_chunk_size(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = torch.randn(2, 3, 4, 11, generator=torch.Generator().manual_seed(1))
    targets = torch.arange(8).view(2, 4)
    results = []
    for values in (1 << 20, 25, 1):
        monkeypatch.setattr(likelihood, "_MAX_CPU_LOGITS", values)
        copy = logits.clone().requires_grad_()
        log_p, totals = target_log_p(copy, targets, with_totals=True)
        (log_p.exp() + totals / 50).sum().backward()
        results.append((log_p, totals, copy.grad))
    for result in results[1:]:
        torch.testing.assert_close(results[0], result)
    copy = logits.clone().requires_grad_()
    expected = copy.log_softmax(-1)
    target_log_probabilities = expected.gather(-1, targets[:, None, :, None].expand(2, 3, 4, 1))[..., 0]
    (target_log_probabilities.exp() + expected.sum(-1) / 50).sum().backward()
    torch.testing.assert_close(results[0], (target_log_probabilities, expected.sum(-1), copy.grad))


def test_bf16_logits_are_summed_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = (10 * torch.randn(1, 2, 3, 500, generator=torch.Generator().manual_seed(1))).bfloat16().requires_grad_()
    targets = torch.tensor([[3, 4, 5]])
    log_p, _ = target_log_p(logits, targets)
    expected = logits.float().log_softmax(-1)[..., torch.arange(3), targets[0]]
    torch.testing.assert_close(log_p, expected)
    log_p.sum().backward()
    assert logits.grad is not None
    assert logits.grad.dtype == torch.bfloat16


@pytest.mark.parametrize("marginal", [sequence_likelihood, token_likelihood])
def test_passage_with_score_minus_infinity_has_no_weight(marginal: object) -> None:
    assert callable(marginal)
    scores = torch.tensor([[1.0, -torch.inf, 2.0], [0.0, 0.0, 0.0]], requires_grad=True)
    logits = torch.randn(2, 3, 4, 7, generator=torch.Generator().manual_seed(1)).requires_grad_()
    targets, mask = torch.zeros(2, 4, dtype=torch.int64), torch.ones(2, 4, dtype=torch.bool)
    padded = marginal(log_prior(scores), target_log_p(logits, targets)[0], mask)
    unpadded = marginal(log_prior(scores[:1, [0, 2]]), target_log_p(logits[:1, [0, 2]], targets[:1])[0], mask[:1])
    torch.testing.assert_close(padded.log_p[:1], unpadded.log_p)
    assert padded.posterior[0, 1] == -torch.inf
    padded.log_p.sum().backward()
    assert scores.grad is not None
    assert logits.grad is not None
    assert torch.isfinite(scores.grad).all()
    assert torch.isfinite(logits.grad).all()
    assert not logits.grad[0, 1].any()


def test_very_unlikely_answers_have_finite_log_p() -> None:
    """Σ_z e^-2000 underflows outside log space."""
    scores, log_p = torch.zeros(1, 2), torch.full((1, 2, 4), -500.0)
    for marginal in (sequence_likelihood, token_likelihood):
        result = marginal(log_prior(scores), log_p, torch.ones(1, 4, dtype=torch.bool))
        torch.testing.assert_close(result.log_p, torch.tensor([-2000.0]))


def test_temperature_flattens_the_prior() -> None:
    scores = torch.tensor([[2.0, 0.0]])
    assert log_prior(scores, 2.0).exp()[0, 0] == pytest.approx(math.e / (math.e + 1))
    assert log_prior(scores, 1e6).exp()[0, 0] == pytest.approx(0.5, abs=1e-5)
