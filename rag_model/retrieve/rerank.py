"""Reranking: in `rerank(A, MODEL, 50)` a model reorders the first 50 passages that A finds.

A model that reads question and passage together (a cross-encoder) orders similar passages better than vectors do, and
costs one forward pass per pair: so it reads only the best passages of a cheaper retriever.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

import numpy as np

from rag_model.errors import InputError
from rag_model.index.files.engine import Vectors
from rag_model.retrieve.found import Found, SnapshotRetriever
from rag_model.retrieve.leg import Leg
from rag_model.retrieve.nodes import Call
from rag_model.retrieve.questions import Questions
from rag_model.retrieve.stored import model_files

if TYPE_CHECKING:
    from rag_model.retrieve.composer import Composer

DEPTH = 50  # passages that are read; beyond 100 they cost more than they find
_MOST = 1_000


class PairScorer(Protocol):
    """Says how well passages answer questions."""

    def scores(self, questions: Sequence[str], titles: Sequence[str], texts: Sequence[str]) -> Vectors:
        """Return (n,) float32 scores of n pairs, in order, finite; larger is better."""
        ...


class RerankedRetriever(SnapshotRetriever):
    """A `Retriever` that orders what a leg finds by the scores of a model. Its lists are never longer than `depth`."""

    def __init__(self, leg: Leg, scorer: PairScorer, model: str, depth: int = DEPTH) -> None:
        """Read the first `depth` passages of `leg` with `scorer`, which an expression calls `model`."""
        super().__init__(leg.retriever.snapshot, f"rerank({leg.name}, {model})")
        self.for_more = "or let it read more by its third argument, as in rerank(A, MODEL, 100)"
        self.exact_products = leg.retriever.exact_products
        self._leg, self._scorer, self._depth = leg, scorer, depth

    @property
    def most(self) -> int:
        """As many as are read."""
        return min(self._depth, self._leg.most)

    @property
    def files(self) -> Mapping[str, int]:
        """Those of the model."""
        return model_files(self._scorer)

    def find(self, asked: Questions, k: int) -> Found:
        """Find with the leg, and order by the model's scores; of rows that tie the smaller comes first.

        All pairs of all questions are scored in one call, so that the model can batch them by length.

        Raises:
            InputError: a score is not finite.
        """
        below = self._leg.find(asked, self._depth)
        read = below.cut(self._depth)
        passages = self.passages(read.rows, read.passages)
        kept = read.rows >= 0  # (q, depth)
        chosen = [passages[row] for row in read.rows[kept].tolist()]
        questions = np.repeat(np.arange(len(asked)), kept.sum(axis=1)).tolist()
        told = self._scorer.scores(
            [asked.texts[number] for number in questions],
            [passage.title for passage in chosen],
            [passage.text for passage in chosen],
        )
        if not np.isfinite(told).all():
            raise InputError(f"{self.name} gave a score that is not finite: its model is broken, fetch it again")
        scores = np.full(read.rows.shape, -np.inf, np.float32)
        scores[kept] = told
        order = np.lexsort((read.rows, -scores), axis=1)
        products = None if read.products is None else np.take_along_axis(read.products, order, 1)
        rows, scores = np.take_along_axis(read.rows, order, 1), np.take_along_axis(scores, order, 1)
        return Found(self.name, rows, scores, products, (below,), passages).cut(k)


def build(call: Call, composer: "Composer") -> SnapshotRetriever:
    """Build `rerank(A, MODEL, 50)`; MODEL is a folder, a hub name, or `model:NAME` of the store.

    Raises:
        UsageError: an argument is missing or wrong.
        InputError: MODEL is no cross-encoder.
    """
    call.check_options()
    if len(call.arguments) not in {2, 3}:
        raise call.wrong("rerank takes a retriever, a model and how many passages it reads: rerank(hnsw, MODEL, 50)")
    leg = composer.leg(call.arguments[0])
    depth = call.whole(2, DEPTH, 1, _MOST)
    model, scorer = composer.scorer(call.arguments[1])
    return RerankedRetriever(leg, scorer, model, depth)
