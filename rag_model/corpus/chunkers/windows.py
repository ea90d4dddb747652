"""The built-in chunkers whose passages have at most `words` words and do not overlap.

`words` is DPR's chunking: disjoint blocks of 100 whitespace words over the article's running text
(Karpukhin et al. 2020, section 4.1), without headings. The last block of an article may be shorter:
filling it from the start of the article, as the released `psgs_w100.tsv` seems to, would make
blocks overlap, and an edit of the first sentence would change the last passage. Titles are in a
separate field, not in the text.

`sections` restarts at every heading, so that an edit changes only the passages of its own section.
Ids contain the heading instead of an ordinal: a section that is inserted above does not change the
ids below.

`sentences` builds windows of whole sentences; each heading starts a new window.

`recursive` follows LangChain's RecursiveCharacterTextSplitter, with boundaries instead of
separators: a text that is too long is split at its strongest boundaries (headings, then paragraphs,
lines, sentences, words); adjacent pieces that fit into one passage are joined; a piece that is
still too long is split at its own strongest boundaries.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import ClassVar, Self

from rag_model.corpus.chunkers.article_words import (
    HEADING,
    SENTENCE,
    ArticleWords,
    Span,
    build_passages,
    split_article,
    split_section,
)
from rag_model.corpus.chunkers.chunker import build_passage, create_anchor
from rag_model.corpus.records import Article, Passage
from rag_model.errors import UsageError


@dataclass(frozen=True, slots=True)
class Windows:
    """Base class of chunkers whose only setting is the maximum number of words of a passage."""

    version: ClassVar[str] = ""
    words: int = 100  # maximum words of a passage; as in DPR

    def __post_init__(self) -> None:
        if self.words < 1:
            raise UsageError(f"words is {self.words} in the recipe: give at least 1")

    def open(self) -> Self:
        """Return the chunker itself, since there are no files to read."""
        return self


@dataclass(frozen=True, slots=True)
class Words(Windows):
    """Disjoint windows over the whole article; ids are `<page>:<window>`."""

    def __call__(self, article: Article) -> Iterator[Passage]:
        """Yield windows of `words` words, each with the section of its first word."""
        section_words = [split_section(article, section) for section in article.sections]
        article_words = [word for section in section_words for word in section]
        section_of_word = [i for i, section in enumerate(section_words) for _ in section]
        for window_number, start in enumerate(range(0, len(article_words), self.words)):
            heading = article.sections[section_of_word[start]].heading
            yield build_passage(article, str(window_number), heading, start, article_words[start : start + self.words])


@dataclass(frozen=True, slots=True)
class Sections(Windows):
    """Disjoint windows that restart at every heading; ids are `<page>:<heading>.<window>`."""

    def __call__(self, article: Article) -> Iterator[Passage]:
        """Yield windows of `words` words for each section; its last window may be shorter."""
        used_names: dict[str, int] = {}
        for section in article.sections:
            anchor = create_anchor(section.heading, used_names)
            words_of_section = split_section(article, section)
            for window_number, start in enumerate(range(0, len(words_of_section), self.words)):
                position = f"{anchor}.{window_number}" if anchor else str(window_number)
                yield build_passage(
                    article, position, section.heading, start, words_of_section[start : start + self.words]
                )


@dataclass(frozen=True, slots=True)
class Recursive(Windows):
    """Pieces of an article between its strongest boundaries; no overlap."""

    # Maximum words of a passage; the mean is 80 words, 110 tokens. Longer passages had a lower
    # recall (docs/benchmarks.md).
    words: int = 120

    def __call__(self, article: Article) -> Iterator[Passage]:
        """Yield passages of at most `words` words."""
        words = split_article(article)
        yield from build_passages(article, words, split_span((0, len(words.words)), words, self.words))


def split_span(span: Span, words: ArticleWords, max_words: int) -> Iterator[Span]:
    """Split a span into spans of at most `max_words` words, in order."""
    start_word, end_word = span
    if end_word - start_word <= max_words:
        if start_word < end_word:
            yield span
        return
    max_strength = max(words.breaks[start_word + 1 : end_word])
    small_spans: list[Span] = []
    for piece in words.split_at(span, max_strength):
        if piece[1] - piece[0] <= max_words:
            small_spans.append(piece)
            continue
        yield from join_spans(small_spans, max_words)
        small_spans.clear()
        yield from split_span(piece, words, max_words)
    yield from join_spans(small_spans, max_words)


def join_spans(spans: Sequence[Span], max_words: int) -> Iterator[Span]:
    """Join neighbouring spans greedily as long as they have at most `max_words` words together."""
    if not spans:
        return
    start_word, end_word = spans[0]
    for next_start, next_end in spans[1:]:
        if next_end - start_word > max_words:
            yield start_word, end_word
            start_word = next_start
        end_word = next_end
    yield start_word, end_word


@dataclass(frozen=True, slots=True)
class Sentences(Windows):
    """Windows of whole sentences; each heading starts a new window."""

    def __call__(self, article: Article) -> Iterator[Passage]:
        """Yield passages of at most `words` words."""
        words = split_article(article)
        sections = words.split_at((0, len(words.words)), HEADING)
        spans = (iter_sentence_windows(section, words, self.words) for section in sections)
        yield from build_passages(article, words, chain.from_iterable(spans))


def iter_sentence_windows(span: Span, words: ArticleWords, max_words: int) -> Iterator[Span]:
    """Yield windows of whole sentences; a sentence of more than `max_words` words is split."""
    pieces: list[Span] = []
    for sentence in words.split_at(span, SENTENCE):
        start, end = sentence
        pieces += [(start_word, min(start_word + max_words, end)) for start_word in range(start, end, max_words)]
    return join_spans(pieces, max_words)
