"""The plan of an index for a number of rows: a small record that is sent to every worker.

An index kind that needs more fields extends `IndexPlan`, as `VectorPlan` does.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

_BESIDE = ("search", "refine", "recall_target", "drift", "notes")  # do not change the bytes of the index
_ALL_ROWS = ("n", "train_sample")  # a piece depends on the trained file, not on these

Facts = dict[str, Any]  # what a build stage reports of its work: JSON values


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexPlan:
    """A recipe resolved for the n rows of a representation."""

    kind: str  # name of the index kind that builds it
    factory: str  # complete: every number is set
    n: int  # rows
    search: Mapping[str, Any]  # default search parameters
    seed: int = 0
    over: str = ""  # name of the representation; empty: the default representation of the kind's type
    recall_target: float | None = None  # the tuner sets the search parameters for it
    drift: float = 1.2  # largest ratio of the errors of new and old rows under an inherited trained file
    notes: tuple[str, ...] = ()  # sentences: requested settings that were changed, and why
    settings: Mapping[str, Any] = field(default_factory=dict)  # the recipe's own settings of this kind

    @property
    def shards(self) -> int:
        """Return how many shards are built between scattering and merging."""
        return 0

    def entry(self) -> dict[str, Any]:
        """Return the plan's fields for the index's entry in a manifest."""
        entry = {"kind": self.kind, "over": self.over, "factory": self.factory, "n": self.n}
        return entry | {"search": dict(self.search)} | ({"settings": dict(self.settings)} if self.settings else {})

    def built(self) -> dict[str, Any]:
        """Return the plan fields that, with the rows, determine every byte of the index, as JSON values."""
        return {name: value for name, value in self.to_json().items() if name not in _BESIDE}

    def shared(self) -> dict[str, Any]:
        """Return the plan fields that, with the trained file, determine a part's piece and a shard, as JSON values.

        They do not contain the number of rows, so that unchanged parts of a growing corpus are not built again.
        """
        return {name: value for name, value in self.built().items() if name not in _ALL_ROWS}

    def to_json(self) -> dict[str, Any]:
        """Return the plan as JSON values, without the representation's name: the rows themselves are its input."""
        values = asdict(self) | {"notes": list(self.notes), "search": dict(self.search)}
        del values["over"]
        return values if self.settings else {name: value for name, value in values.items() if name != "settings"}
