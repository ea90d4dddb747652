"""Texts of others on a terminal: control characters could move its cursor or hide what is printed."""

import unicodedata

from rag_model.errors import UsageError

_HARMLESS = "\n\t"
_INVISIBLE = {"Cc", "Cs"}  # controls, and halves of characters
_REORDERING = frozenset("\u2028\u2029\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069")


def printable(text: str) -> str:
    r"""Return a text for a terminal: control characters, but for line breaks and tabs, as JSON's escapes.

    >>> printable("a\x1b[31m red\n")
    'a\\u001b[31m red\n'
    """
    if text.isascii() and text.isprintable():
        return text
    return "".join(one if _harmless(one) else f"\\u{ord(one):04x}" for one in text)


def check_printable(text: str, what: str) -> None:
    """Check, before a text is kept for others to read, that it holds no control characters.

    Raises:
        UsageError: it does; the message names `what` and the first of them.
    """
    bad = next((one for one in text if not _harmless(one)), None)
    if bad is not None:
        raise UsageError(f"{what} holds the control character {bad!r}: leave it out")


def _harmless(one: str) -> bool:
    return one in _HARMLESS or (unicodedata.category(one) not in _INVISIBLE and one not in _REORDERING)
