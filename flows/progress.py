"""Progress of a flow's stages, for people: on standard error, and as an artifact in the Prefect UI."""

import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import cast
from uuid import UUID

from prefect.artifacts import create_progress_artifact, update_progress_artifact

from beam_jobs.launch import OnProgress
from flows.command.console import shown
from flows.stage import in_run


@dataclass
class StageClock:
    """Run the stages of a flow one after another: show the progress of each and measure its time."""

    flow: str = "reindex"  # prefix of the names of the bars in the Prefect UI
    seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def __call__(self, stage: str) -> Iterator[OnProgress]:
        """Yield a function to call with (done, total) during the stage, as often as necessary."""
        started = time.monotonic()
        with _stage_progress(self.flow, stage) as tell:
            yield tell
        self.seconds[stage] = round(time.monotonic() - started, 3)


@contextmanager
def _stage_progress(flow: str, stage: str) -> Iterator[OnProgress]:
    artifact = _Artifact(flow, stage) if in_run() else None
    with shown(stage) as show:

        def tell(done: int, total: int) -> None:
            show(done, total)
            if artifact:
                artifact(done, total)

        yield tell


class _Artifact:
    """The stage's bar in the Prefect UI; written only when the whole percentage changes."""

    def __init__(self, flow: str, stage: str) -> None:
        self.shown = 0
        key = re.sub(r"[^a-z0-9]+", "-", f"{flow}-{stage}".lower())
        self.id = cast(UUID, create_progress_artifact(0.0, key=key, description=f"{stage}: how much is done"))

    def __call__(self, done: int, total: int) -> None:
        percent = int(100 * done / total) if total else 100
        if percent != self.shown:
            self.shown = percent
            update_progress_artifact(self.id, float(percent))
