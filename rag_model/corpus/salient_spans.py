"""Find salient spans of passages (words of links, and dates), and store them in files.

Spans follow the words of an article through cleaning (`wikitext`) and chunking: a passage is a
substring of the article's clean text on one line (the contract of chunkers), so the passage is
located in this text, and the spans inside the passage are shifted.

A span file is a `.npy` array that is memory-mapped: (m, 4) int32, 16 bytes per span: row of the
passage in the part, first character, end (exclusive), kind (`LINK`, `DATE`); ascending.
The linked text or the date is text[start:end] of the passage.
"""

import re
from array import array
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from rag_model.arrays import map_npy
from rag_model.atomic_write import atomic_write
from rag_model.corpus.records import Article, Passage, Section
from rag_model.errors import InputError

VERSION = 1  # increase it when the same article would give other spans
LINK, DATE = 0, 1
_MONTHS = (
    "January|February|March|April|May|June|July|August|September|October|November|December"
    "|Jan|Feb|Mar|Apr|Jun|Jul|Aug|Sept|Sep|Oct|Nov|Dec"
)
_DAY = r"\d{1,2}(?:st|nd|rd|th)?"
_YEAR = r"\d{3,4}"
# All repetitions are bounded, so the time per position of a text is bounded.
_DATE = re.compile(
    rf"\b(?:{_DAY} (?:{_MONTHS})\b\.?(?:,? {_YEAR}\b)?"  # 12 May 1940
    rf"|(?:{_MONTHS})\b\.? (?:{_DAY}\b(?:,? {_YEAR}\b)?|{_YEAR}\b)"  # May 12, 1940; May 1940
    r"|\d{4}-\d{2}-\d{2}\b"  # 1940-05-12
    r"|\d{1,2}(?:st|nd|rd|th) century\b"
    r"|(?<![.,:/-])(?:1\d{3}|20\d{2})s?\b(?![.,:/-]\d))"  # 1940, 1940s; not 1940.5
)
_FIELDS = 4  # number of values of a span in a file


class SalientSpan(NamedTuple):
    """A span of a passage: text[start:end]."""

    start: int  # characters
    end: int
    kind: int  # LINK or DATE


def find_dates(text: str) -> list[SalientSpan]:
    """Return the dates of a text: years 1000 to 2099, ISO dates, English dates; ascending."""
    return [SalientSpan(match.start(), match.end(), DATE) for match in _DATE.finditer(text)]


def find_spans(text: str, link_spans: Sequence[tuple[int, int]] = ()) -> list[SalientSpan]:
    """Return the spans of a text, ascending and disjoint.

    Of two overlapping spans the longer one is used, or the first if they are equally long.
    """
    spans: list[SalientSpan] = []
    for span in sorted([*(SalientSpan(*link, LINK) for link in link_spans), *find_dates(text)]):
        if not spans or span.start >= spans[-1].end:
            spans.append(span)
        elif span.end - span.start > spans[-1].end - spans[-1].start:
            spans[-1] = span
    return spans


def find_article_spans(article: Article, passages: Sequence[Passage]) -> list[list[SalientSpan]]:
    """Return the spans of each passage: dates, and links that are completely in the passage."""
    if not any(section.links for section in article.sections):
        return [find_spans(passage.text) for passage in passages]
    links_by_passage = _locate_links(article, passages)
    return [find_spans(passage.text, links) for passage, links in zip(passages, links_by_passage, strict=True)]


def _locate_links(article: Article, passages: Sequence[Passage]) -> list[list[tuple[int, int]]]:
    text, links = _join_sections(article.sections)
    link_starts = [start for start, _ in links]
    links_by_passage: list[list[tuple[int, int]]] = []
    for passage, passage_start in zip(passages, _locate_passages(text, passages), strict=True):
        links_in_passage: list[tuple[int, int]] = []
        if passage_start is not None:
            end = passage_start + len(passage.text)
            near_links = links[bisect_right(link_starts, passage_start - 1) : bisect_right(link_starts, end)]
            links_in_passage = [(i - passage_start, j - passage_start) for i, j in near_links if j <= end]
        links_by_passage.append(links_in_passage)
    return links_by_passage


def _locate_passages(text: str, passages: Sequence[Passage]) -> Iterator[int | None]:
    """Yield the offset of each passage in the text; None if it is not found.

    A passage starts at the end of the previous passage or earlier, so only that range is searched.
    """
    previous_start, end = -1, 0
    for passage in passages:
        passage_text = passage.text
        offset = next((i for i in (end, end + 1) if text.startswith(passage_text, i)), None)
        if offset is None:
            offset = text.find(passage_text, previous_start + 1, end + 1 + len(passage_text))
        if offset < 0:
            yield None
            continue
        previous_start, end = offset, offset + len(passage_text)
        yield offset


def _join_sections(sections: Sequence[Section]) -> tuple[str, list[tuple[int, int]]]:
    """Join the words of all sections by single spaces; return the text, and the links in it."""
    section_lines: list[str] = []
    links: list[tuple[int, int]] = []
    offset = 0
    for section in sections:
        words = section.text.split()
        if not words:
            continue
        if section.links:
            links += _shift_links(section, words, offset)
        section_lines.append(" ".join(words))
        offset += len(section_lines[-1]) + 1
    return " ".join(section_lines), links


def _shift_links(section: Section, words: Sequence[str], offset: int) -> Iterator[tuple[int, int]]:
    """Yield the links of a section, shifted to the line of its words that starts at `offset`."""
    section_offsets, line_offsets = [], []
    word_start = 0
    for word in words:
        word_start = section.text.index(word, word_start)
        section_offsets.append(word_start)
        line_offsets.append(offset)
        word_start += len(word)
        offset += len(word) + 1
    for start, end in section.links:
        first_word = bisect_right(section_offsets, start) - 1
        last_word = bisect_right(section_offsets, end - 1) - 1
        yield (
            line_offsets[first_word] + start - section_offsets[first_word],
            line_offsets[last_word] + end - section_offsets[last_word],
        )


class SpanWriter:
    """Collect the spans of a part's passages, in row order."""

    def __init__(self) -> None:
        self._values, self._rows = array("i"), 0

    def write(self, spans: Iterable[SalientSpan]) -> None:
        """Append the spans of the next passage; it may have none."""
        for start, end, kind in spans:
            self._values.extend((self._rows, start, end, kind))
        self._rows += 1

    def save(self, path: Path) -> None:
        """Write the spans to a file."""
        _write_spans(np.asarray(self._values, np.int32).reshape(-1, _FIELDS), path)


class SpanFile:
    """Read the spans of passages by their rows in the part."""

    def __init__(self, path: Path) -> None:
        """Memory-map the file.

        Raises:
            InputError: The file is not a span file.
        """
        try:
            self._spans = map_npy(path)
        except (ValueError, OSError) as error:
            raise InputError(f"{path} is not a span file ({error}): build or pull it again") from error
        if self._spans.ndim != 2 or self._spans.shape[1] != _FIELDS or self._spans.dtype != np.int32:
            raise InputError(f"{path} is not a span file ({self._spans.shape}): build or pull it again")

    @property
    def rows(self) -> npt.NDArray[np.int64]:
        """Rows of the passages with at least one span, ascending."""
        return np.unique(self._spans[:, 0]).astype(np.int64)

    def get_spans(self, row: int) -> list[SalientSpan]:
        """Return the spans of the passage in a row, ascending."""
        return self.get_range(row, row + 1)[0]

    def get_range(self, start_row: int, end_row: int) -> list[list[SalientSpan]]:
        """Return the spans of rows `start_row` to `end_row` (exclusive), one list per passage."""
        start_span, end_span = np.searchsorted(self._spans[:, 0], [start_row, end_row])
        spans_by_row: list[list[SalientSpan]] = [[] for _ in range(start_row, end_row)]
        for row, *span in self._spans[start_span:end_span].tolist():
            if start_row <= row < end_row:  # rows of a damaged file may be unordered
                spans_by_row[row - start_row].append(SalientSpan(*span))
        return spans_by_row

    def write_rows(self, rows: Sequence[int], out: Path) -> None:
        """Write a copy with the spans of the given ascending rows only, renumbered from 0."""
        kept_rows = np.asarray(rows, np.int64)
        spans = self._spans[np.isin(self._spans[:, 0], kept_rows)]
        spans[:, 0] = np.searchsorted(kept_rows, spans[:, 0])
        _write_spans(spans, out)


def _write_spans(spans: npt.NDArray[np.int32], path: Path) -> None:
    with atomic_write(path) as temporary_path, temporary_path.open("wb") as file:
        np.save(file, spans, allow_pickle=False)
