"""What the loop asks of a task: weights that learn, batches, a loss, a look at the dev set, and a folder to keep."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar, runtime_checkable

from torch import Tensor, nn

Batch = TypeVar("Batch")
Measures = Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Goal:
    """The measure of `Task.evaluate` that says which weights are the best."""

    measure: str
    larger: bool = True  # is better

    def is_better(self, new: Measures, old: Measures) -> bool:
        """Return whether `new` is strictly better than `old`; anything is better than a NaN."""
        first, second = new[self.measure], old[self.measure]
        return math.isnan(second) or (first > second if self.larger else first < second)


class Task(Protocol[Batch]):
    """One thing to be learned. All that varies between two runs is the weights: the rest is decided by the recipe."""

    @property
    def module(self) -> nn.Module:
        """Return what learns: its parameters that ask for a gradient; the loop moves it to its device."""
        ...

    @property
    def goal(self) -> Goal:
        """Return what says which weights are the best."""
        ...

    def recipe(self) -> Mapping[str, Any]:
        """Return as JSON values all that decides the losses but `LoopSettings`: data and models by their digests."""
        ...

    def batches(self, epoch: int) -> Sequence[Batch]:
        """Return the batches of an epoch, from 0: the same for the same number, and as many in every epoch."""
        ...

    def ids(self, batch: Batch) -> Sequence[str]:
        """Return the ids of the examples of a batch, to be named where its loss is not finite."""
        ...

    def loss(self, batch: Batch) -> tuple[Tensor, Mapping[str, Tensor | float]]:
        """Return the loss to minimise, a scalar with gradient, and what else to write down; same names every time."""
        ...

    def evaluate(self) -> Measures:
        """Measure the weights as they are on the dev set; called without gradient, in the precision of training.

        The module is in `eval` mode; the names are the same every time, and the goal's is among them.
        """
        ...

    def save(self, folder: Path) -> None:
        """Write what was learned to `folder`, which exists and is empty."""
        ...


@runtime_checkable
class AskingTask(Protocol):
    """What a `Task` has as well if it asks a snapshot while it is trained: the loop records which one, step by step.

    The id stands beside every step in the journal and in every checkpoint. Among several processes all are called, at
    the same steps, and must ask the same snapshot.
    """

    @property
    def asked(self) -> str:
        """Return the id of the snapshot that is asked now."""
        ...

    def move(self, step: int) -> Measures:
        """Ask another snapshot from `step` on, or do nothing: called before the batches of the step are taken.

        The weights are those after the step before. Returns what to write down beside the step, such as the snapshot's
        age; same names every time. The decision should follow from the step and the weights: then a run that was killed
        goes on to the same losses.
        """
        ...

    def ask(self, snapshot: str) -> None:
        """Ask the snapshot with this id again: a checkpoint says that it was asked, and its weights are in place.

        Raises:
            BookwheelError: it is no longer there, or cannot be asked.
        """
        ...
