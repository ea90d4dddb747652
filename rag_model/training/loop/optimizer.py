"""AdamW over what learns; the weight decay is of matrices, not of biases and norms."""

from typing import Any

import torch
from torch import nn

from rag_model.training.loop.loop_settings import LoopSettings


def adamw(module: nn.Module, settings: LoopSettings, device: torch.device) -> torch.optim.Optimizer:
    """Return the optimizer of a module that will learn on `device`.

    On a CPU one pass updates each parameter (`fused`). Torch's default there makes two temporary copies of each, of
    which those of the word embeddings make a step's peak of memory, and takes five times as long. On a GPU it is
    torch's default, which a scaler of fp16 gradients needs. So it is where a parameter is not contiguous: `fused` reads
    parameters and moments as they lie in memory, and a checkpoint gives the moments back row by row.
    """
    learning = [parameter for parameter in module.parameters() if parameter.requires_grad]
    matrices = [parameter for parameter in learning if parameter.ndim > 1]
    others = [parameter for parameter in learning if parameter.ndim <= 1]
    fused = device.type == "cpu" and all(parameter.is_contiguous() for parameter in learning)
    groups: list[dict[str, Any]] = [{"params": matrices}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(
        [group for group in groups if group["params"]],
        lr=settings.learning_rate,
        betas=(settings.adam_beta1, settings.adam_beta2),
        eps=settings.adam_epsilon,
        weight_decay=settings.weight_decay,
        fused=fused or None,
    )
