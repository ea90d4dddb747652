"""The protocol of rebuilds: a snapshot's own passages, encoded again by a given encoder, in a new snapshot.

What runs them is given to a training from outside: `flows` runs each as a flow in a child process, with jobs on Beam.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol, Self


@dataclass(frozen=True, slots=True)
class Order:
    """One rebuild to be made."""

    step: int  # steps that the encoder has done
    snapshot: str  # full id of the snapshot whose passages are encoded
    folder: Path  # holds the encoders, and has room for files of the rebuild

    @property
    def encoders(self) -> Path:
        """The folder with the encoders `passage` and `question`."""
        return self.folder / "encoders"


@dataclass(frozen=True, slots=True)
class Rebuilt:
    """A finished rebuild: the snapshot is published, and the gate let it pass."""

    step: int  # as of the order
    snapshot: str  # full id
    encoding_seconds: float  # of encoding the passages
    seconds: float  # of the whole rebuild

    def to_json(self) -> dict[str, Any]:
        """Return the record as JSON values."""
        return asdict(self)

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Self:
        """Read back the result of `to_json`."""
        return cls(**value)


class Running(Protocol):
    """A rebuild that was started."""

    def done(self) -> bool:
        """Return whether `result` would return at once."""
        ...

    def result(self) -> Rebuilt:
        """Wait for the end, and return the snapshot.

        Raises:
            BookwheelError: it failed, or the gate refused the snapshot; the training goes on with the one before.
        """
        ...


class Rebuild(Protocol):
    """Makes rebuilds beside a training."""

    def start(self, order: Order) -> Running:
        """Start a rebuild and return at once; one that was started before and died is continued from what it recorded.

        Equal encoders and passages give equal snapshots.

        Raises:
            BookwheelError: it cannot be started.
        """
        ...
