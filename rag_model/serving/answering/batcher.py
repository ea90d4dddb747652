"""Answer concurrent questions in one call: requests wait in a bounded queue, and a thread takes them as a batch.

Clients take turns. Where the queue is full, the newest request of the client with most questions makes room for that of
a client with fewer.

A batch gathers while earlier batches are worked on. A thread that has just answered several requests waits a moment
for its share of those and of the ones being worked on: callers that were answered together tend to ask again together,
and batches of equal size waste the least. A single caller never waits. One sleeping thread is woken at a time, the
first that has enough to do: so who asks alone is always answered by the same thread, and no other wakes for it.
"""

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from typing import Generic, TypeVar

from rag_model.errors import BookwheelError
from rag_model.serving.answering.growing import Growing
from rag_model.serving.answering.waiting import Ask, Waiting
from rag_model.serving.threads import WatchedThread

_LOG = logging.getLogger(__name__)
_Reply = TypeVar("_Reply")


class BusyError(BookwheelError):
    """The queue is full: the same request may be taken in a moment."""


class LateError(BookwheelError):
    """The answer was not ready in time, and is no longer waited for."""


class ClosingError(BookwheelError):
    """The service is ending and takes no more questions."""


class CrashError(BookwheelError):
    """A library panicked while it worked on a request."""


class LeftError(BookwheelError):
    """All callers have left, so the work was given up."""


@dataclass(frozen=True, slots=True)
class _Sleeper:
    """A worker that sleeps."""

    wanted: int  # requests that it is woken for: waking costs more than one
    woken: threading.Condition


class Batcher(Generic[_Reply]):
    """Answers asks in batches, in threads of its own. `ask` belongs to an event loop, the rest to any thread."""

    def __init__(
        self,
        name: str,
        work: Callable[[Sequence[Ask[_Reply]]], Sequence[_Reply | BookwheelError]],
        *,
        waiting: int,
        batch: int,
        wait_ms: float = 0.0,
        workers: int = 1,
        begin: Callable[[], None] = lambda: None,
        alone: Callable[[], AbstractContextManager[None]] = nullcontext,
        died: Callable[[str], None] = lambda name: None,
    ) -> None:
        """Start the threads.

        Args:
            name: of the threads.
            work: gives a reply, or why there is none, for each ask of a batch, in order. A batch that fails as a
                whole is done again one by one, so no request fails because of another's question.
            waiting: questions in the queue, at most.
            batch: questions in a batch, at most; a single request may bring more.
            wait_ms: how long a batch waits for others, at most.
            workers: threads, each with a batch of its own.
            begin: called in each thread before anything else.
            alone: what a request is worked on within that has all threads to itself; only ever in the first thread.
            died: called with a thread's name when it died; it is started again.
        """
        self._work, self._most_waiting, self._most, self._wait = work, waiting, batch, wait_ms / 1000
        self._lock = threading.RLock()
        self._queue: Waiting[_Reply] = Waiting()
        self._alone = alone
        self._working = 0  # requests that are worked on
        self._workers = workers
        self._idle = 0  # workers that wait for a batch: they share what there is
        self._asleep: dict[int, _Sleeper] = {}  # by the worker's number
        self._waking = 0  # workers that were woken and have not run yet: each will take a request, or wake another
        self._closing = False
        self.threads = [WatchedThread(name, partial(self._run, number, begin), died) for number in range(workers)]
        for thread in self.threads:
            thread.start()

    @property
    def waiting(self) -> int:
        """How many questions are in the queue."""
        return self._queue.questions

    async def ask(
        self,
        questions: Sequence[str],
        k: int | None,
        retriever: str | None,
        seconds: float,
        entered: Callable[[int, int], None] = lambda questions, waiting: None,
        client: str = "",
        growing: Growing | None = None,
    ) -> _Reply:
        """Return the reply of one request, `seconds` from now at the latest.

        `entered` is told how many questions it brought into the queue, and how many wait there now. `client` says who
        asks: clients take turns. `growing` is for `work` to tell what it has before the reply.

        Raises:
            BusyError: the queue is full, or became full of questions of other clients that have fewer there.
            LateError: it took longer.
            ClosingError: `close` was called.
            BookwheelError: what `work` says of this ask.
        """
        loop = asyncio.get_running_loop()
        ask: Ask[_Reply] = Ask(questions, k, retriever, loop, loop.create_future(), client, growing)
        self._enter(ask)
        entered(len(questions), self._queue.questions)
        due = loop.call_later(seconds, self._give_up, ask, seconds)
        try:
            return await ask.reply
        except asyncio.CancelledError:
            self._leave(ask)
            raise
        finally:
            due.cancel()

    def close(self) -> None:
        """Take no more; return when all that was taken is answered."""
        with self._lock:
            self._closing = True
            for sleeper in self._asleep.values():
                sleeper.woken.notify()
        for thread in self.threads:
            thread.join()

    def _enter(self, ask: Ask[_Reply]) -> None:
        with self._lock:
            if self._closing:
                raise ClosingError("the service is shutting down: ask another instance")
            if self._queue and self._queue.questions + len(ask.questions) > self._most_waiting:
                self._make_room(ask)
            self._queue.add(ask)
            self._wake()

    def _make_room(self, ask: Ask[_Reply]) -> None:
        """Refuse the newest asks of the client that has most questions in the queue, which may be this one."""
        busy = BusyError(f"{self._queue.questions} questions are waiting already: ask again in a moment")
        own = self._queue.of(ask.client) + len(ask.questions)
        while self._queue and self._queue.questions + len(ask.questions) > self._most_waiting:
            last = self._queue.newest_of_most()
            if self._queue.of(last.client) <= own:
                raise busy
            self._queue.remove(last)
            _hand_out([last], [busy])

    def _give_up(self, ask: Ask[_Reply], seconds: float) -> None:
        self._leave(ask)
        if not ask.left:
            ask.reply.set_exception(_late(seconds))

    def _leave(self, ask: Ask[_Reply]) -> None:
        """Remove an ask whose caller has left from the queue, unless it is being worked on."""
        with self._lock:
            self._queue.remove(ask)

    def _run(self, number: int, begin: Callable[[], None]) -> None:
        begin()
        last = 0  # requests in this thread's last batch
        while asks := self._gathered(number, last):
            last = len(asks)
            try:
                with self._alone() if number == 0 and self._is_alone(asks) else nullcontext():
                    replies = self._replies(asks)
                _hand_out(asks, replies)
            except BaseException as failure:  # not of the work: callers must not wait for a thread that is gone
                with self._lock:
                    self._working -= last
                _hand_out(asks, [_crash(failure)] * last)
                raise
            del asks, replies

    def _is_alone(self, asks: Sequence[Ask[_Reply]]) -> bool:
        """Return whether there is one request, which is worked on."""
        return len(asks) == self._working == 1 and not self._queue

    def _gathered(self, number: int, last: int) -> list[Ask[_Reply]]:
        """Wait for asks and take what makes a batch; [] once closed and empty.

        `last` requests were answered just now, and are counted as if they would come again.
        """
        with self._lock:
            self._working -= last
            self._idle += 1
            try:
                taken = self._awaited(number, last)
                self._working += len(taken)
            finally:
                self._idle -= 1
            self._wake()  # for the rest
            return taken

    def _awaited(self, number: int, last: int) -> list[Ask[_Reply]]:
        taken: list[Ask[_Reply]] = []
        while not taken and (self._queue or not self._closing):  # another thread may have taken the asks
            while not self._enough(1):
                self._sleep(number, 1)
            wanted = -(-(self._working + last) // self._workers)  # so that all batches are of one size
            until = time.monotonic() + self._wait
            while not self._enough(wanted) and (rest := until - time.monotonic()) > 0:
                self._sleep(number, wanted, rest)
            taken = self._taken(min(self._most, -(-self._queue.questions // self._idle)))
        return taken

    def _sleep(self, number: int, wanted: int, seconds: float | None = None) -> None:
        self._wake()  # what this worker was woken for may be enough for another
        self._asleep[number] = sleeper = _Sleeper(wanted, threading.Condition(self._lock))
        try:
            sleeper.woken.wait(seconds)
        finally:
            if self._asleep.pop(number, None) is None:
                self._waking -= 1

    def _wake(self) -> None:
        """Wake the first of the workers that have enough to do, if one sleeps: one that wakes in vain delays others."""
        numbers = [number for number, sleeper in self._asleep.items() if self._enough(sleeper.wanted)]
        if len(self._queue) > self._waking and numbers:
            self._asleep.pop(min(numbers)).woken.notify()
            self._waking += 1

    def _taken(self, share: int) -> list[Ask[_Reply]]:
        """Take asks of `share` questions in all out of the queue, or the first one whatever it brings."""
        taken: list[Ask[_Reply]] = []
        size = 0
        while self._queue and (not taken or size + len(self._queue.first().questions) <= share):
            taken.append(self._queue.take())
            size += len(taken[-1].questions)
        return taken

    def _enough(self, wanted: int) -> bool:
        return len(self._queue) >= wanted or self._queue.questions >= self._most or self._closing

    def _replies(self, asks: Sequence[Ask[_Reply]]) -> Sequence[_Reply | Exception]:
        if all(ask.left for ask in asks):
            return [LeftError("its caller has left")] * len(asks)
        try:
            return self._work(asks)
        except BaseException as failure:  # a panic of a native library is no Exception
            if len(asks) > 1:
                return [reply for ask in asks for reply in self._replies([ask])]
            if not isinstance(failure, BookwheelError):
                _LOG.exception("%s failed", threading.current_thread().name)
            return [failure if isinstance(failure, Exception) else _crash(failure)]


def _late(seconds: float) -> LateError:
    return LateError(f"no answer within {seconds:g} s: ask fewer questions, or ask again later")


def _crash(failure: BaseException) -> CrashError:
    return CrashError(f"a library failed on this request ({type(failure).__name__}): ask in other words")


def _hand_out(asks: Sequence[Ask[_Reply]], replies: Sequence[_Reply | Exception]) -> None:
    for loop in {ask.loop for ask in asks}:
        own = [(ask, reply) for ask, reply in zip(asks, replies, strict=True) if ask.loop is loop]
        with suppress(RuntimeError):  # the loop has ended, and its callers with it
            loop.call_soon_threadsafe(_deliver, own)


def _deliver(replies: Sequence[tuple[Ask[_Reply], _Reply | Exception]]) -> None:
    for ask, reply in replies:
        if ask.reply.done():
            continue  # the caller has left
        if isinstance(reply, Exception):
            ask.reply.set_exception(reply)
        else:
            ask.reply.set_result(reply)
