"""The non-parametric memory of a RAG model in training: a snapshot's passages and their vectors, unchanged."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from rag_model.corpus.records import Passage
from rag_model.encoders.encoder import Vectors
from rag_model.encoders.space import Space
from rag_model.errors import UsageError
from rag_model.partition import Partition
from rag_model.retrieve.factory import open_retriever
from rag_model.retrieve.products import inner_products
from rag_model.retrieve.questions import QuestionEncoder, Questions
from rag_model.retrieve.retriever import Hit
from rag_model.store.versions.snapshot import Snapshot

Ranked = tuple[int, float]  # a global row, and its score by the retriever


@dataclass(frozen=True, slots=True)
class Recalled:
    """The retrieved passages of b questions: k passages each."""

    hits: list[list[Hit]]  # best first
    vectors: Vectors  # (b, k, d) float32, from the snapshot

    @property
    def passages(self) -> list[list[Passage]]:
        """The passages of each question."""
        return [[hit.passage for hit in some] for some in self.hits]


class Memory:
    """Finds passages for question vectors, and returns them with their vectors."""

    def __init__(self, snapshot: Snapshot, encoder: QuestionEncoder | None, retriever: str | None = None) -> None:
        """Open a retriever over a snapshot.

        Args:
            snapshot: that is searched.
            encoder: whose vectors will be given to `recall`; None: of any space, as of an encoder that learns beside
                the passages' own.
            retriever: an expression; None: the snapshot's default.

        Raises:
            RefusedError: the encoder asks into another space than the snapshot's.
            UsageError: the snapshot has no vectors, the retriever is wrong, or a metric is not the inner product.
        """
        self.snapshot = snapshot
        self._encoder: QuestionEncoder = _OfAnySpace(snapshot) if encoder is None else encoder
        self._retriever = open_retriever(snapshot, retriever, encoder=self._encoder)
        metrics = {entry.get("metric", "ip") for entry in snapshot.manifest.content.indexes.values()}
        if metrics - {"ip"}:
            raise UsageError(
                f"snapshot {snapshot.id[:12]} uses metric {min(metrics - {'ip'})}, and p(z|x) needs inner "
                'products: reindex it with metric = "ip"'
            )
        self._partition = Partition(part.rows for part in snapshot.parts)
        self._parts = [snapshot.embeddings(part.name) for part in snapshot.parts]  # mapped, not read

    def recall(self, questions: Sequence[str], asked: Vectors, k: int) -> Recalled:
        """Find the best `k` passages of each question, given its (b, d) float32 vector; all, if the corpus has fewer.

        Inner products are with the vectors themselves; scores are the retriever's own. If it finds fewer than k,
        passages from the first row on are added, with a score of 0, so that every question has k.
        """
        k = min(k, self.snapshot.n)
        found = self._retriever.ask(Questions.encoded(questions, self._encoder, asked), k)
        hits = [self._filled(some, k) for some in found]
        vectors = self.vectors(_rows(hits))
        products = inner_products(vectors, asked).tolist()  # (b, k, d), (b, d) -> (b, k)
        return Recalled([_with_products(*pair) for pair in zip(hits, products, strict=True)], vectors)

    def recalled(self, ranked: Sequence[Sequence[Ranked]]) -> Recalled:
        """Return passages by their global rows, equally many for every question; without inner products."""
        every = iter(self.snapshot.passages([row for some in ranked for row, _ in some]))
        hits = [
            [Hit(rank, score, row, next(every), "", "") for rank, (row, score) in enumerate(some, start=1)]
            for some in ranked
        ]
        return Recalled(hits, self.vectors(_rows(hits)))

    def vectors(self, rows: npt.NDArray[np.int64]) -> Vectors:
        """Return the vectors of global rows, (…) int64 in, (…, d) float32 out; each part is read in row order."""
        flat, inverse = np.unique(rows, return_inverse=True)
        found = np.empty((len(flat), self._parts[0].shape[1]), np.float32)
        for place, span, local in self._partition.split(flat):
            found[span] = self._parts[place][local]
        return found[inverse.reshape(rows.shape)]  # (u, d) -> (…, d)

    def _filled(self, hits: Sequence[Hit], k: int) -> list[Hit]:
        known = {hit.row for hit in hits}
        rows = [row for row in range(k) if row not in known][: k - len(hits)]
        passages = self.snapshot.passages(rows) if rows else []
        more = [Hit(k, 0.0, row, passage, "", "") for row, passage in zip(rows, passages, strict=True)]
        return [*hits, *more]


class _OfAnySpace:
    """Stands for an encoder whose vectors are always given."""

    def __init__(self, snapshot: Snapshot) -> None:
        self._snapshot = snapshot

    def space(self) -> Space:
        return Space.from_json(self._snapshot.space or {})

    def encode_questions(self, questions: Sequence[str]) -> Vectors:
        raise UsageError("no encoder is known here: give the questions' vectors")


def _with_products(hits: Sequence[Hit], products: Sequence[float]) -> list[Hit]:
    return [replace(hit, inner_product=product) for hit, product in zip(hits, products, strict=True)]


def _rows(hits: Sequence[Sequence[Hit]]) -> npt.NDArray[np.int64]:
    return np.array([[hit.row for hit in some] for some in hits], dtype=np.int64)
