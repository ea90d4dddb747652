"""Show an answer on a terminal while it is generated."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from flows.command.reply import Common
from rag_model.untrusted_text import escape_controls


class LiveAnswer:
    """Prints the first answer while it is generated; the others follow with the reply."""

    def __init__(self, head: str) -> None:
        """Print `head` before the first word."""
        self._head, self._shown = head, ""

    def __call__(self, position: int, text: str) -> None:
        """Print the new text of the answer at `position`, if it is the first one."""
        if position:
            return
        new_text = text if self._shown else self._head + text
        self._shown += new_text
        print(escape_controls(new_text), end="", flush=True)

    def rest(self, reply: str) -> str:
        """Return the part of a reply that is not on the terminal yet."""
        if reply.startswith(self._shown):
            return reply[len(self._shown) :]
        return f"\n\n{reply}"

    def end(self) -> None:
        """End the line of an interrupted answer."""
        if self._shown:
            print(flush=True)


@contextmanager
def show_live_answer(head: str, common: Common | None) -> Iterator[LiveAnswer | None]:
    """Yield a printer for the growing answer; None if the output is a pipe or --json is given."""
    if not sys.stdout.isatty() or (common is not None and common.json):
        yield None
        return
    live_text = LiveAnswer(head)
    try:
        yield live_text
    except BaseException:
        live_text.end()
        raise
