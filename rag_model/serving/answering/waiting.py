"""The requests that wait for an answer: clients take turns, so that one who asks much delays the others little."""

import asyncio
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from rag_model.serving.answering.growing import Growing

_Reply = TypeVar("_Reply")


@dataclass(slots=True, eq=False)
class Ask(Generic[_Reply]):
    """One request."""

    questions: Sequence[str]
    k: int | None
    retriever: str | None  # an expression in one spelling; None: the default
    loop: asyncio.AbstractEventLoop
    reply: "asyncio.Future[_Reply]"
    client: str = ""  # who asks; equal clients share a turn
    growing: Growing | None = None  # is told what is found and written; None: the caller waits for the whole

    @property
    def left(self) -> bool:
        """Whether its caller does not wait any more. Safe among threads."""
        return self.reply.done()


class Waiting(Generic[_Reply]):
    """Asks by client: each client's own in order, one of each client in turn. Not safe among threads."""

    def __init__(self) -> None:
        """Begin with none."""
        self.questions = 0  # of all asks
        self._asks = 0
        self._turns: dict[str, deque[Ask[_Reply]]] = {}  # the first client is next

    def __len__(self) -> int:
        """Return how many asks there are."""
        return self._asks

    def add(self, ask: Ask[_Reply]) -> None:
        """Add an ask behind the others of its client."""
        self._turns.setdefault(ask.client, deque()).append(ask)
        self._count(ask, 1)

    def first(self) -> Ask[_Reply]:
        """Return the ask whose turn it is."""
        return next(iter(self._turns.values()))[0]

    def take(self) -> Ask[_Reply]:
        """Remove and return the ask whose turn it is; its client is the last one from now on."""
        client = next(iter(self._turns))
        own = self._turns.pop(client)
        ask = own.popleft()
        if own:
            self._turns[client] = own
        self._count(ask, -1)
        return ask

    def remove(self, ask: Ask[_Reply]) -> bool:
        """Remove an ask; False: it is not here."""
        own = self._turns.get(ask.client, ())
        if ask not in own:
            return False
        self._turns[ask.client].remove(ask)
        if not self._turns[ask.client]:
            del self._turns[ask.client]
        self._count(ask, -1)
        return True

    def of(self, client: str) -> int:
        """Return how many questions of a client wait."""
        return sum(len(ask.questions) for ask in self._turns.get(client, ()))

    def newest_of_most(self) -> Ask[_Reply]:
        """Return the newest ask of the client with most questions here."""
        return self._turns[max(self._turns, key=self.of)][-1]

    def _count(self, ask: Ask[_Reply], sign: int) -> None:
        self._asks += sign
        self.questions += sign * len(ask.questions)
