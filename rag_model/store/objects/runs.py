"""Reports of a running job's elements, at `runs/<run>/<stage>/<00042>.json`: progress, and results.

This works on any runner, since all that a worker does is write a small file. A retried element overwrites its file.
"""

import json
from dataclasses import dataclass
from typing import Any

from rag_model.errors import StoreError
from rag_model.store.objects.files import Files, json_bytes


@dataclass(frozen=True, slots=True)
class Runs:
    """The reports in one store."""

    files: Files

    def write(self, run: str, stage: str, i: int, value: Any) -> None:
        """Write the report that element `i` (from 0) of a stage is done, with a small JSON value."""
        self.files.put(f"{_folder(run, stage)}/{i:05d}.json", json_bytes(value))

    def read_all(self, run: str, stage: str) -> list[Any]:
        """Return a stage's reports so far, in the order of their elements."""
        folder = _folder(run, stage)
        names = sorted(self.files.names(folder), key=lambda name: int(name.removesuffix(".json")))
        reports = self.files.ask(lambda name: self.files.read(f"{folder}/{name}"), names)
        return [json.loads(report) for report in reports if report is not None]

    def count(self, run: str, stage: str) -> int:
        """Return how many of a stage's elements have reported."""
        return len(self.files.names(_folder(run, stage)))

    def clear(self, run: str, *stages: str) -> None:
        """Delete the reports of a run's stages, or all of the run."""
        for folder in [_folder(run, stage) for stage in stages] or [_folder(run)]:
            self.files.delete(folder)


def _folder(*names: str) -> str:
    if any(not name or "/" in name or name.startswith(".") for name in names):
        raise StoreError(f"{names!r} cannot name a run or a stage: no slashes and no leading dots")
    return "/".join(("runs", *names))
