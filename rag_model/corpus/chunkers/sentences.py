"""The chunker `sentences`: windows of whole sentences."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain

from rag_model.corpus.chunkers.recursive import join
from rag_model.corpus.chunkers.running import HEADING, SENTENCE, Running, Span, passages_at, run_together
from rag_model.corpus.chunkers.windows import Windows
from rag_model.corpus.records import Article, Passage


@dataclass(frozen=True, slots=True)
class Sentences(Windows):
    """Windows of whole sentences that restart at headings."""

    def __call__(self, article: Article) -> Iterator[Passage]:
        """Yield passages of at most `words` words."""
        text = run_together(article)
        sections = text.pieces((0, len(text.words)), HEADING)
        spans = (whole(section, text, self.words) for section in sections)
        yield from passages_at(article, text, chain.from_iterable(spans))


def whole(span: Span, text: Running, most: int) -> Iterator[Span]:
    """Yield windows of whole sentences; a sentence of more than `most` words is cut between words."""
    pieces: list[Span] = []
    for sentence in text.pieces(span, SENTENCE):
        start, end = sentence
        pieces += [(at, min(at + most, end)) for at in range(start, end, most)]
    return join(pieces, most)
