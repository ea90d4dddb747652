"""The protocol of tasks for the loop: a module, batches, a loss, an evaluation, and saving to a folder."""

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
    """The measure of `Task.evaluate` that selects the best weights."""

    measure: str
    larger: bool = True  # whether larger is better

    def is_better(self, new: Measures, old: Measures) -> bool:
        """Return whether `new` is strictly better than `old`; anything is better than a NaN."""
        first, second = new[self.measure], old[self.measure]
        return math.isnan(second) or (first > second if self.larger else first < second)


class Task(Protocol[Batch]):
    """One training task. Only the weights are state: everything else is determined by the recipe."""

    @property
    def module(self) -> nn.Module:
        """Return the module to train: its parameters that require a gradient; the loop moves it to its device."""
        ...

    @property
    def goal(self) -> Goal:
        """Return the measure that selects the best weights."""
        ...

    def recipe(self) -> Mapping[str, Any]:
        """Return, as JSON values, all that determines the losses except `LoopSettings`: data and models by digest."""
        ...

    def batches(self, epoch: int) -> Sequence[Batch]:
        """Return the batches of an epoch, from 0: equal for equal `epoch`, and equally many in every epoch."""
        ...

    def ids(self, batch: Batch) -> Sequence[str]:
        """Return the ids of the examples of a batch, for the error of a loss that is not finite."""
        ...

    def loss(self, batch: Batch) -> tuple[Tensor, Mapping[str, Tensor | float]]:
        """Return the loss to minimise, a scalar with gradient, and measures to log; same names every time."""
        ...

    def evaluate(self) -> Measures:
        """Measure the current weights on the dev set; called without gradient, in the precision of training.

        The module is in `eval` mode; the names are the same every time, and the goal's is among them.
        """
        ...

    def save(self, folder: Path) -> None:
        """Write the trained model to `folder`, which exists and is empty."""
        ...


@runtime_checkable
class TellingTask(Protocol):
    """A further property of a `Task` that is one of several stages: what the model's card says of it."""

    @property
    def trained_on(self) -> str:
        """Return one sentence: on which examples, of which snapshot."""
        ...


@runtime_checkable
class AskingTask(Protocol):
    """Further methods of a `Task` that searches a snapshot during training: the loop records the snapshot of every
    step. The id is in the journal at every step and in every checkpoint. With several processes, all are called at the
    same steps, and must search the same snapshot.
    """

    @property
    def asked(self) -> str:
        """Return the id of the snapshot that is currently searched."""
        ...

    def move(self, step: int) -> Measures:
        """Search another snapshot from `step` on, or do nothing: called before the batches of the step are taken. The
        weights are those after the step before. Returns measures to log with the step, such as the snapshot's age; same
        names every time. The decision should depend only on the step and the weights: then a run that was killed
        resumes to the same losses.
        """
        ...

    def ask(self, snapshot: str) -> None:
        """Search the snapshot with this id again: it is the one of the checkpoint, whose weights are loaded.

        Raises:
            BookwheelError: it no longer exists, or cannot be searched.
        """
        ...
