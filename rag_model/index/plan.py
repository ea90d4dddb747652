"""What an index is for the rows there are: a small, plain record that travels to every worker.

A kind of index that has more to decide extends `IndexPlan` with fields of its own, as `VectorPlan` does.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

_BESIDE = ("search", "refine", "recall_target", "drift", "notes")  # change no byte of the index
_ALL_ROWS = ("n", "train_sample")  # a piece does not depend on them, once there is a trained file

Facts = dict[str, Any]  # what a stage of a build says of its work: JSON values


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexPlan:
    """A recipe made concrete for the n rows of a representation."""

    kind: str  # name of the index kind that builds it
    factory: str  # complete: nothing in it is left open
    n: int  # rows
    search: Mapping[str, Any]  # what a search uses unless told otherwise
    seed: int = 0
    over: str = ""  # name of the representation; empty: the one that every snapshot has of the kind's sort
    recall_target: float | None = None  # the tuner sets the search for it
    drift: float = 1.2  # times the error of old rows that new ones may have under an inherited trained file
    notes: tuple[str, ...] = ()  # sentences: what was asked for, and why it is not what is built
    settings: Mapping[str, Any] = field(default_factory=dict)  # the recipe's own settings of this kind

    @property
    def shards(self) -> int:
        """Return how many shards are built between scattering and merging."""
        return 0

    def entry(self) -> dict[str, Any]:
        """Return what the plan says in the index's entry of a manifest."""
        entry = {"kind": self.kind, "over": self.over, "factory": self.factory, "n": self.n}
        return entry | {"search": dict(self.search)} | ({"settings": dict(self.settings)} if self.settings else {})

    def built(self) -> dict[str, Any]:
        """Return the plan fields that, with the rows, determine every byte of the index, as JSON values."""
        return {name: value for name, value in self.to_json().items() if name not in _BESIDE}

    def shared(self) -> dict[str, Any]:
        """Return the plan fields that, with the trained file, determine a part's piece and a shard, as JSON values.

        They do not hold the number of rows: so a corpus grows, and what did not change in it is not made again.
        """
        return {name: value for name, value in self.built().items() if name not in _ALL_ROWS}

    def to_json(self) -> dict[str, Any]:
        """Return the plan as JSON values, without the representation's name: the rows themselves are its input."""
        values = asdict(self) | {"notes": list(self.notes), "search": dict(self.search)}
        del values["over"]
        return values if self.settings else {name: value for name, value in values.items() if name != "settings"}
