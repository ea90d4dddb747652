"""Measure training steps of this library and of a plain loop. AdamW has the same equation on both sides."""

import statistics
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from isolated_run import WorkCost
from torch import Tensor, nn

from rag_model.process import release_freed_memory
from rag_model.training.loop.loop import build_adamw
from rag_model.training.loop.loop_settings import LoopSettings

Loss = Callable[[int], Tensor]  # of a step, by its number from 0 on


class Step(NamedTuple):
    """The cost of a step (loss, gradient and update), and its loss."""

    seconds: float
    cpu_seconds: float
    loss: float


def take_our_steps(module: nn.Module, loss: Loss, steps: int, rate: float, device: str = "cpu") -> list[Step]:
    """Run steps as `train` does: with its optimizer, and with freed memory returned at once."""
    release_freed_memory()
    return _measure_steps(build_adamw(module, LoopSettings(learning_rate=rate), torch.device(device)), loss, steps)


def take_plain_steps(module: nn.Module, loss: Loss, steps: int, rate: float) -> list[Step]:
    """Run steps with torch's own AdamW."""
    learned = [parameter for parameter in module.parameters() if parameter.requires_grad]
    return _measure_steps(torch.optim.AdamW(learned, lr=rate, weight_decay=0.0), loss, steps)


def median(runs: Sequence[WorkCost], what: str) -> float:
    """Return the median of a value of the steps of all runs; the first step of each is a warm-up."""
    return statistics.median(getattr(step, what) for run in runs for step in run.value[1:])


def _measure_steps(optimizer: torch.optim.Optimizer, loss: Loss, steps: int) -> list[Step]:
    step_costs = []
    for number in range(steps):
        started, cpu = time.perf_counter(), time.process_time()
        value = loss(number)
        value.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        loss_value = value.item()  # waits for a GPU, whose work is only queued so far
        step_costs.append(Step(time.perf_counter() - started, time.process_time() - cpu, loss_value))
    return step_costs
