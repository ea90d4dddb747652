"""Reranking: `rerank(A, MODEL, 50)` reorders the first 50 hits of A by the scores of a model.

A model that reads query and passage together (a cross-encoder) ranks similar passages better than
vectors do, but it costs one forward pass per pair. So it reads only the best hits of a cheaper
retriever.
"""

from collections.abc import Mapping

import numpy as np

from rag_model.errors import InputError
from rag_model.retrieve.expression import Call
from rag_model.retrieve.factory import RetrieverFactory
from rag_model.retrieve.models import PairScorer, list_model_files
from rag_model.retrieve.retriever import Leg, Queries, RankedRows, SnapshotRetriever

DEPTH = 50  # passages read per query; a depth beyond 100 costs more than it improves
_MAX_DEPTH = 1_000


class RerankedRetriever(SnapshotRetriever):
    """A `Retriever` that reranks the first `depth` hits of a leg by the scores of a model."""

    def __init__(self, leg: Leg, scorer: PairScorer, model: str, depth: int = DEPTH) -> None:
        """Read the first `depth` hits of `leg` with `scorer`, which an expression names `model`."""
        super().__init__(leg.retriever.snapshot, f"rerank({leg.name}, {model})")
        self.depth_advice = "or let it read more by its third argument, as in rerank(A, MODEL, 100)"
        self.exact_products = leg.retriever.exact_products
        self._leg, self._scorer, self._depth = leg, scorer, depth

    @property
    def most(self) -> int:
        """The number of passages that are read."""
        return min(self._depth, self._leg.most)

    @property
    def files(self) -> Mapping[str, int]:
        """The files of the model."""
        return list_model_files(self._scorer)

    def find(self, queries: Queries, k: int) -> RankedRows:
        """Search the leg, and rank its hits by the model's scores; ties by row.

        All pairs of all queries are scored in one call, so that the model can batch them by length.

        Raises:
            InputError: a score is not finite.
        """
        leg_rows = self._leg.find(queries, self._depth)
        candidates = leg_rows.truncate(self._depth)
        passages = self.read_passages(candidates.rows, candidates.passages)
        valid = candidates.rows >= 0  # (q, depth)
        pair_passages = [passages[row] for row in candidates.rows[valid].tolist()]
        pair_queries = np.repeat(np.arange(len(queries)), valid.sum(axis=1)).tolist()
        pair_scores = self._scorer.scores(
            [queries.texts[number] for number in pair_queries],
            [passage.title for passage in pair_passages],
            [passage.text for passage in pair_passages],
        )
        if not np.isfinite(pair_scores).all():
            raise InputError(f"{self.name} gave a score that is not finite: its model is broken, fetch it again")
        scores = np.full(candidates.rows.shape, -np.inf, np.float32)
        scores[valid] = pair_scores
        order = np.lexsort((candidates.rows, -scores), axis=1)
        products = None if candidates.products is None else np.take_along_axis(candidates.products, order, 1)
        rows, scores = np.take_along_axis(candidates.rows, order, 1), np.take_along_axis(scores, order, 1)
        return RankedRows(self.name, rows, scores, products, (leg_rows,), passages).truncate(k)


def build(call: Call, factory: RetrieverFactory) -> SnapshotRetriever:
    """Build `rerank(A, MODEL, 50)`; MODEL is a folder, a hub name, or `model:NAME` of the store.

    Raises:
        UsageError: an argument is missing or wrong.
    """
    call.check_options()
    if len(call.arguments) not in {2, 3}:
        raise call.error("rerank takes a retriever, a model and how many passages it reads: rerank(hnsw, MODEL, 50)")
    leg = factory.leg(call.arguments[0])
    depth = call.get_int(2, DEPTH, 1, _MAX_DEPTH)
    scorer = factory.scorer(call.arguments[1])
    return RerankedRetriever(leg, scorer, str(call.arguments[1]), depth)
