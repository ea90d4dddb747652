"""The chunker `semantic`: cut where the meaning of neighbouring sentences differs the most.

The distance of two neighbouring sentences is 1 - cos of their vectors. An article is cut where the distance exceeds a
percentile of its distances (Kamradt's method), at headings, and wherever a passage would be too long. It costs one
vector a sentence, several times what embedding the passages costs, and it lies here because it needs an encoder.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from rag_model.corpus.chunkers.chunker import Cut
from rag_model.corpus.chunkers.running import HEADING, SENTENCE, Running, Span, passages_at, run_together
from rag_model.corpus.chunkers.sentences import whole
from rag_model.corpus.records import Article, Passage
from rag_model.encoders.encoder import Encoder
from rag_model.errors import UsageError
from rag_model.extras import installed

_FILES = ("config.json", "*.json", "*.safetensors", "*.txt", "*.model")
_DIGITS = 3  # of a distance: machines round vectors differently, and must still cut equally
_AT_ONCE = 4096  # sentences whose vectors are made together


@dataclass(frozen=True, slots=True)
class Semantic:
    """Runs of sentences of one subject; no overlap."""

    version: ClassVar[str] = installed("tokenizers", "torch", "transformers")
    encoder: Path | None = field(default=None, metadata={"files": _FILES})  # its folder
    words: int = 200  # most words of a passage
    percentile: float = 95.0  # of an article's distances; larger ones are cuts

    def __post_init__(self) -> None:
        if self.encoder is None:
            raise UsageError("chunker 'semantic' needs an encoder: name its folder in settings")
        if self.words < 1:
            raise UsageError(f"words is {self.words} in the recipe: give at least 1")
        if not 0 <= self.percentile <= 100:
            raise UsageError(f"percentile is {self.percentile}: give a number from 0 to 100")

    def open(self) -> Cut:
        """Load the encoder, in float32 on the CPU, so that all workers cut equally; return the function that cuts.

        Raises:
            InputError: it is damaged, or is no bi-encoder.
            MissingExtraError: the model extra is not installed.
        """
        return partial(_cut, self, Encoder.load(self.encoder or Path(), device="cpu", dtype="float32"))


def _cut(settings: Semantic, encoder: Encoder, article: Article) -> Iterator[Passage]:
    text = run_together(article)
    sentences = [
        sentence
        for section in text.pieces((0, len(text.words)), HEADING)
        for piece in text.pieces(section, SENTENCE)
        for sentence in whole(piece, text, settings.words)
    ]
    cuts = _cuts(text, sentences, _distances([text.text(one) for one in sentences], encoder), settings.percentile)
    bounds = [0, *cuts, len(text.words)]
    runs = [run for run in pairwise(bounds) if run[0] < run[1]]
    yield from passages_at(article, text, (span for run in runs for span in whole(run, text, settings.words)))


def _cuts(
    text: Running, sentences: Sequence[Span], distances: npt.NDArray[np.float64], percentile: float
) -> Iterator[int]:
    """Yield the first words of the sentences before which to cut."""
    most = np.percentile(distances, percentile) if len(distances) else 0.0
    for (start, _), distance in zip(sentences[1:], distances, strict=True):
        if distance > most or text.breaks[start] == HEADING:
            yield start


def _distances(sentences: Sequence[str], encoder: Encoder) -> npt.NDArray[np.float64]:
    """Return the distance of each sentence to the next, (n - 1,) float64, rounded."""
    found = np.empty(max(0, len(sentences) - 1))
    for start in range(0, len(found), _AT_ONCE):
        inputs = [encoder.spec.passage("", one) for one in sentences[start : start + _AT_ONCE + 1]]
        ((vectors, _),) = encoder.stream([inputs], steady=True)
        units = vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-12)  # (b, d)
        found[start : start + len(units) - 1] = 1 - np.einsum("bd,bd->b", units[:-1], units[1:])
    return np.round(found, _DIGITS)
