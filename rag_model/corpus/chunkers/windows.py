"""Chunkers of disjoint windows: an article becomes passages of at most `words` words.

`words` is DPR's chunking: disjoint blocks of 100 whitespace words over the article's running text (Karpukhin et
al. 2020, section 4.1), headings left out. The last block of an article is not filled: filling it
from the article's beginning, as the released `psgs_w100.tsv` seems to, would make blocks overlap, and an
edit of the first sentence would change the last passage. Titles are kept in a field of their own, not in the text.

`sections` restarts the count at every heading, so that an edit moves the passages of its own section and no
others. Its ids name the section by its heading, not its ordinal: a section inserted above leaves the ids
below unchanged.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, Self

from rag_model.corpus.chunkers.chunker import passage_of
from rag_model.corpus.records import Article, Passage
from rag_model.errors import UsageError

MAX_ANCHOR = 64  # characters of a heading that go into a passage id


@dataclass(frozen=True, slots=True)
class Words:
    """Disjoint windows over the whole article; ids are `<page>:<window>`."""

    version: ClassVar[str] = ""
    words: int = 100  # most words of a passage; DPR's figure

    def __post_init__(self) -> None:
        _check(self.words)

    def open(self) -> Self:
        """Return the chunker itself: there are no files to read."""
        return self

    def __call__(self, article: Article) -> Iterator[Passage]:
        """Yield windows of `words` words (the last may be shorter); each names the section it starts in."""
        split = [split_words(section.text) for section in article.sections]
        running = [word for words in split for word in words]
        heading_at = [i for i, words in enumerate(split) for _ in words]
        for window, start in enumerate(range(0, len(running), self.words)):
            heading = article.sections[heading_at[start]].heading
            yield passage_of(article, str(window), heading, start, running[start : start + self.words])


@dataclass(frozen=True, slots=True)
class Sections:
    """Disjoint windows that restart at every heading; ids are `<page>:<heading>.<window>`."""

    version: ClassVar[str] = ""
    words: int = 100  # most words of a passage; DPR's figure

    def __post_init__(self) -> None:
        _check(self.words)

    def open(self) -> Self:
        """Return the chunker itself: there are no files to read."""
        return self

    def __call__(self, article: Article) -> Iterator[Passage]:
        """Yield each section's windows of `words` words; the last of a section may be shorter."""
        taken: set[str] = set()
        for section in article.sections:
            prefix = anchor(section.heading, taken)
            running = split_words(section.text)
            for window, start in enumerate(range(0, len(running), self.words)):
                place = f"{prefix}.{window}" if prefix else str(window)
                yield passage_of(article, place, section.heading, start, running[start : start + self.words])


def anchor(heading: str, taken: set[str]) -> str:
    """Return a name for a section that is unique in its article, and add it to `taken`.

    As MediaWiki's anchors: spaces become underscores, and a repeated heading gets `_2`, `_3`, …

    >>> anchor("Early life", {"Early_life"})
    'Early_life_2'
    """
    name = candidate = "_".join(heading.split())[:MAX_ANCHOR]
    again = 1
    while candidate in taken:
        again += 1
        candidate = f"{name}_{again}"
    taken.add(candidate)
    return candidate


# Scripts without spaces between words: Thai, Lao, Tibetan, Burmese, Khmer, kana, Han.
_UNSPACED = "\u0e00-\u0eff\u0f00-\u0fff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff"
# Their punctuation, and combining signs that must stay with their letter.
_MARKS = "\u3001-\u3029\uff00-\uffef\u0e31\u0e34-\u0e3a\u0e47-\u0e4e\u102b-\u103e\u17b4-\u17d3"
_LONG_RUN = re.compile(f"[{_UNSPACED}{_MARKS}]{{12}}")
_PIECES = re.compile(f"[{_UNSPACED}]{{1,2}}[{_MARKS}]*|[^{_UNSPACED}]+")


def split_words(text: str) -> list[str]:
    r"""Split a text into words, each with the space before it: joined, they are the text on one line.

    Words are separated by whitespace. A run of a dozen letters of a script without spaces (Chinese,
    Japanese, Thai, …) counts as one word for every two letters, about as many as segmenters find; otherwise a
    sentence would be one word and a passage 100 sentences.

    >>> split_words("One  small\nstep")
    [' One', ' small', ' step']
    """
    tokens = text.split()
    if not _LONG_RUN.search(text):
        return [" " + token for token in tokens]
    return [word for token in tokens for word in _split_token(token)]


def _split_token(token: str) -> list[str]:
    pieces = _PIECES.findall(token) if _LONG_RUN.search(token) else [token]
    return [" " + pieces[0], *pieces[1:]]


def _check(words: int) -> None:
    if words < 1:
        raise UsageError(f"a passage of {words} words in the recipe is empty: give at least 1")
