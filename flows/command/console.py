"""Progress on standard error, which leaves standard output to the reply: a bar on a terminal, plain lines elsewhere."""

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

_PLAIN_SECONDS = 10.0  # seconds between two plain lines of a log
_UNITS = (("h", 3600), ("min", 60), ("s", 1))


class Shown(Protocol):
    """The progress of one stage: call it as often as necessary."""

    def __call__(self, done: int, total: int) -> None:
        """Show how much is done, and of how much."""
        ...

    def say(self, sentence: str) -> None:
        """Show what is being done, at once."""
        ...


@contextmanager
def shown(what: str, *, as_bytes: bool = False) -> Iterator[Shown]:
    """Show the progress of `what`; `as_bytes`: it is counted in bytes."""
    console = Console(stderr=True)
    if not console.is_terminal:
        lines = _Lines(what, as_bytes)
        yield lines
        lines.end()
        return
    count = DownloadColumn() if as_bytes else MofNCompleteColumn()
    columns = TextColumn("{task.description:<12}"), BarColumn(), count
    with Progress(*columns, TimeElapsedColumn(), TimeRemainingColumn(), console=console) as bar:
        yield _Bar(bar, bar.add_task(what, total=None))


def span(seconds: float) -> str:
    """Return a length of time as people say it, in one unit.

    >>> span(0.4), span(95), span(600), span(40_000)
    ('0 s', '95 s', '10 min', '11 h')
    """
    unit, size = next((one for one in _UNITS if seconds >= 2 * one[1]), _UNITS[-1])
    return f"{seconds / size:.0f} {unit}"


def time_left(done: int, left: int, seconds: float) -> str:
    """Return the end of a line: the time that is left if `done` took so many seconds; nothing if it is unknown.

    >>> time_left(5, 10, 60.0), time_left(0, 10, 60.0)
    (', about 2 min left', '')
    """
    return f", about {span(left * seconds / done)} left" if done else ""


class _Bar:
    """A bar, below the sentences that were said."""

    def __init__(self, bar: Progress, task: TaskID) -> None:
        self._bar, self._task = bar, task

    def __call__(self, done: int, total: int) -> None:
        self._bar.update(self._task, completed=done, total=total)

    def say(self, sentence: str) -> None:
        self._bar.console.print(sentence, markup=False, highlight=False)


class _Lines:
    """A line now and then, with the time that is left at the rate since the first one."""

    def __init__(self, what: str, as_bytes: bool) -> None:
        self._what, self._as_bytes = what, as_bytes
        self._started = self._last = time.monotonic()
        self._first: tuple[float, int] | None = None  # the time of the first call, and what was done by then
        self.say("…")

    def __call__(self, done: int, total: int) -> None:
        now = time.monotonic()
        self._first = self._first or (now, done)
        if now - self._last >= _PLAIN_SECONDS:
            self._last = now
            far = f"{done / 1e9:.2f}/{total / 1e9:.2f} GB" if self._as_bytes else f"{done}/{total}"
            self.say(f"{far}, {now - self._started:.0f} s{self._left(now, done, total)}")

    def say(self, sentence: str) -> None:
        print(f"{self._what} {sentence}", file=sys.stderr, flush=True)

    def end(self) -> None:
        self.say(f"done, {time.monotonic() - self._started:.1f} s")

    def _left(self, now: float, done: int, total: int) -> str:
        since, before = self._first or (now, done)
        return time_left(done - before, total - done, now - since)
