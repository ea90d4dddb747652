"""Text that only looks like markup: the contents of `<nowiki>`, code and formulas.

Each character that is markup to the cleaner has a substitute among Unicode's noncharacters (U+FDD0 to
U+FDEF), which no text may contain. `protect` inserts the substitutes, so the other passes see plain letters, and
`reveal` restores the characters at the end.
"""

import re

_SPECIAL = "{}[]|=<>&'*#:;_-~!"
_FIRST = 0xFDD0
_PROTECT = {ord(char): _FIRST + i for i, char in enumerate(_SPECIAL)}
_REVEAL = {chr(_FIRST + i): char for i, char in enumerate(_SPECIAL)}
_NONCHARACTER = re.compile("[\ufdd0-\ufdef]")

OPENED, CLOSED = "\ufded", "\ufdee"  # mark the words of a link, where the cleaner is told to keep its links
_REVEAL |= {OPENED: OPENED, CLOSED: CLOSED}
GAP = "\ufdef"  # marks dropped markup: it keeps its neighbours from joining into markup


def protect(text: str) -> str:
    """Return `text` with every character that can be markup replaced by its substitute."""
    return text.translate(_PROTECT)


def reveal(text: str) -> str:
    """Undo `protect`, and remove the gaps; the marks of links stay."""
    return _NONCHARACTER.sub(lambda found: _REVEAL.get(found[0], ""), text)


def without_noncharacters(text: str) -> str:
    """Remove substitutes from a page, which may be hostile: they would become markup after the cleaner's passes."""
    return _NONCHARACTER.sub("", text)
