"""Measure the recall of live questions by exact search beside the service.

The gate measures an index on sentences of the corpus before it is published; users ask other questions. So a sample of
live questions is searched again over all vectors. The embeddings are read part by part, memory-mapped, on one thread of
the lowest priority that rests after each part: a corpus larger than memory takes longer, but does not slow the service.
An index of text that skips is compared with itself reading everything, one question after another.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Any, Protocol

import numpy as np

from rag_model.errors import BookwheelError
from rag_model.index.exact.scan import ExactIndex, best_of
from rag_model.index.files.engine import Metric, Rows, Vectors
from rag_model.index.kind import SkippingIndex
from rag_model.index.quality.recall import Recalls, recall_at
from rag_model.retrieve.indexes import open_index_of, represents
from rag_model.store.versions.paths import embeddings_path
from rag_model.store.versions.snapshot import Snapshot

_BEYOND = 10  # ranks below the last that counts, so that ties with it are seen


@dataclass(frozen=True, slots=True)
class Asked:
    """A question that was served."""

    question: Vectors | str  # (d,), or its text
    rows: Rows  # (k,) what was found, best first, -1 where there was less


class Truth(Protocol):
    """What an index is compared with."""

    def recalls(self, asked: Sequence[Asked], pause: Callable[[], bool]) -> Recalls | None:
        """Return the recall of each question at its own k, in [0, 1]; None if it was broken off.

        `pause` is called between steps of some milliseconds; False breaks the search off.

        Raises:
            InputError: a file is damaged, or a row of the corpus holds a NaN or an infinity.
        """
        ...


def truth_of(snapshot: Snapshot, index: str, parameters: Mapping[str, Any]) -> Truth | None:
    """Open what an index is compared with; None where files were not pulled, or its kind has nothing to offer.

    Args:
        snapshot: whose index it is.
        index: its name.
        parameters: of its search, in place of the snapshot's.
    """
    try:
        if represents(snapshot, index) == "vectors":
            return ExactVectors.of(snapshot, index)
        opened = open_index_of(snapshot, index)
    except BookwheelError:
        return None
    return EveryWord(opened, parameters) if isinstance(opened, SkippingIndex) else None


class EveryWord:
    """An index of text that reads everything for a question."""

    def __init__(self, index: SkippingIndex, parameters: Mapping[str, Any]) -> None:
        """Search with these parameters."""
        self._index, self._parameters = index, parameters

    def recalls(self, asked: Sequence[Asked], pause: Callable[[], bool]) -> Recalls | None:
        """Return 1 for a question with the same rows in the same order, else the share of equal ranks."""
        each = []
        for one in asked:
            assert isinstance(one.question, str)
            every = self._index.every([one.question], len(one.rows), **self._parameters)[0]
            each.append(float((every == one.rows).mean()))
            if not pause():
                return None
        return np.array(each)


class ExactVectors:
    """The vectors of one snapshot, to search without an index."""

    def __init__(self, parts: Sequence[ExactIndex]) -> None:
        """Search `parts`, in row order; `of` opens a snapshot's."""
        self._parts = parts
        self._starts = [0, *accumulate(part.n for part in parts)]

    @classmethod
    def of(cls, snapshot: Snapshot, index: str) -> "ExactVectors | None":
        """Open a snapshot's vectors, compared as `index` compares; None of an empty one.

        Raises:
            BookwheelError: they were not pulled, or cannot be read.
        """
        entries = snapshot.manifest.content.indexes
        metric: Metric = (entries.get(index) or next(iter(entries.values()), {})).get("metric", "ip")
        files = [snapshot.path(embeddings_path(part.name)) for part in snapshot.parts if part.rows]
        return cls([ExactIndex([file], metric) for file in files]) if files else None

    def recalls(self, asked: Sequence[Asked], pause: Callable[[], bool]) -> Recalls | None:
        """Return the recall of each question at its own k, in [0, 1]; None if it was broken off.

        Args:
            asked: questions; all of them are compared with a vector while it is at hand.
            pause: called after each part; False breaks the search off.

        Raises:
            InputError: a row of the corpus holds a NaN or an infinity.
        """
        vectors = np.stack([one.question for one in asked if not isinstance(one.question, str)])
        depth = min(self._starts[-1], max(len(one.rows) for one in asked) + _BEYOND)
        scores = np.empty((len(asked), 0), np.float32)
        rows = np.empty((len(asked), 0), np.int64)
        for start, part in zip(self._starts, self._parts, strict=False):
            found, local = part.search(vectors, min(depth, part.n))
            scores, rows = best_of(np.hstack([scores, found]), np.hstack([rows, local + start]), depth)
            if not pause():
                return None
        each = [
            recall_at(one.rows[None], true[None], score[None], len(one.rows), partial(self._score, vector))
            for one, vector, true, score in zip(asked, vectors, rows, scores, strict=True)
        ]
        return np.concatenate(each)

    def _score(self, vector: Vectors, queries: Rows, rows: Rows) -> Vectors:
        """Return the (1, k) exact scores of the rows found for the one question, (1, k)."""
        scores = np.full(rows.shape, -np.inf, np.float32)
        for start, part in zip(self._starts, self._parts, strict=False):
            own = (rows >= start) & (rows < start + part.n)
            if own.any():
                scores = np.where(own, part.score(vector[None], np.where(own, rows - start, -1)), scores)
        return scores
