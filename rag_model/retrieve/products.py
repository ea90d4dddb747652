"""Inner products of queries and passages, for retrievers whose scores are another quantity.

p(z|x) of a reader is a softmax over the inner products of the query's vector with the passages'
vectors (Lewis et al. 2020, section 2.2). A fused or reranked score must not replace them.
"""

from dataclasses import replace

import numpy as np

from rag_model.index.files.engine import Vectors
from rag_model.retrieve.context import PassageVectors, QueryEncoder
from rag_model.retrieve.retriever import Queries, RankedRows, SnapshotRetriever


class ProductRetriever(SnapshotRetriever):
    """A retriever that adds the inner products with the snapshot's vectors to the hits of another
    one.
    """

    exact_products = True

    def __init__(self, inner: SnapshotRetriever, encoder: QueryEncoder, vectors: PassageVectors) -> None:
        """Multiply the vectors of the queries by those of the hits of `inner`."""
        super().__init__(inner.snapshot, inner.name)
        self._inner, self._encoder, self._vectors = inner, encoder, vectors

    @property
    def most(self) -> int:
        """That of the inner retriever."""
        return self._inner.most

    def find(self, queries: Queries, k: int) -> RankedRows:
        """Search with the inner retriever, and compute the products."""
        ranked = self._inner.find(queries, k)
        unique_rows = np.unique(ranked.rows[ranked.rows >= 0])
        vectors = self._vectors.read_rows(unique_rows)  # (m, d) float32
        products = np.zeros(ranked.rows.shape, np.float32)
        for query_vector, rows, query_products in zip(
            self._encoder.encode(queries), ranked.rows, products, strict=True
        ):
            valid = rows >= 0
            query_products[valid] = inner_products(vectors[np.searchsorted(unique_rows, rows[valid])], query_vector)
        return replace(ranked, products=products)


def inner_products(vectors: Vectors, queries: Vectors) -> Vectors:
    """Return the (…, k) float32 inner products of (…, k, d) vectors with (…, d) queries, summed in
    float64.

    Readers and trainings both use this function, so that a passage has one p(z|x). The sums are in
    float64 because float32 sums depend on their order, and a low temperature amplifies the
    difference.
    """
    products: Vectors = np.einsum("...kd,...d->...k", vectors, queries, dtype=np.float64).astype(np.float32)
    return products
