"""Chunkers of disjoint windows: an article becomes passages of at most `words` words.

`words` is DPR's chunking: disjoint blocks of 100 whitespace words over the article's running text (Karpukhin et
al. 2020, section 4.1), headings left out. The last block of an article is not filled: filling it
from the article's beginning, as the released `psgs_w100.tsv` seems to, would make blocks overlap, and an
edit of the first sentence would change the last passage. Titles are kept in a field of their own, not in the text.

`sections` restarts the count at every heading, so that an edit moves the passages of its own section and no
others. Its ids name the section by its heading, not its ordinal: a section inserted above leaves the ids
below unchanged.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, Self

from rag_model.corpus.chunkers.anchors import anchor
from rag_model.corpus.chunkers.chunker import passage_of
from rag_model.corpus.chunkers.words import split_words
from rag_model.corpus.records import Article, Passage
from rag_model.errors import UsageError


@dataclass(frozen=True, slots=True)
class Windows:
    """What chunkers have in common whose only setting is how many words a passage has at most."""

    version: ClassVar[str] = ""
    words: int = 100  # most words of a passage; DPR's figure

    def __post_init__(self) -> None:
        if self.words < 1:
            raise UsageError(f"words is {self.words} in the recipe: give at least 1")

    def open(self) -> Self:
        """Return the chunker itself: there are no files to read."""
        return self


@dataclass(frozen=True, slots=True)
class Words(Windows):
    """Disjoint windows over the whole article; ids are `<page>:<window>`."""

    def __call__(self, article: Article) -> Iterator[Passage]:
        """Yield windows of `words` words (the last may be shorter); each names the section it starts in."""
        split = [split_words(section.text) for section in article.sections]
        running = [word for words in split for word in words]
        heading_at = [i for i, words in enumerate(split) for _ in words]
        for window, start in enumerate(range(0, len(running), self.words)):
            heading = article.sections[heading_at[start]].heading
            yield passage_of(article, str(window), heading, start, running[start : start + self.words])


@dataclass(frozen=True, slots=True)
class Sections(Windows):
    """Disjoint windows that restart at every heading; ids are `<page>:<heading>.<window>`."""

    def __call__(self, article: Article) -> Iterator[Passage]:
        """Yield each section's windows of `words` words; the last of a section may be shorter."""
        taken: dict[str, int] = {}
        for section in article.sections:
            prefix = anchor(section.heading, taken)
            running = split_words(section.text)
            for window, start in enumerate(range(0, len(running), self.words)):
                place = f"{prefix}.{window}" if prefix else str(window)
                yield passage_of(article, place, section.heading, start, running[start : start + self.words])
