"""Text that only looks like markup: what `<nowiki>`, code and formulas hold.

Each character that means something to the cleaner has a stand-in among Unicode's noncharacters (U+FDD0 to
U+FDEF), which no text may contain. `protect` swaps them in, the other passes see plain letters, and `reveal`
swaps them back at the end.
"""

import re

_SPECIAL = "{}[]|=<>&'*#:;_-~!"
_FIRST = 0xFDD0
_PROTECT = {ord(char): _FIRST + i for i, char in enumerate(_SPECIAL)}
_REVEAL = {chr(_FIRST + i): char for i, char in enumerate(_SPECIAL)}
_NONCHARACTER = re.compile("[\ufdd0-\ufdef]")

GAP = "\ufdef"  # where something was dropped: it keeps its neighbours from joining into markup


def protect(text: str) -> str:
    """Return `text` with every character that is markup somewhere replaced by its stand-in."""
    return text.translate(_PROTECT)


def reveal(text: str) -> str:
    """Undo `protect`, and remove the gaps."""
    return _NONCHARACTER.sub(lambda found: _REVEAL.get(found[0], ""), text)


def without_noncharacters(text: str) -> str:
    """Remove stand-ins that a hostile page may hold, so that it cannot smuggle markup past the cleaner."""
    return _NONCHARACTER.sub("", text)
