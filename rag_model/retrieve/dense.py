"""Dense retrieval over one snapshot: encode the question, search an index, fetch the passages by row.

Passage text is read by row, so a reader holds the index and never the corpus. Without an encoder a retriever
still searches by vector, with nothing installed but the core.
"""

from collections.abc import Sequence
from typing import Protocol, Self

import numpy as np

from rag_model.corpus.records import Passage
from rag_model.encoders.encoder import Encoder
from rag_model.encoders.space import Space, check_same_space
from rag_model.errors import UsageError
from rag_model.index.files.engine import Rows, Vectors
from rag_model.index.registry import kind_of
from rag_model.index.search import SearchIndex
from rag_model.retrieve.attribution import Source
from rag_model.retrieve.indexes import open_index_of
from rag_model.retrieve.retriever import Hit
from rag_model.store.versions.paths import QUESTION_ENCODER
from rag_model.store.versions.snapshot import Snapshot


class QuestionEncoder(Protocol):
    """What dense retrieval asks of an encoder; `Encoder` is one."""

    def space(self) -> Space:
        """Return the space that its questions ask into."""
        ...

    def encode_questions(self, questions: Sequence[str]) -> Vectors:
        """Return (n, d) float32 vectors, in order."""
        ...


class DenseRetriever:
    """A `Retriever` over one index of one snapshot."""

    def __init__(
        self, snapshot: Snapshot, encoder: QuestionEncoder | None = None, index: str | SearchIndex = "hnsw"
    ) -> None:
        """Open `index` (one of the snapshot's, or `exact`); without `encoder` only vectors can be searched.

        What `index_of` has opened already can be given in place of a name, so that several retrievers share it.

        Raises:
            UsageError: the snapshot has no such index.
            RefusedError: the encoder asks into another space than the snapshot's.
        """
        if encoder is not None:
            _check_space(encoder, snapshot)
        self.snapshot = snapshot
        self._encoder = encoder
        self._index = index_of(snapshot, index) if isinstance(index, str) else index
        self._source = Source.of(snapshot.manifest.content.corpus)

    @classmethod
    def of(cls, snapshot: Snapshot, index: str = "hnsw") -> Self:
        """Open `index` with the question encoder that the snapshot carries.

        Raises:
            MissingExtraError: the model extra is not installed.
            StoreError: the snapshot carries no encoder.
            UsageError: the snapshot has no such index.
        """
        encoder = Encoder.load(snapshot.folder(QUESTION_ENCODER), "question")
        return cls(snapshot, encoder, index)

    def search(self, questions: Sequence[str], k: int) -> list[list[Hit]]:
        """Return the best `k` passages of each question, best first, in the order of the questions.

        A list is shorter than `k` only where an approximate index reaches fewer passages.

        Raises:
            UsageError: a question is empty or no text, `k` is below 1 or above the number of passages, or the
                retriever was made without an encoder.
        """
        self._check_depth(k)
        check_questions(questions)
        if self._encoder is None:
            raise UsageError("this retriever has no encoder: give it one, or search by vector")
        if not questions:
            return []
        return self.search_vectors(self._encoder.encode_questions(questions), k)

    def search_vectors(self, vectors: Vectors, k: int) -> list[list[Hit]]:
        """Return the best `k` passages of each vector: (q, d) float32 in, q lists out, in order.

        Raises:
            UsageError: the vectors are not of the snapshot's dimension or not finite, or `k` is out of range.
        """
        self._check_depth(k)
        scores, rows = self._index.search(vectors, k)
        passages = self._passages(rows)
        return [self._hits(*found, passages) for found in zip(scores, rows, strict=True)]

    def _check_depth(self, k: int) -> None:
        if k < 1:
            raise UsageError(f"k is {k}: ask for at least 1 passage")
        if k > self.snapshot.n:
            raise UsageError(f"k is {k} but the snapshot holds {self.snapshot.n} passages: ask for fewer")

    def _passages(self, rows: Rows) -> dict[int, Passage]:
        """Read each passage once, however many questions found it, and in row order."""
        wanted = np.unique(rows[rows >= 0]).tolist()
        return dict(zip(wanted, self.snapshot.passages(wanted), strict=True))

    def _hits(self, scores: Vectors, rows: Rows, passages: dict[int, Passage]) -> list[Hit]:
        found = [(float(score), int(row)) for score, row in zip(scores, rows, strict=True) if row >= 0]
        return [self._hit(rank, *hit, passages[hit[1]]) for rank, hit in enumerate(found, start=1)]

    def _hit(self, rank: int, score: float, row: int, passage: Passage) -> Hit:
        return Hit(rank, score, row, passage, self._source.url(passage), self._source.line(passage))


def check_questions(questions: Sequence[str]) -> None:
    """Check that every question is a text that can be encoded.

    Raises:
        UsageError: one is empty or no text; the sentence gives its number, from 1.
    """
    for number, question in enumerate(questions, start=1):
        if not question.strip():
            raise UsageError(f"question {number} is empty: ask something")
        try:
            question.encode()
        except UnicodeEncodeError as broken:
            raise UsageError(f"question {number} is not UTF-8 text ({broken.reason}): check the terminal") from broken


def _check_space(encoder: QuestionEncoder, snapshot: Snapshot) -> None:
    if snapshot.space is None:
        raise UsageError(f"snapshot {snapshot.id[:12]} has no vectors: reindex it with an encoder")
    check_same_space(encoder.space(), Space.from_json(snapshot.space))


def index_of(snapshot: Snapshot, name: str, *, mmap: bool = True) -> SearchIndex:
    """Open an index over vectors of a snapshot, as `open_index_of` does.

    Raises:
        UsageError: the snapshot has no such index, or it is not over vectors.
    """
    entry = snapshot.manifest.content.indexes.get(name)
    if entry is not None and kind_of(entry).represents != "vectors":
        raise UsageError(f"index {name} is searched by text, not by vectors: ask a retriever over it")
    index: SearchIndex = open_index_of(snapshot, name, mmap=mmap)
    return index
