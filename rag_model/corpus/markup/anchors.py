"""The words of links in clean text: where each begins and ends.

The scanner sets marks around the words of a link, and a section is cleaned twice: without the marks, which gives its
text, and with them. Marks can change what the cleaner does (a space before one and a space after it are not doubled),
so a line counts only if it is the same but for its marks. In real articles nearly all are.
"""

import re
from collections.abc import Iterator

from rag_model.corpus.markup.literal import CLOSED, OPENED
from rag_model.corpus.markup.prose import plain
from rag_model.corpus.markup.unparsable import Unparsable

_MARKS = re.compile(f"([{OPENED}{CLOSED}])")
_NONE = str.maketrans("", "", OPENED + CLOSED)


def unmarked(text: str) -> str:
    """Return a text without marks."""
    return text.translate(_NONE)


def links_in(prose: str, expanded: str) -> tuple[tuple[int, int], ...]:
    """Return the (start, end) characters of the links' words in `prose`, ascending and apart.

    `prose` is the clean text of `expanded` without its marks. Links in templates, and in lines that the marks changed,
    are left out.
    """
    if OPENED not in expanded:
        return ()
    try:
        marked = plain(expanded).split("\n")
    except Unparsable:
        return ()
    lines = prose.split("\n")
    if len(lines) != len(marked):
        return ()
    found: list[tuple[int, int]] = []
    at = 0
    for line, own in zip(lines, marked, strict=True):
        if unmarked(own) == line:
            found += ((at + start, at + end) for start, end in _spans(own))
        at += len(line) + 1
    return tuple(found)


def _spans(line: str) -> Iterator[tuple[int, int]]:
    """Yield where marked words stand once the marks are removed, without spaces at their ends."""
    at, begun = 0, ""
    for piece in _MARKS.split(line):
        if piece == CLOSED and (words := begun.strip()):
            end = at - (len(begun) - len(begun.rstrip()))
            yield end - len(words), end
        begun = "" if piece in (OPENED, CLOSED) else piece
        at += len(begun)
