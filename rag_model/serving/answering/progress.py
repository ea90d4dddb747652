"""Pass partial answers from a worker thread to the event loop that streams them.

Deltas that wait are joined, so a slow client never holds more than the answers themselves.
"""

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from rag_model.retrieve.hits import Hit


@dataclass(frozen=True, slots=True)
class RetrievedPassages:
    """The passages of the answers; they invalidate all deltas before them."""

    snapshot: str
    model: str
    hits: Sequence[Sequence[Hit]]  # of each question, best first


@dataclass(frozen=True, slots=True)
class AnswerDelta:
    """New text at the end of one answer."""

    question_index: int  # position of the question in its request
    text: str


class AnswerProgress:
    """The partial answers of one request.

    Create it and read it in one event loop; write to it from any thread.
    """

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._changed = asyncio.Event()
        self._passages: RetrievedPassages | None = None
        self._texts: dict[int, str] = {}
        self._is_finished = False

    def set_passages(self, passages: RetrievedPassages) -> None:
        """Record the passages and drop earlier deltas, as when a failed batch is repeated."""
        self._call_in_loop(self._store_passages, passages)

    def append_delta(self, delta: AnswerDelta) -> None:
        """Append text to an answer."""
        self._call_in_loop(self._store_delta, delta)

    def finish(self) -> None:
        """Mark the end of the updates; call it from the event loop's thread."""
        self._is_finished = True
        self._changed.set()

    async def wait_for_updates(self) -> Sequence[RetrievedPassages | AnswerDelta]:
        """Wait for updates and return them in order; [] after `finish`."""
        await self._changed.wait()
        updates: list[RetrievedPassages | AnswerDelta] = [] if self._passages is None else [self._passages]
        updates += [AnswerDelta(question_index, text) for question_index, text in self._texts.items()]
        self._passages, self._texts = None, {}
        if not self._is_finished:
            self._changed.clear()
        return updates

    def _store_passages(self, passages: RetrievedPassages) -> None:
        self._passages, self._texts = passages, {}
        self._changed.set()

    def _store_delta(self, delta: AnswerDelta) -> None:
        self._texts[delta.question_index] = self._texts.get(delta.question_index, "") + delta.text
        self._changed.set()

    def _call_in_loop(self, method: Callable[[Any], None], argument: object) -> None:
        with suppress(RuntimeError):  # the event loop has ended, and so have its callers
            self._loop.call_soon_threadsafe(method, argument)
