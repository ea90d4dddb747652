"""The processes that share one training, as `torchrun` and `accelerate launch` start them.

Each process runs the same command. Only the first one reads slow sources, writes the training's
folder and publishes the model; the others receive its results, and train together with it.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
from torch import distributed

from rag_model.errors import BookwheelError

_Value = TypeVar("_Value")
# The first process may mine negatives, score passages or rebuild an index for days while the others
# wait. If a process dies, the launcher ends the others, so this limit only has to end a deadlock.
_TIMEOUT = timedelta(days=7)
_LAUNCHER_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR")


@dataclass(frozen=True, slots=True)
class TrainingProcesses:
    """The processes of a training. All processes call the methods in the same order."""

    index: int = 0  # number of this process
    count: int = 1

    @property
    def is_first(self) -> bool:
        """Whether this is the process that prepares, writes and publishes."""
        return self.index == 0

    def share(self, compute: Callable[[], _Value]) -> _Value:
        """Call `compute` in the first process, and return its result in all of them.

        Raises:
            BookwheelError: the first process failed, and raised its own error there.
        """
        if self.count == 1:
            return compute()
        outcome: list[Any] = [False, None]
        try:
            if self.is_first:
                outcome = [True, compute()]
        finally:
            distributed.broadcast_object_list(outcome)
        if not outcome[0]:
            raise BookwheelError("the first process of this training failed: see the error message of that process")
        return outcome[1]  # type: ignore[no-any-return]

    def run_after_first(self, compute: Callable[[], _Value]) -> _Value:
        """Call `compute` in the first process, and then in all others.

        So the others find the results that the first process has cached.

        Raises:
            BookwheelError: the first process failed, and raised its own error there.
        """
        results: list[_Value] = []
        self.share(lambda: results.append(compute()))
        return results[0] if self.is_first else compute()

    def leave(self) -> None:
        """Leave the group of processes; `share` must not be called afterwards."""
        if self.count > 1:
            distributed.destroy_process_group()


def is_launched_together() -> bool:
    """Return whether a launcher started this process as one of several."""
    environment = os.environ
    is_described = all(environment.get(name) for name in _LAUNCHER_VARIABLES)
    return is_described and int(environment["WORLD_SIZE"]) > 1


def find_processes() -> TrainingProcesses:
    """Return the processes that have joined this training, or only this one."""
    if not (distributed.is_available() and distributed.is_initialized()):
        return TrainingProcesses()
    return TrainingProcesses(distributed.get_rank(), distributed.get_world_size())


def join_processes() -> TrainingProcesses:
    """Join the processes that a launcher started with this one, if there are any, and return them.

    They exchange objects by gloo, and gradients on GPUs by NCCL. Each process uses the GPU of its
    local rank.
    """
    if is_launched_together() and find_processes().count == 1:
        has_gpu = torch.cuda.is_available()
        if has_gpu:
            torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
        distributed.init_process_group("cpu:gloo,cuda:nccl" if has_gpu else "gloo", timeout=_TIMEOUT)
    return find_processes()
