"""The processes that share one training, as `torchrun` and `accelerate launch` start them.

Each process runs the same command. Only the first process reads slow sources, writes the training's
folder and publishes the model. All other processes receive its results, and train together with it.

If the memory of one process is too small for a step, all other processes would wait forever when
they exchange tensors. Therefore every exchange in a step begins with `exchange_counts`. The process
without memory calls `abandon_step` instead, and then all processes leave the step and repeat it.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
from torch import distributed, nn

from rag_model.errors import BookwheelError

_Value = TypeVar("_Value")
# The first process may mine negatives, score passages or rebuild an index for days while all other
# processes wait. If a process dies, the launcher ends all of them, so this limit only has to end a
# deadlock.
_TIMEOUT = timedelta(days=7)
_LAUNCHER_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR")
_ABANDONS_STEP, _CANNOT_REPEAT = -1, -2  # values that a process may send instead of a count


class StepAbandonedError(Exception):
    """The memory of another process is too small for this step."""

    def __init__(self, *, can_repeat: bool) -> None:
        """Store whether all processes without memory can repeat the step in smaller parts."""
        super().__init__("another process abandons this step")
        self.can_repeat = can_repeat


@dataclass(frozen=True, slots=True)
class TrainingProcesses:
    """The processes of a training. All processes call the methods in the same order."""

    rank: int = 0  # from 0 to `count` - 1
    count: int = 1

    @property
    def is_first(self) -> bool:
        """Whether this is the first process, which prepares examples and writes results."""
        return self.rank == 0

    def share(self, compute: Callable[[], _Value]) -> _Value:
        """Call `compute` in the first process, and return its result in all processes.

        Raises:
            BookwheelError: `compute` failed in the first process, which raises the original error.
        """
        if self.count == 1:
            return compute()
        shared_outcome: list[Any] = [False, None]
        try:
            if self.is_first:
                shared_outcome = [True, compute()]
        finally:
            distributed.broadcast_object_list(shared_outcome)
        if not shared_outcome[0]:
            raise BookwheelError("the first process of this training failed: see the error message of that process")
        return shared_outcome[1]  # type: ignore[no-any-return]

    def run_after_first(self, compute: Callable[[], _Value]) -> _Value:
        """Call `compute` in the first process, and then in all other processes.

        All other processes can then use the results that the first process has cached.

        Raises:
            BookwheelError: `compute` failed in the first process, which raises the original error.
        """
        results: list[_Value] = []
        self.share(lambda: results.append(compute()))
        return results[0] if self.is_first else compute()

    def leave_group(self) -> None:
        """Leave the group of processes; `share` must not be called afterwards."""
        if self.count > 1:
            distributed.destroy_process_group()


def is_launched_together() -> bool:
    """Return whether a launcher started this process together with other processes."""
    environment = os.environ
    is_launched = all(environment.get(name) for name in _LAUNCHER_VARIABLES)
    return is_launched and int(environment["WORLD_SIZE"]) > 1


def find_processes() -> TrainingProcesses:
    """Return the processes that have joined this training, or only this process."""
    if not (distributed.is_available() and distributed.is_initialized()):
        return TrainingProcesses()
    return TrainingProcesses(distributed.get_rank(), distributed.get_world_size())


def join_processes() -> TrainingProcesses:
    """Join the processes that a launcher started with this process, and return all of them.

    Without a launcher, this process is the only one. The processes exchange objects by gloo, and
    gradients on GPUs by NCCL. Each process uses the GPU of its local rank.
    """
    if is_launched_together() and find_processes().count == 1:
        has_gpu = torch.cuda.is_available()
        if has_gpu:
            torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
        distributed.init_process_group("cpu:gloo,cuda:nccl" if has_gpu else "gloo", timeout=_TIMEOUT)
    return find_processes()


def exchange_counts(count: int = 0) -> list[int]:
    """Send `count`, such as a number of rows, to all processes; return their counts by rank.

    Call this right before any other exchange of tensors in `Task.loss` or in a backward pass, when
    all memory for the exchange is allocated.

    Raises:
        StepAbandonedError: another process called `abandon_step`.
    """
    n_processes = find_processes().count
    if n_processes == 1:
        return [count]
    # The tensor is on the CPU, because a process without free GPU memory must be able to join.
    own_count = torch.tensor([count])
    gathered_counts = [torch.empty_like(own_count) for _ in range(n_processes)]
    distributed.all_gather(gathered_counts, own_count)
    process_counts = [int(process_count) for process_count in gathered_counts]
    if min(process_counts) < 0:
        raise StepAbandonedError(can_repeat=min(process_counts) == _ABANDONS_STEP)
    return process_counts


def abandon_step(*, can_repeat: bool) -> bool:
    """Let all processes leave this step, and return whether all of them can repeat it.

    `can_repeat` says whether this process can repeat the step in smaller parts.
    """
    try:
        exchange_counts(_ABANDONS_STEP if can_repeat else _CANNOT_REPEAT)
    except StepAbandonedError as error:
        return error.can_repeat
    return can_repeat  # This line is only reached if there is a single process.


def copy_weights_of_first(module: nn.Module) -> None:
    """Copy the trained parameters of a module from the first process to all other processes."""
    if find_processes().count == 1:
        return
    for parameter in module.parameters():
        if parameter.requires_grad:
            weights = parameter.detach().contiguous()
            distributed.broadcast(weights, 0)
            parameter.data.copy_(weights)


def average_gradients(module: nn.Module) -> None:
    """Replace the gradients of a module by their means over all processes.

    If a parameter has a gradient only in some processes, the gradient is 0 in all others. Gradients
    are averaged after the backward pass, not during it as `DistributedDataParallel` does, so that a
    step that runs out of memory can be abandoned.
    """
    n_processes = find_processes().count
    if n_processes == 1:
        return
    parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
    has_gradient = torch.tensor([parameter.grad is not None for parameter in parameters], dtype=torch.int32)
    distributed.all_reduce(has_gradient, distributed.ReduceOp.MAX)
    gradients, reductions = list[torch.Tensor](), list[Any]()
    for parameter in (parameters[index] for index in has_gradient.nonzero().flatten().tolist()):
        gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        parameter.grad = gradient.contiguous()
        gradients.append(parameter.grad)
        reductions.append(distributed.all_reduce(parameter.grad, async_op=True))
    for reduction in reductions:
        reduction.wait()
    torch._foreach_div_(gradients, n_processes)
