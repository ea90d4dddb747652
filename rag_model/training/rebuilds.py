"""Settings and protocol of rebuilds, which encode a snapshot's passages again with another encoder.

The caller of a training passes the `Rebuilder`: `flows` runs each rebuild as a flow in a child
process, with jobs on Beam.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, Protocol, Self, get_args

from rag_model.errors import UsageError

RebuildMode = Literal["synchronous", "asynchronous"]


@dataclass(frozen=True, slots=True)
class MovingSettings:
    """Settings of a moving index, the table `[moving]` of trainings of a passage encoder."""

    # steps, counted over the run, between two rebuilds; 0: never. Siriwardhana et al. 2023: 500
    every: int = 500
    # wait for a rebuild, so runs are repeatable; asynchronous: go on (paper)
    mode: RebuildMode = "synchronous"
    # GPUs of the rebuild on this machine, as in CUDA_VISIBLE_DEVICES; empty: those of the trainer
    devices: str = ""

    def __post_init__(self) -> None:
        if self.every < 0:
            raise UsageError(f"every {self.every} of a moving index: give a number of steps, or 0 for no rebuild")
        if self.mode not in get_args(RebuildMode):
            raise UsageError(
                f"mode {self.mode!r} of a moving index is unknown: use one of {', '.join(get_args(RebuildMode))}"
            )

    def is_due(self, done: int) -> bool:
        """Return whether a rebuild starts after `done` steps."""
        return bool(self.every and done) and done % self.every == 0

    def count_rebuilds(self, steps: int) -> int:
        """Return the number of rebuilds that start during `steps` steps, without the final one."""
        return max(0, steps - 1) // self.every if self.every else 0


@dataclass(frozen=True, slots=True)
class RebuildOrder:
    """One rebuild to run."""

    step: int  # training steps of the encoder
    snapshot: str  # full id of the snapshot whose passages are encoded
    folder: Path  # holds the encoders, and the rebuild's files

    @property
    def encoders(self) -> Path:
        """Folder with the encoders `passage` and `question`."""
        return self.folder / "encoders"


@dataclass(frozen=True, slots=True)
class RebuildResult:
    """A finished rebuild, whose snapshot is published and has passed the gate."""

    step: int  # training steps of the encoder
    snapshot: str  # full id
    encoding_seconds: float  # time to encode the passages
    seconds: float  # time of the whole rebuild

    def to_json(self) -> dict[str, Any]:
        """Return the record as JSON values."""
        return asdict(self)

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Self:
        """Read back the result of `to_json`."""
        return cls(**value)


class RunningRebuild(Protocol):
    """A rebuild that has been started."""

    def done(self) -> bool:
        """Return whether `result` would return at once."""
        ...

    def result(self) -> RebuildResult:
        """Wait for the end, and return the result.

        Raises:
            BookwheelError: the rebuild failed, or the gate refused the snapshot; the training goes
                on with the previous snapshot.
        """
        ...


class Rebuilder(Protocol):
    """Runs rebuilds while a training goes on."""

    def start(self, order: RebuildOrder) -> RunningRebuild:
        """Start a rebuild and return at once; a rebuild that died is resumed from its records.

        Equal encoders and passages give equal snapshots.

        Raises:
            BookwheelError: the rebuild cannot be started.
        """
        ...
