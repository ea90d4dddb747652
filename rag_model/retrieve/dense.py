"""Retrieval by one index, which is searched by vectors, token vectors, weighted terms or text.

Retrieval with given query vectors needs no encoder and none of the optional packages.
`ProductRetriever` adds inner products to the hits of retrievers with other scores. A reader
computes p(z|x) as a softmax over the inner products of the query's vector with the passages'
vectors (Lewis et al. 2020, section 2.2). Fused or reranked scores cannot replace the inner
products.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Self

import numpy as np

from rag_model.errors import UsageError
from rag_model.index.files.engine import Vectors
from rag_model.index.kind import RepresentationType
from rag_model.retrieve.context import PassageVectors, QueryEncoder, RetrieverContext, load_snapshot_encoder
from rag_model.retrieve.hits import Hit
from rag_model.retrieve.indexes import get_index_sizes, get_representation_type, scores_are_products
from rag_model.retrieve.retriever import Queries, QuestionEncoder, RankedRows, SnapshotRetriever
from rag_model.store.versions.snapshot import Snapshot


class IndexRetriever(SnapshotRetriever):
    """A `Retriever` over one index of the snapshot, of any kind; the context opens it."""

    def __init__(self, context: RetrieverContext, index: str, parameters: Mapping[str, float] | None = None) -> None:
        """Search `index` with `parameters`, which override the snapshot's search parameters."""
        super().__init__(context.snapshot, index)
        self.index = index  # name of the index, without the search parameters that `name` may have
        self.parameters: Mapping[str, float] = parameters or {}
        self.exact_products = scores_are_products(context.snapshot.manifest.content.indexes, index)
        self._context = context

    @property
    def query_type(self) -> RepresentationType:
        """The type of query that the index takes: `vectors`, `tokens`, `sparse` or `text`."""
        return get_representation_type(self.snapshot, self.index)

    @property
    def files(self) -> Mapping[str, int]:
        """The sizes in bytes, by path, of the index file and of the vectors with which it
        reranks.
        """
        return get_index_sizes(self.snapshot, self.index)

    def find(self, queries: Queries, k: int) -> RankedRows:
        """Search the index with the encoded queries, or with their texts."""
        encoder = self._context.index_encoder(self.index)
        query_values = queries.texts if encoder is None else queries.vectors(encoder)
        scores, rows = self._context.index(self.index).search(query_values, k, **self.parameters)
        return RankedRows(self.name, rows, scores, scores if self.exact_products else None)


class DenseRetriever(IndexRetriever):
    """A `Retriever` over one index of vectors, which is searched by query or by vector."""

    def __init__(self, snapshot: Snapshot, encoder: QuestionEncoder | None = None, index: str | None = None) -> None:
        """Open an index; without `encoder` it can be searched by vector only.

        Args:
            snapshot: the snapshot to search.
            encoder: the encoder of the queries.
            index: name of an index of the snapshot, or `exact`; None: the snapshot's default.

        Raises:
            UsageError: the snapshot has no such index.
            RefusedError: the encoder's space differs from the snapshot's.
        """
        content = snapshot.manifest.content
        name = content.default_retriever if index is None else index
        if get_representation_type(snapshot, name) != "vectors":
            raise UsageError(f"index {name} is not searched by one vector per query: use open_retriever")
        context = RetrieverContext(snapshot)
        super().__init__(context, name)
        if encoder is not None:
            context.use_encoder(encoder, [content.representation_of(name)])
        self._has_encoder = encoder is not None
        context.index(name)

    @classmethod
    def from_snapshot(cls, snapshot: Snapshot, index: str | None = None) -> Self:
        """Open `index` with the question encoder of the snapshot.

        Raises:
            MissingExtraError: the model extra is not installed.
            StoreError: the snapshot has no question encoder.
            UsageError: the snapshot has no such index.
        """
        content = snapshot.manifest.content
        representation = content.representation_of(content.default_retriever if index is None else index)
        return cls(snapshot, load_snapshot_encoder(snapshot, representation), index)

    def find(self, queries: Queries, k: int) -> RankedRows:
        """Search the index by the vectors of the queries.

        Raises:
            UsageError: the retriever was opened without an encoder.
        """
        if not self._has_encoder:
            raise UsageError("this retriever has no encoder: give it one, or search by vector")
        return super().find(queries, k)

    def search_vectors(self, vectors: Vectors, k: int) -> list[list[Hit]]:
        """Return the best `k` passages for each of (q, d) float32 vectors, in order.

        Raises:
            UsageError: the vectors are not finite, their dimension differs from the snapshot's, or
                `k` is out of range.
        """
        self.check_depth(k)
        scores, hit_rows = self._context.index(self.index).search(vectors, k)
        return self.build_hits(RankedRows(self.name, hit_rows, scores, scores if self.exact_products else None))


class ProductRetriever(SnapshotRetriever):
    """A retriever that attaches to each hit of another retriever the inner product of the query's
    vector with the passage's.
    """

    exact_products = True

    def __init__(self, inner: SnapshotRetriever, encoder: QueryEncoder, vectors: PassageVectors) -> None:
        """Wrap `inner`; `encoder` encodes queries, and `vectors` reads the vectors of the hits."""
        super().__init__(inner.snapshot, inner.name)
        self._inner, self._encoder, self._vectors = inner, encoder, vectors

    @property
    def most(self) -> int:
        """The maximum number of passages of the inner retriever."""
        return self._inner.most

    def find(self, queries: Queries, k: int) -> RankedRows:
        """Search with the inner retriever, and compute the products."""
        ranked_rows = self._inner.find(queries, k)
        unique_rows = np.unique(ranked_rows.rows[ranked_rows.rows >= 0])
        vectors = self._vectors.read_rows(unique_rows)  # (m, d) float32
        products = np.zeros(ranked_rows.rows.shape, np.float32)
        for query_vector, rows, query_products in zip(
            self._encoder.encode(queries), ranked_rows.rows, products, strict=True
        ):
            is_hit = rows >= 0
            query_products[is_hit] = compute_inner_products(
                vectors[np.searchsorted(unique_rows, rows[is_hit])], query_vector
            )
        return replace(ranked_rows, products=products)


def compute_inner_products(vectors: Vectors, queries: Vectors) -> Vectors:
    """Return the (…, k) float32 inner products of (…, k, d) vectors and (…, d) queries.

    Readers and trainings both use this function, so that they compute the same p(z|x). The sums are
    in float64 because float32 sums depend on the order of addition, and a low temperature amplifies
    the difference.
    """
    products: Vectors = np.einsum("...kd,...d->...k", vectors, queries, dtype=np.float64).astype(np.float32)
    return products
