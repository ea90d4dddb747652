"""Show progress on standard error, and a growing answer on standard output.

Progress is a bar on a terminal, and plain lines elsewhere.
"""

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol

from flows.command.reply import Common
from rag_model.untrusted_text import escape_controls

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

_SECONDS_BETWEEN_LINES = 10.0  # seconds between two progress lines in plain text
_UNITS = (("h", 3600), ("min", 60), ("s", 1))  # units of time with their seconds


class ProgressReporter(Protocol):
    """Interface to show the progress of one stage; it may be called any number of times."""

    def __call__(self, done: int, total: int) -> None:
        """Show that `done` of `total` units are complete."""
        ...

    def say(self, sentence: str) -> None:
        """Show a sentence immediately."""
        ...


@contextmanager
def show_progress(stage_name: str, *, as_bytes: bool = False, quiet: bool = False) -> Iterator[ProgressReporter]:
    """Show the progress of a stage, unless `quiet`; with `as_bytes`, its units are bytes."""
    if quiet:
        yield _SilentReporter()
        return
    if not sys.stderr.isatty():
        progress_lines = _ProgressLines(stage_name, as_bytes)
        yield progress_lines
        progress_lines.end()
        return
    from rich.console import Console  # noqa: PLC0415 - logs do not need it
    from rich.progress import (  # noqa: PLC0415
        BarColumn,
        DownloadColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    count_column = DownloadColumn() if as_bytes else MofNCompleteColumn()
    progress_columns = TextColumn("{task.description:<12}"), BarColumn(), count_column
    time_columns = TimeElapsedColumn(), TimeRemainingColumn()
    with Progress(*progress_columns, *time_columns, console=Console(stderr=True)) as progress_bar:
        yield _ProgressBar(progress_bar, progress_bar.add_task(stage_name, total=None))


def format_seconds(seconds: float) -> str:
    """Format a duration in one unit.

    >>> format_seconds(0.4), format_seconds(95), format_seconds(600), format_seconds(40_000)
    ('0 s', '95 s', '10 min', '11 h')
    """
    unit, size = next((unit_and_size for unit_and_size in _UNITS if seconds >= 2 * unit_and_size[1]), _UNITS[-1])
    return f"{seconds / size:.0f} {unit}"


def format_time_left(done: int, remaining: int, seconds: float) -> str:
    """Format the time left if `done` units took `seconds`; return "" if no unit is done.

    >>> format_time_left(5, 10, 60.0), format_time_left(0, 10, 60.0)
    (', about 2 min left', '')
    """
    return f", about {format_seconds(remaining * seconds / done)} left" if done else ""


class _SilentReporter:
    """Shows nothing."""

    def __call__(self, done: int, total: int) -> None:
        pass

    def say(self, sentence: str) -> None:
        pass


class _ProgressBar:
    """A progress bar that stays below the printed sentences."""

    def __init__(self, progress_bar: "Progress", task: "TaskID") -> None:
        self._bar, self._task = progress_bar, task

    def __call__(self, done: int, total: int) -> None:
        self._bar.update(self._task, completed=done, total=total)

    def say(self, sentence: str) -> None:
        self._bar.console.print(sentence, markup=False, highlight=False)


class _ProgressLines:
    """Prints plain lines at intervals; the rate since the first call determines the time left."""

    def __init__(self, stage_name: str, as_bytes: bool) -> None:
        self._stage_name, self._as_bytes = stage_name, as_bytes
        self._start = self._last_time = time.monotonic()
        # time of the first call, and number of units done by then
        self._first_call: tuple[float, int] | None = None
        self.say("…")

    def __call__(self, done: int, total: int) -> None:
        current_time = time.monotonic()
        self._first_call = self._first_call or (current_time, done)
        if current_time - self._last_time >= _SECONDS_BETWEEN_LINES:
            self._last_time = current_time
            progress = f"{done / 1e9:.2f}/{total / 1e9:.2f} GB" if self._as_bytes else f"{done}/{total}"
            self.say(
                f"{progress}, {current_time - self._start:.0f} s{self._format_remaining(current_time, done, total)}"
            )

    def say(self, sentence: str) -> None:
        print(f"{self._stage_name} {sentence}", file=sys.stderr, flush=True)

    def end(self) -> None:
        self.say(f"done, {time.monotonic() - self._start:.1f} s")

    def _format_remaining(self, current_time: float, done: int, total: int) -> str:
        first_time, initial_done = self._first_call or (current_time, done)
        return format_time_left(done - initial_done, total - done, current_time - first_time)


class LiveAnswer:
    """Prints the first answer while it is generated; later answers are printed with the reply."""

    def __init__(self, head: str) -> None:
        """Create a printer that prints `head` before the first word."""
        self._head, self._shown_text = head, ""

    def __call__(self, position: int, text: str) -> None:
        """Print the new text of the answer at `position`, if it is the first one."""
        if position:
            return
        new_text = text if self._shown_text else self._head + text
        self._shown_text += new_text
        print(escape_controls(new_text), end="", flush=True)

    def remove_shown_text(self, reply: str) -> str:
        """Return the part of a reply that is not on the terminal yet."""
        if reply.startswith(self._shown_text):
            return reply[len(self._shown_text) :]
        return f"\n\n{reply}"

    def end(self) -> None:
        """End the line of an interrupted answer."""
        if self._shown_text:
            print(flush=True)


@contextmanager
def show_live_answer(head: str, common: Common | None) -> Iterator[LiveAnswer | None]:
    """Yield a `LiveAnswer`, or None if the output is a pipe or `--json` is given."""
    if not sys.stdout.isatty() or (common is not None and common.json):
        yield None
        return
    live_answer = LiveAnswer(head)
    try:
        yield live_answer
    except BaseException:
        live_answer.end()
        raise
