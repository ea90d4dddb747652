r"""Parse the statements of an answer and their citations [n] of context entries.

[1], [1, 2], [1; 2], [1][2] and [1-3] are citations. A bracket is text if no number in it can be a
citation, such as [2024] with a context of five entries, or if it is inside a quotation, whose
brackets are those of the source. A number of one or two digits that is not in the context is
unknown: the model made it up.

A citation belongs to the statement that contains or precedes it, even after the full stop.
"""

import re
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rag_model.corpus.chunkers.article_words import ends_line, ends_run, ends_sentence, split_token

_BRACKET = re.compile(r"\s*\[\s*(\d{1,4}(?:\s*[-\N{EN DASH},;]\s*\d{1,4})*)\s*\]")
_RANGE = re.compile(r"(\d+)\s*[-\N{EN DASH}]\s*(\d+)|(\d+)")
_QUOTATION = re.compile(r'(?<![^\s(\[])(?:"[^"\n]*"|“[^”\n]*”|«[^»\n]*»|„[^“”\n]*[“”])(?!\w)')
_MAX_UNKNOWN = 99  # larger numbers that are not in the context are text, such as years


@dataclass(frozen=True, slots=True)
class Statement:
    """One sentence of an answer with its citations."""

    text: str  # without citations
    cited: tuple[int, ...]  # distinct numbers of context entries, in the order of the text
    unknown: tuple[int, ...] = ()  # distinct numbers that are not in the context


@dataclass(frozen=True, slots=True)
class _CitationMark:
    """A citation that was removed from a text."""

    offset: int  # characters of the remaining text before it
    numbers: tuple[int, ...]


def split_statements(text: str, most: int) -> tuple[Statement, ...]:
    """Return the sentences of an answer, each with its citations of a context of `n_entries`
    entries.

    >>> split_statements("It is by Orwell [1]. It was published in 1945. [2, 3]", 3)[1]
    Statement(text='It was published in 1945.', cited=(2, 3), unknown=())
    """
    plain, marks = _extract_citations(text, most)
    spans = list(_sentence_spans(plain))
    cited: list[list[int]] = [[] for _ in spans]
    for mark in marks if spans else ():
        sentence = bisect_right([start for start, _ in spans], max(0, mark.offset - 1)) - 1
        cited[max(0, sentence)] += mark.numbers
    return tuple(
        Statement(
            plain[start:end],
            tuple(dict.fromkeys(number for number in numbers if number <= most)),
            tuple(dict.fromkeys(number for number in numbers if number > most)),
        )
        for (start, end), numbers in zip(spans, cited, strict=True)
    )


def remove_citations(text: str, n_entries: int) -> str:
    """Return an answer without its citations of a context of `n_entries` entries.

    >>> remove_citations("George Orwell [1][2].", 5)
    'George Orwell.'
    """
    return _extract_citations(text, n_entries)[0]


def _extract_citations(text: str, n_entries: int) -> tuple[str, list[_CitationMark]]:
    plain, marks, position = "", list[_CitationMark](), 0
    quoted = [match.span() for match in _QUOTATION.finditer(text) if match.span() != (0, len(text.rstrip()))]
    for match in _BRACKET.finditer(text) if n_entries else ():
        numbers = tuple(_parse_numbers(match[1], n_entries))
        if not numbers or any(start < match.start(1) < end for start, end in quoted):
            continue
        plain += text[position : match.start()]
        marks.append(_CitationMark(len(plain), numbers))
        position = match.end()
    return (plain + text[position:]).strip() if marks else text, marks


def _parse_numbers(bracket: str, n_entries: int) -> Iterator[int]:
    """Yield the numbers of a bracket that can be citations: context entries and small ones."""
    for match in _RANGE.finditer(bracket):
        first, last = (int(match[1]), int(match[2])) if match[1] else (int(match[3]), int(match[3]))
        last_meant = last if last <= max(n_entries, _MAX_UNKNOWN) else first - 1
        yield from (number for number in range(max(1, first), last_meant + 1))


def _sentence_spans(text: str) -> Iterator[tuple[int, int]]:
    """Yield the [start, end) offsets of each sentence."""
    pieces = list(_token_spans(text))
    first_piece = 0
    for index, (start, end) in enumerate(pieces):
        if index + 1 == len(pieces) or _is_boundary(text, (start, end), pieces[index + 1]):
            yield pieces[first_piece][0], end
            first_piece = index + 1


def _token_spans(text: str) -> Iterator[tuple[int, int]]:
    for token in re.finditer(r"\S+", text):
        start = token.start()
        for piece in split_token(token[0]):
            size = len(piece.removeprefix(" "))
            yield start, start + size
            start += size


def _is_boundary(text: str, piece_span: Sequence[int], next_span: Sequence[int]) -> bool:
    piece, next_piece = text[slice(*piece_span)], text[slice(*next_span)]
    between = text[piece_span[1] : next_span[0]]
    if not between:
        return ends_run(piece)
    return ends_line(piece, next_piece) if "\n" in between else ends_sentence(piece, next_piece)
