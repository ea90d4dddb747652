"""Dense retrieval over one snapshot: encode the question, search an index, fetch the passages by row.

Passage text is read by row, so a reader holds the index and never the corpus. Without an encoder a retriever
still searches by vector, with nothing installed but the core.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol, Self

import numpy as np

from rag_model.corpus.records import Passage
from rag_model.encoders.encoder import Encoder
from rag_model.encoders.space import Space, check_same_space
from rag_model.errors import StoreError, UsageError
from rag_model.index.exact import ExactIndex
from rag_model.index.files.engine import Metric, Rows, Vectors
from rag_model.index.search import IndexFile, SearchIndex, open_index
from rag_model.retrieve.attribution import Source
from rag_model.retrieve.retriever import Hit
from rag_model.store.versions.paths import EXACT, QUESTION_ENCODER, embeddings_path, index_path
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
    """Open an index of a snapshot, searched as its manifest says; `exact` needs no file of its own.

    Its file is mapped, or without `mmap` loaded into memory. Vectors that it ranks by are mapped in any case.

    Raises:
        StoreError: the index was built over another number of vectors than the snapshot has passages, or it ranks by
            the embeddings and they were not pulled.
        UsageError: the snapshot has no such index.
    """
    entries = snapshot.manifest.content.indexes
    if name == EXACT and name not in entries:
        metric: Metric = next(iter(entries.values()))["metric"] if entries else "ip"
        return ExactIndex(_embeddings(snapshot), metric)
    return index_file_of(snapshot, name, mmap=mmap)


def index_file_of(snapshot: Snapshot, name: str, *, mmap: bool = True) -> IndexFile:
    """Open an index that a snapshot has a file of, as `index_of` does."""
    entries = snapshot.manifest.content.indexes
    if name not in entries:
        known = ", ".join(dict.fromkeys([*entries, EXACT]))
        raise UsageError(f"snapshot {snapshot.id[:12]} has no index {name!r}: choose one of {known}")
    entry = entries[name]
    vectors: list[Path] = []
    if entry.get("refine") == "vectors":
        try:
            vectors = _embeddings(snapshot)
        except StoreError as missing:
            raise StoreError(f"index {name} ranks what it finds by the embeddings, but {missing}") from missing
    index = open_index(snapshot.path(index_path(name)), mmap=mmap, defaults=entry["search"], vectors=vectors)
    if index.n != snapshot.n:
        raise StoreError(f"index {name} holds {index.n} vectors for {snapshot.n} passages: reindex the snapshot")
    return index


def _embeddings(snapshot: Snapshot) -> list[Path]:
    return [snapshot.path(embeddings_path(part.name)) for part in snapshot.parts]
