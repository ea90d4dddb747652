"""What a flow gives back: plain values, as the command line and the Prefect UI show them."""

from dataclasses import asdict, dataclass, field
from typing import Any

from rag_model.errors import RefusedError


@dataclass(frozen=True, slots=True)
class Reindexed:
    """What a reindex made."""

    snapshot: str | None  # full id; None after a dry run
    ref: str
    number: int | None  # of the ref's move; None if it did not move
    counts: dict[str, Any]  # articles, passages, embedded, reused, dropped by reason
    metrics: dict[str, Any]  # by index, recall against exact search
    gate: dict[str, Any] = field(default_factory=dict)  # passed, and each check
    seconds: dict[str, float] = field(default_factory=dict)  # by stage
    report: str | None = None  # URL of the HTML report

    def to_json(self) -> dict[str, Any]:
        """Return the outcome as JSON values."""
        return asdict(self)


class GateRefusedError(RefusedError):
    """The snapshot is published and the ref stays where it was; `outcome` is what was made all the same."""

    def __init__(self, sentence: str, outcome: Reindexed) -> None:
        """Say why, and keep what was made."""
        super().__init__(sentence)
        self.outcome = outcome
