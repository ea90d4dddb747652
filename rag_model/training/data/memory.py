"""The non-parametric memory of a RAG model in training: a snapshot's passages and their vectors.

The snapshot does not change. `read_passages` reads passages on workers. `rerank` sorts candidates
from an outdated index by vectors of the current passage encoder. `drop_source_passages` removes
candidates that contain the statement for which they were retrieved.
"""

import io
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import chain
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from rag_model.arrays import RowPartition
from rag_model.corpus.passages import PassageFile
from rag_model.corpus.records import Passage
from rag_model.encoders.encoder import Vectors
from rag_model.encoders.space import Space
from rag_model.errors import UsageError
from rag_model.evaluation.matching import AnswerMatcher
from rag_model.retrieve.dense import compute_inner_products
from rag_model.retrieve.factory import open_retriever
from rag_model.retrieve.hits import Hit
from rag_model.retrieve.retriever import Queries, QuestionEncoder
from rag_model.store.objects.blobs import BlobRef
from rag_model.store.recorded_tasks import OnProgress, PartTask, TaskRunner, run_tasks
from rag_model.store.store import Store
from rag_model.store.versions.manifest import passages_path
from rag_model.store.versions.snapshot import Snapshot
from rag_model.training.data.examples import deduplicate_passages

RankedRow = tuple[int, float]  # (row number in the snapshot, score by the retriever)
GROUP_SECONDS_PER_ROW = 5e-4  # seconds of one core to read the row group that contains a row
# A function that encodes m passages as (m, d) float32 vectors.
Encode = Callable[[Sequence[Passage]], Vectors]


@dataclass(frozen=True, slots=True)
class PassageTask(PartTask):
    """A task that reads some passages of one part of a snapshot."""

    rows: BlobRef  # .npy file of (r,) int32 rows of the part, ascending

    stage: ClassVar[str] = "passages"
    code: ClassVar[int] = 1

    def compute(self, store: Store) -> list[dict[str, Any]]:
        """Return the fields of each passage."""
        row_numbers = np.load(io.BytesIO(store.blobs.read(self.rows)), allow_pickle=False)
        with open_passages(store, self.file) as file:
            return [*map(asdict, file.read_rows(row_numbers.tolist()))]

    def estimate_seconds(self) -> float:
        """Return the estimated seconds to read the row groups that contain the rows."""
        return min(super(PassageTask, self).estimate_seconds(), self.rows.size / 4 * GROUP_SECONDS_PER_ROW)


def open_passages(store: Store, file: BlobRef) -> PassageFile:
    """Open the passages of a part; from an object store, only the needed byte ranges are read."""
    return PassageFile(store.blobs.get_local_path(file) if store.files.is_local else store.blobs.open(file))


def read_passages(
    snapshot: Snapshot,
    rows: Sequence[int],
    runner: TaskRunner | None = None,
    on_progress: OnProgress = lambda _, __: None,
) -> dict[int, Passage]:
    """Return passages by their row in the snapshot; `rows` must be distinct and ascending.

    `runner` reads them on workers, one task per part; if None, this process reads them.
    """
    store, files, tasks = snapshot.store, snapshot.manifest.content.files, list[PassageTask]()
    for part_index, _, local_rows in RowPartition(part.rows for part in snapshot.parts).split(np.array(rows, np.int64)):
        np.save(rows_buffer := io.BytesIO(), local_rows.astype(np.int32), allow_pickle=False)
        file = files[passages_path(snapshot.parts[part_index].name)]
        tasks.append(PassageTask(file, store.blobs.put_bytes(rows_buffer.getvalue())))
    passages = chain.from_iterable(run_tasks(store, tasks, runner, on_progress))
    return {row: Passage(**fields) for row, fields in zip(rows, passages, strict=True)}


@dataclass(frozen=True, slots=True)
class RetrievedBatch:
    """The k retrieved passages of each of b queries."""

    hits: list[list[Hit]]  # best first
    vectors: Vectors  # (b, k, d) float32, from the snapshot or from the encoder given to `rerank`

    @property
    def passages(self) -> list[list[Passage]]:
        """The passages of each query, without scores."""
        return [[hit.passage for hit in hits] for hits in self.hits]


class PassageMemory:
    """A retriever that returns passages with their stored vectors."""

    def __init__(self, snapshot: Snapshot, encoder: QuestionEncoder | None, retriever: str | None = None) -> None:
        """Open a retriever over a snapshot.

        Args:
            snapshot: the snapshot to search.
            encoder: the encoder that computes the query vectors for `retrieve`; None accepts
                vectors of any encoder, such as one that is trained together with the passage
                encoder.
            retriever: a retriever expression; None uses the snapshot's default.

        Raises:
            RefusedError: the vector space of the encoder is not that of the snapshot.
            UsageError: the snapshot has no vectors, the expression is wrong, or an index's metric
                is not the inner product.
        """
        self.snapshot = snapshot
        self._encoder: QuestionEncoder = _AnySpaceEncoder(snapshot) if encoder is None else encoder
        self._retriever = open_retriever(snapshot, retriever, embeddings_encoder=self._encoder)
        metrics = {index_entry.get("metric", "ip") for index_entry in snapshot.manifest.content.indexes.values()}
        if metrics - {"ip"}:
            raise UsageError(
                f"snapshot {snapshot.id[:12]} uses metric {min(metrics - {'ip'})}, and p(z|x) "
                "needs inner "
                'products: reindex it with metric = "ip"'
            )
        self._partition = RowPartition(part.rows for part in snapshot.parts)
        # The files are mapped into memory but not read.
        self._part_vectors = [snapshot.embeddings(part.name) for part in snapshot.parts]

    def retrieve(self, questions: Sequence[str], query_vectors: Vectors, k: int) -> RetrievedBatch:
        """Retrieve the best `k` passages of each question; `query_vectors` is (b, d) float32.

        If the corpus has fewer passages, all are returned. Inner products are exact; scores are
        those of the retriever. If the retriever returns fewer than k passages, further passages
        from the beginning of the snapshot are added with score 0, so that every question has k
        passages.
        """
        k = min(k, self.snapshot.n)
        hit_lists = self._retriever.search_queries(Queries.from_vectors(questions, self._encoder, query_vectors), k)
        hits = [self._pad_hits(query_hits, k) for query_hits in hit_lists]
        vectors = self.fetch_vectors(_list_hit_rows(hits))
        # (b, k, d), (b, d) -> (b, k)
        products = compute_inner_products(vectors, query_vectors).tolist()
        return RetrievedBatch(
            [_add_products(*hits_and_products) for hits_and_products in zip(hits, products, strict=True)], vectors
        )

    def find_rows(self, questions: Sequence[str], query_vectors: Vectors, k: int) -> npt.NDArray[np.int64]:
        """Return the (b, k) rows of the passages that `retrieve` returns, without reading them."""
        k = min(k, self.snapshot.n)
        self._retriever.check_depth(k)
        hit_rows = self._retriever.find(Queries.from_vectors(questions, self._encoder, query_vectors), k).rows
        row_lists = [query_rows[query_rows >= 0].tolist() for query_rows in hit_rows]
        return np.array([[*query_rows, *_choose_padding_rows(query_rows, k)] for query_rows in row_lists], np.int64)

    def fetch_rows(self, ranked_rows: Sequence[Sequence[RankedRow]]) -> RetrievedBatch:
        """Return the passages in the given rows of the snapshot; all queries must have the same
        number of rows.

        The hits of the result have no inner products.
        """
        passages = iter(self.snapshot.passages([row for query_rows in ranked_rows for row, _ in query_rows]))
        hits = [
            [Hit(rank, score, row, next(passages), "", "") for rank, (row, score) in enumerate(query_rows, start=1)]
            for query_rows in ranked_rows
        ]
        return RetrievedBatch(hits, self.fetch_vectors(_list_hit_rows(hits)))

    def fetch_vectors(self, rows: npt.NDArray[np.int64]) -> Vectors:
        """Return the (…, d) float32 vectors of (…) int64 rows of the snapshot."""
        unique_rows, inverse = np.unique(rows, return_inverse=True)
        unique_vectors = np.empty((len(unique_rows), self._part_vectors[0].shape[1]), np.float32)
        for part_index, span, part_rows in self._partition.split(unique_rows):
            unique_vectors[span] = self._part_vectors[part_index][part_rows]
        return unique_vectors[inverse.reshape(rows.shape)]  # (u, d) -> (…, d)

    def _pad_hits(self, hits: Sequence[Hit], k: int) -> list[Hit]:
        padding_rows = _choose_padding_rows([hit.row for hit in hits], k)
        passages = self.snapshot.passages(padding_rows) if padding_rows else []
        padding = [Hit(k, 0.0, row, passage, "", "") for row, passage in zip(padding_rows, passages, strict=True)]
        return [*hits, *padding]


def _choose_padding_rows(hit_rows: Sequence[int], k: int) -> list[int]:
    """Return the lowest rows that are not in `hit_rows`, as many as are needed for `k` in total."""
    return [row for row in range(k) if row not in hit_rows][: k - len(hit_rows)]


class _AnySpaceEncoder:
    """A placeholder encoder in the snapshot's space, for callers that always pass vectors."""

    def __init__(self, snapshot: Snapshot) -> None:
        self._snapshot = snapshot

    def space(self) -> Space:
        return Space.from_json(self._snapshot.space or {})

    def encode_questions(self, questions: Sequence[str]) -> Vectors:
        raise UsageError("this retriever has no question encoder: pass the vectors of the questions")


def _add_products(hits: Sequence[Hit], products: Sequence[float]) -> list[Hit]:
    return [replace(hit, inner_product=product) for hit, product in zip(hits, products, strict=True)]


def _list_hit_rows(hits: Sequence[Sequence[Hit]]) -> npt.NDArray[np.int64]:
    return np.array([[hit.row for hit in query_hits] for query_hits in hits], dtype=np.int64)


def rerank(candidates: RetrievedBatch, query_vectors: Vectors, encode: Encode, k: int) -> RetrievedBatch:
    """Return the best `k` candidates of each query by inner product with vectors from `encode`.

    `query_vectors` is (b, d) float32. Each passage is encoded once. Candidates with equal scores
    keep their order. The result has the vectors from `encode` and the new scores, best first.
    """
    passages, row_by_hash = deduplicate_passages(candidates.passages)
    # (b, c)
    rows = np.array([[row_by_hash[hit.passage.hash] for hit in hits] for hits in candidates.hits])
    vectors = encode(passages)[rows]  # (m, d) -> (b, c, d)
    scores = np.einsum("bd,bcd->bc", query_vectors, vectors)
    best_columns = np.argsort(-scores, axis=1, kind="stable")[:, :k]  # (b, k)
    reranked_rows = zip(candidates.hits, best_columns.tolist(), scores.tolist(), strict=True)
    reranked_hits = [
        [
            replace(hits[i], rank=rank, score=query_scores[i], inner_product=query_scores[i])
            for rank, i in enumerate(query_columns, start=1)
        ]
        for hits, query_columns, query_scores in reranked_rows
    ]
    return RetrievedBatch(reranked_hits, np.take_along_axis(vectors, best_columns[:, :, None], axis=1))


def drop_source_passages(candidates: RetrievedBatch, statements: Sequence[str]) -> tuple[list[int], RetrievedBatch]:
    """Remove the candidates that contain the statement for which they were retrieved, verbatim.

    Return the positions of the statements that still have a candidate, and the best candidates of
    each of these statements. All statements have the same number of candidates.
    """
    kept_columns = [
        [column for column, hit in enumerate(hits) if not AnswerMatcher((text,)).match(hit.passage.text)]
        for hits, text in zip(candidates.hits, statements, strict=True)
    ]
    kept_rows = [row for row, columns in enumerate(kept_columns) if columns]
    n_kept = min((len(kept_columns[row]) for row in kept_rows), default=0)
    hits = [[candidates.hits[row][column] for column in kept_columns[row][:n_kept]] for row in kept_rows]
    vectors = [candidates.vectors[row][kept_columns[row][:n_kept]] for row in kept_rows]
    return kept_rows, RetrievedBatch(hits, np.stack(vectors) if vectors else candidates.vectors[:0])
