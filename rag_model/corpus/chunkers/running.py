"""An article as one row of words, with the strength of the boundary before each: what most chunkers cut."""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from rag_model.corpus.chunkers.anchors import anchor
from rag_model.corpus.chunkers.chunker import passage_of
from rag_model.corpus.chunkers.sentence_ends import ends_line, ends_run, ends_sentence
from rag_model.corpus.chunkers.words import split_token
from rag_model.corpus.records import Article, Passage

# The boundary before a word: the larger, the better a place to cut.
INSIDE, WORD, SENTENCE, LINE, PARAGRAPH, HEADING = range(6)
Span = tuple[int, int]  # places of the first word and of the one after the last


@dataclass(frozen=True, slots=True)
class Running:
    """The words of an article in order; the lists have one entry a word."""

    words: Sequence[str]  # as `split_words` gives them, or parts of these
    breaks: Sequence[int]  # the boundary before it
    sections: Sequence[int]  # number of its section
    numbers: Sequence[int]  # its number in the article, from 0: parts of a word have the same

    def pieces(self, span: Span, strength: int) -> list[Span]:
        """Return the spans between the boundaries of at least this strength."""
        start, end = span
        cuts = [start, *(at for at in range(start + 1, end) if self.breaks[at] >= strength), end]
        return list(pairwise(cuts)) if start < end else []

    def text(self, span: Span) -> str:
        """Return the text of a span, on one line."""
        return "".join(self.words[span[0] : span[1]]).strip()


def run_together(article: Article) -> Running:
    """Return the words of all sections of an article."""
    words: list[str] = []
    breaks: list[int] = []
    sections: list[int] = []
    for number, section in enumerate(article.sections):
        for word, strength in _boundaries(section.text):
            words.append(word)
            breaks.append(strength)
        sections += [number] * (len(words) - len(sections))
    return Running(words, breaks, sections, range(len(words)))


def passages_at(article: Article, text: Running, spans: Iterable[Span]) -> Iterator[Passage]:
    """Yield the passages of spans: ids are `<page>:<heading>.<how many began under it before>`, of the first word."""
    taken: dict[str, int] = {}
    names = [anchor(section.heading, taken) for section in article.sections]
    begun = Counter[int]()
    for start, end in spans:
        section = text.sections[start]
        window, name = begun[section], names[section]
        begun[section] += 1
        place = f"{name}.{window}" if name else str(window)
        yield passage_of(article, place, article.sections[section].heading, text.numbers[start], text.words[start:end])


def _boundaries(text: str) -> Iterator[tuple[str, int]]:
    last, between = "", HEADING
    for line in text.split("\n"):
        tokens = line.split()
        if not tokens:
            between = max(between, PARAGRAPH)
            continue
        if between == LINE and not ends_line(last, tokens[0]):
            between = WORD
        for token in tokens:
            if between == WORD and ends_sentence(last, token):
                between = SENTENCE
            yield from _words(token, between)
            last, between = token, WORD
        between = LINE


def _words(token: str, between: int) -> Iterator[tuple[str, int]]:
    if len(token) < 12:  # most; shorter than a run without spaces that is split
        yield " " + token, between
        return
    for word in split_token(token):
        yield word, between
        between = SENTENCE if ends_run(word) else INSIDE
