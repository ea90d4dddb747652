"""Measure the recall of live questions by exact search.

The gate measures an index on sentences of the corpus before it is published, but users ask other
questions. Therefore a sample of live questions is repeated over all vectors. The memory-mapped
embeddings are scanned part by part, with a rest after each part: a corpus larger than memory takes
longer, but does not slow down the service. A text index that prunes postings is compared with its
own exhaustive search, one question after another.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Any, Protocol

import numpy as np

from rag_model.errors import BookwheelError
from rag_model.index.exact_search import ExactIndex, select_top_k
from rag_model.index.files.engine import Metric, Rows, Vectors
from rag_model.index.kind import PruningIndex
from rag_model.index.quality.results import Recalls, compute_recall
from rag_model.retrieve.indexes import open_index, representation_kind
from rag_model.store.versions.manifest import embeddings_path
from rag_model.store.versions.snapshot import Snapshot

_EXTRA_RANKS = 10  # ranks beyond k, so that ties with rank k count as hits


@dataclass(frozen=True, slots=True)
class SampledQuery:
    """A sampled live question and its hits."""

    question: Vectors | str  # (d,), or its text
    rows: Rows  # (k,) hits, best first; padded with -1


class GroundTruth(Protocol):
    """The exact search that an index is compared with."""

    def compute_recalls(self, queries: Sequence[SampledQuery], pause: Callable[[], bool]) -> Recalls | None:
        """Return the recall of each question at its own k, in [0, 1]; None if cancelled.

        `pause` is called between steps of some milliseconds; if it returns False, the search stops.

        Raises:
            InputError: A file is damaged, or a vector holds a NaN or an infinity.
        """
        ...


def open_ground_truth(snapshot: Snapshot, index: str, parameters: Mapping[str, Any]) -> GroundTruth | None:
    """Open the exact search for an index; None if its files were not pulled or its kind has nquery.

    Args:
        snapshot: The snapshot.
        index: The index's name.
        parameters: Search parameters that replace the snapshot's.
    """
    try:
        if representation_kind(snapshot, index) == "vectors":
            return ExactVectorSearch.from_snapshot(snapshot, index)
        index_reader = open_index(snapshot, index)
    except BookwheelError:
        return None
    return ExhaustiveTextSearch(index_reader, parameters) if isinstance(index_reader, PruningIndex) else None


class ExhaustiveTextSearch:
    """A text index that searches without pruning."""

    def __init__(self, index: PruningIndex, parameters: Mapping[str, Any]) -> None:
        """Search `index` with `parameters`."""
        self._index, self._parameters = index, parameters

    def compute_recalls(self, queries: Sequence[SampledQuery], pause: Callable[[], bool]) -> Recalls | None:
        """Return the share of ranks with the same row as in exhaustive search, for each
        question.
        """
        recalls = []
        for query in queries:
            assert isinstance(query.question, str)
            exact_rows = self._index.search_exhaustively([query.question], len(query.rows), **self._parameters)[0]
            recalls.append(float((exact_rows == query.rows).mean()))
            if not pause():
                return None
        return np.array(recalls)


class ExactVectorSearch:
    """Exact search over the vectors of a snapshot."""

    def __init__(self, parts: Sequence[ExactIndex]) -> None:
        """Search `parts`, which are in row order; `from_snapshot` opens them."""
        self._parts = parts
        self._starts = [0, *accumulate(part.n for part in parts)]

    @classmethod
    def from_snapshot(cls, snapshot: Snapshot, index: str) -> "ExactVectorSearch | None":
        """Open a snapshot's vectors with the metric of `index`; None if it has nquery.

        Raises:
            BookwheelError: They were not pulled, or cannot be read.
        """
        entries = snapshot.manifest.content.indexes
        metric: Metric = (entries.get(index) or next(iter(entries.values()), {})).get("metric", "ip")
        files = [snapshot.path(embeddings_path(part.name)) for part in snapshot.parts if part.rows]
        return cls([ExactIndex([file], metric) for file in files]) if files else None

    def compute_recalls(self, queries: Sequence[SampledQuery], pause: Callable[[], bool]) -> Recalls | None:
        """Return the recall of each question at its own k, in [0, 1]; None if cancelled.

        All questions are compared in one pass over the vectors. `pause` is called after each part;
        if it returns False, the search stops.

        Raises:
            InputError: A vector holds a NaN or an infinity.
        """
        vectors = np.stack([query.question for query in queries if not isinstance(query.question, str)])
        depth = min(self._starts[-1], max(len(query.rows) for query in queries) + _EXTRA_RANKS)
        scores = np.empty((len(queries), 0), np.float32)
        rows = np.empty((len(queries), 0), np.int64)
        for start, part in zip(self._starts, self._parts, strict=False):
            part_scores, part_rows = part.search(vectors, min(depth, part.n))
            scores, rows = select_top_k(np.hstack([scores, part_scores]), np.hstack([rows, part_rows + start]), depth)
            if not pause():
                return None
        recalls = [
            compute_recall(
                query.rows[None],
                exact_rows[None],
                exact_scores[None],
                len(query.rows),
                partial(self._score, vector),
            )
            for query, vector, exact_rows, exact_scores in zip(queries, vectors, rows, scores, strict=True)
        ]
        return np.concatenate(recalls)

    def _score(self, vector: Vectors, queries: Rows, rows: Rows) -> Vectors:
        """Return the (1, k) exact scores of (1, k) rows for one question's vector."""
        scores = np.full(rows.shape, -np.inf, np.float32)
        for start, part in zip(self._starts, self._parts, strict=False):
            is_in_part = (rows >= start) & (rows < start + part.n)
            if is_in_part.any():
                scores = np.where(
                    is_in_part,
                    part.score(vector[None], np.where(is_in_part, rows - start, -1)),
                    scores,
                )
        return scores
