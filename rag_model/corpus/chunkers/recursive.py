"""The chunker `recursive`: cut at the strongest boundaries that make the pieces small enough.

The method of LangChain's RecursiveCharacterTextSplitter, with boundaries instead of separators: a text that is too
long is cut at its strongest boundaries (headings, then paragraphs, lines, sentences, words); neighbours that fit into
a passage together are joined; pieces that are still too long are cut at their own strongest boundaries.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rag_model.corpus.chunkers.running import Running, Span, passages_at, run_together
from rag_model.corpus.chunkers.windows import Windows
from rag_model.corpus.records import Article, Passage


@dataclass(frozen=True, slots=True)
class Recursive(Windows):
    """Pieces of an article between its strongest boundaries; no overlap."""

    words: int = 120  # most words of a passage: on average 80, 110 tokens. More found less (docs/benchmarks.md)

    def __call__(self, article: Article) -> Iterator[Passage]:
        """Yield passages of at most `words` words."""
        text = run_together(article)
        yield from passages_at(article, text, split((0, len(text.words)), text, self.words))


def split(span: Span, text: Running, most: int) -> Iterator[Span]:
    """Yield the spans of at most `most` words that a span is cut into, in order."""
    start, end = span
    if end - start <= most:
        if start < end:
            yield span
        return
    strongest = max(text.breaks[start + 1 : end])
    small: list[Span] = []
    for piece in text.pieces(span, strongest):
        if piece[1] - piece[0] <= most:
            small.append(piece)
            continue
        yield from join(small, most)
        small.clear()
        yield from split(piece, text, most)
    yield from join(small, most)


def join(pieces: Sequence[Span], most: int) -> Iterator[Span]:
    """Yield neighbouring spans joined, from the first on, as long as they have at most `most` words together."""
    if not pieces:
        return
    start, end = pieces[0]
    for first, after in pieces[1:]:
        if after - start > most:
            yield start, end
            start = first
        end = after
    yield start, end
