"""Show the progress of a flow's stages on standard error and as an artifact in the Prefect UI."""

import os
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import cast
from uuid import UUID

from flows.command.console import ProgressReporter, format_seconds, show_progress
from flows.stage import in_run, log
from rag_model.process import trim_memory


@dataclass
class StageClock:
    """Shows the progress of a flow's stages, one after another, and measures their times.

    `cpu` counts the seconds of this process and of the processes that ended in a stage.
    """

    flow: str = "reindex"  # prefix of the names of the bars in the Prefect UI
    seconds: dict[str, float] = field(default_factory=dict)
    cpu: dict[str, float] = field(default_factory=dict)
    quiet: bool = False  # show nothing on standard error: another process shows the same

    @contextmanager
    def __call__(self, stage: str) -> Iterator[ProgressReporter]:
        """Yield a function to call with (done, total) during the stage, as often as necessary.

        Memory that the stage freed is returned to the kernel, so that it does not add to the peak
        of the next stage.
        """
        started, cpu_started = time.monotonic(), sum(os.times()[:4])
        with show_progress(stage, quiet=self.quiet) as bar:
            artifact = _Artifact(self.flow, stage, bar) if in_run() else None
            yield artifact or bar
            if artifact is not None:
                artifact.complete()
        trim_memory()
        seconds = time.monotonic() - started
        log(f"{stage}: done in {format_seconds(seconds)}")
        self.seconds[stage] = round(self.seconds.get(stage, 0.0) + seconds, 3)
        self.cpu[stage] = round(self.cpu.get(stage, 0.0) + sum(os.times()[:4]) - cpu_started, 3)


class _Artifact:
    """The stage's bar in the Prefect UI, updated when the percentage or the sentence changes."""

    def __init__(self, flow: str, stage: str, bar: ProgressReporter) -> None:
        from prefect.artifacts import create_progress_artifact, update_progress_artifact  # noqa: PLC0415

        self._update = update_progress_artifact
        self._stage, self._show, self._percent = stage, bar, 0
        key = re.sub(r"[^a-z0-9]+", "-", f"{flow}-{stage}".lower())
        self._id = cast(UUID, create_progress_artifact(0.0, key=key, description=f"{stage}: how much is done"))

    def __call__(self, done: int, total: int) -> None:
        self._show(done, total)
        percent = int(100 * done / total) if total else 100
        if percent != self._percent:
            self._percent = percent
            self._update(self._id, float(percent))

    def complete(self) -> None:
        """Show 100 %, also for a stage that reports no progress or had nothing to do."""
        if self._percent != 100:
            self._percent = 100
            self._update(self._id, 100.0)

    def say(self, sentence: str) -> None:
        self._show.say(sentence)
        log(f"{self._stage}: {sentence}")
        self._update(self._id, float(self._percent), description=f"{self._stage}: {sentence}")
