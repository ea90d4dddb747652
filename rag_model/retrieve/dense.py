"""Dense retrieval: one index over one vector space; the question is encoded, the index searched.

Passage text is read by row, so a reader holds the index and never the corpus. Without an encoder a retriever
still searches by vector, with nothing installed but the core.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

from rag_model.encoders.encoder import Encoder
from rag_model.encoders.space import Space, check_same_space
from rag_model.errors import StoreError, UsageError
from rag_model.index.exact import ExactIndex
from rag_model.index.factory import Exact, Graph, parse
from rag_model.index.files.engine import Metric, Vectors
from rag_model.index.search import IndexFile, SearchIndex, open_index
from rag_model.retrieve.found import Found, SnapshotRetriever
from rag_model.retrieve.questions import QuestionEncoder, Questions
from rag_model.retrieve.retriever import Hit
from rag_model.store.versions.paths import EXACT, QUESTION_ENCODER, embeddings_path, index_path
from rag_model.store.versions.snapshot import Snapshot


class DenseRetriever(SnapshotRetriever):
    """A `Retriever` over one index of one snapshot."""

    def __init__(
        self,
        snapshot: Snapshot,
        encoder: QuestionEncoder | None = None,
        index: str | None = None,
        opened: SearchIndex | None = None,
    ) -> None:
        """Open `index` (one of the snapshot's, or `exact`); without `encoder` only vectors can be searched.

        Args:
            snapshot: that is searched.
            encoder: of the questions.
            index: its name; None: the snapshot's default.
            opened: what `index_of` has opened for that name already, so that several retrievers share it.

        Raises:
            UsageError: the snapshot has no such index.
            RefusedError: the encoder asks into another space than the snapshot's.
        """
        if encoder is not None:
            check_asks(encoder, snapshot)
        content = snapshot.manifest.content
        super().__init__(snapshot, content.default_retriever if index is None else index)
        self._encoder = encoder
        self._index = index_of(snapshot, self.name) if opened is None else opened
        self.exact_products = gives_products(content.indexes, self.name)

    @classmethod
    def of(cls, snapshot: Snapshot, index: str | None = None) -> Self:
        """Open `index` with the question encoder that the snapshot carries.

        Raises:
            MissingExtraError: the model extra is not installed.
            StoreError: the snapshot carries no encoder.
            UsageError: the snapshot has no such index.
        """
        return cls(snapshot, carried_encoder(snapshot), index)

    def find(self, asked: Questions, k: int) -> Found:
        """Search the index by the questions' vectors.

        Raises:
            UsageError: the retriever was made without an encoder.
        """
        if self._encoder is None:
            raise UsageError("this retriever has no encoder: give it one, or search by vector")
        return self._found(asked.vectors(self._encoder), k)

    def search_vectors(self, vectors: Vectors, k: int) -> list[list[Hit]]:
        """Return the best `k` passages of each vector: (q, d) float32 in, q lists out, in order.

        Raises:
            UsageError: the vectors are not of the snapshot's dimension or not finite, or `k` is out of range.
        """
        self.check_depth(k)
        return self.hits(self._found(vectors, k))

    def _found(self, vectors: Vectors, k: int) -> Found:
        scores, rows = self._index.search(vectors, k)
        return Found(self.name, rows, scores, scores if self.exact_products else None)


def carried_encoder(snapshot: Snapshot) -> Encoder:
    """Load the question encoder that a snapshot carries.

    Raises:
        MissingExtraError: the model extra is not installed.
        StoreError: the snapshot carries none.
    """
    return Encoder.load(snapshot.folder(QUESTION_ENCODER), "question")


def gives_products(indexes: Mapping[str, Mapping[str, Any]], name: str) -> bool:
    """Return whether an index's scores are the inner products with the very vectors that the snapshot holds.

    Codes (PQ, SQ8, fp16) approximate them, unless what they find is ranked again by the vectors; distances are others.
    """
    entry = indexes.get(name)
    if entry is None:
        return _metric(indexes) == "ip"  # `exact` without a file: the vectors themselves
    try:
        factory = parse(str(entry.get("factory")))
    except UsageError:  # not one of ours: nothing is known of it
        return False
    if isinstance(factory, Exact):
        plain = True
    elif isinstance(factory, Graph):
        plain = factory.storage == "Flat"
    else:
        plain = factory.codes.name == "Flat" or factory.refine == "Flat" or entry.get("refine") == "vectors"
    return plain and entry.get("metric") == "ip"


def _metric(indexes: Mapping[str, Mapping[str, Any]]) -> Metric:
    metric: Metric = next(iter(indexes.values()))["metric"] if indexes else "ip"
    return metric


def check_asks(encoder: QuestionEncoder, snapshot: Snapshot) -> None:
    """Check that an encoder's questions ask into the space of a snapshot's vectors.

    Raises:
        RefusedError: they ask into another one.
        UsageError: the snapshot has no vectors.
    """
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
        return ExactIndex(embedding_files(snapshot), _metric(entries))
    return index_file_of(snapshot, name, mmap=mmap)


def index_file_of(snapshot: Snapshot, name: str, *, mmap: bool = True) -> IndexFile:
    """Open an index that a snapshot has a file of, as `index_of` does."""
    entries = snapshot.manifest.content.indexes
    if name not in entries:
        raise UsageError(unknown_index(snapshot, name))
    entry = entries[name]
    vectors: list[Path] = []
    if entry.get("refine") == "vectors":
        try:
            vectors = embedding_files(snapshot)
        except StoreError as missing:
            raise StoreError(f"index {name} ranks what it finds by the embeddings, but {missing}") from missing
    index = open_index(snapshot.path(index_path(name)), mmap=mmap, defaults=entry["search"], vectors=vectors)
    if index.n != snapshot.n:
        raise StoreError(f"index {name} holds {index.n} vectors for {snapshot.n} passages: reindex the snapshot")
    return index


def known_indexes(snapshot: Snapshot) -> tuple[str, ...]:
    """Return the names of the indexes that a snapshot can be searched by, `exact` among them."""
    return tuple(dict.fromkeys([*snapshot.manifest.content.indexes, EXACT]))


def unknown_index(snapshot: Snapshot, name: str) -> str:
    """Return the sentence that refuses an index which a snapshot does not have."""
    return f"snapshot {snapshot.id[:12]} has no index {name!r}: choose one of {', '.join(known_indexes(snapshot))}"


def embedding_files(snapshot: Snapshot) -> list[Path]:
    """Return the files of a snapshot's vectors, in row order.

    Raises:
        StoreError: they were not pulled.
    """
    return [snapshot.path(embeddings_path(part.name)) for part in snapshot.parts]
