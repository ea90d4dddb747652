r"""Citations in an answer: what it states, and the numbers [n] of the context that it names for each statement.

[1], [1, 2], [1; 2], [1][2] and [1-3] are citations. A bracket is text instead where no number in it can be meant:
[2024] beside a context of five; and inside a quotation, whose brackets are those of the source. A number of one or two
digits that the context does not have is kept as unknown: the model made it up.

A citation belongs to the statement that it stands in or after, also behind its full stop.
"""

import re
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rag_model.corpus.chunkers.sentence_ends import ends_line, ends_run, ends_sentence
from rag_model.corpus.chunkers.words import split_token

_BRACKET = re.compile(r"\s*\[\s*(\d{1,4}(?:\s*[-\N{EN DASH},;]\s*\d{1,4})*)\s*\]")
_RANGE = re.compile(r"(\d+)\s*[-\N{EN DASH}]\s*(\d+)|(\d+)")
_QUOTATION = re.compile(r'(?<![^\s(\[])(?:"[^"\n]*"|“[^”\n]*”|«[^»\n]*»|„[^“”\n]*[“”])(?!\w)')
_MEANT = 99  # larger numbers that the context does not have are text, such as years


@dataclass(frozen=True, slots=True)
class Statement:
    """One sentence of an answer, and what it cites."""

    text: str  # without its citations
    cited: tuple[int, ...]  # numbers of the context, in their order, once each
    unknown: tuple[int, ...] = ()  # numbers that the context does not have


@dataclass(frozen=True, slots=True)
class _Mark:
    """A citation, cut out of a text."""

    place: int  # characters of the remaining text before it
    numbers: tuple[int, ...]


def statements(text: str, most: int) -> tuple[Statement, ...]:
    """Return the sentences of an answer to a context of `most` entries, each with its citations.

    >>> statements("It is by Orwell [1]. It was published in 1945. [2, 3]", 3)[1]
    Statement(text='It was published in 1945.', cited=(2, 3), unknown=())
    """
    bare, marks = _cut_out(text, most)
    spans = list(_sentences(bare))
    cited: list[list[int]] = [[] for _ in spans]
    for mark in marks if spans else ():
        inside = bisect_right([start for start, _ in spans], max(0, mark.place - 1)) - 1
        cited[max(0, inside)] += mark.numbers
    return tuple(
        Statement(
            bare[start:end],
            tuple(dict.fromkeys(number for number in numbers if number <= most)),
            tuple(dict.fromkeys(number for number in numbers if number > most)),
        )
        for (start, end), numbers in zip(spans, cited, strict=True)
    )


def without_citations(text: str, most: int) -> str:
    """Return an answer to a context of `most` entries without its citations.

    >>> without_citations("George Orwell [1][2].", 5)
    'George Orwell.'
    """
    return _cut_out(text, most)[0]


def _cut_out(text: str, most: int) -> tuple[str, list[_Mark]]:
    kept, marks, done = "", list[_Mark](), 0
    quoted = [match.span() for match in _QUOTATION.finditer(text) if match.span() != (0, len(text.rstrip()))]
    for match in _BRACKET.finditer(text) if most else ():
        numbers = tuple(_numbers(match[1], most))
        if not numbers or any(start < match.start(1) < end for start, end in quoted):
            continue
        kept += text[done : match.start()]
        marks.append(_Mark(len(kept), numbers))
        done = match.end()
    return (kept + text[done:]).strip() if marks else text, marks


def _numbers(inside: str, most: int) -> Iterator[int]:
    """Yield the numbers of a bracket that can be meant: those of the context, and small ones."""
    for match in _RANGE.finditer(inside):
        first, last = (int(match[1]), int(match[2])) if match[1] else (int(match[3]), int(match[3]))
        meant = last if last <= max(most, _MEANT) else first - 1
        yield from (number for number in range(max(1, first), meant + 1))


def _sentences(text: str) -> Iterator[tuple[int, int]]:
    """Yield where each sentence starts and ends."""
    pieces = list(_pieces(text))
    begun = 0
    for place, (start, end) in enumerate(pieces):
        if place + 1 == len(pieces) or _ends(text, (start, end), pieces[place + 1]):
            yield pieces[begun][0], end
            begun = place + 1


def _pieces(text: str) -> Iterator[tuple[int, int]]:
    for token in re.finditer(r"\S+", text):
        start = token.start()
        for piece in split_token(token[0]):
            size = len(piece.removeprefix(" "))
            yield start, start + size
            start += size


def _ends(text: str, piece: Sequence[int], following: Sequence[int]) -> bool:
    said, after = text[slice(*piece)], text[slice(*following)]
    between = text[piece[1] : following[0]]
    if not between:
        return ends_run(said)
    return ends_line(said, after) if "\n" in between else ends_sentence(said, after)
