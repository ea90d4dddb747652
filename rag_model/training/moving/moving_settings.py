"""How the index of a training moves: how often it is rebuilt, and whether the trainer waits."""

from dataclasses import dataclass
from typing import Literal, get_args

from rag_model.errors import UsageError

Mode = Literal["synchronous", "asynchronous"]


@dataclass(frozen=True, slots=True)
class MovingSettings:
    """The table `[moving]` of a training whose passage encoder learns."""

    every: int = 500  # steps, counted over the run, between two rebuilds; 0: never. Siriwardhana et al. 2023: 500
    mode: Mode = "synchronous"  # wait for a rebuild, and resume to equal losses; asynchronous: go on meanwhile (paper)
    devices: str = ""  # GPUs of the rebuild on this machine, as in CUDA_VISIBLE_DEVICES; empty: those of the trainer

    def __post_init__(self) -> None:
        if self.every < 0:
            raise UsageError(f"every {self.every} of a moving index: give a number of steps, or 0 for no rebuild")
        if self.mode not in get_args(Mode):
            raise UsageError(f"mode {self.mode!r} of a moving index is unknown: use one of {', '.join(get_args(Mode))}")

    def due(self, done: int) -> bool:
        """Return whether a rebuild begins when `done` steps are done."""
        return bool(self.every and done) and done % self.every == 0

    def rebuilds(self, steps: int) -> int:
        """Return how many rebuilds begin in a training of `steps` steps; the one after its end is not counted."""
        return max(0, steps - 1) // self.every if self.every else 0
