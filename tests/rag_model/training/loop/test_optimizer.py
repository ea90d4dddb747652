"""The optimizer, compared with the equation of AdamW (Loshchilov and Hutter, arXiv 1711.05101, algorithm 2)."""

import pytest
import torch
from torch import Tensor, nn

from rag_model.training.loop.loop import build_adamw
from rag_model.training.loop.loop_settings import LoopSettings

SETTINGS = LoopSettings(learning_rate=0.1, weight_decay=0.2, adam_beta1=0.7, adam_beta2=0.9, adam_epsilon=1e-3)


def compute_adamw(weights: Tensor, gradients: list[Tensor], decay: float) -> Tensor:
    first, second = torch.zeros_like(weights), torch.zeros_like(weights)
    beta1, beta2, rate = SETTINGS.adam_beta1, SETTINGS.adam_beta2, SETTINGS.learning_rate
    for step, gradient in enumerate(gradients, start=1):
        first, second = beta1 * first + (1 - beta1) * gradient, beta2 * second + (1 - beta2) * gradient**2
        root = (second / (1 - beta2**step)).sqrt() + SETTINGS.adam_epsilon
        weights = weights - rate * decay * weights - rate * first / (1 - beta1**step) / root
    return weights


@pytest.mark.parametrize("device", ["cpu", "meta"])  # any other device gets torch's default
def test_steps_follow_adamw_and_only_matrices_decay(device: str) -> None:
    torch.manual_seed(0)
    module = nn.Linear(5, 3, dtype=torch.float64)
    frozen = nn.Linear(2, 2, dtype=torch.float64).requires_grad_(False)
    optimizer = build_adamw(nn.ModuleList([module, frozen]), SETTINGS, torch.device(device))
    initial_weights = {name: weights.detach().clone() for name, weights in module.named_parameters()}
    gradients = [{name: torch.randn_like(weights) for name, weights in initial_weights.items()} for _ in range(4)]
    for gradient in gradients:
        for name, weights in module.named_parameters():
            weights.grad = gradient[name].clone()
        optimizer.step()
    for name, weights in module.named_parameters():
        decay = 0.2 if name == "weight" else 0.0
        expected = compute_adamw(initial_weights[name], [step[name] for step in gradients], decay)
        assert torch.allclose(weights, expected, rtol=1e-12)
    assert all(parameter.requires_grad for group in optimizer.param_groups for parameter in group["params"])


def test_module_without_matrices_has_one_parameter_group() -> None:
    assert len(build_adamw(nn.LayerNorm(4), SETTINGS, torch.device("cpu")).param_groups) == 1
