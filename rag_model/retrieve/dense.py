"""Dense retrieval: the question is encoded, and one index over one vector space is searched.

Passage text is read by row, so a reader holds the index and never the corpus. Without an encoder a retriever
still searches by vector, with nothing installed but the core.
"""

from collections.abc import Mapping
from typing import Any, Self

from rag_model.encoders.carried import load_carried
from rag_model.encoders.space import Space, check_same_space
from rag_model.errors import UsageError
from rag_model.index.factory import Exact, Graph, parse
from rag_model.index.files.engine import Vectors
from rag_model.index.search import SearchIndex
from rag_model.retrieve.found import Found, SnapshotRetriever
from rag_model.retrieve.indexes import metric_of, open_index_of, represents, sizes_of
from rag_model.retrieve.questions import QuestionEncoder, Questions
from rag_model.retrieve.retriever import Hit
from rag_model.store.versions.paths import EMBEDDINGS, question_encoder
from rag_model.store.versions.snapshot import Snapshot


class DenseRetriever(SnapshotRetriever):
    """A `Retriever` over one index of one snapshot."""

    def __init__(
        self,
        snapshot: Snapshot,
        encoder: QuestionEncoder | None = None,
        index: str | None = None,
        opened: SearchIndex | None = None,
        parameters: Mapping[str, int] | None = None,
    ) -> None:
        """Open `index` (one of the snapshot's, or `exact`); without `encoder` only vectors can be searched.

        Args:
            snapshot: that is searched.
            encoder: of the questions.
            index: its name; None: the snapshot's default.
            opened: what `open_index_of` has opened for that name already, so that several retrievers share it.
            parameters: of its search, in place of the snapshot's.

        Raises:
            UsageError: the snapshot has no such index.
            RefusedError: the encoder's space is not the snapshot's.
        """
        content = snapshot.manifest.content
        super().__init__(snapshot, content.default_retriever if index is None else index)
        if represents(snapshot, self.name) != "vectors":
            raise UsageError(f"index {self.name} is not searched by one vector a question: use open_retriever")
        if encoder is not None:
            check_asks(encoder, snapshot, content.over(self.name))
        self.index = self.name  # its name; an expression may call it by its parameters too
        self._encoder = encoder
        self._opened: SearchIndex = open_index_of(snapshot, self.name) if opened is None else opened
        self.parameters: Mapping[str, int] = parameters or {}
        self.exact_products = gives_products(content.indexes, self.name)

    @classmethod
    def of(cls, snapshot: Snapshot, index: str | None = None) -> Self:
        """Open `index` with the question encoder that the snapshot carries.

        Raises:
            MissingExtraError: the model extra is not installed.
            StoreError: the snapshot carries no encoder.
            UsageError: the snapshot has no such index.
        """
        content = snapshot.manifest.content
        over = content.over(content.default_retriever if index is None else index)
        return cls(snapshot, carried_encoder(snapshot, over), index)

    @property
    def files(self) -> Mapping[str, int]:
        """The index, and the rows that it ranks by."""
        return sizes_of(self.snapshot, self.index)

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
        scores, rows = self._opened.search(vectors, k, **self.parameters)
        return Found(self.name, rows, scores, scores if self.exact_products else None)


def carried_encoder(snapshot: Snapshot, representation: str = EMBEDDINGS) -> QuestionEncoder:
    """Load the question encoder that a snapshot carries for a representation: of one vector a question, or of many.

    Raises:
        MissingExtraError: the model extra is not installed.
        StoreError: the snapshot carries none.
    """
    return load_carried(snapshot.folder(question_encoder(representation)))


def gives_products(indexes: Mapping[str, Mapping[str, Any]], name: str) -> bool:
    """Return whether an index's scores are the inner products with the snapshot's `embeddings`.

    Codes (PQ, SQ8, fp16) approximate them, unless hits are ranked again by the vectors; distances are not products.
    """
    entry = indexes.get(name)
    if entry is None:
        return metric_of(indexes, EMBEDDINGS) == "ip"  # `exact` without a file: the vectors themselves
    if entry.get("over", EMBEDDINGS) != EMBEDDINGS:
        return False  # of another space, or of text
    try:
        factory = parse(str(entry.get("factory")))
    except UsageError:  # not a factory of this package: its scores are unknown
        return False
    if isinstance(factory, Exact):
        plain = True
    elif isinstance(factory, Graph):
        plain = factory.storage == "Flat"
    else:
        kept = factory.codes.name == "Flat" and factory.rotation is None  # a transform may drop or shift dimensions
        plain = kept or factory.refine == "Flat" or entry.get("refine") == "vectors"
    return plain and entry.get("metric") == "ip"


def check_asks(encoder: QuestionEncoder, snapshot: Snapshot, representation: str = EMBEDDINGS) -> None:
    """Check that an encoder's questions are in the space of a representation of a snapshot.

    Raises:
        RefusedError: they are in another one.
        UsageError: the snapshot has no vectors.
    """
    space = snapshot.manifest.content.space_of(representation)
    if space is None:
        raise UsageError(f"snapshot {snapshot.id[:12]} has no vectors: reindex it with an encoder")
    check_same_space(encoder.space(), Space.from_json(space))
