"""The events of a service: metrics and the monitor of quality are observers of them.

A subclass overrides the methods of the events that it needs. Calls come from several threads and delay the service, so
a method should return within microseconds; what it raises is logged and not passed on (`tell`).
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from rag_model.index.files.engine import Vectors
from rag_model.reading.answer import Answer
from rag_model.retrieve.retriever import Hit
from rag_model.serving.answering.edition import Edition, ServedRef
from rag_model.serving.threads import WatchedThread

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Batch:
    """Questions that were asked of one retriever together, on one edition."""

    edition: Edition  # open while the call lasts; for longer, take its `snapshot`
    retriever: str  # expression
    questions: Sequence[str]
    vectors: Vectors | None  # (q, d) float32, of `questions`; None: the retriever wants none
    ks: Sequence[int]
    hits: Sequence[Sequence[Hit]]  # of each question, best first
    encode_seconds: float
    search_seconds: float  # all but encoding: passages included


@dataclass(frozen=True, slots=True)
class Refusal:
    """A version that the ref names and that is not served."""

    ref: str
    number: int  # of the ref's move; 0: the ref itself could not be read
    snapshot: str  # what it names; "": unknown
    reason: str  # one sentence
    at: str  # ISO 8601, UTC: when it was refused last
    tries: int
    final: bool  # it is not tried again before the ref moves


class Observer:
    """An observer of the service; every method of this base class does nothing."""

    def asked(self, verb: str, questions: int, waiting: int) -> None:
        """Take note of a request (`search` or `answer`) in the queue, and of all questions that wait in it now."""

    def replied(self, verb: str, status: int, questions: int, seconds: float) -> None:
        """Take note of a reply of any status, and of the seconds since its body had arrived."""

    def searched(self, batch: Batch) -> None:
        """Take note of a batch; its edition may be gone a moment later."""

    def answered(self, edition: Edition, answers: Sequence[Answer]) -> None:
        """Take note of a batch of answers, each with the passages that it was read from."""

    def serves(self, edition: Edition, seconds: float) -> None:
        """Take note that an edition serves from now on, and how many seconds it took to bring it."""

    def renamed(self, edition: Edition, named: ServedRef) -> None:
        """Take note that the ref moved and names the same snapshot as before."""

    def freed(self, snapshot: str) -> None:
        """Take note that an edition's last reader left and its memory is free."""

    def withdrawn(self, snapshot: str) -> None:
        """Take note that a snapshot was taken down and is not served any more, and that none serves in its place."""

    def refused(self, refusal: Refusal) -> None:
        """Take note of a version that was refused."""

    def looked(self, problem: str) -> None:
        """Take note of a look at the ref; `problem` is one sentence, or empty where the store answered."""

    def died(self, thread: str) -> None:
        """Take note that a thread of the service died; it is started again."""

    @property
    def threads(self) -> Sequence[WatchedThread]:
        """The observer's own threads, which the service watches too."""
        return ()

    def close(self) -> None:
        """Stop watching."""


def tell(call: Callable[..., None], *facts: Any) -> None:
    """Call a method of an observer; what it raises is logged, and not raised in the service."""
    try:
        call(*facts)
    except BaseException:  # a panic too: a lost figure must not cost a caller its answer
        _LOG.exception("an observer of the service failed")
