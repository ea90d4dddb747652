"""What became of the child process that tried some files: written beside the snapshots, so that it is asked once."""

import json
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from rag_model.json_text import parse_json
from rag_model.landing import landing


@dataclass(frozen=True, slots=True)
class TrialRecord:
    """The record of one trial."""

    path: Path

    @classmethod
    def of(cls, dest: Path, identity: str) -> Self:
        """Return the record in `dest`, the folder of snapshots, of what has this digest."""
        return cls(dest / ".trials" / f"{identity.partition(':')[2]}.json")

    def died(self) -> str | None:
        """Return how the child died, empty if it did not; None: there was none, or its record is damaged."""
        with suppress(OSError, ValueError, KeyError, TypeError):
            return str(parse_json(self.path.read_bytes())["died"])
        return None

    def write(self, died: str) -> None:
        """Keep it; without it the trial is repeated, in a child again."""
        with suppress(OSError), landing(self.path) as temporary:
            temporary.write_text(json.dumps({"died": died}))
