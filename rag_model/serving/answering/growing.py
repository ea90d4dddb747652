"""A request's answers while they grow: a worker thread puts in what is new, and an event loop takes it out.

Pieces that wait to be taken are joined, so a slow reader holds no more than the answers themselves.
"""

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from rag_model.retrieve.retriever import Hit


@dataclass(frozen=True, slots=True)
class Sources:
    """The passages that answers are going to be read from; what grew before them is void."""

    snapshot: str
    model: str
    hits: Sequence[Sequence[Hit]]  # of each question, best first


@dataclass(frozen=True, slots=True)
class Piece:
    """What an answer grew by."""

    place: int  # of the question in its request
    text: str


class Growing:
    """What is new of a request's answers. Make it and take from it in one event loop; put into it from any thread."""

    def __init__(self) -> None:
        """Begin with nothing."""
        self._loop = asyncio.get_running_loop()
        self._changed = asyncio.Event()
        self._sources: Sources | None = None
        self._texts: dict[int, str] = {}
        self._ended = False

    def found(self, sources: Sources) -> None:
        """Begin, or begin again: a batch that failed is repeated."""
        self._call(self._begin, sources)

    def grew(self, piece: Piece) -> None:
        """Add to an answer."""
        self._call(self._add, piece)

    def end(self) -> None:
        """Let the reader know that no more comes; of the loop's own thread."""
        self._ended = True
        self._changed.set()

    async def next(self) -> Sequence[Sources | Piece]:
        """Wait for something new and return it, in order; nothing once it has ended."""
        await self._changed.wait()
        found: list[Sources | Piece] = [] if self._sources is None else [self._sources]
        found += [Piece(place, text) for place, text in self._texts.items()]
        self._sources, self._texts = None, {}
        if not self._ended:
            self._changed.clear()
        return found

    def _begin(self, sources: Sources) -> None:
        self._sources, self._texts = sources, {}
        self._changed.set()

    def _add(self, piece: Piece) -> None:
        self._texts[piece.place] = self._texts.get(piece.place, "") + piece.text
        self._changed.set()

    def _call(self, put: Callable[[Any], None], given: object) -> None:
        with suppress(RuntimeError):  # the loop has ended, and its callers with it
            self._loop.call_soon_threadsafe(put, given)
