"""The events of a service, which metrics and the quality monitor observe.

A subclass overrides the methods of the events that it needs. The methods are called by several
threads, which wait until they return, so they should return within microseconds. `notify` logs
exceptions of the methods and continues.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from rag_model.index.files.engine import Vectors
from rag_model.reading.answer import Answer
from rag_model.retrieve.hits import Hit
from rag_model.serving.answering.loaded_snapshot import LoadedSnapshot, ServedRef
from rag_model.serving.runtime import SupervisedThread

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class SearchBatch:
    """Questions that were searched in one batch, with the same retriever and snapshot."""

    loaded_snapshot: LoadedSnapshot  # may be closed after the call of the observer
    retriever: str  # expression of the retriever
    questions: Sequence[str]
    vectors: Vectors | None  # (q, d) float32 question vectors; None if not needed
    ks: Sequence[int | None]  # requested number of passages for each question; None: the retriever's default
    hits: Sequence[Sequence[Hit]]  # hits of each question, best first
    encode_seconds: float
    search_seconds: float  # the time of everything except encoding, including reading the passages


@dataclass(frozen=True, slots=True)
class Refusal:
    """A version that the ref names and that the service refused."""

    ref: str
    number: int  # number of the ref's log entry; 0: its record is unreadable
    snapshot: str  # id; "" if unknown
    reason: str  # why it was refused, in one sentence
    refused_at: str  # time of the last refusal; ISO 8601, UTC
    tries: int  # number of attempts to load the version
    final: bool  # whether it is tried again only after the ref has moved

    def to_json(self) -> dict[str, Any]:
        """Return the `refused` object of /snapshot."""
        return {
            "number": self.number,
            "snapshot": self.snapshot,
            "reason": self.reason,
            "at": self.refused_at,
            "tries": self.tries,
            "final": self.final,
        }


class Observer:
    """Base class of observers; its methods do nothing."""

    def on_queued(self, verb: str, n_questions: int, waiting: int) -> None:
        """Handle a new request in the queue of `verb` (`search` or `answer`).

        In this queue, `waiting` questions wait now.
        """

    def on_reply(self, verb: str, status: int, n_questions: int, seconds: float) -> None:
        """Handle a reply of any HTTP status, `seconds` after the request's body was complete."""

    def on_search(self, batch: SearchBatch) -> None:
        """Handle a batch of searches; its snapshot may be closed after the call."""

    def on_answer(self, loaded_snapshot: LoadedSnapshot, answers: Sequence[Answer]) -> None:
        """Handle a batch of answers, each with its passages."""

    def on_swap(self, loaded_snapshot: LoadedSnapshot, seconds: float) -> None:
        """Handle a switch to a new snapshot, which was loaded in `seconds`."""

    def on_same_snapshot_named(self, loaded_snapshot: LoadedSnapshot, served_ref: ServedRef) -> None:
        """Handle a move of the ref that names the same snapshot again."""

    def on_loaded(self, snapshot: str) -> None:
        """Handle the loading of a snapshot: a new current snapshot, or one that a request named."""

    def on_freed(self, snapshot: str) -> None:
        """Handle that the memory of a snapshot was freed, after its last reader."""

    def on_withdrawn(self, snapshot: str) -> None:
        """Handle that a snapshot was taken down without a replacement, and so is not served."""

    def on_refused(self, refusal: Refusal) -> None:
        """Handle the refusal of a version."""

    def on_poll(self, problem: str) -> None:
        """Handle a poll of the ref; `problem` is one sentence, or empty if the store answered."""

    def on_thread_death(self, thread: str) -> None:
        """Handle the death of a thread, which is restarted."""

    @property
    def threads(self) -> Sequence[SupervisedThread]:
        """The observer's threads, whose state `/readyz` includes."""
        return ()

    def close(self) -> None:
        """Stop observing."""


def notify(method: Callable[..., None], *arguments: Any) -> None:
    """Call a method of an observer, and log its exceptions instead of raising them."""
    try:
        method(*arguments)
    except BaseException:  # A Rust panic of a native library must not fail a request either.
        _LOG.exception("an observer of the service failed")
