"""Salient spans of passages: the words of links, and dates.

They follow the words of an article through cleaning (`markup.anchors`) and chunking: a passage is a run of the
article's clean text on one line (the contract of chunkers), so it is found there again, and spans inside it move with
it.
"""

import re
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from rag_model.corpus.records import Article, Passage, Section

VERSION = 1  # raise it when the same article would give other spans
LINK, DATE = 0, 1


class Salient(NamedTuple):
    """A span of a passage: text[start:end]."""

    start: int  # characters
    end: int
    kind: int  # LINK or DATE


_MONTHS = (
    "January|February|March|April|May|June|July|August|September|October|November|December"
    "|Jan|Feb|Mar|Apr|Jun|Jul|Aug|Sept|Sep|Oct|Nov|Dec"
)
_DAY = r"\d{1,2}(?:st|nd|rd|th)?"
_YEAR = r"\d{3,4}"
# No part repeats without a bound, so each place of a text is looked at for a bounded time.
_DATE = re.compile(
    rf"\b(?:{_DAY} (?:{_MONTHS})\b\.?(?:,? {_YEAR}\b)?"  # 12 May 1940
    rf"|(?:{_MONTHS})\b\.? (?:{_DAY}\b(?:,? {_YEAR}\b)?|{_YEAR}\b)"  # May 12, 1940; May 1940
    r"|\d{4}-\d{2}-\d{2}\b"  # 1940-05-12
    r"|\d{1,2}(?:st|nd|rd|th) century\b"
    r"|(?<![.,:/-])(?:1\d{3}|20\d{2})s?\b(?![.,:/-]\d))"  # 1940, 1940s; not 1940.5
)


def dates_in(text: str) -> list[Salient]:
    """Return the dates of a text, ascending: years from 1000 to 2099, ISO dates, and days with English month names."""
    return [Salient(found.start(), found.end(), DATE) for found in _DATE.finditer(text)]


def salient(text: str, links: Sequence[tuple[int, int]] = ()) -> list[Salient]:
    """Return the spans of a passage's text, ascending and apart; of two that overlap the longer one, else the first."""
    kept: list[Salient] = []
    for span in sorted([*(Salient(start, end, LINK) for start, end in links), *dates_in(text)]):
        if not kept or span.start >= kept[-1].end:
            kept.append(span)
        elif span.end - span.start > kept[-1].end - kept[-1].start:
            kept[-1] = span
    return kept


def salient_of(article: Article, passages: Sequence[Passage]) -> list[list[Salient]]:
    """Return the spans of each of an article's passages: links that lie in it whole, and dates."""
    links = _links_of(article, passages) if any(one.links for one in article.sections) else [()] * len(passages)
    return [salient(passage.text, own) for passage, own in zip(passages, links, strict=True)]


def _links_of(article: Article, passages: Sequence[Passage]) -> list[list[tuple[int, int]]]:
    line, links = _on_one_line(article.sections)
    starts = [start for start, _ in links]
    found: list[list[tuple[int, int]]] = []
    for start in _places(line, passages):
        own: list[tuple[int, int]] = []
        if start is not None:
            end = start + len(passages[len(found)].text)
            inside = links[bisect_right(starts, start - 1) : bisect_right(starts, end)]
            own = [(first - start, last - start) for first, last in inside if last <= end]
        found.append(own)
    return found


def _places(line: str, passages: Sequence[Passage]) -> Iterator[int | None]:
    """Yield where each passage begins in the line; None where it is not found.

    It begins no later than after the passage before it, and mostly just there; only so much of the line is searched.
    """
    before, end = -1, 0
    for passage in passages:
        text = passage.text
        near = next((at for at in (end, end + 1) if line.startswith(text, at)), None)
        at = line.find(text, before + 1, end + 1 + len(text)) if near is None else near
        if at < 0:
            yield None
            continue
        before, end = at, at + len(text)
        yield at


def _on_one_line(sections: Sequence[Section]) -> tuple[str, list[tuple[int, int]]]:
    """Return the words of all sections with one space between them, and the links there."""
    lines: list[str] = []
    links: list[tuple[int, int]] = []
    at = 0
    for section in sections:
        words = section.text.split()
        if not words:
            continue
        if section.links:
            links += _moved(section, words, at)
        lines.append(" ".join(words))
        at += len(lines[-1]) + 1
    return " ".join(lines), links


def _moved(section: Section, words: Sequence[str], at: int) -> Iterator[tuple[int, int]]:
    """Yield a section's links as they lie once its words are on one line that begins at `at`."""
    there, here = [], []
    place = 0
    for word in words:
        place = section.text.index(word, place)
        there.append(place)
        here.append(at)
        place += len(word)
        at += len(word) + 1
    for start, end in section.links:
        first, last = bisect_right(there, start) - 1, bisect_right(there, end - 1) - 1
        yield here[first] + start - there[first], here[last] + end - there[last]
