"""The chunker `semantic`: split an article where the meaning of adjacent sentences differs most.

The distance of two adjacent sentences is 1 - cos of their vectors. An article is split where the
distance exceeds a percentile of the distances in the article (Kamradt's method), at headings, and
where a passage would be too long. This chunker encodes every sentence, which takes several times
longer than embedding the passages. The chunker is in this package because it needs an encoder.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from rag_model.corpus.chunkers.article_words import HEADING, SENTENCE, ArticleWords, Span, build_passages, split_article
from rag_model.corpus.chunkers.chunker import ChunkFunction
from rag_model.corpus.chunkers.windows import iter_sentence_windows
from rag_model.corpus.records import Article, Passage
from rag_model.encoders.encoder import Encoder
from rag_model.errors import UsageError
from rag_model.extras import format_versions

# Patterns of an encoder's files. Their contents are part of the chunker's identity.
_FILES = ("config.json", "*.json", "*.safetensors", "*.txt", "*.model")
# Decimals of a distance. Machines round vectors differently, but must split articles equally.
_DIGITS = 3
_SENTENCES_PER_BATCH = 4096  # number of sentences that are encoded together


@dataclass(frozen=True, slots=True)
class SemanticChunker:
    """The chunker whose passages are runs of sentences on one subject, without overlap."""

    version: ClassVar[str] = format_versions("tokenizers", "torch", "transformers")
    encoder: Path | None = field(default=None, metadata={"files": _FILES})  # folder of the encoder
    words: int = 200  # maximum words per passage
    percentile: float = 95.0  # percentile of an article's distances, above which it is split

    def __post_init__(self) -> None:
        if self.encoder is None:
            raise UsageError("chunker 'semantic' needs an encoder: give its folder in settings")
        if self.words < 1:
            raise UsageError(f"words is {self.words} in the recipe: give at least 1")
        if not 0 <= self.percentile <= 100:
            raise UsageError(f"percentile is {self.percentile}: give a number from 0 to 100")

    def open(self) -> ChunkFunction:
        """Load the encoder and return the function that splits articles.

        The encoder runs in float32 on the CPU, so that all workers split equally.

        Raises:
            InputError: the encoder is damaged, or is not a bi-encoder.
            MissingExtraError: the model extra is not installed.
        """
        return partial(_split_by_distance, self, Encoder.load(self.encoder or Path(), device="cpu", dtype="float32"))


def _split_by_distance(settings: SemanticChunker, encoder: Encoder, article: Article) -> Iterator[Passage]:
    article_words = split_article(article)
    sentence_spans = [
        sentence_span
        for section in article_words.split_at((0, len(article_words.words)), HEADING)
        for whole_sentence in article_words.split_at(section, SENTENCE)
        for sentence_span in iter_sentence_windows(whole_sentence, article_words, settings.words)
    ]
    passage_starts = _iter_passage_starts(
        article_words,
        sentence_spans,
        _compute_distances([article_words.join_text(span) for span in sentence_spans], encoder),
        settings.percentile,
    )
    passage_bounds = [0, *passage_starts, len(article_words.words)]
    word_runs = [run for run in pairwise(passage_bounds) if run[0] < run[1]]
    spans = (span for run in word_runs for span in iter_sentence_windows(run, article_words, settings.words))
    yield from build_passages(article, article_words, spans)


def _iter_passage_starts(
    words: ArticleWords, sentences: Sequence[Span], distances: npt.NDArray[np.float64], percentile: float
) -> Iterator[int]:
    """Yield the first word of each sentence that begins a new passage."""
    threshold = np.percentile(distances, percentile) if len(distances) else 0.0
    for (start_word, _), distance in zip(sentences[1:], distances, strict=True):
        if distance > threshold or words.breaks[start_word] == HEADING:
            yield start_word


def _compute_distances(sentences: Sequence[str], encoder: Encoder) -> npt.NDArray[np.float64]:
    """Return the rounded distance of each sentence to the next one, (n - 1,) float64."""
    distances = np.empty(max(0, len(sentences) - 1))
    for i in range(0, len(distances), _SENTENCES_PER_BATCH):
        inputs = [encoder.spec.format_passage("", sentence) for sentence in sentences[i : i + _SENTENCES_PER_BATCH + 1]]
        ((vectors, _),) = encoder.stream([inputs], batch_invariant=True)
        # (b, d)
        unit_vectors = vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-12)
        distances[i : i + len(unit_vectors) - 1] = 1 - np.einsum("bd,bd->b", unit_vectors[:-1], unit_vectors[1:])
    return np.round(distances, _DIGITS)
