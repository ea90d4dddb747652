"""The protocol of tasks that the loop trains: module, batches, loss, evaluation and saving."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar, runtime_checkable

from torch import Tensor, nn

Batch = TypeVar("Batch")
Measures = Mapping[str, float]
_LOWER_IS_BETTER = frozenset({"average_rank", "loss", "nll", "kl"})


@dataclass(frozen=True, slots=True)
class Goal:
    """The measure of `Task.evaluate` that selects the best checkpoint."""

    measure: str
    larger: bool = True  # whether a larger value is better

    @classmethod
    def for_measure(cls, measure: str) -> "Goal":
        """Return the goal for a measure of the built-in objectives."""
        return cls(measure, larger=measure.removeprefix("bag_") not in _LOWER_IS_BETTER)

    def is_better(self, new: Measures, old: Measures) -> bool:
        """Return whether `new` is strictly better than `old`; any value is better than NaN."""
        new_value, old_value = new[self.measure], old[self.measure]
        return math.isnan(old_value) or (new_value > old_value if self.larger else new_value < old_value)


class Task(Protocol[Batch]):
    """One training task. Only its weights may change; everything else is determined by `recipe`.

    If a training has several stages, the task of a stage may have a property `trained_on`: a
    sentence for the model card that names the examples and the snapshot.
    """

    @property
    def module(self) -> nn.Module:
        """Return the module whose parameters with `requires_grad` are trained.

        The loop moves it to the device.
        """
        ...

    @property
    def goal(self) -> Goal:
        """Return the measure that selects the best checkpoint."""
        ...

    def recipe(self) -> Mapping[str, Any]:
        """Return all inputs that determine the losses, except `LoopSettings`, as JSON values.

        Data and models are represented by their digests.
        """
        ...

    def batches(self, epoch: int) -> Sequence[Batch]:
        """Return the batches of an epoch; epochs are numbered from 0.

        Equal epoch numbers give equal batches, and every epoch has the same number of batches.
        """
        ...

    def ids(self, batch: Batch) -> Sequence[str]:
        """Return the ids of the examples in a batch, for the error if its loss is not finite."""
        ...

    def loss(self, batch: Batch) -> tuple[Tensor, Mapping[str, Tensor | float]]:
        """Return the loss, a scalar with a gradient, and measures, whose names must not change."""
        ...

    def evaluate(self) -> Measures:
        """Evaluate the current weights on the dev set.

        The loop calls it without gradients, in the precision of the training, with the module in
        `eval` mode. The names of the measures must not change, and must include that of the goal.
        """
        ...

    def save(self, folder: Path) -> None:
        """Write the trained model to `folder`, an existing empty folder."""
        ...


@runtime_checkable
class SearchingTask(Protocol):
    """Optional methods of a `Task` that searches a snapshot during training.

    The loop records the id of the searched snapshot in the training's log at every step and in
    every checkpoint. If there are several processes, the loop calls these methods in all of them at
    the same steps, and all must search the same snapshot.
    """

    @property
    def searched_snapshot(self) -> str:
        """Return the id of the snapshot that the task searches now."""
        ...

    def move_index(self, step: int) -> Measures:
        """Switch to another snapshot from `step` on, or do nothing; return measures for the log.

        The loop calls this before it gets the batches of the step, when the weights are those of
        the previous step. The names of the measures, such as the age of the snapshot, must not
        change. The decision should depend only on the step and the weights, so that a run that was
        killed and resumed has the same losses.
        """
        ...

    def search_snapshot(self, snapshot: str) -> None:
        """Search the snapshot with this id, which was searched when the checkpoint was written.

        Raises:
            BookwheelError: the snapshot no longer exists, or cannot be searched.
        """
        ...
