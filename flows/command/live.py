"""The words of an answer on a terminal, as they come."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from flows.command.reply import Common
from rag_model.terminal import printable


class Live:
    """Prints the first answer while it grows; the others follow with the reply."""

    def __init__(self, head: str) -> None:
        """Print `head` before the first word."""
        self._head, self._shown = head, ""

    def __call__(self, place: int, text: str) -> None:
        """Print what an answer grew by, if it is the first one."""
        if place:
            return
        more = text if self._shown else self._head + text
        self._shown += more
        print(printable(more), end="", flush=True)

    def rest(self, reply: str) -> str:
        """Return the part of a reply that is not on the terminal yet."""
        if reply.startswith(self._shown):
            return reply[len(self._shown) :]
        return f"\n\n{reply}"

    def end(self) -> None:
        """End the line of an answer that was broken off."""
        if self._shown:
            print(flush=True)


@contextmanager
def live(head: str, common: Common | None) -> Iterator[Live | None]:
    """Yield what prints words as they come; None where a program reads the reply: in a pipe, or with --json."""
    if not sys.stdout.isatty() or (common is not None and common.json):
        yield None
        return
    shown = Live(head)
    try:
        yield shown
    except BaseException:
        shown.end()
        raise
