r"""Test whether a passage holds an answer: DPR's token match, exactly, with the standard library alone.

DPR (Karpukhin et al. 2020) inherits DrQA's tokenizer: a token is a run of letters, numbers and marks
(`[\p{L}\p{N}\p{M}]+`), or else any single character that is neither separator nor control (`[^\p{Z}\p{C}]`),
taken from the NFD form in lower case. A passage holds an answer if it contains the answer's tokens consecutively. `re`
has no `\p{…}`, so the classes are built once from `unicodedata`: the same tokens as the `regex` module for every
character that both know.
"""

import re
import unicodedata
from collections.abc import Iterable
from functools import cache, lru_cache
from itertools import groupby

_BETWEEN = "\n"  # a control character: never inside a token, and lower-casing does not cross it


@cache
def _token_pattern() -> re.Pattern[str]:
    words = _character_class("LNM")
    blanks = _character_class("ZC")
    return re.compile(f"[{words}]+|[^{blanks}]")


def _character_class(majors: str) -> str:
    """Return the characters whose general category begins with one of `majors`, as ranges of a `re` class."""
    codes = (code for code in range(0x110000) if unicodedata.category(chr(code))[0] in majors)
    ranges = []
    for _, run in groupby(enumerate(codes), key=lambda pair: pair[1] - pair[0]):
        members = [code for _, code in run]
        ranges.append(f"\\U{members[0]:08x}-\\U{members[-1]:08x}")
    return "".join(ranges)


def tokens(text: str) -> list[str]:
    """Return the lower-case tokens of `text` in NFD, in order.

    >>> tokens("Rue de l'Été, 1789!")[:5]
    ['rue', 'de', 'l', "'", 'été']
    """
    return _fence(text).split(_BETWEEN)[1:-1]


def _fence(text: str) -> str:
    """Return the lower-case tokens with a separator around each, so that consecutive tokens are a substring."""
    found = _token_pattern().findall(unicodedata.normalize("NFD", text))
    return "".join([_BETWEEN, *(f"{token}{_BETWEEN}" for token in found)]).lower()


@lru_cache(maxsize=1 << 14)  # many questions find the same passages, and so do the stages of a retriever
def _fenced(passage: str) -> str:
    return _fence(passage)


class Answers:
    """The accepted answers of one question, prepared once for many passages."""

    def __init__(self, answers: Iterable[str]) -> None:
        """Tokenize `answers`; an answer without a token (an empty string) is in every passage, as in DPR."""
        self._needles = [_fence(answer) for answer in answers]

    def are_in(self, text: str) -> bool:
        """Return whether `text` contains the tokens of any answer, consecutively.

        >>> Answers(["New York"]).are_in("in new  york, 1900"), Answers(["York"]).are_in("Yorkshire")
        (True, False)
        """
        haystack = _fenced(text)
        return any(needle in haystack for needle in self._needles)


def has_answer(answers: Iterable[str], text: str) -> bool:
    """Return whether `text` holds any of `answers` by DPR's token match; False without answers."""
    return Answers(answers).are_in(text)
