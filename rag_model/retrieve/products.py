"""Inner products of questions and passages, for retrievers whose scores are something else.

p(z|x) of a reader is a softmax over inner products of the question's vector with the passages' vectors (Lewis et al.
2020, section 2.2). A fused or reranked score is another quantity, so it is never used in their place.
"""

from dataclasses import replace

import numpy as np

from rag_model.index.files.engine import Vectors
from rag_model.index.files.vectors import VectorFiles
from rag_model.retrieve.dense import check_asks
from rag_model.retrieve.found import Found, SnapshotRetriever
from rag_model.retrieve.questions import QuestionEncoder, Questions
from rag_model.store.versions.paths import EMBEDDINGS


class WithProducts(SnapshotRetriever):
    """Another retriever, with inner products by the stored vectors."""

    exact_products = True

    def __init__(self, inner: SnapshotRetriever, encoder: QuestionEncoder) -> None:
        """Map the snapshot's vectors beside `inner`; `encoder` must be of their space.

        Raises:
            RefusedError: it is of another space.
            StoreError: the vectors were not pulled.
        """
        check_asks(encoder, inner.snapshot)
        super().__init__(inner.snapshot, inner.name)
        self._inner, self._encoder = inner, encoder
        self._files = VectorFiles(inner.snapshot.row_files(EMBEDDINGS))

    @property
    def most(self) -> int:
        """As many as the other."""
        return self._inner.most

    def find(self, asked: Questions, k: int) -> Found:
        """Find with the other, and multiply."""
        found = self._inner.find(asked, k)
        wanted = np.unique(found.rows[found.rows >= 0])
        taken = self._files.take(wanted)  # (m, d) float32
        products = np.zeros(found.rows.shape, np.float32)
        for vector, rows, line in zip(asked.vectors(self._encoder), found.rows, products, strict=True):
            kept = rows >= 0
            line[kept] = inner_products(taken[np.searchsorted(wanted, rows[kept])], vector)
        return replace(found, products=products)


def inner_products(vectors: Vectors, asked: Vectors) -> Vectors:
    """Return the inner products of (…, k, d) vectors with (…, d) questions, (…, k) float32, summed in float64.

    Readers and trainings both take these, so a passage has one p(z|x); float32 sums differ by their order, and a low
    temperature makes much of it.
    """
    found: Vectors = np.einsum("...kd,...d->...k", vectors, asked, dtype=np.float64).astype(np.float32)
    return found


def with_products(retriever: SnapshotRetriever, encoder: QuestionEncoder) -> SnapshotRetriever:
    """Return a retriever whose hits carry inner products: the same one if it gives them already."""
    return retriever if retriever.exact_products else WithProducts(retriever, encoder)
