"""Retrieval by one index: by the vectors, token vectors, weighted terms or texts of the queries."""

from collections.abc import Mapping

from rag_model.index.kind import RepresentationType, TextIndex
from rag_model.retrieve.context import RetrieverContext
from rag_model.retrieve.indexes import index_file_sizes, representation_kind, scores_are_products
from rag_model.retrieve.retriever import Queries, RankedRows, SnapshotRetriever
from rag_model.store.versions.snapshot import Snapshot


class IndexRetriever(SnapshotRetriever):
    """A `Retriever` over one index of the snapshot, of any kind; the context opens it."""

    def __init__(self, context: RetrieverContext, index: str, parameters: Mapping[str, float] | None = None) -> None:
        """Search `index` with search parameters, which override those of the snapshot."""
        super().__init__(context.snapshot, index)
        self.index = index  # unlike `name` without search parameters
        self.parameters: Mapping[str, float] = parameters or {}
        self.exact_products = scores_are_products(context.snapshot.manifest.content.indexes, index)
        self._context = context

    @property
    def query_type(self) -> RepresentationType:
        """The type of query that the index takes: `vectors`, `tokens`, `sparse` or `text`."""
        return representation_kind(self.snapshot, self.index)

    @property
    def files(self) -> Mapping[str, int]:
        """The file of the index, and the vectors that it reranks by."""
        return index_file_sizes(self.snapshot, self.index)

    def find(self, queries: Queries, k: int) -> RankedRows:
        """Search the index by the encoded queries, or by their texts."""
        encoder = self._context.index_encoder(self.index)
        encoded = queries.texts if encoder is None else queries.vectors(encoder)
        scores, rows = self._context.index(self.index).search(encoded, k, **self.parameters)
        return RankedRows(self.name, rows, scores, scores if self.exact_products else None)


class TextRetriever(SnapshotRetriever):
    """A `Retriever` over an index that is searched by text and does not belong to the snapshot."""

    def __init__(self, snapshot: Snapshot, name: str, index: TextIndex) -> None:
        """Search an index over the passages of `snapshot`, which expressions and hits call
        `name`.
        """
        super().__init__(snapshot, name)
        self._index = index

    def find(self, queries: Queries, k: int) -> RankedRows:
        """Search the index by the texts of the queries."""
        scores, rows = self._index.search(queries.texts, k)
        return RankedRows(self.name, rows, scores)
