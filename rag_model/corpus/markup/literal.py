"""Protect text that looks like markup: the contents of `<nowiki>`, code and formulas.

Each markup character has a substitute among Unicode's noncharacters (U+FDD0 to U+FDEF), which no
text may contain. `protect` inserts the substitutes, so the other passes see plain letters, and
`reveal` restores the characters at the end.
"""

import re

_MARKUP_CHARACTERS = "{}[]|=<>&'*#:;_-~!"
_FIRST_SUBSTITUTE = 0xFDD0
_PROTECT = {ord(char): _FIRST_SUBSTITUTE + i for i, char in enumerate(_MARKUP_CHARACTERS)}
_REVEAL = {chr(_FIRST_SUBSTITUTE + i): char for i, char in enumerate(_MARKUP_CHARACTERS)}
_LONG_TEXT = 100  # characters
_NONCHARACTER = re.compile("[\ufdd0-\ufdef]")

# Enclose the words of a link if the positions of links are needed.
LINK_START, LINK_END = "\ufded", "\ufdee"
_REVEAL |= {LINK_START: LINK_START, LINK_END: LINK_END}
GAP = "\ufdef"  # replaces dropped markup, so that its neighbours do not join into new markup


_REMOVE_MARKS = str.maketrans("", "", LINK_START + LINK_END)


def remove_marks(text: str) -> str:
    """Remove `LINK_START` and `LINK_END` from a text."""
    return text.translate(_REMOVE_MARKS)


def protect(text: str) -> str:
    """Replace each character that can be markup by its substitute."""
    if len(text) < _LONG_TEXT:
        return text.translate(_PROTECT)
    for character, substitute in _PROTECT.items():  # for long texts, this takes a third of the time
        text = text.replace(chr(character), chr(substitute))
    return text


def protect_character(text: str, character: str) -> str:
    """Replace one character that can be markup by its substitute."""
    return text.replace(character, chr(_PROTECT[ord(character)]))


def reveal(text: str) -> str:
    """Undo `protect`, remove gaps, and keep `LINK_START` and `LINK_END`."""
    return _NONCHARACTER.sub(lambda match: _REVEAL.get(match[0], ""), text)


def remove_noncharacters(text: str) -> str:
    """Remove the noncharacters that this package substitutes for markup. In the text of a hostile page
    they would become markup later.
    """
    return _NONCHARACTER.sub("", text)
