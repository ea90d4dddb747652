"""Progress that people see: a bar on a terminal, plain lines elsewhere, an artifact in the Prefect UI.

All of it goes to standard error: standard output is the verb's reply.
"""

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import cast
from uuid import UUID

from prefect.artifacts import create_progress_artifact, update_progress_artifact
from prefect.context import FlowRunContext
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from beam_jobs.job import OnProgress

_PLAIN_SECONDS = 10.0  # between two plain lines: a log is read, not watched


@dataclass
class StageClock:
    """Runs the stages of a flow one after another: shows each one's progress and keeps its time."""

    seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def __call__(self, stage: str) -> Iterator[OnProgress]:
        """Yield a function to call with (done, total) as the stage goes on, as often as one likes."""
        started = time.monotonic()
        with _stage_progress(stage) as tell:
            yield tell
        self.seconds[stage] = round(time.monotonic() - started, 3)


@contextmanager
def _stage_progress(stage: str) -> Iterator[OnProgress]:
    console = Console(stderr=True)
    artifact = _Artifact(stage) if FlowRunContext.get() else None
    with _bar(stage, console) if console.is_terminal else _lines(stage) as show:

        def tell(done: int, total: int) -> None:
            show(done, total)
            if artifact:
                artifact(done, total)

        yield tell


@contextmanager
def _bar(stage: str, console: Console) -> Iterator[OnProgress]:
    columns = TextColumn("{task.description:<12}"), BarColumn(), MofNCompleteColumn()
    with Progress(*columns, TimeElapsedColumn(), TimeRemainingColumn(), console=console) as bar:
        task = bar.add_task(stage, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


@contextmanager
def _lines(stage: str) -> Iterator[OnProgress]:
    started = last = time.monotonic()
    print(f"{stage} …", file=sys.stderr, flush=True)

    def show(done: int, total: int) -> None:
        nonlocal last
        now = time.monotonic()
        if now - last >= _PLAIN_SECONDS:
            last = now
            print(f"{stage} {done}/{total}, {now - started:.0f} s", file=sys.stderr, flush=True)

    yield show
    print(f"{stage} done, {time.monotonic() - started:.1f} s", file=sys.stderr, flush=True)


class _Artifact:
    """The stage's bar in the Prefect UI; written only when the whole percentage changes."""

    def __init__(self, stage: str) -> None:
        self.shown = 0
        described = f"{stage}: parts or shards done"
        self.id = cast(UUID, create_progress_artifact(0.0, key=f"reindex-{stage}", description=described))

    def __call__(self, done: int, total: int) -> None:
        percent = int(100 * done / total) if total else 100
        if percent != self.shown:
            self.shown = percent
            update_progress_artifact(self.id, float(percent))
