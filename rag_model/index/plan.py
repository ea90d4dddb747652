"""The plan of an index for a given number of rows: a small record that every worker receives.

A kind that needs more fields extends `IndexPlan`, as `VectorPlan` does.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

# Fields that do not change the bytes of the index.
_NO_EFFECT_ON_BYTES = ("search", "refine", "recall_target", "drift", "notes")
# Fields that do not change a piece directly; they change the trained file.
_NO_EFFECT_ON_PIECES = ("n", "train_sample")

IndexStats = dict[str, Any]  # statistics of one build stage, as JSON values


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexPlan:
    """A recipe resolved for n rows of a representation."""

    kind: str  # name of the index kind
    factory: str  # complete factory string: every number is set
    n: int  # number of rows
    search: Mapping[str, Any]  # default search parameters
    seed: int = 0
    over: str = ""  # representation that the index is built over; empty: the kind's default
    recall_target: float | None = None  # the tuner chooses search parameters that reach it
    drift: float = 1.2  # largest accepted ratio of new rows' error to training rows' error
    notes: tuple[str, ...] = ()  # sentences on requested settings that were changed, and why
    settings: Mapping[str, Any] = field(default_factory=dict)  # settings of this kind only

    @property
    def shards(self) -> int:
        """The number of shards built between scatter and merge."""
        return 0

    def entry(self) -> dict[str, Any]:
        """Return the fields of the index's manifest entry."""
        entry = {"kind": self.kind, "over": self.over, "factory": self.factory, "n": self.n}
        return entry | {"search": dict(self.search)} | ({"settings": dict(self.settings)} if self.settings else {})

    def index_inputs(self) -> dict[str, Any]:
        """Return the fields that determine the bytes of the index for given rows, as JSON."""
        return {name: setting for name, setting in self.to_json().items() if name not in _NO_EFFECT_ON_BYTES}

    def piece_inputs(self) -> dict[str, Any]:
        """Return the fields that determine pieces and shards for a trained file, as JSON.

        The number of rows is not one of these fields, so that the pieces of unchanged parts are
        reused when a corpus grows.
        """
        return {name: setting for name, setting in self.index_inputs().items() if name not in _NO_EFFECT_ON_PIECES}

    def to_json(self) -> dict[str, Any]:
        """Return the plan as JSON values, without `over`, because memo keys identify the rows."""
        values = asdict(self) | {"notes": list(self.notes), "search": dict(self.search)}
        del values["over"]
        return values if self.settings else {name: setting for name, setting in values.items() if name != "settings"}
