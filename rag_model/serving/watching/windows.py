"""Sliding windows over what one edition was asked and what it gave.

Different questions count once each, however often they come: many users with the same question are not a retrieval
collapse. Of a question only its digest, its vector and the ids of its passages are kept. Its text is kept only if
it was sampled, and until it was asked again: up to 32 texts.
"""

from collections import OrderedDict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import TypeVar

import numpy as np

from rag_model.errors import UsageError
from rag_model.evaluation.answers.collapse import Collapse, measure
from rag_model.index.files.engine import Vectors
from rag_model.index.quality.recall import Recalls, percentile5
from rag_model.retrieve.retriever import Hit
from rag_model.serving.watching.spotcheck import Asked

_WAITING = 32  # sampled questions that wait for exact search: one pass over the vectors serves them all


_Value = TypeVar("_Value")


@dataclass(frozen=True, slots=True)
class WatchSettings:
    """How closely the service is watched."""

    window: int = 500  # different questions that collapse and drift are measured over
    least: int = 50  # questions, or samples, below which no figure is given
    sample_every: int = 20  # one question in so many is asked again of all vectors
    samples: int = 200  # recalls that mean and 5th percentile are of: the percentile is then the tenth lowest
    share: float = 0.05  # of one core, at most, for exact search and all else that takes time

    def __post_init__(self) -> None:
        if min(self.window, self.least - 1, self.sample_every, self.samples) < 1 or not 0 < self.share <= 1:
            raise UsageError(f"windows are counts from 1, the least from 2, and a share is in (0, 1], not {self}")
        if self.least > min(self.window, self.samples):
            raise UsageError(f"windows of {self.window} and {self.samples} never hold {self.least}: lower `least`")


@dataclass(frozen=True, slots=True)
class Figures:
    """What is known at one moment; None: not yet, or nothing can be known of this snapshot."""

    collapse: Mapping[str, Collapse] = field(default_factory=dict)  # by verb: a model has a question encoder of its own
    recall_mean: float | None = None
    recall_p5: float | None = None
    drift: float | None = None  # `drift.Reference.distance`


@dataclass(slots=True)
class Windows:
    """The recent questions of one edition. Not safe among threads: `Quality` holds the lock."""

    settings: WatchSettings
    corpus: int  # passages in the snapshot
    drift: float | None = None
    _vectors: OrderedDict[bytes, Vectors] = field(default_factory=OrderedDict)  # by question
    _given: dict[str, OrderedDict[bytes, list[str]]] = field(default_factory=dict)  # by verb and question
    _waiting: list[Asked] = field(default_factory=list)
    _recalls: deque[float] = field(default_factory=deque)
    _tally: int = 0
    _since: int = 0  # questions since `renew`

    def add_given(self, verb: str, question: str, passages: Sequence[str]) -> None:
        """Take a question and the ids of the passages that it was given."""
        self._keep(self._given.setdefault(verb, OrderedDict()), question, list(passages))

    def add_searched(
        self, question: str, vector: Vectors | None, k: int, hits: Sequence[Hit], *, sampled: bool = True
    ) -> None:
        """Take a question, its (d,) vector, how many passages it asked for, and those it was given, best first.

        Without a vector it is sampled by its text; not `sampled`, it is not asked again of exact search.
        """
        self.add_given("search", question, [hit.passage.id for hit in hits])
        if vector is not None:
            self._keep(self._vectors, question, vector)
            self._since += 1
        self._tally += 1
        if sampled and self._tally % self.settings.sample_every == 0 and len(self._waiting) < _WAITING:
            rows = np.full(k, -1, np.int64)
            rows[: len(hits)] = [hit.row for hit in hits]
            self._waiting.append(Asked(question if vector is None else vector, rows))

    def renewed(self, times: int) -> bool:
        """Whether at least 1 / `times` of the window is new since `renew`."""
        return len(self._vectors) >= self.settings.least and self._since * times >= self.settings.window

    def renew(self) -> Vectors:
        """Return the (n, d) vectors in the window."""
        self._since = 0
        return np.stack(list(self._vectors.values()))

    @property
    def waiting(self) -> bool:
        """Whether questions wait for exact search."""
        return bool(self._waiting)

    def take_waiting(self) -> list[Asked]:
        """Return the questions that wait for exact search, and clear the list."""
        taken, self._waiting = self._waiting, []
        return taken

    def add_recalls(self, recalls: Recalls) -> None:
        """Add recalls measured by exact search; the oldest are dropped."""
        self._recalls.extend(recalls.tolist())
        while len(self._recalls) > self.settings.samples:
            self._recalls.popleft()

    def figures(self) -> Figures:
        """Return what is known now."""
        collapse = {
            verb: measure(list(given.values()), self.corpus)
            for verb, given in self._given.items()
            if len(given) >= self.settings.least
        }
        if len(self._recalls) < self.settings.least:
            return Figures(collapse, drift=self.drift)
        recalls = np.array(self._recalls)
        return Figures(collapse, float(recalls.mean()), percentile5(recalls), self.drift)

    def _keep(self, window: OrderedDict[bytes, _Value], question: str, value: _Value) -> None:
        name = blake2b(question.encode(errors="replace"), digest_size=16).digest()
        window[name] = value
        window.move_to_end(name)
        if len(window) > self.settings.window:
            window.popitem(last=False)
