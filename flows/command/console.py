"""Progress on standard error, which leaves standard output to the reply: a bar on a terminal, plain lines elsewhere."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

Tell = Callable[[int, int], None]  # done, total

_PLAIN_SECONDS = 10.0  # seconds between two plain lines of a log


def shown(what: str, *, as_bytes: bool = False) -> AbstractContextManager[Tell]:
    """Show the progress of `what`; yields a function to call with (done, total), as often as necessary."""
    console = Console(stderr=True)
    return _bar(what, console, as_bytes) if console.is_terminal else _lines(what, as_bytes)


@contextmanager
def _bar(what: str, console: Console, as_bytes: bool) -> Iterator[Tell]:
    count = DownloadColumn() if as_bytes else MofNCompleteColumn()
    columns = TextColumn("{task.description:<12}"), BarColumn(), count
    with Progress(*columns, TimeElapsedColumn(), TimeRemainingColumn(), console=console) as bar:
        task = bar.add_task(what, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


@contextmanager
def _lines(what: str, as_bytes: bool) -> Iterator[Tell]:
    started = last = time.monotonic()
    print(f"{what} …", file=sys.stderr, flush=True)

    def show(done: int, total: int) -> None:
        nonlocal last
        now = time.monotonic()
        if now - last >= _PLAIN_SECONDS:
            last = now
            far = f"{done / 1e9:.2f}/{total / 1e9:.2f} GB" if as_bytes else f"{done}/{total}"
            print(f"{what} {far}, {now - started:.0f} s", file=sys.stderr, flush=True)

    yield show
    print(f"{what} done, {time.monotonic() - started:.1f} s", file=sys.stderr, flush=True)
