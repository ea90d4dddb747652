"""The candidates of texts: the null passage, and what is retrieved without the passage that a text came from."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from rag_model.corpus.records import Passage
from rag_model.encoders.encoder import Vectors
from rag_model.store.versions.snapshot import Snapshot
from rag_model.training.data.corpus_text import overlap
from rag_model.training.data.memory import Memory
from rag_model.training.objectives.realm.masking import Masked, words_of

NULL = Passage("null", "null", 0, "", "", "", 0, 0, Passage.hash_of("", ""))
"""The null passage, which is empty: what a text says by itself (Guu et al. 2020)."""
_SPARE = 8  # passages more than are needed: the text's own, and others with the same text


@dataclass(frozen=True, slots=True)
class Candidates:
    """The candidates of b texts: c a text, the null passage first; where a corpus has too few, fewer are real."""

    passages: list[list[Passage]]  # those that are real, at most c a text
    most: int  # c

    @property
    def kept(self) -> np.ndarray[tuple[int, int], np.dtype[np.bool_]]:
        """(b, c) bool: which places hold a real candidate."""
        lengths = np.array([len(some) for some in self.passages])
        return np.arange(self.most) < lengths[:, None]  # (c,) < (b, 1) -> (b, c)


class Asking:
    """Finds candidates in one snapshot."""

    def __init__(self, snapshot: Snapshot, retriever: str | None, candidates: int) -> None:
        """Open a retriever; `candidates`: of a text, with the null passage.

        Raises:
            UsageError: the retriever is wrong, or an index's metric is not the inner product.
        """
        self.snapshot, self._most = snapshot, candidates
        self._memory = Memory(snapshot, None, retriever)

    def candidates(self, rows: Sequence[int], texts: Sequence[Masked], asked: Vectors) -> Candidates:
        """Return the candidates of texts from these rows, given their questions' (b, d) float32 vectors.

        The passage that a text came from gives away what the masks hide; so does any that holds the words around a
        mask, such as a copy, or a window that overlaps. Of equal passages one is taken.
        """
        recalled = self._memory.recall([text.question for text in texts], asked, self._most - 1 + _SPARE)
        found = []
        for source, text, hits in zip(self.snapshot.passages(list(rows)), texts, recalled.hits, strict=True):
            others = {hit.passage.hash: hit.passage for hit in hits if not _tells(hit.passage, source, text)}
            found.append([NULL, *list(others.values())[: self._most - 1]])
        return Candidates(found, self._most)


def _tells(passage: Passage, source: Passage, text: Masked) -> bool:
    read = words_of(passage.text)
    return overlap(source, passage) or any(clue in read for clue in text.clues)
